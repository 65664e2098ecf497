"""Answers of policies as whole layers."""

from __future__ import annotations

import math


_NOISE = 1e-9
"""An answer that is a whole number but for floating-point noise is that number, not the next one."""


def rounded_up(value: float) -> int:
    """The whole number that `value` is, or the next one."""
    return math.ceil(value - _NOISE)
