"""Replicas of a pipeline: DistributedDataParallel around `Pipe`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launcher import launch


pytestmark = pytest.mark.distributed


def test_replicas_of_a_pipeline_have_the_gradients_of_the_whole_batch() -> None:
    launch(Path(__file__).with_name("pipe_worker.py"), num_processes=2, timeout=60)
