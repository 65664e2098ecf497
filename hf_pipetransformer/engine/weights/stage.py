"""Weight versions of one stage in asynchronous training: each forward and backward sees the version it should.

For the duration of a pass, other values are written into the parameters' storage, without bumping autograd's version
counters. Tensors that autograd saved by reference (a parameter, its transpose) show those values in the backward.

Version n is the weights after n updates in a window, whose micro-batches are numbered through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hf_pipetransformer.engine.program import MicroBatch, ProgramWrapper, StageProgram
from hf_pipetransformer.engine.weights.directions import Buffers, Direction, Tensors, exchange, make_direction
from hf_pipetransformer.engine.weights.rates import ComingRates, ErrorMeter, PredictionErrors, Sample
from hf_pipetransformer.engine.weights.rows import PredictedWeights, casting_again, is_autocast_on
from hf_pipetransformer.report import announce
from hf_pipetransformer.schedules.weight_kinds import ForwardPass, WeightKind


@dataclass(frozen=True)
class _InFlight:
    version: int
    sample: Sample | None


@dataclass(eq=False)
class StageWeights:
    """Weights of a stage, switched to the version that the weight kind demands for each pass of a window.

    Micro-batches and steps are numbered from the start of the window. Call `before_update` and `after_update` from the
    optimizer's step hooks. Enter autocast before `forward` and `backward`, or set `casts`.

    Args:
        optimizer: torch optimizer. Parameters outside its groups always stay current.
        micro_batches_per_step: micro-batches A of a complete step, for kinds that predict beyond a micro-batch's step.
        casts: True if the passes enter autocast themselves.
    """

    kind: WeightKind
    stage: int
    num_stages: int
    optimizer: torch.optim.Optimizer
    coming_rates: ComingRates
    micro_batches_per_step: int = 1
    say: Callable[[str], None] = announce
    casts: bool = False
    modules: Iterable[nn.Module] = ()

    def __post_init__(self) -> None:
        self.modules = tuple(self.modules)
        self._has_said = False
        self._meter = ErrorMeter()
        # Empty ones, which `begin` closes and replaces.
        self.versions = Versions([], (), self.casts)
        self.begin()

    def begin(self) -> None:
        """Start a window with nothing in flight."""
        self.num_updates = 0
        self.end()
        # After `end`, which has made the versions of this window.
        self._meter.watch(self.versions.predicted.others)

    def end(self) -> None:
        """End a window that was drained or abandoned: keep only the current weights."""
        # After an update that failed midway, autograd's version counters must count again.
        self.versions.updating.close()
        self._in_flight: dict[int, _InFlight] = {}
        self._first_micro_batches: dict[int, int] = {}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.versions = Versions(parameters, self.modules, self.casts)
        if parameters and self.kind.predicts(self.stage, self.num_stages):
            direction = make_direction(self.kind.direction, self.optimizer, self.versions.buffers, self._rates_now)
            self.versions.direction = direction

    def _rates_now(self) -> list[float]:
        return [group[0] for group in self.coming_rates(1)]

    @contextmanager
    def forward(self, micro_batch: int, step: int) -> Iterator[None]:
        """Run the forward of `micro_batch` inside. Its gradient belongs to `step`.

        Raises:
            ValueError: the update of that step is already done.
        """
        if step < self.num_updates:
            raise ValueError(
                f"Micro-batch {micro_batch} belongs to step {step}, but {self.num_updates} updates of the window are "
                "done: expected a later step. Count micro-batches and steps from the beginning of the window."
            )
        parameters = self.versions.parameters
        if not parameters:
            yield
            return
        position = micro_batch - self._first_micro_batches.setdefault(step, micro_batch)
        at = ForwardPass(self.stage, self.num_stages, self.micro_batches_per_step, step, position, self.num_updates)
        version = self.kind.forward_version(at)
        # Only then are the casts that autograd saved those of other weights than the backward is to see.
        may_differ = self.kind.backward_version(version, step) != version or version > self.num_updates
        s = step - self.num_updates
        # Without an update in between there is no error to measure.
        current = self._meter.sample() if s > 0 and self._meter.is_due() else None
        casting = casting_again(parameters) if may_differ and self.versions.is_cast else nullcontext()
        with self._showing(version), casting:
            sample = None if current is None else Sample(s, current, self._meter.sample())
            self._in_flight[micro_batch] = _InFlight(version, sample)
            with self.versions.predicted.noting():
                yield

    @contextmanager
    def backward(self, micro_batch: int, step: int) -> Iterator[None]:
        """Run the backward of `micro_batch` inside. Its gradient belongs to `step`."""
        if not self.versions.parameters:
            yield
            return
        entry = self._in_flight.pop(micro_batch)
        if entry.sample is not None:
            self._meter.add(entry.sample)
        with self._showing(self.kind.backward_version(entry.version, self.num_updates)):
            yield

    def before_update(self) -> None:
        """Save the weights that later passes need, before `optimizer.step()`."""
        versions = self.versions
        if not versions.parameters:
            return
        if versions.direction is not None:
            versions.direction.before_update()
        needed = self._needed(self.num_updates + 1)
        versions.keep(self.num_updates if self.num_updates in needed else None, needed)
        # Without this, autograd would reject the backwards of earlier forwards because their saved weights changed.
        versions.updating.enter_context(_unsafe_preserve_version_counter(tuple(versions.parameters)))

    def after_update(self) -> None:
        """Count the update. Call after `optimizer.step()`."""
        self.versions.updating.close()
        self.num_updates += 1
        if not self.versions.parameters:
            return
        if self.num_updates == 1:
            self.versions.check_storage(self.optimizer)
        # The cache still has casts of the weights before the update.
        if self.versions.is_cast:
            torch.clear_autocast_cache()
        # No micro-batch of a step comes after its update, see `forward`.
        for step in [step for step in self._first_micro_batches if step < self.num_updates]:
            del self._first_micro_batches[step]

    def take_errors(self) -> PredictionErrors | None:
        """Return the mean prediction errors since the last call; None if no micro-batch was measured."""
        return self._meter.take()

    def _showing(self, version: int) -> AbstractContextManager[None]:
        """Show a version in the parameters: a kept one, a predicted one, or the current one."""
        ahead = version - self.num_updates
        if ahead < 0:
            return self.versions.showing_kept(version, lambda: version in self._needed(self.num_updates))
        rates = [sum(group) for group in self.coming_rates(ahead)] if ahead else []
        direction = self.versions.direction if any(rates) else None
        if direction is None or not self._is_known(direction):
            return nullcontext()
        return self.versions.showing_predicted(direction, rates)

    def _is_known(self, direction: Direction) -> bool:
        known = direction.is_known()
        if not known and not self._has_said:
            self._has_said = True
            self.say(
                f"Stage {self.stage}: the first forwards see the weights as they are, there is no update yet that "
                "tells where they go."
            )
        return known

    def _needed(self, num_updates: int) -> set[int]:
        return self.kind.kept_versions(num_updates, {entry.version for entry in self._in_flight.values()})


class Versions:
    """Values of a stage's weights at other versions than the current one: kept copies, and predictions."""

    def __init__(self, parameters: Sequence[torch.Tensor], modules: Iterable[nn.Module], casts: bool) -> None:
        self.parameters = parameters
        self.casts = casts
        self.direction: Direction | None = None
        self.updating = ExitStack()
        # Writes to `.data` share the memory and do not count as changes for autograd.
        self._values: Tensors = [parameter.data for parameter in parameters]
        self._kept: dict[int, Tensors] = {}
        self.buffers = Buffers(self._values)
        self.predicted = PredictedWeights(self._values, parameters, modules)

    @property
    def is_cast(self) -> bool:
        """True if passes read casts of the weights."""
        return self.casts or is_autocast_on(self.parameters[0].device.type)

    def keep(self, current: int | None, needed: Collection[int]) -> None:
        """Drop the kept versions that are not `needed`; then copy the current weights as version `current`, if any."""
        for version in [version for version in self._kept if version not in needed]:
            self.buffers.give_back(self._kept.pop(version))
        if current is not None:
            self._kept[current] = self.buffers.copy()

    @contextmanager
    def showing_predicted(self, direction: Direction, rates: list[float]) -> Iterator[None]:
        with self.predicted.showing(direction, rates), self._casts_forgotten():
            yield

    @contextmanager
    def showing_kept(self, version: int, is_needed: Callable[[], bool]) -> Iterator[None]:
        """Show a kept version inside; afterward drop it unless `is_needed()`."""
        kept = self._kept[version]
        # A swap keeps the current weights in the memory of the kept ones.
        exchange(self._values, kept)
        try:
            with self._casts_forgotten():
                yield
        finally:
            # Asked behind the pass, which may have been the last one to need the version.
            if is_needed():
                exchange(self._values, kept)
            else:
                torch._foreach_copy_(self._values, kept)
                self.buffers.give_back(self._kept.pop(version))

    @contextmanager
    def _casts_forgotten(self) -> Iterator[None]:
        """Clear autocast's cache before and after, because it would return casts of values swapped out meanwhile."""
        if not self.is_cast:
            yield
            return
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()

    def check_storage(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that does not update in place.

        Raises:
            ValueError: a parameter has new memory.
        """
        for parameter, value in zip(self.parameters, self._values, strict=True):
            if parameter.data_ptr() != value.data_ptr():
                raise ValueError(
                    f"{type(optimizer).__name__} gives parameters new memory in a step, where forwards that are "
                    "in flight do not find them. Use an optimizer that changes them in place, or "
                    "pipeline_schedule='1f1b'."
                )


class VersionedProgram(ProgramWrapper):
    """Wrapper of a stage program that runs each pass with the weight version that `weights` selects.

    A recomputed forward sees the weights of its backward.
    """

    def __init__(self, program: StageProgram, weights: StageWeights) -> None:
        super().__init__(program)
        self.weights = weights

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        with self.weights.forward(micro_batch.index, micro_batch.step):
            return self.program.forward(micro_batch, received)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.weights.backward(micro_batch.index, micro_batch.step):
            return self.program.backward_input(micro_batch, gradient)
