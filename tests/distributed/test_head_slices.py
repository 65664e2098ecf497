"""Slices of the head that a run of two stages takes where the logits of whole sequences do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.planning.memory import MEMORY_RESERVE
from hf_pipetransformer.startup import start as start_up
from tests.distributed.scenarios import WORLD_SIZE, records, scenario, start
from tests.support.decoders import collate_tokens, make_decoder, make_rows
from tests.support.trainings import options_for


WORDS = 4_000
"""Enough for logits that are most of the last stage's memory."""


def trainer_of(kind: type, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    common = options_for(folder, max_steps=4, learning_rate=1e-3, **options)
    args = (TrainingArguments if kind is Trainer else PipeTransformerArguments)(**common)
    model = make_decoder("llama", vocab_size=WORDS)
    return kind(model, args, train_dataset=make_rows(16), data_collator=collate_tokens)


def history(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def between(plans: Any, more: int, fewer: int) -> float:
    """Bytes of a device that holds the first layout with `more` slices of the head, and not with `fewer`."""
    needed = [plans.needed_bytes(plans.layout(), head_slices=slices) for slices in (more, fewer)]
    return sum(needed) / 2 / (1 - MEMORY_RESERVE)


@scenario
def train(folder: Path) -> dict[str, Any]:
    """What plain Trainer logs on one process; on two stages, what they log with and without room for all logits."""
    if WORLD_SIZE == 1:
        return {"plain": history(trainer_of(Trainer, folder / "plain"))}
    # Boundaries by operations: measured times would cut both runs at other places, which need other bytes.
    options = {"full_determinism": True, "pipeline_parallel_num_microbatches": 2, "pipeline_head_slices": "auto"}
    found, device_bytes = {}, 1e12
    for name in ("roomy", "tight"):
        start_up.smallest_device_bytes = lambda *_: device_bytes  # noqa: B023  # Called within the loop.
        trainer = trainer_of(PipeTransformerTrainer, folder / name, **options, pipeline_parallel_size=WORLD_SIZE)
        logged, pipeline = history(trainer), trainer.pipeline_run.pipelined.pipeline
        found[name] = {"logged": logged, "slices": pipeline.settings.head_slices.number}
        device_bytes = between(pipeline.start_up.plans, 2, 1)
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def test_as_few_as_fit_are_taken_with_trainers_numbers(tmp_path: Path) -> None:
    start(train, tmp_path, 1, timeout=60)
    (expected,) = records(tmp_path, 1)
    output = start(train, tmp_path, 2, timeout=120).outputs[0]
    first, second = records(tmp_path, 2)
    assert first["roomy"]["slices"] == second["roomy"]["slices"] == 1
    assert first["tight"]["slices"] == second["tight"]["slices"] == 2
    for name in ("roomy", "tight"):
        for found, plain in zip(first[name]["logged"], expected["plain"], strict=True):
            assert found == pytest.approx(plain, rel=1e-5)
    assert "pipeline_head_slices='auto': the head runs on whole sequences. The fullest device is expected" in output
    assert "pipeline_head_slices='auto': the head runs in 2 slices. The fullest device is expected to need" in output
