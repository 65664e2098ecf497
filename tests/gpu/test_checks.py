"""`make gpu-check` where there is no GPU: its checks run on the CPU, and can fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_pipetransformer.comm import groups
from tests.gpu import __main__ as checks
from tests.gpu import one_process, runs, stages


pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_check_of_one_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--output", str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(output.read_text())["one device"]
    assert found["machine"]["device"] == "cpu" and found["machine"]["torch"]
    precisions = ("fp32", "bf16")
    names = [name for group in checks.GROUPS.values() for name in group.checks(tmp_path, "cpu", precisions, "gloo")]
    assert [check["check"] for check in found["checks"]] == names
    assert [check for check in found["checks"] if not check["passed"]] == []
    by_name = {check["check"]: check for check in found["checks"]}
    assert by_name["transition, bert"]["bytes moved"] > 0
    assert by_name["cache, vit"]["hits"] > 0
    assert by_name["four, K=2 x R=2, bf16"]["run"] == [2, 2, "1f1b", "bf16"]
    assert by_name["resume, fp32"]["resumed at step"] == stages.HALF
    flight = by_name["in flight, bf16"]
    # GPipe keeps a whole mini-batch, in however many micro-batches.
    assert 0 < flight["MiB at most, 1 in flight"] <= flight["MiB at most, 4 in flight"]


def test_freezing_and_the_cache_are_checked_alike_in_this_process(tmp_path: Path) -> None:
    assert one_process.check_freezing("vit", tmp_path, "cpu")["frozen parameters"] > 0
    assert one_process.check_cache("vit", tmp_path, "cpu")["hits"] > 0


def test_checks_that_are_not_reached_have_failed(tmp_path: Path) -> None:
    found = checks.run_group("alone", tmp_path, "cpu", seconds=0)
    assert [check["check"] for check in found] == list(one_process.alone(tmp_path, "cpu", ("fp32", "bf16")))
    assert {check["error"] for check in found} == {"not reached in time"}
    assert not any(check["passed"] for check in found)


def test_a_launch_leaves_out_what_has_a_result(tmp_path: Path) -> None:
    *others, last = one_process.alone(tmp_path, "cpu", ("fp32", "bf16"))
    for name in others:
        checks.add_line(tmp_path / "alone-gloo.jsonl", {"check": name, "passed": False, "error": "planted"})
    found = checks.run_group("alone", tmp_path, "cpu", seconds=60)
    assert [check["check"] for check in found if check["passed"]] == [last]
    assert {check["error"] for check in found[:-1]} == {"planted"}


def test_checks_behind_one_that_ended_its_process_are_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text(f"open({str(tmp_path / 'launches')!r}, 'a').write('.')\nraise SystemExit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "CHECKS", "ends")
    found = checks.run_group("alone", tmp_path, "cpu", seconds=60)
    assert {check["error"] for check in found} == {"ended without a result"}
    assert len((tmp_path / "launches").read_text()) == len(found)


def test_workers_of_a_launch_end_with_it(tmp_path: Path) -> None:
    """torchrun starts each in a session of its own, which a signal to the launch's group does not reach."""
    worker = f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
    launch = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {worker + 'time.sleep(60)'!r}], start_new_session=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", launch], start_new_session=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    worker_process = psutil.Process(int((tmp_path / "pid").read_text()))
    checks.end(process)
    _, alive = psutil.wait_procs([worker_process], timeout=10)
    assert process.returncode == -9 and alive == []


def test_a_model_that_stages_would_train_otherwise_is_refused_here_too(tmp_path: Path) -> None:
    assert "Skipping" in one_process.check_refusal(tmp_path, "cpu")["refusal"]


def test_a_check_that_fails_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    close = [1.0] * runs.NUM_STEPS
    off = [*close[:-1], 1.1]
    checks.run_checks(
        {
            "off": lambda: runs.check_close(off, close, "cuda", "bf16"),
            "close": lambda: runs.check_close(close, close, "cuda", "fp32"),
        },
        output,
    )
    first, second = [json.loads(line) for line in output.read_text().splitlines()]
    assert (first["passed"], second["passed"]) == (False, True)
    assert "losses differ by 0.1" in first["error"]


@pytest.mark.parametrize("passed", [True, False])
def test_the_results_are_written_and_a_failure_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    output = tmp_path / "results.json"
    output.write_text(json.dumps({"nccl": {"checks": []}}))
    section: dict[str, Any] = {"checks": [{"check": "one", "passed": passed}]}
    monkeypatch.setattr(checks, "check_one_device", lambda *_: section)
    command = ["--device", "cpu", "--output", str(output)]
    if passed:
        checks.main(command)
    else:
        with pytest.raises(SystemExit) as ended:
            checks.main(command)
        assert ended.value.code == 1
    assert json.loads(output.read_text()) == {"nccl": {"checks": []}, "one device": section}


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="nothing was checked"):
        checks.main(["--output", str(tmp_path / "results.json")])
    assert not any(tmp_path.iterdir())


def test_the_thorough_part_starts_its_own_processes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="No GPU: nothing was checked"):
        checks.run_parts(None, "cuda")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="start their own processes on this machine"):
        checks.run_parts(None, "cuda")


@pytest.mark.parametrize(("num_gpus", "shared"), [(1, {2, 4}), (2, {4}), (4, set())])
def test_processes_that_share_a_gpu_are_checked_over_nccls_sockets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    shared: set[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_group(name: str, *given: Any) -> list[dict[str, Any]]:
        *_, backend, precisions = given
        size = checks.GROUPS[name].num_processes
        assert backend == ("nccl" if size > 1 or name == "killed" else "gloo")
        runs = {"run": [2, size // 2, "1f1b", "fp16"]} if size > 1 else {}
        return [{"check": f"{name}, {precision}", "passed": precision != "bf16", **runs} for precision in precisions]

    monkeypatch.setattr(checks.torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(checks, "run_group", run_group)
    monkeypatch.setattr(checks, "machine", lambda device: {"device": device})
    found = checks.check_nccl(tmp_path, list(checks.GROUPS), 60)
    transports = {size: "sockets" if size in shared else "direct" for size in (2, 4)}
    assert found["verified"] == [(2, size // 2, "1f1b", "fp16", way) for size, way in transports.items()]
    said = capsys.readouterr().out
    assert said.count("order and numbers, not speed and not NVLink") == sum(
        group.num_processes in shared for group in checks.GROUPS.values()
    )


@pytest.mark.parametrize(
    ("num_gpus", "num_here", "num_all", "interface"),
    [(0, 2, 2, None), (2, 2, 2, None), (1, 2, 2, "lo"), (1, 2, 4, None)],
)
def test_ranks_that_share_a_gpu_name_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_here: int, num_all: int, interface: str | None
) -> None:
    own = {"RANK": "1", "LOCAL_WORLD_SIZE": str(num_here), "WORLD_SIZE": str(num_all)}
    monkeypatch.setattr(groups.os, "environ", own.copy())
    shares = num_here > num_gpus > 0
    assert groups.share_gpus(num_gpus) == shares
    added = {name: value for name, value in groups.os.environ.items() if name not in own}
    expected = {**groups.OVER_SOCKETS, "NCCL_HOSTID": "host-1"} if shares else {}
    assert added == expected | ({"NCCL_SOCKET_IFNAME": interface} if interface else {})
