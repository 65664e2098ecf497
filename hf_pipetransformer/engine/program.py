"""What a stage computes: the protocol that the engine drives, and the program that runs a part of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.data.batches import CacheTags
from hf_pipetransformer.engine.weight_gradients import WeightGradients
from hf_pipetransformer.schedules import Row
from hf_pipetransformer.splitters.view import StageView


Forward = Callable[[dict[str, Any]], Any]
Write = Callable[["MicroBatch", torch.Tensor], None]


@dataclass(frozen=True)
class Place:
    """Where a slice of sequences lies.

    Args:
        batch_slice: number of the batch slice that it is cut from.
        start: its first token.
        stop: the token after its last.
        length: tokens of a whole sequence.
    """

    batch_slice: int
    start: int
    stop: int
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as every stage of the pipeline knows it.

    Args:
        index: its number in the table.
        inputs: keyword arguments of the model.
        weight: what its loss counts in the loss of the step.
        activation_shape: `(micro-batch, seq, hidden)` at the stage boundaries.
        forward: runs the model on `inputs`; in training the last stage gets the loss from it.
        loss_scale: factor of the loss in the backward, beside `weight`.
        tags: which of its samples are stored; None without a cache.
        write: stores the activations that enter the entry unit; called by the stage that owns it.
        on_host: the inputs as they came; None if they were made for this stage.
        place: of a slice of sequences; None for whole sequences.
        step: in a row that goes on over optimizer steps, the number of that which its gradient goes into.
    """

    index: int
    inputs: dict[str, Any]
    weight: float
    activation_shape: tuple[int, ...]
    forward: Forward
    loss_scale: float | torch.Tensor = 1.0
    tags: CacheTags | None = None
    write: Write | None = None
    on_host: dict[str, Any] | None = None
    place: Place | None = None
    step: int = 0


class MicroBatches(Protocol):
    """Micro-batches by their number."""

    def __getitem__(self, number: int, /) -> MicroBatch: ...


class StageProgram(Protocol):
    """What the actions of a row compute on one stage.

    What a stage receives and gives are activations and gradients of the shape that the micro-batch names.
    """

    def begin(self, row: Row) -> None:
        """A run of `row` begins; what an earlier one left is forgotten."""

    def extend(self, row: Row) -> None:
        """The run goes on with `row`."""

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        """The activation to send on; on the last stage the loss's share in the step.

        What the backward needs is kept, under `torch.no_grad()` nothing is.

        Args:
            micro_batch: what to run.
            received: the activation that enters; None on the first stage.
        """

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add the gradients of the parameters; the gradient of what entered, None if nobody below wants it.

        Args:
            micro_batch: one that `forward` has run.
            gradient: of the activation that was sent on; None on the last stage.
        """

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The part of `backward` that others wait for."""

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        """The rest of `backward`: any time later."""

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        """The activation to send on; on the last stage what the model gave. Under `torch.no_grad()`."""


class ModelProgram:
    """Runs a stage's units of a Hugging Face model.

    Args:
        view: of the model, which it narrows to `units` as it runs.
        units: of the stage.
        dtype_out: of the activation that leaves the stage.
        sends_gradient: whether a stage below trains anything, and so gets the gradient of this stage's input.
        weight_gradients: of this stage's linear layers, for a schedule that splits the backward.
    """

    def __init__(
        self,
        view: StageView,
        units: range,
        dtype_out: torch.dtype,
        sends_gradient: bool,
        weight_gradients: WeightGradients | None = None,
    ) -> None:
        self.view = view
        self.units = units
        self.dtype_out = dtype_out
        self.sends_gradient = sends_gradient
        self.weight_gradients = weight_gradients or WeightGradients([])
        self.has_head = units.stop == view.structure.num_units
        self._held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def begin(self, row: Row) -> None:
        self._held.clear()
        self.weight_gradients.clear()

    def extend(self, row: Row) -> None:
        """Nothing of a row counts here."""

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        keeps = torch.is_grad_enabled()
        if received is not None:
            received.requires_grad_(keeps and self.sends_gradient)
        output: torch.Tensor = self.predict(micro_batch, received)
        if keeps:
            self._held[micro_batch.index] = received, output
        return _weighted(output, micro_batch.weight) if self.has_head else output

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        result = self.view.run(self.units, received, lambda: self._run(micro_batch))
        return result if self.has_head else as_sent(result, micro_batch, self.dtype_out)

    def _run(self, micro_batch: MicroBatch) -> Any:
        # Inside the view, which overrides layers too: those stay as it has them.
        with self.weight_gradients.split_linears():
            return micro_batch.forward(dict(micro_batch.inputs))

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        entered = self.backward_input(micro_batch, gradient)
        self.backward_weight(micro_batch)
        return entered

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        received, output = self._held.pop(micro_batch.index)
        with self.view.backward_of(self.units, received), self.weight_gradients.put_off(micro_batch.index):
            if not self.has_head:
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
            elif micro_batch.weight:
                (output * (micro_batch.weight * micro_batch.loss_scale)).backward()
        if received is None or not self.sends_gradient:
            return None
        return torch.zeros_like(received) if received.grad is None else received.grad

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.weight_gradients.accumulate(micro_batch.index)


def as_sent(hidden: torch.Tensor, micro_batch: MicroBatch, dtype: torch.dtype) -> torch.Tensor:
    """An activation as the next stage expects it.

    Raises:
        PipelineError: its shape is another one.
    """
    if tuple(hidden.shape) != micro_batch.activation_shape:
        raise PipelineError(
            f"A stage gave an activation of shape {tuple(hidden.shape)} where the next one expects "
            f"{micro_batch.activation_shape}: the model changes the number of tokens or samples from batch to "
            "batch. Use pipeline_parallel_size=1 for it."
        )
    return hidden.to(dtype)


def _weighted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """The loss's share in the step. One without items is a mean over nothing (nan) and counts nothing."""
    return loss.detach() * weight if weight else torch.zeros_like(loss)
