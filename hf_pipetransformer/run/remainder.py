"""What is left of an epoch for a run that goes on with batches of another size than it was saved with. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Remainder:
    """The rest of an epoch, in batches of the size that they have now.

    Args:
        epoch: its number, 0 is the first.
        num_done: samples of it that the run was trained with.
        first: number of the batch that comes next, counted so that the epoch ends with its usual last number.
        num_batches: batches that are left.
        num_updates: optimizer steps that are left.
        share: of the epoch.
    """

    epoch: int
    num_done: int
    first: int
    num_batches: int
    num_updates: int
    share: float

    def epoch_at(self, part: float) -> float:
        """The epoch as a number with a fraction, when a `part` of the rest is done."""
        return self.epoch + 1 - (1 - part) * self.share

    def last_step(self, step: int, num_epochs: float | Fraction, updates_per_epoch: int) -> int:
        """Optimizer steps of the whole run, of which `step` are done, if it goes on to the end of its epochs."""
        total = math.ceil(num_epochs * updates_per_epoch)
        return step + max(0, total - ((self.epoch + 1) * updates_per_epoch - self.num_updates))

    def num_epochs(self, step: int, max_steps: int, updates_per_epoch: int) -> int:
        """Epochs that a run begins until it has done `max_steps` steps."""
        return self.epoch + 1 + math.ceil(max(0, max_steps - step - self.num_updates) / updates_per_epoch)


def find_remainder(
    place: Mapping[str, Any],
    step: int,
    num_samples: int,
    batch_size: int,
    drops_last: bool,
    accumulation: int,
    skips: bool,
) -> Remainder | None:
    """The rest of the epoch in which a run was saved; None if Trainer's count of steps leads to the same place.

    None also where no batch is ever full.

    Args:
        place: `epoch` and `samples`, those of it that were done.
        step: optimizer steps that were done.
        num_samples: of an epoch.
        batch_size: samples of a batch over all replicas.
        drops_last: whether a last batch that is not full is left out.
        accumulation: batches of an optimizer step.
        skips: whether the samples that were done are skipped; else the epoch begins anew.
    """

    def batches_of(count: int) -> int:
        return count // batch_size if drops_last else math.ceil(count / batch_size)

    in_epoch = batches_of(num_samples)
    if not in_epoch:
        return None
    updates_per_epoch = max(1, math.ceil(in_epoch / accumulation))
    epoch, num_done = place["epoch"], place["samples"] if skips else 0
    left = batches_of(num_samples - num_done)
    if not left:
        epoch, num_done, left = epoch + 1, 0, in_epoch
    first = in_epoch - left
    trainers_epoch, updates = divmod(step, updates_per_epoch)
    trainers_first = updates * accumulation if skips else 0
    if (trainers_epoch, trainers_first) == (epoch, first) and num_done == first * batch_size:
        return None
    return Remainder(epoch, num_done, first, left, math.ceil(left / accumulation), left / in_epoch)
