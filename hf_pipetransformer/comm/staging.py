"""Asynchronous copies between host and device: pinned memory, and a copy stream next to the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch


T = TypeVar("T")


def is_apart(device: torch.device) -> bool:
    """Return True if the device runs asynchronously, where reading from it makes the host wait."""
    return device.type == "cuda"


def pinned(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with its CPU tensors in pinned memory, except placeholders (expanded, stride 0)."""
    return {key: _pinned(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    is_placeholder = tensor.numel() > 1 and not any(tensor.stride())
    return tensor if is_placeholder or is_apart(tensor.device) or tensor.is_pinned() else tensor.pin_memory()


def host_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory with a tensor's shape and dtype, as a reusable source of copies to its device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_apart(tensor.device))


class Arriving(Generic[T]):
    """Result of a copy that may still be running until the CUDA event passes; no event means complete."""

    def __init__(self, value: T, event: Any = None) -> None:
        self._value = value
        self._event = event

    def on_host(self) -> T:
        """Wait on the host for the copy, and return the value."""
        if self._event is not None:
            self._event.synchronize()
        return self._value

    def on_device(self) -> T:
        """Make the current stream wait for the copy, without blocking the host, and return the value."""
        if self._event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._event)
            # The tensors were allocated on the copy stream: tell the allocator that this stream uses them too.
            for tensor in _tensors(self._value):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self._value


class CopyStream:
    """Stream for copies between host and device next to the computation; on the CPU, copies complete at once."""

    def __init__(self, device: torch.device) -> None:
        self._is_apart = is_apart(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, make: Callable[[], T]) -> Arriving[T]:
        """Run `make` on the copy stream, after all work queued so far."""
        with self._after_what_was_asked():
            return Arriving(make(), self._event())

    def to_host(self, tensor: torch.Tensor) -> Arriving[torch.Tensor]:
        if not self._is_apart:
            return Arriving(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._after_what_was_asked():
            host.copy_(tensor, non_blocking=True)
            if self._stream is not None:
                # The caller may free the tensor before the copy has run.
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
