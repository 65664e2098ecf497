"""The script's own code in a model: which it is, its hooks, and what its modules hold, kept while they are tried."""

from __future__ import annotations

import copy
import inspect
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import nn


_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib"))


@cache
def _is_installed_module(name: str) -> bool:
    if name.partition(".")[0] == __name__.partition(".")[0] or name == "builtins":
        return True
    path = getattr(sys.modules.get(name), "__file__", None)
    return name != "__main__" and (path is None or path.startswith(_INSTALLED))


def is_installed(code: Any) -> bool:
    """Return True for a class or function of an installed package, False for one of the script's."""
    code = getattr(code, "func", code)
    name = getattr(code, "__module__", None)
    return _is_installed_module(str(name if isinstance(name, str) else type(code).__module__))


def text_of(code: CodeType) -> str | None:
    """Return the text of a function, with the rest of the lines that a lambda stands in; None if there is none."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return None


def names_in(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function and its inner functions use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def own_classes(kind: type) -> Iterator[type]:
    """Iterate over a class and its bases, but for those of torch."""
    return (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins"))


def hooked_by_script(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with hooks of the script's, by their paths."""
    return {
        name: each
        for name, each in model.named_modules()
        if not all(map(is_installed, (*each._forward_hooks.values(), *each._forward_pre_hooks.values())))
    }


class ScriptHooks:
    """The script's hooks on the modules of a model, which are off inside the context but where they are asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._own: dict[int, list[tuple[dict[int, Any], dict[int, Any]]]] = {}
        for each in model.modules():
            pairs = [(table, dict(table)) for table in (each._forward_hooks, each._forward_pre_hooks)]
            if not all(is_installed(hook) for _, hooks in pairs for hook in hooks.values()):
                self._own[id(each)] = pairs

    def __enter__(self) -> ScriptHooks:
        self._take(self._own)
        return self

    def __exit__(self, *_: Any) -> None:
        self._put(self._own)

    @contextmanager
    def on(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Call the hooks of these modules inside."""
        asked = [id(each) for each in modules if id(each) in self._own]
        self._put(asked)
        try:
            yield
        finally:
            self._take(asked)

    def _take(self, modules: Iterable[int]) -> None:
        for key in modules:
            for table, hooks in self._own[key]:
                table.clear()
                table.update({number: hook for number, hook in hooks.items() if is_installed(hook)})

    def _put(self, modules: Iterable[int]) -> None:
        for key in modules:
            for table, hooks in self._own[key]:
                table.clear()
                table.update(hooks)


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back on exit what modules of the script's own classes hold beside weights, on themselves and their class.

    Numbers, tensors, generators, and containers of them; not what only a closure or a global name reaches.
    """
    undo: list[Callable[[], None]] = []
    own = [module for module in model.modules() if not all(map(is_installed, own_classes(type(module))))]
    weights = {id(each) for each in (*model.parameters(), *model.buffers(), *model.modules())}
    for module in own:
        undo.append(_keeping(vars(module), partial(_put, module), module.__dict__.pop, weights))
        slots = {name: getattr(module, name) for name in _slots_of(type(module)) if hasattr(module, name)}
        undo.append(_keeping(slots, partial(_put, module), slots.pop, weights))
    for kind in {base for module in own for base in own_classes(type(module)) if not is_installed(base)}:
        # Of a class, methods and properties stay.
        values = {name: value for name, value in vars(kind).items() if isinstance(value, (*_PLAIN, *_CONTAINERS))}
        undo.append(_keeping(values, partial(setattr, kind), values.pop, weights))
    try:
        yield
    finally:
        for each in undo:
            each()


def _slots_of(kind: type) -> Iterator[str]:
    for base in own_classes(kind):
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _put(module: nn.Module, name: str, value: Any) -> None:
    # Not by the module's own method, which tells parameters from the rest.
    object.__setattr__(module, name, value)


def _keeping(
    values: dict[str, Any], put: Callable[[str, Any], None], remove: Callable[[str], Any], left_out: set[int]
) -> Callable[[], None]:
    """Return a function that puts attributes back, each in the object that held it."""
    before = {name: value for name, value in values.items() if not _is_torchs(name)}
    copies = {}
    for name, value in before.items():
        # What cannot be copied, such as a lock or a file, stays as it is.
        with suppress(Exception):
            copies[name] = copy.deepcopy(value) if _is_data(value, left_out) else value

    def undo() -> None:
        for name in [name for name in values if name not in before and not _is_torchs(name)]:
            remove(name)
        for name, value in copies.items():
            put(name, _restored(before[name], value))

    return undo


def _is_torchs(name: str) -> bool:
    return name in vars(nn.Module()) and name != "training"


def _is_data(value: Any, left_out: set[int], depth: int = 0) -> bool:
    """Return True for a value that holds nothing but data, and no weight."""
    if isinstance(value, (*_PLAIN, torch.Generator)):
        return True
    if isinstance(value, torch.Tensor):
        return id(value) not in left_out and value.grad_fn is None
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (*_CONTAINERS, tuple)) else None
    return inside is not None and depth < 4 and all(_is_data(each, left_out, depth + 1) for each in inside)


def _restored(own: Any, value: Any) -> Any:
    """Return the object that an attribute held, with what it held."""
    if own is value:
        return own
    if isinstance(own, torch.Generator):
        own.set_state(value.get_state())
    elif isinstance(own, torch.Tensor) and own.shape == value.shape:
        with torch.no_grad():
            own.copy_(value)
    elif isinstance(own, (list, deque)):
        own.clear()
        own.extend(value)
    elif isinstance(own, (dict, set)):
        own.clear()
        own.update(value)
    else:
        return value
    return own
