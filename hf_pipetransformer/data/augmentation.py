"""Choice of the draw of a random sample in each epoch: a new one, or one of the stored slots. Pure.

A *draw* is a sample as a random transform or collator returned it in one epoch, and its number is that epoch. A *slot*
is a slot for one draw of a sample; each sample has V slots. An *item* is one integer that encodes sample, draw and
slot; loaders, tags and the activation cache pass it on where they otherwise use the sample's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


Numbers = npt.NDArray[np.int64]

# Constants of SplitMix64, which gives a number for each position and has no state to save or to send.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class ItemCode:
    """Encoding of a sample, a draw of it and a slot as one integer. Items below `num_samples` are draw 0 in slot 0."""

    num_samples: int
    num_slots: int

    def items(self, samples: Numbers, draws: Numbers, slots: Numbers) -> Numbers:
        """Return the items `(n,)` of samples, draw numbers and slot numbers, `(n,)` each."""
        # The sample comes last, so that draw 0 in slot 0 is the plain index that code without slots knows.
        return (draws * self.num_slots + slots) * self.num_samples + samples

    def samples_of(self, items: Any) -> Any:
        """Return the index in the data set, of an integer or `(n,)`."""
        return items % self.num_samples

    def draw_numbers(self, items: Any) -> Any:
        """Return the number of the draw, of an integer or `(n,)`."""
        return items // (self.num_samples * self.num_slots)

    def records_of(self, items: Any) -> Any:
        """Return the number of the record in a store with V records per sample, of an integer or `(n,)`."""
        return items % self.num_samples * self.num_slots + items // self.num_samples % self.num_slots


@dataclass
class _Turns:
    """State of all samples after an epoch: draw in each slot, number of draws made, and the slot used last."""

    epoch: int
    draws: Numbers
    num_draws: Numbers
    last: Numbers


@dataclass
class AugmentationSlots:
    """Augmentation slots of all samples of a data set.

    Until slots begin, each epoch makes new draws. From epoch `first` on, with V=2 and one sample that is drawn again
    in the fourth epoch:

        epoch - first                        0   1   2   3   4   5
        slot                                 0   1   0   0   1   0
        epoch - first in which it was drawn  0   1   0   3   1   3

    The first V epochs draw each sample once and fill its slots. Later epochs use the slots in turn, except for a share
    of the samples, chosen by (seed, epoch, sample): a new draw replaces their oldest slot, and the turn continues
    after it. Nothing here depends on what is stored, on ranks or on the position in the epoch.

    Args:
        first: epoch in which slots began; None before.
        shares: pairs of a first epoch and the share of samples to draw again from then on; the last one applies.
    """

    code: ItemCode
    seed: int
    first: int | None = None
    shares: tuple[tuple[int, float], ...] = ()
    epoch: int = 0
    _turns: _Turns | None = field(default=None, init=False, repr=False)

    def follow(self, is_stored: bool, share: float) -> None:
        """Apply a decision of the present epoch: if slots are stored from now on, and the share to draw again.

        It applies from the next epoch on, because part of this one may be drawn already. The first V epochs always
        make new draws.
        """
        if not is_stored and self.first is None:
            return
        if self.first is None:
            self.first = self.epoch
        # Without records to read, every sample is drawn in every epoch.
        share = share if is_stored else 1.0
        if self.shares and self.shares[-1][1] == share:
            return
        # A second decision in one epoch replaces the first, which has not applied to anything yet.
        earlier = tuple(known for known in self.shares if known[0] <= self.epoch)
        self.shares = (*earlier, (self.epoch + 1, share))

    def items(self, samples: list[int]) -> list[int]:
        """Return the items that the present epoch uses for these samples."""
        index = np.asarray(samples, dtype=np.int64)
        if self.first is None or self.epoch < self.first:
            slots, draws = np.zeros_like(index), np.full_like(index, self.epoch)
        else:
            turns = self._turns_of(self.epoch)
            slots = turns.last[index]
            draws = turns.draws[index, slots]
        found: list[int] = self.code.items(index, draws, slots).tolist()
        return found

    # ---- turns ----

    def _turns_of(self, epoch: int) -> _Turns:
        turns = self._turns
        # Turns go forward only: those of an earlier epoch are taken again from the first one on.
        if turns is None or turns.epoch > epoch:
            assert self.first is not None
            nothing = np.zeros(self.code.num_samples, dtype=np.int64)
            draws = np.zeros((self.code.num_samples, self.code.num_slots), dtype=np.int64)
            turns = _Turns(self.first - 1, draws, nothing, nothing.copy())
        for later in range(turns.epoch + 1, epoch + 1):
            self._take_turn(turns, later)
        self._turns = turns
        return turns

    def _take_turn(self, turns: _Turns, epoch: int) -> None:
        assert self.first is not None
        fills = epoch < self.first + self.code.num_slots
        is_new = np.full(self.code.num_samples, fills)
        if not fills:
            share = [share for start, share in self.shares if start <= epoch][-1]
            is_new |= uniform(self.seed, epoch, self.code.num_samples) < share
        # Slots are filled in turn, so the one after the last draw is the oldest.
        oldest = turns.num_draws % self.code.num_slots
        turns.last = np.where(is_new, oldest, (turns.last + 1) % self.code.num_slots)
        drawn = np.flatnonzero(is_new)
        turns.draws[drawn, oldest[drawn]] = epoch
        turns.num_draws = turns.num_draws + is_new
        turns.epoch = epoch

    # ---- a checkpoint ----

    def state(self) -> dict[str, Any]:
        shares = [list(known) for known in self.shares]
        return {"num_slots": self.code.num_slots, "seed": self.seed, "first": self.first, "shares": shares}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        """Continue in `epoch`; the state of another number of slots or another seed is ignored."""
        self.epoch = epoch
        if state is None or (state["num_slots"], state["seed"]) != (self.code.num_slots, self.seed):
            return
        self.first, self._turns = state["first"], None
        self.shares = tuple((int(start), float(share)) for start, share in state["shares"])


def uniform(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.float64]:
    """Return `(num_samples,)` numbers in [0, 1), determined by seed, epoch and sample (SplitMix64)."""
    # Wrapping around is part of the method; numpy warns of it for scalars.
    with np.errstate(over="ignore"):
        start = _mixed(_mixed(np.uint64(seed % 2**64)) ^ np.uint64(epoch % 2**64))
        mixed = _mixed(start + np.arange(1, num_samples + 1, dtype=np.uint64) * _GOLDEN)
    # The 53 bits that float64 holds exactly.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(value: Any) -> Any:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX[0]
    value = (value ^ (value >> np.uint64(27))) * _MIX[1]
    return value ^ (value >> np.uint64(31))
