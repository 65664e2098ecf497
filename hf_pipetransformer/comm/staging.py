"""Between host and device without waiting: pinned memory, and copies beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch


T = TypeVar("T")


def is_apart(device: torch.device) -> bool:
    """Whether a device computes on its own time, so that the host waits when it reads from it."""
    return device.type == "cuda"


def pinned(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose CPU tensors lie in pinned memory, from which a device reads while the host goes on.

    A placeholder, whose elements share one memory cell, stays one.
    """
    return {key: _pinned(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_placeholder = tensor.numel() > 1 and not any(tensor.stride())
    return tensor if is_placeholder or is_apart(tensor.device) or tensor.is_pinned() else tensor.pin_memory()


def host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host to send values of a tensor's shape and dtype from, again and again."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_apart(tensor.device))


class Arriving(Generic[T]):
    """What a copy brings.

    Args:
        value: a tensor, or a container of tensors, that may not be whole yet.
        event: passes when it is; None if it is already.
    """

    def __init__(self, value: T, event: Any = None) -> None:
        self._value = value
        self._event = event

    def on_host(self) -> T:
        """Wait for a copy to the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._value

    def on_device(self) -> T:
        """Let the device's own work wait for a copy to it; the host goes on."""
        if self._event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._event)
            for tensor in _tensors(self._value):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self._value


class CopyStream:
    """Copies between host and device beside the computation; on the CPU everything is there at once.

    Args:
        device: where the computation is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_apart = is_apart(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, make: Callable[[], T]) -> Arriving[T]:
        """Begin what `make` asks of the device; it sees all that was computed up to now."""
        with self._after_what_was_asked():
            return Arriving(make(), self._event())

    def to_host(self, tensor: torch.Tensor) -> Arriving[torch.Tensor]:
        """Begin to copy a tensor of the device to pinned memory."""
        if not self._is_apart:
            return Arriving(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._after_what_was_asked():
            host.copy_(tensor, non_blocking=True)
            if self._stream is not None:
                tensor.record_stream(self._stream)
            return Arriving(host, self._event())

    def _after_what_was_asked(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []
