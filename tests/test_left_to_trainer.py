"""One process that freezes nothing is Trainer: whatever a script gives it works, with Trainer's numbers to the bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.samples import OwnBatches
from hf_pipetransformer.splitters import UnsupportedModelError
from tests.usages import USAGES, Line, assert_same, outcome, points


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said reaches `caplog`, whoever has announced something before."""
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)


@pytest.mark.parametrize("name", list(USAGES))
def test_one_process_without_freezing_is_trainer(name: str, tmp_path: Path) -> None:
    ours = outcome(USAGES[name], PipeTransformerTrainer, {"freeze_policy": "none"}, tmp_path / "ours")
    assert_same(ours, outcome(USAGES[name], Trainer, {}, tmp_path / "plain"))
    assert ours["is_left"]


def test_freezing_is_left_out_where_a_model_has_no_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = USAGES["a tuple with the loss first"]
    ours = outcome(usage, PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path / "ours")
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))
    said = [record.message for record in caplog.records if "freezes and stores nothing" in record.message]
    assert len(said) == 1 and "Line has no config.model_type" in said[0]


@pytest.mark.parametrize("raises", ["always", "on parts of a batch"])
def test_what_a_model_raises_when_it_is_inspected_is_a_refusal(
    raises: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the pipeline that was asked for; where freezing alone was, one sentence says that nothing freezes."""
    usage = USAGES[f"a model that raises when it is inspected, {raises}"]
    options = {"pipeline_parallel_num_microbatches": 2}
    with pytest.raises(UnsupportedModelError, match="raises KeyError .*'planted'") as refused:
        outcome(usage, PipeTransformerTrainer, options, tmp_path / "refused")
    assert isinstance(refused.value.__cause__, KeyError)
    ours = outcome(usage, PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path / "ours")
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))
    assert len([each for each in caplog.records if "planted" in each.message]) == 1


def test_what_a_model_changes_in_itself_while_it_is_inspected_is_undone(tmp_path: Path) -> None:
    """Else it would not draw again what it drew then."""
    usage = USAGES["a module made anew in the first forward"]
    ours = outcome(usage, PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path / "ours")
    assert ours["is_left"]
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))


def test_errors_of_the_data_set_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> Any:
        raise KeyError("a column")

    monkeypatch.setattr(OwnBatches, "read", fail)
    with pytest.raises(KeyError, match="a column"):
        outcome(USAGES["BERT"], PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path)


@pytest.mark.parametrize("name", ["gone on with", "gone on with from the start"])
def test_what_was_left_to_trainer_is_gone_on_with(name: str, tmp_path: Path) -> None:
    """Freezing is asked for, so it is looked at anew what the model can."""
    ours = outcome(USAGES[name], PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path / "ours")
    assert_same(ours, outcome(USAGES[name], Trainer, {}, tmp_path / "plain"))


def test_plain_arguments_get_the_options_of_a_pipeline(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.25, use_cpu=True, report_to="none")
    trainer = PipeTransformerTrainer(Line(), args, train_dataset=points())
    assert isinstance(trainer.args, PipeTransformerArguments) and type(args) is TrainingArguments
    defaults = PipeTransformerArguments(output_dir=str(tmp_path), learning_rate=0.25, use_cpu=True, report_to="none")
    own, expected = trainer.args.to_dict(), defaults.to_dict()
    assert {name for name in expected if own[name] != expected[name]} <= {"ddp_timeout"}


def test_options_of_a_pipeline_given_to_trainer_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    Trainer(Line(), args, train_dataset=points())
    assert [record.message for record in caplog.records if "without a pipeline" in record.message]
    caplog.clear()
    PipeTransformerTrainer(Line(), args, train_dataset=points())
    assert not [record.message for record in caplog.records if "without a pipeline" in record.message]
