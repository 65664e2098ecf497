"""Executes this rank's row of a schedule table over point-to-point transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_pipetransformer.batches import take_rows
from hf_pipetransformer.cache_tags import CacheTags
from hf_pipetransformer.errors import PipelineError
from hf_pipetransformer.pipeline.links import Link, Pending, post_receive, post_send
from hf_pipetransformer.pipeline.schedules import Action, Op, Row
from hf_pipetransformer.pipeline.timing import StepMeter
from hf_pipetransformer.splitters.view import StageExit, StageView


Forward = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as every stage of the pipeline knows it.

    Args:
        inputs: keyword arguments of the model.
        weight: what its loss counts in the loss of the step.
        activation_shape: `(micro-batch, seq, hidden)` at the stage boundaries.
        tags: which of its samples are stored; None without a cache.
        on_host: the inputs as they came; None if they were made for this stage.
    """

    inputs: dict[str, Any]
    weight: float
    activation_shape: tuple[int, ...]
    tags: CacheTags | None = None
    on_host: dict[str, Any] | None = None


@dataclass(frozen=True)
class StageLinks:
    """The four wires of a stage; None at the ends of the pipeline."""

    forward_in: Link | None = None
    forward_out: Link | None = None
    backward_in: Link | None = None
    backward_out: Link | None = None


@dataclass
class _Held:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    received: torch.Tensor | None
    entry: torch.Tensor | None = None
    output: torch.Tensor | None = None
    random_state: Any = None


@dataclass
class _Run:
    """State of one execution of a row."""

    micro_batches: Sequence[MicroBatch]
    forward: Forward
    loss_scale: float | torch.Tensor = 0.0
    held: dict[int, _Held] = field(default_factory=dict)
    arriving: dict[tuple[Op, int], Pending] = field(default_factory=dict)
    leaving: dict[tuple[Op, int], Pending] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)


class Engine:
    """Runs one stage.

    Args:
        view: the stage's view of the model, installed.
        units: the units of this stage.
        entry_unit: the unit that stored activations enter; 0 without a cache.
        links: the stage's wires.
        is_last: whether this stage holds the head.
        boundary_dtypes: dtype of the activation that enters this stage, that enters the entry unit, and that leaves
            this stage.
        device: where the stage computes.
        timeout: seconds that any transfer may take.
        recompute: activation recomputation: `never`, `always`, or `except_last` (all but the last micro-batch).
        sends_gradient: whether a stage below trains anything, and so gets the gradient of this stage's input.
        meter: where the time of computations is written down.
    """

    def __init__(
        self,
        view: StageView,
        units: range,
        entry_unit: int,
        links: StageLinks,
        is_last: bool,
        boundary_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        device: torch.device,
        timeout: float,
        recompute: str = "never",
        sends_gradient: bool = True,
        *,
        meter: StepMeter,
    ) -> None:
        self.view = view
        self.units = units
        self.entry_unit = entry_unit
        self.links = links
        self.is_last = is_last
        self.dtype_in, self.dtype_entry, self.dtype_out = boundary_dtypes
        self.device = device
        self.timeout = timeout
        self.recompute = recompute
        self.sends_gradient = sends_gradient
        self.meter = meter
        self.is_active = False
        self.keep: Callable[[MicroBatch, torch.Tensor], None] = _keep_nothing
        """Stores the activations that enter the entry unit; called by the stage that owns it, with a cache."""

    def train(
        self,
        row: Row,
        micro_batches: Sequence[MicroBatch],
        forward: Forward,
        loss_scale: float | torch.Tensor,
        before_last_backward: Callable[[], None],
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are added to the parameters of this stage.

        Args:
            row: this stage's row of the table.
            micro_batches: the batch, cut.
            forward: runs the model on a micro-batch's inputs; on the last stage it returns the loss.
            loss_scale: factor of the loss in the backward, beside each micro-batch's weight.
            before_last_backward: called once, right before the last backward of this stage.

        Returns:
            The weighted sum of the losses on the last stage, zero on the others.
        """
        run = _Run(micro_batches, forward, loss_scale)
        computations = [action for action in row if action.op in (Op.FORWARD, Op.BACKWARD)]
        run.recomputed = {
            action.micro_batch
            for action, following in zip(computations, computations[1:], strict=False)
            if action.op is Op.FORWARD and self._recomputes(action.micro_batch, run, following)
        }
        num_backwards = sum(action.op is Op.BACKWARD for action in row)
        # A stage without backwards is frozen: nothing of its forwards is kept.
        with self.meter.part("pipeline"), torch.set_grad_enabled(num_backwards > 0):
            for action in row:
                if action.op is Op.BACKWARD:
                    num_backwards -= 1
                    if num_backwards == 0:
                        before_last_backward()
                self._execute(action, run)
            self._finish(run)
        return torch.stack(run.results).sum() if run.results else torch.zeros((), device=self.device)

    def predict(self, row: Row, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Any]:
        """Forward of all micro-batches without gradient: what `forward` returned on the last stage, else nothing."""
        run = _Run(micro_batches, forward)
        with torch.no_grad():
            for action in row:
                self._execute(action, run)
        self._finish(run)
        return run.results

    def _finish(self, run: _Run) -> None:
        self.view.widen()
        for pending in run.leaving.values():
            pending.wait()

    def _execute(self, action: Action, run: _Run) -> None:
        op, i, _ = action
        links, shape = self.links, run.micro_batches[i].activation_shape
        if op is Op.FORWARD:
            self._forward(i, run)
        elif op is Op.BACKWARD:
            self._backward(i, run)
        elif op is Op.RECEIVE_FORWARD:
            assert links.forward_in is not None
            run.arriving[op, i] = post_receive(links.forward_in, shape, self.dtype_in, self.device, self.timeout)
        elif op is Op.RECEIVE_BACKWARD:
            assert links.backward_in is not None
            run.arriving[op, i] = post_receive(links.backward_in, shape, self.dtype_out, self.device, self.timeout)
        elif op is Op.SEND_FORWARD:
            output = run.held[i].output
            assert links.forward_out is not None and output is not None
            if not torch.is_grad_enabled():
                del run.held[i]
                self._wait_for_send(run, op, i - 1)
            run.leaving[op, i] = post_send(links.forward_out, output, self.timeout)
        elif op is Op.SEND_BACKWARD:
            assert links.backward_out is not None
            for earlier in [key for key in run.leaving if key[0] is op]:
                self._wait_for_send(run, *earlier)
            run.leaving[op, i] = post_send(links.backward_out, run.gradients.pop(i), self.timeout)

    def _forward(self, i: int, run: _Run) -> None:
        micro_batch = run.micro_batches[i]
        held = _Held(self._take(run, Op.RECEIVE_FORWARD, i))
        recomputes = i in run.recomputed
        if recomputes:
            held.random_state = _random_state(self.device)
        with torch.no_grad() if recomputes else nullcontext(), self.meter.part("forward"):
            result = self._run_stage(held, micro_batch, run.forward)
        if self.is_last:
            run.results.append(result if not torch.is_grad_enabled() else _weighted(result, micro_batch.weight))
        if torch.is_grad_enabled() or not self.is_last:
            held.output = None if recomputes and self.is_last else result
            run.held[i] = held

    def _backward(self, i: int, run: _Run) -> None:
        held, micro_batch = run.held.pop(i, _Held(None)), run.micro_batches[i]
        gradient = self._take(run, Op.RECEIVE_BACKWARD, i)
        # The gradient came back, so the activation has long arrived.
        self._wait_for_send(run, Op.SEND_FORWARD, i)
        if micro_batch.weight or not self.is_last:
            with self.meter.part("backward"):
                self._run_backward(held, micro_batch, gradient, run)
        received = held.received
        if received is not None and self.sends_gradient:
            run.gradients[i] = received.grad if received.grad is not None else torch.zeros_like(received)

    def _run_backward(self, held: _Held, micro_batch: MicroBatch, gradient: torch.Tensor | None, run: _Run) -> None:
        if held.random_state is not None:
            with _restored_random_state(held.random_state, self.device):
                held.output = self._run_stage(held, micro_batch, run.forward)
        assert held.output is not None
        if self.is_last:
            (held.output * (micro_batch.weight * run.loss_scale)).backward()
        elif held.output.requires_grad:
            torch.autograd.backward(held.output, gradient)

    def _run_stage(self, held: _Held, micro_batch: MicroBatch, forward: Forward) -> Any:
        entering, units = held.received, self.units
        if micro_batch.tags is not None:
            if held.entry is None:
                # Kept for a recomputation: no sample goes through a frozen layer twice.
                with torch.no_grad():
                    held.entry = self._bring_to_entry(held.received, micro_batch, micro_batch.tags, forward)
            entering, units = held.entry, range(max(units.start, self.entry_unit), units.stop)
            if not units:
                assert entering is not None
                return self._as_sent(entering, micro_batch)
        if entering is not None:
            entering.requires_grad_(torch.is_grad_enabled() and self.sends_gradient)
        result = self._run_units(units, entering, micro_batch.inputs, forward)
        if isinstance(result, StageExit):
            return self._as_sent(result.hidden, micro_batch)
        return result

    def _bring_to_entry(
        self, received: torch.Tensor | None, micro_batch: MicroBatch, tags: CacheTags, forward: Forward
    ) -> torch.Tensor | None:
        """The activation that enters this stage's part above the cached layers, `(micro-batch, seq, hidden)`.

        Each sample runs through those frozen units of this stage that its stored activation does not cover.
        """
        start, stop = self.units.start, min(self.units.stop, self.entry_unit)
        if start >= stop:
            return received
        hidden = received
        if hidden is None and tags.hidden is not None:
            # In its stored dtype, which may be half as long.
            hidden = tags.hidden.to(self.device, non_blocking=True).to(self.dtype_entry)
        enters_at = torch.where(tags.num_layers > 0, 2 * tags.num_layers + 1, 0).clamp(min=start)
        for unit in enters_at.unique().tolist():
            if unit >= stop:
                continue
            rows = (enters_at == unit).nonzero().squeeze(1)
            inputs, given = micro_batch.inputs, hidden if unit else None
            is_part = len(rows) < len(enters_at)
            if is_part:
                inputs = take_rows(inputs, rows)
                given = None if given is None else given[rows.to(given.device, non_blocking=True)]
            result = self._run_units(range(unit, stop), given, inputs, forward)
            assert isinstance(result, StageExit), "the head is never cached"
            reached = result.hidden
            if is_part:
                if hidden is None:
                    hidden = reached.new_zeros(len(enters_at), *reached.shape[1:])
                hidden[rows.to(hidden.device, non_blocking=True)] = reached.to(hidden.dtype)
            else:
                hidden = reached
        assert hidden is not None
        if stop == self.entry_unit:
            self.keep(micro_batch, hidden)
        return hidden

    def _run_units(self, units: range, entering: torch.Tensor | None, inputs: dict[str, Any], forward: Forward) -> Any:
        """What `forward` returns if `units` end with the head, else the `StageExit` that left the model."""
        self.view.narrow(units)
        self.view.received = entering
        self.is_active = True
        try:
            result = forward(dict(inputs))
        except StageExit as stage_exit:
            # The traceback holds the frames of the whole forward, and with them every activation.
            stage_exit.__traceback__ = None
            return stage_exit
        finally:
            self.is_active = False
            self.view.received = None
        if units.stop < self.view.structure.num_units:
            raise PipelineError(
                "The model ran to its end on a stage that does not hold the head: it skipped the stage's last layer. "
                "Layers that are skipped at random (layerdrop) cannot be stages."
            )
        return result

    def _as_sent(self, hidden: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        if tuple(hidden.shape) != micro_batch.activation_shape:
            raise PipelineError(
                f"A stage gave an activation of shape {tuple(hidden.shape)} where the next one expects "
                f"{micro_batch.activation_shape}: the model changes the number of tokens or samples from batch to "
                "batch. Use pipeline_parallel_size=1 for it."
            )
        return hidden.to(self.dtype_out)

    @staticmethod
    def _wait_for_send(run: _Run, op: Op, i: int) -> None:
        """Let go of a tensor that was sent, so that no more than a few wait for the end of the batch."""
        pending = run.leaving.pop((op, i), None)
        if pending is not None:
            pending.wait()

    def _take(self, run: _Run, op: Op, i: int) -> torch.Tensor | None:
        pending = run.arriving.pop((op, i), None)
        return None if pending is None else pending.wait()

    def _recomputes(self, i: int, run: _Run, following: Action) -> bool:
        if following == Action(Op.BACKWARD, i):
            return False  # Its backward comes at once: there is nothing to free in between.
        is_last_one = i == len(run.micro_batches) - 1
        return self.recompute == "always" or (self.recompute == "except_last" and not is_last_one)


def _keep_nothing(_micro_batch: MicroBatch, _hidden: torch.Tensor) -> None:
    """In place of storing activations, without a cache."""


def _weighted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss's share in the step. One without items is a mean over nothing (nan) and counts nothing."""
    return loss.detach() * weight if weight else torch.zeros_like(loss)


def _random_state(device: torch.device) -> Mapping[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


@contextmanager
def _restored_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
        yield
