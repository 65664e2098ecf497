"""What freezing and elastic transitions cost and gain, without and with the activation cache."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from hf_pipetransformer.engine.timing import MEASURED_STEPS, WARMUP_STEPS
from hf_pipetransformer.schedules.layout import Layout

from .measure import Settings, alternate, experiment, launch, report, summary
from .models import SHORT_BERT, SHORT_MODELS, SHORT_VIT
from .training import Timed, cache_epochs, train


NUM_BATCHES = 4
DEPTHS = {SHORT_VIT: (4, 6, 8, 10), SHORT_BERT: (2, 4, 5)}


def train_model(name: str, num_steps: int, kind: type[Timed] = Timed, **options: Any) -> Any:
    """A run of one of the models on random data of a few batches."""
    model = SHORT_MODELS[name]
    return train(model.task(NUM_BATCHES), model.batch, kind, max_steps=num_steps, **options)


# ---- throughput ----


def run_at(name: str, frozen: int, is_cached: bool) -> dict[str, Any]:
    """Parts of a step at F frozen layers, and what the profile says of the blocks."""
    options: dict[str, Any] = {"freeze_policy": "none", "activation_cache": "off"}
    if frozen:
        cache = "on" if is_cached else "off"
        options = {"freeze_policy": "fixed", "freeze_at": f"0:{frozen}", "activation_cache": cache}
    # The first epoch stores.
    num_steps = NUM_BATCHES + WARMUP_STEPS + MEASURED_STEPS
    trainer = train_model(name, num_steps, pipeline_parallel_size="1", activation_cache_dir="cache", **options)
    pipeline = trainer.pipeline_run.pipeline
    levels = pipeline.layout.num_frozen_layers, pipeline.layout.cache_level
    assert levels == (frozen, frozen if is_cached else 0) and trainer.meter.is_done, levels
    later = cache_epochs(trainer.events)[1:] if frozen and is_cached and dist.get_rank() == 0 else []
    assert sum(epoch["misses"] for epoch in later) == 0, later
    read = sum(epoch["read_seconds"] for epoch in later) / dist.get_world_size() / (num_steps - NUM_BATCHES)
    costs = pipeline.start_up.plans.inputs(pipeline.layout, 1, {}).blocks
    return {"parts": trainer.meter.medians(), "costs": costs, "read": read}


def beside_bound(num_layers: int, frozen: int, is_cached: bool, full: dict[str, Any], run: dict[str, Any]) -> Any:
    """Shares of the bound of a run at F, by the block of the run at F=0 in the same round.

    A frozen layer costs its forward (1), or nothing if it is stored; an active one costs 3, the first of them 2.
    """
    costs, parts, at_zero = full["costs"], run["parts"], full["parts"]
    # The layers' share of forward and backward at F=0; embeddings and head by their share in the block profile.
    embeddings, head = costs.forward[0] + costs.edge_backward[0], costs.forward[-1] + costs.backward[-1]
    computed = at_zero["forward"] + at_zero["backward"]
    scale = computed / (sum(costs.forward) + sum(costs.backward[1:]) + costs.edge_backward[0])
    block = (computed - (embeddings + head) * scale) / (3 * num_layers)
    bound = block * (3 * (num_layers - frozen) - 1) + scale * head
    bound += parts["total"] - parts["forward"] - parts["backward"]
    if not is_cached:
        bound += block * frozen + scale * costs.forward[0]
    share = "share of the bound, rest as measured" if is_cached else "share of the bound"
    found = {share: bound / parts["total"], "over F=0": at_zero["total"] / parts["total"]}
    return found | {"seconds a step": parts["total"], "seconds a step, reading rows": run["read"]}


def throughput(name: str, is_cached: bool, rounds: int) -> dict[str, Any]:
    """Steps at F frozen layers beside the bound, round by round."""
    depths, num_layers = DEPTHS[name], SHORT_MODELS[name].num_layers
    runs = alternate({frozen: partial(run_at, name, frozen, is_cached) for frozen in (0, *depths)}, rounds)
    table = {}
    for frozen in depths:
        pairs = zip(runs[0], runs[frozen], strict=True)
        found = [beside_bound(num_layers, frozen, is_cached, full, run) for full, run in pairs]
        table[f"F={frozen}"] = {key: summary([each[key] for each in found]) for key in found[0]}
    report(name, table)
    return table


@experiment("freezing.json", section="throughput", minutes=8, quick_minutes=2)
def freezing_throughput(settings: Settings) -> dict[str, Any]:
    """Steps of a ViT at F frozen layers without a cache beside the bound, K=1, R=2."""
    return launch(throughput, 2, SHORT_VIT, False, settings.of(5, 1))


@experiment("cache.json", section="throughput", minutes=12, quick_minutes=3)
def cache_throughput(settings: Settings) -> dict[str, Any]:
    """Steps at F frozen layers with every sample stored beside the bound, K=1, R=2."""
    return {name: launch(throughput, 2, name, True, settings.of(5, 1)) for name in SHORT_MODELS}


# ---- transitions ----


class Holding(Timed):
    """Keeps what the process holds after every transition."""

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)
        self.held: list[dict[str, float]] = []
        transitions = self.pipeline_run.training.transitions
        transitions.move = partial(self._move, transitions.move)
        return prepared

    def _move(self, move: Callable[[Any], None], change: Any) -> None:
        move(change)
        process = psutil.Process()
        memory = process.memory_info().rss
        self.held.append({"descriptors": process.num_fds(), "threads": process.num_threads(), "rss": memory})


def layout_of(num_layers: int, stages: int) -> dict[str, Any]:
    """A layout of two processes as it stands in an events file, cut in the middle."""
    blocks = 2 * num_layers + 2
    middle, microbatches = ([blocks // 2], 4) if stages == 2 else ([], 1)
    return Layout(num_layers, 0, stages, 2 // stages, (0, *middle, blocks), microbatches, "1f1b").as_event()


def transitions(name: str, count: int) -> dict[str, Any]:
    """Forced changes between K=2 and K=1 x R=2, every third step: seconds, bytes, and what a process holds then."""
    kinds = [layout_of(SHORT_MODELS[name].num_layers, stages) for stages in (2, 1)]
    plan: list[dict[str, Any]] = [{"event": "run", "step": 0, "layout": kinds[0]}]
    plan += [{"event": "transition", "step": 3 * i, "to": kinds[i % 2]} for i in range(1, count + 1)]
    Path("plan.jsonl").write_text("".join(json.dumps(event) + "\n" for event in plan))
    dist.barrier()
    trainer = train_model(name, 3 * (count + 1), Holding, pipeline_parallel_size="2", layout_plan="plan.jsonl")
    found = [event for event in trainer.events if event["event"] == "transition"] if dist.get_rank() == 0 else []
    if not found:
        return {}
    return {
        "seconds": summary([event["seconds"] for event in found]),
        "MiB moved, largest": round(max(event["bytes_moved"] for event in found) / 2**20, 1),
        # Even transitions lead to K=2, odd ones to K=1: compare like with like.
        "held after transition 10": trainer.held[9],
        f"held after transition {len(found)}": trainer.held[-1],
    }


@experiment("freezing.json", section="transitions", minutes=6, quick_minutes=2)
def freezing_transitions(settings: Settings) -> dict[str, Any]:
    """Seconds and bytes of forced changes between K=2 and K=1 x R=2, and what a process holds after them."""
    return {name: launch(transitions, 2, name, settings.of(50, 12)) for name in SHORT_MODELS}


def prediction(name: str, runs: int) -> dict[str, Any]:
    """Predicted over measured step time after each transition of runs that freeze by schedule."""
    ratios: dict[str, list[float]] = {}
    for _ in range(runs):
        trainer = train_model(
            name, 80, pipeline_parallel_size="2", pipeline_parallel_num_microbatches="4", freeze_policy="schedule",
            freeze_interval="20", freeze_warmup=0,
        )  # fmt: skip
        for event in trainer.events if dist.get_rank() == 0 else ():
            if event["event"] == "profile" and event["what"] == "step":
                key = f"K={event['layout']['num_stages']}, F={event['layout']['num_frozen_layers']}"
                ratios.setdefault(key, []).append(event["predicted_step_s"] / event["measured_step_s"])
    if not ratios:
        return {}
    errors = [abs(ratio - 1) for values in ratios.values() for ratio in values]
    table = {key: summary(values) for key, values in ratios.items()}
    return {"absolute error": summary(errors), "predicted over measured": table}


@experiment("freezing.json", section="prediction", minutes=12, quick_minutes=3)
def freezing_prediction(settings: Settings) -> dict[str, Any]:
    """Step time that the simulator predicts after each transition beside the measured one."""
    return {name: launch(prediction, 2, name, settings.of(7, 1)) for name in SHORT_MODELS}


class Watching(Timed):
    """Times norms by layer and their record beside one norm of everything, with the gradients of the last step."""

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        if self.state.global_step == self.state.max_steps - 1:
            one_norm = partial(get_total_norm, [p.grad for p in self.model.parameters() if p.grad is not None])
            calls = {"by layer": self.pipeline_run.training.gradient_norm, "one norm": one_norm}
            self.taken = alternate({key: partial(local_seconds, call) for key, call in calls.items()}, 30)
        return norm


def monitor(name: str, num_steps: int) -> dict[str, float]:
    """Share of a step that watching gradient norms takes: norms by layer and their record, instead of one norm."""
    trainer = train_model(
        name, num_steps, Watching, pipeline_parallel_size="1", freeze_policy="gradient_norm",
        freeze_min_active_layers=SHORT_MODELS[name].num_layers,
    )  # fmt: skip
    by_layer, one_norm = (statistics.median(values) for values in trainer.taken.values())
    return {"share of a step": round(max(0.0, by_layer - one_norm) / trainer.meter.medians()["total"], 5)}


def local_seconds(call: Callable[[], Any]) -> float:
    """Of this process alone."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@experiment("freezing.json", section="monitor", minutes=3, quick_minutes=2)
def freezing_monitor(settings: Settings) -> dict[str, Any]:
    """What measuring gradient norms takes of a step."""
    return {name: launch(monitor, 2, name, settings.of(40, 15)) for name in SHORT_MODELS}
