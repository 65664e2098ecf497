"""TRL's SFTTrainer under the mixin, on one process."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.cache.frozen_parts import watching
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.training.metrics import averages
from hf_pipetransformer.trl import (
    DPOPipelineConfig,
    DPOPipelineTrainer,
    RewardPipelineConfig,
    SFTPipelineConfig,
    SFTPipelineTrainer,
)
from tests.support.decoders import make_decoder
from tests.support.media_models import build
from tests.support.processors import PROCESSORS
from tests.support.sft import logged, make_pictures, make_sft_trainer, make_texts, make_tokenizer


PIPELINE: dict[str, Any] = {"freeze_policy": "none", "pipeline_parallel_num_microbatches": "4"}


def test_averages_of_parts_are_those_of_the_batches() -> None:
    first, second = (0, {"accuracy": (0.5, 3)}), (0, {"accuracy": (0.1, 1)})
    assert averages([first, second]) == pytest.approx({"accuracy": 0.4})
    assert averages([first, second, (1, {"accuracy": (0.2, 2)})]) == pytest.approx({"accuracy": 0.3})
    assert averages([(0, {"accuracy": (0.0, 0)})]) == {"accuracy": 0.0}, "nothing is predicted"
    extremes = [
        (batch, {"min_reward": (value, 1), "max_reward": (value, 1)}) for batch, value in enumerate((5.0, 1.0))
    ]
    assert averages([*extremes, (0, {"min_reward": (2.0, 9), "max_reward": (2.0, 9)})]) == pytest.approx(
        {"min_reward": 1.5, "max_reward": 3.0}
    )


@pytest.mark.parametrize("kind", [SFTPipelineConfig, RewardPipelineConfig, DPOPipelineConfig])
def test_what_trl_recomputes_by_default_is_no_deprecated_option_of_the_script(kind: Any, tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert kind(**options).activation_checkpointing is True
        assert kind(**options, activation_checkpointing=False).gradient_checkpointing is False
    with pytest.warns(FutureWarning, match="`gradient_checkpointing` is deprecated"):
        assert kind(**options, gradient_checkpointing=False).activation_checkpointing is False


def test_metrics_are_of_whole_batches_and_of_steps_alone(tmp_path: Path) -> None:
    plain = make_sft_trainer(SFTTrainer, tmp_path / "plain", max_steps=4, logging_steps=2, eval_steps=2)
    ours = make_sft_trainer(
        SFTPipelineTrainer, tmp_path / "ours", max_steps=4, logging_steps=2, eval_steps=2, **PIPELINE
    )
    plain.train()
    ours.train()
    assert ours.layout.num_microbatches == 4
    for found, expected in zip(logged(ours), logged(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_one_packed_row_is_cut_between_its_texts(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": "llama", "packing": True, "max_length": 96, "per_device_train_batch_size": 1, "max_steps": 4,
        "logging_steps": 2, "eval_steps": 2,
    }  # fmt: skip
    plain = make_sft_trainer(SFTTrainer, tmp_path / "plain", **options)
    ours = make_sft_trainer(SFTPipelineTrainer, tmp_path / "ours", **options | PIPELINE)
    lengths: list[int] = []
    ours.model.register_forward_pre_hook(
        lambda _model, _args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    plain.train()
    ours.train()
    for found, expected in zip(logged(ours), logged(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    num_evaluated = -(-len(ours.eval_dataset) // 8)
    assert sum(lengths[-num_evaluated - 4 : -num_evaluated]) <= 96


PICTURES: dict[str, Any] = {
    "pictures": "qwen2_vl", "max_steps": 8, "logging_steps": 4, "eval_steps": 4, "per_device_eval_batch_size": 4,
    "peft_config": LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|v_proj)"),
}  # fmt: skip


def test_pictures_are_looked_at_once_or_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen tower is stored on one process; with micro-batches TRL's collator is called for each."""
    monkeypatch.setattr(watching, "WORTH", 0.0)
    plain = make_sft_trainer(SFTTrainer, tmp_path / "plain", **PICTURES)
    stored = make_sft_trainer(SFTPipelineTrainer, tmp_path / "stored", **PICTURES, activation_cache="on")
    in_parts = make_sft_trainer(SFTPipelineTrainer, tmp_path / "parts", **PICTURES, **PIPELINE)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        for trainer in (plain, stored, in_parts):
            trainer.train()
    assert "model.visual" in caplog.text
    assert "outputs were read instead of computed" in caplog.text
    assert in_parts.layout.num_microbatches == 4
    for each in (stored, in_parts):
        for found, expected in zip(logged(each), logged(plain), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


def test_pairs_of_answers_to_pictures_are_refused_in_parts(tmp_path: Path) -> None:
    def told(turn: dict[str, str]) -> list[dict[str, str]]:
        return [{**turn, "role": "assistant"}]

    rows = [
        {"prompt": row["messages"][:1], "chosen": told(row["messages"][1]), "rejected": told(row["messages"][0])}
        | {"images": row["images"]}
        for row in make_pictures(8)
    ]
    args = DPOPipelineConfig(str(tmp_path), use_cpu=True, bf16=False, max_length=None, report_to="none", **PIPELINE)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": PROCESSORS["qwen2_vl"]()}
    trainer = DPOPipelineTrainer(build("qwen2_vl"), None, args, **data, peft_config=PICTURES["peft_config"])
    with pytest.raises(UnsupportedModelError, match="its samples have one row each"):
        trainer.train()


def test_texts_are_evaluated_before_a_training(tmp_path: Path) -> None:
    plain = make_sft_trainer(SFTTrainer, tmp_path / "plain")
    ours = make_sft_trainer(SFTPipelineTrainer, tmp_path / "ours", **PIPELINE)
    texts = make_texts(9, seed=2)
    found, expected = (trainer.evaluate(texts)["eval_loss"] for trainer in (ours, plain))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_model_is_loaded_by_its_name(tmp_path: Path) -> None:
    make_decoder("gpt2").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    trainer = SFTPipelineTrainer(str(tmp_path / "model"), SFTConfig(str(tmp_path), use_cpu=True, report_to="none"),
                                 train_dataset=make_texts(8))  # fmt: skip
    assert isinstance(trainer.args, PipeTransformerArguments)
    assert trainer.model.config.model_type == "gpt2"


def test_options_that_the_trainer_would_lose_are_refused(tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(
        ValueError,
        match=r"SFTTrainer takes SFTConfig, .*. Define a class with the options of both",
    ):
        SFTPipelineTrainer(make_decoder("gpt2"), args, train_dataset=make_texts(8))


def test_offloaded_activations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activation_offloading=True is not supported"):
        make_sft_trainer(SFTPipelineTrainer, tmp_path, activation_offloading=True, **PIPELINE)


def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    saving: dict[str, Any] = {**PIPELINE, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    first = make_sft_trainer(SFTPipelineTrainer, tmp_path / "run", max_steps=4, **saving)
    first.train()
    second = make_sft_trainer(SFTPipelineTrainer, tmp_path / "run", max_steps=4, **saving)
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    names = ("loss", "mean_token_accuracy")
    last = [{name: entry[name] for name in names if name in entry} for entry in logged(second)[-1:]]
    assert last == [{name: entry[name] for name in names if name in entry} for entry in logged(first)[-1:]]


def test_options_of_both_have_the_defaults_of_sft() -> None:
    ours, plain = SFTPipelineConfig("x", use_cpu=True), SFTConfig("x", use_cpu=True)
    for name in ("learning_rate", "logging_steps", "bf16", "activation_checkpointing", "max_length"):
        assert getattr(ours, name) == getattr(plain, name), name


def test_what_is_computed_again_is_noted_once_and_the_last_steps_at_the_end(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "llama", "max_steps": 3, "logging_steps": 2, "eval_strategy": "no"}
    slices = {"pipeline_schedule": "token", "pipeline_token_slices": "5,20,9", "pipeline_checkpoint": "always"}
    plain = make_sft_trainer(SFTTrainer, tmp_path / "plain", **options)
    ours = make_sft_trainer(SFTPipelineTrainer, tmp_path / "ours", **options, **slices, **PIPELINE)
    plain.train()
    ours.train()
    assert "mean_token_accuracy" in plain.state.log_history[-1]
    for found, expected in zip(logged(ours), logged(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_runs_the_model_twice_is_refused_in_words(tmp_path: Path) -> None:
    trainer = make_sft_trainer(SFTPipelineTrainer, tmp_path, label_smoothing_factor=0.1, max_steps=1, **PIPELINE)
    with pytest.raises(ValueError, match="One loss runs GPT2LMHeadModel 2 times"):
        trainer.train()
