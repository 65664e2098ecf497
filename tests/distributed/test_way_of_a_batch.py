"""What of the package a batch passes on two stages: files, and frames down to the forward of the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, set_seed

import hf_pipetransformer
from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.trainer.mixin import PipeTransformerMixin as Mixin
from tests.distributed.scenarios import run, scenario
from tests.support.models import build_model, collate, make_rows
from tests.support.trainings import our_arguments


PACKAGE = f"{Path(hf_pipetransformer.__file__).parent}/"
STEP = 6
"""Step that is watched, one behind the first ones, in which the loss is compared."""
MOST_FILES, MOST_FRAMES = 31, (9, 10)
"""The last stage has one frame more, that of the program which may run the head apart."""


class Watch(TrainerCallback):
    """Files of the package that are entered within `training_step`, and its frames above the model's first forward."""

    def __init__(self, model: Any) -> None:
        self.first, self.last = Mixin.training_step.__code__, type(model).forward.__code__
        self.files: set[str] = set()
        self.frames: list[str] = []
        self.is_inside = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP:
            sys.setprofile(self._called)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is self.first:
            self.is_inside = event == "call"
        if event != "call" or not self.is_inside:
            return
        if frame.f_code.co_filename.startswith(PACKAGE):
            self.files.add(frame.f_code.co_filename.removeprefix(PACKAGE))
        if frame.f_code is self.last and not self.frames:
            self.frames = list(self._down_to(frame))

    def _down_to(self, frame: FrameType | None) -> Iterator[str]:
        if frame is not None and frame.f_code is not self.first:
            yield from self._down_to(frame.f_back)
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            yield f"{frame.f_code.co_filename.removeprefix(PACKAGE)} {frame.f_code.co_qualname}"


@scenario
def passed(folder: Path) -> dict[str, Any]:
    set_seed(0)
    model = build_model("bert_sequence", 11)
    watch = Watch(model)
    trainer = PipeTransformerTrainer(
        model=model,
        args=our_arguments(folder / "run", 2, batch=4, max_steps=STEP + 2, pipeline_parallel_num_microbatches=2),
        train_dataset=make_rows("bert_sequence", 32),
        data_collator=collate,
        callbacks=[watch],
    )
    trainer.train()
    trainer.end()
    return {"files": sorted(watch.files), "frames": watch.frames}


def test_a_batch_passes_few_files_and_frames(tmp_path: Path) -> None:
    for rank, found in enumerate(run(passed, tmp_path, num_processes=2, timeout=120)):
        print(f"rank {rank}: {len(found['files'])} files, {len(found['frames'])} frames")
        print("", *found["files"], "", *found["frames"], sep="\n  ")
        assert 0 < len(found["files"]) <= MOST_FILES
        assert 0 < len(found["frames"]) <= MOST_FRAMES[rank]
