"""Two processes, one stage, nothing to freeze: what a pipeline cannot run is Trainer's data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launcher import launch


WORKER = Path(__file__).with_name("replica_worker.py")

USED = (
    "a tuple with the loss first",
    "a model of transformers without layers",
    "T5",
    "batch normalisation",
    "split batches",
    "a loss of its own class",
    "evaluation alone",
)

pytestmark = pytest.mark.distributed


def test_what_no_pipeline_runs_is_data_parallel_as_in_trainer(tmp_path: Path) -> None:
    output = launch(WORKER, [tmp_path, *USED], num_processes=2, timeout=120).output
    assert [name for name in USED if output.count(f"same: {name}\n") != 2] == []
