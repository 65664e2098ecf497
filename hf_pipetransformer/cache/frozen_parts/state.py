"""State of modules besides weights: attributes, classes, code and hooks, by whose change they compute otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from operator import is_
from secrets import token_hex
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import _global_backward_hooks, _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._pytree import tree_leaves
from transformers.utils.output_capturing import _active_collector

from hf_pipetransformer.cache.chain import NOT_SETTINGS
from hf_pipetransformer.cache.frozen_parts.values import version_of
from hf_pipetransformer.comm.transfers import digest_of
from hf_pipetransformer.splitters.script_code import is_installed, names_in, own_classes, text_of


_DEPTH = 4
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CODE = (ModuleType, type, FunctionType, BuiltinFunctionType)
_MOST_STATES = 8
_WEIGHTS = ("_parameters", "_buffers")
_START = time.time()
"""From then on, the text of a file may be another one than what runs."""


class ModuleState:
    """State of a module and all inside it.

    Args:
        own_forward: the module's forward, in whose place another one may stand.
    """

    def __init__(self, module: nn.Module, own_forward: Any) -> None:
        self.module, self.own_forward = module, own_forward
        self.num_states = 0
        """How many states were seen."""
        self.is_watchable = True
        """False if the present state has hooks, or code of the script's where there was none at first."""
        self.idle_hooks: list[Any] = []
        """Hooks that were seen to change nothing, so that stored outputs may pass by them."""
        self._was_of_script: bool | None = None
        self._known: list[tuple[list[Any], list[int], bytes, bool]] = []
        self._look()

    def _look(self) -> None:
        """Find what the state consists of."""
        self._modules = list(self.module.modules())
        self._children = self._present_children()
        self._seen: set[int] = set()
        self._views: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        weights = {id(each) for each in chain(self.module.parameters(), self.module.buffers())}
        self._seen |= weights | {id(each) for each in self._modules}
        for kind in dict.fromkeys(base for each in self._modules for base in own_classes(type(each))):
            self._views.append(vars(kind).values())
        for each in self._modules:
            self._views.append(vars(each).values())
            for name, value in vars(each).items():
                if name != "forward":
                    self._add(value, 0)

    def _present_children(self) -> list[Any]:
        return list(chain.from_iterable(each._modules.values() for each in self._modules))

    def weights(self, has_buffers: bool = True) -> list[torch.Tensor]:
        """Return the parameters of all modules inside, and their buffers; `parameters()` takes ten times as long."""
        children = self._present_children()
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._look()
        kinds = ("_parameters", "_buffers") if has_buffers else ("_parameters",)
        own = chain.from_iterable(getattr(each, kind).values() for kind in kinds for each in self._modules)
        return list({id(each): each for each in own if each is not None}.values())

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, (*_PLAIN, type, ModuleType)) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensors.append(value)
        elif isinstance(value, _CONTAINERS):
            inside = value.values() if isinstance(value, dict) else value
            self._views.append(inside)
            for each in inside:
                self._add(each, depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (FunctionType, nn.Module)):
            self._views.append(vars(value).values())
            for each in vars(value).values():
                self._add(each, depth + 1)

    def _present(self) -> tuple[list[Any], list[int]]:
        own = getattr(self.own_forward, "__func__", self.own_forward)
        # The forward that stands in place of the module's own is no part of the state.
        standing = vars(self.module).get("forward")
        values = [each for each in chain.from_iterable(self._views) if each is not standing]
        return [own, *map(type, self._modules), *values], [version_of(each) for each in self._tensors]

    @property
    def digest(self) -> bytes:
        """A hash of the state, the same in another process."""
        for _ in range(2):
            values, versions = self._present()
            for known, known_versions, digest, is_watchable in self._known:
                if len(known) == len(values) and versions == known_versions and all(map(is_, values, known)):
                    self.is_watchable = is_watchable
                    return digest
            # Something is another object than before: it may hold others in turn.
            self._look()
        values, versions = self._present()
        digest = self._computed()
        if self._was_of_script is None:
            self._was_of_script = self.is_of_script
        self.is_watchable = self.hooked is None and (self._was_of_script or not self.is_of_script)
        self.num_states += digest not in {each for _, _, each, _ in self._known}
        self._known = [*self._known[1 - _MOST_STATES :], (values, versions, digest, self.is_watchable)]
        return digest

    def _computed(self) -> bytes:
        hasher = xxhash.xxh3_128(describe(self.own_forward, 0).encode())
        for name, each in self.module.named_modules():
            hasher.update(f"{name} {_class_text(type(each))}\n".encode())
            for key, value in vars(each).items():
                if key in (*_WEIGHTS, "_modules") or "_hooks_" in key or (key == "forward" and each is self.module):
                    continue
                # By what they are: each gets another number where it is registered.
                told = _hooks_of_others(value) if key.endswith("_hooks") and isinstance(value, dict) else value
                hasher.update(f"{key}={describe(told, 0)}\n".encode())
        return hasher.digest()

    @property
    def hooked(self) -> str | None:
        """Path of a module inside that has a hook of other code than transformers', which does something, or None."""
        for name, each in self.module.named_modules():
            others = chain.from_iterable(map(_hooks_of_others, _hooks_of(each)))
            if name and any(hook not in self.idle_hooks for hook in others):
                return name
        # Hooks for the modules of all models.
        everywhere = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks)
        return "every module" if any(everywhere) else None

    @contextmanager
    def hooks_seen(self) -> Iterator[None]:
        """See which hooks of others inside give nothing, write into nothing, and have nothing to keep a call in."""
        seen: dict[int, tuple[dict[int, Any], Any]] = {}
        busy: list[Any] = []

        def told(hook: Any) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
                before = list(map(version_of, given)), reached_by(hook)
                found = hook(*args, **kwargs)
                after = list(map(version_of, given)), reached_by(hook)
                if found is not None or before[1] is None or before != after:
                    busy.append(hook)
                return found

            return run

        for each in list(self.module.modules())[1:]:
            for hooks in (each._forward_hooks, each._forward_pre_hooks):
                for number, hook in hooks.items():
                    if _hooks_of_others({number: hook}):
                        hooks[number] = told(hook)
                        seen[number] = hooks, hook
        try:
            yield
        finally:
            for number, (hooks, hook) in seen.items():
                if number in hooks:  # It may have taken itself out.
                    hooks[number] = hook
        idle = [hook for _, hook in seen.values() if hook not in busy]
        if idle != self.idle_hooks:
            self.idle_hooks, self._was_of_script = idle, None
            self._known.clear()

    @property
    def is_of_script(self) -> bool:
        """True if code of the script's, not of an installed package, computes in the module or is told of it."""
        classes = (base for each in self._modules for base in own_classes(type(each)))
        return (
            not all(map(is_installed, classes))
            or not is_installed(getattr(self.own_forward, "func", self.own_forward))
            or bool(self.idle_hooks)
            or any(
                not is_installed(value if callable(value) and hasattr(value, "__module__") else type(value))
                for each in self._modules
                for name, value in vars(each).items()
                if name != "forward" and (isinstance(value, (FunctionType, MethodType, partial)) or name == "_hf_hook")
            )
        )


def collected() -> dict[str, int]:
    """Return what transformers collects in the forward in progress, such as attentions, and how many it has so far."""
    return {name: len(found) for name, found in (_active_collector.get() or {}).items()}


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Let modules compute inside without a trace in what transformers collects."""
    token = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(token)


def _hooks_of_others(hooks: Mapping[int, Any]) -> list[Any]:
    """Return hooks but for those by which transformers collects hidden states."""
    return [hook for hook in hooks.values() if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    found: tuple[dict[int, Any], ...] = own
    return found


def reached_by(function: Any) -> dict[str, Any] | None:
    """Return the plain values that a script's function reaches besides its arguments, through its functions too.

    None if it reaches anything that could be written into, or if that cannot be told.
    """
    found: dict[str, Any] = {}
    ahead, seen = [function], set[int]()
    while ahead:
        each = ahead.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, FunctionType) or vars(each):
            return None
        # It may import a module itself.
        named = {name: each.__globals__.get(name, sys.modules.get(name)) for name in names_in(each.__code__)}
        try:
            inside = [cell.cell_contents for cell in each.__closure__ or ()]
        except ValueError:  # Not assigned yet.
            return None
        places = enumerate([*inside, *(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()])
        for name, value in (*named.items(), *((str(place), value) for place, value in places)):
            if isinstance(value, FunctionType) and not is_installed(value):
                ahead.append(value)
            elif isinstance(value, _PLAIN):
                found[f"{id(each)} {name}"] = value
            elif not (isinstance(value, _CODE) and _is_of_package(value)):
                return None
    return found


def _is_of_package(value: Any) -> bool:
    """Return True for a module, class or function that no script can have written."""
    if isinstance(value, ModuleType):
        return is_installed(SimpleNamespace(__module__=value.__name__))
    return is_installed(value)


def is_script_free(model: nn.Module) -> bool:
    """Return True if code of installed packages alone computes in a model, and no hook of a script looks at it."""
    modules = list(model.modules())
    hooks = (hook for each in modules for own in _hooks_of(each) for hook in own.values())
    own_forwards = (vars(each)["forward"] for each in modules if "forward" in vars(each))
    return all(map(is_installed, chain((type(each) for each in modules), hooks, own_forwards)))


@cache
def _described_class(kind: type, _members: tuple[int, ...]) -> str:
    members = sorted(vars(kind).items())
    return f"{kind.__module__}.{kind.__qualname__}" + "".join(
        f" {name}={describe(value, _DEPTH)}"
        for name, value in members
        if isinstance(value, (*_PLAIN, FunctionType)) and name not in ("__doc__", "__module__")
    )


def _class_text(kind: type) -> str:
    # By the identity of its members, since a class may be given other ones.
    bases = (_described_class(base, tuple(map(id, vars(base).values()))) for base in own_classes(kind))
    return f"{kind.__qualname__} {xxhash.xxh3_64_hexdigest(' '.join(bases).encode())}"


def describe(value: Any, depth: int) -> str:
    """Return a value as text that is the same in another process and does not name what it is not made of."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {digest_of(value)}"
    if depth > _DEPTH and not isinstance(value, (FunctionType, MethodType)):
        return type(value).__qualname__
    if isinstance(value, partial):
        return f"partial {describe([value.func, value.args, value.keywords], depth + 1)}"
    if isinstance(value, MethodType):
        return f"method {describe(value.__func__, depth + 1)}"
    if isinstance(value, FunctionType):
        inside = _cells(value, depth) if depth < _DEPTH else ""
        return f"function {value.__qualname__} {_code_text(value.__code__)} {inside}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(describe(each, depth + 1) for each in value)) + "}"
    if isinstance(value, Mapping):
        pairs = (f"{describe(name, depth + 1)}: {describe(each, depth + 1)}" for name, each in value.items())
        return type(value).__name__ + "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple, deque)):
        return "[" + ", ".join(describe(each, depth + 1) for each in value) + "]"
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        kept = {name: each for name, each in own.items() if name.lstrip("_") not in _NOT_OF_THE_STATE}
        return f"{type(value).__qualname__} {describe(kept, depth + 1)}"
    return type(value).__qualname__


_NOT_OF_THE_STATE = tuple(name.lstrip("_") for name in (*NOT_SETTINGS, "commit_hash"))


def _cells(function: FunctionType, depth: int) -> str:
    """Return what a function encloses as text."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(describe(cell.cell_contents, depth + 1))
        except ValueError:  # Not assigned yet.
            found.append("")
    return " ".join(found)


@cache
def _code_text(code: CodeType) -> str:
    text = text_of(code)
    is_changed = os.path.isfile(code.co_filename) and os.path.getmtime(code.co_filename) > _START
    # Which of several lambdas in a line it is cannot be told.
    if text is None or is_changed or (code.co_name == "<lambda>" and text.count("lambda") > 1):
        # It is known in this process alone, and what it computes is not found again in another one.
        text = token_hex()
    return xxhash.xxh3_64_hexdigest(text.encode())
