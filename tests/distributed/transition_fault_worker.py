"""A run that changes its layout once, on two processes, in which one planted thing goes wrong on rank 1."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.elastic import transition
from hf_pipetransformer.freeze.policy import FreezePolicy
from hf_pipetransformer.state import resumption as replay
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario
from tests.distributed.transition_cases import Phase, TransitionCase
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
NUM_STEPS = 8
CHANGE_AT = 4
READY = "right before the transition"
TAMPERED = "bert.encoder.layer.2.output.dense.weight"

SHRINK: list[Phase] = [(0, 0, [0, 5, 10], 2), (CHANGE_AT, 2, [0, 10], 2)]
OTHER: list[Phase] = [(0, 0, [0, 5, 10], 2), (CHANGE_AT, 1, [0, 3, 10], 2)]
MULTIPLIED: list[Phase] = [(0, 0, [0, 10], 2), (CHANGE_AT, 1, [0, 5, 10], 2)]


class BeforeTransition(TrainerCallback):
    """Does something between the last step before the transition and the transition."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        self.act = act
        self.trainer: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == CHANGE_AT:
            print(READY, flush=True)
            self.act(self.trainer)


def nothing(trainer: Any) -> None:
    pass


def tamper_with_the_layout(trainer: Any) -> None:
    trainer.pipeline_run.pipelined.pipeline.stage.layout = replace(
        trainer.pipeline_run.pipelined.pipeline.stage.layout, num_microbatches=3
    )


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of the first element."""
    tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def flip_a_weight(trainer: Any) -> None:
    flip(dict(trainer.model.named_parameters())[TAMPERED])


def flip_a_moment(trainer: Any) -> None:
    parameter = dict(trainer.model.named_parameters())[TAMPERED]
    flip(trainer.pipeline_run.pipelined.training.optimizer.optimizer.state[parameter]["exp_avg_sq"])


def die_in_the_exchange(trainer: Any) -> None:
    transition.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def fail_in_the_exchange(trainer: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted failure")

    transition.exchange = fail


class OfThisRank(FreezePolicy):
    """A policy that does not answer alike on all ranks: it looked at a clock, say."""

    def target_num_frozen(self, signal):
        return 2.0 if RANK == 0 and signal.step >= CHANGE_AT else 0.0


class OfTheOtherRank(FreezePolicy):
    def target_num_frozen(self, signal):
        return 2.0 if RANK == 1 and signal.step >= CHANGE_AT else 0.0


def run_out_of_memory(trainer: Any) -> None:
    """In the forward of the next step, under the layout that follows."""

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("planted shortage")

    trainer.compute_loss = fail


def read_another_plan(path: str) -> Any:
    return real_read(write_plan(Path(path).with_suffix(".other"), OTHER))


real_read = replay.read_layouts

DECIDES = {"freeze_policy": "fixed", "freeze_at": f"{CHANGE_AT}:2", "pipeline_compression": "memory"}

# `act` happens on rank 1 only.
FAULTS: dict[str, dict[str, Any]] = {
    "none": {"plan": SHRINK},
    "tampered_layout": {"options": DECIDES, "act": tamper_with_the_layout},
    "flipped_weight": {"plan": MULTIPLIED, "act": flip_a_weight},
    "flipped_moment": {"plan": MULTIPLIED, "act": flip_a_moment},
    "killed_in_exchange": {"plan": SHRINK, "act": die_in_the_exchange},
    "exception_in_exchange": {"plan": SHRINK, "act": fail_in_the_exchange},
    "policy_of_rank_0": {"policy": OfThisRank, "options": {"freeze_interval": 2, "freeze_policy": "none"}},
    "policy_of_rank_1": {"policy": OfTheOtherRank, "options": {"freeze_interval": 2, "freeze_policy": "none"}},
    "out_of_memory": {
        "options": DECIDES | {"freeze_at": f"{CHANGE_AT}:3", "save_strategy": "steps", "save_steps": 2},
        "act": run_out_of_memory,
    },
    "other_plan": {"plan": SHRINK, "reads": read_another_plan},
}


def write_plan(path: Path, plan: list[Phase]) -> str:
    unfinished = path.with_suffix(f".part{RANK}")
    unfinished.write_text(TransitionCase("", plan=plan).plan_lines(WORLD_SIZE))
    unfinished.rename(path)
    return str(path)


@scenario
def train_with(
    folder: Path, fault: str, timeout: float = 15, max_steps: int = NUM_STEPS, resume: bool = False
) -> None:
    """Train with one of `FAULTS`; `resume` goes on after the fault, which does not come again."""
    what = FAULTS[fault]
    options: dict[str, Any] = {
        "max_steps": max_steps,
        "pipeline_parallel_num_microbatches": 2,
        "pipeline_timeout": timeout,
        "freeze_warmup": 0,
        "freeze_min_active_layers": 0,
        **what.get("options", {}),
    }
    if "plan" in what:
        options["layout_plan"] = write_plan(folder / "plan.jsonl", what["plan"])
    if "reads" in what and RANK == 1:
        replay.read_layouts = what["reads"]
    callback = BeforeTransition(what.get("act", nothing) if RANK == 1 and not resume else nothing)
    trainer = PipeTransformerTrainer(
        model=build_model(MODEL),
        args=our_arguments(folder, 2, **options),
        train_dataset=make_dataset(MODEL, 53),
        data_collator=collate,
        policy=what["policy"]() if "policy" in what else None,
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    print(f"rank {RANK} trained to the end with {trainer.layout.num_frozen_layers} frozen layers", flush=True)
