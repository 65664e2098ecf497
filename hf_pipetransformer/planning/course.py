"""Course of a run: its length, what freezes when, and what it may store. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_pipetransformer.planning.storing import DiskProfile


@dataclass(frozen=True)
class Span:
    """Consecutive optimizer steps with the same number of frozen layers."""

    num_steps: int
    num_frozen: int


@dataclass(frozen=True)
class Freezing:
    """Layers that a policy may freeze: `spans` of the run, the most layers in each; exact if `is_certain`."""

    policy: str
    spans: tuple[Span, ...]
    is_certain: bool


@dataclass(frozen=True)
class RunSchedule:
    """Length of a run in optimizer steps and epochs, its samples, and what it freezes and may store.

    Args:
        num_samples: samples of an epoch; None if unknown.
        note: what to say of freezing where `freezing` is None.
        measured: names of what was measured for the plan; `assumed` of what was not, with the value taken.
        evidence: what was found in runs of this kind.
    """

    num_steps: int
    steps_per_epoch: int
    num_samples: int | None = None
    freezing: Freezing | None = None
    storage: DiskProfile | None = None
    note: str = ""
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    evidence: str = ""

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.steps_per_epoch


def length_of_run(args: Any, num_devices: int, num_samples: int | None) -> tuple[int, int]:
    """Return the optimizer steps of a run and of an epoch by Trainer's rules; 0 steps if the options do not say."""
    if num_samples is None:
        # Without a length the whole run counts as one epoch, after which nothing is read again.
        return max(0, args.max_steps), max(1, args.max_steps)
    batches = math.ceil(num_samples / (args.train_samples_per_device * num_devices))
    # As in Trainer, the batches that are left at the end of an epoch make a step of their own.
    steps_per_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    by_epochs = math.ceil(args.num_train_epochs * steps_per_epoch)
    return (args.max_steps if args.max_steps > 0 else by_epochs), steps_per_epoch


def num_passes(args: Any, num_devices: int, num_samples: int | None) -> float:
    """Return how often a run comes to the same samples; 1 where only its steps are known."""
    if args.max_steps <= 0:
        return float(args.num_train_epochs)
    num_steps, steps_per_epoch = length_of_run(args, num_devices, num_samples)
    return num_steps / steps_per_epoch


def spans_of(coming: Iterable[tuple[int, int]], num_frozen: int, num_steps: int) -> list[Span]:
    """Split a run into spans. `coming` has optimizer steps, in order, and the layers frozen from then on."""
    starts = [(0, num_frozen)]
    for step, frozen in coming:
        # A decision that freezes no more begins no span.
        if step < num_steps and frozen > starts[-1][1]:
            starts.append((step, frozen))
    ends = [*(step for step, _ in starts[1:]), num_steps]
    found = [Span(end - step, frozen) for (step, frozen), end in zip(starts, ends, strict=True)]
    # A decision before the first step leaves an empty span before it.
    return [span for span in found if span.num_steps]
