"""Models of a script's own on two stages that freeze and become two replicas, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.scenarios import WORLD_SIZE, scenario
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
