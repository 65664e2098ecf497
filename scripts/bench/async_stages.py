"""Asynchronous 1F1B of a whole pipeline in one process: its stages take turns as the schedule has them.

What a stage computes, with which weights, and when it updates itself is what the package does on a rank of its own;
only the wires are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.planning.simulator import equal_durations, simulate
from hf_pipetransformer.schedules import ONE_F_ONE_B, Op
from hf_pipetransformer.schedules.placement import Placement, first_above
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import trace_structure
from hf_pipetransformer.splitters.view import StageView


Batch = dict[str, torch.Tensor]


class Part(NamedTuple):
    """Some blocks of a model."""

    view: StageView
    blocks: range

    def trained(self) -> list[nn.Parameter]:
        """Parameters of these blocks."""
        blocks_of = self.view.structure.blocks_of_parameter
        named = self.view.model.named_parameters()
        return [p for name, p in named if p.requires_grad and blocks_of[name][0] in self.blocks]


def cut(model: Any, batch: Batch, num_parts: int) -> list[Part]:
    """Cut a model into parts with as many layers each as their neighbors, or one more in front."""
    splitter = find_splitter(model)
    structure = trace_structure(model, splitter, lambda: model(**batch))
    starts = [first_above(layers[0]) for layers in np.array_split(range(structure.num_layers), num_parts)]
    view = StageView(model, splitter, structure)
    return [Part(view, range(*bounds)) for bounds in pairwise([*starts, structure.num_blocks])]


@dataclass
class SimulatedRank:
    """A stage with its optimizer, the schedule of its learning rate, and the weights that its passes see."""

    part: Part
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    weights: StageWeights
    held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)
    """What entered and what left, of micro-batches in flight."""

    def __post_init__(self) -> None:
        self.num_micro_batches = self.weights.micro_batches_per_step
        self.optimizer.register_step_pre_hook(lambda *_: self.weights.before_update())
        self.optimizer.register_step_post_hook(lambda *_: self.weights.after_update())

    def forward(self, index: int, batch: Batch, received: torch.Tensor | None) -> torch.Tensor:
        """Compute what leaves the stage; of the last one the share of a step's loss."""
        view, blocks = self.part
        entered = None if received is None else received.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), self.weights.forward(index, index // self.num_micro_batches):
            left = view.run(blocks, entered, lambda: view.model(**batch).loss / self.num_micro_batches)
        self.held[index] = entered, left
        return left.detach()

    def backward(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of what entered; the update after the last micro-batch of a step."""
        entered, left = self.held.pop(index)
        with self.weights.backward(index, index // self.num_micro_batches):
            left.backward(gradient)
        if (index + 1) % self.num_micro_batches == 0:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return None if entered is None else entered.grad


def run_window(ranks: Sequence[SimulatedRank], micro_batches: Sequence[Batch]) -> float:
    """Run micro-batches from one drain to the next, as equal stages would; the mean of the losses of its steps."""
    for rank in ranks:
        rank.weights.begin()
    table = ONE_F_ONE_B.table(len(ranks), len(micro_batches))
    sent: dict[tuple[int, Op, int], torch.Tensor | None] = {}
    loss = 0.0
    for k, (op, index, _), *_ in simulate(table, equal_durations(Placement(len(ranks)), backward=1.0)).spans:
        received = sent.pop((k, op, index), None)
        if op is Op.BACKWARD:
            sent[k - 1, op, index] = ranks[k].backward(index, received)
        else:
            sent[k + 1, op, index] = left = ranks[k].forward(index, micro_batches[index], received)
            loss += left.item() if k + 1 == len(ranks) else 0.0
    for rank in ranks:
        rank.weights.end()
    return loss * ranks[0].num_micro_batches / len(micro_batches)
