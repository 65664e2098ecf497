"""Text, JSON values and picture of a `RunPlan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.planning.blocks import stage_elements, trained_elements
from hf_pipetransformer.planning.memory import RankMemory
from hf_pipetransformer.report import duration
from hf_pipetransformer.report.drawing import save_chart
from hf_pipetransformer.schedules import Op
from hf_pipetransformer.schedules.layout import Layout, counted
from hf_pipetransformer.schedules.placement import attention_of, block_of, mlp_of


if TYPE_CHECKING:
    from hf_pipetransformer.planning.simulator import Timeline
    from hf_pipetransformer.startup.run_plan import Option, RunPlan


GB = 1e9
MOST_SCHEDULES = 6
"""Layouts of other schedules that the text lists; JSON has all."""

HALF = 0.5

NO_GAIN = 0.97
"""Share of the full run's time above which freezing is called no gain: predictions err by as much."""


def in_words(plan: RunPlan) -> str:
    """Return the plan as text: layouts with the verdict, ranks of the chosen one, length of the run, sources."""
    told = "\n".join(verdicts(plan))
    memory = _ranks(plan), plan.head_slices
    return "\n\n".join(filter(None, [_head(plan), _layouts(plan), told, *memory, _course(plan), _sources(plan)]))


def _head(plan: RunPlan) -> str:
    machine = plan.machine
    return (
        f"{plan.model}: {_count(plan.num_parameters)} parameters in {plan.num_layers} layers, "
        f"{_gigabytes(plan.weight_bytes)} of weights; {counted(machine.num_devices, 'device')} of "
        f"{machine.device_bytes / GB:.4g} GB, of which {plan.budget / GB:.4g} GB are planned with."
    )


def _layouts(plan: RunPlan) -> str:
    # What does not fit in another schedule helps nobody; the run's own layouts show how much is missing.
    others = [each for each in plan.schedules if each.fits][:MOST_SCHEDULES]
    rows = [plan.trainer, *([] if plan.sharded is None else [plan.sharded]), *plan.options, *others]
    head = ["stages K", "replicas R", "micro-batches M", "fullest rank", "fits", "waiting", "step", "samples/s"]
    text = table([*head, "schedule"], map(_row, rows))
    if any(each.layout.abilities.overlaps_steps for each in rows):
        text += "\nasync_1f1b gives other results than Trainer; the other schedules give the same."
    return text


def _row(option: Option) -> list[str]:
    layout = option.layout
    return [
        option.name,
        str(layout.num_replicas),
        str(layout.num_microbatches),
        _gigabytes(option.fullest),
        "yes" if option.fits else "no",
        f"{option.bubble:.0%}",
        f"{option.step_seconds:.3g} s",
        f"{option.samples_per_second:.3g}",
        # Whole models, and pipelines of one stage, have no schedule.
        layout.schedule if layout.pipeline_size > 1 else "",
    ]


def _ranks(plan: RunPlan) -> str:
    layout, parts = plan.chosen.layout, [part.name for part in fields(RankMemory)]
    rows = []
    for rank, (stage, memory) in enumerate(zip(stages(plan), plan.chosen.memory, strict=True)):
        counts = [_count(count) for count in (stage.parameters, stage.trained)]
        sizes = [_gigabytes(getattr(memory, part)) for part in parts] + [_gigabytes(memory.total)]
        rows.append([str(rank), stage.blocks, *counts, *sizes])
    # The largest alone decides if a host is large enough; JSON has all.
    phase = max(plan.host, key=plan.host.__getitem__)
    return "\n".join(
        [
            f"{layout}, {layout.schedule}; memory of each rank of a pipeline:",
            table(["rank", "blocks", "parameters", "trained", *parts, "total"], rows),
            f"Host memory of a rank beside Python and its libraries: up to {_gigabytes(plan.host[phase])} ({phase}).",
        ]
    )


@dataclass(frozen=True)
class Stage:
    """Blocks of one rank of the pipeline in words, and the elements of their parameters and of those it trains."""

    blocks: str
    parameters: float
    trained: float


def stages(plan: RunPlan) -> list[Stage]:
    """Return what each rank of a pipeline of the chosen layout holds."""
    layout, blocks = plan.chosen.layout, plan.blocks
    counts = zip(stage_elements(layout, blocks), trained_elements(layout, blocks), strict=True)
    return [Stage(blocks_in_words(layout, rank), *both) for rank, both in enumerate(counts)]


def blocks_in_words(layout: Layout, rank: int) -> str:
    """Name the blocks of a rank of a pipeline, such as "embeddings, layers 1-6"."""
    return " and ".join(_of_stage(blocks, layout.num_blocks) for blocks in layout.blocks_of_rank(rank))


def _of_stage(blocks: range, num_blocks: int) -> str:
    words = ["embeddings"] if 0 in blocks else []
    own = [block for block in blocks if 0 < block < num_blocks - 1]
    is_cut_below = own and own[0] == mlp_of(block_of(own[0]) - 1)
    is_cut_above = own and own[-1] == attention_of(block_of(own[-1]) - 1)
    whole = [block_of(block) for block in own[bool(is_cut_below) : len(own) - bool(is_cut_above)]]
    words += [f"MLP of layer {block_of(own[0])}"] if is_cut_below else []
    if whole:
        words.append(f"layer {whole[0]}" if whole[0] == whole[-1] else f"layers {whole[0]}-{whole[-1]}")
    words += [f"attention of layer {block_of(own[-1])}"] if is_cut_above else []
    return ", ".join([*words, *(["head"] if num_blocks - 1 in blocks else [])])


def _course(plan: RunPlan) -> str:
    """Return the length of the run, what freezes when, and what is stored."""
    course, freezing = plan.course, plan.course.freezing
    if not course.num_steps:
        return ""
    steps = f"{course.num_steps:,} steps"
    if course.num_samples is not None:
        steps += f", {course.num_epochs:.3g} epochs of {course.num_samples:,} samples"
    lines = [f"The run: {steps}; with nothing frozen {duration(plan.duration.full_seconds)}."]
    if freezing is None:
        return "\n".join([*lines, course.note])
    at_most = "" if freezing.is_certain else "at most "
    step, parts = 0, []
    for span in freezing.spans:
        parts.append(f"{at_most}{span.num_frozen} of {plan.num_layers} layers from step {step:,} on")
        step += span.num_steps
    lines.append(f"Frozen ({freezing.policy}): {'; '.join(parts)}.")
    caching = plan.caching
    if caching is not None:
        needed = f"{_gigabytes(caching.needed_bytes)} needed on each node, {_gigabytes(caching.allowed_bytes)} allowed"
        if caching.why_off is not None:
            lines.append(f"Activation cache: off ({caching.why_off}); {needed}.")
        else:
            nothing = "" if caching.is_used else f" Nothing is: {caching.reason}."
            lines.append(f"Activation cache: {needed}: {caching.share:.0%} of the samples can be stored.{nothing}")
    return "\n".join(lines)


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
    found = _whether_it_fits, _whether_to_shard, _whether_to_split, _whether_launches_decide, _whether_to_freeze
    return [text for whether in found if (text := whether(plan))]


def _whether_it_fits(plan: RunPlan) -> str:
    if plan.chosen.fits:
        return ""
    text = f"Does not fit: the fullest rank needs {plan.chosen.fullest / GB:.1f} GB of {plan.budget / GB:g} GB. "
    fitting = [str(each.layout.pipeline_size) for each in plan.options if each.fits]
    # The number of stages that the user set does not fit, others do.
    if fitting:
        return f"{text}It fits with K={' or '.join(fitting)}."
    remedy = plan.remedy
    if remedy is not None and remedy.changes and remedy.option is not None:
        option = remedy.option
        changes = " ".join(f"--{name} {value}" for name, value in remedy.changes.items())
        return f"{text}It fits with {changes}, K={option.layout.pipeline_size}: {option.fullest / GB:.1f} GB."
    others = ", ".join(["more or larger devices", *(() if remedy is None else remedy.others)])
    return f"{text}Recomputation and batches of one sample do not help. Take {others} or shorter sequences."


def _whether_to_shard(plan: RunPlan) -> str:
    """Return where sharded data parallelism is the better choice; empty if it is not, or whole models fit."""
    sharded, fastest = plan.sharded, plan.fastest
    if sharded is None or not sharded.fits or plan.trainer.fits:
        return ""
    figures = f"{sharded.fullest / GB:.1f} GB and {sharded.samples_per_second:.3g} samples/s"
    found = f"{sharded.name} fits with {figures}, by formula"
    if not fastest.fits:
        return f"{found}; no pipeline fits without other options."
    # Predictions err by as much: a smaller lead is none.
    if NO_GAIN * sharded.samples_per_second > fastest.samples_per_second:
        return f"{found}: faster than the {fastest.samples_per_second:.3g} of K={fastest.layout.pipeline_size}."
    return ""


def _whether_to_split(plan: RunPlan) -> str:
    alone, *longer = plan.options
    if alone.layout.pipeline_size > 1 or not longer or not any(each.fits for each in plan.options):
        return ""
    fastest = plan.fastest
    size = fastest.layout.pipeline_size
    if not alone.fits:
        return f"K={size} is predicted fastest of those that fit: the model does not fit on one device."
    if fastest is alone:
        next_best = min(longer, key=lambda each: each.step_seconds)
        times = next_best.step_seconds / alone.step_seconds if alone.step_seconds else 1.0
        return (
            f"K=1 is predicted faster: the model fits on one device. K={next_best.layout.pipeline_size} would take "
            f"{times:.2f} times as long."
        )
    share = fastest.step_seconds / alone.step_seconds
    text = f"K={size} is predicted to take {share:.2f} of the time of K=1, although the model fits on one device."
    return text if plan.course.measured else f"{text} Assumed rates say so: compare both with --plan_only first."


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
    course, took, caching = plan.course, plan.duration, plan.caching
    if course.freezing is None or not took.full_seconds:
        return course.evidence
    epochs, share = f"{course.num_epochs:.3g} epochs", took.seconds / took.full_seconds
    if all(not span.num_frozen for span in course.freezing.spans):
        return f"No gain: no layer freezes in {epochs} ({course.num_steps:,} steps)."
    if share > NO_GAIN:
        texts = [f"No gain: {epochs}, in which freezing and cache take {share:.2f} of the full run's time."]
    else:
        at_least = "" if course.freezing.is_certain else "at least "
        text = (
            f"Freezing is predicted to take {at_least}{duration(took.seconds)}, {share:.2f} of the full run's time. "
            f"It may cost accuracy: compare it with {took.equal_epochs:.3g} epochs of full fine-tuning, which take as "
            "long."
        )
        texts = [text, *filter(None, [course.evidence])]
    if caching is not None and caching.is_used and caching.share < HALF:
        texts.append(
            f"Only {caching.share:.0%} of the samples fit into the activation cache: raise activation_cache_max_gb, "
            "or choose a disk with more space (activation_cache_dir)."
        )
    return " ".join(texts)


def _count(elements: float) -> str:
    return f"{elements / 1e9:.4g} B" if elements >= 1e9 else f"{elements / 1e6:.4g} M"


def _gigabytes(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= 10 * GB else f"{size / GB:.3g} GB" if size >= GB / 10 else _megabytes(size)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size else "0"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns to the right, the second one, if it has words, to the left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    is_text = [any(line[column][:1].isalpha() for line in lines[1:]) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in lines
    )


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return all of the plan as JSON values."""
    plain = ("model", "num_parameters", "weight_bytes", "num_layers", "host", "refused")
    nested = ("machine", "course", "blocks", "overheads", "duration")
    return {
        **{name: getattr(plan, name) for name in plain},
        **{name: asdict(getattr(plan, name)) for name in nested},
        "options": [_option(each) for each in plan.options],
        "trainer": _option(plan.trainer),
        "sharded": None if plan.sharded is None else _option(plan.sharded),
        "chosen": _option(plan.chosen),
        "schedules": [_option(each) for each in plan.schedules],
        "stages": [asdict(each) for each in stages(plan)],
        "caching": None if plan.caching is None else asdict(plan.caching),
        "timeline": spans_as_json(plan.timeline),
        "remedy": None if plan.remedy is None else plan.remedy.changes,
        "verdicts": verdicts(plan),
    }


def _option(each: Option) -> dict[str, Any]:
    return {
        **asdict(each),
        "pipeline_size": each.layout.pipeline_size,
        "fullest": each.fullest,
        "memory": [{**asdict(rank), "total": rank.total} for rank in each.memory],
        "layout": each.layout.as_event(),
    }


# ---- timeline ----

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
    # Numbers wider than their bars would run into each other.
    least = _LEAST_WIDTH / _WIDTH * timeline.end
    rank = {"field": "rank", "type": "ordinal", "title": "rank", "scale": {"paddingInner": 0.15}}
    # Of all kinds, drawn or not, so that a kind has one color in all pictures.
    colors = {"domain": list(_KINDS.values()), "range": list(_COLORS)}
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
