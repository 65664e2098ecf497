"""What some of Trainer's options cost and gain in a pipeline, on this machine.

    torchrun --standalone --nproc_per_node 2 scripts/benchmark_features.py --data ../shared/data \
        --output benchmarks/features.json

Three pieces (`--only`), each merged into the file with its date and machine; two processes:

1. `memory`: `pipeline_checkpoint` at K=2: the most bytes that autograd keeps for the backward at any moment, by stage
   (counted, parameters apart), and the largest relative difference of the losses to `never`.
2. `compile`: `torch_compile`, layer by layer with inductor, at K=1 and K=2: steps beside uncompiled ones (alternating
   runs, medians; the steps that compile are left out and their seconds reported), and the difference of the losses.
3. `loader`: the share of a step in which a process waits for its batch: CIFAR-10 images, decoded at every access, for
   0, 1 and 2 workers a process; all layers trained, all but the last frozen, and the same with stored activations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from accelerate import PartialState
from benchmark_cache import merge
from benchmark_pipeline import MODELS, summary
from benchmark_real_input import cifar10_images
from transformers import PrinterCallback, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.selftest.runs import SavedBytes


NUM_STEPS, NUM_WARM = 12, 4
NUM_LOADER_EPOCHS, LOADER_BATCH = 4, 32


class Timed(PipeTransformerTrainer):
    """Keeps the losses and the seconds of each step, and of those the ones of waiting for its batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[_StepClock(self)], **kwargs)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.began = 0.0
        self.remove_callback(PrinterCallback)

    def _fetch(self, num_batches: int) -> Any:
        self.began = start = time.perf_counter()
        fetched = super()._fetch(num_batches)
        self.waited.append(time.perf_counter() - start)
        return fetched

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])
        super().log(logs, start_time)


class _StepClock(TrainerCallback):
    def __init__(self, trainer: Timed) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.seconds.append(time.perf_counter() - self.trainer.began)


def trainer_of(model: Any, samples: Any, batch: int, folder: str, **options: Any) -> Timed:
    """A run of `NUM_STEPS` steps, unless `options` say otherwise."""
    args = PipeTransformerArguments(
        **{
            "output_dir": folder, "per_device_train_batch_size": batch // dist.get_world_size(), "logging_steps": 1,
            "max_steps": NUM_STEPS, "learning_rate": 1e-5, "save_strategy": "no", "report_to": "none",
            "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "freeze_policy": "none",
            "activation_cache": "off", **options,
        }
    )  # fmt: skip
    return Timed(model=model, args=args, train_dataset=samples)


def run_of(name: str, folder: str, **options: Any) -> Timed:
    """One of the models at random on random samples, ready to train."""
    make, batch = MODELS[name]
    model, inputs = make(batch * 2)
    samples = [{key: value[i] for key, value in inputs.items()} for i in range(batch * 2)]
    return trainer_of(model, samples, batch, folder, **options)


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative one."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


# ---- 1. memory ----


def benchmark_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peaks of both stages by schedule and mode."""
    table: dict[str, Any] = {}
    for name in MODELS:
        for schedule in ("gpipe", "1f1b"):
            losses: list[float] = []
            for mode in ("never", "except_last", "always"):
                trainer = run_of(
                    name, options.folder, max_steps=3, pipeline_parallel_size="2",
                    pipeline_parallel_num_microbatches="8", pipeline_schedule=schedule, pipeline_checkpoint=mode,
                )  # fmt: skip
                count = SavedBytes(trainer)
                with count.hooks():
                    trainer.train()
                losses = losses or trainer.losses
                peaks = trainer.topology.gather(count.most)
                table.setdefault(name, {})[f"{schedule}, {mode}"] = {
                    "MB by stage": [round(peak / 1e6, 1) for peak in peaks],
                    "largest relative difference of the losses": difference(trainer.losses, losses),
                }
    return {"K": 2, "M": 8, **table}


# ---- 2. compilation ----


def benchmark_compile(options: argparse.Namespace) -> dict[str, Any]:
    """Steps with compiled layers beside steps without."""
    table: dict[str, Any] = {}
    for name in MODELS:
        for num_stages in (1, 2):
            ratios, differences, first = [], [], []
            for index in range(options.rounds):
                runs = {}
                for compiles in (True, False) if index % 2 else (False, True):
                    torch._dynamo.reset()
                    runs[compiles] = trainer = run_of(
                        name, options.folder, torch_compile=compiles, pipeline_parallel_size=str(num_stages),
                        pipeline_parallel_num_microbatches="4" if num_stages > 1 else "1",
                    )  # fmt: skip
                    trainer.train()
                medians = {key: statistics.median(run.seconds[NUM_WARM:]) for key, run in runs.items()}
                ratios.append(medians[False] / medians[True])
                differences.append(difference(runs[True].losses, runs[False].losses))
                first.append(sum(runs[True].seconds[:NUM_WARM]) - NUM_WARM * medians[True])
            table[f"{name}, K={num_stages}"] = {
                "throughput over uncompiled": summary(ratios),
                "largest relative difference of the losses": max(differences),
                "seconds of compiling": summary(first),
            }
    return {"backend": "inductor", "steps": NUM_STEPS, "rounds": options.rounds, **table}


# ---- 3. the loader ----


def benchmark_loader(options: argparse.Namespace) -> dict[str, Any]:
    """Share of the steps after the first two epochs in which a process waits for its batch."""
    options.num_images = 512
    table: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {
        "all layers trained": {},
        "11 of 12 layers frozen": {"freeze_policy": "fixed", "freeze_at": "0:11"},
        "11 of 12 layers frozen, activations stored": {
            "freeze_policy": "fixed", "freeze_at": "0:11", "activation_cache": "on",
        },
    }  # fmt: skip
    for setting, extra in settings.items():
        for num_workers in (0, 1):
            shares, seconds = [], []
            for _ in range(options.rounds):
                parts = loader_parts(options, num_workers, extra)
                shares.append(parts["waited"] / parts["step"])
                seconds.append(parts["step"])
            table.setdefault(setting, {})[f"{num_workers} workers a process"] = {
                "share of a step": summary(shares),
                "seconds a step": summary(seconds),
            }
    return {"images": options.num_images, "global batch": LOADER_BATCH, **table}


def loader_parts(options: argparse.Namespace, num_workers: int, extra: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step and of its waiting, by the process that waits longest."""
    model, training, _ = cifar10_images(options.data, options.models, options.num_images, 0)
    steps = options.num_images // LOADER_BATCH
    trainer = trainer_of(
        model, training, LOADER_BATCH, options.folder, pipeline_parallel_size="1",
        max_steps=NUM_LOADER_EPOCHS * steps, dataloader_num_workers=num_workers,
        dataloader_persistent_workers=num_workers > 0, remove_unused_columns=False,
        activation_cache_dir=options.folder, **extra,
    )  # fmt: skip
    trainer.train()
    # The first batch of an epoch waits for workers that could not know that it would be asked for.
    counted = [i for i in range(2 * steps, len(trainer.seconds)) if i % steps]
    waited = trainer.topology.gather(sum(trainer.waited[i] for i in counted) / len(counted))
    step = trainer.topology.gather(sum(trainer.seconds[i] for i in counted) / len(counted))
    return {"waited": max(waited), "step": max(step)}


PIECES = {"memory": benchmark_memory, "compile": benchmark_compile, "loader": benchmark_loader}


def main() -> None:
    """Run the pieces that were asked for, print and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; pieces measured before are kept")
    parser.add_argument("--data", type=Path, help="folder of the parquet files")
    parser.add_argument("--models", type=Path, help="folder of the small ViT")
    parser.add_argument("--folder", default="outputs/benchmark_features", help="for what the runs write")
    parser.add_argument("--only", nargs="+", choices=list(PIECES), default=list(PIECES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    PartialState(cpu=True)  # The process group, before a run makes it.
    for name in options.only:
        section = PIECES[name](options)
        if dist.get_rank() == 0:
            print(name, section, flush=True)
            if options.output is not None:
                merge(options.output, name, section, dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
