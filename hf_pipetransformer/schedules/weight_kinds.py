"""Weights that the forwards and backwards of asynchronous 1F1B see. Pure.

Between two drains (a window) each stage updates its weights as soon as the last backward of a step has run there, so
the backward of a micro-batch comes s updates after its forward. Both passes see, by kind:

    kind            forward                         backward
    pipeoptim       predicted s updates ahead       current
    vanilla         current                         current
    stashing        current                         the forward's
    double_buffer   of the step before              the forward's
    spectrain       predicted beyond s, to stage 0's backward, in both
    xpipe           the same, always in the direction of Adam

PipeOptim, sections II and III, Tables I and II.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol


DirectionName = Literal["optimizer", "adam"]


@dataclass(frozen=True)
class ForwardPass:
    """What a stage knows as the forward of a unit begins.

    A version is counted in updates of the stage since the window began: version 0 is what it began with.

    Args:
        stage: of `num_stages`.
        num_stages: K.
        units_per_step: A, of a complete step.
        step: the optimizer step that the unit's gradient goes into, counted in the window. That many updates are done
            when its backward runs.
        position: of the unit among those of its step.
        num_updates: done so far.
    """

    stage: int
    num_stages: int
    units_per_step: int
    step: int
    position: int
    num_updates: int


class WeightKind(Protocol):
    """Which weights the passes of a unit see. A version beyond the current one is predicted, one before it kept.

    Attributes:
        name: what the option calls it.
        direction: how a prediction goes on: as the `optimizer` of the run does, or always as `adam` would.
    """

    @property
    def name(self) -> str: ...

    @property
    def direction(self) -> DirectionName: ...

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        """Versions of the stage's weights that are held at most, the current one included (PipeOptim, Table II).

        Backups made while a pass runs with other values count. What a prediction needs beside (the weights before the
        last update, where nothing else tells the direction; moments of `xpipe` beside another optimizer) does not.
        """
        ...

    def check(self, num_stages: int, units_per_step: int) -> None:
        """Whether it can run so.

        Raises:
            ValueError: it cannot.
        """
        ...

    def predicts(self, stage: int, num_stages: int) -> bool:
        """Whether passes of that stage ever see predicted weights."""
        ...

    def forward_version(self, forward: ForwardPass) -> int:
        """The version that a forward sees."""
        ...

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        """The version that the backward of a unit sees, when `num_updates` are done."""
        ...

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        """The versions before the current one that are still needed once `num_updates` are done.

        Args:
            in_flight: what the forwards saw of the units whose backward has not ended.
        """
        ...


_WITH_ADAMS_MOMENTS = ("adamw_torch", "adamw_torch_fused")
"""Names of Trainer's optimizers whose state is Adam's, and whose updates predictions know."""


def copies_beside(direction: DirectionName, optim: str) -> int:
    """What a prediction keeps beside weight, gradient and two moments of each trained weight, in weights.

    Args:
        direction: of the kind.
        optim: Trainer's name of the optimizer.
    """
    if optim in _WITH_ADAMS_MOMENTS:
        return 0
    own = 2 if direction == "adam" else 1  # Moments of its own, or the weights before the last update.
    return own - 1 if optim == "sgd" else own  # SGD has one moment at most.


def steady_lag(stage: int, num_stages: int) -> int:
    """Units between a forward and its backward, in the steady state of 1F1B."""
    return num_stages - 1 - stage


def units_until_first_stage(stage: int) -> int:
    """Backwards that a stage starts before stage 0 runs the one that it has just run (SpecTrain, Eq. 6).

    A backward reaches stage 0 after `stage` passes, and half of the passes in between are backwards.
    """
    return stage // 2


class Plain:
    """What a kind is unless it says otherwise: nothing is predicted or kept, and forwards see the current weights."""

    direction: DirectionName = "optimizer"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        return 2 if self.predicts(stage, num_stages) else 1

    def check(self, num_stages: int, units_per_step: int) -> None:
        return None

    def predicts(self, stage: int, num_stages: int) -> bool:
        return False

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.num_updates

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return set()


class Predictor(Plain):
    """What `spectrain` and `xpipe` share: both passes see the version that the stage has at stage 0's backward."""

    def predicts(self, stage: int, num_stages: int) -> bool:
        return steady_lag(stage, num_stages) + units_until_first_stage(stage) > 0

    def forward_version(self, forward: ForwardPass) -> int:
        ahead = forward.position + units_until_first_stage(forward.stage)
        return forward.step + ahead // forward.units_per_step

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return forward_version


class Vanilla(Plain):
    """Both passes see the current weights: the backward other ones than its forward."""

    name = "vanilla"

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return num_updates


class PipeOptim(Plain):
    """A forward sees the weights as they will be at its backward, which sees those that are there (Algorithm 1)."""

    name = "pipeoptim"

    def predicts(self, stage: int, num_stages: int) -> bool:
        return steady_lag(stage, num_stages) > 0

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.step

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return num_updates


class Stashing(Plain):
    """A forward sees the current weights, its backward the same: each version in flight is kept."""

    name = "stashing"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        """A version for each step that the units in flight belong to: K - stage with one unit a step."""
        return 1 + -(-steady_lag(stage, num_stages) // units_per_step)

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return forward_version

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return {version for version in in_flight if version < num_updates}


class DoubleBuffer(Plain):
    """Both passes of all units of step t see version t - 1, on every stage: a uniform delay of one update.

    Where a short step (the last of an epoch) has a forward come before that version is there, the unit sees the
    current one in both passes, and that one is kept as long.
    """

    name = "double_buffer"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        return 2

    def check(self, num_stages: int, units_per_step: int) -> None:
        if units_per_step < num_stages - 1:
            raise ValueError(
                f"pipeline_weights='double_buffer' keeps two versions of the weights, but with {units_per_step} "
                f"micro-batches an optimizer step on {num_stages} stages a forward and its backward are more than one "
                f"update apart: expected at least {num_stages - 1}. Raise pipeline_parallel_num_microbatches or "
                "gradient_accumulation_steps, or use another pipeline_weights."
            )

    def forward_version(self, forward: ForwardPass) -> int:
        return min(max(0, forward.step - 1), forward.num_updates)

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return forward_version

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return {num_updates - 1} | {version for version in in_flight if version < num_updates}


class SpecTrain(Predictor):
    """Both passes of a unit see the weights that the stage will have when stage 0 runs the unit's backward.

    In the steady state with one unit a step the forward predicts `stage // 2 + K - 1 - stage` updates, the backward
    `stage // 2`. SpecTrain's own direction is that of SGD with momentum; for other optimizers it is theirs.
    """

    name = "spectrain"


class XPipe(Predictor):
    """Both passes see weights predicted by Adam's formula: from the state of an Adam, else from moments of its own."""

    name = "xpipe"
    direction: DirectionName = "adam"


_KINDS: dict[str, WeightKind] = {
    kind.name: kind for kind in (PipeOptim(), Vanilla(), Stashing(), DoubleBuffer(), SpecTrain(), XPipe())
}


WEIGHTS_NAMES = tuple(_KINDS)
"""What `pipeline_weights` may be."""


def find_weights(name: str) -> WeightKind:
    """The kind of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in _KINDS:
        raise ValueError(f"Unknown pipeline_weights {name!r}: expected one of {sorted(_KINDS)}.")
    return _KINDS[name]
