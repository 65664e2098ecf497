"""The activation cache on several nodes, planted on one machine: rows on the node that needs them, and Law 6."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.node_cache_worker import (
    EPOCHS,
    GLOBAL_BATCH,
    LOST_AT,
    NUM_SAMPLES,
    SAVED_AT,
    SHRINKS_AT,
    STEPS_PER_EPOCH,
    act_all,
    train_plainly,
)
from tests.distributed.scenarios import start
from tests.support.comparison import far_tensors, relative_difference
from tests.support.models import has_zero_gradient


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
    # Each on a disk of its own, which is clean at the end; the evaluation set too is read once.
    for rank in outcome.ranks:
        assert all(rank["with"]["files"]) and rank["with"]["left"] == []
        first, *later = rank["with"]["evaluations_read"]
        unseen = rank["without"]["evaluations_read"][-1] - 6
        assert first > unseen and set(later) == {unseen}
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
