"""Loss of a whole batch on the stage with the head: layers run micro-batch by micro-batch, the head may run once.

A loss need not be a mean or a sum over samples: contrastive losses compare samples, weighted means divide by the
weights of the batch. Such a loss is exact if the head and the loss see all samples at once. What enters the head is
therefore joined over the micro-batches, one call computes the loss, and its gradient is cut into parts again. That
takes all forwards before the first backward, as in GPipe.

    parts    F0: layers, head   B0   F1: layers, head   B1
    apart    F0: layers   F1: layers   head and loss of all, their backward   B1: layers   B0: layers

The loss of a causal language model may also be computed in slices of the sequence, forward and backward of the head
one after the other. Then the logits of a slice are all that is in memory, and no forward runs twice.

    slices   F0: layers, head and its backward, slice by slice   B0: layers
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import torch

from hf_pipetransformer.data.batches import count_items, cut_tokens
from hf_pipetransformer.engine.losses import LossRule
from hf_pipetransformer.engine.program import MicroBatch, ModelProgram, ProgramWrapper, StageProgram, as_sent


class HeadMode(Enum):
    """Way to run the head of a batch."""

    PARTS = "parts"
    """With the layers, once a micro-batch."""
    WATCHED = "watched"
    """With the layers, noting what enters it, so that the loss of the whole batch can be compared afterward."""
    APART = "apart"
    """Once a batch, by the runner, between the forwards and the backwards of the layers."""


@dataclass(frozen=True)
class HeadSlices:
    """Slices of the sequence in which head and loss run.

    Args:
        number: 1 for whole sequences.
        rule: of the loss, by which the losses of slices add up.
    """

    number: int = 1
    rule: LossRule = LossRule.SUM

    def of(self, micro_batch: MicroBatch, length: int) -> list[tuple[slice, MicroBatch]]:
        """Cut a micro-batch of `length` positions; returns each slice of what enters the head, with its part."""
        # A set, because sequences of fewer tokens than slices would have empty ones.
        bounds = sorted({number * length // self.number for number in range(self.number + 1)})
        # Positions belong to the layers. Of the mask, a slice gets its own part: those for layers have all before it.
        mask = micro_batch.inputs.get("attention_mask")
        is_cut = isinstance(mask, torch.Tensor) and mask.dim() == 2
        left_out = ("attention_mask", "position_ids")
        parts = cut_tokens({name: v for name, v in micro_batch.inputs.items() if name not in left_out}, bounds)
        for part, (start, stop) in zip(parts, pairwise(bounds), strict=True):
            part |= {"attention_mask": mask[:, start:stop]} if is_cut and mask is not None else {}
        items = [1 if self.rule is LossRule.SUM else count_items(part) for part in parts]
        weights = [micro_batch.weight * self.rule.weight(number, sum(items)) for number in items]
        return [
            (slice(*span), replace(micro_batch, inputs=part, weight=weight))
            for span, part, weight in zip(pairwise(bounds), parts, weights, strict=True)
        ]


@dataclass
class HeadPlan:
    """Way to run the next batches, set by the runner and read by the programs of the stage with the head.

    Args:
        slices: cuts micro-batches whose head does not run once a batch.
        program: program of the head alone; None on stages without it.
    """

    slices: HeadSlices = HeadSlices()
    mode: HeadMode = HeadMode.PARTS
    program: ModelProgram | None = None
    entered: dict[int, tuple[MicroBatch, torch.Tensor]] = field(default_factory=dict)
    """Micro-batches of a batch by number, and what entered the head, without graph; empty if it runs in parts."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradient of what entered the head in each micro-batch, of a head that runs apart from its layers."""

    def begin(self, mode: HeadMode) -> None:
        """Say how the head of the next batch is run."""
        self.mode = mode
        # What entered a watched batch stays until the next one, since it is compared after the run.
        if mode is not HeadMode.PARTS:
            self.entered = {}


class HeadProgram(ProgramWrapper):
    """Program of the stage with the head, which runs as the plan says.

    Args:
        program: that of all blocks of the stage.
        layers: program of the blocks below the head; None if there are none.
        head: program of the head alone, which returns the gradient of what enters it.
        dtype_entering: dtype in which activations enter the head.
        sends_gradient: True if a stage below trains.
    """

    def __init__(
        self,
        plan: HeadPlan,
        program: StageProgram,
        layers: StageProgram | None,
        head: ModelProgram,
        dtype_entering: torch.dtype,
        sends_gradient: bool,
    ) -> None:
        super().__init__(program, layers, head)
        self.plan = plan
        self.layers = layers
        self.head = head
        self.dtype_entering = dtype_entering
        self.sends_gradient = sends_gradient

    def clear(self) -> None:
        super().clear()
        self.plan.gradients.clear()

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        mode = self.plan.mode
        if self._is_cut and torch.is_grad_enabled():
            return self._forward_in_slices(micro_batch, received)
        if mode is HeadMode.PARTS or micro_batch.is_predicted:
            return self.program.forward(micro_batch, received)
        if mode is HeadMode.WATCHED:
            # Layers and head run in one call here, so a hook has to note what passes between them.
            with self.head.view.noting_entrance_of_head() as noted:
                loss = self.program.forward(micro_batch, received)
            self.plan.entered[micro_batch.index] = micro_batch, as_sent(noted[-1], micro_batch, self.dtype_entering)
            return loss
        entering = self._entering(micro_batch, received)
        self.plan.entered[micro_batch.index] = micro_batch, entering.detach()
        return torch.zeros((), device=entering.device)  # The loss comes from the head, for all micro-batches.

    @property
    def _is_cut(self) -> bool:
        return self.plan.slices.number > 1 and self.plan.mode is not HeadMode.APART

    @property
    def _runs_together(self) -> bool:
        return self.plan.mode is not HeadMode.APART and not self._is_cut

    def _entering(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Return what enters the head."""
        entering = received if self.layers is None else self.layers.forward(micro_batch, received)
        assert entering is not None, "below the head there is a layer or a stage"
        return entering

    def _forward_in_slices(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Run the head with its backward on one slice after the other; keeps the gradient of what enters it."""
        # The backward of the head ends here; that of the layers begins later, from the gradient that is kept.
        entering = self._entering(micro_batch, received).detach()
        if self.plan.mode is HeadMode.WATCHED:
            self.plan.entered[micro_batch.index] = micro_batch, as_sent(entering, micro_batch, self.dtype_entering)
        gradient, loss = torch.empty_like(entering), torch.zeros((), device=entering.device)
        for where, part in self.plan.slices.of(micro_batch, entering.shape[1]):
            loss = loss + self.head.forward(part, entering[:, where].contiguous()).detach()
            found = self.head.backward_input(part, None)
            self.head.backward_weight(part)
            assert found is not None, "the head sends a gradient"
            gradient[:, where] = found
        self.plan.gradients[micro_batch.index] = gradient
        return loss

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if self._runs_together:
            return self.program.backward_input(micro_batch, gradient)
        entered = self.plan.gradients.pop(micro_batch.index)
        if self.layers is not None:
            return self.layers.backward_input(micro_batch, entered)
        return entered if self.sends_gradient else None

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        if self._runs_together:
            self.program.backward_weight(micro_batch)
        # The head's weights got their gradients with its backward.
        elif self.layers is not None:
            self.layers.backward_weight(micro_batch)
