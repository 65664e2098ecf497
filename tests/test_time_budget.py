"""A run that takes as long as one that freezes nothing: how many steps that gives it, and that it keeps to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.autocache.decision import CacheCosts
from hf_pipetransformer.autopipe.costs import Overheads, UnitCosts
from hf_pipetransformer.autopipe.time_budget import Forecast, Span, Storing, most_steps, spans_of
from hf_pipetransformer.freeze.policies import FreezePolicy, FreezeSignal
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.run import beginning
from hf_pipetransformer.run.budget import Budget, Measured
from hf_pipetransformer.run.first_batches import TypicalBatches
from hf_pipetransformer.samples import OwnBatches
from hf_pipetransformer.splitters.profile import UnitProfile
from hf_pipetransformer.startup.whole_steps import WholeSteps, fitted
from tests.models import build_model, collate, make_dataset


PER_EPOCH = 10
LAYOUT = Layout(
    num_layers=2, num_frozen_layers=0, num_stages=1, num_replicas=1, boundaries=(0, 6), num_microbatches=1,
    schedule="1f1b",
)  # fmt: skip


def costs_of(num_units: int) -> UnitCosts:
    """A second for each forward, two for a backward, one for that of a unit whose input needs no gradient."""
    return UnitCosts(
        forward=(1.0,) * num_units, backward=(2.0,) * num_units, edge_backward=(1.0,) * num_units,
        parameters=(1,) * num_units, activation_bytes=(1.0,) * num_units,
    )  # fmt: skip


def forecast(storing: Storing | None = None, **overheads: float) -> Forecast:
    def plan(current: Layout, num_frozen: int, cache_level: int) -> Layout:
        return replace(current, num_frozen_layers=num_frozen, cache_level=cache_level)

    parts = (costs_of(6), Overheads(**{"per_step": 0.5, **overheads}), 1, 1, PER_EPOCH)
    return Forecast(LAYOUT, *parts, plan, storing)


STORING = Storing(CacheCosts(prefix=(1.0, 3.0, 5.0), input=0.5, read=0.0, write=2.0), "on")


# ---- planning


def test_the_full_run_is_as_long_as_its_steps() -> None:
    # 6 forwards, 1 + 5 * 2 backwards, half a second beside them.
    assert forecast().full_seconds(20) == 20 * 17.5


def test_a_prefix_frozen_from_the_start_without_a_cache() -> None:
    # 6 forwards; backwards of three units, the first of which takes 1.
    assert forecast().seconds([Span(30, 1)]) == 30 * 11.5


def test_rows_are_written_in_the_first_epoch_and_read_after_it() -> None:
    # 2 seconds for a row in the first epoch, then 3 forwards, and the half second of reading is saved.
    assert forecast(STORING).seconds([Span(36, 1)]) == 10 * 13.5 + 26 * 8
    assert forecast(STORING).seconds([Span(10, 0), Span(15, 1)]) == 10 * 17.5 + 10 * 13.5 + 5 * 8


def test_rows_of_fewer_layers_serve_while_those_of_more_are_written() -> None:
    # From the level 1 on: 3 forwards, the backward of the head (1), half a second less, 2 for writing; then 1 + 1.
    expected = 10 * 13.5 + 10 * 8 + 10 * (3 + 1 + 2) + 5 * 2
    assert forecast(STORING).seconds([Span(20, 1), Span(15, 2)]) == expected


def test_half_an_epoch_of_writing_leaves_half_of_the_rows() -> None:
    # The next level is written in one epoch, in which half of the samples have rows of the level before.
    with_rows, without = 3 + 1 + 2, 6 + 1 + 0.5 + 2
    expected = 5 * 13.5 + 10 * (with_rows + without) / 2 + 5 * 2
    assert forecast(STORING).seconds([Span(5, 1), Span(15, 2)]) == expected


def test_views_are_written_in_as_many_epochs_and_drawn_anew_later() -> None:
    # Above the frozen layer 3 + 1 + 2 * 2 seconds, of which a tenth goes into new draws that take 5.5 each: 0.145.
    new = 0.145
    later = (1 - new) * 8 + new * (11.5 + 2)
    found = forecast(replace(STORING, num_views=2)).seconds([Span(25, 1)])
    assert found == pytest.approx(20 * 13.5 + 5 * later)


def test_as_many_steps_as_fit() -> None:
    def seconds_of(steps: int) -> float:
        return forecast(STORING).seconds([Span(steps, 1)])

    assert most_steps(seconds_of, forecast().full_seconds(20), 20, 200) == 36
    assert seconds_of(36) == 343 < 350 < seconds_of(37)
    assert most_steps(float, 17.5, 20, 200) == 20, "no fewer than were asked for"
    assert most_steps(float, 1e9, 20, 200) == 200, "no more than the bound"
    assert [most_steps(float, budget, 0, 7) for budget in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 7]


def test_moves_of_weights_take_time_and_new_numbers_do_not() -> None:
    def plan(current: Layout, num_frozen: int, cache_level: int) -> Layout:
        return replace(current, num_stages=1, num_replicas=2, boundaries=(0, 6), num_frozen_layers=num_frozen)

    start = replace(LAYOUT, num_stages=2, boundaries=(0, 3, 6))
    moved = Forecast(start, costs_of(6), Overheads(reduction_per_byte=1.0), 1, 1, PER_EPOCH, plan)
    # Three units with one parameter each and 12 bytes; then 4 bytes of gradient each over two replicas.
    assert moved.seconds([Span(1, 1)]) == 3 * 12 + 11 + 3 * 4
    assert moved.seconds([Span(2, 0)]) == moved.full_seconds(2)


def test_an_outlook_as_steps_in_a_row() -> None:
    assert spans_of([(0, 2), (4, 2), (6, 3), (9, 4)], 1, 9) == [Span(6, 2), Span(3, 3)]
    assert spans_of([], 1, 9) == [Span(9, 1)]


def test_units_add_up_to_whole_steps() -> None:
    profile = UnitProfile([1.0] * 6, [2.0] * 6, [1.0] * 6, [0.0] * 6)
    steps = WholeSteps(whole=(20.0, 40.0), embeddings=(1.0, 4.0), top=(11.0, 20.0), top_start=3)
    found = fitted(profile, steps)
    assert sum(found.forward) == pytest.approx(20)
    assert sum(found.backward) == pytest.approx(40)
    assert sum(found.forward[3:]) == pytest.approx(11)
    assert found.edge_backward[3] + sum(found.backward[4:]) == pytest.approx(20)
    assert found.forward[1] == pytest.approx(4)
    # Noise: the layers would take nothing.
    scaled = fitted(profile, WholeSteps((20.0, 40.0), (1.0, 4.0), (20.0, 39.0), 3))
    assert scaled.forward == pytest.approx([20 / 6] * 6)
    assert scaled.backward == pytest.approx([40 / 6] * 6)


def test_batches_from_all_over_an_epoch() -> None:
    batches = OwnBatches(list(range(100, 124)), lambda rows: {"rows": rows}, 4, lambda: range(23, -1, -1))
    found = [batch["rows"] for batch in batches.spread(4, 3)]
    assert found == [[119, 118, 117, 116], [111, 110, 109, 108], [103, 102, 101, 100]]
    assert len(list(batches.spread(20, 8))) == 1


def test_the_batch_of_the_usual_size_stands_for_all() -> None:
    def collate_rows(rows: list[int]) -> dict[str, torch.Tensor]:
        return {"ids": torch.zeros(len(rows), max(rows))}

    # Eight batches of two samples, of 15, 13, ..., 1 tokens each: 8 on average, and 9 comes before 7.
    typical = TypicalBatches(OwnBatches(list(range(16)), collate_rows, 2, lambda: range(15, -1, -1)), "ids")
    assert typical.read(2)["ids"].shape == (2, 9)
    assert typical.mean_over_given == 8 / 9


# ---- options


def options(folder: Path, **changes: Any) -> PipeTransformerArguments:
    return PipeTransformerArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        **{"freeze_policy": "fixed", "freeze_at": "0:2", "activation_cache": "off", "freeze_budget": "time",
           "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, **changes},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": 5}, "freeze_budget='time' with max_steps=5"),
        ({"full_determinism": True}, "freeze_budget='time' with full_determinism=True"),
        ({"freeze_budget": "money"}, "freeze_budget must be one of"),
    ],
)
def test_what_a_time_cannot_be_planned_with(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        options(tmp_path, **changes)


def trainer_of(folder: Path, policy: FreezePolicy | None = None, **changes: Any) -> PipeTransformerTrainer:
    data = make_dataset("bert_sequence", 12)
    args = options(folder, **changes)
    return PipeTransformerTrainer(
        build_model("bert_sequence"), args, train_dataset=data, data_collator=collate, policy=policy
    )


class Hesitant(FreezePolicy):
    """Nobody knows."""

    name = "hesitant"

    def num_wanted(self, signal: FreezeSignal) -> float:
        return 0


def test_a_policy_that_decides_on_the_way_is_refused(tmp_path: Path) -> None:
    by_name = {"freeze_policy": "gradient_norm", "freeze_at": None}
    with pytest.raises(ValueError, match="expected freeze_policy='fixed' or 'schedule', found 'gradient_norm"):
        trainer_of(tmp_path, **by_name)
    with pytest.raises(ValueError, match="found 'hesitant'"):
        trainer_of(tmp_path, Hesitant())
    with pytest.raises(ValueError, match="a policy that thaws layers is not supported"):
        trainer_of(tmp_path, freeze_at="0:2,4:0")


# ---- runs


def planted(trainer: Any, pipeline: Any, *_: Any) -> Measured:
    return Measured(costs_of(2 * pipeline.layout.num_layers + 2), Overheads(), None, looking_seconds=0.25)


def not_again(*_: Any) -> Measured:
    raise AssertionError("the length of a run is planned once")


def weights(trainer: PipeTransformerTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def are_equal(one: PipeTransformerTrainer, other: PipeTransformerTrainer) -> bool:
    theirs = weights(other)
    return all(torch.equal(value, theirs[name]) for name, value in weights(one).items())


def planned_steps(num_layers: int) -> int:
    """Of 6 steps' time, each of 4 samples."""
    units = 2 * num_layers + 2
    full, frozen = 4 * (units + 1 + 2 * (units - 1)), 4 * (units + 1 + 2 * (units - 6))
    return int((6 * full - 0.25) / frozen)


def test_a_run_takes_the_steps_that_were_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the run of so many steps, in every bit, with its learning rate; the next one is no longer."""
    monkeypatch.setattr(beginning, "measure", planted)
    trainer = trainer_of(tmp_path / "time", save_strategy="no")
    before = trainer.args.to_dict()
    trainer.train()
    num_steps = planned_steps(trainer.layout.num_layers)
    assert 6 < num_steps < 60
    assert (trainer.state.global_step, trainer.state.max_steps) == (num_steps, num_steps)
    assert trainer.state.num_train_epochs == -(-num_steps // 3)
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
    assert trainer.args.to_dict() == before
    plain = trainer_of(tmp_path / "epochs", freeze_budget="epochs", max_steps=num_steps, save_strategy="no")
    plain.train()
    assert are_equal(trainer, plain)
    events = read_events(str(tmp_path / "time" / EVENTS_FILE))
    (event,) = [each for each in events if each["event"] == "profile" and each["what"] == "budget"]
    assert event["budget"]["num_steps"] == num_steps
    assert event["because"]["spans"] == [{"num_steps": num_steps, "num_frozen": 2}]
    (end,) = [each for each in events if each["event"] == "end"]
    assert (end["budget"], end["num_steps"]) == (event["budget"], num_steps)
    assert trainer.train().global_step == num_steps


@pytest.mark.slow
def test_a_run_that_goes_on_or_is_replayed_is_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its checkpoint, and once more by its events: both to the bit, and nothing is planned anew."""
    monkeypatch.setattr(beginning, "measure", planted)
    kept = {"save_strategy": "steps", "save_steps": 4}
    whole, plain = (
        trainer_of(tmp_path / "time", **kept),
        trainer_of(tmp_path / "epochs", freeze_budget="epochs", **kept),
    )
    whole.train()
    plain.train()
    monkeypatch.setattr(beginning, "measure", not_again)
    resumed = trainer_of(tmp_path / "resumed", **kept)
    resumed.train(resume_from_checkpoint=str(tmp_path / "time" / "checkpoint-4"))
    replayed = trainer_of(tmp_path / "replayed", layout_plan=str(tmp_path / "time" / EVENTS_FILE), save_strategy="no")
    replayed.train()
    for again in (resumed, replayed):
        assert again.state.global_step == whole.state.global_step > 6
        assert are_equal(again, whole)
    for changes, where in (({}, "checkpoint-4"), ({"layout_plan": str(tmp_path / "epochs" / EVENTS_FILE)}, None)):
        saved = None if where is None else str(tmp_path / "epochs" / where)
        with pytest.raises(ValueError, match="is of a run with freeze_budget='epochs'"):
            trainer_of(tmp_path / "other", **kept, **changes).train(resume_from_checkpoint=saved)


def test_a_run_that_goes_on_with_other_batches_trains_as_many_epochs() -> None:
    budget = Budget(num_steps=35, steps_per_epoch=10, planned_s=1.0, full_s=1.0)
    # 100 samples, batches of 20 in place of 10: 3.5 epochs of 5 steps.
    assert budget.counts((2, 5, 100, 200, 20, 5, 10)) == (4, 5, 100, 360.0, 20, 5, 18)


@pytest.mark.slow
def test_a_run_that_is_really_measured_ends(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, activation_cache="on", freeze_policy="schedule", freeze_at=None, num_train_epochs=3)
    trainer.train()
    budget = read_events(str(tmp_path / EVENTS_FILE))[-1]["budget"]
    assert trainer.state.global_step == budget["num_steps"] >= 9
