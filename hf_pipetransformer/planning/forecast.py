"""Course of a run: its steps, what freezes and is stored, and the predicted time of all that. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from hf_pipetransformer.planning.costs import (
    BlockCosts,
    Overheads,
    Prediction,
    active_seconds,
    predict_step,
    trained_elements,
    with_launches,
)
from hf_pipetransformer.planning.storing import (
    CacheCosts,
    CacheDecision,
    DiskProfile,
    Pass,
    SlotCosts,
    StoreContents,
    decide_cache,
    fresh_share,
    passes_ahead,
)
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import attention_of


def seconds_left(
    layout: Layout,
    passes: Sequence[Pass],
    costs: BlockCosts,
    overheads: Overheads,
    samples_per_device: int,
    accumulation: int = 1,
) -> float:
    """Return the predicted seconds of all steps of `passes`, without the transition to the layout.

    A step in which a share of the samples has records takes that share of the time of a step that reads all of
    them, plus the rest of one that computes all. Reading records in place of samples saves at most the step's overhead
    outside the computation.
    """
    samples = samples_per_device * layout.pipeline_size

    def step_seconds(level: int) -> float:
        return predict_step(replace(layout, cache_level=level), costs, overheads, samples, accumulation).seconds

    total = 0.0
    for each in passes:
        reads = each.share * step_seconds(each.level) if each.share else 0.0
        computes = (1 - each.share) * step_seconds(0) if each.share < 1 else 0.0
        records = max(accumulation * samples * each.record_seconds, -overheads.per_step)
        total += each.steps * (reads + computes + records)
    return total


MOVED_BYTES = 12
"""Bytes per trained parameter that moves to another rank: the weight and two moments of Adam."""


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
        return max(0, args.max_steps), max(1, args.max_steps)
    batches = math.ceil(num_samples / (args.train_samples_per_device * num_devices))
    steps_per_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    by_epochs = math.ceil(args.num_train_epochs * steps_per_epoch)
    return (args.max_steps if args.max_steps > 0 else by_epochs), steps_per_epoch


@dataclass(frozen=True)
class Duration:
    """Predicted seconds of the run, of one that freezes nothing, and the epochs of the latter in the former's time."""

    seconds: float
    full_seconds: float
    equal_epochs: float


@dataclass(frozen=True)
class Storing:
    """Costs of storing activations (`prefix` for all layers), and the rule that decides on it.

    Args:
        mode: `auto`, `on` or `off`.
        fits_share: share of the samples whose records fit.
        num_slots: records of a random sample, see `augmentation`; 0 where samples are not random and have one.
    """

    costs: CacheCosts
    mode: str
    fits_share: float = 1.0
    num_slots: int = 0

    def beside(self, blocks: BlockCosts, num_frozen: int, pipeline_size: int) -> tuple[CacheCosts, SlotCosts]:
        """Return the costs in a pipeline, beside what it computes, and those of augmentation slots."""
        costs = self.costs.beside(active_seconds(blocks, num_frozen), pipeline_size)
        new = fresh_share(costs, num_frozen) if self.num_slots else 0.0
        return costs, SlotCosts(max(1, self.num_slots), new)


class Segment(NamedTuple):
    """A span of a run: its layout, its passes, the seconds of the transition to that layout, and what was decided.

    Attributes:
        decision: on storing; None where nothing was decided.
    """

    layout: Layout
    passes: list[Pass]
    moving: float
    decision: CacheDecision | None


@dataclass(frozen=True)
class Forecast:
    """Predictor of the duration of runs from one starting layout.

    Args:
        accumulation: batches per optimizer step.
        plan: returns the layout that follows one, for a number of frozen and a number of stored layers.
    """

    layout: Layout
    costs: BlockCosts
    overheads: Overheads
    samples_per_device: int
    accumulation: int
    steps_per_epoch: int
    plan: Callable[[Layout, int, int], Layout]
    storing: Storing | None = None

    def full_seconds(self, num_steps: int) -> float:
        """Return the seconds of a run that freezes nothing more and stores nothing."""
        samples = self.samples_per_device * self.layout.pipeline_size
        return num_steps * predict_step(self.layout, self.costs, self.overheads, samples, self.accumulation).seconds

    def duration(self, course: RunSchedule) -> Duration:
        """Return the times of a run and of one that freezes nothing."""
        full = self.full_seconds(course.num_steps)
        seconds = full if course.freezing is None else self.seconds(course.freezing.spans)
        return Duration(seconds, full, course.num_epochs * seconds / full if full else course.num_epochs)

    def seconds(self, spans: Sequence[Span]) -> float:
        """Return the seconds of a run with these spans, in which ever more layers freeze, transitions included."""
        total, how = 0.0, (self.costs, self.overheads, self.samples_per_device, self.accumulation)
        for each in self.stretches(spans):
            total += each.moving + seconds_left(each.layout, each.passes, *how)
        return total

    def decision(self, spans: Sequence[Span]) -> CacheDecision | None:
        """Return the first decision of a run to store something, or else its first one; None if it decides nothing."""
        found = [each.decision for each in self.stretches(spans) if each.decision is not None]
        return next((each for each in found if each.use), found[0] if found else None)

    def stretches(self, spans: Sequence[Span]) -> Iterator[Segment]:
        """Yield the parts of a run: one for each span."""
        layout, share = self.layout, 0.0
        steps_left = sum(span.num_steps for span in spans)
        for span in spans:
            stored_level = layout.cache_level if share else 0
            freezes = span.num_frozen > layout.num_frozen_layers
            passes: tuple[Pass, ...] = (Pass(steps_left),)
            moving, decision = 0.0, None
            if freezes or (span is spans[0] and span.num_frozen):
                decision = self._decide(layout, span.num_frozen, stored_level, share, steps_left)
                level = decision.level if decision is not None and decision.use else 0
                moved = self.plan(layout, span.num_frozen, level)
                moving = self._seconds_of_move(layout, moved)
                layout = moved
            if self.storing is not None:
                stored = StoreContents(stored_level, share, self.storing.fits_share)
                # The overheads were measured at the start, when all samples were read from the data set.
                blocks = with_launches(self.costs, layout, self.samples_per_device)
                costs, slots = self.storing.beside(blocks, span.num_frozen, layout.pipeline_size)
                steps = steps_left, self.steps_per_epoch
                passes = passes_ahead(costs, layout.cache_level, stored, *steps, slots, now=costs.input)
                writing = slots.num_slots * self.steps_per_epoch
                written = self.storing.fits_share * min(1.0, span.num_steps / writing)
                kept = share if layout.cache_level == stored_level else 0.0
                share = max(kept, written) if layout.cache_level else 0.0
            yield Segment(layout, _first(passes, span.num_steps), moving, decision)
            steps_left -= span.num_steps

    def _decide(
        self, layout: Layout, num_frozen: int, stored_level: int, share: float, steps_left: int
    ) -> CacheDecision | None:
        """Decide on storing as a run on `layout` would, by the stages that it would have if it stored everything."""
        if self.storing is None:
            return None
        epochs_left = steps_left / self.steps_per_epoch
        stored = StoreContents(stored_level, share, self.storing.fits_share)
        coming = self.plan(layout, num_frozen, num_frozen)
        blocks = with_launches(self.costs, coming, self.samples_per_device)
        costs, slots = self.storing.beside(blocks, num_frozen, coming.pipeline_size)
        return decide_cache(costs, num_frozen, stored, epochs_left, self.storing.mode, slots)

    def _seconds_of_move(self, old: Layout, new: Layout) -> float:
        """Return the seconds to move weights and optimizer state; 0 if no rank gets other blocks."""
        if (old.places, old.boundaries) == (new.places, new.boundaries):
            return 0.0
        return MOVED_BYTES * self.overheads.reduction_per_byte * sum(trained_elements(new, self.costs))


def likely_cause(prediction: Prediction, reports: Sequence[Mapping[str, float]]) -> str:
    """Name the part of a step with the largest excess over its prediction.

    Args:
        reports: `StepMeter.medians` of every rank that measured, in seconds.
    """
    computing = {"forward", "backward"}
    excess = {"computing": 0.0, "waiting": 0.0, "reduction": 0.0, "optimizer": 0.0, "other": 0.0}
    for report in reports:
        rest = report["total"] - sum(report[part] for part in ("pipeline", "reduction", "optimizer"))
        found = {
            "computing": sum(report[part] for part in computing) - max(prediction.rank_seconds),
            "reduction": report["reduction"] - prediction.reduction,
            "optimizer": report["optimizer"] - prediction.optimizer,
            "other": rest - prediction.other,
        }
        waited = report["pipeline"] - sum(report[part] for part in computing)
        found["waiting"] = waited - (prediction.pipeline - max(prediction.rank_seconds))
        excess = {part: max(seconds, found[part]) for part, seconds in excess.items()}
    # A rank waits where another computes longer: waiting alone is the cause only if no rank does.
    if excess["computing"] >= excess["waiting"] / 2:
        del excess["waiting"]
    return _CAUSES[max(excess, key=lambda part: excess[part])]


_CAUSES = {
    "computing": "the blocks compute longer than when they were timed: other work shares the devices, or batches are "
    "longer than the first ones",
    "waiting": "stages wait for each other's transfers longer than measured at the start",
    "reduction": "adding gradients over the replicas takes longer than measured at the start",
    "optimizer": "clipping, which sums norms over the stages, or the optimizer takes longer than measured",
    "other": "time passes outside the model: reading and collating samples (try dataloader_num_workers) or callbacks",
}


def spans_of(coming: Iterable[tuple[int, int]], num_frozen: int, num_steps: int) -> list[Span]:
    """Split a run into spans. `coming` has optimizer steps, in order, and the layers frozen from then on."""
    starts = [(0, num_frozen)]
    for step, frozen in coming:
        if step < num_steps and frozen > starts[-1][1]:
            starts.append((step, frozen))
    ends = [*(step for step, _ in starts[1:]), num_steps]
    found = [Span(end - step, frozen) for (step, frozen), end in zip(starts, ends, strict=True)]
    return [span for span in found if span.num_steps]


def _first(passes: Iterable[Pass], num_steps: int) -> list[Pass]:
    """Return the passes of the first `num_steps` steps."""
    found, left = [], float(num_steps)
    for each in passes:
        steps = min(each.steps, left)
        if steps > 0:
            found.append(replace(each, steps=steps))
            left -= steps
    return found


def prefix_seconds(blocks: BlockCosts, num_layers: int) -> tuple[float, ...]:
    """Return the forward of the embeddings and the first `f` layers in seconds per sample, for each `f`."""
    sums = [0.0, *accumulate(blocks.forward)]
    return tuple(sums[attention_of(level)] for level in range(num_layers + 1))
