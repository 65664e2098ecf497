"""One process that freezes nothing is Trainer: whatever a script gives it works, with Trainer's numbers to the bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_pipetransformer import FreezePolicy, PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.data.sampler import Samples
from hf_pipetransformer.splitters.base import UnsupportedModelError
from tests.support.adapted import ADDS
from tests.support.settled_policy import Settled
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


LEFT_OPEN = {"pipeline_head_slices": "auto"}
"""Options with which a model is inspected, and may be left to Trainer."""


def left(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of runs that are left to Trainer."""
    return [record.message for record in caplog.records if "in the loop of plain Trainer" in record.message]


def test_what_a_pipeline_cannot_run_is_trainers_where_nothing_needs_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usage = USAGES["a tuple with the loss first"]
    ours = outcome(usage, PipeTransformerTrainer, LEFT_OPEN, tmp_path / "ours")
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))
    assert len(left(caplog)) == 1 and "Line has no config.model_type" in left(caplog)[0]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"freeze_policy": "gradient_norm"}, "freeze_policy=gradient_norm"),
        ({"freeze_layers": 1}, "freeze_layers=1"),
        ({"policy": Settled()}, "policy=Settled"),
    ],
)
def test_freezing_that_a_model_rules_out_is_refused_before_the_first_step(
    asked: dict[str, Any], named: str, tmp_path: Path
) -> None:
    policy = asked.pop("policy", None)
    config = AlbertConfig(
        vocab_size=20, embedding_size=8, hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=4
    )
    model = AlbertForSequenceClassification(config)
    trainer = training_without_layers(PipeTransformerTrainer, tmp_path, model, policy=policy, **asked)
    with pytest.raises(UnsupportedModelError, match=f"{named} can freeze no layer: Albert.* shared layers"):
        trainer.train()
    assert trainer.state.global_step == 0


def training_without_layers(
    kind: type[Trainer], folder: Path, model: Any = None, policy: FreezePolicy | None = None, **options: Any
) -> Trainer:
    """A trainer of a BERT that is embeddings and a head, or of another model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "hidden_dropout_prob": 0.0}
    model = model or BertForSequenceClassification(BertConfig(vocab_size=20, num_hidden_layers=0, **sizes))
    rows = [{"input_ids": torch.tensor([index, 3, 7]), "labels": torch.tensor(index % 2)} for index in range(8)]
    arguments = TrainingArguments if kind is Trainer else PipeTransformerArguments
    options |= {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "no", "report_to": "none"}
    own: dict[str, Any] = {} if policy is None else {"policy": policy}
    return kind(model, arguments(output_dir=str(folder), use_cpu=True, **options), train_dataset=rows, **own)


def test_a_model_of_no_layers_is_trainers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = training_without_layers(Trainer, tmp_path)
    ours = training_without_layers(PipeTransformerTrainer, tmp_path, **LEFT_OPEN)
    for trainer in (plain, ours):
        trainer.train()
    found, expected = ours.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(left(caplog)) == 1 and "BertForSequenceClassification has no layers" in left(caplog)[0]


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
    """By the pipeline that was asked for; where none was, one sentence says that Trainer trains."""
    usage = USAGES[f"a model that raises when it is inspected, {raises}"]
    options = {"pipeline_parallel_num_microbatches": 2}
    with pytest.raises(
        UnsupportedModelError, match="raises KeyError while it is tried on stages.*'planted'"
    ) as refused:
        outcome(usage, PipeTransformerTrainer, options, tmp_path / "refused")
    assert isinstance(refused.value.__cause__, KeyError)
    # One batch at a time is not cut.
    if raises == "always":
        ours = outcome(usage, PipeTransformerTrainer, LEFT_OPEN, tmp_path / "ours")
        assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))
        assert len([each for each in caplog.records if "planted" in each.message]) == 1


def test_what_a_model_changes_in_itself_while_it_is_inspected_is_undone(tmp_path: Path) -> None:
    """Else it would not draw again what it drew then."""
    usage = USAGES["a module made anew in the first forward"]
    ours = outcome(usage, PipeTransformerTrainer, LEFT_OPEN, tmp_path / "ours")
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
    """It is looked at anew what the model can."""
    ours = outcome(USAGES[name], PipeTransformerTrainer, LEFT_OPEN, tmp_path / "ours")
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
