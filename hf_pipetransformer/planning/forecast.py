"""Course of a run: its steps, what freezes and is stored, and the predicted time of all that. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_pipetransformer.planning.layouts import Choice, PlanInputs
from hf_pipetransformer.planning.search import search, seconds_left
from hf_pipetransformer.planning.storing import COMPUTE, Pass, Storing, Way


if TYPE_CHECKING:
    from hf_pipetransformer.planning.costs import Prediction
    from hf_pipetransformer.planning.course import RunSchedule, Span
    from hf_pipetransformer.schedules.layout import Layout


@dataclass(frozen=True)
class Duration:
    """Predicted seconds of the run, of one that freezes nothing, and the epochs of the latter in the former's time."""

    seconds: float
    full_seconds: float
    equal_epochs: float


@dataclass(frozen=True)
class Forecast:
    """Predictor of the duration of runs from one starting layout.

    Args:
        inputs: of the searches of the run.
        storing: costs of a store that is empty at the start; None if nothing is stored.
    """

    layout: Layout
    inputs: PlanInputs
    storing: Storing | None = None

    def full_seconds(self, num_steps: int) -> float:
        """Return the seconds of a run that freezes nothing more and stores nothing."""
        return num_steps * self.inputs.predict(self.layout).seconds

    def duration(self, course: RunSchedule) -> Duration:
        """Return the times of a run and of one that freezes nothing."""
        full = self.full_seconds(course.num_steps)
        seconds = full if course.freezing is None else self.seconds(course.freezing.spans)
        # A run of unknown length has no steps, and so takes no time.
        return Duration(seconds, full, course.num_epochs * seconds / full if full else course.num_epochs)

    def seconds(self, spans: Sequence[Span]) -> float:
        """Return the seconds of a run with these spans, in which ever more layers freeze, transitions included."""
        stretches = self.stretches(spans)
        return sum(each.moving + seconds_left(each.layout, each.way.passes, self.inputs) for each in stretches)

    def way(self, spans: Sequence[Span]) -> Way:
        """Return what a run first chooses to store, or else its first choice; `COMPUTE` if it decides nothing."""
        found = [each.way for each in self.stretches(spans) if each.way.reason]
        # A first layer may be too cheap to store where the first ten are not.
        return next((each for each in found if each.use), found[0] if found else COMPUTE)

    def stretches(self, spans: Sequence[Span]) -> Iterator[Choice]:
        """Yield the layout of each span of a run, with the passes of its steps and the seconds of the move to it."""
        layout, share = self.layout, 0.0
        steps_left = sum(span.num_steps for span in spans)
        for span in spans:
            stored_level = layout.cache_level
            choice = Choice(layout, way=replace(COMPUTE, passes=(Pass(steps_left),)))
            # What is frozen before the first step freezes nothing more, but it has to be decided if it is stored.
            if span.num_frozen > layout.num_frozen_layers or (span is spans[0] and span.num_frozen):
                choice = self._search(layout, span.num_frozen, share, steps_left)
                layout = choice.layout
            if layout.cache_level and self.storing is not None:
                # A store fills in one epoch; a span that ends earlier fills a part.
                written = self.storing.fits_share * min(1.0, span.num_steps / self.storing.steps_per_epoch)
                # Records of another level are written anew.
                share = max(share if layout.cache_level == stored_level else 0.0, written)
            yield replace(choice, way=replace(choice.way, passes=_first(choice.way.passes, span.num_steps)))
            steps_left -= span.num_steps

    def _search(self, layout: Layout, num_frozen: int, share: float, steps_left: int) -> Choice:
        storing, level = self.storing, layout.cache_level if share else 0
        if storing is not None:
            # The inputs that are given have no reading in them, whatever the layout that it was measured under.
            storing = replace(storing, level=level, share=share if level else 0.0, now=0.0)
        return search(layout, num_frozen, steps_left, self.inputs, storing)


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
        # What a rank does not compute inside a pipeline it waits for, which a bubble explains in part.
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


def _first(passes: Iterable[Pass], num_steps: int) -> tuple[Pass, ...]:
    """Return the passes of the first `num_steps` steps."""
    found, left = [], float(num_steps)
    for each in passes:
        steps = min(each.steps, left)
        if steps > 0:
            found.append(replace(each, steps=steps))
            left -= steps
    return tuple(found)
