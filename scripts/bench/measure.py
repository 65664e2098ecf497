"""What all experiments share: how they register, take turns, start processes, and write what they found.

An experiment is a function that takes `Settings` and returns what goes into its JSON file:

    @experiment("data_parallel.json", minutes=12, quick_minutes=1)
    def data_parallel(settings: Settings) -> dict[str, Any]:
        \"\"\"Throughput of K=1 beside that of `Trainer` with DDP.\"\"\"
        return launch(compare, 2, settings.of(7, 1))

It runs in the driver's process. Whatever trains or is timed belongs into a function of its own that `launch` calls in
processes with one thread each.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from scipy.stats import t as student


REPOSITORY = Path(__file__).resolve().parents[2]

KEEPS_FREED = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456",
}  # fmt: skip
"""glibc hands large blocks back to the system after each step: where time is measured, contenders are spared that."""
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
"""What is freed goes back at once: figures of memory are of what is held, not of what malloc keeps."""

Found = TypeVar("Found")


# ---- experiments ----


@dataclass(frozen=True)
class Settings:
    """What one call of the driver gives to every experiment.

    Args:
        data: folder of the data files.
        models: folder of the small ViT.
        folder: for what an experiment keeps between two calls, such as finished runs of a long study.
        quick: measure less, only to see that everything runs.
        tasks: names or patterns of those of a study; None for all, as in the next two.
        seeds: of a study; none for the report of the runs that are finished.
        contenders: names or patterns of those of a study.
    """

    data: Path
    models: Path
    folder: Path
    quick: bool = False
    tasks: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    contenders: Sequence[str] | None = None

    @property
    def is_part(self) -> bool:
        """Only some runs of a study."""
        return (self.tasks, self.seeds, self.contenders) != (None, None, None)

    def of(self, full: Found, quick: Found) -> Found:
        """The value for a whole measurement, or the one for a quick look."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Experiment:
    """A function that measures, and where its figures go.

    Args:
        name: what the driver calls it.
        measure: returns what is written.
        result: JSON file, relative to benchmarks/.
        section: key in that file; without one the file is the experiment's alone.
        minutes: on the machine of the committed figures (2 cores).
        quick_minutes: the same with `--quick`.
        processes: that run at once, for the header.
        is_study: made of runs that `Settings` choose among; finished ones are kept.
    """

    name: str
    measure: Callable[[Settings], dict[str, Any]]
    result: str
    section: str | None
    minutes: float
    quick_minutes: float
    processes: int
    is_study: bool = False

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.measure.__doc__ or "").strip().splitlines()[0]

    def run(self, settings: Settings, results: Path) -> None:
        """Measure, and write the figures below `results`; other sections of the file stay."""
        header = machine(self.processes) | {"command": f"python -m scripts.bench {self.name}"}
        found = self.measure(replace(settings, folder=settings.folder / self.name))
        path = results / self.result
        if self.section is None:
            content = {"machine": header, **found}
        else:
            kept = json.loads(path.read_text()) if path.exists() else {}
            content = {**kept, self.section: {**found, "machine": header}}
        write_json(path, content)


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    result: str, *, minutes: float, quick_minutes: float, section: str | None = None, processes: int = 2,
    name: str | None = None, is_study: bool = False,
) -> Callable[[Callable[[Settings], dict[str, Any]]], Callable[[Settings], dict[str, Any]]]:  # fmt: skip
    """Register a function under its name with hyphens, or another one."""

    def register(measure: Callable[[Settings], dict[str, Any]]) -> Callable[[Settings], dict[str, Any]]:
        key = name or measure.__name__.replace("_", "-")
        assert key not in EXPERIMENTS, f"two experiments are called {key}"
        EXPERIMENTS[key] = Experiment(key, measure, result, section, minutes, quick_minutes, processes, is_study)
        return measure

    return register


# ---- results ----


def write_json(path: Path, content: Any) -> None:
    """Write a file whole, or leave the one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def versions() -> dict[str, str]:
    """Of Python and of the packages that figures depend on."""
    packages = ("torch", "transformers", "accelerate", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def machine(num_processes: int) -> dict[str, Any]:
    """The header of a result: when, on what and with which versions it was measured."""
    return {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "processor": platform.machine(), **versions(),
        "processes": num_processes, "threads a process": 1,
    }  # fmt: skip


def report(title: str, values: Any) -> None:
    """Print an interim result on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{title}: {json.dumps(values)}", flush=True)


def summary(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Quotients inside each round, so that what disturbs a round meets both."""
    return [a / b for a, b in zip(over, under, strict=True)]


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean by Student's t, of two values or more."""
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


# ---- taking turns ----


def alternate(contenders: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """Call every contender once a round, forwards and backwards in turn; what they returned, by round."""
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in contenders if index % 2 else reversed(contenders):
            found[name].append(contenders[name]())
    return found


def seconds_of(step: Callable[[], Any]) -> float:
    """Of one call; the ranks of a group begin together, and the slowest counts."""
    wait = dist.barrier if dist.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


# ---- processes ----


class LaunchError(RuntimeError):
    """A process of a launch failed, or the launch took too long."""


def launch(function: Callable[..., Any], processes: int, *args: Any, **options: Any) -> Any:
    """Call a function of a module in new processes, and return what it returned on rank 0.

    Args:
        function: takes JSON values (paths arrive as strings) and returns one. It finds a process group of gloo where
            there are several processes, and an empty folder, common to all ranks, as working directory.
        options: those of `run_processes`.
    """
    return launch_all(function, processes, *args, **options)[0]


def launch_all(function: Callable[..., Any], processes: int, *args: Any, **options: Any) -> list[Any]:
    """Do as `launch` does, and return what each rank returned."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        call = {"module": function.__module__, "function": function.__qualname__, "args": args}
        (folder / "call.json").write_text(json.dumps(call, default=str))
        command = [sys.executable, "-m", f"{__package__}.worker", str(folder / "call.json")]
        run_processes(command, processes, folder=folder, **options)
        return [json.loads((folder / f"result_{rank}.json").read_text()) for rank in range(processes)]


def run_processes(
    command: Sequence[str], processes: int, *, minutes: float = 60, environment: Mapping[str, str] = KEEPS_FREED,
    folder: Path = REPOSITORY,
) -> None:  # fmt: skip
    """Run a command as every rank of a group, one thread each; nothing that it started outlives this call.

    Args:
        minutes: time limit.
        environment: beside what torchrun would set and what every experiment needs.
        folder: working directory.
    """
    # The ranks find each other in a store of this process, as those of torchrun do: no port is free for long.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = [str(REPOSITORY), str(REPOSITORY / "scripts"), os.environ.get("PYTHONPATH", "")]
    common = {
        **os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", **environment,
    }  # fmt: skip
    ranks = []
    try:
        for rank in range(processes):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=own, cwd=folder, process_group=0))
        _wait(ranks, time.monotonic() + 60 * minutes)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        if time.monotonic() > deadline:
            raise LaunchError("the time limit is over; nothing runs any more")
        time.sleep(0.05)
    if any(codes):
        time.sleep(2)  # The others print their own errors, too.
        raise LaunchError(f"exit codes by rank when the first one failed: {codes}; see the output above")


# ---- memory ----


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process; pages of files, which all processes share, do not count."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


class PeakMemory:
    """Peak of anonymous memory by phase, read every few milliseconds by a thread of its own.

    Launch with `environment=RETURNS_FREED`.

    Args:
        phase: the first one.
        state: bytes that do not count, such as those of the weights of a stage.
    """

    def __init__(self, phase: str, state: Callable[[], int] = lambda: 0) -> None:
        self.peaks: dict[str, int] = {}
        """Bytes beyond what there was at first and beyond the state, by phase."""
        self._state, self._phase, self._peak, self._held = state, phase, 0, 0
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._start = self._trimmed()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, phase: str) -> None:
        """End one phase, begin another; a phase may come again."""
        held = self._state()
        with self._lock:
            self._read()
            # The state grows or shrinks between two calls, and the peak is where it is largest.
            more = self._peak - self._start - max(held, self._held)
            self.peaks[self._phase] = max(0, more, self.peaks.get(self._phase, 0))
            self._phase, self._peak, self._held = phase, self._trimmed(), held

    def end(self) -> None:
        """End the last phase and the thread."""
        self.begin("")
        self._is_over.set()
        self._thread.join()

    def _trimmed(self) -> int:
        ctypes.CDLL(None).malloc_trim(0)
        return anonymous_bytes()

    def _read(self) -> None:
        self._peak = max(self._peak, anonymous_bytes())

    def _watch(self) -> None:
        while not self._is_over.wait(0.004):
            with self._lock:
                self._read()
