"""A training that failed, or that another one goes on from, in one process: nothing of it may stay behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.autocache.planner import measure_storage
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.checkpoint import check_weights
from tests.models import build_model, collate, make_dataset


class FailsOnce(TrainerCallback):
    """Fails after a step, as a full disk or Ctrl-C may."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = None
            raise RuntimeError("planted")


def trainer_of(model: PreTrainedModel, folder: Path, optimizer: Any = None, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, save_steps=2, logging_steps=1,
        use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    return PipeTransformerTrainer(
        model, args, train_dataset=data, data_collator=collate, optimizers=(optimizer, None),
        callbacks=[FailsOnce(5)] if optimizer is not None else None,
    )  # fmt: skip


@pytest.mark.parametrize("resumes", [True, False])
def test_a_training_that_failed_leaves_nothing_frozen(tmp_path: Path, resumes: bool) -> None:
    model = build_model("bert_sequence")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"freeze_policy": "fixed", "freeze_at": "3:2", "activation_cache": "off"}
    trainer = trainer_of(model, tmp_path, optimizer, **options)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert trainer.layout is not None and trainer.layout.num_frozen_layers == 2
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer.train(resume_from_checkpoint=resumes)
    assert trainer.state.global_step == 6
    lowest = "bert.encoder.layer.0.output.dense.weight"
    # A new run trains the layers until it freezes them again; one that goes on from step 4 has them frozen.
    saved = tmp_path / "checkpoint-4"
    assert saved.is_dir()
    assert torch.equal(before[lowest], model.get_parameter(lowest)) == resumes


def test_a_run_that_replays_a_plan_without_its_cache_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    freezing = {"freeze_policy": "fixed", "freeze_at": "1:2"}
    cached = {"activation_cache": "on", "activation_cache_dir": str(tmp_path / "cache")}
    trainer_of(build_model("bert_sequence"), tmp_path / "plan", **freezing, **cached).train()
    (plan,) = (tmp_path / "plan").glob("*events*.jsonl")
    replayed = {"layout_plan": str(plan), "activation_cache": "off", **freezing}
    whole = build_model("bert_sequence")
    trainer_of(whole, tmp_path / "replayed", **replayed).train()
    resumed = build_model("bert_sequence")
    folder = tmp_path / "replayed" / "checkpoint-4"
    trainer_of(resumed, tmp_path / "replayed", **replayed).train(resume_from_checkpoint=str(folder))
    for name, value in whole.named_parameters():
        assert torch.equal(value, resumed.get_parameter(name)), name


def test_measuring_the_storage_draws_no_random_numbers(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    measure_storage(tmp_path, RowFormat(4, torch.float32, {}, {}), 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": 3}', '{"weight_map": null}', '{"weight_map": {"a": []}}'])
def test_an_index_that_names_no_files_of_weights_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="model.safetensors.index.json"):
        check_weights(str(tmp_path))
