"""Worker threads, one per device, and transfers between devices on separate CUDA streams.

Copies overlap with computation; CUDA events order them. The transfers are autograd functions: gradients return on the
same streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch

from hf_pipetransformer.pipe.micro_batches import replaced


Task = Callable[[], None]
RunTasks = Callable[[Sequence[tuple[torch.device, Task]]], None]
"""Function that runs tasks, each on the thread of its device."""


@contextmanager
def workers(devices: Iterable[torch.device], own: torch.device) -> Iterator[RunTasks]:
    """Start a thread for each device but `own`, which the calling thread serves, and end them on exit."""
    devices = set(devices)
    submit: dict[torch.device, Callable[..., Future[None]]] = {}
    with ExitStack() as stack:
        for device in devices - {own}:
            thread = stack.enter_context(ThreadPoolExecutor(1, f"pipe-{device}"))
            # A copy for each thread: a context can be entered by one thread at a time.
            submit[device] = partial(thread.submit, copy_context().run)  # type: ignore[arg-type]
            inside = ExitStack()
            # Grad mode, autocast and streams belong to a thread: the thread itself leaves them, before its pool is
            # shut down.
            stack.callback(submit[device], inside.close)
            submit[device](_TorchState(devices).enter, device, inside).result()
        yield partial(run_tasks, own, submit)


def run_tasks(
    here: torch.device,
    submit: Mapping[torch.device, Callable[[Task], Future[None]]],
    tasks: Sequence[tuple[torch.device, Task]],
) -> None:
    """Run tasks, devices in parallel and each device's tasks in order, and return when all are done.

    Args:
        here: device whose tasks the calling thread runs; `submit` hands those of another to its thread.

    Raises:
        BaseException: an error of a task. Tasks that have not started are dropped.
    """
    futures: list[Future[None]] = []
    try:
        futures += [submit[device](task) for device, task in tasks if device != here]
        for device, task in tasks:
            if device == here:
                # Look before each task: an error elsewhere ends the run before more is computed.
                _raise_first([each for each in futures if each.done()])
                task()
        wait(futures, return_when=FIRST_EXCEPTION)
        _raise_first([each for each in futures if each.done()])
    finally:
        # The error's traceback keeps this frame: empty the lists, or the frame keeps every future and task error.
        cancel = futures.copy()
        futures.clear()
        while cancel:
            cancel.pop().cancel()


def _raise_first(done: list[Future[None]]) -> None:
    # Lists are emptied and errors popped for the reason given in `run_tasks`: a frame must not keep them.
    errors = [error for error in (each.exception() for each in done) if error is not None]
    done.clear()
    if errors:
        raise errors.pop(0)


class _TorchState:
    """Thread-local torch state of the calling thread, for others: grad mode, autocast, default device, streams.

    Only streams of the pipeline's `devices` are read: the first use of a GPU allocates memory on it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._is_inference, self._is_grad_enabled = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        kinds = {kind for kind in {"cpu", *(each.type for each in devices)} if torch.amp.is_autocast_available(kind)}
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._autocast_caches = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._streams = [torch.cuda.current_stream(each) for each in devices if each.type == "cuda"]

    def enter(self, device: torch.device, stack: ExitStack) -> None:
        """Enter the state in the present thread, which serves `device`, until the stack is closed."""
        # Inference mode first: leaving it (False) turns gradients on, whatever grad mode says.
        contexts: list[Any] = [torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._is_grad_enabled)]
        contexts += [
            torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._autocast_caches)
            for kind, (is_enabled, dtype) in self._autocast.items()
        ]
        contexts += [torch.cuda.stream(stream) for stream in self._streams]
        # A default device intercepts every torch function: none is set where it is the CPU anyway.
        contexts += [] if self._default_device == torch.device("cpu") else [self._default_device]
        # Last, since entering a stream makes the stream's GPU the current one.
        contexts += [torch.cuda.device(device)] if device.type == "cuda" else []
        for context in contexts:
            stack.enter_context(context)


class Lanes(NamedTuple):
    """Copy streams of a GPU, named by the direction of activations; gradients return on the same streams."""

    incoming: torch.cuda.Stream
    outgoing: torch.cuda.Stream


_LANES: dict[torch.device, Lanes] = {}
_LANES_LOCK = Lock()


def lanes(device: torch.device) -> Lanes | None:
    """Return the copy streams of a GPU, created once; None for the CPU."""
    if device.type != "cuda":
        return None
    # The threads of all devices ask, and have to get the same two streams.
    with _LANES_LOCK:
        if device not in _LANES:
            _LANES[device] = Lanes(torch.cuda.Stream(device), torch.cuda.Stream(device))
        return _LANES[device]


def computing(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that this thread computes on; None for the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def is_same_place(one: torch.device, other: torch.device) -> bool:
    """Return True if both devices are the same. The index of a CPU device does not matter."""
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)


Events = dict[str, Any]
"""CUDA events of a transfer: `ready` and `arrived` of activations, `gradient is ready` and `returned` of gradients."""

Tensors = Sequence[torch.Tensor | None]


def _noted(events: Events, what: str, stream: Any, tensors: Tensors) -> Tensors:
    """Record the event `what` on the stream, and return the tensors."""
    if stream is not None:
        events[what] = stream.record_event()
    return tensors


def _waited(events: Events, what: str, stream: Any, tensors: Tensors) -> Tensors:
    """Make later work of the stream wait for the event `what`, and return the tensors, which it may then use."""
    if stream is not None:
        # A CPU records no events: what it hands on is complete.
        if what in events:
            stream.wait_event(events[what])
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                # Or the caching allocator reuses the memory before the stream is done with it.
                tensor.record_stream(stream)
    return tensors


def _sent(
    events: Events, begin: str, end: str, streams: tuple[Any, Any], target: torch.device, tensors: Tensors
) -> Tensors:
    """Copy tensors to `target` on the streams of both devices, after the event `begin`, and record the event `end`."""
    first, last = streams
    _waited(events, begin, first, tensors)
    copies = [None if tensor is None else _copied(tensor, target, streams) for tensor in tensors]
    return _noted(events, end, last or first, copies)


def _copied(tensor: torch.Tensor, target: torch.device, streams: tuple[Any, Any]) -> torch.Tensor:
    # A CPU's None changes nothing, and the current device is restored.
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        # The host reads a CPU tensor without waiting for a stream: that copy must block.
        return tensor.to(target, non_blocking=target.type != "cpu")


class _Passing(torch.autograd.Function):
    """Pass tensors through `there` in the forward, and their gradients through `back` in the backward."""

    @staticmethod
    def forward(
        ctx: Any, there: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.back = back
        outputs = tuple(output.detach() for output in there(tensors) if output is not None)
        needed = ctx.needs_input_grad[2:]
        # Or every output would need a gradient as soon as one input does.
        ctx.mark_non_differentiable(*(each for each, is_needed in zip(outputs, needed, strict=True) if not is_needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.back(gradients)


class Departed(NamedTuple):
    """Values that a stage has sent."""

    values: tuple[Any, ...]
    source: torch.device
    events: Events


def depart(values: Sequence[Any], source: torch.device) -> Departed:
    """Mark a stage's `values` as ready for a transfer. Call in the thread that has just computed them."""
    events, here = Events(), computing(source)
    if here is not None:
        there, back = partial(_noted, events, "ready", here), partial(_waited, events, "returned", here)
        values = _passed(values, source, there, back)
    return Departed(tuple(values), source, events)


def arrive(departed: Departed, target: torch.device) -> tuple[Any, ...]:
    """Return the values on `target`, wherever they are. Call in the thread that is about to run the next stage.

    Three autograd nodes, one for `depart` and two here: each waits for its events in the thread and on the stream of
    its device only when the backward gets there, so neither device waits for the other early.
    """
    (values, source, events), here = departed, computing(target)
    if not is_same_place(source, target):
        leaving, coming = lanes(source), lanes(target)
        out, into = leaving and leaving.outgoing, coming and coming.incoming
        there = partial(_sent, events, "ready", "arrived", (out, into), target)
        back = partial(_sent, events, "gradient is ready", "returned", (into, out), source)
        values = _passed(values, source, there, back)
        if here is not None:
            there, back = partial(_waited, events, "arrived", here), partial(_noted, events, "gradient is ready", here)
            values = _passed(values, target, there, back)
    # A stage may return tensors from another device than its own: they come without streams of their own.
    return tuple(
        value.to(target) if isinstance(value, torch.Tensor) and not is_same_place(value.device, target) else value
        for value in values
    )


def _passed(values: Sequence[Any], device: torch.device, there: Any, back: Any) -> tuple[Any, ...]:
    """Pass all distinct tensors of `values` on `device` in one node of the graph."""
    return replaced(
        values,
        lambda tensor: is_same_place(tensor.device, device),
        lambda tensors: _Passing.apply(there, back, *tensors),  # type: ignore[no-untyped-call]
    )
