"""Weight versions of one stage in asynchronous training: each forward and backward sees the version it should.

For the duration of a pass, other values are written into the parameters' storage, without bumping autograd's version
counters. Tensors that autograd saved by reference (a parameter, its transpose) show those values in the backward.

Here a micro-batch is a micro-batch of a window, and version n is the weights after n updates in the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hf_pipetransformer.engine.program import MicroBatch, StageProgram
from hf_pipetransformer.engine.weights.directions import Buffers, Direction, Tensors, exchange, make_direction
from hf_pipetransformer.engine.weights.rates import ComingRates, ErrorMeter, PredictionErrors, Sample
from hf_pipetransformer.engine.weights.rows import PredictedWeights, casting_again, is_autocast_on
from hf_pipetransformer.report import announce
from hf_pipetransformer.schedules import ActionList
from hf_pipetransformer.schedules.weight_kinds import ForwardPass, WeightKind


@dataclass(frozen=True)
class _InFlight:
    version: int
    sample: Sample | None


class StageWeights:
    """Weights of a stage, switched to the version that the weight kind demands for each pass of a window.

    Micro-batches and steps are numbered from the start of the window. Call `before_update` and `after_update` from the
    optimizer's step hooks. Enter autocast before `forward` and `backward`, or set `casts`.

    Args:
        optimizer: torch optimizer of the stage's parameters. Parameters outside its groups always stay current.
        micro_batches_per_step: number of micro-batches A of a complete step. Used only by kinds that predict beyond a
            micro-batch's own step.
        casts: True if the passes enter autocast themselves.
    """

    def __init__(
        self,
        kind: WeightKind,
        stage: int,
        num_stages: int,
        optimizer: torch.optim.Optimizer,
        coming_rates: ComingRates,
        micro_batches_per_step: int = 1,
        say: Callable[[str], None] = announce,
        casts: bool = False,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self.kind = kind
        self.stage = stage
        self.num_stages = num_stages
        self.optimizer = optimizer
        self.coming_rates = coming_rates
        self.micro_batches_per_step = micro_batches_per_step
        self.say = say
        self.casts = casts
        self.modules = tuple(modules)
        self._has_said = False
        self._updating = ExitStack()
        self._meter = ErrorMeter()
        self.begin()

    @property
    def num_updates(self) -> int:
        """Number of updates since the window began."""
        return self._num_updates

    @property
    def bytes_held(self) -> int:
        """Bytes of copies of the weights and of the direction's own state."""
        of_direction = 0 if self._direction is None else self._direction.bytes_held
        return self._buffers.bytes_held + self._predicted.bytes_held + of_direction

    def begin(self) -> None:
        """Start a window with nothing in flight."""
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._values: Tensors = [parameter.data for parameter in self._parameters]
        self._num_updates = 0
        self.end()
        self._meter.watch(self._predicted.others)

    def end(self) -> None:
        """End a window that was drained or abandoned: keep only the current weights."""
        self._updating.close()
        self._in_flight: dict[int, _InFlight] = {}
        self._first_micro_batches: dict[int, int] = {}
        self._kept: dict[int, Tensors] = {}
        self._buffers = Buffers(self._values)
        self._predicted = PredictedWeights(self._values, self._parameters, self.modules)
        self._direction = self._make_direction()

    @contextmanager
    def forward(self, micro_batch: int, step: int) -> Iterator[None]:
        """Run the forward of `micro_batch` inside. Its gradient belongs to `step`.

        Raises:
            ValueError: the update of that step is already done.
        """
        if step < self._num_updates:
            raise ValueError(
                f"Micro-batch {micro_batch} belongs to step {step}, but {self._num_updates} updates of the window are "
                "done: expected a later step. Count micro-batches and steps from the beginning of the window."
            )
        if not self._parameters:
            yield
            return
        position = micro_batch - self._first_micro_batches.setdefault(step, micro_batch)
        at = ForwardPass(self.stage, self.num_stages, self.micro_batches_per_step, step, position, self._num_updates)
        version = self.kind.forward_version(at)
        is_cast_again = self._is_cast() and self._backward_differs(version, step)
        s = step - self._num_updates
        current = self._meter.sample() if s > 0 and self._meter.is_due() else None
        with self._showing(version), casting_again(self._parameters) if is_cast_again else nullcontext():
            sample = None if current is None else Sample(s, current, self._meter.sample())
            self._in_flight[micro_batch] = _InFlight(version, sample)
            with self._predicted.noting():
                yield

    @contextmanager
    def backward(self, micro_batch: int, step: int) -> Iterator[None]:
        """Run the backward of `micro_batch` inside. Its gradient belongs to `step`."""
        if not self._parameters:
            yield
            return
        entry = self._in_flight.pop(micro_batch)
        if entry.sample is not None:
            self._meter.add(entry.sample)
        with self._showing(self.kind.backward_version(entry.version, self._num_updates)):
            yield

    def before_update(self) -> None:
        """Save the weights that later passes need, before `optimizer.step()`."""
        if not self._parameters:
            return
        if self._direction is not None:
            self._direction.before_update()
        needed = self._needed(self._num_updates + 1)
        self._drop(needed)
        if self._num_updates in needed:
            self._kept[self._num_updates] = self._buffers.copy()
        # Without this, autograd would reject the backwards of earlier forwards because their saved weights changed.
        self._updating.enter_context(_unsafe_preserve_version_counter(tuple(self._parameters)))

    def after_update(self) -> None:
        """Count the update. Call after `optimizer.step()`."""
        self._updating.close()
        self._num_updates += 1
        if not self._parameters:
            return
        if self._num_updates == 1:
            self._check_storage()
        if self._direction is not None:
            self._direction.after_update()
        if self._is_cast():
            torch.clear_autocast_cache()
        for step in [step for step in self._first_micro_batches if step < self._num_updates]:
            del self._first_micro_batches[step]

    def take_errors(self) -> PredictionErrors | None:
        """Return the mean prediction errors since the last call; None if no micro-batch was measured."""
        return self._meter.take()

    def _check_storage(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=True):
            if parameter.data_ptr() != value.data_ptr():
                raise ValueError(
                    f"{type(self.optimizer).__name__} gives parameters new memory in a step, where forwards that are "
                    "in flight do not find them. Use an optimizer that changes them in place, or "
                    "pipeline_schedule='1f1b'."
                )

    def _make_direction(self) -> Direction | None:
        if not self._parameters or not self.kind.predicts(self.stage, self.num_stages):
            return None

        def rates_now() -> list[float]:
            return [group[0] for group in self.coming_rates(1)]

        return make_direction(self.kind.direction, self.optimizer, self._buffers, rates_now)

    def _showing(self, version: int) -> AbstractContextManager[None]:
        """Show a version in the parameters: a kept one, a predicted one, or the current one."""
        ahead = version - self._num_updates
        if ahead < 0:
            return self._showing_kept(version)
        rates = [sum(group) for group in self.coming_rates(ahead)] if ahead else []
        return self._showing_predicted(rates) if any(rates) and self._can_predict() else nullcontext()

    @contextmanager
    def _showing_predicted(self, rates: list[float]) -> Iterator[None]:
        assert self._direction is not None
        with self._predicted.showing(self._direction, rates), self._casts_forgotten():
            yield

    @contextmanager
    def _showing_kept(self, version: int) -> Iterator[None]:
        kept = self._kept[version]
        exchange(self._values, kept)
        try:
            with self._casts_forgotten():
                yield
        finally:
            if version in self._needed(self._num_updates):
                exchange(self._values, kept)
            else:
                torch._foreach_copy_(self._values, kept)
                self._buffers.give_back(self._kept.pop(version))

    @contextmanager
    def _casts_forgotten(self) -> Iterator[None]:
        """Clear autocast's cache before and after, because it would return casts of values swapped out meanwhile."""
        if not self._is_cast():
            yield
            return
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()

    def _is_cast(self) -> bool:
        return self.casts or is_autocast_on(self._parameters[0].device.type)

    def _backward_differs(self, version: int, step: int) -> bool:
        """Return True if the backward of a micro-batch of `step` may differ from its forward at `version`."""
        return self.kind.backward_version(version, step) != version or version > self._num_updates

    def _can_predict(self) -> bool:
        if self._direction is None:
            return False
        known = self._direction.is_known()
        if not known and not self._has_said:
            self._has_said = True
            self.say(
                f"Stage {self.stage}: the first forwards see the weights as they are, there is no update yet that "
                "tells where they go."
            )
        return known

    def _needed(self, num_updates: int) -> set[int]:
        return self.kind.kept_versions(num_updates, {entry.version for entry in self._in_flight.values()})

    def _drop(self, needed: set[int]) -> None:
        for version in [version for version in self._kept if version not in needed]:
            self._buffers.give_back(self._kept.pop(version))


class VersionedProgram:
    """Wrapper of a stage program that runs each pass with the weight version that `weights` selects.

    A recomputed forward sees the weights of its backward.
    """

    def __init__(self, program: StageProgram, weights: StageWeights) -> None:
        self.program = program
        self.weights = weights

    def begin(self, actions: ActionList) -> None:
        self.program.begin(actions)

    def extend(self, actions: ActionList) -> None:
        self.program.extend(actions)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        with self.weights.forward(micro_batch.index, micro_batch.step):
            return self.program.forward(micro_batch, received)

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        return self.program.predict(micro_batch, received)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.weights.backward(micro_batch.index, micro_batch.step):
            return self.program.backward(micro_batch, gradient)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.weights.backward(micro_batch.index, micro_batch.step):
            return self.program.backward_input(micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.program.backward_weight(micro_batch)
