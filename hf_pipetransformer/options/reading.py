"""Parsers that turn option values, as people and files write them, into the type the code uses.

YAML and sweeps give strings for numbers, True and False for `on` and `off`, and None for `null`. Each parser takes an
option's name and value, and returns the value in its type or raises a one-sentence ValueError.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from numbers import Integral, Real
from typing import Any


Reader = Callable[[str, Any], Any]
"""Parser of an option's value."""

_TRUE = ("true", "yes", "on", "y", "t", "1")
_FALSE = ("false", "no", "off", "n", "f", "0")
_NOTHING = ("none", "null", "")
_SHOWN_LETTERS = 100
# At most 18 digits, so that every number fits 64 bits.
# Not \d, which takes the digits of all scripts.
_DIGITS = re.compile("[0-9]{1,18}")
_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,16})?) ?%")
# The denominator has another digit than 0: `Fraction` raises ZeroDivisionError for 1/0.
_SHARE = re.compile(r"[0-9]{1,19}/0*[1-9][0-9]{0,18}|0?\.[0-9]{1,18}")


def choice(choices: tuple[str, ...], on: str | None = None, off: str | None = None, null: str | None = None) -> Reader:
    """Return a parser for one of `choices`, case-insensitive.

    `on`, `off` and `null` are the choices for True, False and None: YAML turns `on` into True.
    """

    def read(name: str, value: Any) -> str:
        word = str(value).strip().lower() if isinstance(value, (str, bool)) or value is None else None
        if word in choices:
            return word
        # The empty string is a variable of a script that was not set, not a choice.
        meant = on if word in _TRUE else off if word in _FALSE else null if word in _NOTHING[:2] else None
        if meant is None:
            raise _refusal(name, f"one of {choices}", value, choices)
        return meant

    return read


def truth(name: str, value: Any) -> bool:
    word = str(value).strip().lower()
    if not isinstance(value, float) and word in _TRUE + _FALSE:
        return word in _TRUE
    raise _refusal(name, "True or False", value)


def number(
    expected: str, is_allowed: Callable[[float], bool] = lambda _: True, may_be_infinite: bool = False
) -> Reader:
    """Return a parser for numbers that `is_allowed` accepts, except NaN; `expected` describes them in errors."""

    def read(name: str, value: Any) -> float:
        found = _real(value) if may_be_infinite else _finite(value)
        if found is None or not is_allowed(found):
            raise _refusal(name, expected, value)
        return found

    return read


def whole_number(expected: str, least: int, most: int = 10**18) -> Reader:
    """Return a parser for an integer from `least` to `most`; `expected` describes the range in errors."""

    def read(name: str, value: Any) -> int:
        found = _whole(value)
        if found is None or not least <= found <= most:
            raise _refusal(name, expected, value)
        return found

    return read


def count_or(*words: str, lengths: str | None = None) -> Reader:
    """Return a parser for one of `words` or a positive integer, kept as text.

    With `lengths`, which describes them in errors, several integers separated by commas are accepted too.
    """
    allowed = " or ".join([*map(repr, words), lengths or "a positive whole number"])

    def read(name: str, value: Any) -> str:
        word = value.strip().lower() if isinstance(value, str) else None
        if word in words:
            return word
        found = [_whole(part) for part in (value.split(",") if lengths and isinstance(value, str) else [value])]
        if any(part is None or part < 1 for part in found):
            raise _refusal(name, allowed, value, words)
        return ",".join(map(str, found))

    return read


def interval(name: str, value: Any) -> str:
    """Parse "epoch", a number of steps, or a share of the run between 0 and 1, and return it as text."""
    if isinstance(value, str) and value.strip().lower() == "epoch":
        return "epoch"
    found = _finite(value)
    if found is not None and 0 < found < 1:
        return repr(found)
    steps = _whole(value)
    # Reject 1.0, which could mean one step or the whole run.
    is_share = not isinstance(value, Integral) and not _DIGITS.fullmatch(str(value).strip())
    if steps is None or steps < 1 or is_share:
        raise _refusal(name, "'epoch', a positive number of steps, or a share of the run between 0 and 1", value)
    return str(steps)


def optional(read: Reader) -> Reader:
    """Return a parser that accepts what `read` does, or None, "none", "null" and the empty string as None."""

    def read_or_none(name: str, value: Any) -> Any:
        is_nothing = value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)
        return None if is_nothing else read(name, value)

    return read_or_none


def path(name: str, value: Any) -> str:
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(found, str) or "\0" in found:
        raise _refusal(name, "a path", value)
    # Python has halves of pairs in place of what the system could not decode: names with other bytes than UTF-8.
    if any("\ud800" <= letter <= "\udfff" for letter in found):
        raise _refusal(name, "a path in UTF-8, as the files of a run name it", value)
    return found


def freeze_table(name: str, value: Any) -> str:
    """Parse `"step:layers,..."` and return it sorted by step."""
    if not isinstance(value, str):
        raise _refusal(name, "'step:layers,...' (in quotes: YAML takes 100:2 for the number 6002)", value)
    return ",".join(f"{step}:{layers}" for step, layers in parse_freeze_at(value).items())


def parse_freeze_at(text: str) -> dict[int | Fraction, int | Fraction]:
    """Parse `"step:layers,..."` into a table from step to frozen layers, sorted by step.

    Steps are numbers or shares of the run, layers numbers or shares of all layers.

    Raises:
        ValueError: malformed text, a step that occurs twice, or numbers mixed with shares.
    """
    table: dict[int | Fraction, int | Fraction] = {}
    for part in text.split(","):
        step, layers = map(_number_or_share, part.partition(":")[::2])
        if step is None or layers is None:
            raise ValueError(
                f"freeze_at={_shown(text)}: {_shown(part.strip())} is not 'step:layers'. Expected for example "
                "'100:2,200:4', or shares of the run and of the layers as in '0:2/3,1/2:0'."
            )
        if step in table:
            raise ValueError(f"freeze_at={_shown(text)} names step {step} twice: expected each step once.")
        table[step] = layers
    for what, found in (("steps", table.keys()), ("layers", table.values())):
        # 0 is both a number and a share.
        if len({type(value) for value in found if value}) > 1:
            raise ValueError(f"freeze_at={_shown(text)} has numbers and shares of {what}: expected only one of them.")
    return dict(sorted(table.items()))


def layers_or_share(name: str, value: Any) -> str:
    """Parse a number of layers, or a share of them such as 2/3, 0.5 or 50%, and return it as text."""
    wanted = None if isinstance(value, bool) else _number_or_share(str(value))
    if wanted is None:
        raise _refusal(name, "a number of layers, or a share of them between 0 and 1 such as '2/3'", value)
    return str(wanted)


def _number_or_share(text: str) -> int | Fraction | None:
    """Return a number, or a share between 0 and 1, also one in percent; None for anything else."""
    text = text.strip()
    if _DIGITS.fullmatch(text):
        return int(text)
    percent = _PERCENT.fullmatch(text)
    if percent is None and not _SHARE.fullmatch(text):
        return None
    share = Fraction(text) if percent is None else Fraction(percent[1]) / 100
    return share if 0 < share < 1 else None


def _real(value: Any) -> float | None:
    """Convert a number or numeric string to float; None for anything else, and for NaN."""
    # To Python a bool is a number, but in place of one it is a mistake.
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        return None
    try:
        found = float(value)
    # Whole numbers beyond the largest float overflow.
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(found) else found


def _finite(value: Any) -> float | None:
    found = _real(value)
    return found if found is not None and math.isfinite(found) else None


def _whole(value: Any) -> int | None:
    """Convert an integer of at most 18 digits, a string of one, or an integral float; None for anything else."""
    # Not by way of a float, which rounds whole numbers of more than 15 digits.
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (Integral, Real, str)):
        return None
    found = int(value) if isinstance(value, Integral) else _finite(value)
    is_whole = found is not None and abs(found) < 10**18 and int(found) == found
    return int(found) if found is not None and is_whole else None


def closest(word: Any, known: Iterable[str]) -> str:
    """Return a sentence that names the most similar of the `known` words, in any case; empty if none is similar.

    Of names in several words, those with all words of the given one come first.
    """
    if not isinstance(word, str):
        return ""
    given = word.strip().lower()
    known = list(known)
    names = [name for name in known if {*given.split("_")} <= {*name.split("_")}]
    found = difflib.get_close_matches(given, names or known, n=1, cutoff=0.0 if names else 0.6)
    return f" Did you mean {found[0]!r}?" if found else ""


def _refusal(name: str, expected: str, value: Any, words: Iterable[str] = ()) -> ValueError:
    return ValueError(f"{name} must be {expected}, found {_shown(value)}.{closest(value, words)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."


# ---- numeric options of Trainer ----

_at_least_one = whole_number("a positive whole number", least=1)
_any_whole = whole_number("a whole number", least=-(10**18))
_any_number = number("a number")
_not_negative = number("a number, 0 or more", lambda x: x >= 0)
_decay = number("a number in [0, 1)", lambda x: 0 <= x < 1)

TRAINERS_NUMBERS: dict[str, Reader] = {
    "gradient_accumulation_steps": _at_least_one,
    "per_device_train_batch_size": _at_least_one,
    "per_device_eval_batch_size": _at_least_one,
    "eval_accumulation_steps": optional(_at_least_one),
    # -1, Trainer's default, sets no limit.
    "max_steps": _any_whole,
    "num_train_epochs": number("a number of epochs, 0 or more", lambda x: x >= 0),
    "learning_rate": optional(_not_negative),  # Adafactor takes None.
    "warmup_steps": _not_negative,
    "weight_decay": _any_number,
    "adam_beta1": _decay,
    "adam_beta2": _decay,
    "adam_epsilon": _not_negative,
    # Infinite, it clips nothing, and the norm is logged all the same.
    "max_grad_norm": optional(number("a number", may_be_infinite=True)),
    "label_smoothing_factor": _any_number,
    "neftune_noise_alpha": optional(_not_negative),
    "logging_steps": optional(_any_number),
    "eval_steps": optional(_any_number),
    "save_steps": optional(_any_number),
    "eval_delay": optional(number("a number", may_be_infinite=True)),
    # As with Trainer, 0 and less delete nothing.
    "save_total_limit": optional(_any_whole),
    # numpy, which Trainer seeds as well, takes no others.
    "seed": whole_number(f"a whole number from 0 to {2**32 - 1}", least=0, most=2**32 - 1),
    "data_seed": optional(_any_whole),
    "dataloader_num_workers": whole_number("a whole number, 0 or more", least=0),
}
"""Ranges of Trainer's own numeric options. Outside them Trainer silently trains nothing, gets NaN, or fails late."""

STRATEGIES_READING = {
    "logging_steps": ("logging_strategy", ("steps",)),
    "save_steps": ("save_strategy", ("steps",)),
    "eval_delay": ("eval_strategy", ("steps", "epoch")),
}
"""Strategies with which Trainer compares one of these options with a number of steps, so that it may not be None."""


def read_trainers_numbers(args: Any) -> None:
    """Check Trainer's numeric options and convert those given as text."""
    for name, read in TRAINERS_NUMBERS.items():
        value = getattr(args, name)
        if name == "num_train_epochs" and isinstance(args.max_steps, int) and args.max_steps > 0:
            continue  # max_steps overrides it.
        found = read(name, value)
        strategy, needing = STRATEGIES_READING.get(name, ("", ()))
        if found is None and needing and getattr(args, strategy) in needing:
            word = str(getattr(getattr(args, strategy), "value", getattr(args, strategy)))
            raise ValueError(
                f"{name} must be a number with {strategy}={word!r}, found {value!r}. Set it, or {strategy}='no'."
            )
        # Read as a float, but Trainer takes an int for a number of steps, and a float for a share of the run.
        if isinstance(found, float) and isinstance(value, str) and found.is_integer():
            found = int(found)
        if isinstance(found, int) or isinstance(value, str):
            setattr(args, name, found)
