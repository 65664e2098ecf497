"""What may freeze in a run, said before it begins."""

from __future__ import annotations

from hf_pipetransformer.freeze.policies import DecisionClock, FreezePolicy, FreezeSignal, held


NUM_SHOWN = 4


def outlook(
    policy: FreezePolicy, clock: DecisionClock, num_layers: int, num_frozen: int, min_active_layers: int
) -> list[tuple[int, int]]:
    """When a run may freeze, and how far at most: optimizer step and layers frozen from then on, for each decision.

    Args:
        policy: decides.
        clock: of the run.
        num_layers: L.
        num_frozen: layers that are frozen at the start.
        min_active_layers: see the option.
    """
    found: list[tuple[int, int]] = []
    wanted = float(num_frozen)
    for step in range(clock.max_steps):
        if policy.is_due(step, clock):
            signal = FreezeSignal(step, clock.max_steps, num_layers, num_frozen, wanted)
            if len(found) >= policy.num_watched:
                wanted = max(wanted, float(policy.most_wanted(signal)))
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
) -> str:
    """An outlook in a sentence, and one more where stored activations can never be read.

    Args:
        coming: from `outlook`.
        num_layers: L.
        num_frozen: layers that are frozen at the start.
        max_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps of an epoch.
        num_watched: decisions at which the policy only looks.
    """
    freezing = next((step for step, frozen in coming if frozen > num_frozen), None)
    if freezing is None:
        why = f"no decision falls into its {max_steps} steps" if not coming else "all others must stay active"
        if 0 < len(coming) <= num_watched:
            why = f"the policy needs {num_watched + 1} decisions, and {len(coming)} fall into its {max_steps} steps"
        return f"No layer freezes in this run: {why} (freeze_interval, freeze_warmup, freeze_min_active_layers)."
    shown = ", ".join(f"{frozen} from step {step} on" for step, frozen in coming[:NUM_SHOWN])
    rest = f", {coming[-1][1]} in the end" if len(coming) > NUM_SHOWN else ""
    text = f"Of {num_layers} layers at most {shown}{rest} are frozen, in a run of {max_steps} steps."
    if freezing + steps_per_epoch >= max_steps:
        text += " No later epoch reads what would be stored then: the activation cache gains nothing."
    return text
