"""Skip connections: a module stashes a tensor under a name, a later module pops it, the ones between never see it.

The interface follows `torch.distributed.pipeline.sync.skip`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType, new_class
from typing import Any, TypeVar, cast
from uuid import UUID, uuid4

from torch import Tensor, nn

from hf_pipetransformer.pipe.recomputation import setting
from hf_pipetransformer.pipe.stages import Expanding


@dataclass(frozen=True)
class Namespace:
    """Scope of skip tensor names: `module.isolate(namespace)`. Copies compare equal, separate instances never do."""

    identity: UUID = field(default_factory=uuid4)


# Identifies a skip tensor in the whole model: its namespace (None unless its module was isolated) and its name.
Key = tuple[Namespace | None, str]


class SkipExchange:
    """Skip tensors that one piece of the model receives (`popped`), stashes, and leaves for later pieces (`left`)."""

    def __init__(self, popped: Mapping[Key, Tensor | None] | None = None) -> None:
        # A copy: recomputation starts from `popped` again.
        self._received = dict(popped or {})
        self.left: dict[Key, Tensor | None] = {}

    def stash(self, key: Key, value: Tensor | None) -> None:
        """Store `value` until its pop. It overwrites a value that a failed forward left under `key`."""
        self.left[key] = value

    def pop(self, key: Key) -> Tensor | None:
        """Remove and return the value stashed under `key`; raise a RuntimeError if there is none."""
        for kept in (self.left, self._received):
            if key in kept:
                return kept.pop(key)
        namespace, name = key
        where = f"No skip tensor {name!r} is stashed" + (f" in {namespace}" if namespace is not None else "")
        there = ", ".join(sorted({repr(other) for _, other in (*self.left, *self._received)})) or "none"
        raise RuntimeError(
            f"{where}; stashed are: {there}. Expected a module that stashes it to have run before the one that pops "
            "it, once for each pop and in the same namespace. verify_skippables() looks at a whole model."
        )


_CURRENT: ContextVar[SkipExchange | None] = ContextVar("skip_exchange", default=None)
# Of modules that run outside a pipeline; one per thread, as a model may run on several at once.
_PLAIN = threading.local()


def current_exchange() -> SkipExchange:
    """Return the exchange that modules of this thread use now."""
    exchange: SkipExchange = _CURRENT.get() or vars(_PLAIN).setdefault("exchange", SkipExchange())
    return exchange


def exchanging(exchange: SkipExchange) -> AbstractContextManager[SkipExchange]:
    """Make modules that run inside stash to `exchange` and pop from it."""
    return setting(_CURRENT, exchange)  # type: ignore[arg-type]


Module = TypeVar("Module", bound=nn.Module)
Self = TypeVar("Self", bound="Skippable")


# No generated equality: it would compare tensors, which gives a tensor and not a bool.
@dataclass(frozen=True, eq=False)
class stash:
    """Command `yield stash(name, tensor)`: keep a tensor, or None, for the module that pops it."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, eq=False)
class pop:
    """Command `tensor = yield pop(name)`: receive what an earlier module stashed."""

    name: str


class _Forward:
    """Execution of one forward's commands."""

    def __init__(self, module: Skippable) -> None:
        self.module = module
        self.kind = type(module).__name__
        self.declared = {"stash": module.stashable_names, "pop": module.poppable_names}
        self.used: dict[str, set[str]] = {"stash": set(), "pop": set()}

    def answer(self, command: object) -> Tensor | None:
        """Execute a command and return the value of its `yield` expression."""
        if not isinstance(command, (stash, pop)):
            raise TypeError(
                f"{self.kind}.forward yielded an object of {type(command).__name__}: expected stash(name, tensor) or "
                "pop(name). What the module computes is returned, not yielded."
            )
        verb, name = type(command).__name__, command.name
        if name not in self.declared[verb]:
            raise RuntimeError(
                f"{self.kind}.forward yielded {verb}({name!r}), but the class declares {_listed(self.declared[verb])} "
                f"for {verb}: add the name to @skippable({verb}=[...])."
            )
        exchange, key, popped = current_exchange(), self.module.skip_key(name), None
        if isinstance(command, pop):
            popped = exchange.pop(key)
        elif command.tensor is None or isinstance(command.tensor, Tensor):
            exchange.stash(key, command.tensor)
        else:
            raise TypeError(
                f"{self.kind} stashed an object of {type(command.tensor).__name__} as {name!r}: expected a tensor or "
                "None. Hand other values on as outputs."
            )
        self.used[verb].add(name)
        return popped

    def check_all_used(self) -> None:
        """Raise if the forward left out a declared name, which other modules rely on."""
        for verb, declared in self.declared.items():
            missing = declared - self.used[verb]
            if missing:
                raise RuntimeError(
                    f"{self.kind} declared {_listed(declared)} for {verb}, but its forward did not {verb} "
                    f"{_listed(missing)}: `yield` the command {verb}(...) on each way through the forward "
                    f"(None can be stashed), or leave the name out of @skippable({verb}=...)."
                )


_UNDER_WAY: ContextVar[_Forward | None] = ContextVar("skippable_forward", default=None)


class Skippable(nn.Module):
    """Base class that `@skippable` adds to a module class. Only isolated names have an entry in `namespaces`."""

    stashable_names: frozenset[str] = frozenset()
    poppable_names: frozenset[str] = frozenset()
    namespaces: Mapping[str, Namespace] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nn.Module.register_load_state_dict_pre_hook(self, _rename_wrapped)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # An inherited forward has been wrapped in the class that defines it.
        if "forward" in vars(cls):
            cls.forward = _answered(vars(cls)["forward"])

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"

    def isolate(self: Self, namespace: Namespace, only: str | Iterable[str] | None = None) -> Self:
        """Put skip tensors into a namespace, by default all that the module declares, and return the module.

        Modules that stash and pop the same tensor must be isolated with the same namespace.

        Raises:
            ValueError: `only` has a name that the module does not declare.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names(only)
        if names - declared:
            raise ValueError(
                f"{type(self).__name__} cannot isolate {_listed(names - declared)}: expected some of the names that "
                f"it declares, {_listed(declared)}."
            )
        self.namespaces = {**self.namespaces, **dict.fromkeys(names, namespace)}
        return self

    def skip_key(self, name: str) -> Key:
        """Return the model-wide key of the tensor that this module calls `name`."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[Key]:
        """Iterate over the keys of the tensors that a forward stashes."""
        return map(self.skip_key, sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """Iterate over the keys of the tensors that a forward pops."""
        return map(self.skip_key, sorted(self.poppable_names))


def skippable(
    stash: str | Iterable[str] = (), pop: str | Iterable[str] = ()
) -> Callable[[type[Module]], type[Module]]:
    """Decorate a module class whose forward yields `stash` and `pop` commands, given the names of each.

    The result is a subclass of the same name, not a wrapper as in torchgpipe: parameters, attributes and hooks are
    those of the class. Each forward must use every declared name. A decorated subclass does not inherit the names
    that a decorated base class declares.

    Raises:
        RuntimeError: in a forward that uses an undeclared name, leaves out a declared one, or pops before a stash.
        TypeError: in a forward that yields another object, or stashes one that is neither a tensor nor None.
    """
    stashed, popped = _names(stash), _names(pop)

    def decorate(kind: type[Module]) -> type[Module]:
        # The forward is put into the subclass itself: __init_subclass__ wraps no inherited one.
        namespace = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__", "forward")}
        namespace |= {"stashable_names": stashed, "poppable_names": popped}
        # Python takes no base class in front of a subclass of its own, so that Skippable is named once.
        bases = (kind,) if issubclass(kind, Skippable) else (Skippable, kind)
        return cast("type[Module]", new_class(kind.__name__, bases, exec_body=lambda body: body.update(namespace)))

    return decorate


def _answered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward that may be a generator into a function that executes its commands and returns its result."""

    @wraps(forward)
    def run(self: Skippable, *args: Any, **kwargs: Any) -> Any:
        outer = _UNDER_WAY.get()
        if outer is not None and outer.module is self:
            # A base class's forward, called through super(), is part of the subclass's: names are checked once.
            return _result_of(forward(self, *args, **kwargs), outer)
        here = _Forward(self)
        with setting(_UNDER_WAY, here):
            output = _result_of(forward(self, *args, **kwargs), here)
        here.check_all_used()
        return output

    return run


def _result_of(output: Any, forward: _Forward) -> Any:
    """Run a forward to its end. Errors are thrown into the generator: the traceback shows the line that yields."""
    if not isinstance(output, Generator):
        return output
    try:
        command = next(output)
        while True:
            try:
                answer = forward.answer(command)
            except (RuntimeError, TypeError) as error:
                command = output.throw(error)
            else:
                command = output.send(answer)
    except StopIteration as stop:
        return stop.value


def _rename_wrapped(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Accept state dicts of torchgpipe and `torch.distributed.pipeline`, whose wrapper adds `module.` to names."""
    wrapped = f"{prefix}module."
    here = [name for name in state if name.startswith(prefix)]
    if "module" in dict(module.named_children()):
        # A child called `module` has this prefix without a wrapper; only `module.module.` proves that there was one.
        twice = any(name.startswith(f"{wrapped}module.") for name in here)
        if not twice or not all(name.startswith(wrapped) for name in here):
            return
    for name in here:
        if name.startswith(wrapped):
            state[prefix + name.removeprefix(wrapped)] = state.pop(name)


def _names(given: str | Iterable[str]) -> frozenset[str]:
    return frozenset([given] if isinstance(given, str) else given)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


# Child indices along the enclosing Sequentials. All modules inside any other container share its place.
Place = tuple[int, ...]


def find_routes(partitions: Sequence[nn.Module]) -> dict[Key, tuple[int, int]]:
    """Map each skip tensor to the indices of the stages that stash and pop it. Expects `verify_skippables` to pass."""
    modules = [(stage, module) for stage, part in enumerate(partitions) for _, _, module in _skippables(part)]
    stashed = {key: stage for stage, module in modules for key in module.stashable()}
    popped = {key: stage for stage, module in modules for key in module.poppable()}
    return {key: (stage, popped[key]) for key, stage in stashed.items() if key in popped}


def verify_skippables(module: nn.Sequential) -> None:
    """Check that exactly one module stashes each skip tensor and one that runs later pops it.

    Nested modules count. Only an `nn.Sequential` shows the order of its modules; any other container is assumed to
    run them in the right order. A module that appears at two places counts twice.

    Raises:
        TypeError: lists every mismatch.
    """
    # The stashes are collected first: whether a pop comes before its stash is a comparison of their places.
    modules = list(_skippables(module))
    stashed: dict[Key, Place] = {}
    for _, place, skippable in modules:
        for key in skippable.stashable():
            stashed.setdefault(key, place)
    problems: list[str] = []
    stash_seen: set[Key] = set()
    pop_seen: set[Key] = set()
    for name, place, skippable in modules:
        stashes, pops = list(skippable.stashable()), list(skippable.poppable())
        for key in stashes:
            if key in pops:
                problems.append(f"'{name}' declared '{key[1]}' both as stashable and as poppable")
            if key in stash_seen:
                problems.append(f"'{name}' redeclared '{key[1]}' as stashable")
        for key in pops:
            if key in pop_seen:
                problems.append(f"'{name}' redeclared '{key[1]}' as poppable")
            elif key not in stashed or place < stashed[key]:
                problems.append(f"'{name}' declared '{key[1]}' as poppable but it was not stashed before")
        stash_seen.update(stashes)
        pop_seen.update(pops)
    problems += [f"no module declared '{key[1]}' as poppable but stashed" for key in stashed if key not in pop_seen]
    if problems:
        raise TypeError(
            "Skip connections do not match. Expected one module that stashes each name and one later that pops it; "
            "the same name for several tensors needs module.isolate(Namespace()):\n"
            + "\n".join(f"  * {problem}" for problem in problems)
        )


def _skippables(module: nn.Module, prefix: str = "", place: Place = ()) -> Iterator[tuple[str, Place, Skippable]]:
    """Yield name, place and module in the order in which Sequentials run them."""
    # A subclass of Sequential with a forward of its own may run its children in any order: it is one place.
    if type(module).forward not in (nn.Sequential.forward, Expanding.forward):
        for name, inner in module.named_modules(prefix=prefix, remove_duplicate=False):
            if isinstance(inner, Skippable):
                yield name, place, inner
        return
    # Not named_children(): it leaves out the second place of a module.
    children = [item for item in module.named_modules(remove_duplicate=False) if item[0] and "." not in item[0]]
    for index, (name, child) in enumerate(children):
        yield from _skippables(child, f"{prefix}.{name}" if prefix else name, (*place, index))
