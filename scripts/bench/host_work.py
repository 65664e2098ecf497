"""Instructions of the host's main thread for each micro-batch: plain Trainer, one stage, two stages, the engine alone.

Valgrind counts them, so figures are those of any machine with these versions, whatever else it does. Each contender
trains with 8 and with 16 micro-batches of the same size an optimizer step; what a step takes besides cancels out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, set_seed

from hf_pipetransformer.engine.engine import Engine, StageLinks, Wire
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.schedules.actions import ActionList
from hf_pipetransformer.schedules.tables import find_schedule

from .measure import REPOSITORY, Settings, experiment, report
from .training import make_trainer


FEW, MANY = 8, 16
"""Micro-batches of an optimizer step."""
SETTLED, COUNTED = 15, 3
"""Steps before the first that counts, among them all that are timed for the plan; and steps that count."""
LENGTH, WIDTH = 8, 32
ENGINE = "two stages, the engine alone"
CONTENDERS = {"plain Trainer": 1, "one stage": 1, "two stages": 2, ENGINE: 2}
"""Each with its number of processes."""


class Counting(TrainerCallback):
    """Has Valgrind count the instructions of `COUNTED` steps."""

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == SETTLED:
            begin_counting()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == SETTLED + COUNTED:
            control("--dump")


def begin_counting() -> None:
    """Count from here on; before, Valgrind runs a process many times as fast."""
    control("--instr=on")
    control("--zero")


def control(command: str) -> None:
    """Give a command to the Valgrind that this process runs under."""
    subprocess.run(["callgrind_control", command, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def train(name: str, count: int) -> None:
    """Train a small BERT with `count` micro-batches of one sample a step."""
    set_seed(0)
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=LENGTH, **shape))
    rows = [{"input_ids": each, "labels": 0} for each in torch.randint(50, (count, LENGTH))]
    given = {"model": model, "train_dataset": rows, "callbacks": [Counting()]}
    options: dict[str, Any] = {"max_steps": SETTLED + COUNTED, "optim": "sgd"}
    if name == "plain Trainer":
        make_trainer(given, 1, Trainer, gradient_accumulation_steps=count, **options).train()
        return
    stages = CONTENDERS[name]
    options |= {"pipeline_parallel_size": stages, "pipeline_parallel_num_microbatches": count, "pipeline_timeout": 600}
    options |= {"elastic": False, "pipeline_schedule": "1f1b", "activation_cache": "off"}
    make_trainer(given, count * stages, **options, pipeline_gather_at_end="never").train()


class Nothing:
    """Stage program that computes nothing."""

    def __init__(self) -> None:
        self.result = torch.zeros(1, LENGTH, WIDTH)

    def clear(self) -> None:
        pass

    def extend(self, actions: ActionList) -> None:
        pass

    def forward(self, _micro_batch: MicroBatch, _received: Any) -> torch.Tensor:
        return self.result

    backward = forward


def run_engine(count: int) -> None:
    """Run steps of the engine on one of two stages."""
    rank = dist.get_rank()
    shape = (1, LENGTH, WIDTH)
    # One for each direction, as messages of a group match by their order alone.
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    below = [Wire(1 - rank, group, "a tensor", torch.float32, torch.device("cpu"), 600) for group in groups]
    links = StageLinks(*(None, below[0], below[1], None) if rank == 0 else (below[0], None, None, below[1]))
    engine = Engine([Nothing()], [links], StepMeter(torch.device("cpu")))  # type: ignore[list-item]
    actions = find_schedule("1f1b").table(2, count)[rank]
    parts = [MicroBatch(i, {}, 1.0, shape, lambda _: None) for i in range(count)]
    for step in range(SETTLED + COUNTED):
        if step == SETTLED:
            begin_counting()
        engine.begin(actions, parts).drain()
    control("--dump")


def count_instructions(folder: Path, name: str, count: int) -> list[int]:
    """Run a contender under Valgrind, and return the instructions of one step by rank."""
    if shutil.which("valgrind") is None:
        raise FileNotFoundError("This counts with Valgrind, which is not there: apt-get install valgrind")
    command = ["torchrun", "--standalone", f"--nproc_per_node={CONTENDERS[name]}", "--no-python"]
    # Threads apart, so that heartbeats, which come by the clock, do not count.
    command += ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
    command += [f"--callgrind-out-file={folder}/%q{{RANK}}", sys.executable, "-m", "scripts.bench.host_work"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Texts hash the same in each run, or the work of dicts and sets would differ.
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    subprocess.run([*command, name, str(count)], check=True, cwd=folder, env=os.environ | environment)
    found = [(folder / f"{rank}.1-01").read_text() for rank in range(CONTENDERS[name])]
    return [int(re.search(r"^summary: (\d+)", text, re.MULTILINE)[1]) // COUNTED for text in found]  # type: ignore[index]


@experiment("host_work.json", minutes=15, quick_minutes=2)
def host_work(settings: Settings) -> dict[str, Any]:
    """Instructions of the host for a micro-batch: one stage beside plain Trainer, two stages, and the engine alone."""
    results: dict[str, Any] = {}
    for name in settings.of(list(CONTENDERS), [ENGINE]):
        few, many = (count_instructions(settings.folder, name, count) for count in (FEW, MANY))
        for rank, (less, more) in enumerate(zip(few, many, strict=True)):
            key = name if len(few) == 1 else f"{name}, stage {rank}"
            results[key] = {"for a micro-batch": round((more - less) / (MANY - FEW)), f"for a step of {FEW}": less}
            report(key, results[key])
    return results


if __name__ == "__main__":
    name, count = sys.argv[1], int(sys.argv[2])
    if name == ENGINE:
        dist.init_process_group("gloo")
        run_engine(count)
        dist.destroy_process_group()
    else:
        train(name, count)
