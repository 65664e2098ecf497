"""Copies between the devices of a pipeline, on streams of their own, in the forward and in the backward.

A tensor goes from one stage to the next in three steps, each a node of autograd's graph, so that its gradient goes the
same way back:

    stage s computes | depart: s's outgoing stream waits for s   | the copy, on s's outgoing and t's incoming stream
                     | arrive: t waits for its incoming stream   | stage t computes

The waits are nodes of their own because a wait stops all that a device is given afterwards: on the way back `depart`
belongs to device s, whose thread of autograd meets it where the gradient is needed, and not earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch


class Stream(Protocol):
    """What of `torch.cuda.Stream` is used."""

    def wait_stream(self, stream: Any) -> None: ...


class Lanes(NamedTuple):
    """The streams of a device that others' activations and gradients come and go by."""

    incoming: torch.cuda.Stream
    outgoing: torch.cuda.Stream


@lru_cache(maxsize=64)
def _lanes_of(device: torch.device) -> Lanes:
    return Lanes(torch.cuda.Stream(device), torch.cuda.Stream(device))


def lanes(device: torch.device) -> Lanes | None:
    """Of a GPU, the same each time; the CPU has none."""
    return _lanes_of(device) if device.type == "cuda" else None


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


class Passing(torch.autograd.Function):
    """Tensors pass from one stream of a device to another: what is queued there afterwards waits for them."""

    @staticmethod
    def forward(ctx: Any, before: Stream, after: Stream, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.before, ctx.after = before, after
        after.wait_stream(before)
        _used_on(after, tensors)
        return _marked(ctx, [tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.before.wait_stream(ctx.after)
        _used_on(ctx.before, gradients)
        return None, None, *gradients


class Copying(torch.autograd.Function):
    """Copies on the streams that are given, back on the same."""

    @staticmethod
    def forward(
        ctx: Any, target: torch.device, streams: tuple[Any, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.streams, ctx.sources = streams, [tensor.device for tensor in tensors]
        return _marked(ctx, [_copied(tensor, target, streams) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        copies = [
            None if gradient is None else _copied(gradient, source, ctx.streams)
            for gradient, source in zip(gradients, ctx.sources, strict=True)
        ]
        return None, None, *copies


def _copied(tensor: torch.Tensor, target: torch.device, streams: tuple[Any, ...]) -> torch.Tensor:
    with on_streams(streams):
        # The host reads what comes to it at once: that copy has to be done.
        copy = tensor.to(target, non_blocking=target.type != "cpu")
    for stream in streams:
        if tensor.is_cuda and tensor.device == stream.device:
            tensor.record_stream(stream)
    return copy


@contextmanager
def on_streams(streams: Sequence[Any]) -> Iterator[None]:
    """Their devices' work of this thread goes to these streams inside. The current device stays."""
    if not streams:
        yield
        return
    with torch.cuda.device(torch.cuda.current_device()), torch.cuda.stream(streams[0]), on_streams(streams[1:]):
        yield


def depart(values: Sequence[Any], source: torch.device) -> tuple[Any, ...]:
    """`values` of a stage on their way to another device. Called where the stage has just computed them."""
    found, here = lanes(source), computing(source)
    if found is None or here is None:
        return tuple(values)
    return _through(values, source, lambda tensors: Passing.apply(here, found.outgoing, *tensors))  # type: ignore[no-untyped-call]


def arrive(values: Sequence[Any], source: torch.device, target: torch.device) -> tuple[Any, ...]:
    """`values` that have departed from `source`, on `target`. Called where the next stage is about to compute."""
    if is_same_place(source, target):
        return tuple(values)
    leaving, coming, here = lanes(source), lanes(target), computing(target)
    streams = tuple(
        stream for stream in (leaving and leaving.outgoing, coming and coming.incoming) if stream is not None
    )
    copies = _through(values, source, lambda tensors: Copying.apply(target, streams, *tensors))  # type: ignore[no-untyped-call]
    if coming is None or here is None:
        return copies
    return _through(copies, target, lambda tensors: Passing.apply(coming.incoming, here, *tensors))  # type: ignore[no-untyped-call]


def _through(values: Sequence[Any], device: torch.device, step: Any) -> tuple[Any, ...]:
    """`values` with those tensors that lie on `device` taken through a step, all at once."""
    where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and is_same_place(v.device, device)]
    found = list(values)
    if where:
        for i, tensor in zip(where, step([values[i] for i in where]), strict=True):
            found[i] = tensor
    return tuple(found)
