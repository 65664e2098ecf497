"""A loss that is called once on each rank of two processes, beside plain Trainer on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import LaunchError
from tests.distributed.scenarios import run, scenario
from tests.support import loss_calls
from tests.support.loss_calls import logged, made


pytestmark = pytest.mark.distributed

STAGES = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}
REPLICAS = {"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 2}
LAYOUTS = {"two stages": STAGES, "two replicas": REPLICAS}
EQUAL = ("mixed", "counting", "of_a_part")


@scenario
def train_each(folder: Path, layout: str) -> dict[str, Any]:
    found = {}
    for name in EQUAL:
        trainer = made(getattr(loss_calls, name), folder / name, 2, **LAYOUTS[layout])
        found[name] = {"log": logged(trainer), "calls": trainer.calls}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_draws_and_counts_as_on_one_process(layout: str, tmp_path: Path) -> None:
    """Each rank calls it once a batch; what it draws mixes rows of other replicas."""
    ranks = run(train_each, tmp_path, 2, {"layout": layout}, strict_nccl=True)
    for name in EQUAL:
        plain = made(getattr(loss_calls, name), tmp_path / "plain" / name)
        expected = logged(plain)
        for found in ranks:
            assert found[name]["log"] == pytest.approx(expected, rel=1e-5), name
            assert found[name]["calls"] == plain.calls == 4


@scenario
def train_short(folder: Path) -> list[float]:
    """Epochs of three batches, whose last one has a single sample."""
    trainer = made(loss_calls.mixed, folder, 2, 2 * loss_calls.BATCH + 1, **REPLICAS)
    trainer.args.max_steps = 7
    return logged(trainer)


def test_a_replica_without_samples_draws_on_with_the_others(tmp_path: Path) -> None:
    """Else it would draw another order of the next epoch."""
    plain = made(loss_calls.mixed, tmp_path / "plain", num_rows=2 * loss_calls.BATCH + 1)
    plain.args.max_steps = 7
    expected = logged(plain)
    for found in run(train_short, tmp_path, 2, strict_nccl=True):
        assert found == pytest.approx(expected, rel=1e-5)


@scenario
def train_refused(folder: Path, layout: str, loss: str) -> None:
    made(getattr(loss_calls, loss), folder, 2, **LAYOUTS[layout]).train()


@pytest.mark.parametrize(
    ("layout", "loss", "said"),
    [
        ("two stages", "twice", "One loss runs BertForSequenceClassification twice for a batch"),
        ("two stages", "with_decay", "reads weights of BertForSequenceClassification itself, some of which"),
        ("two stages", "of_embeddings", "are called by themselves, where stages do not take part"),
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
