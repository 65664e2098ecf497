"""Values of options as people and files write them, turned into the one form that the code reads, or refused.

YAML and sweeps give text for numbers, True and False for `on` and `off`, None for `null`. Each function here takes the
name of an option and a value, and gives the value in its type or raises a ValueError of one sentence.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any


Reader = Callable[[str, Any], Any]
"""Gives an option's value in its own type. Raises ValueError, which names the option, what was found and expected."""

_TRUE = ("true", "yes", "on", "y", "t", "1")
_FALSE = ("false", "no", "off", "n", "f", "0")
_NOTHING = ("none", "null", "")
_SHOWN_LETTERS = 100
_DIGITS = re.compile("[0-9]{1,18}")


def choice(choices: tuple[str, ...], on: str | None = None, off: str | None = None, null: str | None = None) -> Reader:
    """One of `choices`, in any case of letters.

    Args:
        choices: the words allowed.
        on: the choice that True stands for (what YAML makes of `on`); None if there is none.
        off: the same for False.
        null: the same for None.
    """

    def read(name: str, value: Any) -> str:
        word = str(value).strip().lower() if isinstance(value, (str, bool)) or value is None else None
        if word in choices:
            return word
        meant = on if word in _TRUE else off if word in _FALSE else null if word in _NOTHING else None
        if meant is None:
            raise _refusal(name, f"one of {choices}", value)
        return meant

    return read


def truth(name: str, value: Any) -> bool:
    """True or False."""
    word = str(value).strip().lower()
    if not isinstance(value, float) and word in _TRUE + _FALSE:
        return word in _TRUE
    raise _refusal(name, "True or False", value)


def number(
    expected: str, is_allowed: Callable[[float], bool] = lambda _: True, may_be_infinite: bool = False
) -> Reader:
    """A number; NaN is none.

    Args:
        expected: what is allowed, in words.
        is_allowed: whether a number is.
        may_be_infinite: else it is finite.
    """

    def read(name: str, value: Any) -> float:
        found = _real(value) if may_be_infinite else _finite(value)
        if found is None or not is_allowed(found):
            raise _refusal(name, expected, value)
        return found

    return read


def whole_number(expected: str, least: int, most: int = 10**18) -> Reader:
    """A whole number from `least` to `most`; `expected` says so in words."""

    def read(name: str, value: Any) -> int:
        found = _whole(value)
        if found is None or not least <= found <= most:
            raise _refusal(name, expected, value)
        return found

    return read


def count_or(*words: str) -> Reader:
    """A positive whole number, as text, or one of `words`."""
    allowed = " or ".join([*map(repr, words), "a positive whole number"])

    def read(name: str, value: Any) -> str:
        word = value.strip().lower() if isinstance(value, str) else None
        if word in words:
            return word
        found = _whole(value)
        if found is None or found < 1:
            raise _refusal(name, allowed, value)
        return str(found)

    return read


def lengths_or(*words: str) -> Reader:
    """One of `words`, a positive whole number, or several with commas between them; as text."""
    allowed = " or ".join([*map(repr, words), "a number of slices", "their lengths, as in '512,512,1024'"])

    def read(name: str, value: Any) -> str:
        word = value.strip().lower() if isinstance(value, str) else None
        if word in words:
            return word
        found = [_whole(part) for part in value.split(",")] if isinstance(value, str) else [_whole(value)]
        if any(part is None or part < 1 for part in found):
            raise _refusal(name, allowed, value)
        return ",".join(map(str, found))

    return read


def interval(name: str, value: Any) -> str:
    """ "epoch", a number of steps, or a share of the run, as text."""
    if isinstance(value, str) and value.strip().lower() == "epoch":
        return "epoch"
    found = _finite(value)
    if found is not None and 0 < found < 1:
        return repr(found)
    steps = _whole(value)
    # 1.0 might mean one step or the whole run.
    is_share = not isinstance(value, Integral) and not _DIGITS.fullmatch(str(value).strip())
    if steps is None or steps < 1 or is_share:
        raise _refusal(name, "'epoch', a positive number of steps, or a share of the run between 0 and 1", value)
    return str(steps)


def optional(read: Reader) -> Reader:
    """What `read` takes, or nothing."""

    def read_or_none(name: str, value: Any) -> Any:
        is_nothing = value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)
        return None if is_nothing else read(name, value)

    return read_or_none


def path(name: str, value: Any) -> str:
    """The path of a file or folder."""
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(found, str) or "\0" in found:
        raise _refusal(name, "a path", value)
    return found


def freeze_table(name: str, value: Any) -> str:
    """`"step:layers,..."`, in order of steps."""
    if not isinstance(value, str):
        raise _refusal(name, "'step:layers,...' (in quotes: YAML takes 100:2 for the number 6002)", value)
    return ",".join(f"{step}:{layers}" for step, layers in parse_freeze_at(value).items())


def parse_freeze_at(text: str) -> dict[int, int]:
    """`"step:layers,..."` as a table.

    Raises:
        ValueError: not of that form, or a step named twice.
    """
    table: dict[int, int] = {}
    for part in text.split(","):
        step, colon, layers = (word.strip() for word in part.partition(":"))
        if not (colon and _DIGITS.fullmatch(step) and _DIGITS.fullmatch(layers)):
            raise ValueError(
                f"freeze_at={_shown(text)}: {_shown(part.strip())} is not 'step:layers'. Expected for example "
                "'100:2,200:4'."
            )
        if int(step) in table:
            raise ValueError(f"freeze_at={_shown(text)} names step {int(step)} twice: expected each step once.")
        table[int(step)] = int(layers)
    return dict(sorted(table.items()))


def _real(value: Any) -> float | None:
    """A number, also one in text; None for anything else, and for NaN."""
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(found) else found


def _finite(value: Any) -> float | None:
    """As `_real`; None for infinity too."""
    found = _real(value)
    return found if found is not None and math.isfinite(found) else None


def _whole(value: Any) -> int | None:
    """A whole number of at most 18 digits, also one in text or a float without fraction."""
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (Integral, Real, str)):
        return None
    found = int(value) if isinstance(value, Integral) else _finite(value)
    is_whole = found is not None and abs(found) < 10**18 and int(found) == found
    return int(found) if found is not None and is_whole else None


def _refusal(name: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{name} must be {expected}, found {_shown(value)}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."
