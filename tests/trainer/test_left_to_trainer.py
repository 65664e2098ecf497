"""One process that freezes nothing is Trainer: whatever a script gives it works, with Trainer's numbers to the bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.data.sampler import Samples
from hf_pipetransformer.splitters.base import UnsupportedModelError
from tests.support.adapted import ADDS
from tests.support.usages import USAGES, Line, assert_same, outcome, points


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said reaches `caplog`, whoever has announced something before."""
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[ADDS] if name == "an added adapter" else []) for name in USAGES]
)
def test_one_process_without_freezing_is_trainer(name: str, tmp_path: Path) -> None:
    ours = outcome(USAGES[name], PipeTransformerTrainer, {"freeze_policy": "none"}, tmp_path / "ours")
    assert_same(ours, outcome(USAGES[name], Trainer, {}, tmp_path / "plain"))
    assert ours["is_left"]


def test_freezing_is_left_out_where_a_model_has_no_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = USAGES["a tuple with the loss first"]
    ours = outcome(usage, PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path / "ours")
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))
    said = [record.message for record in caplog.records if "without a pipeline or freezing" in record.message]
    assert len(said) == 1 and "Line has no config.model_type" in said[0]


def training_without_layers(kind: type[Trainer], folder: Path, **options: Any) -> Trainer:
    """A trainer of a BERT that is embeddings and a head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "hidden_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, num_hidden_layers=0, **sizes))
    rows = [{"input_ids": torch.tensor([index, 3, 7]), "labels": torch.tensor(index % 2)} for index in range(8)]
    arguments = TrainingArguments if kind is Trainer else PipeTransformerArguments
    options |= {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "no", "report_to": "none"}
    return kind(model, arguments(output_dir=str(folder), use_cpu=True, **options), train_dataset=rows)


def test_a_model_of_no_layers_is_trainers_where_layers_freeze(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = training_without_layers(Trainer, tmp_path)
    ours = training_without_layers(PipeTransformerTrainer, tmp_path, freeze_policy="gradient_norm")
    for trainer in (plain, ours):
        trainer.train()
    found, expected = ours.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    said = [record.message for record in caplog.records if "without a pipeline or freezing" in record.message]
    assert len(said) == 1 and "BertForSequenceClassification has no layers" in said[0]


def test_a_model_of_no_layers_is_refused_in_a_sentence(tmp_path: Path) -> None:
    trainer = training_without_layers(PipeTransformerTrainer, tmp_path, pipeline_parallel_num_microbatches=2)
    with pytest.raises(UnsupportedModelError, match="has no layers, found num_hidden_layers=0: expected 1 or more"):
        trainer.train()


def test_a_model_of_no_layers_is_not_trained_where_its_plan_was_asked_for(tmp_path: Path) -> None:
    trainer = training_without_layers(PipeTransformerTrainer, tmp_path, plan_only=True)
    with pytest.raises(UnsupportedModelError, match="has no layers"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("raises", ["always", "on parts of a batch"])
def test_what_a_model_raises_when_it_is_inspected_is_a_refusal(
    raises: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the pipeline that was asked for; where freezing alone was, one sentence says that nothing freezes."""
    usage = USAGES[f"a model that raises when it is inspected, {raises}"]
    options = {"pipeline_parallel_num_microbatches": 2}
    with pytest.raises(
        UnsupportedModelError, match="raises KeyError while it is tried on stages.*'planted'"
    ) as refused:
        outcome(usage, PipeTransformerTrainer, options, tmp_path / "refused")
    assert isinstance(refused.value.__cause__, KeyError)
    # One batch at a time is not cut.
    if raises == "always":
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

    monkeypatch.setattr(Samples, "__getitems__", fail)
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
