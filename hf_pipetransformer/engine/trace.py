"""Trace of one optimizer step on one rank: computations, transfers and waits, as Perfetto and Chrome read them.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format), of which
complete events ("X") and names ("M") are used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_pipetransformer.comm.groups import synchronize
from hf_pipetransformer.schedules import Action, Op


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

    On a GPU it records CUDA events on the current stream, whose times are read in `events`: a slice is then what the
    stream did, and the host does not wait for it.

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
        self._start = self._now()

    @contextmanager
    def computing(self, what: Action | str) -> Iterator[None]:
        """Record a computation of the action list, or a part of the update by its name."""
        if isinstance(what, str):
            found = self._begun(UPDATE, what)
        else:
            found = self._of_action(f"stage {self.stages[what.chunk]}", COMPUTING[what.op], what)
        yield
        found.end = self._now()

    def post(self, action: Action) -> None:
        """Record that a transfer of the action list begins."""
        self._under_way[action] = self._of_action("transfers", TRANSFERS[action.op], action)

    @contextmanager
    def waiting(self, action: Action) -> Iterator[None]:
        """Record a wait for a transfer, which ends with it."""
        wait = self._begun(WAITS, f"wait for {action}")
        yield
        wait.end = self._now()
        transfer = self._under_way.pop(action, None)
        if transfer is not None:
            transfer.end = wait.end

    def events(self, rank: int) -> list[dict[str, Any]]:
        """End the trace and return its events, times in microseconds; `rank` is the process. Waits for a GPU.

        Transfers that are still under way, which an asynchronous schedule leaves to the next step, end here.
        """
        for transfer in self._under_way.values():
            transfer.args["still_under_way"] = True
        last = self._now()
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
        self._slices.append(_Slice(lane, name, self._now()))
        return self._slices[-1]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _microseconds(self, at: Any) -> float:
        passed = self._start.elapsed_time(at) / 1e3 if self.device.type == "cuda" else at - self._start
        return 1e6 * (self.start_s + passed)


def _apart(timed: list[tuple[float, float, _Slice]]) -> list[str]:
    """Return the lane of each slice; slices that overlap, as transfers may, get lanes beside each other."""
    ends: dict[str, list[float]] = {}
    lanes = []
    for begin, end, each in timed:
        of_lane = ends.setdefault(each.lane, [])
        free = next((number for number, last in enumerate(of_lane) if last <= begin), len(of_lane))
        of_lane[free : free + 1] = [end]
        lanes.append(each.lane if free == 0 else f"{each.lane} {free + 1}")
    return lanes
