"""Names of parameters as PyTorch's Pipe and torchgpipe had them, read as those of the Sequential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


_FOLDER = "partitions."


def rename(state: dict[str, Any], prefix: str, names: Sequence[Sequence[str]], errors: list[str]) -> None:
    """Change `partitions.<stage>.<child>.weight` to `<child>.weight`, in place.

    torchgpipe has the child's name there, PyTorch its position in the stage.

    Args:
        state: of a module and others.
        prefix: the module's.
        names: of the children of each stage.
        errors: gets a sentence if the names can be read in two ways.
    """
    start = prefix + _FOLDER
    old = {key: key[len(start) :].split(".", 2) for key in state if key.startswith(start)}
    places = {(int(parts[0]), parts[1]) for parts in old.values() if len(parts) > 1 and parts[0].isdecimal()}
    if not places or any(stage >= len(names) for stage, _ in places):
        return
    by_name = {(stage, name): name for stage, row in enumerate(names) for name in row}
    by_position = {(stage, str(i)): name for stage, row in enumerate(names) for i, name in enumerate(row)}
    readings = [reading for reading in (by_name, by_position) if places <= reading.keys()]
    if len(readings) > 1 and any(by_name[place] != by_position[place] for place in places):
        errors.append(
            f"Names that begin with {start!r} can be read as torchgpipe's (the child's name) or as PyTorch's (its "
            "position in the stage), and the two differ here. Rename them to those of the Sequential: '0.weight'."
        )
        return
    for key, parts in old.items():
        if readings and len(parts) > 1:
            place = int(parts[0]), parts[1]
            state[prefix + ".".join([readings[0][place], *parts[2:]])] = state.pop(key)
