"""Values read from a JSON file: their types and ranges, as annotations say them. Pure.

A hash proves that a file is unchanged, not that its content is valid. Each function returns its value or raises
ValueError, with a message that continues after the file name: what was found, what was expected.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict


MOST_STEPS = 10**9
"""Upper bound on optimizer steps of a run, samples of a batch, and processes."""
MOST_SAMPLES = 10**15
"""Upper bound on the samples that a run reads."""


# After the type, an annotated number has its smallest and its largest value.
Count = Annotated[int, 0, MOST_STEPS]
Positive = Annotated[int, 1, MOST_STEPS]
NumSamples = Annotated[int, 0, MOST_SAMPLES]
Seed = Annotated[int, -(2**63), 2**64]
Scalar = bool | int | float | str | None


def whole_number(value: Any, name: str, least: int = 0, most: int = MOST_STEPS) -> int:
    """Return `value` if it is an integer from `least` to `most`; 3.0 and True are not."""
    # Python counts True as the number 1.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refusal(value, name, f"a whole number from {least} to {most}")
    return value


def number(value: Any, name: str, least: float = -math.inf, most: float = math.inf) -> float:
    """Return `value` as a float if it is a number from `least` to `most`; NaN passes without bounds, as infinity."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_unbounded = (least, most) == (-math.inf, math.inf)
    if not is_number or not (is_unbounded or least <= value <= most):
        raise _refusal(value, name, "a number" if is_unbounded else f"a number from {least:g} to {most:g}")
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have no largest one.
        raise _refusal(value, name, "a number that fits a float") from None


def items(value: Any, name: str, count: int | None = None) -> list[Any]:
    """Return `value` as a list, checking its length if `count` is given."""
    if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
        raise _refusal(value, name, "a list" if count is None else f"a list of {count}")
    return list(value)


def entry(holder: Mapping[str, Any], key: str, of: str = "") -> Any:
    if key not in holder:
        raise ValueError(f"found no {key!r}{of}")
    return holder[key]


def _typed(kind: Any, expected: str) -> Callable[[Any, str], Any]:
    """Return a function that takes values of a type alone."""

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise _refusal(value, name, expected)
        return value

    return read


text, entries = _typed(str, "a text"), _typed(dict, "an object")
_READERS: dict[Any, Callable[[Any, str], Any]] = {
    bool: _typed(bool, "true or false"),
    float: number,
    str: text,
    Scalar: _typed(Scalar, "a text or number"),
    Any: lambda value, name: value,
}


def read_as(kind: Any, value: Any, name: str) -> Any:
    """Return a JSON value in the form that the annotation `kind` says.

    Entries that a `TypedDict` does not name stay, and those that a dataclass has no field for are ignored. A dataclass
    with a method `from_event` reads itself.

    Raises ValueError for another form; it says what was found as which entry, and what was expected.
    """
    if kind in _READERS:
        return _READERS[kind](value, name)
    if hasattr(kind, "from_event"):
        return kind.from_event(value)
    if is_dataclass(kind):
        return fields_as(kind, entries(value, name))
    if is_typeddict(kind):
        # Entries without an annotation stay: a scheduler of the user may have any.
        found, hints = dict(entries(value, name)), get_type_hints(kind, include_extras=True)
        for key in hints:
            if key in found or key in kind.__required_keys__:
                found[key] = read_as(hints[key], entry(found, key), key)
        return found
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        read: Callable[..., Any] = whole_number if inner[0] is int else number
        return read(value, name, *inner[1:])
    if origin in (Union, UnionType):
        # Other unions than `X | None` have a reader of their own above.
        return None if value is None else read_as(inner[0], value, name)
    if origin is dict:
        return {key: read_as(inner[1], item, key) for key, item in entries(value, name).items()}
    if origin is tuple and inner[-1] is ...:
        return tuple(read_as(inner[0], item, name) for item in items(value, name))
    if origin is tuple:
        return [read_as(*each, name) for each in zip(inner, items(value, name, len(inner)), strict=True)]
    assert origin is list, kind
    return [read_as(inner[0], item, name) for item in items(value, name)]


def fields_as(kind: Any, values: Mapping[str, Any], of: str = "") -> Any:
    """Return a dataclass of its fields among `values`. Those without a default are required, `of` something."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for own in _saved_fields(kind):
        if own.name in values or own.default is MISSING:
            found[own.name] = read_as(hints[own.name], entry(values, own.name, of), own.name)
    return kind(**found)


def as_json(value: Any) -> Any:
    """Return a dataclass, or a tuple, as `read_as` takes it."""
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    if is_dataclass(value):
        return {own.name: as_json(getattr(value, own.name)) for own in _saved_fields(value)}
    return value


def _saved_fields(kind: Any) -> list[Field[Any]]:
    # What is not compared is not of the value that a file has.
    return [own for own in fields(kind) if own.compare]


def _refusal(value: Any, name: str, expected: str) -> ValueError:
    # Shortened: a damaged file may have a value of any length.
    return ValueError(f"found {reprlib.repr(value)} as {name!r}, expected {expected}")
