"""Training with `push_to_hub`, before a hub that notes what it is given."""

from __future__ import annotations

from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers.trainer
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from tests.conformance.conformance_worker import arguments_of, named
from tests.conformance.features import Setup
from tests.distributed.equality_worker import EVAL_SEED, MODEL_SEED
from tests.distributed.launches import Layout, run_listed
from tests.distributed.scenarios import scenario
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import End


MODEL = "vit"


class LocalHub:
    """Takes the place of the hub's API: notes every upload and keeps the weights in it."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def create_repo(self, name: str, **_options: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(
        self,
        folder_path: str,
        commit_message: str,
        path_in_repo: str | None = None,
        ignore_patterns: list[str] | None = None,
        **_options: Any,
    ) -> Future[None]:
        files = sorted(path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*.*"))
        kept = [name for name in files if not any(fnmatch(name, pattern) for pattern in ignore_patterns or ())]
        self.weights |= named(f"upload {len(self.uploads)}", load_file(Path(folder_path, "model.safetensors")))
        self.uploads.append({"message": commit_message, "path": path_in_repo, "files": kept})
        done: Future[None] = Future()
        done.set_result(None)
        return done


class CountPushes(TrainerCallback):
    def __init__(self) -> None:
        self.pushes = 0

    def on_push_begin(self, args, state, control, **kwargs):
        self.pushes += 1


def train(strategy: str, layout: Layout | None, output: Path) -> End:
    """Train with uploads at every save, and one at the end."""
    hub, counter = LocalHub(), CountPushes()
    transformers.trainer.hf_api = lambda: hub
    setup = Setup(
        options={
            "push_to_hub": True,
            "hub_strategy": strategy,
            "save_strategy": "steps",
            "save_steps": 3,
            "save_only_model": True,
        }
    )
    trainer = (Trainer if layout is None else PipeTransformerTrainer)(
        model=build_model(MODEL, MODEL_SEED),
        args=arguments_of(setup, output, layout),
        train_dataset=make_dataset(MODEL, 29),
        eval_dataset=make_dataset(MODEL, 13, EVAL_SEED),
        data_collator=collate,
        callbacks=[counter],
    )
    trainer.train()
    trainer.push_to_hub(commit_message="the end")
    return {"uploads": hub.uploads, "pushes": counter.pushes}, hub.weights


@scenario
def push_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)
