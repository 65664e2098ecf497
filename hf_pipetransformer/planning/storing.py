"""When storing activations pays, and what the rest of a run reads and writes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class CacheCosts:
    """Measured times, all in seconds per sample.

    Args:
        prefix: `prefix[f]` is the forward of embeddings + `layers[0:f]`; `prefix[0]` is the embeddings alone.
        input: reading, decoding, tokenising and collating a sample, after what loader workers hide.
        read: of a stored row.
        write: of a row.
    """

    prefix: tuple[float, ...]
    input: float
    read: float
    write: float


@dataclass(frozen=True)
class CacheDecision:
    """What to do with stored rows until the next decision.

    Args:
        use: read stored rows.
        write: bring rows to the new level and store them there.
        level: level that rows will have: `num_frozen` if they are written, else the level that they have now.
        costs: seconds per sample over the rest of the run of each possible choice: "compute", "keep", "write".
        reason: why, in a few words.
        fresh_share: share of the samples that each pass draws and computes anew in place of their oldest view.
    """

    use: bool
    write: bool
    level: int
    costs: dict[str, float]
    reason: str
    fresh_share: float = 0.0


@dataclass(frozen=True)
class ViewCosts:
    """What views of random samples change, see `autodp.views`.

    Args:
        num_views: V, rows of a sample; 1 also where samples are not random.
        fresh_share: share of the samples that a pass draws anew once the first V have filled the rows.
    """

    num_views: int = 1
    fresh_share: float = 0.0


ONE_ROW = ViewCosts()
"""Samples that are not random have one row."""

FRESH_BUDGET = 0.1
"""New draws may cost this part of a pass that reads all rows and trains the layers above."""


def fresh_share(costs: CacheCosts, num_frozen: int, active: float) -> float:
    """Share of the samples that each pass may draw anew by `FRESH_BUDGET`, from 0 to 1, in steps of a thousandth.

    Args:
        costs: measured times.
        num_frozen: F.
        active: seconds per sample of what a pass computes above the frozen layers.
    """
    extra = costs.input + costs.prefix[num_frozen] + costs.write - costs.read
    budget = FRESH_BUDGET * (costs.read + active)
    return 1.0 if extra <= budget else math.floor(1000 * budget / extra) / 1000


def decide_cache(
    costs: CacheCosts,
    num_frozen: int,
    stored_level: int,
    stored_share: float,
    epochs_left: float,
    mode: str,
    fits_share: float = 1.0,
    views: ViewCosts = ONE_ROW,
) -> CacheDecision:
    """Choose the cheapest way to get the output of the frozen prefix for the rest of the run.

    With E epochs left, F frozen layers and a share s of the samples stored at level g, one sample costs over the rest
    of the run:

        compute   E (input + prefix[F])
        keep      s E (read + prefix[F] - prefix[g]) + (1 - s) compute
        write     s (read + prefix[F] - prefix[g] + write) + (p - s) (input + prefix[F] + write)
                  + p (E - 1) read + (1 - p) compute

    where p is the share that fits (what is stored does). With V views of each sample the first V passes write, and a
    share n of the samples is drawn anew in the others:

        write     V (s (read + prefix[F] - prefix[g] + write) + (p - s) (input + prefix[F] + write))
                  + p (E - V) ((1 - n) read + n (input + prefix[F] + write)) + (1 - p) E (input + prefix[F])

    A row that is at level F already is not written again. Of
    equal choices the one that stores less is taken. PipeTransformer section 3.4 compares the times of recomputing
    and of loading in a profiler; the sum over the epochs left adds what writing costs and how often it pays.

    Args:
        num_frozen: F.
        stored_level: g, the level of the rows that are stored now; 0 if there are none. Rows above F are of no use.
        stored_share: s, from 0 to 1.
        epochs_left: E, how often a sample is still read on average, the current epoch included.
        mode: "auto" takes the cheapest; "on" caches wherever rows are read again; "off" never caches.
        fits_share: share of the samples whose rows fit into the store, from 0 to 1.
        views: rows of a sample.

    Raises:
        ValueError: unknown mode, a share that is none, or no measured time for F layers.
    """
    _check(costs, num_frozen, stored_share, fits_share, mode)
    share = stored_share if 0 < stored_level <= num_frozen else 0.0
    found = _costs(costs, num_frozen, stored_level if share else 0, share, max(epochs_left, 0.0), fits_share, views)
    choice, reason = _choose(found, num_frozen, epochs_left, mode, views)
    writes = choice == "write"
    level = num_frozen if writes else stored_level
    return CacheDecision(choice != "compute", writes, level, found, reason, views.fresh_share if writes else 0.0)


def _check(costs: CacheCosts, num_frozen: int, stored_share: float, fits_share: float, mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"The mode of the cache is {mode!r}: expected one of {', '.join(MODES)}.")
    if not 0 <= num_frozen < len(costs.prefix):
        raise ValueError(
            f"{num_frozen} layers are frozen: expected 0 to {len(costs.prefix) - 1}, the prefixes that were measured."
        )
    for name, share in (("stored_share", stored_share), ("fits_share", fits_share)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}: expected a share from 0 to 1.")


def _costs(
    costs: CacheCosts,
    num_frozen: int,
    stored_level: int,
    share: float,
    epochs: float,
    fits_share: float,
    views: ViewCosts,
) -> dict[str, float]:
    """Seconds per sample of each choice that is possible; the first ones store less."""
    computed = costs.input + costs.prefix[num_frozen]
    found = {"compute": epochs * computed}
    if num_frozen == 0:
        return found
    # Two measured times may come out in the wrong order by noise.
    advanced = costs.read + max(costs.prefix[num_frozen] - costs.prefix[stored_level], 0.0)
    if share > 0:
        found["keep"] = epochs * (share * advanced + (1 - share) * computed)
    passes, new = views.num_views, views.fresh_share
    if epochs > passes:
        fits = max(fits_share, share)
        rewritten = 0.0 if stored_level == num_frozen else costs.write
        first = share * (advanced + rewritten) + (fits - share) * (computed + costs.write)
        later = (1 - new) * costs.read + new * (computed + costs.write)
        found["write"] = passes * first + fits * (epochs - passes) * later + (1 - fits) * epochs * computed
    return found


def _choose(
    found: dict[str, float], num_frozen: int, epochs_left: float, mode: str, views: ViewCosts
) -> tuple[str, str]:
    if num_frozen == 0 or mode == "off":
        return "compute", "the cache is switched off" if num_frozen else "no layer is frozen"
    if mode == "on" and "write" in found:
        return "write", "the cache is switched on"
    left = f"{epochs_left:.3g} epochs left" + (f" for {views.num_views} views" if views.num_views > 1 else "")
    if mode == "on":
        chosen = "keep" if "keep" in found else "compute"
        return chosen, f"nothing is written with {left}: no row would be read again"
    # min takes the first of equals.
    chosen = min(found, key=lambda name: found[name])
    if len(found) == 1:
        return chosen, f"{left}: no row would be read again"
    named = {"compute": "recomputing", "keep": "reading what is cached", "write": "caching anew"}
    compared = ", ".join(f"{named[name]} {1000 * cost:.3g} ms" for name, cost in found.items())
    return chosen, f"over {epochs_left:.3g} epochs a sample costs: {compared}"


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
