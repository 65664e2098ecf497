"""Interface of freeze policies: their inputs, their decision times, and the limits on their answers."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch


_NOISE = 1e-9
"""Tolerance that absorbs floating-point noise: an answer of 3.0000000001 means 3 layers, not 4."""


def rounded_up(value: float) -> int:
    return math.ceil(value - _NOISE)


GRADIENT_NORMS = "gradient_norms"
MEASUREMENTS = (GRADIENT_NORMS,)
"""Fields of `FreezeSignal` that a policy can request in `needs`."""


class GradientNormMonitor:
    """Mean gradient norm of each layer and the head, from the norms of gradient clipping; `record` never syncs."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        # The last entry counts the steps.
        self._sums = torch.zeros(num_layers + 2, dtype=torch.float64, device=device)

    def record(self, squares: torch.Tensor) -> None:
        """Add one optimizer step. A step with non-finite gradients does not count, as the optimizer skips it.

        Args:
            squares: `(num_layers + 1,)` squared L2 norms of the reduced, unscaled, unclipped gradients of the layers
                and the head.
        """
        # Sums in float64, which Python's floats and JSON keep exactly: a resumed run takes the same decisions.
        squares = squares.to(self._sums)
        norms = torch.cat([squares.sqrt(), squares.new_ones(1)])
        # Chosen on the device: a Python `if` would wait for it in every step.
        self._sums += torch.where(squares.isfinite().all(), norms, torch.zeros_like(norms))

    def means(self) -> tuple[float, ...]:
        """Return the `num_layers + 1` mean norms since the last `reset`; empty if no step counted."""
        sums: list[float] = self._sums.tolist()
        count = sums.pop()
        return tuple(value / count for value in sums) if count else ()

    def reset(self) -> None:
        self._sums.zero_()

    def state(self) -> list[float]:
        return list(self._sums.tolist())

    def load_state(self, sums: list[float]) -> None:
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))


@dataclass(frozen=True)
class FreezeSignal:
    """Inputs of a freeze decision. Measurements that the policy does not list in `needs` are empty tuples.

    Args:
        step: optimizer steps done.
        target_num_frozen: the previous answer, L_frozen of Eq. 1 before rounding; `num_frozen` at the start.
        gradient_norms: L2 norms of the reduced, unscaled, unclipped gradient of each layer, then of the head,
            averaged over the optimizer steps since the last decision. 0 for frozen layers; empty if no step counted.
        learning_rate: of the optimizer's first parameter group for the next step; 0 if it has none.
        num_frozen_by_user: layers frozen by the user's script, which are never unfrozen.
    """

    step: int
    max_steps: int
    num_layers: int
    num_frozen: int
    target_num_frozen: float
    gradient_norms: tuple[float, ...] = ()
    learning_rate: float = 0.0
    num_frozen_by_user: int = 0

    @property
    def num_wanted(self) -> float:
        """Old name of `target_num_frozen`."""
        return self.target_num_frozen


def is_usable(values: Sequence[float]) -> bool:
    """Return True if there is at least one value and all are finite."""
    return bool(values) and all(map(math.isfinite, values))


@dataclass(frozen=True)
class DecisionClock:
    """Decision times: each interval after the warm-up, never before the first or after the last step.

    Args:
        num_epochs: length of the run, 0 if it is not known.
    """

    every: int
    warmup_steps: int
    max_steps: int
    num_epochs: float = 0.0

    def is_due(self, step: int) -> bool:
        """Return True if there is a decision before optimizer step number `step` (0 is the first)."""
        # Before the first step nothing is measured, and after the last one nothing is trained.
        return 0 < step < self.max_steps and step % self.every == 0 and step >= self.warmup_steps

    def due_steps(self) -> range:
        first = max(1, -(-self.warmup_steps // self.every))
        return range(first * self.every, self.max_steps, self.every)


def make_clock(interval: str, warmup: float, steps_per_epoch: int, max_steps: int) -> DecisionClock:
    """Build the clock for `freeze_interval`: "epoch", a number of steps ("200"), or a share of the run ("0.1").

    `warmup` is the share of the run before the first decision, 0 to 1.
    """
    if interval == "epoch":
        every = steps_per_epoch
    elif interval.isdigit():
        every = int(interval)
    else:
        # A share of a short run may be less than one step.
        every = max(1, round(float(interval) * max_steps))
    return DecisionClock(every, rounded_up(warmup * max_steps), max_steps, max_steps / steps_per_epoch)


MOST_ASKED = 100_000
"""Number of steps for which a custom `is_due` is called before a run, to predict what may freeze."""


class FreezePolicy(ABC):
    """Policy that decides how many leading layers are frozen. Subclass it and pass an instance as `policy=`.

    Only `target_num_frozen` is required; it is called on rank 0 alone and its answer broadcast. A policy that keeps
    state between decisions must return it from `state`, or a resumed run will decide differently:

        class Settled(FreezePolicy):
            name = "settled"

            def __init__(self):
                self.num_calm = 0

            def target_num_frozen(self, signal):
                norms = signal.gradient_norms
                self.num_calm += bool(norms) and norms[signal.num_frozen] < 0.01 * norms[-1]
                return self.num_calm

            def state(self):
                return {"num_calm": self.num_calm}

            def load_state(self, state):
                self.num_calm = state["num_calm"]
    """

    name: str = "custom"
    needs: Collection[str] = frozenset({GRADIENT_NORMS})
    """Measurements to make, out of `MEASUREMENTS`. Gradient norms come with clipping and cost nothing."""
    keeps_minimum = True
    """If True, `freeze_min_active_layers` limits the policy."""
    num_watched = 0
    """Number of decisions at the start of a run that only observe; nothing can freeze before the next one."""
    is_certain = False
    """If True, `most_wanted` is always the answer, so the freezes of a run are known before it starts. A subclass that
    overrides `target_num_frozen` must set it again.
    """
    freezes = True
    """If False, the policy never freezes, and nothing is prepared for freezing."""
    may_unfreeze: bool = False
    """If True, an answer below the number of frozen layers unfreezes layers, except those the script froze."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "num_wanted" in vars(cls) and "target_num_frozen" not in vars(cls):
            warnings.warn(
                f"{cls.__name__}.num_wanted is called target_num_frozen now, and FreezeSignal.num_wanted likewise: "
                "rename it, the old name goes with the next release.",
                FutureWarning,
                # The line of the user's class, not of this method.
                stacklevel=3,
            )
            cls.target_num_frozen = vars(cls)["num_wanted"]  # type: ignore[method-assign]
        # A subclass that overrides `target_num_frozen` below the class that set `is_certain` must not inherit it.
        order = cls.__mro__
        says, answers = (
            next(index for index, base in enumerate(order) if name in vars(base))
            for name in ("is_certain", "target_num_frozen")
        )
        if answers < says:
            cls.is_certain = False

    @abstractmethod
    def target_num_frozen(self, signal: FreezeSignal) -> float:
        """Return how many layers to freeze now; fractions are rounded up.

        An answer below the current number changes nothing, unless `may_unfreeze`: then the layers above it are
        unfrozen.
        """

    def most_wanted(self, signal: FreezeSignal) -> float:
        """Return the largest possible answer of `target_num_frozen`, to predict a run at its start."""
        return signal.num_layers

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        """Return True to decide before optimizer step number `step`.

        Called at the start and after each decision for the coming steps, up to the first that is due. Also called
        before a run for up to `MOST_ASKED` steps; `load_state` then restores the previous `state`.
        """
        return clock.is_due(step)

    def is_overdue(self, step: int, num_frozen: int, num_frozen_by_user: int = 0) -> bool:
        """Return True to decide before a training's first step, too, as a run that resumes another one may."""
        return False

    def due_steps(self, clock: DecisionClock) -> Iterable[int]:
        """Return the steps of a run with a decision, in order; with a custom `is_due`, of the first `MOST_ASKED`."""
        # Without a look at each step, of which a run may have millions.
        if type(self).is_due is FreezePolicy.is_due:
            return clock.due_steps()
        # A custom `is_due` may change the policy's state, so save it before probing and restore it afterwards.
        before = deepcopy(dict(self.state()))
        found = [step for step in range(min(clock.max_steps, MOST_ASKED)) if self.is_due(step, clock)]
        self.load_state(before)
        return found

    def why_nothing_freezes(self, num_decisions: int, max_steps: int) -> str:
        """Complete "No layer freezes in this run: ..." for a run with so many decisions, of which none freezes."""
        why = "all others must stay active"
        if not num_decisions:
            why = f"no decision falls into its {max_steps} steps"
        elif num_decisions <= self.num_watched:
            needed = self.num_watched + 1
            why = f"the policy needs {needed} decisions, and {num_decisions} fall into its {max_steps} steps"
        return f"{why} (freeze_interval, freeze_warmup, freeze_min_active_layers)"

    def frozen_until(self, step: int, max_steps: int, num_frozen_by_user: int = 0) -> int:
        """Return the step before which layers frozen at `step` are unfrozen, or `max_steps` if they may stay frozen.

        Their cached activations are useful until then. The first `num_frozen_by_user` layers are never unfrozen.
        """
        return max_steps

    def check(self, num_layers: int, max_steps: int) -> list[str]:
        """Return warnings to show before a run starts.

        Raises:
            ValueError: the policy cannot work with this model or run.
        """
        return []

    def state(self) -> dict[str, Any]:
        """Return the state to store in checkpoints, as JSON values."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore `state`, from a checkpoint or, at the start of each training, from the policy as passed in."""

    def describe(self) -> str:
        """Describe the policy in a few words, for the start-up line."""
        return self.name

    def explain(self, signal: FreezeSignal) -> str:
        """Explain the latest answer in a few words, for the decision's log line."""
        return self.name


@dataclass(frozen=True)
class Decision:
    """Answer of a policy and the resulting number of frozen layers.

    `target_num_frozen` is the answer before rounding, never below the previous one unless the policy can unfreeze.
    """

    signal: FreezeSignal
    target_num_frozen: float
    num_frozen: int

    @property
    def freezes(self) -> bool:
        return self.num_frozen > self.signal.num_frozen

    @property
    def unfreezes(self) -> bool:
        return self.num_frozen < self.signal.num_frozen

    @property
    def is_held_back(self) -> bool:
        """True if the policy wanted more layers than may freeze."""
        return rounded_up(self.target_num_frozen) > self.num_frozen

    def as_event(self) -> dict[str, Any]:
        return {
            "num_frozen_before": self.signal.num_frozen,
            "num_frozen": self.num_frozen,
            "unfreezes": self.unfreezes,
            # Keys of events files keep the old name, so that tools can read files of all releases.
            "num_wanted_before": self.signal.target_num_frozen,
            "num_wanted": self.target_num_frozen,
            "learning_rate": self.signal.learning_rate,
            **{name: list(getattr(self.signal, name)) for name in MEASUREMENTS},
        }


def decide(policy: FreezePolicy, signal: FreezeSignal, min_active_layers: int) -> Decision:
    """Ask the policy and clamp its answer to the layers that must stay frozen and those that must stay active.

    Raises:
        ValueError: the answer is not finite.
    """
    # A policy of the user may answer with a tensor or a number of NumPy.
    answer = float(policy.target_num_frozen(signal))
    if not math.isfinite(answer):
        raise ValueError(f"{type(policy).__name__}.target_num_frozen returned {answer}: expected a number of layers.")
    num_frozen = held(policy, answer, signal, min_active_layers)
    # The next decision gets the unrounded answer, because Eq. 1 is a recursion on it.
    wanted = answer if policy.may_unfreeze else max(answer, signal.target_num_frozen)
    return Decision(signal, wanted, num_frozen)


def held(policy: FreezePolicy, answer: float, signal: FreezeSignal, min_active_layers: int) -> int:
    """Round an answer up to layers, clamped to those that must stay frozen and those that must stay active."""
    kept = min_active_layers if policy.keeps_minimum else 0
    # The script may have frozen more than the minimum allows: that stays.
    most = max(signal.num_layers - kept, signal.num_frozen)
    # What the script froze is never unfrozen, whatever a policy may do.
    least = signal.num_frozen_by_user if policy.may_unfreeze else signal.num_frozen
    return min(max(rounded_up(answer), least), most)


def check_policy(policy: FreezePolicy, num_layers: int, max_steps: int, min_active_layers: int) -> list[str]:
    """Return warnings about a policy to show before the run starts.

    Raises:
        ValueError: the policy cannot work with this model or run, or needs an unknown measurement.
    """
    # A text is a collection too, of its letters.
    if isinstance(policy.needs, str):
        raise ValueError(f"{type(policy).__name__}.needs is {policy.needs!r}: expected a collection of names.")
    unknown = sorted(set(policy.needs) - set(MEASUREMENTS))
    if unknown:
        raise ValueError(f"{type(policy).__name__}.needs has {', '.join(unknown)}: expected some of {MEASUREMENTS}.")
    if policy.freezes and policy.keeps_minimum and min_active_layers >= num_layers:
        raise ValueError(
            f"freeze_min_active_layers={min_active_layers} of {num_layers} layers: nothing could freeze. Set it "
            "lower, or leave freezing out."
        )
    return policy.check(num_layers, max_steps)
