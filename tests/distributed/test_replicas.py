"""Two processes, one stage, nothing to freeze: what a pipeline cannot run is Trainer's data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.replica_worker import compare
from tests.distributed.scenarios import run
from tests.support.adapted import ADDS


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
