"""A training run in which one planted thing goes wrong."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.comm import topology
from hf_pipetransformer.comm.groups import GroupMaker
from hf_pipetransformer.runtime import gathering
from tests.distributed.scenarios import RANK, scenario
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
READY = "past the third step"
PLANTED = "planted failure"
SILENT = "silent since"
SLOW_SECONDS = 7.0


class Announce(TrainerCallback):
    """Says when training is well under way."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            print(READY, flush=True)


class Slow(TrainerCallback):
    """Between steps a rank may take its time: in a callback that logs, or one that comes after saving."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 2 and RANK == 1:
            time.sleep(SLOW_SECONDS)

    def on_save(self, args, state, control, **kwargs):
        if RANK == 1:
            time.sleep(SLOW_SECONDS)


class FailInLog(TrainerCallback):
    """Rank 0 fails where Trainer calls back, with no step under way."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError(PLANTED)


class DieBeforeLog(TrainerCallback):
    """The last that a rank does before Trainer gathers the loss of all."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            print(READY, flush=True)
            die()


class FailInCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError(PLANTED)


def fail_in_collator(rows):
    fail_in_collator.calls += 1
    if fail_in_collator.calls > 3:
        raise RuntimeError(PLANTED)
    return collate(rows)


fail_in_collator.calls = 0


def end_worker(how: Callable[[], None]) -> Callable[[Any], Any]:
    """Collator of which rank 1's worker process meets `how` in the run."""
    calls = itertools.count()

    def collate_or_end(rows: Any) -> Any:
        if RANK == 1 and get_worker_info() is not None and next(calls) == 4:
            how()
        return collate(rows)

    return collate_or_end


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fall_silent() -> None:
    print(SILENT, time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError(PLANTED)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError(f"{PLANTED}\nof the allocator's own words")


def wait_for_device() -> None:
    """As on NCCL, where such a wait ends only with the communicators."""
    aborted = threading.Event()
    GroupMaker.abort = lambda _maker: aborted.set()
    aborted.wait()
    raise RuntimeError("NCCL communicator was aborted")


def go_on() -> None:
    pass


class FaultyTrainer(PipeTransformerTrainer):
    """In a call of the loss of the fourth step something happens."""

    happening = staticmethod(go_on)
    happens_at = 1
    calls = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step == 3 and self.is_in_train:
            self.calls += 1
            if self.calls == self.happens_at:
                self.happening()
        return super().compute_loss(model, inputs, *args, **kwargs)


class SlowToSave:
    """What rank 0 alone saves after the model, before the others hear that it has all weights."""

    def save_pretrained(self, _folder: str) -> None:
        time.sleep(SLOW_SECONDS)


# What differs from a sound run on the rank concerned: options, data, trainer.
FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "killed": {"happening": die},
    "silent": {"happening": fall_silent},
    "exception": {"happening": fail},
    "out_of_memory": {"happening": run_out_of_memory},
    "out_of_memory_unnoticed": {
        "happening": run_out_of_memory,
        "elsewhere": {"happening": wait_for_device, "happens_at": 2},
    },
    # Rank 0 alone writes the model.
    "slow": {
        "everywhere": True,
        "processing_class": SlowToSave(),
        "callbacks": [Slow()],
        "options": {"save_strategy": "steps", "save_steps": 3},
    },
    "exception_in_log": {"callbacks": [FailInLog()]},
    "killed_before_log": {"callbacks": [DieBeforeLog()]},
    "exception_in_callback": {"callbacks": [Announce(), FailInCallback()]},
    "exception_in_collator": {"data_collator": fail_in_collator},
    "batch_size": {"options": {"per_device_train_batch_size": 2}},
    "pipeline_size": {"options": {"pipeline_parallel_size": 1}},
    "data_length": {"train_dataset": make_dataset(MODEL, 40)},
    # Happens on the rank concerned, while the weights of all come to rank 0.
    "exception_in_save": {
        "everywhere": True,
        "callbacks": [Announce()],
        "fails_to_move": True,
        "options": {"save_strategy": "steps", "save_steps": 3},
    },
    "worker_killed": {
        "everywhere": True,
        "data_collator": end_worker(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "options": {"dataloader_num_workers": 1},
    },
    "worker_hangs": {
        "everywhere": True,
        "data_collator": end_worker(lambda: time.sleep(1000)),
        "options": {"dataloader_num_workers": 1},
    },
    # Happens on all ranks alike.
    "labels": {"everywhere": True, "train_dataset": make_dataset(MODEL, 53).remove_columns("labels")},
}


@scenario
def train_with(
    folder: Path,
    fault: str,
    *,
    rank: int = 1,
    num_stages: int = 2,
    timeout: float = 15,
    max_steps: int = 1_000_000,
    schedule: str = "1f1b",
    ranks_a_node: int = 0,
) -> None:
    """Train with one of `FAULTS` on a rank; `ranks_a_node` neighbors play a node of their own."""
    if ranks_a_node:
        topology.host_name = lambda: f"node-{RANK // ranks_a_node}"
    what = FAULTS[fault]
    if rank != RANK and not what.get("everywhere"):
        what = what.get("elsewhere", {})
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": max_steps,
        "pipeline_parallel_num_microbatches": 1 if schedule == "async_1f1b" else 4,
        "pipeline_schedule": schedule,
        "pipeline_timeout": timeout,
        # Rank 1 runs out of memory in the loss of a micro-batch, while rank 0 waits in that of a later one. Without a
        # flush no loss is computed on whole batches, as one that is not known is elsewhere.
        "pipeline_loss": "parts" if fault == "out_of_memory_unnoticed" or schedule == "async_1f1b" else "auto",
    }
    trainer = FaultyTrainer(
        model=build_model(MODEL),
        args=our_arguments(folder, num_stages, **(settings | what.get("options", {}))),
        train_dataset=what.get("train_dataset", make_dataset(MODEL, 53)),
        data_collator=what.get("data_collator", collate),
        callbacks=what.get("callbacks", [Announce()]),
        processing_class=what.get("processing_class"),
    )
    trainer.happening = what.get("happening", go_on)
    trainer.happens_at = what.get("happens_at", 1)
    if what.get("fails_to_move") and rank == RANK:
        original = gathering.collect_parameters
        gathering.collect_parameters = lambda *args: fail() if any(args[3:]) else original(*args)
    if "processing_class" in what and RANK == 1:
        time.sleep(SLOW_SECONDS)  # As if it prepared its data.
    trainer.train()
    print(f"rank {RANK} trained to the end", flush=True)
