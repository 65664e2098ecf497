"""Asynchronous 1F1B of a whole pipeline in one process: its stages take turns as the schedule has them.

What a stage computes, with which weights, and when it updates itself is what the package does on a rank of its own;
only the wires are missing. A stage computes as soon as what it needs is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_pipetransformer.engine.weights.rates import PredictionErrors, coming_rates
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.schedules.weight_kinds import WeightKind


Batch = dict[str, torch.Tensor]


class Part(nn.Module):
    """Some layers of a BERT or a ViT that classifies, embeddings before the first of all, the head after the last."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        self.is_text = hasattr(model, "bert")
        whole = model.bert if self.is_text else model.vit
        every = whole.encoder.layer if self.is_text else whole.layers
        self.layers = nn.ModuleList(every[i] for i in layers)
        self.embeddings = whole.embeddings if layers.start == 0 else None
        self.last, self.classifier = None, None
        if layers.stop == len(every):
            self.last, self.classifier = whole.pooler if self.is_text else whole.layernorm, model.classifier

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """`(batch, seq, hidden)`, of the last part the logits."""
        mask = torch.where(batch["attention_mask"][:, None, None, :] > 0, 0.0, -1e4) if self.is_text else None
        if self.embeddings is not None:
            hidden = self.embeddings(batch["input_ids" if self.is_text else "pixel_values"])
        for layer in self.layers:
            hidden = layer(hidden, mask)
        if self.classifier is None:
            return hidden
        hidden = self.last(hidden)
        return self.classifier(hidden if self.is_text else hidden[:, 0])


def cut(model: Any, num_layers: int, num_stages: int) -> list[nn.Module]:
    """Cut a model into parts with as many layers each as its neighbors, or one more in front."""
    sizes = [num_layers // num_stages + (k < num_layers % num_stages) for k in range(num_stages)]
    ends = list(accumulate(sizes))
    return [Part(model, range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


@dataclass
class MicroBatch:
    """A micro-batch on its way.

    Args:
        batch: with `labels`.
        share: of its step's loss.
        step: it belongs to, counted in the window.
        ends_step: whether it is the last one of it.
    """

    batch: Batch
    share: float
    step: int
    ends_step: bool


class SimulatedRank:
    """A stage with its optimizer and schedule.

    Args:
        part: what it computes.
        factor: of the learning rate by step.
        kind: which weights its passes see; None where each window is one micro-batch, so that it does not matter.
        looks_ahead: whether predictions ask the schedule for the coming learning rates.
    """

    def __init__(
        self,
        part: nn.Module,
        stage: int,
        num_stages: int,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        factor: Callable[[int], float],
        kind: WeightKind | None,
        micro_batches_per_step: int,
        looks_ahead: bool,
    ) -> None:
        self.part, self.stage, self.num_stages = part, stage, num_stages
        self.optimizer = make_optimizer([p for p in part.parameters() if p.requires_grad])
        self.scheduler = LambdaLR(self.optimizer, factor)
        self.weights: StageWeights | None = None
        if kind is not None:
            rates = coming_rates(self.scheduler if looks_ahead else None, self.optimizer)
            self.weights = StageWeights(
                kind, stage, num_stages, self.optimizer, rates, micro_batches_per_step, say=lambda _: None
            )
            self.optimizer.register_step_pre_hook(lambda *_: weights.before_update())
            self.optimizer.register_step_post_hook(lambda *_: weights.after_update())
            weights = self.weights
        self._entered: dict[int, torch.Tensor | None] = {}
        self._left: dict[int, torch.Tensor] = {}

    def row(self, num_micro_batches: int) -> list[tuple[str, int]]:
        """1F1B: the warm-up, then a forward and a backward in turn."""
        warm = min(self.num_stages - 1 - self.stage, num_micro_batches)
        forwards = [("F", i) for i in range(num_micro_batches)]
        backwards = [("B", i) for i in range(num_micro_batches)]
        pairs = zip(forwards[warm:], backwards, strict=False)
        return [*forwards[:warm], *chain.from_iterable(pairs), *backwards[num_micro_batches - warm :]]

    def forward(self, index: int, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        """Compute what leaves the stage; of the last one the loss."""
        entered = None if received is None else received.detach().requires_grad_()
        seen = contextlib.nullcontext() if self.weights is None else self.weights.forward(index, micro_batch.step)
        with torch.autocast("cpu", torch.bfloat16), seen:
            left = self.part(entered, micro_batch.batch)
        if self.stage + 1 == self.num_stages:
            left = nn.functional.cross_entropy(left.float(), micro_batch.batch["labels"]) * micro_batch.share
        self._entered[index], self._left[index] = entered, left
        return left.detach()

    def backward(self, index: int, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of what entered; the update, if the micro-batch ends its step."""
        entered = self._entered.pop(index)
        with contextlib.nullcontext() if self.weights is None else self.weights.backward(index, micro_batch.step):
            self._left.pop(index).backward(gradient)
        if micro_batch.ends_step:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return None if entered is None else entered.grad

    def take_errors(self) -> PredictionErrors | None:
        """Since the last call."""
        return None if self.weights is None else self.weights.take_errors()


def run_window(
    ranks: Sequence[SimulatedRank],
    micro_batches: Sequence[MicroBatch],
    after_step: Callable[[int], None] = lambda _: None,
) -> float:
    """Run micro-batches from one drain to the next; the mean of the losses of its steps.

    Args:
        after_step: is told each step of the window that the first stage, the last to do so, has done.
    """
    for rank in ranks:
        if rank.weights is not None:
            rank.weights.begin()
    rows = [rank.row(len(micro_batches)) for rank in ranks]
    inputs: list[dict[int, Any]] = [dict.fromkeys(range(len(micro_batches))), *({} for _ in ranks[1:])]
    gradients: list[dict[int, Any]] = [{} for _ in ranks]
    loss = 0.0
    while any(rows):
        for k, (rank, row) in enumerate(zip(ranks, rows, strict=True)):
            if not row or row[0][1] not in (inputs if row[0][0] == "F" else gradients)[k]:
                continue
            op, index = row.pop(0)
            if op == "F":
                left = rank.forward(index, micro_batches[index], inputs[k].pop(index))
                if k + 1 < len(ranks):
                    inputs[k + 1][index] = left
                else:
                    gradients[k][index] = None
                    loss += left.item()
            else:
                gradient = rank.backward(index, micro_batches[index], gradients[k].pop(index))
                if k:
                    gradients[k - 1][index] = gradient
                elif micro_batches[index].ends_step:
                    after_step(micro_batches[index].step)
    for rank in ranks:
        if rank.weights is not None:
            rank.weights.end()
    return loss / (micro_batches[-1].step + 1)
