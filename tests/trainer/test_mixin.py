"""One trainer by composition: the mixin gives a pipeline to any subclass of Trainer, and leaves little on it."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments, set_seed

from hf_pipetransformer import (
    PipeTransformerArguments,
    PipeTransformerMixin,
    PipeTransformerTrainer,
    Seq2SeqPipelineArguments,
    Seq2SeqPipelineTrainer,
)
from tests.support.models import build_model, collate, make_dataset


PACKAGE = Path(__file__).resolve().parents[2] / "hf_pipetransformer"
SOURCES = [
    *sorted((PACKAGE / "trainer").glob("*.py")),
    *sorted((PACKAGE / "training").glob("*.py")),
    PACKAGE / "compat" / "trainer_compat.py",
]
ROOMS = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

MOST_ATTRIBUTES = 5


def train(kind: type[Trainer], options: type[TrainingArguments], folder: Path, **more: Any) -> Any:
    args = options(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=4, eval_strategy="steps", eval_steps=2,
        logging_steps=1, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-3, **more,
    )  # fmt: skip
    set_seed(0)
    data = make_dataset("bert_sequence", 12)
    trainer = kind(
        build_model("bert_sequence"), args, train_dataset=data, eval_dataset=data.select(range(5)),
        data_collator=collate, compute_metrics=lambda prediction: {"count": len(prediction.label_ids)},
    )  # fmt: skip
    trainer.train()
    return trainer


def history(trainer: Trainer) -> list[float]:
    names = ("loss", "grad_norm", "eval_loss", "eval_count", "learning_rate")
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def test_another_trainer_of_transformers_gets_a_pipeline(tmp_path: Path) -> None:
    plain = train(Seq2SeqTrainer, Seq2SeqTrainingArguments, tmp_path / "plain")
    plain.model_accepts_loss_kwargs = False
    split = {"pipeline_parallel_num_microbatches": "2", "freeze_policy": "none"}
    ours = train(Seq2SeqPipelineTrainer, Seq2SeqPipelineArguments, tmp_path / "ours", **split)
    assert ours.layout.num_microbatches == 2
    assert history(ours) == pytest.approx(history(plain), rel=1e-5)
    assert ours.evaluate(max_length=7)["eval_count"] == 5


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


def accumulating(
    kind: type[Trainer], options: type[TrainingArguments], folder: Path, model: str = "bert_sequence", **more: Any
) -> Trainer:
    args = options(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2, optim="sgd",
        logging_steps=1, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip
    set_seed(0)
    return kind(build_model(model), args, train_dataset=make_dataset(model, 16), data_collator=collate)


def test_losses_that_trainer_adds_up_over_accumulated_batches_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ours, split = PipeTransformerArguments, {"pipeline_parallel_num_microbatches": "2"}
    plain = accumulating(Trainer, TrainingArguments, tmp_path)
    averaging = accumulating(Trainer, TrainingArguments, tmp_path)
    averaging.model_accepts_loss_kwargs = False
    of_plain, of_averaging = losses_of(plain), losses_of(averaging)
    assert of_plain[0] == pytest.approx(2 * of_averaging[0], rel=1e-5)

    assert losses_of(accumulating(PipeTransformerTrainer, ours, tmp_path, **split)) == pytest.approx(
        of_averaging, rel=1e-5
    )
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    (said,) = [text for text in warnings if "takes num_items_in_batch and ignores it" in text]
    assert "Trainer adds up the losses" in said and "same results as Trainer" not in caplog.text

    # As the warning says, either way makes both alike, and then the first line may say so.
    caplog.clear()
    adding = accumulating(PipeTransformerTrainer, ours, tmp_path, **split)
    adding.loss_is_scaled_for_ga = True
    assert losses_of(adding) == pytest.approx(of_plain, rel=1e-5)
    assert "ignores it" not in caplog.text and "same results as Trainer." in caplog.text


def test_losses_that_trainer_averages_over_accumulated_batches_are_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain = accumulating(Trainer, TrainingArguments, tmp_path, "vit")
    split = {"pipeline_parallel_num_microbatches": "2"}
    ours = accumulating(PipeTransformerTrainer, PipeTransformerArguments, tmp_path, "vit", **split)
    assert losses_of(ours) == pytest.approx(losses_of(plain), rel=1e-5)
    assert "ignores it" not in caplog.text and "same results as Trainer." in caplog.text


def test_little_is_set_on_the_trainer(tmp_path: Path) -> None:
    plain = train(Trainer, TrainingArguments, tmp_path / "plain")
    ours = train(PipeTransformerTrainer, PipeTransformerArguments, tmp_path / "ours", freeze_policy="gradient_norm")
    own = set(vars(ours)) - set(vars(plain)) - set(vars(Trainer))
    assert "pipeline_run" in own and len(own) <= MOST_ATTRIBUTES


class OwnSteps(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class OwnStepsBelow(PipeTransformerMixin, OwnSteps):
    """Its steps would be the pipeline's, and not its own."""


def test_a_trainer_whose_own_steps_would_not_run_is_refused(tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none", freeze_policy="gradient_norm")
    with pytest.raises(ValueError, match=r"OwnSteps\.training_step would not run.*compute_loss"):
        OwnStepsBelow(build_model("bert_sequence"), args)


class OwnSaving(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)


class OwnSavingBelow(PipeTransformerMixin, OwnSaving):
    """The state that it saves would be the pipeline's."""


def test_whatever_a_pipeline_replaces_is_refused_below_it(tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none", freeze_policy="gradient_norm")
    with pytest.raises(ValueError, match=r"OwnSaving\._save_optimizer_and_scheduler would not run"):
        OwnSavingBelow(build_model("bert_sequence"), args)


def started(folder: Path, model: str = "bert_sequence") -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=2, use_cpu=True, report_to="none",
        disable_tqdm=True, pipeline_parallel_num_microbatches="2", freeze_policy="none",
    )  # fmt: skip
    return PipeTransformerTrainer(
        build_model(model), args, train_dataset=make_dataset(model, 12), data_collator=collate
    )


def test_an_optimizer_that_a_script_sets_later_trains(tmp_path: Path) -> None:
    trainer = started(tmp_path)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_an_optimizer_of_ours_is_made_anew_for_each_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = started(tmp_path)
    trainer.train()
    first = trainer.optimizer
    said = "This training begins with a new optimizer"
    assert said not in caplog.text
    trainer.train()
    assert trainer.optimizer is not first
    assert said in caplog.text


def test_a_trainer_of_the_past_takes_no_memory(tmp_path: Path) -> None:
    options = {"freeze_policy": "fixed", "freeze_at": "0:1", "activation_cache": "off"}
    trainer = train(PipeTransformerTrainer, PipeTransformerArguments, tmp_path, **options)
    ended = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert ended[0]() is None and ended[1]() is None


def test_what_a_script_says_of_the_loss_stays(tmp_path: Path) -> None:
    trainer = started(tmp_path, "vit")
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert not trainer.model_accepts_loss_kwargs


def private_reads(tree: ast.AST) -> set[str]:
    """Private names that are read or set of something else than `self`, `cls` or `super()`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            # A named tuple promises `_replace`.
            if owner not in ("self", "cls", "super()") and node.attr != "_replace":
                found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_part_calls_a_private_method_of_another(path: Path) -> None:
    """What is private to Trainer is used by its own overrides, and in `trainer_compat.py`, which says so."""
    expected = {
        name for name in private_reads(ROOMS[path]) if path.name == "trainer_compat.py" or name.startswith("torch._C")
    }
    assert private_reads(ROOMS[path]) == expected


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_objects_exist_when_they_are_complete(path: Path) -> None:
    assert [ast.unparse(node) for node in ast.walk(ROOMS[path]) if isinstance(node, ast.Assert)] == []


def test_planted_offences_are_found() -> None:
    assert private_reads(ast.parse("self._a; cls._b; super()._c; self.other._d; __name__")) == {"self.other._d"}
