"""Replicas that freeze nothing: usages of a trainer, run with Trainer and with ours, compared on every rank.

    replica_worker.py FOLDER USAGE...

A usage that begins with "defaults: " runs with the options that ours has by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.test_trainers_checkpoints import TRAINERS, losses, make
from tests.usages import USAGES, Usage, assert_same, outcome, with_prompts


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
    print("exchanged", flush=True)


def main() -> None:
    for number, name in enumerate(sys.argv[2:]):
        folder, usage = Path(sys.argv[1]) / str(number), USAGES[name.removeprefix(DEFAULTS)]
        plain = outcome(usage, Trainer, {}, folder / "plain")
        options = {} if name.startswith(DEFAULTS) else OPTIONS
        ours = outcome(usage, PipeTransformerTrainer, options, folder / "ours")
        assert ours["is_left"], f"{name}: a pipeline ran"
        assert_same(ours, plain)
        print(f"same: {name}", flush=True)
    refuse_stages_of_prompts(Path(sys.argv[1]) / "stages")
    exchange_checkpoints(Path(sys.argv[1]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
