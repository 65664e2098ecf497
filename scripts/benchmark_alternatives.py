"""Step time and memory of ways to train one model on two devices that a user of Trainer can choose from.

    python -m scripts.benchmark_alternatives --output benchmarks/alternatives.json

A Llama with random float32 weights, the same batches, AdamW and gradient clipping in each:

- `two stages`: `PipeTransformerTrainer` with K=2 and four micro-batches, two processes.
- `naive split`: lower and upper layers on two devices that take turns, as with `device_map="auto"`: one process
  computes for both, so that its time is that of two such devices without transfers, and its memory that of both.
- `FSDP2`: `fully_shard` of every layer over gloo, two processes, a plain loop without Trainer.
- `DDP`: `Trainer` with data parallelism, two processes, each with the whole model.

Every process has one thread. Contenders take turns; a step's time is that between two ends of steps, the median of a
launch; printed are the median and the range of the rounds. Memory is the peak of a process's anonymous memory from the
second step on beyond what it had before the model was made, in a launch that gives freed memory back at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from scripts.bench.measure import REPOSITORY, RETURNS_FREED, PeakMemory, machine
from scripts.bench.memory import MODELS
from scripts.bench.plan import Watch


NUM_WORDS, NUM_TOKENS, BATCH, NUM_MICROBATCHES = 32_000, 64, 8, 4
NUM_STEPS, SKIPPED, LEARNING_RATE = 7, 2, 5e-5
STAGES, NAIVE, FSDP, DDP = "two stages", "naive split", "FSDP2", "DDP"
PROCESSES = {STAGES: 2, NAIVE: 1, FSDP: 2, DDP: 2}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, **MODELS["120M"]))


def make_rows() -> list[dict[str, torch.Tensor]]:
    words = torch.randint(0, NUM_WORDS, (BATCH * NUM_STEPS, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in words]


def train_with_trainer(name: str, folder: Path, watch: Watch) -> list[float]:
    """Train with plain Trainer, or with two stages, and return the losses."""
    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": NUM_STEPS, "learning_rate": LEARNING_RATE, "save_strategy": "no",
        "per_device_train_batch_size": BATCH // int(os.environ["WORLD_SIZE"]), "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    given: dict[str, Any] = {"train_dataset": make_rows(), "callbacks": [watch]}
    trainer: Trainer
    if name == STAGES:
        args = PipeTransformerArguments(
            **options, pipeline_parallel_size=2, pipeline_parallel_num_microbatches=NUM_MICROBATCHES,
            pipeline_gather_at_end="never",
        )  # fmt: skip
        trainer = PipeTransformerTrainer(make_model(), args, **given)
    else:
        trainer = Trainer(make_model(), TrainingArguments(**options, ddp_find_unused_parameters=False), **given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


def train_sharded(watch: Watch) -> list[float]:
    """Train with FSDP2 in a plain loop, and return this rank's losses."""
    torch.distributed.init_process_group("gloo")
    model, rank, world_size = make_model(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    own, losses, rows = BATCH // world_size, [], make_rows()
    for step in range(NUM_STEPS):
        start = step * BATCH + rank * own
        words = torch.stack([row["input_ids"] for row in rows[start : start + own]])
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(mean := loss.detach() / world_size)
        losses.append(mean.item())
        watch.on_step_end()
    return losses


def worker(name: str, folder: Path, is_memory: bool) -> None:
    """One rank of a launch; its figures go to a file."""
    torch.set_num_threads(1)
    gc.collect()
    memory = PeakMemory("made") if is_memory else None
    watch = Watch(memory)
    losses = train_sharded(watch) if name == FSDP else train_with_trainer(name, folder, watch)
    if memory is not None:
        memory.end()
    steps = [after - before for before, after in pairwise(watch.ends)][SKIPPED:]
    found = {
        "losses": losses, "seconds": statistics.median(steps),
        "bytes": 0 if memory is None else memory.peaks["training"],
    }  # fmt: skip
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def launch(name: str, is_memory: bool = False) -> list[dict[str, Any]]:
    """Run a contender once and return what each rank found."""
    with tempfile.TemporaryDirectory(prefix="benchmark-alternatives-") as made:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
            str(PROCESSES[name]), str(Path(__file__).resolve()), "--worker", name, made, str(int(is_memory)),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        environment |= RETURNS_FREED if is_memory else {}
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        return [json.loads((Path(made) / f"{rank}.json").read_text()) for rank in range(PROCESSES[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required="--worker" not in sys.argv)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, folder, is_memory = options.worker
        worker(name, Path(folder), bool(int(is_memory)))
        return
    rounds = [{name: launch(name) for name in PROCESSES} for _ in range(options.rounds)]
    expected = rounds[0][NAIVE][0]["losses"]
    results: dict[str, Any] = {}
    for name in PROCESSES:
        seconds = [max(rank["seconds"] for rank in each[name]) for each in rounds]
        ratios = [
            time / max(rank["seconds"] for rank in each[NAIVE]) for time, each in zip(seconds, rounds, strict=True)
        ]
        losses = rounds[0][name][0]["losses"]
        results[name] = {
            "processes": PROCESSES[name],
            "seconds of a step": {"median": statistics.median(seconds), "range": [min(seconds), max(seconds)]},
            "of the naive split's": {"median": statistics.median(ratios), "range": [min(ratios), max(ratios)]},
            "peak MiB of each process": [round(rank["bytes"] / 2**20) for rank in launch(name, is_memory=True)],
            "largest relative difference of losses": max(
                abs(own - other) / other for own, other in zip(losses, expected, strict=True)
            ),
        }
        print(name, json.dumps(results[name], indent=1), flush=True)
    about = {
        "model": "Llama, 12 layers x 768, 32,000 words, float32", "samples of a step": BATCH, "tokens": NUM_TOKENS,
        "rounds": options.rounds, "load average": os.getloadavg(), **machine(2),
    }  # fmt: skip
    options.output.write_text(json.dumps({"machine": about, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
