"""Built-in freeze policies, and the forecast of a run's freezes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.freeze.policy import (
    GRADIENT_NORMS,
    DecisionClock,
    FreezePolicy,
    FreezeSignal,
    held,
    make_clock,
    rounded_up,
)
from hf_pipetransformer.options.reading import parse_freeze_at
from hf_pipetransformer.planning.course import Freezing, Span, spans_of


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


class CertainPolicy(FreezePolicy):
    """Policy that measures nothing: what it may freeze at most it freezes."""

    needs = frozenset()
    is_certain = True

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return self.most_wanted(signal)


class Schedule(CertainPolicy):
    """Upper bound of Eq. 1 alone: each decision freezes the share alpha, in (0, 1), of the remaining layers."""

    name = "schedule"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def most_wanted(self, signal: FreezeSignal) -> float:
        return signal.target_num_frozen + self.alpha * (signal.num_layers - signal.target_num_frozen)

    def describe(self) -> str:
        return f"{self.name}, alpha {self.alpha:.3g}"

    def explain(self, signal: FreezeSignal) -> str:
        share = {1 / 3: "a third", 1 / 2: "half", 1 / 4: "a quarter"}.get(self.alpha, f"{self.alpha:.3g}")
        wanted, left = signal.target_num_frozen, signal.num_layers - signal.target_num_frozen
        part = f"{share} of {left:.3g}" if not wanted else f"{wanted:.3g} and {share} of the other {left:.3g}"
        return f"{self.name}: limit {rounded_up(self.most_wanted(signal))} layers ({part})"


class GradientNorm(Schedule):
    """Eq. 1: the bound of `Schedule`, or the layer with the smallest gradient norm if that comes first.

    Rule "exclusive" freezes the layers before the one with the smallest norm (Appendix B, Figure 18), "inclusive" that
    one too.
    """

    name = "gradient_norm"
    needs = frozenset({GRADIENT_NORMS})
    is_certain = False

    def __init__(self, alpha: float, rule: str) -> None:
        super().__init__(alpha)
        self.rule = rule

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        # No step had finite gradients: the next decision may know more.
        if not signal.gradient_norms:
            return signal.target_num_frozen
        smallest = self.smallest(signal)
        limit = smallest if self.rule == "exclusive" else min(smallest + 1, signal.num_layers)
        return min(self.most_wanted(signal), float(limit))

    @staticmethod
    def smallest(signal: FreezeSignal) -> int:
        """Return the active layer with the smallest nonzero gradient norm, or L (the head); L if all norms are 0."""
        norms = signal.gradient_norms
        # A norm of exactly 0 is that of a layer without trained weights (frozen by the script, or without an adapter).
        candidates = [index for index in range(signal.num_frozen, signal.num_layers + 1) if norms[index]]
        return min(candidates or [signal.num_layers], key=lambda index: norms[index])

    def describe(self) -> str:
        return f"{super().describe()}, {self.rule}"

    def explain(self, signal: FreezeSignal) -> str:
        if not signal.gradient_norms:
            return f"{self.name}: no gradient was finite"
        smallest = self.smallest(signal)
        where = "the head" if smallest == signal.num_layers else f"layer {smallest + 1} of {signal.num_layers}"
        return f"{super().explain(signal)}; smallest gradient norm in {where}"


class Fixed(CertainPolicy):
    """Freezing and unfreezing by a table from optimizer step to the number of layers frozen before that step.

    The table may have shares of the run and of the layers in place of numbers; `check` rounds them.
    """

    name = "fixed"
    # The user has said how many: a minimum would contradict.
    keeps_minimum = False

    def __init__(self, table: Mapping[int | Fraction, int | Fraction] | Mapping[int, int]) -> None:
        self._asked: dict[int | Fraction, int | Fraction] = dict(sorted(table.items()))
        wanted = list(self._asked.values())
        # An entry below the one before it unfreezes layers.
        self.may_unfreeze = wanted != sorted(wanted)
        is_known = not any(isinstance(value, Fraction) for entry in self._asked.items() for value in entry)
        self.table = {int(step): int(layers) for step, layers in self._asked.items()} if is_known else {}
        """From steps to numbers of layers; empty until `check` knows what shares are of."""

    def most_wanted(self, signal: FreezeSignal) -> float:
        return self._at(signal.step, signal.num_frozen)

    def _at(self, step: int, default: int) -> int:
        """Return the number of layers of the latest entry at or before a step."""
        return next((layers for at, layers in reversed(self.table.items()) if at <= step), default)

    def is_overdue(self, step: int, num_frozen: int, num_frozen_by_user: int = 0) -> bool:
        # A run that goes on may follow another table than the one that was saved.
        return max(self._at(step, num_frozen), num_frozen_by_user) != num_frozen

    def frozen_until(self, step: int, max_steps: int, num_frozen_by_user: int = 0) -> int:
        num_frozen = max(self._at(step, 0), num_frozen_by_user)
        later = ((at, max(layers, num_frozen_by_user)) for at, layers in self.table.items() if at > step)
        ends = (at for at, layers in later if layers < num_frozen)
        return min(next(ends, max_steps), max_steps)

    def check(self, num_layers: int, max_steps: int) -> list[str]:
        # Here, as the constructor knows neither the length of the run nor the number of layers.
        self.table = {_rounded(step, max_steps): _rounded(layers, num_layers) for step, layers in self._asked.items()}
        most = max(self.table.values())
        if most > num_layers:
            raise ValueError(
                f"freeze_layers or freeze_at freezes {most} layers: the model has {num_layers}. Freeze at most these, "
                "or a share such as 1/2."
            )
        # A warning and no error: a run that is cut short by max_steps may have the table of the long one.
        late = next((step for step in self.table if step >= max_steps), None)
        if late is None:
            return []
        return [f"freeze_at: the run ends after {max_steps} steps, before step {late} freezes or unfreezes anything."]

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return step in self.table

    def due_steps(self, clock: DecisionClock) -> Iterable[int]:
        # A subclass with times of its own does not decide by the table.
        if type(self).is_due is not Fixed.is_due:
            return super().due_steps(clock)
        return (step for step in self.table if step < clock.max_steps)

    def why_nothing_freezes(self, num_decisions: int, max_steps: int) -> str:
        if num_decisions:
            return "freeze_at asks for no more"
        return f"no step of freeze_at falls into its {max_steps} steps"

    def describe(self) -> str:
        parts = []
        for step, layers in self._asked.items():
            what = f"{layers} of the layers" if isinstance(layers, Fraction) else f"{layers} layers"
            parts.append(f"{what} at {f'{step} of the run' if isinstance(step, Fraction) else f'step {step}'}")
        return f"fixed, {', '.join(parts)}"


def _rounded(value: int | Fraction, whole: int) -> int:
    """Return a share as a number of the whole, and a number as it is."""
    return round(whole * value) if isinstance(value, Fraction) else value


class Auto(CertainPolicy):
    """Half of the layers from the first step in runs of 2 or 3 epochs and at most 200 steps, nothing in others.

    This has paid off in most such runs of the project's own study, and cost nothing that its intervals show in the
    others (docs/recipes/prefix.md): in one epoch no stored activation is read again, and in longer runs training
    everything ends higher, by epochs or by steps.
    """

    name = "auto"
    keeps_minimum = False
    epochs = (2, 3)
    """Length of the shortest and the longest run in which it freezes."""
    most_steps = 200
    """Optimizer steps of the longest one: the study's gains are those of up to 189, and runs of 400 lose."""

    def most_wanted(self, signal: FreezeSignal) -> float:
        return signal.num_layers // 2

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        least, most = self.epochs
        # Rounded, as the quotient of steps may miss a whole number of epochs by a rounding error.
        return step == 0 and least <= round(clock.num_epochs, 6) <= most and clock.max_steps <= self.most_steps

    def due_steps(self, clock: DecisionClock) -> Iterable[int]:
        return range(int(self.is_due(0, clock)))

    def why_nothing_freezes(self, num_decisions: int, max_steps: int) -> str:
        least, most = self.epochs
        return f"freeze_policy='auto' freezes in runs of {least} to {most} epochs and at most {self.most_steps} steps"

    def describe(self) -> str:
        least, most = self.epochs
        return f"auto, half of the layers in runs of {least} to {most} epochs and at most {self.most_steps} steps"


MEASURED = (
    "Measured in runs of 2 or 3 epochs and 96 to 189 steps with half of the layers frozen from the start and stored "
    "(freeze_policy='auto'): 0.6 to 8.5 points above full fine-tuning of equal time in all 7 settings that it was "
    "chosen on, 1.3 to 10.6 with twice the learning rate; 1.1 [-2.2, 4.5] and 1.4 [-1.7, 4.6] on 2 others; 0.4 and "
    "4.2 points below it in runs of 400 steps (docs/recipes/prefix.md)."
)


class NoFreezing(FreezePolicy):
    """No freezing: everything that the user left trainable is trained to the end."""

    name = "none"
    needs = frozenset()
    freezes = False

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return signal.num_frozen

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return False


def make_policy(args: PipeTransformerArguments) -> FreezePolicy:
    """Return the policy that the options select.

    Raises:
        ValueError: unknown name, or `freeze_at` missing or malformed.
    """
    makers: dict[str, Callable[[], FreezePolicy]] = {
        "gradient_norm": lambda: GradientNorm(args.freeze_alpha, args.freeze_rule),
        "schedule": lambda: Schedule(args.freeze_alpha),
        "fixed": lambda: Fixed(parse_freeze_at(args.freeze_at or "")),
        "auto": Auto,
        "none": NoFreezing,
    }
    if args.freeze_policy not in makers:
        raise ValueError(f"Unknown freeze policy {args.freeze_policy!r}.")
    return makers[args.freeze_policy]()


# A line of the log names so many decisions, and the last one.
NUM_SHOWN = 4


def outlook(
    policy: FreezePolicy,
    clock: DecisionClock,
    num_layers: int,
    num_frozen: int,
    min_active_layers: int,
    num_frozen_by_user: int = 0,
) -> list[tuple[int, int]]:
    """Return, for each decision of a run, its optimizer step and the most layers that can be frozen from then on.

    `num_frozen` counts the layers frozen at the start, `num_frozen_by_user` those that the script froze.
    """
    found: list[tuple[int, int]] = []
    wanted = float(num_frozen)
    for step in policy.due_steps(clock):
        signal = FreezeSignal(
            step, clock.max_steps, num_layers, num_frozen, wanted, num_frozen_by_user=num_frozen_by_user
        )
        # Decisions that only observe are listed too: the sentence on why nothing freezes counts them.
        if len(found) >= policy.num_watched:
            most = float(policy.most_wanted(signal))
            wanted = most if policy.may_unfreeze else max(wanted, most)
        num_frozen = held(policy, wanted, signal, min_active_layers)
        found.append((step, num_frozen))
    return found


def coming_spans(
    policy: FreezePolicy, clock: DecisionClock, num_layers: int, num_frozen: int, min_active_layers: int
) -> list[Span]:
    """Split a run into spans by the largest number of frozen layers; `policy` must not unfreeze.

    The number is exact if `policy.is_certain`.
    """
    coming = outlook(policy, clock, num_layers, num_frozen, min_active_layers)
    return spans_of(coming, num_frozen, clock.max_steps)


def freezing_of(
    policy: FreezePolicy, args: Any, num_layers: int, num_frozen: int, length: tuple[int, int]
) -> tuple[Freezing | None, str, str]:
    """Return what a policy may freeze in a run, what to say where that is None, and what was measured of such runs.

    Args:
        args: `PipeTransformerArguments`.
        num_frozen: number of leading layers that the script froze.
        length: optimizer steps of the run and of an epoch.
    """
    num_steps, steps_per_epoch = length
    clock = make_clock(args.freeze_interval, args.freeze_warmup, steps_per_epoch, num_steps)
    measured = MEASURED if Auto().is_due(0, clock) else ""
    if not policy.freezes:
        return None, "Nothing freezes with these options (freeze_policy), so nothing is cached.", measured
    # A forecast takes a number of frozen layers that only grows.
    if policy.may_unfreeze:
        return None, "The policy may unfreeze layers: what it saves is not predicted.", ""
    spans = tuple(coming_spans(policy, clock, num_layers, num_frozen, args.freeze_min_active_layers))
    freezing = Freezing(policy.describe(), spans, policy.is_certain)
    # What was measured is said only of runs that do the same, by whatever policy.
    is_alike = [span.num_frozen for span in spans] == [num_layers // 2]
    return freezing, "", measured if is_alike else ""


def describe_outlook(
    policy: FreezePolicy,
    coming: list[tuple[int, int]],
    num_layers: int,
    num_frozen: int,
    max_steps: int,
    steps_per_epoch: int,
) -> str:
    """Describe `coming`, from `outlook`, in a sentence; add one if stored activations can never be read."""
    # Also without any decision: then the policy says why there is none.
    if all(frozen <= num_frozen for _, frozen in coming):
        what = "No layer freezes"
        if num_frozen:
            what = f"{num_frozen} of {num_layers} layers are frozen already, and no more freeze"
        return f"{what} in this run: {policy.why_nothing_freezes(len(coming), max_steps)}."
    before = [num_frozen, *(frozen for _, frozen in coming)]
    unfreezing = [step for (step, frozen), earlier in zip(coming, before, strict=False) if frozen < earlier]
    shown = ", ".join(
        f"{frozen} from step {step} on{' (unfrozen)' if step in unfreezing else ''}"
        for step, frozen in coming[:NUM_SHOWN]
    )
    rest = f", {coming[-1][1]} in the end" if len(coming) > NUM_SHOWN else ""
    text = f"Of {num_layers} layers at most {shown}{rest} are frozen, in a run of {max_steps} steps."
    if policy.may_unfreeze and not unfreezing:
        text += " They may be unfrozen again."
    # Activations stored at a decision are read until some of the layers that computed them are unfrozen.
    spans = [
        next((end for end, fewer in coming[index:] if fewer < frozen), max_steps) - step
        for index, (step, frozen) in enumerate(coming)
        if frozen
    ]
    if all(span <= steps_per_epoch for span in spans):
        text += " No later epoch reads what would be stored then: the activation cache gains nothing."
    return text
