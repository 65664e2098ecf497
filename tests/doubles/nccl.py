"""Notes every collective and every transfer of a rank, as if device groups were NCCL's, for `tests.doubles.replay`.

Tests only: `tests.doubles.bootstrap` installs it before a script runs, and gloo does the work. A group made without a
backend of its own, and the world, stand for groups on NCCL; a group made with `backend="gloo"` carries control. What
NCCL refuses at once is refused here at once; what would hang is found afterwards in the notes of all ranks, by
carrying them out under NCCL's rules. Each note is on the disk before its call is made, so a rank that hangs has left
its last.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class NcclRuleError(AssertionError):
    """A call that NCCL would refuse, or answer with something else than gloo does."""


COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
)
TRANSFERS = {"isend": "send", "irecv": "receive"}
_HIDDEN = (str(Path(torch.__file__).parent), __file__, "errors.py", "transfers.py")

is_on_host: Callable[[torch.Tensor], bool] | None = None
"""Which of the tensors, all of them on the CPU, lie on the host in a run on devices; None leaves that unchecked."""


class Recorder:
    """The notes of one rank, one line of JSON each.

    Args:
        folder: where each rank writes `rank<r>.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()
        self.num_worlds = 0
        self.known: dict[str, bool] = {}
        self.file: Any = None
        self.lock = threading.Lock()
        self.inside = threading.local()

    def restart(self, folder: Path) -> None:
        """Write what follows to another folder; of groups that are made before, nothing is known there."""
        self.folder, self.file, self.known = folder, None, {}

    def group_of(self, group: Any) -> tuple[str, bool]:
        """The name that all members know a group by, and whether it stands for one on NCCL."""
        group = dist.group.WORLD if group is None else group
        name = f"{self.num_worlds}.{group.group_name}"
        if name not in self.known:
            self.add_group(group, is_device=group is dist.group.WORLD)
        return name, self.known[name]

    def add_group(self, group: Any, is_device: bool) -> None:
        name = f"{self.num_worlds}.{group.group_name}"
        self.known[name] = is_device
        self.write({"group": name, "ranks": dist.get_process_group_ranks(group), "is_device": is_device})

    def post(self, kind: str, group: Any, **details: Any) -> int:
        """Note that an operation is about to be issued; returns its number."""
        name, is_device = self.group_of(group)
        number = next(self.numbers)
        self.write({"post": number, "kind": kind, "on": name, "at": _site(), **details})
        return number

    def wait(self, number: int) -> None:
        """Note that the host is about to wait for an operation."""
        self.write({"wait": number})

    def write(self, note: dict[str, Any]) -> None:
        with self.lock:
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = (self.folder / f"rank{dist.get_rank()}.jsonl").open("a", buffering=1)
            self.file.write(json.dumps({**note, "thread": threading.get_ident()}) + "\n")


class _Noted:
    """A work handle whose waits are noted."""

    def __init__(self, work: Any, recorder: Recorder, number: int) -> None:
        self._work, self._recorder, self._number = work, recorder, number

    def wait(self, *limit: Any, **options: Any) -> Any:
        self._recorder.wait(self._number)
        return self._work.wait(*limit, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def install(folder: Path) -> Recorder:
    """Put the notes between the callers of `torch.distributed` and torch, for the rest of this process."""
    recorder = Recorder(folder)
    for name in COLLECTIVES:
        _replace(name, lambda real, name=name: _collective(recorder, name, real))
    for name in TRANSFERS:
        _replace(name, lambda real, name=name: _transfer(recorder, TRANSFERS[name], real))
    _replace("batch_isend_irecv", lambda real: _batch(recorder, real))
    _replace("new_group", lambda real: _new_group(recorder, real))
    _replace("init_process_group", lambda real: _new_world(recorder, real))
    return recorder


def _replace(name: str, double: Callable[[Any], Any]) -> None:
    real = getattr(c10d, name)
    replaced = double(real)
    replaced.__name__ = name
    for module in (c10d, dist):
        setattr(module, name, replaced)


def _new_world(recorder: Recorder, real: Any) -> Any:
    def init_process_group(*args: Any, **options: Any) -> Any:
        recorder.num_worlds += 1
        return real(*args, **options)

    return init_process_group


def _new_group(recorder: Recorder, real: Any) -> Any:
    signature = inspect.signature(real)

    def new_group(*args: Any, **options: Any) -> Any:
        group = real(*args, **options)
        if isinstance(group, dist.ProcessGroup):
            recorder.add_group(group, is_device=signature.bind(*args, **options).arguments.get("backend") is None)
        return group

    return new_group


def _collective(recorder: Recorder, name: str, real: Any) -> Any:
    signature = inspect.signature(real)

    def collective(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        group = given.get("group")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return real(*args, **options)
        tensors = [t for value in given.values() for t in (value if isinstance(value, list) else [value])]
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        _check_side(recorder, name, group, tensors)
        root = next(
            (given[key] for key in ("src", "dst", "group_src", "group_dst") if given.get(key) is not None), None
        )
        own = given.get("tensor", given.get("input_tensor", given.get("input")))
        own = own if isinstance(own, torch.Tensor) else (tensors[0] if tensors else None)
        number = recorder.post(
            name,
            group,
            root=root,
            reduction=str(given["op"]) if "op" in given else None,
            content=None if own is None else _content(own),
        )
        if given.get("async_op"):
            return _Noted(real(*args, **options), recorder, number)
        recorder.wait(number)
        return real(*args, **options)

    return collective


def _transfer(recorder: Recorder, way: str, real: Any) -> Any:
    signature = inspect.signature(real)

    def transfer(*args: Any, **options: Any) -> Any:
        if getattr(recorder.inside, "batch", False):
            return real(*args, **options)
        given = signature.bind(*args, **options).arguments
        group = given.get("group")
        part = _part(recorder, way, given["tensor"], group, given, given.get("tag", 0))
        number = recorder.post("unbatched", group, parts=[part])
        return _Noted(real(*args, **options), recorder, number)

    return transfer


def _batch(recorder: Recorder, real: Any) -> Any:
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        group = p2p_op_list[0].group
        parts = [
            _part(recorder, TRANSFERS[op.op.__name__], op.tensor, op.group, {"dst": op.peer}, op.tag)
            for op in p2p_op_list
        ]
        number = recorder.post("batch", group, parts=parts)
        recorder.inside.batch = True
        try:
            works = real(p2p_op_list)
        finally:
            recorder.inside.batch = False
        return [_Noted(work, recorder, number) for work in works]

    return batch_isend_irecv


def _part(recorder: Recorder, way: str, tensor: torch.Tensor, group: Any, given: Any, tag: int) -> list[Any]:
    _, is_device = recorder.group_of(group)
    if is_device and tag:
        raise NcclRuleError(f"rank {dist.get_rank()}: tag {tag} of a {way} at {_site()}; NCCL has no tags.")
    _check_side(recorder, way, group, [tensor])
    peer = next((given[key] for key in ("dst", "src") if given.get(key) is not None), None)
    if peer is None:
        within = next((given[key] for key in ("group_dst", "group_src") if given.get(key) is not None), None)
        if within is None:
            raise NcclRuleError(f"rank {dist.get_rank()}: a receive from any rank at {_site()}; NCCL has none.")
        peer = dist.get_global_rank(group or dist.group.WORLD, within)
    return [way, peer, *_content(tensor)]


def _check_side(recorder: Recorder, kind: str, group: Any, tensors: list[torch.Tensor]) -> None:
    name, is_device = recorder.group_of(group)
    if is_on_host is None:
        return
    for tensor in tensors:
        if is_device and is_on_host(tensor):
            raise NcclRuleError(
                f"rank {dist.get_rank()}: {kind} of a CPU tensor of {tensor.numel()} {tensor.dtype} on device group "
                f"{name} at {_site()}; NCCL takes device tensors only."
            )


def _content(tensor: torch.Tensor) -> list[Any]:
    return [tensor.numel(), str(tensor.dtype).removeprefix("torch.")]


def _site() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN[:2]):
        frame = frame.f_back
    while frame.f_back is not None and os.path.basename(frame.f_code.co_filename) in _HIDDEN[2:]:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
