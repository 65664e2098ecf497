"""Text, JSON values and picture of a `RunPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.planning.blocks import by_rank, by_stage, trained_elements
from hf_pipetransformer.planning.memory import RankMemory
from hf_pipetransformer.report import duration
from hf_pipetransformer.schedules.actions import Op
from hf_pipetransformer.schedules.layout import Layout, counted
from hf_pipetransformer.schedules.placement import attention_of, block_of, mlp_of


if TYPE_CHECKING:
    from hf_pipetransformer.planning.simulator import Timeline
    from hf_pipetransformer.planning.storing import Caching
    from hf_pipetransformer.startup.run_plan import Row, RunPlan


GB = 1e9
MOST_SCHEDULES = 6
"""Layouts of other schedules that the text lists; JSON has all."""

HALF = 0.5

NO_GAIN = 0.97
"""Share of a time above which another is called no shorter: predictions err by as much."""


def in_words(plan: RunPlan) -> str:
    """Return the plan as text: rows with the verdict, ranks of the chosen one, length of the run, sources."""
    told = "\n".join(verdicts(plan))
    memory = _memory(plan), plan.head_slices
    return "\n\n".join(filter(None, [_head(plan), _table_of_rows(plan), told, *memory, _course(plan), _sources(plan)]))


def _head(plan: RunPlan) -> str:
    machine = plan.machine
    return (
        f"{plan.model}: {_count(plan.num_parameters)} parameters in {plan.num_layers} layers, "
        f"{_gigabytes(plan.weight_bytes)} of weights; {counted(machine.num_devices, 'device')} of "
        f"{machine.device_bytes / GB:.4g} GB, of which {machine.budget / GB:.4g} GB are planned with."
    )


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "stages K": lambda row: str(row.layout.pipeline_size) if row.kind in ("run", "schedule") else row.name,
    "replicas R": lambda row: str(row.layout.num_replicas),
    "micro-batches M": lambda row: str(row.layout.num_microbatches),
    "fullest rank": lambda row: _gigabytes(row.fullest),
    "fits": lambda row: "yes" if row.fits else "no",
    "waiting": lambda row: f"{row.bubble:.0%}",
    "step": lambda row: f"{row.step_seconds:.3g} s",
    "samples/s": lambda row: f"{row.samples_per_second:.3g}",
    # Whole models, and pipelines of one stage, have no schedule.
    "schedule": lambda row: (
        (row.layout.schedule if row.layout.pipeline_size > 1 else "")
        + ("" if row.layout.abilities.is_exact else " (other results)")
    ),
}


def _table_of_rows(plan: RunPlan) -> str:
    # What does not fit in another schedule helps nobody; the run's own layouts show how much is missing.
    others = [row for row in plan.rows if row.kind == "schedule" and row.fits][:MOST_SCHEDULES]
    rows = [*(row for row in plan.rows if row.kind != "schedule"), *others]
    return table([*_COLUMNS], [[cell(row) for cell in _COLUMNS.values()] for row in rows])


def _memory(plan: RunPlan) -> str:
    layout, parts = plan.chosen.layout, [part.name for part in fields(RankMemory)]
    rows = []
    for rank, (stage, memory) in enumerate(zip(stages(plan), plan.chosen.memory, strict=True)):
        blocks, *counts = stage.values()
        sizes = [*(getattr(memory, part) for part in parts), memory.total]
        rows.append([str(rank), blocks, *map(_count, counts), *map(_gigabytes, sizes)])
    # The largest alone decides if a host is large enough; JSON has all.
    phase = max(plan.host, key=plan.host.__getitem__)
    return "\n".join(
        [
            f"{layout}, {layout.schedule}; memory of each rank of a pipeline:",
            table(["rank", "blocks", "parameters", "trained", *parts, "total"], rows),
            f"Host memory of a rank beside Python and its libraries: up to {_gigabytes(plan.host[phase])} ({phase}).",
        ]
    )


def stages(plan: RunPlan) -> list[dict[str, Any]]:
    """Return for each rank of the chosen layout its blocks in words, their parameters, and those that it trains."""
    layout, blocks = plan.chosen.layout, plan.blocks
    counts = zip(by_rank(layout, by_stage(layout, blocks.parameters)), trained_elements(layout, blocks), strict=True)
    return [
        {"blocks": blocks_in_words(layout, rank), "parameters": parameters, "trained": trained}
        for rank, (parameters, trained) in enumerate(counts)
    ]


def blocks_in_words(layout: Layout, rank: int) -> str:
    """Name the blocks of a rank of a pipeline, such as "embeddings, layers 1-6"."""
    return " and ".join(_of_stage(blocks, layout.num_blocks) for blocks in layout.blocks_of_rank(rank))


def _of_stage(blocks: range, num_blocks: int) -> str:
    words = ["embeddings"] if 0 in blocks else []
    halves = [block for block in blocks if 0 < block < num_blocks - 1]
    is_cut_below = halves and halves[0] == mlp_of(block_of(halves[0]) - 1)
    is_cut_above = halves and halves[-1] == attention_of(block_of(halves[-1]) - 1)
    whole = [block_of(block) for block in halves[bool(is_cut_below) : len(halves) - bool(is_cut_above)]]
    words += [f"MLP of layer {block_of(halves[0])}"] if is_cut_below else []
    if whole:
        words.append(f"layer {whole[0]}" if whole[0] == whole[-1] else f"layers {whole[0]}-{whole[-1]}")
    words += [f"attention of layer {block_of(halves[-1])}"] if is_cut_above else []
    return ", ".join([*words, *(["head"] if num_blocks - 1 in blocks else [])])


def _course(plan: RunPlan) -> str:
    """Return the length of the run, what freezes when, and what is stored."""
    course, freezing = plan.course, plan.course.freezing
    of_encoders = [f"Activation cache: {plan.encoders}."] if plan.encoders else []
    if not course.num_steps:
        return "".join(of_encoders)
    steps = f"{course.num_steps:,} steps"
    if course.num_samples is not None:
        steps += f", {course.num_epochs:.3g} epochs of {course.num_samples:,} samples"
    lines = [f"The run: {steps}; with nothing frozen {duration(plan.duration.full_seconds)}.", *of_encoders]
    if freezing is None:
        return "\n".join([*lines, course.note])
    at_most = "" if freezing.is_certain else "at most "
    starts = accumulate((span.num_steps for span in freezing.spans), initial=0)
    frozen = [
        f"{at_most}{span.num_frozen} of {plan.num_layers} layers from step {step:,} on"
        for step, span in zip(starts, freezing.spans, strict=False)
        if span.num_frozen
    ]
    if frozen:
        lines.append(f"Frozen: {'; '.join(frozen)}.")
    if plan.caching is not None:
        lines.append(f"Activation cache: {_cache(plan.caching)}.")
    return "\n".join(lines)


def _cache(caching: Caching) -> str:
    needed = f"{_gigabytes(caching.needed_bytes)} needed on each node, {_gigabytes(caching.allowed_bytes)} allowed"
    why = caching.why_off or (None if caching.is_used else caching.reason)
    if why is not None:
        return f"nothing is stored ({why}); {needed}"
    stored = f"{needed}: {caching.share:.0%} of the samples are stored"
    if caching.share >= HALF:
        return stored
    return f"{stored}; activation_cache_max_gb, or a disk with more space (activation_cache_dir), lets more fit"


def _sources(plan: RunPlan) -> str:
    course = plan.course
    lines = [f"Measured here: {', '.join(course.measured)}."] if course.measured else []
    if course.assumed:
        lines.append(f"Assumed: {', '.join(course.assumed)}.")
    if plan.overheads.has_reference:
        lines.append("Steps include a pass of the reference, without gradients, before each batch.")
    if not course.measured:
        lines.append("Nothing was measured: times compare layouts; a run, or --plan_only, measures its own.")
    return "\n".join(lines)


def verdicts(plan: RunPlan) -> list[str]:
    """Return what to conclude from the plan, a sentence or two each."""
    questions = _whether_it_fits, _which_is_fastest, _whether_launches_decide, _whether_to_freeze
    return [text for answer in questions if (text := answer(plan))]


def _whether_it_fits(plan: RunPlan) -> str:
    if plan.chosen.fits:
        return ""
    text = f"Does not fit: the fullest rank needs {plan.chosen.fullest / GB:.1f} GB of {plan.machine.budget / GB:g} GB"
    remedy = plan.remedy
    # None where the number of stages that the user set does not fit, and others do.
    if remedy is None:
        fitting = [row.name for row in plan.rows if row.fits and row.kind == "run"]
        return f"{text}. It fits with {' or '.join(fitting)}."
    if remedy.row is not None:
        changes = " ".join(f"--{name} {value}" for name, value in remedy.changes.items())
        size = remedy.row.layout.pipeline_size
        return f"{text}. It fits with {changes}, K={size}: {remedy.row.fullest / GB:.1f} GB."
    others = ", ".join(["more or larger devices", *remedy.others])
    return f"{text}. Recomputation and batches of one sample do not help. Take {others} or shorter sequences."


def _which_is_fastest(plan: RunPlan) -> str:
    """Name the fastest row that fits, and the fastest that trains otherwise than Trainer if it is faster still."""
    # Those of the run come first: between rows that are as fast it needs no other options.
    fitting = sorted((row for row in plan.rows if row.fits), key=lambda row: row.kind != "run")
    alike = [row for row in fitting if row.layout.abilities.is_exact or row.kind == "run"]
    if plan.machine.num_devices == 1 or not alike:
        return ""
    best, any_best = _fastest(alike), _fastest([*alike, *fitting])
    when = ", before layers freeze" if plan.course.freezing is not None else ""
    formula = " (of plain Trainer, by formula)" if best.kind == "shards" else ""
    text = f"Fastest that fits{when}: {best.name}{formula}"
    if best is plan.chosen:
        text += ", as this run begins"
    elif plan.chosen.fits:
        text += f", {_times(best, plan.chosen)} as fast as this run's {plan.chosen.name}"
    if any_best.layout.abilities.is_exact or any_best is best:
        return f"{text}."
    return f"{text}. With other results than Trainer's: {any_best.name}, {_times(any_best, best)} as fast as that."


def _fastest(rows: Sequence[Row]) -> Row:
    """Return the first of the rows that are as fast as the fastest, within what predictions err by."""
    most = max(row.samples_per_second for row in rows)
    return next(row for row in rows if row.samples_per_second >= NO_GAIN * most)


def _times(row: Row, other: Row) -> str:
    return f"{row.samples_per_second / other.samples_per_second:.3g} times"


def _whether_launches_decide(plan: RunPlan) -> str:
    # Measured times contain launches, and none are assumed beside them.
    if not plan.blocks.launch or plan.computing_seconds >= HALF * plan.chosen.step_seconds:
        return ""
    share = plan.computing_seconds / plan.chosen.step_seconds
    return (
        f"Devices wait for Python to launch their operations, which they compute in {share:.2f} of a step's time: "
        "larger batches would take hardly longer, and freezing saves little."
    )


def _whether_to_freeze(plan: RunPlan) -> str:
    course, took = plan.course, plan.duration
    if course.freezing is None or not took.full_seconds:
        return course.evidence
    epochs, share = f"{course.num_epochs:.3g} epochs", took.seconds / took.full_seconds
    if all(not span.num_frozen for span in course.freezing.spans):
        return f"No gain: no layer freezes in {epochs} ({course.num_steps:,} steps)."
    if share > NO_GAIN:
        return f"No gain: {epochs}, in which freezing and cache take {share:.2f} of the full run's time."
    at_least = "" if course.freezing.is_certain else "at least "
    return (
        f"Freezing is predicted to take {at_least}{duration(took.seconds)}, {share:.2f} of the full run's time. It "
        f"may cost accuracy: compare it with {took.equal_epochs:.3g} epochs of full fine-tuning. {course.evidence}"
    ).rstrip()


def _count(elements: float) -> str:
    return f"{elements / 1e9:.4g} B" if elements >= 1e9 else f"{elements / 1e6:.4g} M"


def _gigabytes(size: float) -> str:
    if size < GB / 10:
        return f"{size / 1e6:.3g} MB" if size else "0"
    return f"{size / GB:.1f} GB" if size >= 10 * GB else f"{size / GB:.3g} GB"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns to the right, the second one, if it has words, to the left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    is_left = [any(line[column][:1].isalpha() for line in lines[1:]) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in lines
    )


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return all of the plan as JSON values."""
    return asdict(plan) | {
        "rows": [_as_json(row) for row in plan.rows],
        "chosen": _as_json(plan.chosen),
        "stages": stages(plan),
        "timeline": spans_as_json(plan.timeline),
        "remedy": None if plan.remedy is None else plan.remedy.changes,
        "verdicts": verdicts(plan),
    }


def _as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {
        "pipeline_size": row.layout.pipeline_size,
        "fullest": row.fullest,
        "trains_alike": row.layout.abilities.is_exact,
        "memory": [{**asdict(rank), "total": rank.total} for rank in row.memory],
        "layout": row.layout.as_event(),
    }


# ---- timeline ----

_PASSES = {
    Op.FORWARD: ("forward", "#4c78a8"),
    Op.BACKWARD: ("backward", "#f58518"),
    Op.BACKWARD_INPUT: ("backward, input", "#e8a15f"),
    Op.BACKWARD_WEIGHT: ("backward, weights", "#9d755d"),
    Op.UPDATE: ("update", "#54a24b"),
}
"""Names and colors of passes, one in all pictures."""
_WIDTH = 860
"""Width of a picture in pixels."""
_LEAST_WIDTH = 14
"""Least width in pixels of a pass that has its number."""


def spans_as_json(timeline: Timeline) -> dict[str, Any]:
    """Return a simulated timeline as JSON values: what each rank computes, from when to when."""
    spans = [[span.rank, str(span.action), span.start, span.end] for span in timeline.spans]
    return {"end": timeline.end, "bubble": timeline.bubble, "busy": list(timeline.busy), "spans": spans}


def chart_of(timeline: Timeline, title: str, unit: str) -> dict[str, Any]:
    """Return a timeline as a chart of Vega-Lite: a bar for each pass, with the number of its micro-batch."""
    bars = [
        {
            "rank": span.rank, "start": span.start, "end": span.end, "pass": _PASSES[span.action.op][0],
            "number": span.action.micro_batch, "middle": (span.start + span.end) / 2,
        }
        for span in timeline.spans
    ]  # fmt: skip
    names, colors = zip(*_PASSES.values(), strict=True)
    drawn = {bar["pass"] for bar in bars}
    # Numbers wider than their bars would run into each other.
    least = _LEAST_WIDTH / _WIDTH * timeline.end
    rank = {"field": "rank", "type": "ordinal", "title": "rank", "scale": {"paddingInner": 0.15}}
    passes = {
        "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
        "encoding": {
            "x": {
                "field": "start", "type": "quantitative", "title": unit,
                # Up to a round number, the axis would end with what looks like waiting.
                "scale": {"domain": [0, timeline.end], "nice": False},
            },
            "x2": {"field": "end"},
            "y": rank,
            "color": {
                "field": "pass", "type": "nominal", "scale": {"domain": [*names], "range": [*colors]},
                "legend": {"title": None, "orient": "top", "values": [name for name in names if name in drawn]},
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
