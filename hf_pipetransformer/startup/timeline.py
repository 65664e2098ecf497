"""Timelines of schedules: those of equal stages, without a model, in text, and pictures of any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_pipetransformer.planning.simulator import Timeline, draw, equal_durations, simulate, steady_seconds
from hf_pipetransformer.report.drawing import save_chart
from hf_pipetransformer.schedules import Op, find_schedule, schedules_that
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.weight_kinds import find_weights


_KINDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward, input",
    Op.BACKWARD_WEIGHT: "backward, weights",
    Op.UPDATE: "update",
}
_WIDTH = 860
"""Width of a picture in pixels."""
_LEAST_WIDTH = 14
"""Least width in pixels of a pass that has its number."""

_COLORS = ("#4c78a8", "#f58518", "#e8a15f", "#9d755d", "#54a24b")


@dataclass(frozen=True)
class EqualStages:
    """Pipeline of equal stages, where a forward through all stages of a rank takes 1.

    Args:
        chunks: stages on each rank V; None for the schedule's own number.
        backward: time of a backward, `hop` of a message between neighboring ranks.
        frozen_stages: stages at the bottom that run forward only.
        weights: asynchronous schedules: a value of `pipeline_weights`; `step_microbatches` of an optimizer step;
            `update` is the time of a stage's update. None for their defaults.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int | None = None
    backward: float = 2.0
    hop: float = 0.0
    frozen_stages: int = 0
    weights: str | None = None
    step_microbatches: int | None = None
    update: float | None = None

    def simulate(self) -> tuple[Timeline, str]:
        """Return the timeline, and it as text with its length and what it means for memory.

        Raises:
            ValueError: the schedule cannot run these stages, or does not know an option.
        """
        schedule, size = find_schedule(self.schedule), self.stages
        num_chunks = schedule.abilities.on(size).default_chunks if self.chunks is None else self.chunks
        placement = Placement(size, num_chunks, schedule.placement)
        table = schedule.table(size, self.microbatches, num_chunks, self.frozen_stages)
        timeline = simulate(table, equal_durations(placement, self.backward, self.hop), placement)
        if schedule.abilities.overlaps_steps:
            return self._window()
        for name in ("weights", "step_microbatches", "update"):
            if getattr(self, name) is not None:
                needed = schedules_that(lambda abilities: abilities.overlaps_steps)
                raise ValueError(f"--{name} is for {' or '.join(needed)}, found {schedule.name}.")
        return timeline, f"{draw(timeline)}\n{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble"

    def _window(self) -> tuple[Timeline, str]:
        """Simulate an asynchronous schedule from one drain to the next, and say what each rank stores."""
        kind = find_weights(self.weights or "pipeoptim")
        placement, frozen = Placement(self.stages), self.frozen_stages
        step_size = 1 if self.step_microbatches is None else self.step_microbatches
        if step_size < 1:
            raise ValueError(f"--step_microbatches must be 1 or more, found {step_size}.")
        kind.check(self.stages, step_size)
        # The last step of an epoch may have fewer micro-batches.
        whole, rest = divmod(self.microbatches, step_size)
        update = 0.5 if self.update is None else self.update
        updates = tuple(0.0 if stage < frozen else update for stage in range(self.stages))
        durations = replace(equal_durations(placement, self.backward, self.hop), update=updates)
        timeline = simulate(
            window_table(placement, frozen, (step_size,) * whole + ((rest,) if rest else ())), durations, placement
        )
        steady = steady_seconds(placement, frozen, step_size, durations)
        lines = [
            draw(timeline),
            f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble: the window fills and drains once",
            f"{steady:g} units of time a step in a long window",
        ]
        held = find_schedule(self.schedule).in_flight(self.stages, 1, first_active_stage=frozen)
        for stage, in_flight in enumerate(held):
            copies = kind.copies(stage, self.stages, step_size) if stage >= frozen else 1
            lines.append(
                f"rank {stage}: micro-batches in flight {in_flight}, copies of its weights {copies} ({kind.name})"
            )
        if kind.direction == "adam":
            lines.append(f"{kind.name} keeps two moments a weight beside an optimizer that has none of Adam's")
        return timeline, "\n".join(lines)


def spans_as_json(timeline: Timeline) -> dict[str, Any]:
    """Return a simulated timeline as JSON values: what each rank computes, from when to when."""
    spans = [[span.rank, str(span.action), span.start, span.end] for span in timeline.spans]
    return {"end": timeline.end, "bubble": timeline.bubble, "busy": list(timeline.busy), "spans": spans}


def save_pictures(timeline: Timeline, title: str, unit: str, paths: Iterable[str]) -> None:
    """Draw a timeline as a chart with a row for each rank, in files whose endings name their format (.png, .svg).

    Raises:
        ValueError: the chart library is not installed, or a file cannot be written.
    """
    chart = chart_of(timeline, title, unit)
    for path in map(Path, paths):
        save_chart(chart, path)


def chart_of(timeline: Timeline, title: str, unit: str) -> dict[str, Any]:
    """Return a timeline as a chart of Vega-Lite: a bar for each pass, with the number of its micro-batch."""
    bars = [
        {
            "rank": span.rank, "start": span.start, "end": span.end, "pass": _KINDS[span.action.op],
            "number": span.action.micro_batch, "middle": (span.start + span.end) / 2,
        }
        for span in timeline.spans
    ]  # fmt: skip
    found = {bar["pass"] for bar in bars}
    kinds = [kind for kind in _KINDS.values() if kind in found]
    least = _LEAST_WIDTH / _WIDTH * timeline.end
    rank = {"field": "rank", "type": "ordinal", "title": "rank", "scale": {"paddingInner": 0.15}}
    colors = {"domain": list(_KINDS.values()), "range": list(_COLORS)}
    passes = {
        "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
        "encoding": {
            "x": {
                "field": "start", "type": "quantitative", "title": unit,
                "scale": {"domain": [0, timeline.end], "nice": False},
            },
            "x2": {"field": "end"},
            "y": rank,
            "color": {
                "field": "pass", "type": "nominal", "scale": colors,
                "legend": {"title": None, "orient": "top", "values": kinds},
            },
        },
    }  # fmt: skip
    numbers = {
        "transform": [{"filter": f"datum.end - datum.start > {least}"}],
        "mark": {"type": "text", "color": "white", "fontSize": 10},
        "encoding": {
            "x": {"field": "middle", "type": "quantitative"},
            "y": rank,
            "text": {"field": "number", "type": "quantitative"},
        },
    }
    return {
        "title": f"{title}: {timeline.end:.3g} {unit}, {timeline.bubble:.0%} waiting",
        "width": _WIDTH,
        "height": 34 * len(timeline.busy),
        "data": {"values": bars},
        "layer": [passes, numbers],
    }
