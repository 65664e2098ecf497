"""Worker threads, one per device, and transfers between devices on separate CUDA streams.

Copies overlap with computation; CUDA events order them. The transfers are autograd functions: gradients return on the
same streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch


Task = Callable[[], None]


class Workers:
    """Pool of one thread per device for the duration of a `with` block; the calling thread runs the tasks of `own`."""

    def __init__(self, devices: Sequence[torch.device], own: torch.device) -> None:
        self.own = own
        self._devices = set(devices)
        self._queues: dict[torch.device, SimpleQueue[tuple[Future[None], Task] | None]] = {
            device: SimpleQueue() for device in devices if device != own
        }
        self._threads: list[Thread] = []

    def __enter__(self) -> Workers:
        for device, queue in self._queues.items():
            # A copy for each thread: a context can be entered by one thread at a time.
            context, state = copy_context(), _ThreadState(device, self._devices)
            thread = Thread(target=context.run, args=(_work, queue, state), name=f"pipe-{device}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def run(self, tasks: Sequence[tuple[torch.device, Task]]) -> None:
        """Run the tasks, devices in parallel and each device's tasks in order, and return when all are done.

        Raises:
            BaseException: an error of a task. Tasks that have not started are dropped.
        """
        if not self._queues:
            for _, task in tasks:
                task()
            return
        futures: list[Future[None]] = []
        try:
            for device, task in tasks:
                if device != self.own:
                    futures.append(Future())
                    self._queues[device].put((futures[-1], task))
            for device, task in tasks:
                if device == self.own:
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
    errors = [error for error in (each.exception() for each in done) if error is not None]
    done.clear()
    if errors:
        raise errors.pop(0)


def _work(queue: SimpleQueue[tuple[Future[None], Task] | None], state: _ThreadState) -> None:
    with ExitStack() as stack:
        try:
            stack.enter_context(state.entered())
        except BaseException as error:
            # Fail all tasks with this error: if the thread just ended, the caller would wait forever.
            while (entry := queue.get()) is not None:
                if entry[0].set_running_or_notify_cancel():
                    entry[0].set_exception(error)
            return
        while (entry := queue.get()) is not None:
            future, task = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task()
            except BaseException as error:
                # A reference left in this frame would keep the error's frames, and the tensors in them.
                future.set_exception(error)
                del error
            else:
                future.set_result(None)
            # queue.get() blocks next; do not keep the last task's tensors meanwhile.
            del entry, future, task


class _ThreadState:
    """Thread-local torch state of the calling thread, for another one: grad mode, autocast, default device, streams.

    Only streams of the pipeline's `devices` are read: the first use of a GPU allocates memory on it.
    """

    def __init__(self, device: torch.device, devices: Iterable[torch.device]) -> None:
        self.device = device
        self._is_inference, self._is_grad_enabled = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        kinds = [kind for kind in {"cpu", device.type} if torch.amp.is_autocast_available(kind)]
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._autocast_caches = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._streams = [torch.cuda.current_stream(each) for each in devices if each.type == "cuda"]

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            contexts: list[Any] = [torch.inference_mode(self._is_inference)]
            contexts += [torch.set_grad_enabled(self._is_grad_enabled)]
            contexts += [
                torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._autocast_caches)
                for kind, (is_enabled, dtype) in self._autocast.items()
            ]
            contexts += [torch.cuda.stream(stream) for stream in self._streams]
            contexts += [] if self._default_device == torch.device("cpu") else [self._default_device]
            if self.device.type == "cuda":
                contexts.append(torch.cuda.device(self.device))
            for context in contexts:
                stack.enter_context(context)
            yield


class Stream(Protocol):
    """Methods of `torch.cuda.Stream` that transfers use."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None: ...


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


def _used_on(stream: Any, tensors: Sequence[torch.Tensor | None]) -> None:
    """Keep the caching allocator from reusing the memory of `tensors` before the stream is done with them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


def _marked(ctx: Any, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Mark outputs as non-differentiable where the input needs no gradient."""
    # forward takes two arguments before the tensors.
    needed = ctx.needs_input_grad[2:]
    ctx.mark_non_differentiable(*(output for output, is_needed in zip(outputs, needed, strict=True) if not is_needed))
    return tuple(outputs)


@dataclass(eq=False)
class Journey:
    """Transfer of tensors between two devices, ordered by CUDA events. `target` is known on arrival only.

    Events: `ready` and `arrived` for activations, `gradient is ready` and `returned` for gradients.
    """

    source: torch.device
    target: torch.device | None = None
    events: dict[str, Any] = field(default_factory=dict)

    def note(self, what: str, stream: Stream | None) -> None:
        """Record the event `what` on the stream."""
        if stream is not None:
            self.events[what] = stream.record_event()

    def wait(self, what: str, stream: Stream | None, tensors: Sequence[torch.Tensor | None]) -> None:
        """Make later work of the stream wait for the event `what`, and let it use the tensors."""
        if stream is not None:
            if what in self.events:
                stream.wait_event(self.events[what])
            _used_on(stream, tensors)

    def lanes(self) -> tuple[Stream | None, Stream | None]:
        """Return the outgoing stream of the source and the incoming one of the target."""
        assert self.target is not None
        leaving, coming = lanes(self.source), lanes(self.target)
        return leaving and leaving.outgoing, coming and coming.incoming


class Departing(torch.autograd.Function):
    """Source end: forward records that the tensors are ready, backward waits for their gradients."""

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
    """Middle: forward copies tensors to the target, backward copies gradients to the source."""

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
    """Target end: forward waits for the copies, backward records that their gradients are ready."""

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
        # The host reads a CPU tensor without waiting for a stream: that copy must block.
        return tensor.to(target, non_blocking=target.type != "cpu")


@contextmanager
def on_streams(streams: Sequence[Any]) -> Iterator[None]:
    """Run this thread's work on each stream's device on that stream. The current device is restored on exit."""
    if not streams:
        yield
        return
    with torch.cuda.device(torch.cuda.current_device()), torch.cuda.stream(streams[0]), on_streams(streams[1:]):
        yield


class Departed(NamedTuple):
    """Values that a stage has sent."""

    values: tuple[Any, ...]
    journey: Journey


def depart(values: Sequence[Any], source: torch.device) -> Departed:
    """Mark a stage's `values` as ready for a transfer. Call in the thread that has just computed them."""
    journey, here = Journey(source), computing(source)
    if here is None:
        return Departed(tuple(values), journey)
    return Departed(_through(values, source, lambda tensors: Departing.apply(journey, here, *tensors)), journey)  # type: ignore[no-untyped-call]


def arrive(departed: Departed, target: torch.device) -> tuple[Any, ...]:
    """Return the values on `target`, wherever they are. Call in the thread that is about to run the next stage."""
    (values, journey), here = departed, computing(target)
    if not is_same_place(journey.source, target):
        values = _through(values, journey.source, lambda tensors: Copying.apply(journey, target, *tensors))  # type: ignore[no-untyped-call]
        if here is not None:
            values = _through(values, target, lambda tensors: Arriving.apply(journey, here, *tensors))  # type: ignore[no-untyped-call]
    if all(not isinstance(value, torch.Tensor) or is_same_place(value.device, target) for value in values):
        return values
    return tuple(value.to(target) if isinstance(value, torch.Tensor) else value for value in values)


def _through(values: Sequence[Any], device: torch.device, step: Any) -> tuple[Any, ...]:
    """Apply `step` to all distinct tensors of `values` on `device` in one call, and put the results in their place."""
    found = {id(v): v for v in values if isinstance(v, torch.Tensor) and is_same_place(v.device, device)}
    if not found:
        return tuple(values)
    results = dict(zip(found, step(list(found.values())), strict=True))
    return tuple(results.get(id(value), value) for value in values)
