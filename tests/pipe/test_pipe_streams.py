"""Copies between GPUs, by a model of streams: whatever is read was written before, on the way there and back.

Each stream has a clock of how far it has seen the others, itself included. Waiting for a stream takes over its clock;
a copy between two devices makes both streams wait for each other, as torch's does. A stage may read a micro-batch if
the clock of the stream that it computes on has reached what wrote it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.pipe import workers as streams
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.pipe.recomputation import is_recomputing
from hf_pipetransformer.pipe.skip import pop, skippable, stash
from hf_pipetransformer.pipe.stages import WithDevice


class Clock:
    """A stream that knows what has happened before its next operation."""

    waits = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen = {name: 0}

    def record_event(self) -> dict[str, int]:
        return dict(self.seen)

    def wait_event(self, event: dict[str, int]) -> None:
        if self.waits:
            self.take_over(event)

    def take_over(self, event: dict[str, int]) -> None:
        for name, count in event.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def tick(self) -> tuple[str, int]:
        """Do something; what it is known by."""
        self.seen[self.name] += 1
        return self.name, self.seen[self.name]

    def has_seen(self, event: tuple[str, int]) -> bool:
        return self.seen.get(event[0], 0) >= event[1]


class Machine:
    """Devices `cpu:0`, `cpu:1`, ... in the place of GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, waits: bool = True) -> None:
        self.computing: dict[torch.device, Clock] = {}
        self.lanes: dict[torch.device, streams.Lanes] = {}
        self.num_copies = 0
        monkeypatch.setattr(streams, "lanes", self.lanes_of)
        monkeypatch.setattr(streams, "computing", lambda device: self.stream_of(device))
        monkeypatch.setattr(streams, "_copied", self.copied)
        monkeypatch.setattr(streams, "is_same_place", self.is_same_place)
        monkeypatch.setattr(Clock, "waits", waits)

    def stream_of(self, device: torch.device) -> Clock:
        return self.computing.setdefault(device, Clock(f"{device} computing"))

    def lanes_of(self, device: torch.device) -> Any:
        found = streams.Lanes(Clock(f"{device} incoming"), Clock(f"{device} outgoing"))  # type: ignore[arg-type]
        return self.lanes.setdefault(device, found)

    def is_same_place(self, one: torch.device, other: torch.device) -> bool:
        """Torch drops a CPU's index from tensors: those are taken for tensors of the right device."""
        return None in (one.index, other.index) or one == other

    def copied(self, tensor: torch.Tensor, target: torch.device, both: tuple[Clock, Clock]) -> torch.Tensor:
        self.num_copies += 1
        leaving, coming = both
        leaving.take_over(coming.seen)
        leaving.tick()
        coming.take_over(leaving.seen)
        coming.tick()
        return tensor.clone()


class Reader(nn.Module):
    """A stage that looks whether its input is there; the input's first column says which micro-batch it is."""

    written: dict[tuple[int, int, str], tuple[str, int]] = {}

    def __init__(self, machine: Machine, stage: int, last: int) -> None:
        super().__init__()
        self.machine, self.stage, self.last = machine, stage, last
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Touch.apply(x, self) * self.scale

    def touch(self, micro_batch: int, which: str) -> None:
        """Read what the neighbour has written, and write."""
        stream = self.machine.stream_of(torch.device("cpu", self.stage))
        before, step = (self.stage - 1, 1) if which == "forward" else (self.stage + 1, -1)
        if 0 <= before <= self.last:
            assert stream.has_seen(self.written[micro_batch, before, which]), (micro_batch, self.stage, which)
            # Nor does it wait for what comes later there.
            later = self.written.get((micro_batch + step, before, which))
            assert later is None or not stream.has_seen(later), (micro_batch, self.stage, which)
        self.written[micro_batch, self.stage, which] = stream.tick()


class Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reader: Reader) -> torch.Tensor:
        ctx.reader, ctx.micro_batch = reader, round(float(x[0, 0]))
        if not is_recomputing():
            reader.touch(ctx.micro_batch, "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reader.touch(ctx.micro_batch, "backward")
        return gradient, None


def run(monkeypatch: pytest.MonkeyPatch, mode: str, *, waits: bool = True) -> Machine:
    machine = Machine(monkeypatch, waits=waits)
    Reader.written = {}
    stages = nn.Sequential(*(WithDevice(Reader(machine, k, 2), f"cpu:{k}") for k in range(3)))
    x = torch.arange(4.0)[:, None].requires_grad_()
    output = Pipe(stages, 4, mode)(x)
    torch.testing.assert_close(output, x)
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0]] * 4
    return machine


@pytest.mark.parametrize("mode", ["always", "never"])
def test_what_a_stage_reads_was_written_before(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    # Four micro-batches over two boundaries, and their gradients.
    assert run(monkeypatch, mode).num_copies == 16


def test_the_model_of_streams_finds_a_wait_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"\(0, 1, 'forward'\)"):
        run(monkeypatch, "never", waits=False)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield stash("skip", x * 3)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + (yield pop("skip"))


def test_a_skip_tensor_goes_straight_to_the_device_that_pops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    module = nn.Sequential(Stash(), nn.Identity(), nn.Identity(), Pop())
    stages = nn.Sequential(*(WithDevice(child, f"cpu:{k}") for k, child in enumerate(deepcopy(module))))
    x = torch.arange(2.0)[:, None].requires_grad_()
    Pipe(stages, 2)(x).sum().backward()
    # Three boundaries and one skip, two micro-batches, there and back.
    assert machine.num_copies == 16
    assert x.grad is not None
    assert x.grad.tolist() == [[4.0]] * 2


def test_tensors_that_need_no_gradient_need_none_after_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    here, there = torch.device("cpu", 0), torch.device("cpu", 1)
    values = (torch.ones(2, requires_grad=True), torch.ones(2), torch.arange(2), "word")
    arrived = streams.arrive(streams.depart(values, here), there)
    assert [getattr(value, "requires_grad", None) for value in arrived] == [True, False, False, None]
