"""What the rest of a run reads from the activation cache, and what it writes first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pipetransformer.autocache.decision import ONE_ROW, CacheCosts, ViewCosts


@dataclass(frozen=True)
class Pass:
    """Optimizer steps to come that find the same rows.

    Args:
        steps: how many.
        level: layers that the rows cover which are read.
        share: of the samples whose rows are read, from 0 to 1; the others are computed.
        row_seconds: seconds per sample that reading samples and rows, and writing rows, takes more than now.
    """

    steps: float
    level: int = 0
    share: float = 0.0
    row_seconds: float = 0.0


def passes_ahead(
    costs: CacheCosts,
    level: int,
    stored_level: int,
    stored_share: float,
    fits_share: float,
    steps_left: int,
    steps_per_epoch: int,
    views: ViewCosts = ONE_ROW,
) -> tuple[Pass, ...]:
    """One pass over the data for each view that brings rows to `level`, and all later ones, which read them.

    Args:
        costs: measured times.
        level: layers whose output is stored from now on; 0: none.
        stored_level: layers that the rows cover which steps read now, no more than `level`; 0: there are none.
        stored_share: share of the samples that have such rows.
        fits_share: share of the samples whose rows fit; what is stored does.
        steps_left: optimizer steps.
        steps_per_epoch: optimizer steps.
        views: rows of a sample.
    """
    share = stored_share if stored_level else 0.0
    now = reading_seconds(costs, share)
    if not level:
        return (Pass(steps_left, row_seconds=costs.input - now),)
    fits = max(fits_share, share)
    written = fits - share if stored_level == level else fits
    first = min(steps_left, views.num_views * steps_per_epoch)
    found = [
        Pass(first, stored_level if share else 0, share, reading_seconds(costs, share) + written * costs.write - now)
    ]
    if steps_left > first:
        read, new = fits * (1 - views.fresh_share), fits * views.fresh_share
        found.append(Pass(steps_left - first, level, read, reading_seconds(costs, read) + new * costs.write - now))
    return tuple(found)


def reading_seconds(costs: CacheCosts, share: float) -> float:
    """Seconds per sample that reading takes where a share of them has rows."""
    return share * costs.read + (1 - share) * costs.input
