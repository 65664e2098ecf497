"""Models of a script's own, with a splitter: two stages that freeze and become two replicas follow one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.scenarios import WORLD_SIZE, run, scenario
from tests.splitters.test_own_models import MODELS, OwnSplitter, Stack, rows
from tests.support import uncommon
from tests.support.models import collate
from tests.support.trainings import losses_of, our_arguments


ACROSS = ("wav2vec2", "openai_gpt", "longformer", "clip")
"""Families that are in no table, on two stages: entries of any form, lists, padded lengths, a config inside."""


@scenario
def train_all(folder: Path) -> dict[str, Any]:
    """Losses and last layout of each model, by name."""
    found: dict[str, Any] = {}
    for name, kind in MODELS.items():
        torch.manual_seed(0)
        splitter = None if kind is Stack else OwnSplitter()  # That one is found by its only stack.
        trainer = PipeTransformerTrainer(
            kind(),
            arguments(
                folder / f"{name}-{WORLD_SIZE}", max_steps=8, freeze_policy="fixed", freeze_at="2:1,4:3",
                activation_cache="off", pipeline_compression="throughput",
            ),
            train_dataset=rows(32),
            splitter=splitter,
        )  # fmt: skip
        found[name] = trained(trainer)
    for name in ACROSS:
        args = arguments(folder / f"{name}-{WORLD_SIZE}", max_steps=3, learning_rate=1e-3)
        data = {"train_dataset": uncommon.rows(name), "data_collator": collate}
        found[name] = trained(PipeTransformerTrainer(uncommon.build(name), args, **data))
    return found


def arguments(output: Path, **options: Any) -> PipeTransformerArguments:
    return our_arguments(output, WORLD_SIZE, pipeline_parallel_num_microbatches=2, **options)


def trained(trainer: PipeTransformerTrainer) -> dict[str, Any]:
    trainer.train()
    return {"losses": losses_of(trainer), "layout": trainer.layout.as_event()}


pytestmark = pytest.mark.distributed


def test_stages_of_models_of_ones_own_follow_one_process(tmp_path: Path) -> None:
    alone_on, split_on = (run(train_all, tmp_path, size, timeout=120)[0] for size in (1, 2))
    for name in MODELS:
        alone, split = alone_on[name], split_on[name]
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert len(alone["losses"]) == 8
        assert (split["layout"]["num_frozen_layers"], split["layout"]["num_replicas"]) == (3, 2)
    for name in ("wav2vec2", "openai_gpt", "longformer", "clip"):
        alone, split = alone_on[name], split_on[name]
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert len(alone["losses"]) == 3 and split["layout"]["num_stages"] == 2
    events = (tmp_path / "Flat-2" / "pipetransformer_events.jsonl").read_text()
    assert '"num_stages": 2' in events
