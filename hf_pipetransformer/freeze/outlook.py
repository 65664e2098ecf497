"""What may freeze and thaw in a run, said before it begins."""

from __future__ import annotations

from hf_pipetransformer.freeze.policies import DecisionClock, FreezePolicy, FreezeSignal, held


NUM_SHOWN = 4


def outlook(
    policy: FreezePolicy,
    clock: DecisionClock,
    num_layers: int,
    num_frozen: int,
    min_active_layers: int,
    num_frozen_by_user: int = 0,
) -> list[tuple[int, int]]:
    """When a run may freeze, and how far at most: optimizer step and layers frozen from then on, for each decision.

    Args:
        policy: decides.
        clock: of the run.
        num_layers: L.
        num_frozen: layers that are frozen at the start.
        min_active_layers: see the option.
        num_frozen_by_user: layers that the script froze.
    """
    found: list[tuple[int, int]] = []
    wanted = float(num_frozen)
    for step in policy.due_steps(clock):
        signal = FreezeSignal(
            step, clock.max_steps, num_layers, num_frozen, wanted, num_frozen_by_user=num_frozen_by_user
        )
        if len(found) >= policy.num_watched:
            most = float(policy.most_wanted(signal))
            wanted = most if policy.may_thaw else max(wanted, most)
        num_frozen = held(policy, wanted, signal, min_active_layers)
        found.append((step, num_frozen))
    return found


def in_words(
    coming: list[tuple[int, int]],
    num_layers: int,
    num_frozen: int,
    max_steps: int,
    steps_per_epoch: int,
    num_watched: int = 0,
    may_thaw: bool = False,
) -> str:
    """An outlook in a sentence, and one more where stored activations can never be read.

    Args:
        coming: from `outlook`.
        num_layers: L.
        num_frozen: layers that are frozen at the start.
        max_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps of an epoch.
        num_watched: decisions at which the policy only looks.
        may_thaw: whether the policy may thaw what it froze, at steps that are not known.
    """
    if all(frozen <= num_frozen for _, frozen in coming):
        why = f"no decision falls into its {max_steps} steps" if not coming else "all others must stay active"
        if 0 < len(coming) <= num_watched:
            why = f"the policy needs {num_watched + 1} decisions, and {len(coming)} fall into its {max_steps} steps"
        return f"No layer freezes in this run: {why} (freeze_interval, freeze_warmup, freeze_min_active_layers)."
    before = [num_frozen, *(frozen for _, frozen in coming)]
    thawing = [step for (step, frozen), earlier in zip(coming, before, strict=False) if frozen < earlier]
    shown = ", ".join(
        f"{frozen} from step {step} on{' (unfrozen)' if step in thawing else ''}"
        for step, frozen in coming[:NUM_SHOWN]
    )
    rest = f", {coming[-1][1]} in the end" if len(coming) > NUM_SHOWN else ""
    text = f"Of {num_layers} layers at most {shown}{rest} are frozen, in a run of {max_steps} steps."
    if may_thaw and not thawing:
        text += " They may be unfrozen again."
    # From a decision on rows are stored, and read until some of what gave them is thawed.
    spans = [
        next((end for end, fewer in coming[index:] if fewer < frozen), max_steps) - step
        for index, (step, frozen) in enumerate(coming)
        if frozen
    ]
    if all(span <= steps_per_epoch for span in spans):
        text += " No later epoch reads what would be stored then: the activation cache gains nothing."
    return text
