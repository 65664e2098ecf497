"""Computations of a stage: the protocol that the engine calls, and its implementation for Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.engine.embeddings import EmbeddingGradients
from hf_pipetransformer.engine.linear_layers import WeightGradients
from hf_pipetransformer.splitters.adapters import bare_model


if TYPE_CHECKING:
    from hf_pipetransformer.data.batches import CacheTags
    from hf_pipetransformer.schedules.actions import ActionList
    from hf_pipetransformer.splitters.view import Ran, StageView


Forward = Callable[[dict[str, Any]], Any]
Write = Callable[["MicroBatch", torch.Tensor], None]


@dataclass(frozen=True)
class TokenSpan:
    """Position of a token slice: tokens `start` to `stop` (exclusive) of the `length` tokens of one batch slice.

    The length is None where it is not known yet: tokens are generated.
    """

    batch_slice: int
    start: int
    stop: int
    length: int | None


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch as all stages of the pipeline see it.

    Args:
        weight: weight of its loss in the loss of the step.
        activation_shape: `(micro-batch, seq, hidden)` at the stage boundaries; empty if there are none.
        forward: runs the model; in training it returns the loss on the last stage.
        loss_scale: factor of the loss in the backward, on top of `weight`.
        tags: activation-cache state of its samples; None without a cache.
        on_host: the inputs before they were copied to the device; None if they were made for this stage.
        place: of a token slice, which `token_program` gives what it has of earlier ones; None for whole sequences.
        step: in an asynchronous window, number of the optimizer step that consumes its gradient.
        is_predicted: the last stage returns the model's output, not the weighted loss.
        ends_before_head: the last stage returns the activation that enters the head.
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
    place: TokenSpan | None = None
    step: int = 0
    is_predicted: bool = False
    ends_before_head: bool = False

    def with_inputs(self, inputs: dict[str, Any], **others: Any) -> MicroBatch:
        """Return a copy with other inputs, and other values of `others`."""
        # `dataclasses.replace` would look at every field again, for each micro-batch of each step.
        found = object.__new__(MicroBatch)
        vars(found).update(vars(self), inputs=inputs, **others)
        return found


class MicroBatches(Protocol):
    """Lookup of micro-batches by number."""

    def __getitem__(self, number: int, /) -> MicroBatch: ...


class StageProgram(Protocol):
    """Computations of one stage, one method per kind of action.

    Activations and gradients that enter and leave have the micro-batch's `activation_shape`.
    """

    def clear(self) -> None:
        """Drop all state of a run: before it, as an error may have ended an earlier one, and after it."""

    def extend(self, actions: ActionList) -> None:
        """Learn the next action list of a run, its first or one that follows; most programs have nothing to do."""
        return None

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        """Return the activation to send; on the last stage the weighted loss, or what is predicted.

        `received` is None on the first stage. Saves what the backward needs, except under `torch.no_grad()`.
        """

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Accumulate parameter gradients and return the gradient of the received activation.

        `gradient` is that of the activation sent, None on the last stage. Returns None if no stage below trains.
        """
        entered = self.backward_input(micro_batch, gradient)
        self.backward_weight(micro_batch)
        return entered

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run the part of `backward` that the stage below waits for: the gradient of the received activation."""

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        """Run the rest of `backward`, at any time after `backward_input`."""


class ProgramWrapper(StageProgram):
    """Stage program around another one. Calls that a subclass does not override pass through.

    `others` run in its place, as a subclass decides.
    """

    def __init__(self, program: StageProgram, *others: StageProgram | None) -> None:
        self.program = program
        self._programs = [each for each in (program, *others) if each is not None]

    def clear(self) -> None:
        for program in self._programs:
            program.clear()

    def extend(self, actions: ActionList) -> None:
        for program in self._programs:
            program.extend(actions)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        return self.program.forward(micro_batch, received)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self.program.backward_input(micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.program.backward_weight(micro_batch)


class ModelProgram(StageProgram):
    """Program that runs a stage's blocks (embeddings, halves of layers, head) of a Hugging Face model.

    `sends_gradient` is True if a stage below trains anything and so needs the gradient of this stage's input.
    `weight_gradients` is needed only for schedules that split the backward. Forwards share the casts of its `casts`.
    `embeddings` keeps back gradients, which the caller adds after the last backward; not for a stage with the head.
    """

    def __init__(
        self,
        view: StageView,
        blocks: range,
        dtype_out: torch.dtype,
        sends_gradient: bool,
        weight_gradients: WeightGradients | None = None,
        embeddings: EmbeddingGradients | None = None,
    ) -> None:
        self.view = view
        self.blocks = blocks
        self.dtype_out = dtype_out
        self.sends_gradient = sends_gradient
        self.weight_gradients = weight_gradients or WeightGradients([])
        self.embeddings = embeddings or EmbeddingGradients()
        self.has_head = blocks.stop == view.structure.num_blocks
        # Reentrant checkpoints, which are the model's own, give no gradients where no input asks for them. In place of
        # the embeddings, whose output transformers lets ask for some, comes what a stage receives.
        self._asks_for_gradient = sends_gradient or (
            hasattr(bare_model(view.model), "_require_grads_hook")
            and any(getattr(module, "gradient_checkpointing", False) for module in view.model.modules())
        )
        self._held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def clear(self) -> None:
        # A run that an error ended has left graphs behind, which would hold their memory through this one.
        self._held.clear()
        self.weight_gradients.clear()
        self.embeddings.clear()

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        keeps, ends_before_head = torch.is_grad_enabled(), self.has_head and micro_batch.ends_before_head
        blocks = self.blocks[:-1] if ends_before_head else self.blocks
        if not blocks:
            return received  # A stage of the head alone has nothing to run before it.
        if received is not None:
            # As a leaf it collects in `.grad` what the stage below waits for.
            received.requires_grad_(keeps and self._asks_for_gradient)
        with self._running(blocks, received) as ran:
            ran.result = micro_batch.forward(dict(micro_batch.inputs))
        output = ran.result if self.has_head else as_sent(ran.result, micro_batch, self.dtype_out)
        if keeps:
            self._held[micro_batch.index] = received, output
        is_loss = self.has_head and not micro_batch.is_predicted
        return _weighted(output, micro_batch.weight) if is_loss else output

    def run(self, received: torch.Tensor, forward: Callable[[], Any]) -> Any:
        """Return the result of a forward that the caller takes further, and holds for `backward_of`."""
        with self._running(self.blocks, received) as ran:
            ran.result = forward()
        return ran.result

    def backward_of(self, loss: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Run the backward of a loss of what `run` returned; returns the gradient of `received`."""
        later, number = self.weight_gradients, 0
        with self.view.backward_of(self.blocks, received), later.put_off(number), later.casts.shared():
            loss.backward()
        later.accumulate(number)
        # A loss may read none of what the layers gave.
        return torch.zeros_like(received) if received.grad is None else received.grad

    @contextmanager
    def _running(self, blocks: range, received: torch.Tensor | None) -> Iterator[Ran]:
        view, later = self.view.running(blocks, received), self.weight_gradients
        # The view comes first: what it installs leaves the layers alone that the others change.
        with view as ran, later.split_linears(), later.casts.shared(), self.embeddings.keeping():
            yield ran

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        received, output = self._held.pop(micro_batch.index)
        later = self.weight_gradients
        # Layers may be recomputed inside, also with the model's own checkpointing.
        with self.view.backward_of(self.blocks, received), later.put_off(micro_batch.index), later.casts.shared():
            if not self.has_head:
                # A batch may use no trained weight of this stage.
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
            # The loss of a part without items is nan, and 0 times nan would spoil all gradients.
            elif micro_batch.weight:
                (output * (micro_batch.weight * micro_batch.loss_scale)).backward()
        # Behind the backward, in which the rows arrive; before it there would be nothing new to add.
        self.embeddings.add_if_many()
        if received is None or not self.sends_gradient:
            return None
        # The stage below waits for a gradient even if none reached the input (a micro-batch with weight 0).
        return torch.zeros_like(received) if received.grad is None else received.grad

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.weight_gradients.accumulate(micro_batch.index)


def as_sent(hidden: torch.Tensor, micro_batch: MicroBatch, dtype: torch.dtype) -> torch.Tensor:
    """Cast an activation to the dtype that the next stage expects, and check its shape.

    Raises:
        PipelineError: the shape is not `micro_batch.activation_shape`.
    """
    if micro_batch.activation_shape and tuple(hidden.shape) != micro_batch.activation_shape:
        raise PipelineError(
            f"A stage gave an activation of shape {tuple(hidden.shape)} where the next one expects "
            f"{micro_batch.activation_shape}: the model changes the number of tokens or samples from batch to "
            "batch. Use pipeline_parallel_size=1 for it."
        )
    return hidden.to(dtype)


def _weighted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Weight a loss. A micro-batch without items has a nan loss (a mean over nothing) and weight 0; it counts as 0."""
    # Detached, as results are kept to the end of the batch, and a graph would keep its activations as long.
    return loss.detach() * weight if weight else torch.zeros_like(loss)
