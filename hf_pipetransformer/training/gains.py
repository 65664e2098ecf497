"""Attributes that a user's loss keeps on the trainer of the last stage, for every rank before Trainer logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from transformers import Trainer

from hf_pipetransformer.comm.transfers import pack
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.compat.trainer_compat import with_attributes
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups, Topology


_LARGEST = 2**20
"""Number of elements up to which a tensor is sent."""


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
        self._changed: set[str] = set()
        self._has_warned = False
        is_own = trainer_compat.is_overridden(trainer, "compute_loss")
        self._is_watching = is_own or trainer.compute_loss_func is not None

    def note_log(self, logs: dict[str, float]) -> None:
        """Keep a log entry that the loss makes inside a step, for all ranks to log."""
        state = self._trainer.state
        self._entries.append({"logs": dict(logs), "step": state.global_step, "epoch": state.epoch})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which attributes of the trainer a loss changes inside; not if it leaves with an exception."""
        if not self._is_watching or self._topology.world_size == 1:
            yield
            return
        before = self._digests()
        yield
        self._changed |= {name for name, digest in self._digests().items() if digest != before.get(name)}

    def share(self, groups: PipelineGroups) -> None:
        """Bring what the loss has left on the last stage to all ranks. Collective: call on every rank."""
        if groups.pipeline_size == 1 or not self._is_watching:
            return
        trainer, own = self._trainer, vars(self._trainer)
        message: dict[str, Any] | None = None
        if is_source := groups.is_last and groups.replica == 0:
            trees = {name: as_tree(own[name]) for name in sorted(self._changed & own.keys())}
            unseen = [f"self.{name} ({type(own[name]).__name__})" for name, tree in trees.items() if tree is _NO_TREE]
            attributes = {name: tree for name, tree in trees.items() if tree is not _NO_TREE}
            message = {"attributes": attributes, "entries": self._entries, "unseen": unseen}
        # A gather, by which every rank learns the source as well: the warning of rank 0 names it.
        messages = self._topology.gather(message)
        source, message = next((rank, each) for rank, each in enumerate(messages) if each is not None)
        if not is_source:
            for name, value in message["attributes"].items():
                _put(own, name, value)
        if message["unseen"] and not self._has_warned and self._topology.rank == 0:
            logger.warning(
                f"compute_loss uses {' and '.join(message['unseen'])}. With several stages only the process of the "
                f"last one (rank {source}) sees it change: keep numbers, tensors, lists or dicts of them on the "
                "trainer, which every process gets after each batch, or read it on that rank."
            )
        self._has_warned |= bool(message["unseen"])
        self._entries, self._changed = [], set()
        state, control = trainer.state, trainer.control
        for entry in message["entries"]:
            # As at an earlier moment. Trainer's `on_log` clears the flag that an entry is due.
            place = with_attributes(state, {"global_step": entry["step"], "epoch": entry["epoch"]})
            with place, with_attributes(control, {"should_log": control.should_log}):
                trainer.log(entry["logs"])

    def _digests(self) -> dict[str, int]:
        """Return a digest of what each attribute holds that Trainer has not for its own work."""
        own = vars(self._trainer).items()
        known = {*trainer_compat.NOT_OF_A_LOSS}
        if trl_compat.metrics(self._trainer) is not None:
            known.update(trl_compat.RECORDED)
        # By content, as a loss may append to the same list at each step.
        return {name: _digest(value) for name, value in own if name not in known}


def _digest(value: Any) -> int:
    """Return a digest of a value that can be sent; of another object, of its attributes that can."""
    tree = as_tree(value)
    if tree is _NO_TREE:
        trees = {name: as_tree(each) for name, each in getattr(value, "__dict__", {}).items()}
        tree = {name: each for name, each in trees.items() if each is not _NO_TREE}
    return int(xxhash.xxh64_intdigest(pack([tree]).numpy().tobytes()))


_NO_TREE = object()


def as_tree(value: Any) -> Any:
    """Return a value as a tree that can be sent, of numbers, strings, tensors, lists and dicts; else `_NO_TREE`."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        # Large tensors are rather parts of the loss than values of the log, and would go to all ranks at each entry.
        return value.detach().cpu() if value.numel() <= _LARGEST and not value.is_meta else _NO_TREE
    if isinstance(value, (list, tuple, deque)):
        items = [as_tree(item) for item in value]
        return _NO_TREE if any(item is _NO_TREE for item in items) else items
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        tree = {key: as_tree(item) for key, item in value.items()}
        return _NO_TREE if any(item is _NO_TREE for item in tree.values()) else tree
    return _NO_TREE


def _put(own: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, in the list or dict that is there: it may have a default factory or a limit."""
    # The user's code may hold the same list or dict under another name.
    present = own.get(name)
    if isinstance(present, (list, deque)) and isinstance(value, list):
        present.clear()
        present.extend(value)
    elif isinstance(present, dict) and isinstance(value, dict):
        present.clear()
        present.update(value)
    else:
        own[name] = tuple(value) if isinstance(present, tuple) and isinstance(value, list) else value
