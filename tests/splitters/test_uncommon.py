"""Families that are in no table: cut between their layers, or refused in one sentence, never a raw error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.startup.model import in_full_precision, undisturbed
from tests.support.models import collate, probed_with
from tests.support.uncommon import REFUSED, UNCOMMON, build, rows


def trained(base: type, name: str, folder: Path, **options: Any) -> list[float]:
    kind = TrainingArguments if base is Trainer else PipeTransformerArguments
    args = kind(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=3, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", logging_steps=1, learning_rate=1e-3, seed=1, **options,
    )  # fmt: skip
    trainer = base(build(name), args, train_dataset=rows(name), data_collator=collate)
    trainer.train()
    return [entry[key] for entry in trainer.state.log_history if "loss" in entry for key in ("loss", "grad_norm")]


def probe(name: str) -> Probe:
    model, inputs = build(name), collate(rows(name, 4))
    with undisturbed(model, True):
        return probed_with(model, find_splitter(model), lambda given: model(**given).loss, inputs)


@pytest.mark.parametrize("name", UNCOMMON)
def test_a_pipeline_follows_trainer(name: str, tmp_path: Path) -> None:
    """All cuts are compared at the start; then two micro-batches a step."""
    ours = trained(PipeTransformerTrainer, name, tmp_path / "ours", pipeline_parallel_num_microbatches=2)
    assert len(ours) == 6
    assert ours == pytest.approx(trained(Trainer, name, tmp_path / "plain"), rel=1e-5)


def test_layers_that_nobody_calls_as_modules_are_refused_in_words() -> None:
    assert list(REFUSED) == ["squeezebert"]
    with pytest.raises(UnsupportedModelError, match="calls none of its 4 layers as a module"):
        probe("squeezebert")


def test_the_length_of_activations_follows_the_models_own_padding() -> None:
    shape = probe("longformer").activation
    assert shape.multiple == 8
    lengths = {length: shape.of({"input_ids": torch.ones(2, length, dtype=torch.long)}) for length in (1, 8, 9, 31)}
    assert lengths == {1: (2, 8, 32), 8: (2, 8, 32), 9: (2, 16, 32), 31: (2, 32, 32)}
    assert probe("openai_gpt").activation.multiple == 1


def test_sequences_of_another_length_are_refused_where_one_is_known_only() -> None:
    shape = probe("canine").activation
    assert shape.of({"input_ids": torch.ones(2, 16, dtype=torch.long)}) == (2, 8, 32)
    with pytest.raises(ValueError, match="of 12 tokens a sample, the first batch had 16.*pad all to one"):
        shape.of({"input_ids": torch.ones(2, 12, dtype=torch.long)})


def test_the_work_of_blocks_is_counted_where_modules_take_weights() -> None:
    found = probe("deberta")
    assert all(flops > 0 for flops in found.block_flops[1:9:2])


def test_a_config_inside_says_how_many_layers_there_are() -> None:
    model = build("clip")
    assert len(find_splitter(model).layers(model)) == 4
    model.config.vision_config.num_hidden_layers = 5
    with pytest.raises(UnsupportedModelError, match=r"config.vision_config.num_hidden_layers=5.*4 x CLIPEncoderLayer"):
        find_splitter(model).layers(model)


def test_the_older_switch_of_cudnn_agrees_with_the_newer_ones() -> None:
    before = torch.backends.cudnn.allow_tf32
    kernels = [torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision]
    with in_full_precision(build("clip")), torch.backends.cudnn.flags(enabled=False):
        pass
    assert torch.backends.cudnn.allow_tf32 == before
    assert kernels == [torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision]
