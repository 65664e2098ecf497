"""How far the numbers of two runs may be compared, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    """Return 0 where both are not a number, or the same infinity."""
    if found == expected:
        return 0.0
    if math.isnan(expected) or math.isnan(found):
        return 0.0 if math.isnan(expected) and math.isnan(found) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-12)


def tensor_difference(found: torch.Tensor, expected: torch.Tensor, floor: float = 1e-12) -> float:
    """Return the norm of the difference over the norm; 0 where both are not a number at the same places.

    Args:
        floor: a smaller norm counts as that.
    """
    assert found.shape == expected.shape
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isnan(), expected.isnan()):
        return math.inf
    difference = (found - expected).nan_to_num().norm() / expected.nan_to_num().norm().clamp_min(floor)
    return float(difference)


def far_steps(
    found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]], key: str, tolerance: float
) -> dict[float, tuple[float, float]]:
    """Return both values of `key` by step, of entries of two logs of the same steps that differ by more."""
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected], key
    return {
        mine["step"]: (mine[key], theirs[key])
        for mine, theirs in zip(found, expected, strict=True)
        if not relative_difference(mine[key], theirs[key]) <= tolerance
    }


def far_tensors(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
    ignored: Callable[[str], bool] = lambda name: False,
    floor: float = 1e-12,
) -> dict[str, float]:
    """Return the relative differences of tensors of the same names and dtypes that differ by more, but for some."""
    assert found.keys() == expected.keys()
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
    return {
        name: difference
        for name, value in expected.items()
        if not ignored(name) and not (difference := tensor_difference(found[name], value, floor)) <= tolerance
    }
