"""Calls of a user's loss that leave no trace: counters, lists, logs and metrics are put back (`leaving_no_trace`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.rng import is_generator, random_state, set_random_state, set_state, state_of
from hf_pipetransformer.splitters.adapters import bare_model


_LEFT_OUT = (type, ModuleType, Dataset, PreTrainedTokenizerBase, Trainer, TrainingArguments, CodeType)
_LARGEST = 2**20
"""Number of elements up to which tensors and arrays are copied, and entries up to which containers are looked into."""
_PLAIN = (int, float, complex, str, bytes, type(None))
_DEPTH = 6


@contextmanager
def leaving_no_trace(trainer: Trainer, is_silent: bool = True) -> Iterator[None]:
    """Put back on exit what calls of the trainer's loss change: objects of the user's, logs and random states.

    Covers the trainer's attributes, the globals and closures that `compute_loss`, or the model's own code outside of
    transformers, names, and numbers kept on modules; objects in them up to a few references deep. Not covered: files,
    and what only compiled code reaches. With `is_silent`, `trainer.log` does nothing inside.
    """
    own = vars(trainer)
    # A script may have put a `log` of its own on the trainer.
    log = own.get("log")
    with ExitStack() as stack:
        kept = Kept(bare_model(trainer.model))
        kept.add_attributes(trainer, trainer_compat.NOT_OF_A_LOSS)
        for function in _functions_of(trainer):
            kept.add(function)
        kept.add_numbers_of_modules()
        stack.callback(kept.restore)
        device = trainer.args.device
        states, values = random_state(device)
        stack.callback(set_random_state, states, values, device)
        if is_silent:
            own["log"] = lambda *_args, **_kwargs: None
        try:
            yield
        finally:
            own.pop("log", None)
            if log is not None:
                own["log"] = log


class Kept:
    """State of objects as they were when added; `restore` puts it back in place, so that references stay valid."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = {id(module) for module in model.modules()}
        # Weights are large, and no loss changes them.
        self._seen |= {id(parameter) for parameter in model.parameters()}
        self._seen |= {id(buffer) for buffer in model.buffers()}
        self._alive: list[Any] = []
        """What was seen: an id is unique only as long as its object lives."""

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def add(self, value: Any, depth: int = 0) -> None:
        """Keep the state of an object, and of the objects that it refers to."""
        if isinstance(value, (*_PLAIN, *_LEFT_OUT)) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            self._add_array(value)
        elif isinstance(value, (dict, list, set, deque)) and type(value).__module__ in ("builtins", "collections"):
            self._add_container(value, depth)
        elif isinstance(value, tuple):
            self._add_all(value, depth)
        elif isinstance(value, MethodType):
            self.add(value.__self__, depth + 1)
            self.add(value.__func__, depth + 1)
        elif isinstance(value, FunctionType):
            self._add_function(value, depth)
        elif is_generator(value):
            self._undo.append(partial(set_state, value, state_of(value)))
        else:
            self.add_attributes(value, (), depth)

    def add_attributes(self, owner: Any, left_out: tuple[str, ...], depth: int = 0) -> None:
        """Keep an object's attributes, without those named in `left_out`."""
        attributes = getattr(owner, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        before = {name: value for name, value in attributes.items() if name not in left_out}

        def undo() -> None:
            for name in [name for name in attributes if name not in before and name not in left_out]:
                del attributes[name]
            attributes.update(before)

        self._undo.append(undo)
        self._add_all(before.values(), depth)

    def add_numbers_of_modules(self) -> None:
        """Keep numbers that modules of the user's own classes hold, such as a count of calls."""
        for module in self._model.modules():
            if type(module).__module__.partition(".")[0] in ("torch", "transformers", "peft", "bitsandbytes"):
                continue
            attributes = vars(module)
            numbers = {name: value for name, value in attributes.items() if type(value) in (int, float)}
            self._undo.append(partial(attributes.update, numbers))

    def _add_all(self, values: Any, depth: int) -> None:
        for value in list(values):
            self.add(value, depth + 1)

    def _add_container(self, value: Any, depth: int) -> None:
        before = value.copy()

        def undo() -> None:
            # In place, for others may refer to the same container.
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)

        self._undo.append(undo)
        if len(value) <= _LARGEST:
            self._add_all(value.values() if isinstance(value, dict) else value, depth)

    def _add_tensor(self, value: torch.Tensor) -> None:
        if value.numel() <= _LARGEST and not value.requires_grad and not value.is_meta:
            before = value.clone()

            @torch.no_grad()
            def undo() -> None:
                value.copy_(before)

            self._undo.append(undo)

    def _add_array(self, value: np.ndarray) -> None:
        if value.size <= _LARGEST and value.flags.writeable:
            before = value.copy()
            self._undo.append(partial(np.copyto, value, before))

    def _add_function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                before = cell.cell_contents
            except ValueError:  # Not assigned yet.
                continue
            self._undo.append(partial(setattr, cell, "cell_contents", before))
            self.add(before, depth + 1)
        names, own = trainer_compat.names_in(function.__code__), function.__globals__
        found = {name: own[name] for name in names if name in own}
        # Only values are rebound: a function or class of a module is the same before and after.
        plain = {name: value for name, value in found.items() if isinstance(value, _PLAIN)}
        self._undo.append(partial(own.update, plain))
        self._add_all(found.values(), depth)


def _functions_of(trainer: Trainer) -> list[Any]:
    """Return the functions of the user's that compute the loss."""
    kinds = (*type(trainer).__mro__, *type(bare_model(trainer.model)).__mro__)
    methods = [vars(kind).get(name) for kind in kinds for name in ("compute_loss", "forward", "log")]
    found = [*methods, trainer.compute_loss_func, vars(trainer).get("compute_loss")]
    return [each for each in found if each is not None and not trainer_compat.is_known_code(each)]
