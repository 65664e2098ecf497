"""From measured steps, some with weight gradients skipped and some without, to the shares to skip. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_pipetransformer.autopipe.skip_programme import SkipGraph, choose_shares
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.schedules import find_schedule


SKIPPED = "skipped"
"""Key of a report beside the parts of a step: the share of weight gradients that the rank skipped in it."""

MeasuredStep = Sequence[Mapping[str, float]]
"""Of a step the reports by rank: seconds of its parts (`pipeline.timing.PARTS`), and `SKIPPED`."""


@dataclass(frozen=True)
class SkipPlan:
    """What is skipped from now on.

    Args:
        shares: of the weight gradients, one a stage.
        seconds: that a step is predicted to take.
        pipeline_seconds: of them those of the schedule: forwards, backwards and waiting.
        unskipped_seconds: that a step is predicted to take if nothing is skipped.
        graph: that the shares are chosen for.
        reason: why no shares could be chosen, so that nothing is skipped; None if they were.
    """

    shares: tuple[float, ...]
    seconds: float
    pipeline_seconds: float
    unskipped_seconds: float
    graph: SkipGraph
    reason: str | None = None

    def as_event(self) -> dict[str, Any]:
        """The plan with its inputs as JSON values."""
        graph = self.graph
        return {
            "shares": list(self.shares),
            "predicted_step_s": self.seconds,
            "predicted_pipeline_s": self.pipeline_seconds,
            "unskipped_step_s": self.unskipped_seconds,
            "forward_s": list(graph.forward),
            "backward_s": list(graph.backward),
            "weight_gradients_s": list(graph.saved),
            "hop_s": graph.hop,
            "reason": self.reason,
        }


def is_enough(steps: Sequence[MeasuredStep], least: int) -> bool:
    """Whether `least` steps of either kind were measured on every rank."""
    counted = [step for step in steps if all(step)]
    skipping = sum(any(report[SKIPPED] for report in step) for step in counted)
    return min(skipping, len(counted) - skipping) >= least


def skipped_nothing(steps: Sequence[MeasuredStep], least: int) -> bool:
    """Whether `least` steps were measured on every rank, and none of those that should skip had a layer to skip."""
    counted = [step for step in steps if all(step)]
    return len(counted) >= least and not any(report[SKIPPED] for step in counted for report in step)


def plan_skips(
    layout: Layout,
    steps: Sequence[MeasuredStep],
    most: float,
    hop: float,
    num_microbatches: int,
    accumulation: int = 1,
) -> SkipPlan:
    """The shares that make a step shortest, and how long it then takes.

    A stage's forward and backward are the medians of the steps without skipping. What its backward loses with the
    share that is skipped is the median of what the others lost over their shares. What a step takes beside the
    schedule is measured in both kinds, and changes in between with the mean share of the stages. Where that leaves
    nothing of what the schedule gains, or the programme cannot be solved, nothing is skipped.

    Args:
        layout: under which was measured, one stage a rank.
        steps: of both kinds, see `is_enough`.
        most: bound of a stage's share.
        hop: seconds from a send to its arrival.
        num_microbatches: of a batch.
        accumulation: batches of an optimizer step.
    """
    counted = [step for step in steps if all(step)]
    plain = [step for step in counted if not any(report[SKIPPED] for report in step)]
    others = [step for step in counted if any(report[SKIPPED] for report in step)]
    size, passes = layout.pipeline_size, num_microbatches * accumulation

    def by_stage(find: Callable[[int], float]) -> tuple[float, ...]:
        """What `find` gives for the ranks that hold a stage, its median over the replicas."""
        ranks = range(len(counted[0]))
        return tuple(statistics.median(find(rank) for rank in ranks if rank % size == stage) for stage in range(size))

    def typical(part: str, rank: int) -> float:
        return statistics.median(step[rank][part] for step in plain) / passes

    def saved(rank: int) -> float:
        whole, found = typical("backward", rank), [step[rank] for step in others if step[rank][SKIPPED]]
        slopes = [(whole - report["backward"] / passes) / report[SKIPPED] for report in found]
        return min(max(statistics.median(slopes), 0.0), whole) if slopes else 0.0

    shape = size, num_microbatches, layout.num_chunks, layout.first_active_stage
    graph = SkipGraph(
        find_schedule(layout.schedule).table(*shape),
        layout.places,
        forward=by_stage(lambda rank: typical("forward", rank)),
        backward=by_stage(lambda rank: typical("backward", rank)),
        saved=by_stage(saved),
        hop=hop,
    )

    def beside(step: MeasuredStep) -> float:
        """What a step took beside the schedule."""
        shares = [statistics.median(step[rank][SKIPPED] for rank in range(k, len(step), size)) for k in range(size)]
        return max(report["total"] for report in step) - accumulation * graph.seconds(shares)

    def mean_share(step: MeasuredStep) -> float:
        return statistics.fmean(report[SKIPPED] for report in step)

    alone = statistics.median(map(beside, plain))
    slope = statistics.median((beside(step) - alone) / mean_share(step) for step in others)

    def plan(shares: tuple[float, ...], reason: str | None = None) -> SkipPlan:
        pipeline = accumulation * graph.seconds(shares)
        seconds = pipeline + alone + slope * statistics.fmean(shares)
        return SkipPlan(shares, seconds, pipeline, unskipped, graph, reason)

    unskipped = accumulation * graph.seconds([0.0] * size) + alone
    try:
        chosen = plan(choose_shares(graph, most))
    except ValueError as error:
        return plan((0.0,) * size, str(error))  # Measured times are noisy: no reason to end a run that trains.
    return chosen if chosen.seconds < unskipped else plan((0.0,) * size)
