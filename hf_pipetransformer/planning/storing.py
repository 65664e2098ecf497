"""Ways to store activations, and what the rest of the run reads and writes with each of them. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf


def why_not_over_nodes(pipeline_size: int, node_size: int) -> str:
    """Return why pipelines of `pipeline_size` ranks on nodes of `node_size` ranks store nothing."""
    return (
        f"each pipeline spans nodes (K={pipeline_size} on nodes of {node_size} processes), and what one node stores "
        f"the stages on others cannot read. It needs a K that divides {node_size}"
    )


@dataclass(frozen=True)
class Storing:
    """Costs of storing what frozen layers give, the records that a store has, and the rule that decides on more.

    Times are measured, all in seconds per sample; `read` and `write` are those of a record.

    Args:
        prefix: `prefix[f]` is the forward of the embeddings and `layers[0:f]`; `prefix[0]` is the embeddings alone.
            The search fills it in, and `active`.
        is_apart: True if the device leaves the host's cores free: threads read the records of the next batch and write
            those of the last one while it computes.
        num_at_once: batches that a step takes one after the other before it computes, of which only the first one has
            been read ahead: those whose gradients it accumulates.
        active: computation above the frozen blocks, forward and backward.
        mode: `auto`, `on` or `off`.
        level: the number of blocks that the present records cover; 0 if nothing is stored.
        share: share of the samples that have a record, 0 to 1.
        fits_share: share of the samples whose records fit, 0 to 1.
        steps_per_epoch: optimizer steps, or any other unit in which the length of a run is given too.
        dropout_from: number of frozen layers from which on storing would change what the script's frozen layers
            compute. `auto` stores nothing there, because by default no number differs from Trainer's.
        now: seconds per sample that the measured steps spend on reading records. They are a part of the measured
            overhead of a step, and other numbers of stages read other numbers of records.
    """

    prefix: tuple[float, ...]
    read: float
    write: float
    is_apart: bool = False
    num_at_once: int = 1
    active: float = 0.0
    mode: str = "auto"
    level: int = 0
    share: float = 0.0
    fits_share: float = 1.0
    steps_per_epoch: float = 1.0
    dropout_from: float = inf
    now: float = 0.0

    def keeps_dropout(self, num_frozen: int) -> bool:
        return self.mode == "auto" and num_frozen >= self.dropout_from

    def beside(self, active: float, pipeline_size: int = 1) -> Storing:
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
        read: seconds to read a record, `write` to write it.
        why_off: why nothing can be stored; None if it can.
        is_shared: True if `read` and `write` are those of one rank alone, which all readers of a node slow down.
    """

    record_bytes: float = 0.0
    allowed_bytes: float = 0.0
    read: float = 0.0
    write: float = 0.0
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
class Pass:
    """Consecutive optimizer steps that find the same records in the store.

    Args:
        level: the number of blocks covered by the records that are read.
        share: share of the samples whose records are read, 0 to 1; the others are computed.
        record_seconds: seconds per sample of reading and writing records.
    """

    steps: float
    level: int = 0
    share: float = 0.0
    record_seconds: float = 0.0


@dataclass(frozen=True)
class Way:
    """Way to get the output of the frozen layers for the rest of a run.

    Args:
        name: `compute` stores nothing, `keep` stays at the level of the present records, `write` brings them to all
            frozen layers.
        level: the number of layers whose output is stored from now on; 0 for none.
        passes: steps that follow.
        reason: why it was chosen; empty where nothing could be stored.
        seconds: compared costs of all ways by name; empty where there was nothing to compare.
    """

    name: str
    level: int
    passes: tuple[Pass, ...]
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def use(self) -> bool:
        """True if anything is stored."""
        return self.level > 0


COMPUTE = Way("compute", 0, ())
"""Nothing is stored, and nothing was decided."""


def passes_ahead(storing: Storing, num_frozen: int, level: int, steps_left: float) -> tuple[Pass, ...]:
    """Predict the passes to come: the one that writes records of `level`, then those that read them.

    Present records of more than `level` blocks, which unfreeze, are not read again.

    Args:
        level: the number of blocks whose output is stored from now on, up to `num_frozen`; 0 for none.
        steps_left: optimizer steps.
    """
    if not level:
        return (Pass(steps_left),)
    # Records of layers that train again hold what the weights of earlier steps computed.
    share, whole = storing.share if 0 < storing.level <= level else 0.0, storing.prefix[num_frozen]
    # Records that are there fit, whatever has filled the disk since.
    fits = max(storing.fits_share, share)
    # Frozen blocks above a record run while the device's host reads, and everything runs while it writes anew.
    above_old = max(whole - storing.prefix[storing.level], 0.0) if share else whole
    above_new = max(whole - storing.prefix[level], 0.0)
    # Records of fewer layers are written anew as they are read; those of this level stay.
    rewritten = 0.0 if storing.level == level else share * storing.writing(above_old)
    written = rewritten + (fits - share) * storing.writing(whole)
    first = min(steps_left, storing.steps_per_epoch)
    reading = share * storing.reading(above_old)
    found = [Pass(first, storing.level if share else 0, share, reading + written)]
    if steps_left > first:
        found.append(Pass(steps_left - first, level, fits, fits * storing.reading(above_new)))
    return tuple(found)


# ---- the choice ----


def ways_of_storing(storing: Storing, num_frozen: int, steps_left: float) -> dict[str, Way]:
    """Return the possible ways to get the output of the frozen layers until the end of a run, by name.

    They come in the order of how much they store; to write is possible only if a record will be read again.
    PipeTransformer (section 3.4) profiles recomputing against loading; the passes to come also have the cost of
    writing, and how often that pays off. Present records of more than `num_frozen` layers are of no use.

    Args:
        steps_left: optimizer steps, or any other unit that `steps_per_epoch` has too.
    """
    levels = {"compute": 0}
    if storing.share > 0 and 0 < storing.level <= num_frozen:
        levels["keep"] = storing.level
    # Records at the wanted level need no writing: that would be to keep them.
    is_written = "keep" in levels and storing.level == num_frozen
    # In the epoch that writes them no record is read again.
    if num_frozen and not is_written and steps_left > storing.steps_per_epoch:
        levels["write"] = num_frozen
    return {
        name: Way(name, level, passes_ahead(storing, num_frozen, level, steps_left)) for name, level in levels.items()
    }


def choose_way(
    storing: Storing,
    ways: Mapping[str, Way],
    seconds: Mapping[str, float],
    num_frozen: int,
    steps_left: float,
    of: str,
    fitting: Collection[str] | None = None,
) -> Way:
    """Choose the way that takes least time of those that the mode allows: `on` the one that stores most.

    Args:
        seconds: compared costs by way; `of` names what they are costs of.
        fitting: ways whose layouts fit in memory; None for all. One that does not is out, unless none does.
    """
    keeps_dropout = storing.keeps_dropout(num_frozen)
    mode = "off" if keeps_dropout else storing.mode
    possible = list(ways)
    allowed = {"auto": possible, "on": possible[-1:], "off": ["compute"]}[mode]
    allowed = [name for name in allowed if fitting is None or name in fitting] or allowed
    least = min(seconds[name] for name in allowed)
    # The first of those that are equal but for rounding stores least.
    name = next(name for name in allowed if seconds[name] <= least * (1 + 1e-9))
    number = steps_left / storing.steps_per_epoch
    epochs = f"{number:.3g} epoch{'' if number == 1 else 's'}"
    named = {"compute": "recomputing", "keep": "reading what is cached", "write": "caching anew"}
    compared = (
        f"{named[way]} {cost:.3g} s" if cost >= 1 else f"{named[way]} {1000 * cost:.3g} ms"
        for way, cost in seconds.items()
    )
    reasons = (
        (keeps_dropout, "frozen layers compute something else in training mode"),
        (num_frozen == 0, "no layer is frozen"),
        (mode == "off", "the cache is switched off"),
        (mode == "on" and ways[name].level == num_frozen, "the cache is switched on"),
        (mode == "on", f"nothing is written with {epochs} left: no record would be read again"),
        (len(ways) == 1, f"{epochs} left: no record would be read again"),
        (True, f"over {epochs} {of} costs: {', '.join(compared)}"),
    )
    reason = next(text for holds, text in reasons if holds)
    return replace(ways[name], reason=reason, seconds=seconds)


def epochs_of_a_record(epochs: float, num_nodes: int) -> float:
    """Return for how many epochs a record counts if each epoch deals the samples anew to nodes with own stores.

    A node has seen a sample before with probability `1 - (1 - 1/n)^e` after `e` epochs, and computes and stores it
    otherwise. For each time that a record is written, `E / (n (1 - (1 - 1/n)^E))` are dealt: `E` with one node.
    """
    return epochs / (num_nodes * (1 - (1 - 1 / num_nodes) ** epochs)) if epochs > 0 else 0.0


def decide_cache(storing: Storing, num_frozen: int, epochs_left: float) -> Way:
    """Choose the way that takes least time for a sample where one process computes everything; see `ways_of_storing`.

    With E epochs left, F frozen blocks, and a share s of the samples stored at level g, a sample costs over the rest
    of the run:

        compute   E prefix[F]
        write     s (read + prefix[F] - prefix[g] + write) + (p - s) (prefix[F] + write)
                  + p (E - 1) read + (1 - p) compute

    where p is the share that fits into the store, at least s; `keep` is `write` with the records at level g. Where
    records are read and written beside the computation of a device, `read` and `write` are what is left of them. On a
    tie, the way that stores less wins.

    Args:
        storing: with an epoch of one step; has g, s and p.
        num_frozen: F.
        epochs_left: E, how often an average sample will still be read, the current epoch included.
    """
    epochs_left = max(epochs_left, 0.0)
    ways, whole = ways_of_storing(storing, num_frozen, epochs_left), storing.prefix[num_frozen]
    computed = [max(0.0, whole - seconds) for seconds in storing.prefix]
    seconds = {
        name: sum(
            each.steps * (each.record_seconds + each.share * computed[each.level] + (1 - each.share) * whole)
            for each in way.passes
        )
        for name, way in ways.items()
    }
    return choose_way(storing, ways, seconds, num_frozen, epochs_left, "a sample")
