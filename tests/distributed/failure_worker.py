"""A training with checkpoints that ends as runs do: a wrong option, a kill, Ctrl-C, a full disk."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.scenarios import RANK, scenario
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
SAVE_STEPS = 2
READY = "== the failure follows =="
PLANTED = "planted failure"


class Fail(TrainerCallback):
    """Ends the run amid two checkpoints, in one of several ways."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SAVE_STEPS + 1:
            print(READY, file=sys.stderr, flush=True)
        # A step later all ranks have said so, and nothing more is saved.
        if state.global_step != SAVE_STEPS + 2 or self.rank != RANK:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupt":
            # As a terminal does: the launcher leads a group without its workers.
            os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
        if self.how in ("error", "handled error"):
            raise RuntimeError(PLANTED)


@scenario
def train_and_fail(folder: Path, how: str, *, rank: int = 1) -> None:
    """Train until it fails on `rank`, or without end where the test ends it."""
    if how == "option":
        print(READY, file=sys.stderr, flush=True)
    args = our_arguments(
        folder,
        2,
        max_steps=1_000_000,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        logging_strategy="no",
        pipeline_timeout=15,
        freeze_policy="gradnorm" if how == "option" else "none",
    )
    trainer = PipeTransformerTrainer(
        model=build_model(MODEL),
        args=args,
        train_dataset=make_dataset(MODEL, 53),
        data_collator=collate,
        callbacks=[Fail(how, rank)],
    )
    try:
        trainer.train()
    except RuntimeError:
        if how != "handled error":
            raise
        print(f"rank {RANK} goes on", flush=True)
        os._exit(0)  # The ranks can no longer meet, as the worker lets them at its end.
