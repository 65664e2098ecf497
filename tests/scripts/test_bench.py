"""The driver of the benchmarks: what it lists, skips and reports, and the processes that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench import __main__ as driver
from bench.measure import (
    EXPERIMENTS,
    REPOSITORY,
    Experiment,
    Settings,
    alternate,
    interval_95,
    launch_all,
    ratios,
    summary,
)
from torch.multiprocessing import ProcessRaisedException


def rank_and_given(*args: Any) -> list[Any]:
    """What `launch` is to call: the rank, and what it was given."""
    return [int(os.environ["RANK"]), *args]


def fail_on_rank_1() -> None:
    """Run on for long on rank 0."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 ends")
    time.sleep(600)


def say_and_sleep(file: str) -> None:
    """Say which process this is, and run on for long."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, tmp_path, tmp_path / "runs", quick=True)


def make(name: str, measure: Any, section: str | None = None) -> Experiment:
    measure.__doc__ = f"Measure {name}."
    return Experiment(name, measure, "figures.json", section, minutes=30, quick_minutes=1, processes=1)


def test_every_experiment_has_a_summary_a_file_and_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    driver.load_experiments()
    driver.print_list()
    printed = capsys.readouterr().out
    assert len(EXPERIMENTS) >= 8
    for each in EXPERIMENTS.values():
        assert each.summary.endswith(".") and each.result.endswith(".json")
        assert 0 < each.quick_minutes <= each.minutes
        assert f"\n    {each.summary}" in printed and each.name in printed
    assert [each.name for each in driver.chosen(["peers-[mv]*", "front"])] == ["front", "peers-minilm", "peers-vit"]
    with pytest.raises(SystemExit, match="No experiment is called nothing"):
        driver.chosen(["nothing"])
    quick = driver.within(driver.chosen(["all"]), 10, quick=True)
    assert 3 <= len(quick) < len(EXPERIMENTS) and sum(each.quick_minutes for each in quick) <= 10


def test_finished_experiments_are_skipped_and_a_failure_stops_no_other(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def first(given: Settings) -> dict[str, Any]:
        calls.append(given.folder.name)
        return {"value": given.of(1, 2)}

    def broken(given: Settings) -> dict[str, Any]:
        raise ValueError("no such thing")

    def last(given: Settings) -> dict[str, Any]:
        calls.append(given.folder.name)
        return {"value": 3}

    results = tmp_path / "results"
    asked = [make("first", first, "one"), make("broken", broken, "two"), make("last", last, "three")]
    assert driver.run_all(asked, settings, results, forces=False) == ["broken"]
    written = json.loads((results / "figures.json").read_text())
    assert {name: section["value"] for name, section in written.items()} == {"one": 2, "three": 3}
    assert written["one"]["machine"]["command"] == "python -m scripts.bench first"
    assert "ValueError: no such thing" in capsys.readouterr().err
    assert driver.run_all(asked, settings, results, forces=False) == ["broken"] and calls == ["first", "last"]
    assert "first (1 of 3): finished" in capsys.readouterr().out
    driver.run_all(asked, settings, results, forces=True)
    assert calls == ["first", "last"] * 2


def test_contenders_take_turns_forwards_and_backwards() -> None:
    order: list[str] = []

    def contender(name: str) -> Any:
        return lambda: order.append(name) or len(order)

    found = alternate({"a": contender("a"), "b": contender("b")}, rounds=3)
    assert "".join(order) == "baabba" and found == {"a": [2, 3, 6], "b": [1, 4, 5]}
    assert ratios(found["a"], found["b"]) == [2, 0.75, 1.2]
    assert summary([3, 1, 2.00004]) == {"median": 2.0, "min": 1, "max": 3}
    # A standard deviation of 1, times 4.303 / sqrt(3).
    assert interval_95([1, 2, 3]) == pytest.approx((-0.484, 4.484), abs=1e-3)


@pytest.mark.distributed
def test_a_launch_returns_what_every_rank_returned_and_ends_when_one_fails() -> None:
    found = launch_all(rank_and_given, 2, "given", {"k": 1}, minutes=1)
    assert found == [[rank, "given", {"k": 1}] for rank in range(2)]
    start = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="rank 1 ends"):
        launch_all(fail_on_rank_1, 2)
    with pytest.raises(TimeoutError, match=r"sleep has not ended after 0.01 minutes"):
        launch_all(time.sleep, 1, 600, minutes=0.01)
    assert time.monotonic() - start < 100


@pytest.mark.distributed
def test_processes_of_a_launch_end_when_their_driver_is_killed_in_the_background(tmp_path: Path) -> None:
    """A shell without job control starts what is in the background with SIGINT ignored, which children inherit."""
    file = tmp_path / "pid"
    (tmp_path / "drive.py").write_text(
        "from bench.measure import launch_all\n"
        "from tests.scripts.test_bench import say_and_sleep\n"
        "if __name__ == '__main__':\n"
        f"    launch_all(say_and_sleep, 1, {str(file)!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, tmp_path / "drive.py"], start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "scripts"), str(REPOSITORY)])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not file.exists() or not file.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    worker = psutil.Process(int(file.read_text()))
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([worker], timeout=10)
    try:
        assert alive == []
    finally:
        for each in alive:
            each.kill()
