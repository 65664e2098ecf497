"""Loaders on two processes: alone they start nothing, and a script's own mean what they mean to Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launcher import launch


WORKER = Path(__file__).with_name("loader_worker.py")

pytestmark = pytest.mark.distributed


def test_loaders_alone_and_loaders_of_a_scripts_own(tmp_path: Path) -> None:
    output = launch(WORKER, [tmp_path], num_processes=2, timeout=120).output
    acts = ("read_alone", "refused", "train_with_own")
    assert [act for act in acts if output.count(f"done: {act}\n") != 2] == []
