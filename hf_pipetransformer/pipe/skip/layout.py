"""Which module stashes and which one pops each skip tensor. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from torch import nn

from hf_pipetransformer.pipe.skip.namespace import Key
from hf_pipetransformer.pipe.skip.skippable import Skippable
from hf_pipetransformer.pipe.stages import Expanding


# Indices of a module in the Sequentials around it; modules inside another kind share its place.
Place = tuple[int, ...]


def find_routes(partitions: Sequence[nn.Module]) -> dict[Key, tuple[int, int]]:
    """From which stage to which one each skip tensor goes.

    Args:
        partitions: the stages, of a model that `verify_skippables` has passed.

    Returns:
        Skip tensor to (index of the stage that stashes it, index of the one that pops it).
    """
    modules = [(stage, module) for stage, part in enumerate(partitions) for _, _, module in _skippables(part)]
    stashed = {key: stage for stage, module in modules for key in module.stashable()}
    popped = {key: stage for stage, module in modules for key in module.poppable()}
    return {key: (stage, popped[key]) for key, stage in stashed.items() if key in popped}


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip tensor is stashed by one module and popped by one that runs later.

    Modules inside modules count as well; the order in which a module that is no `nn.Sequential` runs those inside it
    is taken to be right. A module that stands at two places runs twice.

    Raises:
        TypeError: it is not so; the message lists all that is wrong.
    """
    modules = list(_skippables(module))
    stashed = _first_places(((place, module.stashable()) for _, place, module in modules))
    popped = _first_places(((place, module.poppable()) for _, place, module in modules))
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
    problems += [f"no module declared '{key[1]}' as poppable but stashed" for key in stashed if key not in popped]
    if problems:
        raise TypeError(
            "Skip connections do not match. Expected one module that stashes each name and one later that pops it; "
            "the same name for several tensors needs module.isolate(Namespace()):\n"
            + "\n".join(f"  * {problem}" for problem in problems)
        )


def _first_places(found: Iterator[tuple[Place, Iterator[Key]]]) -> dict[Key, Place]:
    """Where each skip tensor appears first."""
    places: dict[Key, Place] = {}
    for key, place in chain.from_iterable(((key, place) for key in keys) for place, keys in found):
        places.setdefault(key, place)
    return places


def _skippables(module: nn.Module, prefix: str = "", place: Place = ()) -> Iterator[tuple[str, Place, Skippable]]:
    """Name, place and module of all skippable modules, in the order in which Sequentials run them."""
    if type(module).forward not in (nn.Sequential.forward, Expanding.forward):
        for name, inner in module.named_modules(prefix=prefix, remove_duplicate=False):
            if isinstance(inner, Skippable):
                yield name, place, inner
        return
    # named_children() would leave out the second place of a module.
    children = [item for item in module.named_modules(remove_duplicate=False) if item[0] and "." not in item[0]]
    for index, (name, child) in enumerate(children):
        yield from _skippables(child, f"{prefix}.{name}" if prefix else name, (*place, index))
