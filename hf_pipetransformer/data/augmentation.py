"""Which draw of a random sample an epoch takes: a new one, or one of the views that are stored. Pure.

A *draw* is a sample as a random transform or collator gave it in one epoch, which is its number. A *view* is a place
for one draw of a sample; there are V of each. An *item* is one integer that names sample, draw and view: loaders, tags
and the activation cache hand it on where otherwise the sample's index goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


Numbers = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class ItemCode:
    """How one integer names a sample, a draw of it and a view. The first ones are draw 0 of each sample, in view 0.

    Args:
        num_samples: of the data set.
        num_views: V, 1 or more.
    """

    num_samples: int
    num_views: int

    def items(self, samples: Numbers, draws: Numbers, views: Numbers) -> Numbers:
        """`(n,)` from samples, numbers of draws and numbers of views, `(n,)` each."""
        return (draws * self.num_views + views) * self.num_samples + samples

    def samples_of(self, items: Any) -> Any:
        """Index in the data set; of an integer, or `(n,)`."""
        return items % self.num_samples

    def draws_of(self, items: Any) -> Any:
        """Number of the draw; of an integer, or `(n,)`."""
        return items // (self.num_samples * self.num_views)

    def rows_of(self, items: Any) -> Any:
        """Row in a store with V rows a sample; of an integer, or `(n,)`."""
        return items % self.num_samples * self.num_views + items // self.num_samples % self.num_views


@dataclass
class _Turns:
    """Where the samples stand after an epoch: draw of each view, draws made, the view that was last taken."""

    epoch: int
    draws: Numbers
    num_draws: Numbers
    last: Numbers


@dataclass
class Views:
    """The views of all samples of a data set.

    Until views begin each epoch draws anew. From epoch `first` on, with V=2 and one sample that is drawn anew in the
    fourth epoch:

        epoch - first                        0   1   2   3   4   5
        view                                 0   1   0   0   1   0
        epoch - first in which it was drawn  0   1   0   3   1   3

    The first V epochs draw each sample once and fill its views. Later ones take them in turn, but for a share of the
    samples, drawn by (seed, epoch, sample), of which a new draw replaces the oldest view; the turn goes on behind it.
    Nothing here hangs on what is stored, on ranks or on the place in the epoch.

    Args:
        code: names the items; it knows the number of samples and V.
        seed: of the draws and of the choice of samples that are drawn anew.
        first: epoch in which views began; None before.
        shares: first epoch, and the share of the samples that are drawn anew from then on; the last one counts.
    """

    code: ItemCode
    seed: int
    first: int | None = None
    shares: tuple[tuple[int, float], ...] = ()
    epoch: int = 0
    _turns: _Turns | None = field(default=None, init=False, repr=False)

    def follow(self, is_stored: bool, share: float) -> None:
        """A decision in the present epoch: whether views are stored from now on, and the share to draw anew.

        It holds from the next epoch on, for part of this one may be drawn. The first V epochs draw anew in
        any case.
        """
        if not is_stored and self.first is None:
            return
        if self.first is None:
            self.first = self.epoch
        share = share if is_stored else 1.0
        if self.shares and self.shares[-1][1] == share:
            return
        earlier = tuple(known for known in self.shares if known[0] <= self.epoch)
        self.shares = (*earlier, (self.epoch + 1, share))

    def items(self, samples: list[int]) -> list[int]:
        """What the present epoch takes of these samples."""
        index = np.asarray(samples, dtype=np.int64)
        if self.first is None or self.epoch < self.first:
            views, draws = np.zeros_like(index), np.full_like(index, self.epoch)
        else:
            turns = self._turns_of(self.epoch)
            views = turns.last[index]
            draws = turns.draws[index, views]
        found: list[int] = self.code.items(index, draws, views).tolist()
        return found

    # ---- turns ----

    def _turns_of(self, epoch: int) -> _Turns:
        turns = self._turns
        if turns is None or turns.epoch > epoch:
            assert self.first is not None
            nothing = np.zeros(self.code.num_samples, dtype=np.int64)
            draws = np.zeros((self.code.num_samples, self.code.num_views), dtype=np.int64)
            turns = _Turns(self.first - 1, draws, nothing, nothing.copy())
        for later in range(turns.epoch + 1, epoch + 1):
            self._take_turn(turns, later)
        self._turns = turns
        return turns

    def _take_turn(self, turns: _Turns, epoch: int) -> None:
        assert self.first is not None
        fills = epoch < self.first + self.code.num_views
        is_new = np.full(self.code.num_samples, fills)
        if not fills:
            is_new |= uniform(self.seed, epoch, self.code.num_samples) < self._share_in(epoch)
        oldest = turns.num_draws % self.code.num_views
        turns.last = np.where(is_new, oldest, (turns.last + 1) % self.code.num_views)
        drawn = np.flatnonzero(is_new)
        turns.draws[drawn, oldest[drawn]] = epoch
        turns.num_draws = turns.num_draws + is_new
        turns.epoch = epoch

    def _share_in(self, epoch: int) -> float:
        return [share for start, share in self.shares if start <= epoch][-1]

    # ---- a checkpoint ----

    def state(self) -> dict[str, Any]:
        """As JSON values, what a run that goes on must know."""
        shares = [list(known) for known in self.shares]
        return {"num_views": self.code.num_views, "seed": self.seed, "first": self.first, "shares": shares}

    def load_state(self, state: Mapping[str, Any] | None, epoch: int) -> None:
        """Go on in `epoch`. What was stored as other views, or by another seed, is nothing to these."""
        self.epoch = epoch
        if state is None or (state["num_views"], state["seed"]) != (self.code.num_views, self.seed):
            return
        self.first, self._turns = state["first"], None
        self.shares = tuple((int(start), float(share)) for start, share in state["shares"])


def uniform(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.float64]:
    """`(num_samples,)` numbers in [0, 1), drawn by seed, epoch and sample (SplitMix64)."""
    with np.errstate(over="ignore"):
        start = _mixed(_mixed(np.uint64(seed % 2**64)) ^ np.uint64(epoch % 2**64))
        mixed = _mixed(start + np.arange(1, num_samples + 1, dtype=np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(value: Any) -> Any:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX[0]
    value = (value ^ (value >> np.uint64(27))) * _MIX[1]
    return value ^ (value >> np.uint64(31))
