"""Mixtures of experts: trained as by Trainer, unless all their layers answer for one loss."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.startup.model import has_dropout
from tests.support.decoders import collate_tokens, make_decoder, make_rows


BALANCED = {"output_router_logits": True}
MICRO_BATCHES = {"pipeline_parallel_num_microbatches": 2, "freeze_policy": "none"}


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said reaches `caplog`, whoever has announced something before."""
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)


def make_experts(**config: Any) -> Any:
    """A model in whose second layer no token goes to the last expert."""
    torch.manual_seed(0)
    model = make_decoder("mixtral", num_local_experts=5, **config)
    router = model.model.layers[1].mlp.gate.weight.data
    router.copy_(torch.tensor([[3.0], [2.0], [-3.0], [-2.0], [0.0]]) * router[0])
    return model


def trained(folder: Path, config: dict[str, Any], options: dict[str, Any] | None) -> list[float]:
    """The losses of a few steps; without options those of plain Trainer."""
    model = make_experts(**config)
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 8, "logging_steps": 1,
        "learning_rate": 1e-3, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    data: dict[str, Any] = {"train_dataset": make_rows(24), "data_collator": collate_tokens}
    if options is None:
        trainer = Trainer(model, TrainingArguments(**common), **data)
    else:
        trainer = PipeTransformerTrainer(model, PipeTransformerArguments(**common, **options), **data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_experts_follow_trainer_in_micro_batches(tmp_path: Path) -> None:
    model = make_experts()
    model(**collate_tokens(make_rows(24))).loss.backward()
    used = [bool(expert.any()) for expert in model.model.layers[1].mlp.experts.down_proj.grad]
    assert used == [True, True, True, True, False]
    expected = trained(tmp_path / "plain", {}, None)
    assert trained(tmp_path / "ours", {}, MICRO_BATCHES) == pytest.approx(expected, rel=1e-5)


def test_a_loss_over_the_routers_of_all_layers_is_refused_where_parts_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"output_router_logits=True.*all layers.*Set it to False"):
        trained(tmp_path, BALANCED, MICRO_BATCHES)


def test_with_such_a_loss_one_process_is_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = trained(tmp_path / "plain", BALANCED, None)
    found = trained(tmp_path / "ours", BALANCED, {"freeze_policy": "fixed", "freeze_at": "1:1"})
    assert found == pytest.approx(expected, rel=1e-6)
    assert ["output_router_logits" in record.message for record in caplog.records].count(True) == 1


def test_layers_of_two_kinds_are_refused_by_what_differs() -> None:
    model = make_decoder("qwen3_moe", mlp_only_layers=[0])
    with pytest.raises(
        UnsupportedModelError, match=r"4 x Qwen3MoeDecoderLayer.*layer 1 with mlp\.gate_proj\.weight None"
    ):
        find_splitter(model).layers(model)


def test_noise_of_the_router_counts_as_dropout() -> None:
    assert not has_dropout(make_decoder("mixtral"))
    assert has_dropout(make_decoder("mixtral", router_jitter_noise=0.1))
