"""A loss that is called once on each rank of two processes, beside plain Trainer on one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import LaunchError
from tests.distributed.scenarios import Lines, run, scenario
from tests.support import loss_calls
from tests.support.loss_calls import logged, made
from tests.support.models import make_rows


pytestmark = pytest.mark.distributed

STAGES = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}
REPLICAS = {"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 2}
LAYOUTS = {"two stages": STAGES, "two replicas": REPLICAS}
EQUAL = ("mixed", "counting", "of_a_part", "talking")
STEPPING = (loss_calls.Stepping, loss_calls.PipedStepping)
PREDICTING = (loss_calls.Predicting, loss_calls.PipedPredicting)
KEPT = {"keeping": 4, "stopping": 3}
"""Losses that leave something behind the model for all ranks, and the steps of their trainings."""


SHORT = 2 * loss_calls.BATCH + 1
"""Rows of epochs of three batches, whose last one has a single sample."""


def entries_of(trainer: Any) -> list[list[Any]]:
    """The log by steps, of which those of one step may come in any order."""
    keys = ("rows", "entropy", "loss", "grad_norm")
    found = [[entry["step"], key, entry[key]] for entry in trainer.state.log_history for key in keys if key in entry]
    return sorted(found)


def metrics_of(trainer: Any, num_rows: int = 3 * loss_calls.BATCH) -> dict[str, float]:
    """Metrics of an evaluation, one of which its loss has counted."""
    rows = make_rows("bert_sequence", num_rows)
    trainer.args.per_device_eval_batch_size = loss_calls.BATCH // trainer.args.world_size
    trainer.compute_metrics = lambda _predictions: {"turns": float(trainer.turns)}
    return {name: value for name, value in trainer.evaluate(rows).items() if name in ("eval_turns", "eval_loss")}


@scenario
def train_each(folder: Path) -> dict[str, Any]:
    found = {}
    for layout, options in LAYOUTS.items():
        for name in EQUAL:
            trainer = made(getattr(loss_calls, name), folder / layout / name, 2, **options)
            found[f"{layout}, {name}"] = {"log": logged(trainer), "calls": trainer.calls}
    trainer = made(loss_calls.logging, folder / "logging", 2, **STAGES)
    logged(trainer)
    found["logging"] = entries_of(trainer)
    trainer = made(loss_calls.remembering, folder / "remembering", 2, **STAGES)
    trainer.args.logging_steps = 3
    found["remembering"] = logged(trainer)
    lines = Lines(logging.INFO)
    logging.getLogger("hf_pipetransformer").addHandler(lines)
    for name in KEPT:
        found[name] = logged(made(getattr(loss_calls, name), folder / name, 2, **STAGES))
    found["said"] = lines.lines
    found["metrics"] = metrics_of(made(loss_calls.remembering, folder / "metrics", 2, **STAGES))
    for layout, options in LAYOUTS.items():
        predicting = made(loss_calls.counting, folder / layout / "predicting", 2, kinds=PREDICTING, **options)
        found[f"{layout}, predicting"] = metrics_of(predicting, loss_calls.BATCH + 5)
    trainer = made(loss_calls.counting, folder / "stepping", 2, kinds=STEPPING, **STAGES)
    found["stepping"] = [logged(trainer), trainer.steps_seen]
    trainer = made(loss_calls.mixed, folder / "short", 2, SHORT, **REPLICAS)
    trainer.args.max_steps = 7
    return {**found, "short": logged(trainer)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks logged."""
    return run(train_each, tmp_path_factory.mktemp("trained"), 2, strict_nccl=True, timeout=200)


@pytest.mark.parametrize("name", EQUAL)
def test_a_loss_draws_and_counts_as_on_one_process(name: str, trained: list[dict[str, Any]], tmp_path: Path) -> None:
    """Each rank calls it once a batch; what it draws mixes rows of other replicas."""
    plain = made(getattr(loss_calls, name), tmp_path)
    expected = logged(plain)
    for layout in LAYOUTS:
        for found in trained:
            assert found[f"{layout}, {name}"]["log"] == pytest.approx(expected, rel=1e-5), layout
            assert found[f"{layout}, {name}"]["calls"] == plain.calls == 4


def test_a_replica_without_samples_draws_on_with_the_others(trained: list[dict[str, Any]], tmp_path: Path) -> None:
    """Else it would draw another order of the next epoch."""
    plain = made(loss_calls.mixed, tmp_path, num_rows=SHORT)
    plain.args.max_steps = 7
    expected = logged(plain)
    for found in trained:
        assert found["short"] == pytest.approx(expected, rel=1e-5)


def test_what_a_loss_keeps_reaches_all_ranks_before_its_next_call(
    trained: list[dict[str, Any]], tmp_path: Path
) -> None:
    plain = made(loss_calls.remembering, tmp_path)
    plain.args.logging_steps = 3
    expected = logged(plain)
    assert len(expected) == 2
    for found in trained:
        assert found["remembering"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_objects_that_a_loss_changes_change_on_all_ranks(
    name: str, trained: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = logged(made(getattr(loss_calls, name), tmp_path))
    assert len(expected) == 2 * KEPT[name]
    for found in trained:
        assert found[name] == pytest.approx(expected, rel=1e-5)


def test_a_step_of_the_scripts_gets_the_loss_on_each_rank(trained: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = made(loss_calls.counting, tmp_path, kinds=STEPPING)
    expected = logged(plain)
    for found in trained:
        assert found["stepping"][0] == pytest.approx(expected, rel=1e-5)
        assert found["stepping"][1] == pytest.approx(plain.steps_seen, rel=1e-5)


def test_a_prediction_step_ahead_of_the_mixin_is_that_of_one_process(
    trained: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = metrics_of(made(loss_calls.counting, tmp_path, kinds=PREDICTING), loss_calls.BATCH + 5)
    for found in trained:
        for layout in LAYOUTS:
            assert found[f"{layout}, predicting"] == pytest.approx(expected, rel=1e-5), layout


def test_where_the_loss_runs_is_said(trained: list[dict[str, Any]]) -> None:
    assert [any("the last stage alone runs it" in line for line in found["said"]) for found in trained] == [
        True,
        False,
    ]


def test_metrics_read_what_the_loss_has_kept(trained: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = metrics_of(made(loss_calls.remembering, tmp_path))
    assert expected["eval_turns"] == 3
    for found in trained:
        assert found["metrics"] == pytest.approx(expected, rel=1e-5)


def test_what_a_loss_logs_is_in_the_log_of_every_rank(trained: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = made(loss_calls.logging, tmp_path)
    logged(plain)
    expected = entries_of(plain)
    assert sum(key == "entropy" for _, key, _ in expected) == 4
    for found in trained:
        assert [entry[:2] for entry in found["logging"]] == [entry[:2] for entry in expected]
        values = [entry[2] for entry in expected]
        assert [entry[2] for entry in found["logging"]] == pytest.approx(values, rel=1e-5)


@scenario
def train_refused(folder: Path, layout: str, loss: str) -> None:
    made(getattr(loss_calls, loss), folder, 2, **LAYOUTS[layout]).train()


@pytest.mark.parametrize(
    ("layout", "loss", "said"),
    [
        ("two stages", "twice", "One loss runs BertForSequenceClassification twice for a batch"),
        ("two stages", "with_decay", "reads weights of BertForSequenceClassification itself, some of which"),
        ("two stages", "penalized", "reads weights of BertForSequenceClassification itself, some of which"),
        ("two stages", "of_embeddings", "are called by themselves, where stages do not take part"),
        ("two stages", "of_whole_model", "whole_model() was called amid a step, where other stages do not come by"),
        ("two stages", "of_what_is_generated", "generate() was called amid a step, where other stages"),
        ("two stages", "of_an_evaluation", "An evaluation was called amid a step, where other stages"),
        ("two replicas", "doubled", "rows of a batch of 8: with replicas each runs its own"),
    ],
)
def test_a_loss_that_stages_or_replicas_cannot_follow_is_refused(
    layout: str, loss: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError) as refused:
        run(train_refused, tmp_path, 2, {"layout": layout, "loss": loss})
    assert said in str(refused.value)
    assert "step 1/4" not in str(refused.value)
