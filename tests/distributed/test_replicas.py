"""Two processes, one stage, nothing to freeze: what a pipeline cannot run is Trainer's data parallelism.

A usage that begins with "defaults: " runs with the options that ours has by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.state.only_run import LOCK_FILE
from tests.distributed.scenarios import run, scenario
from tests.state.test_trainers_checkpoints import TRAINERS, losses, make
from tests.support.adapted import ADDS
from tests.support.usages import USAGES, Line, Usage, assert_same, outcome, points, with_prompts


OPTIONS = {"freeze_policy": "none", "pipeline_parallel_size": "1"}
DEFAULTS = "defaults: "


def refuse_stages_of_prompts(folder: Path) -> None:
    with pytest.raises(ValueError, match="lies outside of the layers"):
        outcome(
            Usage(model=with_prompts, act=lambda trainer: pytest.fail("it was made")),
            PipeTransformerTrainer,
            {"pipeline_parallel_size": "2"},
            folder,
        )


def exchange_checkpoints(folder: Path) -> None:
    """What a pipeline of one stage saves Trainer goes on with; both log the same keys."""
    plain = make(Trainer, folder / "plain")
    plain.model_accepts_loss_kwargs = False  # transformers#47688
    plain.train()
    ours = make(PipeTransformerTrainer, folder / "ours", **OPTIONS)
    ours.train()
    assert ours.layout.num_replicas == 2 and not ours.pipeline_run.is_left_to_trainer
    keys = [[entry.keys() for entry in trainer.state.log_history] for trainer in (ours, plain)]
    assert keys[0] == keys[1]
    names = {path.name for path in (folder / "ours" / "checkpoint-3").iterdir()}
    # Of random numbers each process has its own.
    assert names & TRAINERS == {"optimizer.pt", "scheduler.pt"}
    resumed = make(Trainer, folder / "resumed", seed=1)
    resumed.model_accepts_loss_kwargs = False
    resumed.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-3"))
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(resumed, 3) == pytest.approx(losses(plain, 3), rel=1e-5)


def guard_the_folder(folder: Path) -> None:
    """What two processes save is gone on with where it is whole; a folder of another run is refused on both."""

    def trainer_of() -> PipeTransformerTrainer:
        args = PipeTransformerArguments(
            output_dir=str(folder), max_steps=3, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
            **OPTIONS,
        )  # fmt: skip
        return PipeTransformerTrainer(Line(), args, train_dataset=points())

    trainer_of().train()
    saved = folder / "checkpoint-3" / "optimizer.pt"
    if torch.distributed.get_rank() == 0:
        assert len(list(folder.glob("checkpoint-3/rng_state_*.pth"))) == 2
        saved.write_bytes(saved.read_bytes()[:-100])
    torch.distributed.barrier()
    trainer, steps = trainer_of(), []
    trainer.add_callback(Notes(steps))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.pipeline_run.is_left_to_trainer and steps == [3]
    if torch.distributed.get_rank() == 0:
        other = FileLock(folder / LOCK_FILE)
        other.acquire()
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="another run .*is training in this output_dir"):
        trainer_of().train()


class Notes(TrainerCallback):
    """Notes the steps that are trained."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@scenario
def compare(folder: Path, names: list[str]) -> list[str]:
    """Return the names of the usages, each the same with both trainers; check what else there is."""
    for number, name in enumerate(names):
        usage = USAGES[name.removeprefix(DEFAULTS)]
        plain = outcome(usage, Trainer, {}, folder / str(number) / "plain")
        options = {} if name.startswith(DEFAULTS) else OPTIONS
        ours = outcome(usage, PipeTransformerTrainer, options, folder / str(number) / "ours")
        assert ours["is_left"], f"{name}: a pipeline ran"
        assert_same(ours, plain)
        print(f"same: {name}", flush=True)
    refuse_stages_of_prompts(folder / "stages")
    exchange_checkpoints(folder)
    guard_the_folder(folder / "guarded")
    return names


USED = (
    "a tuple with the loss first",
    "a dictionary as output",
    "several outputs",
    "a loss divided by the items of the step",
    "labels under another name",
    "a model of transformers without layers",
    "made by a function",
    "T5",
    "adapters",
    "defaults: prompts",
    "defaults: several outputs",
    "defaults: a model of transformers without layers",
    "a model that raises when it is inspected, always",
    "defaults: a model that raises when it is inspected, always",
    "defaults: a model that raises when it is inspected, on rank 1",
    "defaults: layers skipped at random",
    "batch normalisation",
    "defaults: batch normalisation",
    "columns of datasets",
    "a stream",
    "loaders of its own",
    "a sampler of its own",
    "split batches",
    "accumulation",
    "an optimizer of its own class",
    "a class of optimizers",
    "a loss function",
    "a loss of its own class",
    "steps of its own class",
    "the best model at the end",
    "evaluation alone",
    "prediction after training",
    "gone on with from the start",
)

pytestmark = pytest.mark.distributed


def test_what_no_pipeline_runs_is_data_parallel_as_in_trainer(tmp_path: Path) -> None:
    assert run(compare, tmp_path, 2, {"names": USED}, timeout=240) == [list(USED)] * 2


@ADDS
def test_an_added_adapter_is_data_parallel_as_in_trainer(tmp_path: Path) -> None:
    names = ["an added adapter"]
    assert run(compare, tmp_path, 2, {"names": names}, timeout=240) == [names] * 2
