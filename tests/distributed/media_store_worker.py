"""Language models whose frozen tower is stored on stages, and in plain Trainer."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from tests.distributed.launches import Layout, run_listed
from tests.distributed.media_worker import MediaCase, make_trainer
from tests.distributed.scenarios import Lines, scenario
from tests.support.media_models import MODELS
from tests.support.trainings import End, end_of


STEPS_OF_EPOCH, NUM_EPOCHS = 6, 3
KILLED_AT = 5


def stored(model: str, num_microbatches: int = 1, adapts: bool = False, **ours: Any) -> MediaCase:
    """Three epochs with a frozen tower, and an evaluation after each."""
    options = {"max_steps": STEPS_OF_EPOCH * NUM_EPOCHS, "eval_strategy": "epoch"}
    ours = {"activation_cache": "on", **ours}
    return MediaCase(model, "frozen", num_microbatches, adapts, options=options, ours=ours)


QUICK = stored("qwen2_vl", 2, adapts=True)
FAMILIES = [stored(model, 2) for model in MODELS]
OTHERS = [
    stored("smolvlm"),
    stored("llava", 2, pipeline_schedule="zb_h1"),
    stored("llava", 2, pipeline_schedule="interleaved_1f1b"),
    stored("llava", 2, pipeline_checkpoint="always"),
    stored("qwen3_vl", 2, pipeline_checkpoint="layers"),
    stored("llava", 2, pipeline_loss="batch"),
]
TRAINED = replace(stored("llava", 2), tower="trained")
DRAWN = replace(stored("smolvlm"), options={**stored("smolvlm").options, "seed": 4})
"""Its collator draws random numbers."""
CASES = {case.name: case for case in [QUICK, *FAMILIES, *OTHERS, TRAINED, DRAWN]}
PLAIN = {case.plain.name: case.plain for case in CASES.values()}
KILLED = stored("llava", 2, activation_cache_keep=True)


class Counts(TrainerCallback):
    """Outputs of frozen parts that this process has read and computed by the end of each epoch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.by_epoch, self.num_stored = trainer, list[list[int]](), list[int]()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        served = self.trainer.pipeline_run.stored_parts.served
        counts = [each.counts for each in served]
        self.num_stored.append(sum(len(each.store) for each in served))
        self.by_epoch.append([sum(each.hits for each in counts), sum(each.misses for each in counts)])


class Killed(TrainerCallback):
    """Ends this process without a word, as a machine that is gone."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED_AT:
            os._exit(9)


def train(name: str, layout: Layout | None, output: Path) -> End:
    trainer = make_trainer(PLAIN[name] if layout is None else CASES[name], layout, output)
    if name in (DRAWN.name, DRAWN.plain.name):
        trainer.data_collator = partial(_drawn, trainer.data_collator)
    return _ended(trainer, layout is not None)


def _drawn(collate: Any, rows: list[Any]) -> dict[str, Any]:
    found = collate(rows)
    if "pixel_values" in found:
        found["pixel_values"] = found["pixel_values"] * torch.rand(())
    return found


def _ended(trainer: Trainer, is_ours: bool, where: bool | None = None) -> End:
    lines = Lines()
    logging.getLogger("hf_pipetransformer").addHandler(lines)
    counts = Counts(trainer)
    if is_ours:
        trainer.add_callback(counts)
    trainer.train(where)
    return end_of(
        trainer,
        evaluated=trainer.evaluate()["eval_loss"],
        counts=counts.by_epoch,
        num_stored=counts.num_stored,
        said=lines.lines,
    )


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


def _kept(layout: Layout | None, folder: Path) -> Trainer:
    """A run that saves every two steps, and keeps what it stores."""
    own = {} if layout is None else {**KILLED.ours, "activation_cache_dir": str(folder / "kept")}
    case = replace(KILLED, options={**KILLED.options, "save_strategy": "steps", "save_steps": 2}, ours=own)
    return make_trainer(case, layout, folder / ("plain" if layout is None else "ours"))


@scenario
def begin(folder: Path, num_stages: int) -> None:
    """Train until the kill."""
    trainer = _kept((num_stages, 1), folder)
    trainer.add_callback(Killed())
    trainer.train()


@scenario
def go_on(folder: Path, num_stages: int) -> dict[str, Any]:
    """Train from the last checkpoint to the end."""
    values, tensors = _ended(_kept((num_stages, 1), folder), True, True)
    return {**values, "weights": {name: float(value.double().norm()) for name, value in tensors.items()}}


@scenario
def whole(folder: Path) -> dict[str, Any]:
    """Train in plain Trainer, without a kill."""
    values, tensors = _ended(_kept(None, folder), False)
    return {**values, "weights": {name: float(value.double().norm()) for name, value in tensors.items()}}
