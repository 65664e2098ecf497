"""The callback that computes frozen parts once in any Trainer: its numbers, what it reads and what it leaves alone."""

from __future__ import annotations

import atexit
import io
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import ComputedOnce, PipeTransformerMixin, PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts import watching
from hf_pipetransformer.cache.frozen_parts.served import Records
from tests.support.frozen_models import CASES, PROBES, Case, images, logged, stack, trainer_of, vit_probe


TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WORTH", 0.0)


def both(case: Case, folder: Path, kind: type = Trainer, **options: Any) -> tuple[Trainer, Trainer]:
    """A trainer without and one with the callback after the same training, losses, norms and weights compared."""
    plain = trainer_of(kind, case, folder / "plain", **options)
    expected = logged(plain)
    ours = trainer_of(kind, case, folder / "ours", **options)
    ours.add_callback(ComputedOnce("on", dir=str(folder / "cache")))
    np.testing.assert_allclose(logged(ours), expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], weight, rtol=TOLERANCE, atol=TOLERANCE)
    return plain, ours


def outputs_read(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int]]:
    text = "\n".join(record.getMessage() for record in caplog.records)
    return [(int(hits), int(all_)) for hits, all_ in re.findall(r": (\d+) of (\d+) outputs were read instead", text)]


@pytest.mark.parametrize("name", [*CASES, *PROBES])
def test_any_trainer_reads_what_it_has_computed(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = {**CASES, **PROBES}[name]
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        _, ours = both(case, tmp_path)
    # Of texts a batch of the same length is read alone; the model's outputs might be read beyond its loss.
    expected = {"t5": (12, 32), "smolvlm": (40, 64)}.get(name, (20, 32))
    assert expected in outputs_read(caplog), "all but the batch that is watched and the first epoch"
    assert not any("forward" in vars(module) for module in ours.model.modules())
    assert not ours.model._forward_hooks and not ours.model._forward_pre_hooks


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ],
    ids=["accumulation", "checkpointing", "bf16", "workers"],
)
def test_options_of_trainer(options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(CASES["whisper"], tmp_path, **options)
    ((hits, looked_up),) = outputs_read(caplog)
    assert (hits, looked_up) == ((22, 34) if "gradient_accumulation_steps" in options else (20, 32))


def test_seq2seq_trainer_evaluates_with_what_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def evaluated(callbacks: list[TrainerCallback], folder: Path) -> list[Any]:
        set_seed(1)
        case, rows = CASES["whisper"], CASES["whisper"].data()
        args = Seq2SeqTrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=3, num_train_epochs=2,
            eval_strategy="epoch", predict_with_generate=True, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False, generation_max_length=8, logging_steps=1,
        )  # fmt: skip
        seen: list[Any] = []
        trainer = Seq2SeqTrainer(
            case.build(), args, train_dataset=rows, eval_dataset=rows[:6], data_collator=stack, callbacks=callbacks,
            compute_metrics=lambda given: seen.append(given.predictions.copy()) or {},
        )  # fmt: skip
        trainer.train()
        return [*seen, *[entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]]

    expected = evaluated([], tmp_path / "plain")
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = evaluated([ComputedOnce("on")], tmp_path / "ours")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE)
    assert outputs_read(caplog) == [(8 + 6, 20 + 2 * 6)], "generation calls the encoder, not the model"


class _Looks(TrainerCallback):
    """Saves the model whole, freezes nothing more, and edits the part between two epochs."""

    def __init__(self) -> None:
        self.saved: list[nn.Module] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        file = io.BytesIO()
        torch.save(kwargs["model"], file)
        file.seek(0)
        self.saved.append(torch.load(file, weights_only=False))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if round(state.epoch) == 2:
            with torch.no_grad():
                kwargs["model"].model.encoder.layers[0].fc1.weight.mul_(1.5)


def test_callbacks_of_the_script_find_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case, looks = CASES["whisper"], _Looks()
    plain = trainer_of(Trainer, case, tmp_path / "plain")
    plain.add_callback(_Looks())
    ours = trainer_of(Trainer, case, tmp_path / "ours")
    ours.add_callback(ComputedOnce("on"))
    ours.add_callback(looks)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        np.testing.assert_allclose(logged(ours), logged(plain), rtol=TOLERANCE, atol=TOLERANCE)
    assert "model.encoder were changed from outside: its outputs are computed again" in caplog.text
    batch = stack(case.data()[:2])
    with torch.no_grad():
        assert torch.isfinite(looks.saved[-1](**batch).loss)


class _Edits(TrainerCallback):
    """Saves the model at an event, and has its encoder give other outputs, or be trained."""

    def __init__(self, at: str, trains: bool) -> None:
        setattr(self, at, self._edit)
        self._trains = trains

    def _edit(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step != 4:
            return
        torch.save(model, io.BytesIO())
        encoder, own = model.model.encoder, model.model.encoder.forward
        encoder.requires_grad_(self._trains)

        def other(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            output["last_hidden_state"] = output["last_hidden_state"] * 1.5
            return output

        if not self._trains:
            encoder.forward = other


@pytest.mark.parametrize(
    ("at", "is_first", "trains"),
    [("on_step_end", False, False), ("on_pre_optimizer_step", True, False), ("on_step_begin", True, True)],
)
def test_edits_around_a_step_are_followed(at: str, is_first: bool, trains: bool, tmp_path: Path) -> None:
    def trained(folder: Path, *callbacks: TrainerCallback) -> list[tuple[float, float]]:
        trainer = trainer_of(Trainer, CASES["whisper"], folder)
        for each in callbacks if is_first else reversed(callbacks):
            trainer.add_callback(each)
        return logged(trainer)

    expected = trained(tmp_path / "plain", _Edits(at, trains))
    found = trained(tmp_path / "ours", ComputedOnce("on"), _Edits(at, trains))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


class _Direct(Trainer):
    """Calls parts of the model, and the model on inputs with noise."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first = model.vit(inputs["pixel_values"]).last_hidden_state[:, 0].mean()
        noisy = model(pixel_values=inputs["pixel_values"] + torch.randn_like(inputs["pixel_values"]))
        outputs = model(**inputs)
        loss = outputs.loss + noisy.logits.pow(2).mean() + first
        return (loss, outputs) if return_outputs else loss


def test_a_loss_that_calls_parts_and_draws(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(PROBES["vit"], tmp_path, _Direct)


class _Outside(Trainer):
    """Calls the parts of the model, and never the model."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model.classifier(model.vit(inputs["pixel_values"]).last_hidden_state[:, 0])
        return nn.functional.cross_entropy(logits, inputs["labels"])


def test_that_nothing_was_stored_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(PROBES["vit"], tmp_path, _Outside)
    assert "activation_cache='on' stores nothing: no frozen part was seen to compute" in caplog.text


class _Calls(Trainer):
    """Calls the model on a tensor, a list or a dict in a dict, as its batches are made."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        given, labels = inputs.values() if isinstance(inputs, dict) else inputs
        return nn.functional.cross_entropy(model(given), labels["all"] if isinstance(labels, dict) else labels)


class _OurCalls(PipeTransformerMixin, _Calls):
    pass


class _Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit, self.head = vit_probe().vit, nn.Linear(32, 3)

    def forward(self, given: Any) -> torch.Tensor:
        pixels = given["pixels"] if isinstance(given, dict) else given[0] if isinstance(given, list) else given
        logits: torch.Tensor = self.head(self.vit(pixels).last_hidden_state[:, 0])
        return logits


@pytest.mark.parametrize(
    "collate",
    [
        lambda rows: tuple(stack(rows).values()),
        lambda rows: [[stack(rows)["pixel_values"]], stack(rows)["labels"]],
        lambda rows: {"given": {"pixels": stack(rows)["pixel_values"]}, "labels": {"all": stack(rows)["labels"]}},
    ],
    ids=["tensor", "list", "dict"],
)
def test_batches_and_calls_of_any_form(collate: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(_Takes, images, "vit", collate)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        plain, _ = both(case, tmp_path, _Calls)
        expected = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
        found = [loss for loss, _ in logged(trainer_of(_OurCalls, case, tmp_path / "trainer"))]
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert outputs_read(caplog) == [(20, 32), (20, 32)]


class _Slow(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(given.flatten(1))


class _Modules(nn.Sequential):
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = super().forward(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_part_without_a_name_is_told_by_its_class_and_timed_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return _Modules(_Slow(3 * 32 * 32, 8).requires_grad_(False), nn.Linear(8, 3))

    def noted(watch: watching.Watch, agreed: set[str]) -> list[watching.Plan]:
        found.extend(find(watch, agreed))
        return found

    found, find = list[watching.Plan](), watching.Watch.find
    monkeypatch.setattr(watching.Watch, "find", noted)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(Case(build, images, "0"), tmp_path)
    assert "_Slow (0.0246 million parameters) is frozen: it is computed once" in caplog.text
    assert found[0].share > 0.6, "of one step, and without the time of what is noted"


def test_a_training_that_an_exception_ended_leaves_the_next_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)

    class Ends(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyError("ended")

    ours = trainer_of(Trainer, CASES["whisper"], tmp_path / "ours")
    once, ends = ComputedOnce("on", dir=str(tmp_path)), Ends()
    ours.add_callback(once)
    ours.add_callback(ends)
    with pytest.raises(KeyError, match="ended"):
        ours.train()
    torch.save(ours.model, io.BytesIO())
    ours.remove_callback(ends)
    ours.train()
    assert not any("forward" in vars(module) for module in ours.model.modules())
    assert not ours.model._forward_hooks and not ours.model._forward_pre_hooks
    ours.add_callback(ends)
    with pytest.raises(KeyError, match="ended"):
        ours.train()
    assert list(tmp_path.glob("*/unnamed-*"))
    at_exit[-1]()
    assert not list(tmp_path.glob("*/unnamed-*"))


def test_a_checkpoint_holds_no_step_that_read_what_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    is_what_it_was = Records.is_what_it_was
    ours = trainer_of(Trainer, CASES["whisper"], tmp_path, save_strategy="steps", save_steps=4, save_only_model=True)

    def note(records: Records) -> bool:
        checked.append(ours.state.global_step)
        return is_what_it_was(records)

    monkeypatch.setattr(Records, "is_what_it_was", note)
    ours.add_callback(ComputedOnce("on"))
    ours.train()
    assert {4, 8} <= set(checked)


def _trained() -> nn.Module:
    return CASES["whisper"].build().requires_grad_(True)


def test_options_are_checked_when_they_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"^mode.*'onn'"):
        ComputedOnce("onn")
    with pytest.raises(ValueError, match=r"^max_gb.*positive number of gigabytes"):
        ComputedOnce(max_gb=-1)
    ours = trainer_of(PipeTransformerTrainer, CASES["whisper"], tmp_path / "ours")
    ours.add_callback(ComputedOnce())
    with pytest.raises(ValueError, match="computes frozen parts once by itself: leave the callback ComputedOnce out"):
        ours.train()
    compiled = TrainingArguments(str(tmp_path / "compiled"), torch_compile=True, report_to="none", use_cpu=True)
    ComputedOnce().on_train_begin(compiled, ours.state, ours.control, model=ours.model, train_dataloader=None)
    assert "ComputedOnce stores nothing with torch_compile" in caplog.text
    trained = trainer_of(Trainer, replace(CASES["whisper"], build=_trained), tmp_path / "trained", max_steps=1)
    trained.add_callback(ComputedOnce())
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        trained.train()
    assert "ComputedOnce has nothing to store: no module of the model has frozen parameters alone" in caplog.text
