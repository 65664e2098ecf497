"""Train with the activation cache on several nodes, which are planted: each has a name and a disk of its own.

Each rank writes `FOLDER/<act>.rank<r>.json`, rank 0 also `FOLDER/<act>.<run>.safetensors`.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache import opening as cache_stores
from hf_pipetransformer.cache import training as cache_training
from hf_pipetransformer.cache.storage import StorageSpeed
from hf_pipetransformer.comm import topology
from hf_pipetransformer.comm.transfers import ObjectSender
from hf_pipetransformer.data.sampler import ReplicaBatchSampler
from hf_pipetransformer.training import loaders
from tests.distributed.cache_worker import At, CountedRows, RunsWithoutReads
from tests.distributed.scenarios import RANK, WORLD_SIZE, Lines, note, scenario
from tests.support.models import build_model, collate, make_rows
from tests.support.trainings import our_arguments, plain_arguments


# Neither batches nor nodes divide them: five batches an epoch, the last one of five.
NUM_SAMPLES = 37
NUM_EVALUATED = 12
GLOBAL_BATCH = 8
STEPS_PER_EPOCH = 5
EPOCHS = 3
SAVED_AT = 7
# In the second epoch: pipelines over nodes become shorter.
SHRINKS_AT = 7
# In the third epoch: all samples are stored.
LOST_AT = 12


class NotingSampler(ReplicaBatchSampler):
    """Notes which samples of the training set this rank draws, by optimizer step."""

    noted: dict[int, list[int]] = {}
    step = 0

    def __next__(self) -> list[int]:
        read = super().__next__()
        if not self.repeat_small:
            self.noted[self.step] = self.unread[-1].samples
        return read


class Act:
    """Runs on planted nodes, and what came out of them.

    Args:
        folder: for everything that is written.
        name: of the act.
        ranks_a_node: how many neighbours share a name and a disk.
    """

    def __init__(self, folder: Path, name: str, ranks_a_node: int) -> None:
        self.path = folder / name
        self.node = RANK // ranks_a_node
        self.runs: dict[str, Any] = {}
        topology.host_name = lambda: f"node-{self.node}"
        self.disk = self.path / f"disk-{self.node}"
        self.disk.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(self.disk)

    def checkpoint(self, act: str) -> Path:
        """The checkpoint of the whole run of an act."""
        return self.path.parent / act / "whole-output" / f"checkpoint-{SAVED_AT}"

    def stored(self) -> list[Path]:
        """The files with rows on this node's disk."""
        return sorted(self.disk.rglob("records-*"))

    def run(self, name: str, callbacks: Any = (), resume_from: Path | None = None, **changes: Any) -> Any:
        output = self.path / f"{name}-output"
        set_seed(0)
        model = build_model("bert_sequence", 11)
        rows = CountedRows(make_rows("bert_sequence", NUM_SAMPLES))
        evaluated = CountedRows(make_rows("bert_sequence", NUM_EVALUATED, 1), "evaluated")
        options: dict[str, Any] = {
            "batch": GLOBAL_BATCH, "per_device_eval_batch_size": 2, "num_train_epochs": EPOCHS, "learning_rate": 1e-3,
            "eval_strategy": "epoch", "seed": 7, "pipeline_parallel_num_microbatches": 2, "elastic": False,
            "freeze_policy": "fixed", "freeze_at": "0:2", "freeze_min_active_layers": 0, "activation_cache": "on",
        }  # fmt: skip
        num_stages = changes.pop("pipeline_parallel_size", 1)
        warnings, found = Lines(logging.WARNING), Found(self, evaluated)
        sent = noting_batches()
        logging.getLogger("hf_pipetransformer").addHandler(warnings)
        NotingSampler.noted = {}
        for callback in callbacks:
            callback.model = model
        trainer = PipeTransformerTrainer(
            model=model,
            args=our_arguments(output, num_stages, **options | changes),
            train_dataset=rows,
            eval_dataset=evaluated,
            data_collator=collate,
            callbacks=[RunsWithoutReads(rows), found, *callbacks],
        )
        found.trainer = trainer
        trainer.train(None if resume_from is None else str(resume_from))
        logging.getLogger("hf_pipetransformer").removeHandler(warnings)
        history = trainer.state.log_history
        self.runs[name] = {
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "grad_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
            "sent": sent,
            "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
            "hit_rates": [entry["cache_hit_rate"] for entry in history if "cache_hit_rate" in entry],
            "drawn": NotingSampler.noted,
            "num_read": rows.num_read,
            "evaluations_read": found.evaluations_read,
            "files": found.files,
            "lengths": found.lengths,
            "warnings": warnings.lines,
            "left": [str(path) for path in self.stored()],
        }
        trainer.topology.barrier()
        if RANK == 0:
            weights = {key: value.detach().contiguous().clone() for key, value in model.named_parameters()}
            save_file(weights, f"{self.path}.{name}.safetensors")
            lines = (output / "pipetransformer_events.jsonl").read_text().splitlines()
            events = [json.loads(line) for line in lines]
            self.runs[name]["events"] = [event for event in events if event["event"] in ("cache", "run")]
        return trainer


class Found(TrainerCallback):
    """What there is as the run goes on, on this rank."""

    trainer: Any

    def __init__(self, act: Act, evaluated: CountedRows) -> None:
        self.act = act
        self.evaluated = evaluated
        self.lengths: list[int] = []
        """K by step."""
        self.files: list[int] = []
        """With rows on this node, by epoch."""
        self.evaluations_read: list[int] = []
        """Samples of the evaluation set that were read, by epoch."""

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **_kwargs: Any) -> None:
        NotingSampler.step = state.global_step
        NotingSampler.noted = {}  # A run that resumes has looked at a first batch.

    def on_step_end(self, _args: Any, state: Any, *_: Any, **_kwargs: Any) -> None:
        NotingSampler.step = state.global_step
        self.lengths.append(self.trainer.layout.pipeline_size)

    def on_evaluate(self, *_args: Any, **_kwargs: Any) -> None:
        self.files.append(len(self.act.stored()))
        self.evaluations_read.append(self.evaluated.num_read)
        self.evaluated.num_read = 0


def noting_batches() -> list[list[int]]:
    """Return a list that will have, for each batch that this rank sends to later stages, the ranks that get it."""
    sent: list[list[int]] = []

    def isend(self: ObjectSender, tree: Any, peers: Any, group: Any) -> None:
        if "later stages" in self.what:
            sent.append(list(peers))
        usual(self, tree, peers, group)

    usual = _ISEND
    ObjectSender.isend = isend  # type: ignore[method-assign]
    return sent


_ISEND = ObjectSender.isend


def without_a_store(call: Callable[[], Any]) -> Any:
    """As on a node whose disk cannot be written, the last one; the samples stay on their nodes."""
    usual = cache_stores.take_store

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if RANK >= WORLD_SIZE // 2:
            raise OSError("planted: no disk")
        return usual(*args, **kwargs)

    cache_stores.take_store = refuse
    try:
        return call()
    finally:
        cache_stores.take_store = usual


# ---- on two processes


def frozen_from_the_start(act: Act) -> None:
    act.run("with")
    without_a_store(lambda: act.run("without"))
    act.run("off", activation_cache="off", eval_strategy="no", num_train_epochs=1)


def resumed(act: Act) -> None:
    """From the middle of the second epoch, which the next act does on other nodes."""
    keeping = {"activation_cache_keep": True, "save_strategy": "steps", "save_steps": SAVED_AT}
    act.run("whole", **keeping)
    act.run("rest", resume_from=act.checkpoint("resumed"), **keeping)


def resumed_elsewhere(act: Act) -> None:
    act.run("rest", resume_from=act.checkpoint("resumed"))
    act.run("whole", save_strategy="steps", save_steps=SAVED_AT)


def resumed_back(act: Act) -> None:
    act.run("rest", resume_from=act.checkpoint("resumed_elsewhere"))


def a_node_loses_its_rows(act: Act) -> None:
    def lose(**_kwargs: Any) -> None:
        for path in act.stored() if act.node == 1 else []:
            path.unlink()

    longer = {"num_train_epochs": EPOCHS + 1, "eval_strategy": "no"}
    act.run("with", callbacks=[At(LOST_AT, lose)], **longer)
    without_a_store(lambda: act.run("without", **longer))


def a_link_on_one_node(act: Act) -> None:
    """Where its store would lie; the cache was asked for."""
    home = act.disk.with_name("home")
    if act.node == 1:
        home.mkdir()
        (act.disk / f"hf_pipetransformer_{os.geteuid()}").symlink_to(home)
    try:
        act.run("with")
    except ValueError as error:
        act.runs["with"] = str(error)


# ---- on three and four processes


def shorter_pipelines(act: Act) -> None:
    """K from 2 to 1 on each node, in the middle of an epoch."""
    moving = {
        "pipeline_parallel_size": 2, "elastic": True, "pipeline_compression": "memory", "freeze_at": "0:1,7:3",
        "num_train_epochs": EPOCHS + 1,
    }  # fmt: skip
    act.run("with", **moving)
    without_a_store(lambda: act.run("without", **moving))


def unequal_nodes(act: Act) -> None:
    act.run("with")
    act.run("grouped", train_sampling_strategy="group_by_length")


# ---- pipelines over several nodes

SHRINKING: dict[str, Any] = {
    "elastic": True, "pipeline_compression": "memory", "freeze_at": f"2:1,{SHRINKS_AT}:3",
    "num_train_epochs": EPOCHS + 1, "activation_cache": "auto",
}  # fmt: skip


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def longer_than_a_node(act: Act) -> None:
    """K from all processes to those of a node, where the cache comes on; the same from the start; Trainer's order."""
    usual = cache_training.measure_storage
    cache_training.measure_storage = lambda *_: StorageSpeed(0.0, 0.0)
    act.run("with", **SHRINKING, pipeline_parallel_size=WORLD_SIZE)
    cache_training.measure_storage = usual
    # The same frozen layers, and no transition.
    inside = {**SHRINKING, "elastic": False, "activation_cache": "on", "pipeline_parallel_size": 2}
    without_a_store(lambda: act.run("without", **inside))
    act.runs["refused"] = refusal(lambda: act.run("refused", pipeline_parallel_size=WORLD_SIZE))
    act.run("1f1b", **OFF, pipeline_parallel_size=WORLD_SIZE)
    asynchronous = {"pipeline_schedule": "async_1f1b", "num_train_epochs": 2}
    act.run("async_1f1b", **OFF, pipeline_parallel_size=WORLD_SIZE, **asynchronous)


OFF: dict[str, Any] = {
    "activation_cache": "off", "freeze_policy": "none", "freeze_at": None, "pipeline_parallel_num_microbatches": 4,
    "eval_strategy": "no",
}  # fmt: skip


def every_length(act: Act) -> None:
    """Trainer's order, on whole nodes and on parts of one, under several schedules."""
    shapes = ((8, "1f1b"), (8, "gpipe"), (4, "1f1b"), (2, "1f1b"), (2, "interleaved_1f1b"), (8, "async_1f1b"))
    for size, schedule in shapes:
        act.run(f"{schedule}-{size}", **OFF, pipeline_parallel_size=size, pipeline_schedule=schedule)


def saved_over_nodes(act: Act) -> None:
    saving = {"save_strategy": "steps", "save_steps": SAVED_AT, "activation_cache": "auto"}
    act.run("whole", **saving, pipeline_parallel_size=WORLD_SIZE)
    act.run("rest", resume_from=act.checkpoint(act.path.name), **saving, pipeline_parallel_size=WORLD_SIZE)


def resumed_on_one_node(act: Act) -> None:
    """With the cache, which is in the layout of what it saves."""
    act.run("rest", resume_from=act.checkpoint("saved_over_nodes"), pipeline_parallel_size=WORLD_SIZE)
    act.run("whole", save_strategy="steps", save_steps=SAVED_AT, pipeline_parallel_size=WORLD_SIZE)


def resumed_over_nodes(act: Act) -> None:
    options = {"pipeline_parallel_size": WORLD_SIZE, "activation_cache": "auto"}
    act.run("rest", resume_from=act.checkpoint("resumed_on_one_node"), **options)
    act.runs["refused"] = refusal(
        lambda: act.run("no", resume_from=act.checkpoint("resumed_on_one_node"), pipeline_parallel_size=WORLD_SIZE)
    )


ALL = (
    *(frozen_from_the_start, resumed, resumed_elsewhere, resumed_back, a_node_loses_its_rows, a_link_on_one_node),
    *(shorter_pipelines, unequal_nodes, longer_than_a_node, every_length),
    *(saved_over_nodes, resumed_on_one_node, resumed_over_nodes),
)
ACTS = {act.__name__: act for act in ALL}


@scenario
def act_all(folder: Path, ranks_a_node: int, names: list[str]) -> None:
    loaders.ReplicaBatchSampler = NotingSampler
    for name in names:
        act = Act(folder, name, ranks_a_node)
        ACTS[name](act)
        note(act.path.parent, name, act.runs)


def train_plainly(folder: Path) -> None:
    """Train as `OFF` does with plain Trainer, in one process."""
    set_seed(0)
    model = build_model("bert_sequence", 11)
    args = plain_arguments(
        folder / "plain-output", batch=GLOBAL_BATCH, num_train_epochs=EPOCHS, learning_rate=1e-3, seed=7
    )
    rows = CountedRows(make_rows("bert_sequence", NUM_SAMPLES))
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    note(folder, "plain", {key: [entry[key] for entry in history] for key in ("loss", "grad_norm")})
    save_file({key: value.detach().clone() for key, value in model.named_parameters()}, folder / "plain.safetensors")
