"""Times of optimizer steps: the parts of each, measured during training, and a trace of one of them.

The trace has computations, transfers and waits, as Perfetto and Chrome read them. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format), of which
complete events ("X") and names ("M") are used.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_pipetransformer.comm.groups import synchronize
from hf_pipetransformer.schedules.actions import Action, Op


WARMUP_STEPS = 2
"""Steps ignored after a change of layout, while allocators and caches settle."""

MEASURED_STEPS = 12
"""Steps measured after the warm-up; more would not improve the medians."""

PARTS = ("total", "pipeline", "forward", "backward", "reduction", "optimizer")
"""Parts of a step. `pipeline` includes waiting for other stages; `forward` and `backward` are the computation in it.
`reduction` is the wait for the gradient all-reduce."""


NOTHING = nullcontext()
"""Context that does nothing, made once."""


def settled_seconds(device: torch.device) -> float:
    """Return the clock's seconds when all work of a device is done."""
    synchronize(device)
    return time.perf_counter()


Span = tuple[str, Any, Any]
"""Name of a part of a step, and the moments at its begin and end."""


def moment(device: torch.device) -> Any:
    """Return an event that a GPU records when it gets there, while the host goes on; elsewhere seconds of a clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments of a device, when the second has come."""
    if isinstance(begin, torch.cuda.Event):
        end.synchronize()
        return float(begin.elapsed_time(end) / 1000)
    return float(end - begin)


@dataclass
class StepMeter:
    """Meter of the parts of each optimizer step under one layout, which never waits for a GPU while it measures."""

    device: torch.device
    num_tokens: int = 0
    """Number of elements of the main inputs in the current or last step."""
    num_samples: int = 0
    """Number of samples that this pipeline ran in it."""
    trace: StepTrace | None = None
    """Recorder of the current step, if it is traced."""
    host_seconds: float = 0.0
    """Seconds of the last optimizer step on the host, which may run ahead of the device."""
    _steps: list[tuple[int, list[Span]]] = field(default_factory=list)
    """Number of samples and parts of each measured step."""
    _latest: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=MEASURED_STEPS))
    """Begin and end of the latest steps after the warm-up."""
    _last: tuple[Any, Any] = (0.0, 0.0)
    _open: list[Span] | None = None
    """Parts of the current step; None if only its whole is timed, see `_latest`."""
    _begin: tuple[float, Any] | None = None
    """When the current step began, on the host and on the device."""
    _num_begun: int = 0
    _skip: int = WARMUP_STEPS

    @property
    def last_seconds(self) -> float:
        """Seconds of the last optimizer step, warm-up included. On a GPU, reading it waits for the end of the step."""
        return seconds_between(*self._last)

    @property
    def latest_seconds(self) -> float | None:
        """Median seconds of the latest steps; None before the end of the warm-up."""
        return statistics.median(seconds_between(*step) for step in self._latest) if self._latest else None

    @property
    def is_done(self) -> bool:
        """True if `MEASURED_STEPS` steps are measured."""
        return len(self._steps) >= MEASURED_STEPS

    def reset(self, skip: int = 0) -> None:
        """Restart for another layout, ignoring its first `skip` steps, or `WARMUP_STEPS` if that is more."""
        self._skip = max(skip, WARMUP_STEPS)
        self._steps.clear()
        self._latest.clear()
        self._open, self._begin, self._num_begun = None, None, 0

    def begin_step(self) -> None:
        """Start an optimizer step. Call before fetching its batches, so that data loading counts."""
        self._num_begun += 1
        self.num_samples = self.num_tokens = 0
        # An event is on the stream of the computation, so that the step begins when the device gets to it.
        self._begin = time.perf_counter(), moment(self.device)
        self._open = [] if self._num_begun > self._skip and not self.is_done else None

    def count(self, num_samples: int, num_tokens: int) -> None:
        """Add to the samples and tokens that this pipeline runs in the step."""
        self.num_samples += num_samples
        self.num_tokens += num_tokens

    def end_step(self) -> bool:
        """End the optimizer step. Returns False if none was running, as when Trainer calls at the end of an epoch."""
        if self._begin is None:
            return False
        (start, begin), self._begin = self._begin, None
        self._last = begin, moment(self.device)
        self.host_seconds = time.perf_counter() - start
        if self._num_begun > self._skip:
            self._latest.append(self._last)
        if self._open is not None:
            self._steps.append((self.num_samples, [("total", *self._last), *self._open]))
            self._open = None
        return True

    def part(self, name: str) -> AbstractContextManager[None]:
        """Add the time spent inside to the part `name`, one of `PARTS`."""
        # Most steps are not measured, and the engine asks several times for each micro-batch.
        return NOTHING if self._open is None else self._measured(self._open, name)

    @contextmanager
    def _measured(self, parts: list[Span], name: str) -> Iterator[None]:
        begin = moment(self.device)
        yield
        parts.append((name, begin, moment(self.device)))

    def tracing(self, what: Action | str) -> AbstractContextManager[None]:
        """Record a computation in the trace, if this step has one; see `StepTrace.computing`."""
        return NOTHING if self.trace is None else self.trace.computing(what)

    def waiting(self, transfer: Action) -> AbstractContextManager[None]:
        """Record a wait for a transfer in the trace, if this step has one."""
        return NOTHING if self.trace is None else self.trace.waiting(transfer)

    def posting(self, transfer: Action) -> None:
        """Record that a transfer begins in the trace, if this step has one."""
        if self.trace is not None:
            self.trace.post(transfer)

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each part and the median `samples`; empty before the first measured step."""
        if not self._steps:
            return {}
        found: list[dict[str, float]] = []
        for num_samples, parts in self._steps:
            sums = dict.fromkeys(PARTS, 0.0)
            for name, begin, end in parts:
                sums[name] += seconds_between(begin, end)
            found.append({**sums, "samples": num_samples})
        return {name: statistics.median(step[name] for step in found) for name in found[0]}


COMPUTING = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward of the input",
    Op.BACKWARD_WEIGHT: "gradient of the weights",
}
TRANSFERS = {
    Op.RECEIVE_FORWARD: "receive activation",
    Op.SEND_FORWARD: "send activation",
    Op.RECEIVE_BACKWARD: "receive gradient",
    Op.SEND_BACKWARD: "send gradient",
}
UPDATE, WAITS = "gradients and update", "waits"


@dataclass
class _Slice:
    lane: str
    name: str
    begin: Any
    end: Any = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepTrace:
    """Recorder of one optimizer step.

    On a GPU a slice is what the current stream did, and the host does not wait for it until `events` is called.

    Args:
        stages: the stage of each chunk of this rank.
        start_s: seconds from the start of the traced step, as all ranks count them, to the construction.
    """

    device: torch.device
    stages: tuple[int, ...]
    start_s: float = 0.0
    _slices: list[_Slice] = field(default_factory=list, init=False)
    _under_way: dict[Action, _Slice] = field(default_factory=dict, init=False)
    _num_actions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._start = moment(self.device)

    @contextmanager
    def computing(self, what: Action | str) -> Iterator[None]:
        """Record a computation of the action list, or a part of the update by its name."""
        if isinstance(what, str):
            found = self._begun(UPDATE, what)
        else:
            found = self._of_action(f"stage {self.stages[what.chunk]}", COMPUTING[what.op], what)
        yield
        found.end = moment(self.device)

    def post(self, action: Action) -> None:
        """Record that a transfer of the action list begins."""
        self._under_way[action] = self._of_action("transfers", TRANSFERS[action.op], action)

    @contextmanager
    def waiting(self, action: Action) -> Iterator[None]:
        """Record a wait for a transfer, which ends with it."""
        wait = self._begun(WAITS, f"wait for {action}")
        yield
        wait.end = moment(self.device)
        transfer = self._under_way.pop(action, None)
        if transfer is not None:
            transfer.end = wait.end

    def events(self, rank: int) -> list[dict[str, Any]]:
        """End the trace and return its events, times in microseconds; `rank` is the process. Waits for a GPU.

        Transfers that are still under way, which an asynchronous schedule leaves to the next step, end here.
        """
        for transfer in self._under_way.values():
            transfer.args["still_under_way"] = True
        last = moment(self.device)
        # An event has no time before the device has passed it.
        synchronize(self.device)
        timed = []
        for each in self._slices:
            begin, end = self._microseconds(each.begin), self._microseconds(last if each.end is None else each.end)
            timed.append((begin, max(begin, end), each))
        lanes = _apart(timed)
        names = [*(f"stage {stage}" for stage in self.stages), UPDATE, WAITS]
        # By length first, so that lane 10 of the transfers comes after lane 2.
        names += sorted(set(lanes) - set(names), key=lambda lane: (len(lane), lane))
        named = [{"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}]
        for tid, name in enumerate(names):
            named.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}})
            named.append(
                {"ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            )
        slices = [
            {
                **{"ph": "X", "pid": rank, "tid": names.index(lane), "name": each.name, "cat": each.lane},
                **{"ts": round(begin, 3), "dur": round(end - begin, 3), "args": each.args},
            }
            for lane, (begin, end, each) in zip(lanes, timed, strict=True)
        ]
        return [*named, *slices]

    def _of_action(self, lane: str, name: str, action: Action) -> _Slice:
        found = self._begun(lane, f"{name} {action.micro_batch}")
        found.args = {"action": str(action), "order": self._num_actions, "stage": self.stages[action.chunk]}
        self._num_actions += 1
        return found

    def _begun(self, lane: str, name: str) -> _Slice:
        self._slices.append(_Slice(lane, name, moment(self.device)))
        return self._slices[-1]

    def _microseconds(self, at: Any) -> float:
        return 1e6 * (self.start_s + seconds_between(self._start, at))


def _apart(timed: list[tuple[float, float, _Slice]]) -> list[str]:
    """Return the lane of each slice; slices that overlap, as transfers may, get lanes beside each other."""
    ends: dict[str, list[float]] = {}
    lanes = []
    for begin, end, each in timed:
        of_lane = ends.setdefault(each.lane, [])
        free = next((number for number, last in enumerate(of_lane) if last <= begin), len(of_lane))
        # A slice, as it appends where no lane is free.
        of_lane[free : free + 1] = [end]
        lanes.append(each.lane if free == 0 else f"{each.lane} {free + 1}")
    return lanes
