"""Type and range checks for values read from a JSON file. Pure.

A hash proves that a file is unchanged, not that its content is valid. Each function returns its value or raises
ValueError, with a message that continues after the file name: what was found, what was expected.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any


MOST_STEPS = 10**9
"""Upper bound on optimizer steps of a run, samples of a batch, and processes."""
MOST_SAMPLES = 10**15
"""Upper bound on the samples that a run reads."""


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


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _refusal(value, name, "a text")
    return value


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _refusal(value, name, "true or false")
    return value


def items(value: Any, name: str, count: int | None = None) -> list[Any]:
    """Return `value` as a list, checking its length if `count` is given."""
    if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
        raise _refusal(value, name, "a list" if count is None else f"a list of {count}")
    return list(value)


def entries(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(value, name, "an object")
    return value


def entry(holder: Mapping[str, Any], key: str) -> Any:
    if key not in holder:
        raise ValueError(f"found no {key!r}")
    return holder[key]


def _refusal(value: Any, name: str, expected: str) -> ValueError:
    # Shortened: a damaged file may have a value of any length.
    return ValueError(f"found {reprlib.repr(value)} as {name!r}, expected {expected}")
