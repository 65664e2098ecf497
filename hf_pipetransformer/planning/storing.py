"""Decide whether caching activations pays, and predict what the rest of the run reads and writes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


MODES = ("auto", "on", "off")


def why_not_over_nodes(pipeline_size: int, node_size: int) -> str:
    """Return why pipelines of `pipeline_size` ranks on nodes of `node_size` ranks store nothing."""
    return (
        f"each pipeline spans nodes (K={pipeline_size} on nodes of {node_size} processes), and what one node stores "
        f"the stages on others cannot read. It needs a K that divides {node_size}"
    )


class ComputeTimes(NamedTuple):
    """Times of what a pipeline computes, in seconds per sample on one device.

    Args:
        prefix: item `f` is the forward of the embeddings and `f` blocks.
        active: forward and backward above the frozen blocks.
        pipeline_size: stages that share both.
    """

    prefix: Sequence[float]
    active: float = 0.0
    pipeline_size: int = 1


@dataclass(frozen=True)
class CacheCosts:
    """Measured times, all in seconds per sample. `read` and `write` are those of a record.

    Args:
        prefix: `prefix[f]` is the forward of the embeddings and `layers[0:f]`; `prefix[0]` is the embeddings alone.
        input: reading, decoding, tokenizing and collating a sample, minus what DataLoader workers hide.
        is_apart: True if the device leaves the host's cores free: threads read the records of the next batch and write
            those of the last one while it computes.
        num_at_once: batches that a step takes one after the other before it computes, of which only the first one has
            been read ahead: those whose gradients it accumulates.
        active: computation above the frozen blocks, forward and backward.
    """

    prefix: tuple[float, ...]
    input: float
    read: float
    write: float
    is_apart: bool = False
    num_at_once: int = 1
    active: float = 0.0

    def beside(self, active: float, pipeline_size: int = 1) -> CacheCosts:
        """Return the costs in a pipeline of so many equal stages, which computes `active` on one device.

        The stages share the computation, but one of them reads all records.
        """
        prefix = tuple(seconds / pipeline_size for seconds in self.prefix)
        return replace(self, prefix=prefix, active=active / pipeline_size)

    def reading(self, computed: float = 0.0) -> float:
        """Return what a record that is read adds to a step, which computes `computed` besides the active blocks.

        On a CPU nothing is hidden: what reads and writes takes a core from what computes.
        """
        if not self.is_apart:
            return self.read
        return self.read - min(self.read / self.num_at_once, self.active + computed)

    def writing(self, computed: float = 0.0) -> float:
        """Return what a record that is written adds, like `reading`."""
        return max(0.0, self.write - self.active - computed) if self.is_apart else self.write


@dataclass(frozen=True)
class DiskProfile:
    """Records of the activation cache on one node.

    Args:
        record_bytes: bytes of a sample's record.
        allowed_bytes: limit of the node's records.
        read: seconds to read a record, `write` to write it, `input` to read and collate a sample instead.
        why_off: why nothing can be stored; None if it can.
        is_shared: True if `read` and `write` are those of one rank alone, which all readers of a node slow down.
    """

    record_bytes: float = 0.0
    allowed_bytes: float = 0.0
    read: float = 0.0
    write: float = 0.0
    input: float = 0.0
    why_off: str | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class Caching:
    """Bytes that the records of a node need and may take, the share of the samples that fit, or why none is stored.

    `is_used` says if the run would store anything, and `reason` why.
    """

    needed_bytes: float
    allowed_bytes: float
    share: float
    why_off: str | None = None
    is_used: bool = False
    reason: str = ""


@dataclass(frozen=True)
class CacheDecision:
    """Use of the cache until the next decision: `use` reads records, `write` moves them to the new level.

    Args:
        level: level the records will have: `num_frozen` if `write`, else their present level.
        costs: seconds per sample over the rest of the run, by choice: "compute", "keep", "write".
        fresh_share: share of the samples that each later pass augments again, replacing their oldest slot.
    """

    use: bool
    write: bool
    level: int
    costs: dict[str, float]
    reason: str
    fresh_share: float = 0.0


@dataclass(frozen=True)
class StoreContents:
    """Records that a store has, and what fits into it; raises ValueError for a share outside 0 to 1.

    Args:
        level: the number of blocks that the records cover; 0 if nothing is stored.
        share: share of the samples that have a record, 0 to 1.
        fits_share: share of the samples whose records fit, 0 to 1.
    """

    level: int = 0
    share: float = 0.0
    fits_share: float = 1.0

    def __post_init__(self) -> None:
        for name, share in (("stored_share", self.share), ("fits_share", self.fits_share)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}: expected a share from 0 to 1.")


@dataclass(frozen=True)
class SlotCosts:
    """Effect of storing random samples in several augmentation slots, see `data.augmentation`.

    Args:
        num_slots: the number of records per sample V; 1 also for samples that are not random.
        fresh_share: share of the samples that a pass augments again once the first V passes have filled the records.
    """

    num_slots: int = 1
    fresh_share: float = 0.0


ONE_SLOT = SlotCosts()

FRESH_BUDGET = 0.1
"""Fresh augmentations may add this fraction to a pass that reads all records and trains the blocks above."""


def fresh_share(costs: CacheCosts, num_frozen: int) -> float:
    """Return the share of the samples, 0 to 1 by 0.001, that each pass may augment again by `FRESH_BUDGET`."""
    prefix = costs.prefix[num_frozen]
    extra = costs.input + prefix + costs.writing(prefix) - costs.reading()
    budget = FRESH_BUDGET * (costs.reading() + costs.active)
    return 1.0 if extra <= budget else math.floor(1000 * budget / extra) / 1000


def decide_cache(
    costs: CacheCosts,
    num_frozen: int,
    stored: StoreContents,
    epochs_left: float,
    mode: str,
    slots: SlotCosts = ONE_SLOT,
) -> CacheDecision:
    """Choose the cheapest way to get the output of the frozen prefix for the rest of the run.

    With E epochs left, F frozen blocks, and a share s of the samples stored at level g, a sample costs over the rest
    of the run:

        compute   E (input + prefix[F])
        keep      s E (read + prefix[F] - prefix[g]) + (1 - s) compute
        write     s (read + prefix[F] - prefix[g] + write) + (p - s) (input + prefix[F] + write)
                  + p (E - 1) read + (1 - p) compute

    where p is the share that fits into the store, at least s. With V slots per sample, the first V passes write, and
    in later passes a share n of the samples is augmented again:

        write     V (s (read + prefix[F] - prefix[g] + write) + (p - s) (input + prefix[F] + write))
                  + p (E - V) ((1 - n) read + n (input + prefix[F] + write)) + (1 - p) E (input + prefix[F])

    Where records are read and written beside the computation of a device, `read` and `write` are what is left of them.
    Writing is an option only if E > V. A record already at level F is not written again. On a tie, the choice that
    stores less wins. PipeTransformer (section 3.4) profiles recomputing against loading; the sum over the remaining
    epochs adds the cost of writing and how often it pays off.

    Args:
        num_frozen: F.
        stored: g, s and p; records above F are ignored.
        epochs_left: E, how often an average sample will still be read, the current epoch included.
        mode: "auto" takes the cheapest; "on" caches whenever records will be read again; "off" never caches.

    Raises:
        ValueError: unknown mode, or no measured time for F blocks.
    """
    if mode not in MODES:
        raise ValueError(f"The mode of the cache is {mode!r}: expected one of {', '.join(MODES)}.")
    if not 0 <= num_frozen < len(costs.prefix):
        raise ValueError(
            f"{num_frozen} layers are frozen: expected 0 to {len(costs.prefix) - 1}, the prefixes that were measured."
        )
    is_usable = stored.share > 0 and 0 < stored.level <= num_frozen
    used = stored if is_usable else StoreContents(fits_share=stored.fits_share)
    found = _costs(costs, num_frozen, used, max(epochs_left, 0.0), slots)
    choice, reason = _choose(found, num_frozen, epochs_left, mode, slots)
    writes = choice == "write"
    level = num_frozen if writes else stored.level
    return CacheDecision(choice != "compute", writes, level, found, reason, slots.fresh_share if writes else 0.0)


def _costs(
    costs: CacheCosts, num_frozen: int, stored: StoreContents, epochs: float, slots: SlotCosts
) -> dict[str, float]:
    """Return the seconds per sample of each possible choice, ordered by how much it stores."""
    prefix, share = costs.prefix[num_frozen], stored.share
    computed = costs.input + prefix
    found = {"compute": epochs * computed}
    if num_frozen == 0:
        return found
    # Noise can make a longer prefix measure faster than a shorter one.
    missing = max(prefix - costs.prefix[stored.level], 0.0)
    advanced = costs.reading(missing) + missing
    if share > 0:
        found["keep"] = epochs * (share * advanced + (1 - share) * computed)
    passes, new = slots.num_slots, slots.fresh_share
    if epochs > passes:
        # Records that are stored already fit.
        fits = max(stored.fits_share, share)
        rewritten = 0.0 if stored.level == num_frozen else costs.writing(missing)
        anew = computed + costs.writing(prefix)
        first = share * (advanced + rewritten) + (fits - share) * anew
        later = (1 - new) * costs.reading() + new * anew
        found["write"] = passes * first + fits * (epochs - passes) * later + (1 - fits) * epochs * computed
    return found


def _choose(
    found: dict[str, float], num_frozen: int, epochs_left: float, mode: str, slots: SlotCosts
) -> tuple[str, str]:
    if num_frozen == 0 or mode == "off":
        return "compute", "the cache is switched off" if num_frozen else "no layer is frozen"
    if mode == "on" and "write" in found:
        return "write", "the cache is switched on"
    epochs = f"{epochs_left:.3g} epoch{'' if epochs_left == 1 else 's'}"
    left = f"{epochs} left" + (f" for {slots.num_slots} slots" if slots.num_slots > 1 else "")
    if mode == "on":
        chosen = "keep" if "keep" in found else "compute"
        return chosen, f"nothing is written with {left}: no record would be read again"
    # On a tie, min keeps the first entry, the choice that stores less.
    chosen = min(found, key=lambda name: found[name])
    if len(found) == 1:
        return chosen, f"{left}: no record would be read again"
    named = {"compute": "recomputing", "keep": "reading what is cached", "write": "caching anew"}
    compared = ", ".join(f"{named[name]} {1000 * cost:.3g} ms" for name, cost in found.items())
    return chosen, f"over {epochs} a sample costs: {compared}"


@dataclass(frozen=True)
class Pass:
    """Consecutive optimizer steps that find the same records in the store.

    Args:
        level: the number of blocks covered by the records that are read.
        share: share of the samples whose records are read, 0 to 1; the others are computed.
        record_seconds: change against now, in seconds per sample, of reading samples and records and writing records.
    """

    steps: float
    level: int = 0
    share: float = 0.0
    record_seconds: float = 0.0


def passes_ahead(
    costs: CacheCosts,
    level: int,
    stored: StoreContents,
    steps_left: int,
    steps_per_epoch: int,
    slots: SlotCosts = ONE_SLOT,
    now: float | None = None,
) -> tuple[Pass, ...]:
    """Predict the passes to come: those that write records of `level` (one per slot), then those that read them.

    Args:
        level: the number of blocks whose output is stored from now on; 0 for none.
        stored: the present records; those of more than `level` blocks, which unfreeze, are not read again.
        steps_left: optimizer steps.
        now: seconds per sample that the measured step spends on reading; those of these costs by default.
    """
    share = stored.share if stored.level else 0.0
    now = reading_seconds(costs, share) if now is None else now
    if not level:
        return (Pass(steps_left, record_seconds=costs.input - now),)
    if stored.level > level:
        stored, share = StoreContents(fits_share=stored.fits_share), 0.0
    fits, prefix = max(stored.fits_share, share), costs.prefix[level]
    missing = max(prefix - costs.prefix[stored.level], 0.0) if share else prefix
    rewritten = 0.0 if stored.level == level else share * costs.writing(missing)
    written = rewritten + (fits - share) * costs.writing(prefix)
    first = min(steps_left, slots.num_slots * steps_per_epoch)
    reading = reading_seconds(costs, share, missing)
    found = [Pass(first, stored.level if share else 0, share, reading + written - now)]
    if steps_left > first:
        read, new = fits * (1 - slots.fresh_share), fits * slots.fresh_share
        later = reading_seconds(costs, read) + new * costs.writing(prefix)
        found.append(Pass(steps_left - first, level, read, later - now))
    return tuple(found)


def reading_seconds(costs: CacheCosts, share: float, computed: float = 0.0) -> float:
    """Return the seconds per sample spent reading if `share` of the samples come from the store.

    `computed` is what the frozen blocks above their records compute.
    """
    return share * costs.reading(computed) + (1 - share) * costs.input
