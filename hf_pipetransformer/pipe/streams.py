"""Copies between the devices of a pipeline, on streams of their own, in the forward and in the backward.

A tensor goes from one stage to the next in three steps, each a node of autograd's graph, so that its gradient goes the
same way back:

    depart   stage s has computed it
    copy     when it is computed, on the outgoing stream of s and the incoming one of t
    arrive   stage t waits for the copy

Whoever waits, waits for an event, so for nothing that was queued behind it. The waits of the stages are nodes of their
own because they stop all that a device is given afterwards: on the way back `depart` belongs to device s, whose thread
of autograd meets it where the gradient is needed, and not earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch


class Stream(Protocol):
    """What of `torch.cuda.Stream` is used."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None: ...


class Lanes(NamedTuple):
    """The streams of a device that others' activations and gradients come and go by."""

    incoming: torch.cuda.Stream
    outgoing: torch.cuda.Stream


_LANES: dict[torch.device, Lanes] = {}
_LANES_LOCK = Lock()


def lanes(device: torch.device) -> Lanes | None:
    """Of a GPU, the same each time; the CPU has none."""
    if device.type != "cuda":
        return None
    with _LANES_LOCK:
        if device not in _LANES:
            _LANES[device] = Lanes(torch.cuda.Stream(device), torch.cuda.Stream(device))
        return _LANES[device]


def computing(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that this thread computes on."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def is_same_place(one: torch.device, other: torch.device) -> bool:
    """Whether a tensor of one device is one of the other. All of a CPU's tensors lie together."""
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)


def _used_on(stream: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """Keep the memory of `tensors` until the stream is through with them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


def _marked(ctx: Any, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results of tensors that need no gradient need none either."""
    needed = ctx.needs_input_grad[2:]
    ctx.mark_non_differentiable(*(output for output, is_needed in zip(outputs, needed, strict=True) if not is_needed))
    return tuple(outputs)


@dataclass(eq=False)
class Journey:
    """Some tensors of a micro-batch on their way between two devices.

    Args:
        source: where they come from.
        target: where they go to; known when they arrive.
        events: what has happened, for others to wait for.
    """

    source: torch.device
    target: torch.device | None = None
    events: dict[str, Any] = field(default_factory=dict)

    def note(self, what: str, stream: Stream | None) -> None:
        """The stream has come so far."""
        if stream is not None:
            self.events[what] = stream.record_event()

    def wait(self, what: str, stream: Stream | None, tensors: Sequence[torch.Tensor | None]) -> None:
        """What the stream is given from now on comes after it, and may use the tensors."""
        if stream is not None:
            if what in self.events:
                stream.wait_event(self.events[what])
            _used_on(stream, tensors)

    def lanes(self) -> tuple[Stream | None, Stream | None]:
        """The outgoing stream of the source and the incoming one of the target."""
        assert self.target is not None
        leaving, coming = lanes(self.source), lanes(self.target)
        return leaving and leaving.outgoing, coming and coming.incoming


class Departing(torch.autograd.Function):
    """Tensors are ready for a copy; their gradients are waited for."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.journey, ctx.stream = journey, stream
        journey.note("ready", stream)
        return _marked(ctx, [tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.journey.wait("returned", ctx.stream, gradients)
        return None, None, *gradients


class Copying(torch.autograd.Function):
    """Copies there, and back."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, target: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.journey, ctx.sources = journey, [tensor.device for tensor in tensors]
        journey.target = target
        leaving, coming = journey.lanes()
        journey.wait("ready", leaving, tensors)
        copies = [_copied(tensor, target, (leaving, coming)) for tensor in tensors]
        journey.note("arrived", coming or leaving)
        return _marked(ctx, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        leaving, coming = ctx.journey.lanes()
        ctx.journey.wait("gradient is ready", coming, gradients)
        copies = [
            None if gradient is None else _copied(gradient, source, (leaving, coming))
            for gradient, source in zip(gradients, ctx.sources, strict=True)
        ]
        ctx.journey.note("returned", leaving or coming)
        return None, None, *copies


class Arriving(torch.autograd.Function):
    """Copies are waited for; their gradients are ready for a copy."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, stream: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.journey, ctx.stream = journey, stream
        journey.wait("arrived", stream, tensors)
        return _marked(ctx, [tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.journey.note("gradient is ready", ctx.stream)
        return None, None, *gradients


def _copied(tensor: torch.Tensor, target: torch.device, streams: tuple[Any, Any]) -> torch.Tensor:
    with on_streams([stream for stream in streams if stream is not None]):
        # The host reads what comes to it at once: that copy has to be done.
        return tensor.to(target, non_blocking=target.type != "cpu")


@contextmanager
def on_streams(streams: Sequence[Any]) -> Iterator[None]:
    """Their devices' work of this thread goes to these streams inside. The current device stays."""
    if not streams:
        yield
        return
    with torch.cuda.device(torch.cuda.current_device()), torch.cuda.stream(streams[0]), on_streams(streams[1:]):
        yield


class Departed(NamedTuple):
    """Values that a stage has sent off."""

    values: tuple[Any, ...]
    journey: Journey


def depart(values: Sequence[Any], source: torch.device) -> Departed:
    """`values` of a stage on their way to another device. Called where the stage has just computed them."""
    journey, here = Journey(source), computing(source)
    if here is None:
        return Departed(tuple(values), journey)
    return Departed(_through(values, source, lambda tensors: Departing.apply(journey, here, *tensors)), journey)  # type: ignore[no-untyped-call]


def arrive(departed: Departed, target: torch.device) -> tuple[Any, ...]:
    """What has departed, on `target`. Called where the next stage is about to compute.

    Tensors that were on neither device are moved as well.
    """
    (values, journey), here = departed, computing(target)
    if not is_same_place(journey.source, target):
        values = _through(values, journey.source, lambda tensors: Copying.apply(journey, target, *tensors))  # type: ignore[no-untyped-call]
        if here is not None:
            values = _through(values, target, lambda tensors: Arriving.apply(journey, here, *tensors))  # type: ignore[no-untyped-call]
    if all(not isinstance(value, torch.Tensor) or is_same_place(value.device, target) for value in values):
        return values
    return tuple(value.to(target) if isinstance(value, torch.Tensor) else value for value in values)


def _through(values: Sequence[Any], device: torch.device, step: Any) -> tuple[Any, ...]:
    """`values` with those tensors that lie on `device` taken through a step, all at once, each of them once."""
    found = {id(v): v for v in values if isinstance(v, torch.Tensor) and is_same_place(v.device, device)}
    if not found:
        return tuple(values)
    results = dict(zip(found, step(list(found.values())), strict=True))
    return tuple(results.get(id(value), value) for value in values)
