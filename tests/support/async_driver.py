"""Stages of asynchronous 1F1B in one process: the package's weights under them, every pass in 1F1B's order."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_pipetransformer.engine.weights.rates import coming_rates
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.schedules.weight_kinds import find_weights
from tests.support.async_simulation import Stage, make_stages, micro_batch_of_data, output_gradient


def warm_up(step: int) -> float:
    """The first update moves nothing, as Trainer's first."""
    return min(1.0, step / 4) * (1 - 0.03 * step)


def bytes_held(weights: StageWeights) -> int:
    """Bytes of all copies of the weights that were made in a window, and of the direction's own moments."""
    versions = weights.versions
    pools = versions.buffers, versions.predicted.buffers
    copies = sum(pool.num_made * sum(value.nbytes for value in pool.values) for pool in pools)
    own = getattr(versions.direction, "moments", {})
    return copies + sum(moment.nbytes for moments in own.values() for moment in moments)


class Driven:
    """A stage in one process, with an optimizer and a schedule, as Trainer has them on a rank."""

    def __init__(
        self, stage: Stage, kind: str, k: int, num_stages: int, micro_batches_per_step: int, make_optimizer
    ) -> None:
        self.stage, self.k = stage, k
        self.optimizer = make_optimizer(stage.parameters())
        self.scheduler = LambdaLR(self.optimizer, warm_up)
        rates = coming_rates(self.scheduler, self.optimizer)
        self.said: list[str] = []
        self.weights = StageWeights(
            find_weights(kind), k, num_stages, self.optimizer, rates, micro_batches_per_step, self.said.append
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.weights.before_update())
        self.optimizer.register_step_post_hook(lambda *_: self.weights.after_update())
        self.entered: dict[int, torch.Tensor] = {}
        self.left: dict[int, torch.Tensor] = {}
        self.most_held = 0

    def row(self, num_micro_batches: int, num_stages: int) -> list[tuple[str, int]]:
        """1F1B over the window."""
        warm = min(num_stages - 1 - self.k, num_micro_batches)
        pairs = [pair for i in range(num_micro_batches - warm) for pair in (("F", warm + i), ("B", i))]
        return (
            [("F", i) for i in range(warm)]
            + pairs
            + [("B", i) for i in range(num_micro_batches - warm, num_micro_batches)]
        )

    def note(self) -> None:
        self.most_held = max(self.most_held, bytes_held(self.weights))

    def forward(self, micro_batch: int, step: int, received: torch.Tensor, dtype: torch.dtype) -> None:
        entered = received.detach()
        self.entered[micro_batch] = entered if self.stage.is_first else entered.requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), self.weights.forward(micro_batch, step):
            self.note()
            self.left[micro_batch] = self.stage(self.entered[micro_batch])

    def backward(self, micro_batch: int, step: int, gradient: torch.Tensor, is_last: bool) -> torch.Tensor | None:
        with self.weights.backward(micro_batch, step):
            self.note()
            self.left.pop(micro_batch).backward(gradient)
        if is_last:
            self.optimizer.step()
            self.note()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self.entered.pop(micro_batch).grad


def drive(driven: list[Driven], windows, dtype=torch.float32) -> None:
    """Run windows of steps with so many micro-batches each, every pass as soon as what it needs is there."""
    num_micro_batches_before = 0
    for sizes in windows:
        step_of = [step for step, size in enumerate(sizes) for _ in range(size)]
        inputs = [
            {u: micro_batch_of_data(num_micro_batches_before + u)[0] for u in range(len(step_of))},
            *({} for _ in driven[1:]),
        ]
        gradients: list[dict[int, torch.Tensor]] = [{} for _ in driven]
        rows = [stage.row(len(step_of), len(driven)) for stage in driven]
        for stage in driven:
            stage.weights.begin()
        while any(rows):
            for k, (stage, row) in enumerate(zip(driven, rows, strict=True)):
                if not row or row[0][1] not in (inputs if row[0][0] == "F" else gradients)[k]:
                    continue
                op, micro_batch = row.pop(0)
                step = step_of[micro_batch]
                if op == "F":
                    stage.forward(micro_batch, step, inputs[k].pop(micro_batch), dtype)
                    if k + 1 < len(driven):
                        inputs[k + 1][micro_batch] = stage.left[micro_batch].detach()
                    else:
                        target = micro_batch_of_data(num_micro_batches_before + micro_batch)[1]
                        gradients[k][micro_batch] = output_gradient(stage.left[micro_batch], target)
                else:
                    is_last = step_of[micro_batch + 1 : micro_batch + 2] != [step]
                    found = stage.backward(micro_batch, step, gradients[k].pop(micro_batch), is_last)
                    if k:
                        gradients[k - 1][micro_batch] = found
        for stage in driven:
            assert stage.weights.num_updates == len(sizes)
            stage.weights.end()
            assert bytes_held(stage.weights) == 0
        num_micro_batches_before += len(step_of)


def driven_stages(kind, num_stages, micro_batches_per_step, make_optimizer, stages=None) -> list[Driven]:
    stages = stages or make_stages(num_stages)
    return [Driven(s, kind, k, num_stages, micro_batches_per_step, make_optimizer) for k, s in enumerate(stages)]
