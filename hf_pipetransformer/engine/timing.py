"""What a step spends its time on, measured on real steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


WARMUP_STEPS = 2
"""Steps under a new layout that do not count: allocators and caches settle."""

MEASURED_STEPS = 12
"""Steps under a layout that are measured after the warm-up; measuring all of them would tell nothing more."""

PARTS = ("total", "pipeline", "forward", "backward", "reduction", "optimizer")
"""Parts of a step: everything; the pipeline with its waiting; computation of forwards and of backwards in it;
waiting for the replicas' gradients; the optimizer."""


@dataclass
class StepMeter:
    """Adds up the parts of each optimizer step under one layout.

    On a GPU a part is the time between two events on its stream, read when somebody asks; nothing waits for it.

    Args:
        device: where this rank computes.
    """

    device: torch.device
    num_tokens: int = 0
    """Elements of the main inputs of the current or last step."""
    samples: list[int] = field(default_factory=list)
    _steps: list[dict[str, float]] = field(default_factory=list)
    _open: dict[str, float] | None = None
    _events: list[tuple[int, str, Any, Any]] = field(default_factory=list)
    _start: float = 0.0
    _last_seconds: float = 0.0
    _ends: tuple[Any, Any] | None = None
    _num_begun: int = 0
    _is_running: bool = False
    _was_measured: bool = False
    _num_samples: int = 0
    _skip: int = WARMUP_STEPS

    @property
    def last_seconds(self) -> float:
        """Of the last optimizer step, warm-up or not. On a GPU it waits for the end of the step."""
        if self._ends is not None:
            begin, end = self._ends
            end.synchronize()
            return float(begin.elapsed_time(end) / 1000)
        return self._last_seconds

    @property
    def is_done(self) -> bool:
        """Whether enough steps are measured."""
        return len(self._steps) >= MEASURED_STEPS

    @property
    def num_steps(self) -> int:
        """Measured steps, without the warm-up."""
        return len(self._steps)

    def reset(self, skip: int = 0) -> None:
        """Forget everything: another layout begins, and its first `skip` steps are not typical."""
        self._skip = max(skip, WARMUP_STEPS)
        self.samples.clear()
        self._steps.clear()
        self._events.clear()
        self._open, self._num_begun, self._is_running, self._was_measured = None, 0, False, False

    def begin_step(self) -> None:
        """An optimizer step begins, its batches not fetched yet."""
        self._num_begun += 1
        self._open, self._is_running = None, True
        self._num_samples = self.num_tokens = 0
        self._start = time.perf_counter()
        self._ends = self._two_events() if self.device.type == "cuda" else None
        if self._ends is not None:
            self._ends[0].record()
        if self._num_begun > self._skip and not self.is_done:
            self._open = dict.fromkeys(PARTS, 0.0)

    def count(self, num_samples: int, num_tokens: int) -> None:
        """What this pipeline runs in the step."""
        self._num_samples += num_samples
        self.num_tokens += num_tokens

    def end_step(self) -> bool:
        """The optimizer step is done. False if none was running: Trainer also comes by at the end of an epoch."""
        if not self._is_running:
            return False
        self._is_running, self._was_measured = False, self._open is not None
        self._last_seconds = time.perf_counter() - self._start
        if self._ends is not None:
            self._ends[1].record()
        if self._open is None:
            return True
        if self._ends is not None:
            # The host may be a step ahead of the device: its clock says nothing.
            self._events.append((len(self._steps), "total", *self._ends))
        else:
            self._open["total"] = self._last_seconds
        self._steps.append(self._open)
        self.samples.append(self._num_samples)
        self._open = None
        return True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time spent inside belongs to `name`."""
        parts = self._open
        if parts is None:
            yield
        elif self.device.type == "cuda":
            start, end = self._two_events()
            start.record()
            yield
            end.record()
            self._events.append((len(self._steps), name, start, end))
        else:
            start_s = time.perf_counter()
            yield
            parts[name] += time.perf_counter() - start_s

    @staticmethod
    def _two_events() -> tuple[Any, Any]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def medians(self) -> dict[str, float]:
        """Median seconds of each part, and median `samples`; empty before the first measured step."""
        self._read_events()
        if not self._steps:
            return {}
        parts = {name: statistics.median(step[name] for step in self._steps) for name in PARTS}
        return {**parts, "samples": statistics.median(self.samples)}

    def _read_events(self) -> None:
        for step, name, start, end in self._events:
            if step < len(self._steps):
                end.synchronize()
                self._steps[step][name] += start.elapsed_time(end) / 1000
        self._events.clear()
