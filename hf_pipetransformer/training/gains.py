"""Changes that a script's loss makes on the trainer of the last stage, for every rank before the next batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from transformers import Trainer

from hf_pipetransformer.cache.frozen_parts.values import version_of
from hf_pipetransformer.comm.transfers import pack
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.compat.trainer_compat import with_attributes
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups, Topology


Path = tuple[str | int, ...]
"""Names of attributes and keys of entries that lead from the trainer to a value."""

_LARGEST = 2**20
"""Number of elements up to which a tensor is sent."""
_MADE_OF: dict[type, Any] = {tuple: tuple, np.ndarray: np.asarray}
"""Kinds that are sent as lists or tensors, and what makes them of these."""


class LossGains:
    """Attributes and log entries that a user's `compute_loss` makes on the one rank that gets to its end.

    The usual recipe for several losses keeps their values on the trainer, and adds their means in `log`; another one
    calls `self.log` inside. With several stages only the last one computes the loss, and rank 0 logs. What changes
    while the loss is computed is the loss's.
    """

    def __init__(self, trainer: Trainer, topology: Topology) -> None:
        self._trainer = trainer
        self._topology = topology
        self._entries: list[dict[str, Any]] = []
        self._changed: set[Path] = set()
        self._has_warned = False
        is_own = trainer_compat.is_overridden(trainer, "compute_loss")
        self.is_of_script = topology.world_size > 1 and (is_own or trainer.compute_loss_func is not None)
        """True if the script has a loss, which may keep something that other ranks need."""

    def note_log(self, logs: dict[str, float]) -> None:
        """Keep a log entry that the loss makes inside a step, for all ranks to log."""
        state = self._trainer.state
        self._entries.append({"logs": dict(logs), "step": state.global_step, "epoch": state.epoch})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what a loss changes of the trainer inside; not if it leaves with an exception."""
        before = {path: _digest(value) for path, value in self._values()}
        yield
        self._changed |= {path for path, value in self._values() if _digest(value) != before.get(path)}

    def share(self, groups: PipelineGroups) -> None:
        """Bring what the loss has left on the last stage to all ranks. Collective: call on every rank."""
        if groups.pipeline_size == 1 or not self.is_of_script:
            return
        message: dict[str, Any] | None = None
        if is_source := groups.is_last and groups.replica == 0:
            changed = [(path, as_tree(value)) for path, value in self._values() if path in self._changed]
            unseen = [path for path, tree in changed if tree is _NO_TREE]
            sent = [[path, tree] for path, tree in changed if tree is not _NO_TREE]
            message = {"changed": sent, "entries": self._entries, "unseen": unseen}
        # A gather, by which every rank learns the source as well: the warning of rank 0 names it.
        messages = self._topology.gather(message)
        source, message = next((rank, each) for rank, each in enumerate(messages) if each is not None)
        self._entries, self._changed = [], set()
        unseen = [*message["unseen"]]
        for path, value in [] if is_source else message["changed"]:
            try:
                _put(self._trainer, path, value)
            except KeyError:  # Of an object that the loss has made on the last stage alone.
                unseen.append(path)
        if unseen and not self._has_warned and self._topology.rank == 0:
            self._has_warned = True
            names = " and ".join(sorted({"self." + ".".join(map(str, path)) for path in unseen}))
            logger.warning(
                f"compute_loss changes {names}. With several stages only the process of the last one (rank {source}) "
                "sees it: keep numbers, small tensors, lists or dicts of them on the trainer, which every process "
                "gets after each batch, or read it on that rank."
            )
        self._log(message["entries"])

    def _log(self, entries: list[dict[str, Any]]) -> None:
        state, control = self._trainer.state, self._trainer.control
        for entry in entries:
            # As at an earlier moment. Trainer's `on_log` clears the flag that an entry is due.
            place = with_attributes(state, {"global_step": entry["step"], "epoch": entry["epoch"]})
            with place, with_attributes(control, {"should_log": control.should_log}):
                self._trainer.log(entry["logs"])

    def _values(self) -> Iterator[tuple[Path, Any]]:
        """Yield what a loss may change of the trainer, by where it is: all that Trainer has not for its own work."""
        known = {*trainer_compat.NOT_OF_A_LOSS}
        if trl_compat.metrics(self._trainer) is not None:
            known.update(trl_compat.RECORDED)
        for name, value in [*vars(self._trainer).items()]:
            if name not in known:
                yield from _values_in(value, (name,))
        # Of the model's layers each stage has its own.
        yield from _values_in(getattr(self._trainer.model, "_buffers", {}), ("model", "_buffers"))


def _values_in(value: Any, path: Path, depth: int = 2) -> Iterator[tuple[Path, Any]]:
    """Yield values that can be sent and tensors, of other objects those of their attributes or entries."""
    if isinstance(value, torch.Tensor) or as_tree(value) is not _NO_TREE:
        yield path, value
    elif depth:
        for name, each in [*_entries(value).items()]:
            if isinstance(name, (str, int)):
                yield from _values_in(each, (*path, name), depth - 1)


def _entries(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


def _digest(value: Any) -> Any:
    """Return what differs once a value has changed, by content: a loss may append to the same list each time."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    tree = as_tree(value)
    # A tensor that is too large to be sent.
    if tree is _NO_TREE:
        return id(value), version_of(value)
    return int(xxhash.xxh64_intdigest(pack([tree]).numpy().tobytes()))


_NO_TREE = object()


def as_tree(value: Any) -> Any:
    """Return a value as a tree that can be sent, of numbers, strings, tensors, lists and dicts; else `_NO_TREE`."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.tensor(value)
    if isinstance(value, torch.Tensor):
        # Large tensors are rather parts of the loss than values of the log.
        return value.detach().cpu() if value.numel() <= _LARGEST and not value.is_meta else _NO_TREE
    if isinstance(value, (list, tuple, deque, set)):
        items = [as_tree(item) for item in value]
        return _NO_TREE if any(item is _NO_TREE for item in items) else items
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        tree = {key: as_tree(item) for key, item in value.items()}
        return _NO_TREE if any(item is _NO_TREE for item in tree.values()) else tree
    return _NO_TREE


def _put(owner: Any, path: Path, value: Any) -> None:
    """Set what is at a path of attributes and entries.

    Raises:
        KeyError: an object on the way is not there.
    """
    for name in path[:-1]:
        owner = _entries(owner)[name]
    _entries(owner)[path[-1]] = _as_present(_entries(owner).get(path[-1]), value)


def _as_present(present: Any, value: Any) -> Any:
    """Return a value of the kind that is there, in the container that is there.

    The user's code may hold the same container under another name, and it may have a default factory or a limit.
    """
    if isinstance(present, dict) and isinstance(value, dict):
        entries = {key: _as_present(present.get(key), each) for key, each in value.items()}
        present.clear()
        present.update(entries)
        return present
    if isinstance(present, (list, deque, set)) and isinstance(value, list):
        present.clear()
        (present.update if isinstance(present, set) else present.extend)(value)
        return present
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(present.device)
    make: Any = next((make for kind, make in _MADE_OF.items() if isinstance(present, kind)), None)
    return value if make is None or not isinstance(value, (list, torch.Tensor)) else make(value)
