"""How far the numbers of two runs may be compared, and how far apart they are."""

from __future__ import annotations

import math
from typing import Any

import torch


METRIC_TOLERANCE = 1e-6

_TIMED = ("_runtime", "_per_second", "_time")


def untimed(result: Any) -> Any:
    """Return metrics, or a list of them, without what a clock or the size of a layout decides."""
    if isinstance(result, list):
        return [untimed(item) for item in result]
    if not isinstance(result, dict):
        return result
    return {key: value for key, value in result.items() if not key.endswith(_TIMED) and key != "total_flos"}


def relative_difference(found: float, expected: float) -> float:
    """Return 0 where both are not a number."""
    if math.isnan(expected) or math.isnan(found):
        return 0.0 if math.isnan(expected) and math.isnan(found) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-12)


def tensor_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm; 0 where both are not a number at the same places."""
    assert found.shape == expected.shape
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isnan(), expected.isnan()):
        return math.inf
    difference = (found - expected).nan_to_num().norm() / expected.nan_to_num().norm().clamp_min(1e-12)
    return float(difference)
