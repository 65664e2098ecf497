"""Speed of the pipeline core beside its peers, on this machine.

    torchrun --standalone --nproc_per_node 2 scripts/benchmark_pipeline.py --output benchmarks/pipeline_core.json

Two questions, each answered by ratios inside one run with the contenders alternating, medians and the spread printed:

1. `data_parallel`: K=1, R=world size, beside `Trainer` with DistributedDataParallel (found-unused off, same batch).
2. `schedules`: K=world size, M = 2, 4, 8, our engine beside the schedules of `torch.distributed.pipelining` on the
   very same stages; forward and backward of one mini-batch, no optimizer. One process running the whole model over
   the same micro-batches is the block: the ideal speed-up over it is K * M / (M + K - 1).

Two processes on two cores measure the engine, not what more devices would gain; a K=4 figure needs four devices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import accelerate
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import batch_size, split_batch
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.planning.planner import PipelineShape, plan_layout
from hf_pipetransformer.runtime.stage import Stage, StageSettings
from hf_pipetransformer.runtime.wiring import make_engine, start_stage
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.splitters.view import StageExit
from hf_pipetransformer.startup.check import probe_model
from hf_pipetransformer.startup.model import ProbeTarget


def bert_like(
    num_samples: int, vocab_size: int = 5000, num_tokens: int = 128
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT of 6 layers x 384 (the size of MiniLM)."""
    set_seed(0)
    config = BertConfig(
        vocab_size=vocab_size, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(5, vocab_size, (num_samples, num_tokens)),
        "attention_mask": torch.ones(num_samples, num_tokens, dtype=torch.long),
        "labels": torch.randint(0, 2, (num_samples,)),
    }
    return BertForSequenceClassification(config), inputs


def vit(num_samples: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """ViT of 12 layers x 192 on 65 tokens (32 px, patch 4)."""
    set_seed(0)
    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=12, num_attention_heads=3,
        intermediate_size=768, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(num_samples, 3, 32, 32), "labels": torch.randint(0, 10, (num_samples,))}
    return ViTForImageClassification(config), inputs


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]], int]] = {
    "bert-6x384, 128 tokens": (bert_like, 16),
    "vit-12x192, 65 tokens": (vit, 64),
}


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


# ---- 1. data parallel ----


class StepTimes(TrainerCallback):
    """Seconds from the beginning to the end of each optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def train_seconds(contender: str, model_name: str, num_steps: int, output_dir: str) -> float:
    """Median step time of one training run of one contender."""
    make, batch = MODELS[model_name]
    world = int(os.environ["WORLD_SIZE"])
    model, inputs = make(batch * 4)
    samples = [{key: value[i] for key, value in inputs.items()} for i in range(batch * 4)]
    common: dict[str, Any] = {
        "output_dir": output_dir, "max_steps": num_steps, "per_device_train_batch_size": batch // world,
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
        "logging_strategy": "no", "report_to": "none",
    }  # fmt: skip
    times = StepTimes()
    if contender == "ours":
        args: TrainingArguments = PipeTransformerArguments(pipeline_parallel_size="1", freeze_policy="none", **common)
        trainer: Trainer = PipeTransformerTrainer(model, args, train_dataset=samples, callbacks=[times])
    else:
        args = TrainingArguments(ddp_find_unused_parameters=False, **common)
        trainer = Trainer(model, args, train_dataset=samples, callbacks=[times])
        trainer.model_accepts_loss_kwargs = "vit" in model_name
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return statistics.median(times.seconds[3:])


def benchmark_data_parallel(rounds: int, num_steps: int, output_dir: str) -> dict[str, Any]:
    """Throughput of K=1 over that of Trainer with DDP, round by round."""
    results = {}
    for model_name in MODELS:
        seconds: dict[str, list[float]] = {"ours": [], "ddp": []}
        for index in range(rounds):
            for contender in ("ours", "ddp") if index % 2 else ("ddp", "ours"):
                dist.barrier()
                seconds[contender].append(train_seconds(contender, model_name, num_steps, output_dir))
        ratios = [ddp / ours for ours, ddp in zip(seconds["ours"], seconds["ddp"], strict=True)]
        results[model_name] = {
            "throughput_over_ddp": summary(ratios),
            "ours_ms": summary([1000 * s for s in seconds["ours"]]),
            "ddp_ms": summary([1000 * s for s in seconds["ddp"]]),
        }
        report(f"data parallel, {model_name}", results[model_name])
    return results


# ---- 2. schedules ----


class StageModule(nn.Module):
    """Our stage view as the module that `torch.distributed.pipelining` wants."""

    def __init__(self, stage: Stage, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.view = stage.view
        self.is_first = stage.groups.is_first
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


def probe(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Probe:
    """The start-up self-check on three samples."""
    tiny = {key: value[:3] for key, value in inputs.items()}
    return probe_model(
        ProbeTarget(model, find_splitter(model), tiny, lambda batch, _: model(**batch).loss, batch_size)
    )


def our_step(
    stage: Stage, model: nn.Module, found: Probe, inputs: dict[str, Any], m: int, name: str
) -> Callable[[], Any]:
    """One forward and backward of a mini-batch through our engine."""
    batch = len(inputs["labels"])
    layout = replace(stage.layout, schedule=name)
    engine = make_engine(stage.view, layout, stage.groups, stage.settings)
    row = find_schedule(name).table(layout.pipeline_size, m)[stage.groups.position]

    def step() -> torch.Tensor:
        model.zero_grad()
        parts = [
            MicroBatch(
                i, part, len(part["labels"]) / batch, found.activation.of(part), lambda part: model(**part).loss
            )
            for i, part in enumerate(split_batch(inputs, m))
        ]
        shares = engine.begin(row, parts).drain()
        stage.view.widen()
        return torch.stack(shares).sum() if shares else torch.zeros(())

    return step


def torch_step(
    stage: Stage, model: nn.Module, inputs: dict[str, Any], m: int, schedule_class: type
) -> Callable[[], Any]:
    """One forward and backward of a mini-batch through torch.distributed.pipelining."""
    module = StageModule(stage, model)
    groups = stage.groups
    pipe_stage = PipelineStage(module, groups.position, groups.pipeline_size, torch.device("cpu"))
    loss = nn.CrossEntropyLoss()
    schedule = schedule_class(pipe_stage, m, loss_fn=loss, scale_grads=True)
    main, labels = inputs[module.main_input], inputs["labels"]
    rest = {key: value for key, value in inputs.items() if key not in (module.main_input, "labels")}
    if not groups.is_first:
        # The embeddings do not run here; the model only asks for the shape of its main input.
        rest[module.main_input] = main

    def step() -> torch.Tensor:
        model.zero_grad()
        losses: list[torch.Tensor] = []
        if groups.is_first:
            schedule.step(main, **rest)
        elif groups.is_last:
            schedule.step(target=labels, losses=losses, **rest)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def alone_step(model: nn.Module, inputs: dict[str, Any], m: int) -> Callable[[], Any]:
    """One process, the whole model, the same micro-batches."""
    batch = len(inputs["labels"])

    def step() -> None:
        model.zero_grad()
        for part in split_batch(inputs, m):
            (model(**part).loss * (len(part["labels"]) / batch)).backward()

    return step


def timed(step: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a step; all ranks start together."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def benchmark_schedules(rounds: int, repeats: int, num_microbatches: tuple[int, ...]) -> dict[str, Any]:
    """Speed-up over one process of our engine's and torch's schedules, round by round."""
    world = dist.get_world_size()
    topology = Topology(timeout=120, local_world_size=world)
    results: dict[str, Any] = {}
    for model_name, (make, batch) in MODELS.items():
        model, inputs = make(batch)
        whole, _ = make(batch)
        found = probe(model, inputs)
        shape = PipelineShape(world, 1, 1, "1f1b")
        layout = plan_layout(found.block_flops, found.structure.cut_positions(), shape)
        settings = StageSettings(found, topology, torch.device("cpu"), 120.0, "never", StepMeter(torch.device("cpu")))
        stage = start_stage(model, find_splitter(model), layout, settings, is_training=True)
        results[model_name] = {"boundaries": layout.boundaries}
        for m in num_microbatches:
            results[model_name][f"M={m}"] = _one_setting(stage, model, whole, found, inputs, m, rounds, repeats)
            report(f"schedules, {model_name}, M={m}", results[model_name][f"M={m}"])
        results[model_name]["best over best"] = _best_to_best(results[model_name])
        report(f"schedules, {model_name}, best over best", results[model_name]["best over best"])
    return results


def _one_setting(
    stage: Stage, model: nn.Module, whole: nn.Module, found: Probe, inputs: dict[str, Any], m: int, rounds: int,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    alone = alone_step(whole, inputs, m) if dist.get_rank() == 0 else lambda: None
    contenders: dict[str, Callable[[], Any]] = {
        "ours 1f1b": our_step(stage, model, found, inputs, m, "1f1b"),
        "ours gpipe": our_step(stage, model, found, inputs, m, "gpipe"),
        "ours zb_h1": our_step(stage, model, found, inputs, m, "zb_h1"),
        "torch 1f1b": torch_step(stage, model, inputs, m, Schedule1F1B),
        "torch gpipe": torch_step(stage, model, inputs, m, ScheduleGPipe),
    }
    with stage.active():
        losses = {name: step() for name, step in contenders.items()}
    if stage.groups.is_last:
        values = [float(loss.detach()) for loss in losses.values()]
        assert max(values) - min(values) <= 1e-5 * max(values), f"the contenders compute different losses: {losses}"
    seconds: dict[str, list[float]] = {name: [] for name in ["alone", *contenders]}
    for index in range(rounds):
        seconds["alone"].append(timed(alone, repeats))
        names = list(contenders)
        for name in names if index % 2 else reversed(names):
            with stage.active():
                seconds[name].append(timed(contenders[name], repeats))
    k = stage.layout.num_stages
    ideal = k * m / (m + k - 1)
    speedups = {name: [a / b for a, b in zip(seconds["alone"], seconds[name], strict=True)] for name in contenders}
    best_torch = max(("torch 1f1b", "torch gpipe"), key=lambda name: statistics.median(speedups[name]))
    best_ours = max(("ours 1f1b", "ours gpipe"), key=lambda name: statistics.median(speedups[name]))
    ratios = [a / b for a, b in zip(speedups[best_ours], speedups[best_torch], strict=True)]
    return {
        "speed-up over one process": {name: summary(values) for name, values in speedups.items()},
        "ideal": round(ideal, 3),
        "share of the ideal": {name: summary([v / ideal for v in values]) for name, values in speedups.items()},
        "best": {"ours": best_ours, "torch": best_torch},
        "ours over the best of torch": summary(ratios),
        "zb_h1 over 1f1b": summary([a / b for a, b in zip(seconds["ours 1f1b"], seconds["ours zb_h1"], strict=True)]),
        "seconds": {name: summary(values) for name, values in seconds.items()},
    }


def _best_to_best(results: dict[str, Any]) -> dict[str, Any]:
    """The fastest step of ours over the fastest of torch, whatever M."""
    entries = {key: value["seconds"] for key, value in results.items() if key.startswith("M=")}
    best = {
        side: min(
            (s["median"], f"{name}, {key}") for key, v in entries.items() for name, s in v.items() if side in name
        )
        for side in ("ours", "torch")
    }
    return {"ours": best["ours"], "torch": best["torch"], "ratio": round(best["torch"][0] / best["ours"][0], 4)}


def report(title: str, values: dict[str, Any]) -> None:
    """Print a result on rank 0."""
    if dist.get_rank() == 0:
        print(f"{title}: {json.dumps(values)}", flush=True)


def machine(num_processes: int | None = None) -> dict[str, Any]:
    """What the figures were measured on; the processes are those of the group if their number is not given."""
    return {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "processor": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "accelerate": accelerate.__version__, "numpy": np.__version__,
        "processes": num_processes or dist.get_world_size(), "threads a process": 1,
        "malloc": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")},
    }  # fmt: skip


def finish(output: Path, results: dict[str, Any]) -> None:
    """Rank 0 writes the results; all processes end together."""
    if dist.get_rank() == 0:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of alternating contenders")
    parser.add_argument("--repeats", type=int, default=1, help="steps a contender runs per round (schedules)")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps per run (data_parallel)")
    parser.add_argument("--only", choices=("data_parallel", "schedules"), help="one question only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerate.PartialState()
    results: dict[str, Any] = {"machine": machine()}
    if options.only != "data_parallel":
        results["schedules"] = benchmark_schedules(options.rounds, options.repeats, (2, 4, 8))
    if options.only != "schedules":
        folder = str(options.output.parent / "_runs")
        results["data_parallel"] = benchmark_data_parallel(max(5, options.rounds // 2), options.steps, folder)
    finish(options.output, results)


if __name__ == "__main__":
    main()
