"""Ways to store activations, and what the rest of the run reads and writes with each of them. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


MODES = ("auto", "on", "off")


def why_not_over_nodes(pipeline_size: int, node_size: int) -> str:
    """Return why pipelines of `pipeline_size` ranks on nodes of `node_size` ranks store nothing."""
    return (
        f"each pipeline spans nodes (K={pipeline_size} on nodes of {node_size} processes), and what one node stores "
        f"the stages on others cannot read. It needs a K that divides {node_size}"
    )


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
        # Only the first of the batches that a step accumulates is read ahead, so that only its share can be hidden.
        return self.read - min(self.read / self.num_at_once, self.active + computed)

    def writing(self, computed: float = 0.0) -> float:
        """Return what a record that is written adds, like `reading`."""
        # Records are written when their batch is through, so that each batch of a step hides its own.
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
class Pass:
    """Consecutive optimizer steps that find the same records in the store.

    Args:
        level: the number of blocks covered by the records that are read.
        share: share of the samples whose records are read, 0 to 1; the others are computed.
        record_seconds: seconds per sample of reading samples and records and of writing records.
    """

    steps: float
    level: int = 0
    share: float = 0.0
    record_seconds: float = 0.0


def passes_ahead(
    costs: CacheCosts,
    num_frozen: int,
    level: int,
    stored: StoreContents,
    steps_left: float,
    steps_per_epoch: float,
) -> tuple[Pass, ...]:
    """Predict the passes to come: the one that writes records of `level`, then those that read them.

    Args:
        level: the number of blocks whose output is stored from now on, up to `num_frozen`; 0 for none.
        stored: the present records; those of more than `level` blocks, which unfreeze, are not read again.
        steps_left: optimizer steps.
    """
    if not level:
        return (Pass(steps_left, record_seconds=costs.input),)
    # Records of layers that train again hold what the weights of earlier steps computed.
    share, whole = stored.share if 0 < stored.level <= level else 0.0, costs.prefix[num_frozen]
    # Records that are there fit, whatever has filled the disk since.
    fits = max(stored.fits_share, share)
    # Frozen blocks above a record run while the device's host reads, and everything runs while it writes anew.
    above_old = max(whole - costs.prefix[stored.level], 0.0) if share else whole
    above_new = max(whole - costs.prefix[level], 0.0)
    # Records of fewer layers are written anew as they are read; those of this level stay.
    rewritten = 0.0 if stored.level == level else share * costs.writing(above_old)
    written = rewritten + (fits - share) * costs.writing(whole)
    first = min(steps_left, steps_per_epoch)
    found = [Pass(first, stored.level if share else 0, share, reading_seconds(costs, share, above_old) + written)]
    if steps_left > first:
        found.append(Pass(steps_left - first, level, fits, reading_seconds(costs, fits, above_new)))
    return tuple(found)


def reading_seconds(costs: CacheCosts, share: float, computed: float = 0.0) -> float:
    """Return the seconds per sample spent reading if `share` of the samples come from the store.

    `computed` is what the frozen blocks above their records compute.
    """
    return share * costs.reading(computed) + (1 - share) * costs.input


# ---- the choice ----


@dataclass(frozen=True)
class Way:
    """Way to get the output of the frozen layers for the rest of a run.

    Args:
        level: the number of layers whose output is stored from now on; 0 for none.
        passes: steps that follow.
    """

    level: int
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Ways:
    """Possible ways to store for the rest of a run by name, in the order of how much they store.

    `compute` stores nothing, `keep` stays at the level of the present records, `write` brings them to `num_frozen`
    layers; it is possible only if a record will be read again.

    Args:
        epochs_left: how often an average sample will still be read, the current epoch included.
    """

    by_name: dict[str, Way]
    num_frozen: int
    epochs_left: float

    def decide(
        self, seconds: Mapping[str, float], mode: str, of: str, fitting: Collection[str] | None = None
    ) -> CacheDecision:
        """Choose the way that takes least time of those that the mode allows: `on` the one that stores most.

        Args:
            seconds: compared costs by way; `of` names what they are costs of.
            fitting: ways whose layouts fit in memory; None for all. One that does not is out, unless none does.

        Raises:
            ValueError: unknown mode.
        """
        if mode not in MODES:
            raise ValueError(f"The mode of the cache is {mode!r}: expected one of {', '.join(MODES)}.")
        possible = list(self.by_name)
        allowed = {"auto": possible, "on": possible[-1:], "off": ["compute"]}[mode]
        allowed = [name for name in allowed if fitting is None or name in fitting] or allowed
        least = min(seconds[name] for name in allowed)
        # The first of those that are equal but for rounding stores least.
        name = next(name for name in allowed if seconds[name] <= least * (1 + 1e-9))
        way = self.by_name[name]
        return CacheDecision(name, way.level, self._reason(way, seconds, mode, of))

    def _reason(self, chosen: Way, seconds: Mapping[str, float], mode: str, of: str) -> str:
        if self.num_frozen == 0 or mode == "off":
            return "the cache is switched off" if self.num_frozen else "no layer is frozen"
        epochs = f"{self.epochs_left:.3g} epoch{'' if self.epochs_left == 1 else 's'}"
        if mode == "on" and chosen.level == self.num_frozen:
            return "the cache is switched on"
        if mode == "on":
            return f"nothing is written with {epochs} left: no record would be read again"
        if len(self.by_name) == 1:
            return f"{epochs} left: no record would be read again"
        named = {"compute": "recomputing", "keep": "reading what is cached", "write": "caching anew"}
        compared = (
            f"{named[way]} {cost:.3g} s" if cost >= 1 else f"{named[way]} {1000 * cost:.3g} ms"
            for way, cost in seconds.items()
        )
        return f"over {epochs} {of} costs: {', '.join(compared)}"


def ways_of_storing(
    costs: CacheCosts,
    num_frozen: int,
    stored: StoreContents,
    steps_left: float,
    steps_per_epoch: float,
) -> Ways:
    """Return the possible ways to get the output of the frozen layers until the end of a run.

    PipeTransformer (section 3.4) profiles recomputing against loading; the passes to come also have the cost of
    writing, and how often that pays off.

    Args:
        stored: the present records; those of more than `num_frozen` layers are of no use.
        steps_left: optimizer steps, or any other unit that `steps_per_epoch` has too.

    Raises:
        ValueError: no measured time for `num_frozen` layers.
    """
    if not 0 <= num_frozen < len(costs.prefix):
        raise ValueError(
            f"{num_frozen} layers are frozen: expected 0 to {len(costs.prefix) - 1}, the prefixes that were measured."
        )

    def way(level: int) -> Way:
        return Way(level, passes_ahead(costs, num_frozen, level, stored, steps_left, steps_per_epoch))

    found = {"compute": way(0)}
    if stored.share > 0 and 0 < stored.level <= num_frozen:
        found["keep"] = way(stored.level)
    # Records at the wanted level need no writing: that would be to keep them.
    is_written = "keep" in found and stored.level == num_frozen
    # In the epoch that writes them no record is read again.
    if num_frozen and not is_written and steps_left > steps_per_epoch:
        found["write"] = way(num_frozen)
    return Ways(found, num_frozen, steps_left / steps_per_epoch)


def epochs_of_a_record(epochs: float, num_nodes: int) -> float:
    """Return for how many epochs a record counts if each epoch deals the samples anew to nodes with own stores.

    A node has seen a sample before with probability `1 - (1 - 1/n)^e` after `e` epochs, and computes and stores it
    otherwise. For each time that a record is written, `E / (n (1 - (1 - 1/n)^E))` are dealt: `E` with one node.
    """
    return epochs / (num_nodes * (1 - (1 - 1 / num_nodes) ** epochs)) if epochs > 0 else 0.0


@dataclass(frozen=True)
class CacheDecision:
    """Choice of what is stored until the next decision, and its reason.

    Args:
        way: `compute`, `keep` or `write`, see `Ways`.
        level: the number of layers whose output is stored; 0 for none.
    """

    way: str
    level: int
    reason: str

    @property
    def use(self) -> bool:
        """True if anything is stored."""
        return self.level > 0


@dataclass(frozen=True)
class SampleDecision(CacheDecision):
    """Choice where one process computes everything, with the costs of a sample over the rest of the run by way."""

    seconds_per_sample: Mapping[str, float] = field(default_factory=dict)


def decide_cache(
    costs: CacheCosts,
    num_frozen: int,
    stored: StoreContents,
    epochs_left: float,
    mode: str,
) -> SampleDecision:
    """Choose the way that takes least time for a sample where one process computes everything; see `ways_of_storing`.

    With E epochs left, F frozen blocks, and a share s of the samples stored at level g, a sample costs over the rest
    of the run:

        compute   E (input + prefix[F])
        write     s (read + prefix[F] - prefix[g] + write) + (p - s) (input + prefix[F] + write)
                  + p (E - 1) read + (1 - p) compute

    where p is the share that fits into the store, at least s; `keep` is `write` with the records at level g. Where
    records are read and written beside the computation of a device, `read` and `write` are what is left of them. On a
    tie, the way that stores less wins.

    Args:
        num_frozen: F.
        stored: g, s and p.
        epochs_left: E, how often an average sample will still be read, the current epoch included.
    """
    # Epochs stand for steps.
    ways = ways_of_storing(costs, num_frozen, stored, max(epochs_left, 0.0), 1.0)
    computed = [max(0.0, costs.prefix[num_frozen] - seconds) for seconds in costs.prefix]

    def seconds_of(way: Way) -> float:
        return sum(
            each.steps
            * (each.record_seconds + each.share * computed[each.level] + (1 - each.share) * costs.prefix[num_frozen])
            for each in way.passes
        )

    seconds = {name: seconds_of(way) for name, way in ways.by_name.items()}
    found = ways.decide(seconds, mode, "a sample")
    return SampleDecision(found.way, found.level, found.reason, seconds)
