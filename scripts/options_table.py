"""The options in docs/options.md, made from the fields of `PipeTransformerArguments`.

    python -m scripts.options_table

rewrites them in place: a heading, so an anchor, for each option, under the task that it is for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import Field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from hf_pipetransformer.options.arguments import READERS, PipeTransformerArguments
from scripts.bench.tables import with_table


PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
REFERENCE = re.compile(r"See docs/([\w.]+), ([^.]+)\.")
TASKS = {
    "Freeze layers": (
        "freeze_layers", "freeze_policy", "freeze_at", "freeze_alpha", "freeze_rule", "freeze_interval",
        "freeze_warmup", "freeze_min_active_layers",
    ),
    "Store what frozen layers compute": (
        "activation_cache", "activation_cache_dir", "activation_cache_max_gb", "activation_cache_dtype",
        "activation_cache_keep",
    ),
    "Split a model into stages": (
        "pipeline_parallel_size", "pipeline_parallel_num_microbatches", "pipeline_schedule", "pipeline_chunks",
        "pipeline_token_slices",
    ),
    "Fit into memory": (
        "pipeline_checkpoint", "pipeline_head_slices", "pipeline_gradient_dtype", "pipeline_master_dtype",
        "pipeline_gather_at_end",
    ),
    "Give freed devices work": ("elastic", "pipeline_compression", "layout_plan"),
    "Loss and metrics": ("pipeline_loss", "pipeline_compute_metrics"),
    "Train without a bubble": ("pipeline_weights", "pipeline_clip", "pipeline_drain_interval"),
    "Plan, watch and end a run": ("plan_only", "pipeline_trace_step", "pipeline_timeout"),
}  # fmt: skip
"""Names of options by what somebody wants to do."""


def options_by_task() -> str:
    """Return an index of the tasks, then a section for each with the default, the choices and the help of its options.

    Raises:
        ValueError: names options that stand under no task, or that no longer exist.
    """
    options = {option.name: option for option in fields(PipeTransformerArguments) if option.name in READERS}
    placed = Counter(name for names in TASKS.values() for name in names)
    if wrong := sorted({*placed} ^ {*options} | {name for name, times in placed.items() if times > 1}):
        raise ValueError(f"An option stands under one of TASKS, once; found more, fewer or no option: {wrong}.")
    parts = ["".join(f"- [{task}](#{_anchor(task)}): {_mentions(names)}\n" for task, names in TASKS.items())]
    for task, names in TASKS.items():
        parts += [f"## {task}\n", *(_entry(options[name]) for name in names)]
    return "\n".join(parts)


def _mentions(names: Iterable[str]) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names)


def _entry(option: Field[Any]) -> str:
    facts = f"Default: {_shown(option.default)}."
    if choices := option.metadata.get("choices"):
        facts += f" Choices: {', '.join(f'`{choice}`' for choice in choices)}."
    return f"### `{option.name}`\n\n{facts}\n\n{REFERENCE.sub(_link, option.metadata['help'])}\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w ]", "", heading).lower().replace(" ", "-")


def _link(reference: re.Match[str]) -> str:
    page, heading = reference.groups()
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    assert re.search(f"^#+ {re.escape(heading)}$", text, re.MULTILINE), f"docs/{page} has no heading {heading!r}"
    return f"See [{heading}]({page}#{_anchor(heading)})."


def _shown(default: Any) -> str:
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    # Thirds and the like, which a decimal number would round.
    if isinstance(default, float) and float(f"{default:g}") != default:
        return str(Fraction(default).limit_denominator(100))
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "options", options_by_task()), encoding="utf-8")


if __name__ == "__main__":
    main()
