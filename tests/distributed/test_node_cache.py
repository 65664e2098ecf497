"""The activation cache on several nodes, planted on one machine: rows on the node that needs them, and Law 6.

Each rank writes `FOLDER/<act>.rank<r>.json`, rank 0 also `FOLDER/<act>.<run>.safetensors`.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from tests.distributed.scenarios import RANK, WORLD_SIZE, Lines, note, scenario, start
from tests.support.comparison import far_tensors, relative_difference
from tests.support.models import build_model, collate, has_zero_gradient, make_rows
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


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Outcome:
    """What the ranks of an act wrote down."""

    ranks: list[dict[str, Any]]
    path: Path

    def of(self, run: str, key: str) -> Any:
        return self.ranks[0][run][key]

    def of_all(self, run: str) -> str:
        """What all ranks alike noted instead of a run."""
        (found,) = {rank[run] for rank in self.ranks}
        return str(found)

    def events(self, run: str, what: str) -> list[dict[str, Any]]:
        return [event for event in self.of(run, "events") if event.get("what") == what]

    def batches(self, run: str) -> list[list[list[int]]]:
        """The samples of each step, by pipeline: only first stages draw."""
        steps = sorted(map(int, self.of(run, "drawn")))
        return [
            [rank[run]["drawn"][str(step)] for rank in self.ranks if str(step) in rank[run]["drawn"]] for step in steps
        ]

    def epochs(self, run: str, first: int = 0) -> list[list[int]]:
        """The samples of each epoch, the first of which goes on with batch number `first`."""
        batches = [[sample for part in parts for sample in part] for parts in self.batches(run)]
        ends = range(STEPS_PER_EPOCH - first, len(batches) + 1, STEPS_PER_EPOCH)
        starts = [0, *ends]
        return [sum(batches[start:end], []) for start, end in zip(starts, ends, strict=False)]

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        return load_file(f"{self.path}.{run}.safetensors")


def act_on(folder: Path, num_processes: int, ranks_a_node: int, *names: str, timeout: float, **how: Any) -> None:
    options = {"ranks_a_node": ranks_a_node, "names": names}
    start(act_all, folder, num_processes, options, timeout=timeout, **how)


def outcome_of(folder: Path, act: str, num_ranks: int = 2) -> Outcome:
    ranks = [json.loads((folder / f"{act}.rank{rank}.json").read_text()) for rank in range(num_ranks)]
    return Outcome(ranks, folder / act)


def assert_equal_runs(outcome: Outcome) -> None:
    """With stored activations and without: the same trajectory, over the same samples."""
    found, expected = ([sum(parts, []) for parts in outcome.batches(run)] for run in ("with", "without"))
    assert found == expected
    for key in ("losses", "eval_losses"):
        found, expected = outcome.of("with", key), outcome.of("without", key)
        assert [
            pair for pair in zip(found, expected, strict=True) if not relative_difference(*pair) <= TOLERANCE
        ] == []
    assert_equal_weights(outcome.weights("with"), outcome.weights("without"))


def assert_equal_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected
    assert far_tensors(found, expected, TOLERANCE, partial(has_zero_gradient, "bert_sequence")) == {}


def assert_each_sample_once(epochs: list[list[int]]) -> None:
    assert all(sorted(epoch) == list(range(NUM_SAMPLES)) for epoch in epochs)


def test_rows_are_on_the_node_that_needs_them(tmp_path: Path) -> None:
    act_on(tmp_path, 2, 1, "frozen_from_the_start", timeout=100)
    outcome = outcome_of(tmp_path, "frozen_from_the_start")
    # As on one node: what the first epoch computes and stores is read from then on.
    assert outcome.of("with", "hit_rates") == [0, *[1] * (EPOCHS - 1)]
    epochs = [(event["hits"], event["misses"], event["written"]) for event in outcome.events("with", "epoch")]
    assert epochs == [(0, NUM_SAMPLES, NUM_SAMPLES), *[(NUM_SAMPLES, 0, 0)] * (EPOCHS - 1)]
    # Law 6, and each node's samples are its own, of which it draws another order each time.
    assert_each_sample_once(outcome.epochs("with"))
    parts = [list(rank["with"]["drawn"].values()) for rank in outcome.ranks]
    in_epoch = [
        [sum(part[at : at + STEPS_PER_EPOCH], []) for at in range(0, len(part), STEPS_PER_EPOCH)] for part in parts
    ]
    assert [{frozenset(epoch) for epoch in own} for own in in_epoch] == [{frozenset(own[0])} for own in in_epoch]
    assert all(own[0] != own[1] != own[2] for own in in_epoch)
    assert_equal_runs(outcome)
    # Each on a disk of its own, which is clean at the end; evaluations read as they would without.
    for rank in outcome.ranks:
        assert all(rank["with"]["files"]) and rank["with"]["left"] == []
        assert rank["with"]["evaluations_read"] == rank["without"]["evaluations_read"]
    (noted,), (off,) = outcome.events("with", "nodes"), outcome.events("without", "off")
    assert (noted["devices"], noted["samples"]) == ([1, 1], [19, 18])
    assert [event["nodes"] for event in outcome.of("with", "events") if event["event"] == "run"] == [[1, 1]]
    assert off["reason"] == "on the node of rank 1: planted: no disk"
    # A run that may store nothing draws Trainer's order.
    assert_each_sample_once(outcome.epochs("off"))
    assert outcome.batches("off") != outcome.batches("with")[:STEPS_PER_EPOCH]
    assert outcome.events("off", "nodes") == []


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_on_other_nodes(tmp_path: Path) -> None:
    act_on(tmp_path, 2, 1, "resumed", timeout=100)
    resumed = outcome_of(tmp_path, "resumed")
    whole = resumed.batches("whole")
    assert resumed.batches("rest") == whole[SAVED_AT:]
    assert resumed.of("rest", "losses") == resumed.of("whole", "losses")
    found, expected = resumed.weights("rest"), resumed.weights("whole")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    # On one node: the epoch ends as it was begun, and the next one is Trainer's.
    act_on(tmp_path, 2, 2, "resumed_elsewhere", timeout=100)
    elsewhere = outcome_of(tmp_path, "resumed_elsewhere")
    second = SAVED_AT - STEPS_PER_EPOCH
    assert elsewhere.batches("rest")[: STEPS_PER_EPOCH - second] == whole[SAVED_AT : 2 * STEPS_PER_EPOCH]
    assert elsewhere.epochs("rest", second)[1] == elsewhere.epochs("whole")[2] != resumed.epochs("whole")[2]
    # And back.
    act_on(tmp_path, 2, 1, "resumed_back", timeout=100)
    back = outcome_of(tmp_path, "resumed_back")
    assert back.epochs("rest", second)[0] == elsewhere.epochs("whole")[1][second * GLOBAL_BATCH :]
    assert back.epochs("rest", second)[1] == resumed.epochs("whole")[2]


@pytest.mark.slow
def test_a_store_that_one_node_lost_is_given_up_on_all(tmp_path: Path) -> None:
    act_on(tmp_path, 2, 1, "a_node_loses_its_rows", "a_link_on_one_node", timeout=100)
    outcome = outcome_of(tmp_path, "a_node_loses_its_rows")
    assert_equal_runs(outcome)
    assert_each_sample_once(outcome.epochs("with"))
    *_, before, lost, after = outcome.events("with", "epoch")
    assert before["hits"] == NUM_SAMPLES
    # Until the end of the epoch the other node reads on.
    assert 0 < lost["hits"] < NUM_SAMPLES and lost["hits"] >= NUM_SAMPLES // 2 > after["hits"] == 0
    there, here = (
        [text for text in rank["with"]["warnings"] if "cache is off" in text] for rank in outcome.ranks[::-1]
    )
    assert len(there) == len(here) == 1
    assert "on the node of rank 1: " in here[0] and "on the node" not in there[0]
    assert LOST_AT < EPOCHS * STEPS_PER_EPOCH
    # What one node refuses before the start is refused on all.
    (text,) = {rank["with"] for rank in outcome_of(tmp_path, "a_link_on_one_node").ranks}
    assert text.startswith("on the node of rank 1: ")


@pytest.mark.slow
def test_rows_stay_on_their_node_when_pipelines_become_shorter(tmp_path: Path) -> None:
    act_on(tmp_path, 4, 2, "shorter_pipelines", timeout=150)
    outcome = outcome_of(tmp_path, "shorter_pipelines", 4)
    lengths = outcome.of("with", "lengths")
    assert lengths[0] == 2 and lengths[-1] == 1
    assert_equal_runs(outcome)
    assert outcome.of("with", "hit_rates")[1:] == [1] * EPOCHS


def assert_trains_as_trainer(outcome: Outcome, run: str) -> None:
    """Law 1: each step, and the weights after the last one."""
    plain = json.loads((outcome.path.parent / "plain.rank0.json").read_text())
    for found, expected in (
        (outcome.of(run, "losses"), plain["loss"]),
        (outcome.of(run, "grad_norms"), plain["grad_norm"]),
    ):
        pairs = list(zip(found, expected, strict=True))
        assert len(pairs) == EPOCHS * STEPS_PER_EPOCH
        assert [pair for pair in pairs if not relative_difference(*pair) <= TOLERANCE] == [], run
    assert_equal_weights(outcome.weights(run), load_file(outcome.path.parent / "plain.safetensors"))


def test_a_pipeline_over_two_nodes_trains_as_trainer_and_stores_once_it_fits_one(tmp_path: Path) -> None:
    act_on(tmp_path, 4, 2, "longer_than_a_node", timeout=200, strict_nccl=True)
    train_plainly(tmp_path)
    outcome = outcome_of(tmp_path, "longer_than_a_node", 4)
    # K over both nodes stores nothing and says why; then each node reads what it stored itself.
    lengths = outcome.of("with", "lengths")
    assert lengths == [4] * SHRINKS_AT + [2] * (len(lengths) - SHRINKS_AT)
    (off,) = outcome.events("with", "off")
    assert off["reason"].startswith("each pipeline spans nodes (K=4 on nodes of 2 processes)")
    (warned,) = [text for text in outcome.of("with", "warnings") if "cache" in text]
    assert warned == f"The activation cache stays off: {off['reason']}"
    levels = [event["level"] for event in outcome.events("with", "decision")]
    assert levels == [3]
    # Stored in the rest of the second epoch and in the first half of the third.
    assert outcome.of("with", "hit_rates")[-1] == 1
    # Neither the order of the samples nor any number depends on K, or on what is stored.
    assert_each_sample_once(outcome.epochs("with"))
    assert_equal_runs(outcome)
    assert "activation_cache='on', and each pipeline spans nodes" in outcome.of_all("refused")
    begun = {run: next(e["expectation"] for e in outcome.of(run, "events") if e["event"] == "run")
             for run in ("with", "1f1b")}  # fmt: skip
    assert "Activation cache: off while pipelines span nodes." in begun["with"]
    assert all("Each pipeline spans 2 nodes: a message takes up to " in text for text in begun.values())
    # Trainer's order and numbers where nothing can be stored.
    assert_trains_as_trainer(outcome, "1f1b")
    # A batch goes to the other node once, and from its first rank to the others there.
    for run in ("1f1b", "async_1f1b"):
        sent = [rank[run]["sent"] for rank in outcome.ranks]
        assert [set(map(tuple, peers)) for peers in sent] == [{(1, 2)}, set(), {(3,)}, set()]
        assert len(sent[0]) == len(sent[2]) == len(outcome.of(run, "losses"))
    assert len(outcome.of("async_1f1b", "losses")) == 2 * STEPS_PER_EPOCH


@pytest.mark.slow
@pytest.mark.parametrize("ranks_a_node", [4, 2])
def test_nodes_train_as_trainer_for_every_length(tmp_path: Path, ranks_a_node: int) -> None:
    act_on(tmp_path, 8, ranks_a_node, "every_length", timeout=280, strict_nccl=True)
    train_plainly(tmp_path)
    outcome = outcome_of(tmp_path, "every_length", 8)
    for run in outcome.ranks[0]:
        if "async" not in run:  # It is behind by some updates, and reads ahead.
            assert_trains_as_trainer(outcome, run)
    assert len(outcome.of("async_1f1b-8", "losses")) == EPOCHS * STEPS_PER_EPOCH
    sent = [rank["1f1b-8"]["sent"] for rank in outcome.ranks]
    firsts = range(0, 8, ranks_a_node)
    expected = {rank: tuple(range(rank + 1, rank + ranks_a_node)) for rank in firsts}
    expected[0] += tuple(firsts)[1:]
    assert [set(map(tuple, peers)) for peers in sent] == [
        {expected[rank]} if rank in firsts else set() for rank in range(8)
    ]


@pytest.mark.slow
def test_a_run_over_nodes_goes_on_on_one_node_and_back(tmp_path: Path) -> None:
    act_on(tmp_path, 4, 2, "saved_over_nodes", timeout=150)
    saved = outcome_of(tmp_path, "saved_over_nodes", 4)
    # On the same nodes to the bit.
    assert saved.of("rest", "losses") == saved.of("whole", "losses")
    found, expected = saved.weights("rest"), saved.weights("whole")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    act_on(tmp_path, 4, 4, "resumed_on_one_node", timeout=150)
    there = outcome_of(tmp_path, "resumed_on_one_node", 4)
    second = SAVED_AT - STEPS_PER_EPOCH
    assert there.batches("rest")[: STEPS_PER_EPOCH - second] == saved.batches("whole")[SAVED_AT : 2 * STEPS_PER_EPOCH]
    # The epoch ends as it began, the next one is Trainer's.
    begun, expected_losses = there.of("rest", "losses"), saved.of("whole", "losses")
    pairs = list(zip(begun, expected_losses, strict=True))[SAVED_AT : 2 * STEPS_PER_EPOCH]
    assert pairs and all(relative_difference(*pair) <= TOLERANCE for pair in pairs)
    # A layout that stores something is not taken over by pipelines that span nodes.
    act_on(tmp_path, 4, 2, "resumed_over_nodes", timeout=150)
    back = outcome_of(tmp_path, "resumed_over_nodes", 4)
    assert set(back.of("rest", "lengths")) == {4}
    assert back.epochs("rest", second)[0] == there.epochs("whole")[1][second * GLOBAL_BATCH :]
    assert back.epochs("rest", second)[1] == saved.epochs("whole")[2]
    assert [event["reason"][:24] for event in back.events("rest", "off")] == ["each pipeline spans node"]
    pairs = list(zip(back.of("rest", "losses"), there.of("whole", "losses"), strict=True))[: 2 * STEPS_PER_EPOCH]
    assert all(relative_difference(*pair) <= TOLERANCE for pair in pairs)
    assert "activation_cache='on', and each pipeline spans nodes" in back.of_all("refused")


@pytest.mark.slow
def test_a_node_stores_as_much_as_it_has_devices(tmp_path: Path) -> None:
    act_on(tmp_path, 3, 2, "unequal_nodes", timeout=150)
    outcome = outcome_of(tmp_path, "unequal_nodes", 3)
    for run in ("with", "grouped"):
        assert outcome.of(run, "hit_rates") == [0, 1, 1]
        (noted,) = outcome.events(run, "nodes")
        assert (noted["devices"], noted["samples"]) == ([2, 1], [25, 12])
        batches = outcome.batches(run)
        assert_each_sample_once([sum((sum(parts, []) for parts in batches[at : at + 7]), []) for at in (0, 7, 14)])
