"""Values in place of those of a JSON file, and other things in place of a file, for tests of what reads it."""

from __future__ import annotations

import copy
import os
import pathlib
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any


Path = tuple[str | int, ...]
"""Keys and indices that lead to a value."""

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

WRONG: tuple[Any, ...] = (
    *(None, True, -5, 1.5, 1e30, 10**30, 1e12, float("nan"), float("inf")),
    *("x", "5", "", [], [None], {}, {"a": 1}, DEEP),
)
GONE = object()


def _listen(path: pathlib.Path) -> None:
    place = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:  # Its address may have no more than 108 bytes.
        server.bind(f"/proc/self/fd/{place}/{path.name}")
    os.close(place)


NO_FILES: dict[str, Callable[[pathlib.Path], Any]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "link": lambda path: path.symlink_to(__file__),
    "socket": _listen,
}
"""What may lie in place of a file."""


def paths_of(value: Any, start: Path = ()) -> Iterator[Path]:
    """The ways to everything inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*start, key)
        yield from paths_of(item, (*start, key))


def mutated(value: Any, path: Path, new: Any) -> Any:
    """A copy of a value with another one at a path, or none."""
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if new is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = copy.deepcopy(new)
    return value


def at(value: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, of which a value of another kind cannot take the place."""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, (int, float)):
        return "whole" if isinstance(value, int) else "number"
    return type(value).__name__


def refusal_of(call: Callable[[], Any]) -> str | None:
    """The text of the ValueError of a call; None if there is none. Another error is one."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def draw_mutations(value: Any, count: int, seed: int, spared: Any = lambda path: False) -> Iterator[tuple[Path, Any]]:
    """Draw `count` paths in a value and what stands there now: of another kind, out of range, or nothing.

    Args:
        value: a tree of JSON values.
        count: how many.
        seed: of the draw.
        spared: tells paths at which any value may stand.
    """
    draw, paths = random.Random(seed), [path for path in paths_of(value) if not spared(path)]
    while count:
        path, new = draw.choice(paths), draw.choice((*WRONG, GONE))
        old = at(value, path)
        is_element = isinstance(path[-1], int)
        if new is GONE and is_element:
            continue  # A shorter list may be one too.
        is_number = isinstance(new, int | float) and not isinstance(new, bool)
        if new is not GONE and kind_of(new) == kind_of(old) and not is_number:
            continue  # Another text, truth value or an empty list may be right.
        if kind_of(old) == "number" and kind_of(new) in ("number", "whole"):
            continue
        count -= 1
        yield path, new
