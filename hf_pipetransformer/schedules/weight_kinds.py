"""Weight versions that the forwards and backwards of asynchronous 1F1B use. Pure.

Between two drains (a window), each stage updates its weights as soon as its last backward of a step is done. So s
updates lie between the forward of a micro-batch and its backward. Weights used, by kind:

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
from typing import Literal

from hf_pipetransformer.schedules.abilities import WEIGHTS_NAMES, Abilities


DirectionName = Literal["optimizer", "adam"]


@dataclass(frozen=True)
class ForwardPass:
    """State of a stage when the forward of a micro-batch starts.

    Versions count the stage's updates since the window began. `step` is the optimizer step of the micro-batch's
    gradient, counted in the window; that many updates are done when its backward runs. `position` is the micro-batch's
    index in its step.
    """

    stage: int
    num_stages: int
    micro_batches_per_step: int
    step: int
    position: int
    num_updates: int


_WITH_ADAMS_MOMENTS = ("adamw_torch", "adamw_torch_fused")
"""Trainer's names of optimizers that have Adam's state and whose updates can be predicted from it."""


def steady_lag(stage: int, num_stages: int) -> int:
    """Return how many other forwards steady-state 1F1B runs between a micro-batch's forward and backward."""
    return num_stages - 1 - stage


def micro_batches_until_first_stage(stage: int) -> int:
    """Return how many backwards a stage starts before stage 0 runs the same micro-batch's (SpecTrain, Eq. 6).

    A backward reaches stage 0 after `stage` more passes, and half of the passes in between are backwards.
    """
    return stage // 2


class WeightKind:
    """Rule for the weight version of each pass: those above the current one are predicted, lower ones kept.

    By default nothing is predicted or kept, and both passes use the current weights.

    Attributes:
        direction: direction of predicted updates, that of the run's `optimizer` or always that of `adam`.
    """

    direction: DirectionName = "optimizer"

    def copies(self, stage: int, num_stages: int, micro_batches_per_step: int) -> int:
        """Return the peak number of versions of the stage's weights, the current one included (PipeOptim, Table II).

        Counts backups made while a pass runs with other values, but not the inputs of a prediction (the weights before
        the last update, if nothing else gives the direction; separate moments for `xpipe` with another optimizer).
        """
        return 2 if self.predicts(stage, num_stages) else 1

    def copies_beside(self, stage: int, num_stages: int, micro_batches_per_step: int, optim: str) -> int:
        """Return the copies of the stage's weights beside the current ones, their gradient and the optimizer's state.

        `optim` is Trainer's name of the optimizer.
        """
        beside = self.copies(stage, num_stages, micro_batches_per_step) - 1
        if self.predicts(stage, num_stages) and optim not in _WITH_ADAMS_MOMENTS:
            # Two extra moments, or the weights before the last update.
            beside += 2 if self.direction == "adam" else 1
        return beside

    def fewest_in_a_step(self, num_stages: int) -> int:
        """Return how many micro-batches an optimizer step needs."""
        return 1

    def check(self, num_stages: int, micro_batches_per_step: int) -> None:
        """Check that the kind supports this pipeline.

        Raises:
            ValueError: an optimizer step has fewer micro-batches than `fewest_in_a_step`.
        """
        return None

    def predicts(self, stage: int, num_stages: int) -> bool:
        return False

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.num_updates

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        """Return the version that a backward uses once `num_updates` updates are done."""
        return num_updates

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        """Return the versions below the current one that are still needed once `num_updates` updates are done.

        `in_flight` has the versions used by the forwards of micro-batches whose backward has not ended.
        """
        return set()


class OneVersion(WeightKind):
    """Both passes of a micro-batch use the same version; those in flight are kept."""

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return forward_version

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        # The current version is the weights themselves, of which no copy is needed.
        return {version for version in in_flight if version < num_updates}


class Predictor(OneVersion):
    """Shared by `spectrain` and `xpipe`: both passes use the stage's version at the time of stage 0's backward."""

    def predicts(self, stage: int, num_stages: int) -> bool:
        return steady_lag(stage, num_stages) + micro_batches_until_first_stage(stage) > 0

    def forward_version(self, forward: ForwardPass) -> int:
        # Counted in micro-batches from the first of the step: every full step of them is one more update.
        ahead = forward.position + micro_batches_until_first_stage(forward.stage)
        return forward.step + ahead // forward.micro_batches_per_step


class Vanilla(WeightKind):
    """Current weights in both passes, so the backward of a micro-batch uses other weights than its forward."""


class PipeOptim(WeightKind):
    """Forward with the weights predicted for its backward, backward with the current weights (Algorithm 1)."""

    def predicts(self, stage: int, num_stages: int) -> bool:
        return steady_lag(stage, num_stages) > 0

    def forward_version(self, forward: ForwardPass) -> int:
        # So many updates are done when its backward runs, which is what the prediction is for.
        return forward.step


class Stashing(OneVersion):
    """Current weights in the forward, the same version again in the backward; every version in flight is kept."""

    def copies(self, stage: int, num_stages: int, micro_batches_per_step: int) -> int:
        """Return one version for each step with micro-batches in flight: K - stage with one micro-batch per step."""
        return 1 + -(-steady_lag(stage, num_stages) // micro_batches_per_step)


class DoubleBuffer(OneVersion):
    """Version t - 1 in both passes of all micro-batches of step t, on every stage: a uniform delay of one update.

    If a short step (the last of an epoch) brings a forward before that version exists, both passes of the micro-batch
    use the current version, which is kept until then.
    """

    def copies(self, stage: int, num_stages: int, micro_batches_per_step: int) -> int:
        return 2

    def fewest_in_a_step(self, num_stages: int) -> int:
        return num_stages - 1

    def check(self, num_stages: int, micro_batches_per_step: int) -> None:
        if micro_batches_per_step < num_stages - 1:
            raise ValueError(
                "pipeline_weights='double_buffer' keeps two versions of the weights, but with "
                f"{micro_batches_per_step} micro-batches an optimizer step on {num_stages} stages a forward and its "
                f"backward are more than one update apart: expected at least {num_stages - 1}. Raise "
                "pipeline_parallel_num_microbatches or gradient_accumulation_steps, or use another pipeline_weights."
            )

    def forward_version(self, forward: ForwardPass) -> int:
        # The first step of a window has no version before its own.
        return min(max(0, forward.step - 1), forward.num_updates)

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        # The next forwards take the version before the current one, whether or not a micro-batch uses it already.
        return {num_updates - 1} | super().kept_versions(num_updates, in_flight)


class SpecTrain(Predictor):
    """Weights predicted for the time when stage 0 runs the micro-batch's backward, in both passes.

    In the steady state with one micro-batch per step, the forward predicts `stage // 2 + K - 1 - stage` updates and
    the backward `stage // 2`. The paper predicts along SGD with momentum; here it is along the run's optimizer.
    """


class XPipe(Predictor):
    """Weights predicted by Adam's formula in both passes, with extra moments unless the optimizer is an Adam."""

    direction: DirectionName = "adam"


_ALL: tuple[WeightKind, ...] = (PipeOptim(), Vanilla(), Stashing(), DoubleBuffer(), SpecTrain(), XPipe())
_KINDS = dict(zip(WEIGHTS_NAMES, _ALL, strict=True))


def find_weights(name: str) -> WeightKind:
    """Return the weight kind with this name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _KINDS:
        raise ValueError(f"Unknown pipeline_weights {name!r}: expected one of {sorted(_KINDS)}.")
    return _KINDS[name]


def weights_under(abilities: Abilities, name: str) -> WeightKind | None:
    """Return the weight kind with this name under a schedule whose passes see several versions; None under others."""
    return find_weights(name) if abilities.overlaps_steps else None
