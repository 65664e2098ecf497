"""Stages of asynchronous 1F1B in one process: the package's weights under them, every pass in 1F1B's order."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_pipetransformer.engine.weights.rates import coming_rates
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.schedules.weight_kinds import find_weights
from tests.async_simulation import Stage, make_stages, output_gradient, unit_of_data


def warm_up(step: int) -> float:
    """The first update moves nothing, as Trainer's first."""
    return min(1.0, step / 4) * (1 - 0.03 * step)


class Driven:
    """A stage in one process, with an optimizer and a schedule, as Trainer has them on a rank."""

    def __init__(self, stage: Stage, kind: str, k: int, num_stages: int, units_per_step: int, make_optimizer) -> None:
        self.stage, self.k = stage, k
        self.optimizer = make_optimizer(stage.parameters())
        self.scheduler = LambdaLR(self.optimizer, warm_up)
        rates = coming_rates(self.scheduler, self.optimizer)
        self.said: list[str] = []
        self.weights = StageWeights(
            find_weights(kind), k, num_stages, self.optimizer, rates, units_per_step, self.said.append
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.weights.before_update())
        self.optimizer.register_step_post_hook(lambda *_: self.weights.after_update())
        self.entered: dict[int, torch.Tensor] = {}
        self.left: dict[int, torch.Tensor] = {}
        self.most_held = 0

    def row(self, num_units: int, num_stages: int) -> list[tuple[str, int]]:
        """1F1B over the window."""
        warm = min(num_stages - 1 - self.k, num_units)
        pairs = [pair for i in range(num_units - warm) for pair in (("F", warm + i), ("B", i))]
        return [("F", i) for i in range(warm)] + pairs + [("B", i) for i in range(num_units - warm, num_units)]

    def note(self) -> None:
        self.most_held = max(self.most_held, self.weights.bytes_held)

    def forward(self, unit: int, step: int, received: torch.Tensor, dtype: torch.dtype) -> None:
        entered = received.detach()
        self.entered[unit] = entered if self.stage.is_first else entered.requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), self.weights.forward(unit, step):
            self.note()
            self.left[unit] = self.stage(self.entered[unit])

    def backward(self, unit: int, step: int, gradient: torch.Tensor, is_last: bool) -> torch.Tensor | None:
        with self.weights.backward(unit, step):
            self.note()
            self.left.pop(unit).backward(gradient)
        if is_last:
            self.optimizer.step()
            self.note()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self.entered.pop(unit).grad


def drive(driven: list[Driven], windows, dtype=torch.float32) -> None:
    """Run windows of steps with so many units each, every pass as soon as what it needs is there."""
    num_units_before = 0
    for sizes in windows:
        step_of = [step for step, size in enumerate(sizes) for _ in range(size)]
        inputs = [{u: unit_of_data(num_units_before + u)[0] for u in range(len(step_of))}, *({} for _ in driven[1:])]
        gradients: list[dict[int, torch.Tensor]] = [{} for _ in driven]
        rows = [stage.row(len(step_of), len(driven)) for stage in driven]
        for stage in driven:
            stage.weights.begin()
        while any(rows):
            for k, (stage, row) in enumerate(zip(driven, rows, strict=True)):
                if not row or row[0][1] not in (inputs if row[0][0] == "F" else gradients)[k]:
                    continue
                op, unit = row.pop(0)
                step = step_of[unit]
                if op == "F":
                    stage.forward(unit, step, inputs[k].pop(unit), dtype)
                    if k + 1 < len(driven):
                        inputs[k + 1][unit] = stage.left[unit].detach()
                    else:
                        target = unit_of_data(num_units_before + unit)[1]
                        gradients[k][unit] = output_gradient(stage.left[unit], target)
                else:
                    is_last = step_of[unit + 1 : unit + 2] != [step]
                    found = stage.backward(unit, step, gradients[k].pop(unit), is_last)
                    if k:
                        gradients[k - 1][unit] = found
        for stage in driven:
            assert stage.weights.num_updates == len(sizes)
            stage.weights.end()
            assert stage.weights.bytes_held == 0
        num_units_before += len(step_of)


def driven_stages(kind, num_stages, units_per_step, make_optimizer, stages=None) -> list[Driven]:
    stages = stages or make_stages(num_stages)
    return [Driven(s, kind, k, num_stages, units_per_step, make_optimizer) for k, s in enumerate(stages)]
