"""Workers, one a device, and the streams that they copy on."""

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
    """Threads that live from the first to the last line of a `with`. The calling thread works for `own` itself.

    Args:
        devices: which get a thread.
        own: the device whose tasks run in the calling thread.
    """

    def __init__(self, devices: Sequence[torch.device], own: torch.device) -> None:
        self.own = own
        self._devices = set(devices)
        self._queues: dict[torch.device, SimpleQueue[tuple[Future[None], Task] | None]] = {
            device: SimpleQueue() for device in devices if device != own
        }
        self._threads: list[Thread] = []

    def __enter__(self) -> Workers:
        for device, queue in self._queues.items():
            # A context can be entered by one thread at a time.
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
        """Have each device do its tasks, those of one device in this order; return when all are done.

        Raises:
            BaseException: the first that a task raised. Tasks that have not begun are dropped then.
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
            # An error's frames are kept with it: what they name would live as long.
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
            # Whoever waits for a task has to hear of it.
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
                # A reference from the thread's frame would keep the error's own frames, and the tensors in them.
                future.set_exception(error)
                del error
            else:
                future.set_result(None)
            del entry, future, task


class _ThreadState:
    """What torch keeps for each thread, as it is in the calling one.

    Args:
        device: that the thread is for.
        devices: those of the pipeline. Others stay as they are: a GPU takes memory at the first look.
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
        """Inside, the thread is in this state."""
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
