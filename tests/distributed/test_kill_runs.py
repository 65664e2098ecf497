"""Runs that are killed at random moments lose nothing; `make test-faults` does the same with many more kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launcher import REPOSITORY


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_runs_that_are_killed_lose_nothing(tmp_path: Path):
    """Six chains: equal and other numbers of processes, begun on one, two and four."""
    output = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.distributed.kill_runs", "--kills", "24", "--seed", "1"]
    command += ["--folder", str(tmp_path / "runs"), "--output", str(output)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["kills"] >= 20 and found["lost"] == 0
    assert found["checkpoints_left_incomplete"] > 0
    assert found["runs_at_equal_layout"] == found["of_which_bit_equal"] > 0
    assert found["runs_elsewhere"] > 0 and found["largest_difference_elsewhere"] <= 1e-5
