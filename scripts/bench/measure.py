"""What all experiments share: how they register, take turns, start processes, and write what they found.

An experiment is a function that takes `Settings` and returns what goes into its JSON file:

    @experiment("computed_once.json", section="probe", minutes=5, quick_minutes=1)
    def computed_probe(settings: Settings) -> dict[str, Any]:
        \"\"\"Later epochs of a linear probe beside plain Trainer.\"\"\"
        return launch(compare, 1, settings.of(150, 4))

It runs in the driver's process. Whatever trains or is timed belongs into a function of its own that `launch` calls in
processes with one thread each.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import statistics
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
from unittest.mock import patch

import torch
import torch.distributed as dist
from scipy.stats import t as student
from torch.multiprocessing import set_start_method, start_processes


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
    """Folders of the data files, of the small ViT and for what an experiment keeps; and if a quick look is enough."""

    data: Path
    models: Path
    folder: Path
    quick: bool = False

    def of(self, full: Found, quick: Found) -> Found:
        """The value for a whole measurement, or the one for a quick look."""
        return quick if self.quick else full


Measure = Callable[[Settings], dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """A function that measures, the file of benchmarks/ and the key there that its figures go to, and what it takes.

    Without a section the file is its own. Minutes are those of the machine of the committed figures (2 cores).
    """

    name: str
    measure: Measure
    result: str
    section: str | None
    minutes: float
    quick_minutes: float
    processes: int

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.measure.__doc__ or "").strip().splitlines()[0]

    def minutes_of(self, quick: bool) -> float:
        """Of a whole measurement, or of a quick one."""
        return self.quick_minutes if quick else self.minutes

    def run(self, settings: Settings, results: Path) -> None:
        """Measure, and write the figures below `results`; other sections of the file stay."""
        header = machine(self.processes) | {"command": f"python -m scripts.bench {self.name}"}
        content = {"machine": header, **self.measure(replace(settings, folder=settings.folder / self.name))}
        path = results / self.result
        if self.section is not None:
            content = (json.loads(path.read_text()) if path.exists() else {}) | {self.section: content}
        write_json(path, content)


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    result: str, *, minutes: float, quick_minutes: float, section: str | None = None, processes: int = 2,
) -> Callable[[Measure], Measure]:  # fmt: skip
    """Register a function under its name with hyphens."""

    def register(measure: Measure) -> Measure:
        key = measure.__name__.replace("_", "-")
        assert key not in EXPERIMENTS, f"two experiments are called {key}"
        EXPERIMENTS[key] = Experiment(key, measure, result, section, minutes, quick_minutes, processes)
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
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


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


def launch(function: Callable[..., Any], processes: int, *args: Any, **options: Any) -> Any:
    """Do as `launch_all` does, and return what rank 0 returned."""
    return launch_all(function, processes, *args, **options)[0]


def launch_all(
    function: Callable[..., Any], processes: int, *args: Any, minutes: float = 60,
    environment: Mapping[str, str] = KEEPS_FREED,
) -> list[Any]:  # fmt: skip
    """Call a function of a module in new processes, one thread each, and return what it returned on every rank.

    Args:
        function: returns a JSON value. It finds a process group of gloo where there are several processes, and an
            empty folder, common to all ranks, as working directory.
        minutes: time limit.
        environment: beside what torchrun would set and what every experiment needs.
    """
    # The ranks find each other in a store of this process, as those of torchrun do: no port is free for long.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + 60 * minutes
    common = {
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", **environment,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, patch.dict(os.environ, common):
        ranks = start_processes(_rank, (folder, function, args), processes, join=False, start_method="spawn")
        try:
            while not ranks.join(timeout=1, grace_period=2):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} has not ended after {minutes} minutes")
        finally:
            for process in ranks.processes:
                process.kill()
        return [json.loads(Path(folder, f"result_{rank}.json").read_text()) for rank in range(processes)]


def _rank(rank: int, folder: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Call the function in one of the processes."""
    from accelerate import PartialState

    # torch ends the ranks of a driver that was killed by SIGINT, which what starts in the background ignores.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    sys.path.append(str(REPOSITORY / "scripts"))  # Tasks are made with the example scripts.
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # For workers of loaders, as in any other process.
    if int(os.environ["WORLD_SIZE"]) > 1 and os.environ["ACCELERATE_USE_CPU"] == "true":
        PartialState(cpu=True)  # The process group, before a trainer makes it.
    Path(folder, f"result_{rank}.json").write_text(json.dumps(function(*args)))
    if dist.is_initialized():
        dist.barrier()
        # Threads of plain Trainer's gloo groups still let go of their last tensors, for which they need the
        # interpreter's lock; destroying the groups meanwhile may wait for ever.
        time.sleep(1)
        dist.destroy_process_group()


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
