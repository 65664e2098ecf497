"""`hf-pipetransformer selftest` on sound machines, and on machines with a planted fault."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_pipetransformer.cli import main, selftest
from hf_pipetransformer.comm import topology
from tests.distributed.launcher import LaunchResult, accelerate_launch
from tests.distributed.scenarios import RANK, scenario, start


pytestmark = pytest.mark.distributed


def corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what rank 1 sends by one part in a thousand: gradients, as it has the last stage."""
    real = dist.batch_isend_irecv

    def changed(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op.__name__ == "isend" and operation.tensor.is_floating_point():
                operation.tensor.mul_(1.001)
        return real(operations)

    if RANK == 1:
        monkeypatch.setattr(dist, "batch_isend_irecv", changed)


def vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill rank 1 where it measures."""
    if RANK == 1:
        monkeypatch.setattr(selftest, "_measure_bandwidth", lambda _: os.kill(os.getpid(), signal.SIGKILL))


def hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk of the cache never answer, and the step end after a second."""

    class Short(selftest.Guard):
        def step(self, name: str) -> Any:
            if name == "cache folder":
                self.seconds = 1.0 if RANK == 0 else 4.0
            return super().step(name)

    def never(*_: Any) -> None:
        threading.Event().wait()

    monkeypatch.setattr(selftest, "Guard", Short)
    monkeypatch.setattr(selftest, "measure_storage", never)


def part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put each rank on a machine of its own."""
    monkeypatch.setattr(topology, "host_name", lambda: f"machine {RANK}")


CHANGES = {"corrupt": corrupt, "vanish": vanish, "hang": hang, "part": part}


@scenario
def run_selftest(folder: Path, change: str | None = None) -> None:
    """Run the command, with a change to this process's share of the selftest."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if change is not None:
            CHANGES[change](monkeypatch)
        main(["selftest", "--activation_cache_dir", str(folder / "cache"), "--output", str(folder / "found.json")])


def lines_of(result: LaunchResult) -> list[str]:
    """Lines of the self-test itself, of rank 0 or of all ranks."""
    begins = "selftest|groups|messages|all-reduce|cache folder|exact|transition|What to do"
    return [line for line in result.outputs[0].splitlines() if re.match(begins, line)]


@pytest.mark.timeout(150)
def test_two_sound_processes_pass_in_ten_lines(tmp_path: Path) -> None:
    result = start(run_selftest, tmp_path, 2, timeout=120, strict_nccl=True)
    lines = lines_of(result)
    assert len(lines) <= 10 and lines[0].startswith("selftest: 2 processes on 1 node, cpu, gloo; torch ")
    assert lines[1].startswith("groups: K=1 x R=2, K=2 x R=1 in ")
    assert lines[-1].startswith("selftest: ok in ")
    assert lines_of(LaunchResult(0, "", result.outputs[1:], 0.0)) == []
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["exactness"]) == 1 + len(selftest.SCHEDULE_NAMES)
    assert 0 < max(found["exactness"].values()) <= 1e-5 and found["transition"]["difference"] <= 1e-5
    assert found["transition"]["change"] == "K=2 x R=1 to K=1 x R=2"
    assert all(speed > 0 for speeds in found["bandwidth"].values() for speed in speeds.values())
    assert found["cache folder"][0]["read"] > 0


@pytest.mark.timeout(120)
def test_two_nodes_are_measured_and_carry_a_pipeline_between_them(tmp_path: Path) -> None:
    result = start(run_selftest, tmp_path, 2, {"change": "part"}, timeout=100, strict_nccl=True)
    lines = lines_of(result)
    assert lines[0].startswith("selftest: 2 processes on 2 nodes, ") and lines[-1].startswith("selftest: ok in ")
    assert lines[1].startswith("groups: K=1 x R=2, K=2 x R=1 in ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found["bandwidth"]) == ["all-reduce over 2 ranks", "messages across nodes (ranks 0, 1)"]
    assert len(found["exactness"]) == 1 + len(selftest.SCHEDULE_NAMES) and len(found["cache folder"]) == 2
    assert 0 < max(found["exactness"].values()) <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_processes", [1, 4])
def test_other_numbers_of_processes_pass(tmp_path: Path, num_processes: int) -> None:
    lines = lines_of(start(run_selftest, tmp_path, num_processes, timeout=180, strict_nccl=True))
    assert lines[-1].startswith("selftest: ok in ")
    assert ("No pipeline was tested" in lines[-1]) == (num_processes == 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "step", "cause"),
    [
        ("corrupt", "exactness, K=2, gpipe", "differ by 0.00"),
        ("vanish", "bandwidth", "rank 1 does not answer"),
        ("hang", "cache folder", "rank 0: the step has not ended within 1 s, in _measure_cache (cli/selftest.py"),
    ],
)
def test_a_planted_fault_is_found_with_its_first_cause(tmp_path: Path, fault: str, step: str, cause: str) -> None:
    result = start(run_selftest, tmp_path, 2, {"change": fault}, timeout=90, check=False, grace=20)
    assert not result.timed_out and result.returncodes[0] == 1
    *_, verdict, remedy = lines_of(result)
    assert verdict.startswith(f"selftest: FAILED at {step}. First cause: ") and cause in verdict
    assert remedy.startswith("What to do: ") and ("--timeout 300" in remedy) == (fault == "hang")
    assert not (tmp_path / "found.json").exists()


@pytest.mark.timeout(120)
def test_a_launch_with_our_configuration_fails_for_a_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = str(tmp_path / "accelerate.yaml")
    main(["config", "--device", "cpu", "--output", config])
    options = ["selftest", "--activation_cache_dir", str(tmp_path / "file" / "cache")]
    result = accelerate_launch(
        "hf_pipetransformer", options, None, timeout=100, check=False, env={"ACCELERATE_USE_CPU": None},
        launcher_args=["--config_file", config, "--module"],
    )  # fmt: skip
    assert not result.timed_out and result.returncode != 0
    first, *_, verdict, remedy = lines_of(result)
    assert first.startswith("selftest: 2 processes on 1 node, cpu, gloo; ")
    assert verdict.startswith("selftest: FAILED at cache folder. First cause: rank 0: FileExistsError")
    assert "--activation_cache_dir" in remedy
