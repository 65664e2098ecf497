"""A thread for each device: what one device computes does not keep another from being given its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

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
        raise errors.pop()


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
