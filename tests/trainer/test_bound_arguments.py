"""Trainers under the mixin whose constructors begin with other parameters than model and args."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin
from hf_pipetransformer.trainer.mixin import BoundArguments, bind_arguments
from tests.support.models import build_model, collate, make_dataset


MODEL, TEACHER = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)


class ByName(Trainer):
    def __init__(self, *, model: Any, args: Any, **others: Any) -> None:
        super().__init__(model, args, **others)


class ArgumentsFirst(Trainer):
    def __init__(self, args: Any, model: Any, *others: Any) -> None:
        super().__init__(model, args, *others)


class Distilling(Trainer):
    def __init__(self, teacher: Any, *others: Any, weight: float = 0.5, **named: Any) -> None:
        super().__init__(*others, **named)
        self.teacher, self.weight = teacher, weight


class OtherNames(Trainer):
    def __init__(self, net: Any, options: Any) -> None:
        super().__init__(net, options)


class ForTwo(Distilling, Seq2SeqTrainer):
    """Distilling hands over to another constructor than it says."""


class WithoutArguments(Trainer):
    def __init__(self, model: Any, folder: str) -> None:
        super().__init__(model, TrainingArguments(folder, use_cpu=True, report_to="none"))


class OwnArguments(Trainer):
    def __init__(self, model: Any, args: Any) -> None:
        super().__init__(model, TrainingArguments(args.output_dir, use_cpu=True, report_to="none"))


def under_mixin(kind: type[Trainer]) -> Any:
    return type(f"Pipeline{kind.__name__}", (PipeTransformerMixin, kind), {})


def options(folder: Path, **more: Any) -> PipeTransformerArguments:
    return PipeTransformerArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1, learning_rate=1e-2,
        per_device_train_batch_size=4, freeze_policy="none", **more,
    )  # fmt: skip


def found(kind: type[Trainer], *positional: Any, **named: Any) -> BoundArguments:
    return bind_arguments(under_mixin(kind), PipeTransformerMixin, positional, named)


def test_arguments_are_found_in_any_order(tmp_path: Path) -> None:
    args = options(tmp_path)
    calls = [
        found(Trainer, MODEL, args),
        found(Trainer, MODEL, args=args),
        found(ByName, model=MODEL, args=args),
        found(ArgumentsFirst, args, MODEL),
        found(ArgumentsFirst, model=MODEL, args=args),
        found(Distilling, TEACHER, MODEL, args),
        found(Distilling, TEACHER, model=MODEL, args=args, weight=0.1),
        found(Distilling, teacher=TEACHER, args=args, model=MODEL),
        found(OtherNames, MODEL, args),
        found(OtherNames, options=args, net=MODEL),
    ]
    assert all(call.args is args and call.model is MODEL for call in calls)


def test_data_are_found_by_place(tmp_path: Path) -> None:
    call = found(Distilling, TEACHER, MODEL, options(tmp_path), None, [1, 2])
    assert call.values["train_dataset"] == [1, 2]


def test_plain_arguments_are_replaced_where_they_stand(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    calls = [
        found(ArgumentsFirst, args, MODEL),
        found(Distilling, TEACHER, MODEL, args),
        found(OtherNames, MODEL, args),
    ]
    assert [call.positional.index(call.args) for call in calls] == [0, 2, 1]
    assert found(ByName, model=MODEL, args=args).named["args"].is_taken


def test_arguments_that_are_not_given_have_their_defaults() -> None:
    assert found(Trainer, MODEL).named["args"].output_dir == "tmp_trainer"
    assert found(Trainer, MODEL, None, None).positional[1].output_dir == "tmp_trainer"
    assert found(Distilling, TEACHER, MODEL).named["args"].output_dir == "tmp_trainer"


def test_arguments_of_the_next_constructor_count(tmp_path: Path) -> None:
    plain = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", generation_max_length=7)
    assert found(ForTwo, TEACHER, MODEL, plain).args.generation_max_length == 7


def test_a_model_that_is_not_told_from_another_is_not_known(tmp_path: Path) -> None:
    assert found(OtherNames, MODEL, options(tmp_path)).model is MODEL
    assert found(Trainer, "a name", options(tmp_path)).model is None
    assert found(Distilling, TEACHER, args=options(tmp_path), model_init=lambda: MODEL).model is None


def test_constructors_without_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="WithoutArguments was given no Train.*no parameter `args`"):
        under_mixin(WithoutArguments)(build_model("bert_sequence"), str(tmp_path))


def test_constructors_that_make_their_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="OwnArguments has TrainingArguments that its constructor made anew"):
        under_mixin(OwnArguments)(build_model("bert_sequence"), options(tmp_path))


def test_a_trainer_with_a_parameter_in_front_trains_as_without_a_pipeline(tmp_path: Path) -> None:
    def losses(kind: Any, args: Any) -> list[float]:
        trainer = kind(build_model("bert_sequence"), build_model("bert_sequence"), args, collate,
                       train_dataset=make_dataset("bert_sequence", 8), weight=0.1)  # fmt: skip
        trainer.train()
        assert trainer.weight == 0.1
        return [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]

    plain = TrainingArguments(str(tmp_path / "plain"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1,
                              learning_rate=1e-2, per_device_train_batch_size=4)  # fmt: skip
    ours = options(tmp_path / "ours", pipeline_parallel_num_microbatches="2")
    assert losses(under_mixin(Distilling), ours) == pytest.approx(losses(Distilling, plain), rel=1e-5)
