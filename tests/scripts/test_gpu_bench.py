"""`python -m scripts.bench.gpu`: what it skips, leaves out and reports; and all of it with tiny sizes on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import gpu
from bench.gpu import MEASUREMENTS, Launcher, Measurement, main, measure_all
from bench.gpu_contenders import row_of


def made(name: str, calls: list[str], minutes: float = 1.0) -> Measurement:
    """A measurement that notes that it ran."""

    def measure(_launcher: Launcher) -> dict[str, Any]:
        calls.append(name)
        return {"calls": len(calls)}

    return Measurement(name, minutes, measure)


def failing(error: Exception) -> Callable[[Launcher], dict[str, Any]]:
    def measure(_launcher: Launcher) -> dict[str, Any]:
        raise error

    return measure


def written(path: Path) -> dict[str, Any]:
    return {record["name"]: record for record in json.loads(path.read_text())["measurements"]}


def test_a_second_start_goes_on_behind_what_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, calls = tmp_path / "results.json", list[str]()
    first, last = made("first", calls), made("last", calls)
    broken = Measurement("broken", 1, failing(ValueError("no such thing")))
    assert measure_all([first, broken, last], path, "cpu", "a card", 10) == ["broken"]
    assert calls == ["first", "last"] and "ValueError: no such thing" in capsys.readouterr().err
    record = written(path)["first"]
    assert record["card"] == "a card" and record["versions"] == gpu.versions() and record["found"] == {"calls": 1}
    assert time.strptime(record["date"], "%Y-%m-%d") and record["seconds"] >= 0

    repaired = made("broken", calls)
    assert measure_all([first, repaired, last], path, "cpu", "a card", 10) == []
    assert calls == ["first", "last", "broken"]
    assert "first: in results.json already" in capsys.readouterr().out
    # Another card stands beside the first; other versions are measured anew, and so is what is forced.
    measure_all([first], path, "cpu", "another card", 10)
    measure_all([first], path, "cpu", "a card", 10, forces=True)
    assert len(json.loads(path.read_text())["measurements"]) == 4
    monkeypatch.setattr(gpu, "versions", lambda: {"torch": "9.9"})
    measure_all([first], path, "cpu", "a card", 10)
    assert calls[3:] == ["first"] * 3


def test_a_measurement_has_its_own_minutes_and_is_left_out_where_fewer_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, calls, deadlines = tmp_path / "results.json", list[str](), list[float]()

    def measure(launcher: Launcher) -> dict[str, Any]:
        deadlines.append(launcher.deadline - time.monotonic())
        return {}

    asked = [made("long", calls, 20), Measurement("short", 2, measure), made("shorter", calls, 1)]
    assert measure_all(asked, path, "cuda", "a card", 10) == []
    assert calls == ["shorter"] and list(written(path)) == ["short", "shorter"]
    assert "long: left out, 10.0 minutes are left of 20" in capsys.readouterr().out
    assert deadlines == [pytest.approx(120, abs=5)]


def test_a_launch_that_outlasts_its_minutes_ends_and_counts_as_failed(tmp_path: Path) -> None:
    slow = Measurement("slow", 0.1, lambda launcher: {"ranks": launcher(time.sleep, 1, 600)})
    start = time.monotonic()
    assert measure_all([slow], tmp_path / "results.json", "cuda", "a card", 10) == ["slow"]
    assert time.monotonic() - start < 100 and not (tmp_path / "results.json").exists()


def test_everything_fits_into_twelve_minutes_and_nothing_is_measured_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sum(each.minutes for each in MEASUREMENTS) <= 12
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="No GPU: nothing was measured"):
        main([])
    with pytest.raises(SystemExit, match="No measurement has 'nothing' in its name"):
        main(["--device", "cpu", "--only", "nothing"])


def test_a_row_shows_the_outlier_among_epochs_and_a_refusal_its_reason() -> None:
    runs = [{"steps": [9.0, 0.030, 0.030, 0.042], "start": 1.0, "bytes": 2**30}]
    row = row_of(runs, [0.060] * 3, 600)
    assert row["slowest epoch over the median"] == 1.4 and row["ms of a step"]["median"] == 30
    assert row["step over Trainer's"] == {"median": 0.5, "min": 0.5, "max": 0.7}
    assert row["tokens a second"]["median"] == 20_000
    assert row_of([{"refused": "use another"}], [], 1) == {"refused": "use another"}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1500)
def test_everything_runs_on_the_cpu_with_tiny_sizes(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    main(["--device", "cpu", "--minutes", "24", "--output", str(path)])
    found = {name: record["found"] for name, record in written(path).items()}
    assert set(found) == {each.name for each in MEASUREMENTS}
    for each in found.values():
        for name, row in each.get("contenders", {}).items():
            assert row.get("refused") or row["tokens a second"], name
    stored = found["half stored, BERT-base, 64 x 384 tokens"]["contenders"]["half stored"]
    assert stored["speed over the bound"]["median"] > 0
    head = found["last stage with 128,000 words"]
    assert head["8 slices"]["largest relative difference of the losses"] < 1e-5
    assert head["8 slices"]["GiB beyond the state"] < head["whole sequences"]["GiB beyond the state"]
