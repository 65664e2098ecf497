"""Trains under plans that skip weight gradients, and notes what each rank skipped and how the run ended.

    skip_worker.py FOLDER CASE...

A case is K, R and a schedule, as in `2x1-zb_h1`; its plan is `FOLDER/<case>.jsonl`. Each rank writes
`FOLDER/<case>.rank<r>.json`, the first one the weights at the end too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_pipetransformer.transition import check_replicas_agree
from tests.skipped import GLOBAL_BATCH, norms_and_losses, skipping


def run(folder: Path, case: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shape, schedule = case.split("-")
    trainer, note = skipping(
        folder / case, folder / f"{case}.jsonl", per_device_train_batch_size=GLOBAL_BATCH // world,
        pipeline_schedule=schedule, pipeline_parallel_size=shape[0],
    )  # fmt: skip
    agreed = []

    def agree(*_: object) -> None:
        training = trainer.pipeline_run.training
        check_replicas_agree(training.pipeline.stage, training.optimizer)
        agreed.append(trainer.state.global_step)

    note.on_step_end = lambda args, state, control, **kwargs: agree()
    trainer.train()
    ended = {"without": note.without, "numbers": norms_and_losses(trainer), "agreed": agreed}
    (folder / f"{case}.rank{rank}.json").write_text(json.dumps(ended))
    if rank == 0:
        torch.save(trainer.model.state_dict(), folder / f"{case}.pt")


def main() -> None:
    for case in sys.argv[2:]:
        run(Path(sys.argv[1]), case)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
