"""Asynchronous copies between host and device, and masks of which the host needs no copy back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map_only


T = TypeVar("T")


def is_apart(device: torch.device) -> bool:
    """Return True if the device runs asynchronously, where reading from it makes the host wait."""
    return device.type == "cuda"


def pinned(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with its CPU tensors in pinned memory, except placeholders (expanded, stride 0)."""
    found: dict[str, Any] = tree_map_only(torch.Tensor, _pinned, dict(batch))
    return found


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # Pinning copies, and a copy of a placeholder has memory for each of its elements.
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
        # An event orders this stream after the copy alone, not after all that the copy stream has queued.
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
        # Into pageable memory the copy would make the host wait.
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
        # What the copy reads may still be computed by kernels that were queued before.
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


class KnownMask(torch.Tensor):
    """Attention mask on the device that the host knows too.

    Each forward of transformers asks if a mask hides anything (`all`, or `sum` compared with its size). On a later
    stage the host would wait for the stages below; this tensor answers from the batch that was copied.
    """

    on_host: torch.Tensor
    """The same mask, in any shape and dtype."""
    known_version: int

    @staticmethod
    def of(mask: torch.Tensor, on_host: torch.Tensor) -> KnownMask:
        # Here and below: the operations would otherwise call `__torch_function__` again.
        with torch._C.DisableTorchFunctionSubclass():
            known = mask.as_subclass(KnownMask)
            known.on_host, known.known_version = on_host, mask._version
        return known

    def rows(self, rows: torch.Tensor, there: torch.Tensor) -> KnownMask:
        """Return the samples at the positions `rows`, which are on the device in `there`."""
        with torch._C.DisableTorchFunctionSubclass():
            return KnownMask.of(self[there], self.on_host[rows])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            mask = args[0] if args else None
            # A mask that was written to since is no longer the one that the host knows.
            if not isinstance(mask, cls) or mask._version != mask.known_version:
                return function(*args, **kwargs)
            if len(args) == 1 and not kwargs:
                if function is torch.Tensor.all:
                    return mask.on_host.all()
                # Of an integer mask the sum need not be the number of its entries that are not zero.
                if function is torch.Tensor.sum and mask.dtype == torch.bool:
                    return mask.on_host.count_nonzero()
            result = function(*args, **kwargs)
            # A slice of all entries has all of them; other indices could repeat some.
            is_slice = function is torch.Tensor.__getitem__ and all(isinstance(i, slice) for i in _as_tuple(args[1]))
            if (is_slice or function in _KEEPS_ENTRIES) and result.numel() == mask.numel():
                return cls.of(result, mask.on_host)
            return result


_KEEPS_ENTRIES = (torch.Tensor.to, torch.Tensor.bool, torch.Tensor.view, torch.Tensor.reshape)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
