"""Our engine beside the schedules of `torch.distributed.pipelining`, on the very same stages and real computation.

One process that runs the whole model over the same micro-batches is the block: the ideal speed-up over it is
K M / (M + K - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hf_pipetransformer.data.batches import split_batch
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.runtime.wiring import make_engine
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.splitters.view import StageExit

from .measure import Settings, alternate, experiment, launch, ratios, report, seconds_of, summary
from .models import MODELS
from .stages import CPU, Split, check_model, make_topology, require_equal_losses, split_model


Step = Callable[[], Any]
ALONE = "alone"


class StageModule(nn.Module):
    """Our stage view as the module that `torch.distributed.pipelining` wants."""

    def __init__(self, stage: Stage, model: nn.Module) -> None:
        super().__init__()
        self.model, self.view, self.is_first = model, stage.view, stage.groups.is_first
        self.main_input = getattr(model, "main_input_name", "input_ids")

    def forward(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.is_first:
            kwargs[self.main_input] = tensor
        else:
            self.view.received = tensor
        try:
            return self.model(**kwargs).logits
        except StageExit as stage_exit:
            stage_exit.__traceback__ = None
            return stage_exit.hidden


def our_step(split: Split, inputs: dict[str, Any], m: int, name: str) -> Step:
    """One forward and backward of a mini-batch through our engine."""
    stage, model, found = split
    layout = replace(stage.layout, schedule=name)
    engine = make_engine(stage.view, layout, stage.groups, stage.settings)
    row = find_schedule(name).table(layout.pipeline_size, m)[stage.groups.position]
    batch = len(inputs["labels"])

    def loss(part: dict[str, Any]) -> Any:
        return model(**part).loss

    def step() -> torch.Tensor:
        model.zero_grad()
        parts = [
            MicroBatch(i, part, len(part["labels"]) / batch, found.activation.of(part), loss)
            for i, part in enumerate(split_batch(inputs, m))
        ]
        with stage.active():
            shares = engine.begin(row, parts).drain()
            stage.view.widen()
        return torch.stack(shares).sum().detach() if shares else torch.zeros(())

    return step


def torch_step(split: Split, inputs: dict[str, Any], m: int, schedule_class: type) -> Step:
    """One forward and backward of a mini-batch through torch.distributed.pipelining."""
    stage, model, _ = split
    groups, module = stage.groups, StageModule(stage, model)
    pipe_stage = PipelineStage(module, groups.position, groups.pipeline_size, CPU)
    schedule = schedule_class(pipe_stage, m, loss_fn=nn.CrossEntropyLoss(), scale_grads=True)
    main, labels = inputs[module.main_input], inputs["labels"]
    # The embeddings do not run on later stages; the model only asks for the shape of its main input there.
    left_out = ("labels", module.main_input) if groups.is_first else ("labels",)
    rest = {key: value for key, value in inputs.items() if key not in left_out}

    def step() -> torch.Tensor:
        model.zero_grad()
        losses: list[torch.Tensor] = []
        with stage.active():
            if groups.is_first:
                schedule.step(main, **rest)
            else:
                schedule.step(target=labels, losses=losses, **rest)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def alone_step(model: nn.Module, inputs: dict[str, Any], m: int) -> Step:
    """The whole model over the same micro-batches on rank 0; nothing elsewhere."""
    batch = len(inputs["labels"])

    def step() -> None:
        model.zero_grad()
        for part in split_batch(inputs, m):
            (model(**part).loss * (len(part["labels"]) / batch)).backward()

    return step if dist.get_rank() == 0 else lambda: None


def beside_ideal(seconds: Mapping[str, list[float]], m: int, k: int) -> dict[str, Any]:
    """Speed-ups over one process, and the best of ours over the best of torch."""
    ideal = k * m / (m + k - 1)
    speedups = {name: ratios(seconds[ALONE], values) for name, values in seconds.items() if name != ALONE}
    medians = {name: statistics.median(values) for name, values in speedups.items()}
    best = {side: max((f"{side} 1f1b", f"{side} gpipe"), key=medians.__getitem__) for side in ("ours", "torch")}
    return {
        "speed-up over one process": {name: summary(values) for name, values in speedups.items()},
        "ideal": round(ideal, 3),
        "share of the ideal": {name: summary([v / ideal for v in values]) for name, values in speedups.items()},
        "best": best,
        "ours over the best of torch": summary(ratios(speedups[best["ours"]], speedups[best["torch"]])),
        "zb_h1 over 1f1b": summary(ratios(seconds["ours 1f1b"], seconds["ours zb_h1"])),
        "seconds": {name: summary(values) for name, values in seconds.items()},
    }


def best_over_best(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fastest step of ours over the fastest of torch, whatever M."""
    best = {}
    for side in ("ours", "torch"):
        best[side] = min(
            (seconds["median"], f"{name}, {key}")
            for key, found in settings.items()
            for name, seconds in found["seconds"].items()
            if side in name
        )
    return {**best, "ratio": round(best["torch"][0] / best["ours"][0], 4)}


def compare(name: str, rounds: int) -> dict[str, Any]:
    """All contenders on one model, for several numbers of micro-batches."""
    make, batch, _ = MODELS[name]
    model, inputs = make(batch)
    whole, _ = make(batch)
    split, results = split_model(model, check_model(model, inputs), make_topology()), {}
    for m in (2, 4, 8):
        steps = {f"ours {each}": our_step(split, inputs, m, each) for each in ("1f1b", "gpipe", "zb_h1")}
        steps["torch 1f1b"] = torch_step(split, inputs, m, Schedule1F1B)
        steps["torch gpipe"] = torch_step(split, inputs, m, ScheduleGPipe)
        require_equal_losses(split.stage, {each: step() for each, step in steps.items()})
        steps[ALONE] = alone_step(whole, inputs, m)
        seconds = alternate({each: partial(seconds_of, step) for each, step in steps.items()}, rounds)
        results[f"M={m}"] = beside_ideal(seconds, m, split.stage.layout.num_stages)
        report(f"{name}, M={m}", results[f"M={m}"])
    return {"boundaries": split.stage.layout.boundaries, **results, "best over best": best_over_best(results)}


@experiment("pipeline_core.json", minutes=12, quick_minutes=3)
def pipeline_core(settings: Settings) -> dict[str, Any]:
    """Our engine beside `torch.distributed.pipelining` on the same two stages, and beside one process."""
    return {"schedules": {name: launch(compare, 2, name, settings.of(11, 1)) for name in MODELS}}
