"""CPU tensors that stand for tensors of a device, and a note of every call that would make the host wait for it.

What is put on `DEVICE`, and all that is computed from it, counts as lying there; everything else lies on the host. A
tensor says so itself (`tensor.device`). Noted are reads (`item`, `bool`, `tolist`, `numpy`, `cpu`, a copy to the host
that is not pinned or not asynchronous), operations whose result has a size that the device finds (`nonzero`, `unique`,
indexing with a mask), comparisons that return a bool (`equal`), and blocking copies from the host, also those of a
`torch.tensor(..., device=...)` and of an index that lies on the host. A mixture that a device would refuse is noted
too. Other threads than the one that trains may wait.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pipetransformer.comm import staging


# Torch hands the index through to every operation, and drops it from the tensors.
DEVICE = torch.device("cpu", 0)
HOST = torch.device("cpu")

_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
_SIZED_BY_DEVICE = {
    *("aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim"),
    *("aten::unique_consecutive", "aten::repeat_interleave"),
}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_TORCH, "contextlib.py", __file__)
_NUM_FRAMES = 3


class _Storages:
    """A set of memory blocks that forgets those that are gone."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._limit = 1024

    def add(self, tensor: torch.Tensor) -> None:
        # The weak reference keeps the address from being used again.
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)
        if len(self._known) > self._limit:
            self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
            self._limit = 2 * len(self._known) + 1024

    def discard(self, tensor: torch.Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known


class DeviceStandIn:
    """Where tensors lie, and what was noted.

    Attributes:
        waits: each call at which the host would wait, with the places in the code that it came from.
        mixtures: operations on tensors of both sides.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.mixtures: list[str] = []
        self.on_device = _Storages()
        self.pinned = _Storages()
        self.is_quiet = False

    def taken(self) -> list[str]:
        """The calls since this was last asked."""
        waits, self.waits = self.waits, []
        return waits

    def note(self, what: str) -> None:
        self.waits.append(f"{what} at {_site()}")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Tensors are watched inside, in this thread, and the package takes `DEVICE` for one that computes apart."""
        is_apart, pin_memory = staging.is_apart, torch.Tensor.pin_memory
        replaced = list(_replace(is_apart, lambda device: device == DEVICE))
        # Threads that read ahead pin too; they have no modes.
        torch.Tensor.pin_memory = lambda tensor, *_: self._pinned(tensor)  # type: ignore[method-assign]
        try:
            with _Calls(self), _Operations(self):
                yield
        finally:
            torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
            for module, name in replaced:
                setattr(module, name, is_apart)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self.pinned.add(copy)
        return copy


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Wherever the package imported a function to."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_pipetransformer"):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, other)
                    yield module, key


def _site() -> str:
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not any(frame.filename.startswith(name) or frame.filename.endswith(name) for name in _LIBRARIES)
    ]
    return " < ".join(f"{_short(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames[-_NUM_FRAMES:]))


def _short(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-3:])


def _asked_by_torch() -> bool:
    """Whether torch's own Python code makes the call: it knows a tensor's device without the index.

    A module hands on the device that it is asked for.
    """
    name = sys._getframe(3).f_code.co_filename
    return name.startswith(_TORCH) and not name.endswith("modules/module.py")


def _side(device: Any) -> bool | None:
    """Whether an argument names the device; None if it names nothing."""
    if device is None:
        return None
    return torch.device(device) == DEVICE


class _Calls(TorchFunctionMode):
    """Python's own calls: those that name a device, and reads that no operation shows."""

    def __init__(self, stand_in: DeviceStandIn) -> None:
        super().__init__()
        self.noted = stand_in

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        own = _OWN.get(function)
        if own is not None:
            return own(self.noted, function, args, kwargs)
        if kwargs.pop("pin_memory", False):
            result = function(*args, **kwargs)
            self.noted.pinned.add(result)
            return result
        return function(*args, **kwargs)


def _device(noted: DeviceStandIn, function: Any, args: Any, kwargs: Any) -> Any:
    return DEVICE if args[0] in noted.on_device else function(*args, **kwargs)


def _moved(noted: DeviceStandIn, function: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.to` in all its forms, and `Tensor.cpu`."""
    tensor = args[0]
    was = tensor in noted.on_device
    goes: bool | None = False if function is torch.Tensor.cpu else None
    for value in [*args[1:2], kwargs.get("device"), kwargs.get("other")]:
        if isinstance(value, torch.Tensor):
            goes = value in noted.on_device
        elif isinstance(value, (str, torch.device)):
            goes = _side(value)
    if goes is None or goes == was or _asked_by_torch():
        return _within(noted, was, function, args, kwargs)
    asynchronous = bool(kwargs.get("non_blocking")) and goes
    if not asynchronous:
        noted.note("copy to the device" if goes else "copy to the host")
    return _within(noted, goes, lambda: function(*args, **kwargs).clone(), (), {})


def _within(noted: DeviceStandIn, side: bool, function: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call lies on one side, whatever the operations in it look like."""
    before, noted.is_quiet = noted.is_quiet, True
    try:
        result = function(*args, **kwargs)
    finally:
        noted.is_quiet = before
    (noted.on_device.add if side else noted.on_device.discard)(result)
    return result


def _read(noted: DeviceStandIn, function: Any, args: Any, kwargs: Any) -> Any:
    if args[0] in noted.on_device:
        noted.note(f"read by {function.__name__}")
    before, noted.is_quiet = noted.is_quiet, True
    try:
        return function(*args, **kwargs)
    finally:
        noted.is_quiet = before


def _made(noted: DeviceStandIn, function: Any, args: Any, kwargs: Any) -> Any:
    """`torch.tensor`, `as_tensor`, `new_tensor`: numbers from the host."""
    side = _side(kwargs.get("device"))
    if side is None and function is torch.Tensor.new_tensor:
        side = args[0] in noted.on_device
    given = args[-1] if args else kwargs.get("data")
    if side and not (isinstance(given, torch.Tensor) and given in noted.on_device):
        noted.note(f"copy to the device by {function.__name__}")
    return _within(noted, bool(side), function, args, kwargs)


def _is_pinned(noted: DeviceStandIn, function: Any, args: Any, kwargs: Any) -> bool:
    return args[0] in noted.pinned


_OWN: dict[Any, Callable[[DeviceStandIn, Any, Any, Any], Any]] = {
    torch.Tensor.device.__get__: _device,
    torch.Tensor.to: _moved,
    torch.Tensor.cpu: _moved,
    torch.Tensor.tolist: _read,
    torch.Tensor.numpy: _read,
    torch.Tensor.__array__: _read,
    torch.tensor: _made,
    torch.as_tensor: _made,
    torch.Tensor.new_tensor: _made,
    torch.Tensor.is_pinned: _is_pinned,
}


class _Operations(TorchDispatchMode):
    """Every operation, those of the backward too: where its results lie, and whether it waits."""

    def __init__(self, stand_in: DeviceStandIn) -> None:
        super().__init__()
        self.noted = stand_in

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [tensor in self.noted.on_device for tensor in given]
        name = function._schema.name
        if not self.noted.is_quiet:
            self._note(name, args, kwargs, given, there)
        result = function(*args, **kwargs)
        lies_there = any(there) if given else _side(kwargs.get("device")) is True
        # A copy to the host leaves its target where it was.
        if lies_there and name not in ("aten::copy_", *_READS):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.noted.on_device.add(leaf)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, given: list[torch.Tensor], there: list[bool]) -> None:
        if not any(there):
            return
        if name in _READS or name in _SIZED_BY_DEVICE:
            self.noted.note(name.removeprefix("aten::"))
        elif name == "aten::copy_":
            self._note_copy(args, kwargs)
        elif name in _INDEXED:
            self._note_index(args)
        elif name.startswith("aten::") and any(
            not is_there and tensor.dim() for tensor, is_there in zip(given, there, strict=True)
        ):
            self.noted.mixtures.append(f"{name} at {_site()}")

    def _note_copy(self, args: Any, kwargs: Any) -> None:
        to_device, from_device = (tensor in self.noted.on_device for tensor in args[:2])
        if to_device == from_device:
            return
        is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not is_asynchronous or not (to_device or args[0] in self.noted.pinned):
            self.noted.note("copy_ to the device" if to_device else "copy_ to the host")

    def _note_index(self, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.noted.note("indexing with a mask")
        elif any(index not in self.noted.on_device for index in indices):
            self.noted.note("copy of an index to the device")


class RealDevice:
    """A GPU in the place of the stand-in: torch itself warns where the host waits, though not everywhere."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.mixtures: list[str] = []

    def taken(self) -> list[str]:
        """The calls since this was last asked."""
        waits, self.waits = self.waits, []
        return waits

    @contextmanager
    def active(self) -> Iterator[None]:
        """Calls are noted inside."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _note(self, message: Warning | str, *_where: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.waits.append(f"{message} at {_site()}")
