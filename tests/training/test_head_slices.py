"""Head and loss of a causal language model in slices of the sequence: Trainer's numbers, and few logits at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.integrations import liger

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.engine.head import HeadSlices
from hf_pipetransformer.engine.losses import LossRule, LossScope
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.startup import start
from hf_pipetransformer.state.checkpoint import read_state
from hf_pipetransformer.training import start as training_start
from tests.support.decoders import collate_tokens, make_decoder, make_rows
from tests.support.liger import install_kernels


SLICES = 3


def trainer_of(kind: type, folder: Path, model: nn.Module, task: str = "words", **options: Any) -> Trainer:
    own = {"pipeline_parallel_num_microbatches": 2, "pipeline_head_slices": SLICES}
    make = TrainingArguments if kind is Trainer else PipeTransformerArguments
    args = make(
        **{
            "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1,
            "learning_rate": 1e-3, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
            **(own if kind is not Trainer else {}), **options,
        }
    )  # fmt: skip
    return kind(model, args, train_dataset=make_rows(16, task), data_collator=collate_tokens)


def model_of(name: str, task: str = "words") -> nn.Module:
    set_seed(0)
    return make_decoder(name, task)


def logged(trainer: Trainer) -> list[tuple[float, float]]:
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_numbers_with_kernels_of_liger(name: str, tmp_path: Path) -> None:
    plain = logged(trainer_of(Trainer, tmp_path / "plain", model_of(name)))
    options: dict[str, Any] = {"use_liger_kernel": True, "pipeline_head_slices": 1}
    with patch.dict(sys.modules), patch.object(liger, "is_liger_kernel_available"):
        install_kernels()
        ours = trainer_of(PipeTransformerTrainer, tmp_path / "ours", model_of(name), **options)
        np.testing.assert_allclose(logged(ours), plain, rtol=1e-5)
    # Its loss is known, so that parts of a batch may run one after the other.
    assert vars(ours.model)["forward"].__module__.startswith("liger_kernel.")
    assert ours.pipeline_run.pipelined.pipeline.start_up.plans.scope is LossScope.PARTS


@pytest.mark.parametrize(
    ("name", "is_mean"),
    [("llama", False), ("gemma2", False), ("gpt2", False), ("llama", True)],
    ids=["llama", "soft caps", "gpt2", "means of parts"],
)
def test_numbers_are_trainers(name: str, is_mean: bool, tmp_path: Path) -> None:
    plain = trainer_of(Trainer, tmp_path / "plain", model_of(name))
    ours = trainer_of(PipeTransformerTrainer, tmp_path / "ours", model_of(name))
    for trainer in (plain, ours):
        trainer.model_accepts_loss_kwargs = not is_mean
    np.testing.assert_allclose(logged(ours), logged(plain), rtol=1e-5)
    for key, weight in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], weight, rtol=1e-5, atol=1e-5)


def test_no_more_logits_than_those_of_a_slice_are_computed_at_once(tmp_path: Path) -> None:
    """Nor in the checks of the first steps, which compute the loss of a whole batch."""
    model: Any = model_of("llama")
    trainer = trainer_of(PipeTransformerTrainer, tmp_path, model)
    seen: list[tuple[int, ...]] = []
    before = PipeTransformerTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = model.lm_head.register_forward_hook(lambda _m, _a, output: seen.append(tuple(output.shape)))
        try:
            return before(self, *args, **kwargs)
        finally:
            hook.remove()

    kind = type("Watching", (PipeTransformerTrainer,), {"training_step": training_step})
    trainer.__class__ = kind
    trainer.train()
    longest = max(len(row["input_ids"]) for row in make_rows(16, "words"))
    assert seen
    assert max(shape[1] for shape in seen) <= -(-longest // SLICES)


def test_parts_of_a_mean_weigh_what_they_count() -> None:
    labels = torch.tensor([[5, -100, 7, 8, 9, -100, -100]])
    inputs = {"input_ids": torch.arange(7)[None], "labels": labels, "attention_mask": torch.ones(1, 7)}
    parts = HeadSlices(3, LossRule.MEAN).of(MicroBatch(0, inputs, 0.5, (), lambda _: None), 7)
    assert [(where.start, where.stop) for where, _ in parts] == [(0, 2), (2, 4), (4, 7)]
    # Of three targets the second token predicts one, and the next two.
    assert [part.weight for _, part in parts] == pytest.approx([0.5 / 3, 1.0 / 3, 0.0])
    assert [part.inputs["attention_mask"].shape[1] for _, part in parts] == [2, 2, 3]


def test_a_head_that_reads_more_than_its_own_token_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(PipeTransformerTrainer, tmp_path, model_of("llama", "classes"), "classes")
    with pytest.raises(ValueError, match="more than that of a causal language model"):
        trainer.train()


def test_a_head_that_mixes_tokens_is_refused(tmp_path: Path) -> None:
    """By a hook, so that the model is still one of transformers."""
    model: Any = model_of("llama")
    model.lm_head.register_forward_pre_hook(lambda _module, given: (given[0] + given[0].mean(1, keepdim=True),))
    with pytest.raises(ValueError, match="=3 would change the numbers: a hook of the script's on lm_head"):
        trainer_of(PipeTransformerTrainer, tmp_path, model).train()


class Doubled(PipeTransformerTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def test_a_loss_that_may_read_whole_logits_is_refused(tmp_path: Path) -> None:
    for trainer in (
        trainer_of(Doubled, tmp_path, model_of("llama")),
        trainer_of(PipeTransformerTrainer, tmp_path, model_of("llama"), label_smoothing_factor=0.1),
    ):
        with pytest.raises(ValueError, match="that of a causal language model of transformers, and may read"):
            trainer.train()


# ---- slices that the run chooses ----


def plant(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    monkeypatch.setattr(start, "smallest_device_bytes", lambda *_: num_bytes)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def slices_of(trainer: Any) -> int:
    return int(trainer.pipeline_run.pipelined.pipeline.settings.head_slices.number)


def test_slices_that_the_run_chooses_are_saved_and_compared_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own: dict[str, Any] = {"pipeline_head_slices": "auto", "save_strategy": "steps", "save_steps": 2}
    plain = logged(trainer_of(Trainer, tmp_path / "plain", model_of("llama")))
    first = trainer_of(PipeTransformerTrainer, tmp_path / "ours", model_of("llama"), **own)
    plant(monkeypatch, 1e12)
    np.testing.assert_allclose(logged(first), plain, rtol=1e-5)
    folder = tmp_path / "ours" / "checkpoint-2"
    assert slices_of(first) == read_state(str(folder)).arguments["pipeline_head_slices"] == 1
    kept = weights_of(first)
    # As long as the saved layout goes on, so does the saved number, whatever would be chosen now.
    for num_bytes, num_unfit, expected in ((1e12, 0, 1), (1.0, 0, 1), (1.0, 1, 64)):
        plant(monkeypatch, num_bytes)
        monkeypatch.setattr(training_start, "read_unfit", lambda *_, found=num_unfit: found)
        again = trainer_of(PipeTransformerTrainer, tmp_path / "ours", model_of("llama"), **own)
        with caplog.at_level("WARNING", "hf_pipetransformer"):
            again.train(resume_from_checkpoint=str(folder))
        assert slices_of(again) == expected
        assert expected != 1 or all(torch.equal(kept[name], weight) for name, weight in weights_of(again).items())
        found = [entry["loss"] for entry in again.state.log_history if "grad_norm" in entry]
        np.testing.assert_allclose(found, [loss for loss, _ in plain], rtol=1e-5)
        warning = "pipeline_head_slices='auto': 64 from here on, 1 in the run that was saved"
        assert (warning in caplog.text) == (expected == 64)
        assert "goes on with other settings" not in caplog.text


def test_a_loss_of_the_users_keeps_the_head_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, 1.0)
    trainer = trainer_of(Doubled, tmp_path, model_of("llama"), pipeline_head_slices="auto", max_steps=1)
    with caplog.at_level("INFO", "hf_pipetransformer"):
        trainer.train()
    assert slices_of(trainer) == 1
    # Its loss is tried on as many samples as in any run.
    assert len(trainer.pipeline_run.pipelined.pipeline.start_up.samples["input_ids"]) == 4
    assert "GB, but the loss of Doubled is more than that of a causal language model of transformers" in caplog.text


def test_a_head_that_mixes_tokens_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, 1.0)
    model: Any = model_of("llama")
    model.lm_head.register_forward_pre_hook(lambda _module, given: (given[0] + given[0].mean(1, keepdim=True),))
    trainer = trainer_of(PipeTransformerTrainer, tmp_path, model, pipeline_head_slices="auto", max_steps=1)
    with caplog.at_level("INFO", "hf_pipetransformer"):
        trainer.train()
    assert slices_of(trainer) == 1
    assert "but a hook of the script's on lm_head may read whole sequences" in caplog.text


def test_a_plan_counts_the_slices_that_the_run_would_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, 1.0)
    trainer = trainer_of(
        PipeTransformerTrainer, tmp_path, model_of("llama"), pipeline_head_slices="auto", plan_only=True
    )
    with pytest.raises(SystemExit):
        trainer.train()
    assert "pipeline_head_slices='auto': the head runs in 64 slices." in capsys.readouterr().out


# ---- TRL ----


def test_trls_own_head_keeps_no_logits_in_stages_and_is_not_sliced(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from hf_pipetransformer.trl import SFTPipelineTrainer
    from tests.support.sft import make_sft_trainer

    trainer = make_sft_trainer(SFTPipelineTrainer, tmp_path / "sliced", max_steps=1, pipeline_head_slices=2)
    with pytest.raises(
        ValueError, match="=2 would change the numbers: the loss of SFTPipelineTrainer computes logits in pieces"
    ):
        trainer.train()
    options: dict[str, Any] = {"pipeline_parallel_num_microbatches": 2, "pipeline_head_slices": "auto"}
    trainer = make_sft_trainer(
        SFTPipelineTrainer, tmp_path / "whole", max_steps=2, eval_strategy="no", logging_steps=1, **options
    )
    calls: list[int] = []
    trainer.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert slices_of(trainer) == 1
    assert not calls, "the whole logits of a batch"
    assert "mean_token_accuracy" in trainer.state.log_history[0]


def test_a_class_of_ones_own_is_not_sliced(tmp_path: Path) -> None:
    from tests.startup.test_losses import OwnLlama, padded, tokens

    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none", pipeline_head_slices=2)
    model = OwnLlama(make_decoder("llama").config)
    trainer = PipeTransformerTrainer(model, args, train_dataset=tokens(), data_collator=padded)
    with pytest.raises(ValueError, match="=2 would change the numbers: one call of the loss sees the samples of a"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_schedule": "token"}, "token', which runs its head in other ways"),
        ({"pipeline_schedule": "async_1f1b"}, "async_1f1b', which runs its head in other ways"),
        ({"pipeline_loss": "batch"}, "a loss of slices sees no whole batch"),
        ({"pipeline_head_slices": 0}, "must be .auto. or a positive whole number"),
    ],
)
def test_options_that_exclude_it_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        PipeTransformerArguments(output_dir=str(tmp_path), **{"pipeline_head_slices": 2, **options})
