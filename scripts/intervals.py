"""Intervals of means for what is measured a few times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy.stats import t


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean by Student's t, of two values or more."""
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half
