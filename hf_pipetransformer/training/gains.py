"""Attributes that a user's loss keeps on the trainer of the last stage, for every rank before Trainer logs."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import Trainer

from hf_pipetransformer.comm.transfers import pack
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology


_LARGEST = 2**20
"""Number of elements up to which a tensor is sent."""


class LossGains:
    """Attributes and log entries that a user's `compute_loss` makes on the one rank that gets to its end.

    The usual recipe for several losses keeps their values on the trainer, and adds their means in `log`; another one
    calls `self.log` inside. With several stages only the last one computes the loss, and rank 0 logs.
    """

    def __init__(self, trainer: Trainer, topology: Topology) -> None:
        self._trainer = trainer
        self._topology = topology
        self._of_trainers = _stored_by_trainers(type(trainer))
        self._of_loss = _named_by_loss(type(trainer))
        self._entries: list[dict[str, Any]] = []
        self._has_warned = False
        self.begin()

    def begin(self) -> None:
        """Note what the trainer has before a training or an evaluation: ranks may have been given other values."""
        self._known: dict[str, int | None] = self._digests()

    def note_log(self, logs: dict[str, float]) -> None:
        """Keep a log entry that the loss makes inside a step, for all ranks to log."""
        state = self._trainer.state
        self._entries.append({"logs": dict(logs), "step": state.global_step, "epoch": state.epoch})

    def share(self, is_source: bool) -> None:
        """Bring what the loss has left on the one rank with `is_source` to all. Collective: call on every rank."""
        trainer, own = self._trainer, vars(self._trainer)
        message: dict[str, Any] | None = None
        if is_source:
            changed = {name: own[name] for name, digest in self._digests().items() if digest != self._known.get(name)}
            trees = {name: tree for name, value in changed.items() if (tree := as_tree(value)) is not _NO_TREE}
            message = {"attributes": trees, "entries": self._entries, "unseen": self._unseen()}
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
                "trainer, which every process gets before an entry is logged, or read it on that rank."
            )
        self._has_warned = True
        self._entries = []
        for entry in message["entries"]:
            with self._at(entry["step"], entry["epoch"]):
                trainer.log(entry["logs"])
        self._known = self._digests()

    @contextmanager
    def _at(self, step: int, epoch: float | None) -> Iterator[None]:
        """Log as at an earlier moment; the entry that Trainer is about to log stays due."""
        state, control = self._trainer.state, self._trainer.control
        # Trainer's `on_log` clears the flag that an entry is due.
        before = state.global_step, state.epoch, control.should_log
        state.global_step, state.epoch = step, epoch
        try:
            yield
        finally:
            state.global_step, state.epoch, control.should_log = before

    def _digests(self) -> dict[str, int | None]:
        """Return a digest of each attribute that the user's code has set; None of what cannot be sent."""
        found: dict[str, int | None] = {}
        for name, value in vars(self._trainer).items():
            if name in self._of_loss - self._of_trainers and name not in trainer_compat.NOT_OF_A_LOSS:
                tree = as_tree(value)
                # By content, as a loss may append to the same list at each step.
                found[name] = None if tree is _NO_TREE else xxhash.xxh64_intdigest(pack([tree]).numpy().tobytes())
        return found

    def _unseen(self) -> list[str]:
        """Name the objects on the trainer that the loss uses, which may change and cannot be sent."""
        own = vars(self._trainer)
        return [
            f"self.{name} ({type(own[name]).__name__})"
            for name, digest in sorted(self._digests().items())
            if digest is None and not _is_constant(own[name])
        ]


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


def _is_constant(value: Any) -> bool:
    # A metric of torchmetrics is a module that can be called, and yet changes with each batch.
    is_metric = type(value).__module__.partition(".")[0] == "torchmetrics"
    return callable(value) and not is_metric or isinstance(value, nn.Module) and not is_metric


def _named_by_loss(kind: type) -> set[str]:
    """Return the names in the code of a user's `compute_loss`, and of the methods of the user's that it names."""
    methods: dict[str, list[FunctionType]] = {}
    for each in kind.__mro__:
        if not (trainer_compat.is_known_code(each) or trainer_compat.is_own(each)):
            for name, value in vars(each).items():
                if isinstance(value, FunctionType):
                    methods.setdefault(name, []).append(value)
    names, new = set[str](), {"compute_loss"}
    while new:
        names |= new
        found = {
            name
            for each in new
            for method in methods.get(each, ())
            for name in trainer_compat.names_in(method.__code__)
        }
        new = found - names
    return names


def _stored_by_trainers(kind: type) -> set[str]:
    """Return the names of attributes that code of Trainer, of TRL's trainers or of this package sets."""
    known = [each for each in kind.__mro__ if trainer_compat.is_known_code(each) or trainer_compat.is_own(each)]
    return {"pipeline_run"}.union(*map(_stored_by, known))


@cache
def _stored_by(kind: type) -> frozenset[str]:
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    steps = (step for call in functions for step in dis.get_instructions(call))
    return frozenset(str(step.argval) for step in steps if step.opname == "STORE_ATTR")
