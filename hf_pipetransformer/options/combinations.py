"""Options that exclude or require each other, checked as soon as the arguments are created."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from hf_pipetransformer.schedules.abilities import OPTIONS_OF_SCHEDULES


Options = Any
"""`PipeTransformerArguments`, with every option already parsed."""

Refusal = tuple[bool, str]
"""True if the options are refused, and the message: what was found, why it cannot work, and what to change."""

POLICIES_READING = {
    "freeze_alpha": ("gradient_norm", "schedule"),
    "freeze_rule": ("gradient_norm",),
    "freeze_interval": ("gradient_norm", "schedule"),
    "freeze_warmup": ("gradient_norm", "schedule"),
    "freeze_min_active_layers": ("gradient_norm", "schedule"),
}
"""Built-in policies that read each of these; one of your own reads all but `freeze_alpha` and `freeze_rule`."""

DEMANDS: dict[str, Callable[[Options], bool]] = {
    "torch_compile": lambda args: args.torch_compile,
    # `auto` is no demand: it stores nothing then, or leaves the head whole, without a word.
    "activation_cache": lambda args: args.activation_cache == "on",
    "pipeline_head_slices": lambda args: (args.head_slices or 1) > 1,
    "pipeline_checkpoint": lambda args: args.pipeline_checkpoint == "except_last",
    "pipeline_loss": lambda args: args.pipeline_loss in ("batch", "replica"),
    "fp16": lambda args: args.fp16,
}
"""For options that some schedules refuse (`Abilities.refuses`), whether their values ask for what is refused."""


def raise_first(refusals: Iterable[Refusal]) -> None:
    """Raise ValueError with the message of the first refusal that is true."""
    # All messages have been built by now, so that none may need what its own condition makes sure of.
    for is_refused, text in refusals:
        if is_refused:
            raise ValueError(text)


def check_combinations(args: Options) -> None:
    """Check all combinations of options.

    Raises:
        ValueError: two options exclude each other, or one requires another.
    """
    raise_first(
        [
            *_refused_freezing(args),
            *_refused_on_other_schedules(args),
            *_refused_on_this_schedule(args),
        ]
    )


def _refused_freezing(args: Options) -> list[Refusal]:
    is_fixed = args.freeze_policy == "fixed"
    by_layers = ("fixed", f"0:{args.freeze_layers}")
    return [
        (
            # `by_layers` is what `__post_init__` sets: arguments may be built again from their own values.
            args.freeze_layers is not None and (args.freeze_policy, args.freeze_at) not in (("none", None), by_layers),
            f"freeze_layers={args.freeze_layers} with freeze_policy={args.freeze_policy!r} and "
            f"freeze_at={args.freeze_at!r}: it stands for freeze_policy='fixed' and freeze_at={by_layers[1]!r}. Leave "
            "it out, or the other two.",
        ),
        (is_fixed and not args.freeze_at, "freeze_policy='fixed' needs freeze_at='step:layers,...', found none."),
        (
            bool(args.freeze_at) and not is_fixed,
            f"freeze_at={args.freeze_at!r} needs freeze_policy='fixed', found {args.freeze_policy!r}.",
        ),
        (
            args.layout_plan is not None and not os.path.isfile(args.layout_plan),
            f"layout_plan={args.layout_plan!r} is not a file: expected the pipetransformer_events.jsonl of a run.",
        ),
    ]


def _refused_on_other_schedules(args: Options) -> list[Refusal]:
    """List the options that only some schedules read."""
    defaults = _defaults(args)
    return [
        (
            # A value that equals the default cannot be told from one that nobody set.
            name not in args.abilities.reads and getattr(args, name) != defaults[name],
            f"{name}={getattr(args, name)!r} needs pipeline_schedule={' or '.join(map(repr, readers))}, "
            f"found {args.pipeline_schedule!r}.",
        )
        for name, readers in OPTIONS_OF_SCHEDULES.items()
    ]


def _refused_on_this_schedule(args: Options) -> list[Refusal]:
    able, here = args.abilities, f"with pipeline_schedule={args.pipeline_schedule!r}"
    fewest, most = able.min_chunks, able.max_chunks
    return [
        (
            not fewest <= args.num_chunks <= most,
            f"pipeline_chunks={args.pipeline_chunks} {here}: expected "
            f"{fewest if fewest == most else f'{fewest} to {most}'} stages a rank. Choose another schedule, or leave "
            "pipeline_chunks out.",
        ),
        *(
            (
                name in able.refuses and is_asked(args),
                f"{name}={getattr(args, name)!r} {here}, which {able.refuses.get(name)}. Leave {name} out, or use "
                "pipeline_schedule='1f1b'.",
            )
            for name, is_asked in DEMANDS.items()
        ),
        (
            DEMANDS["pipeline_head_slices"](args) and DEMANDS["pipeline_loss"](args),
            f"pipeline_head_slices={args.pipeline_head_slices} with pipeline_loss={args.pipeline_loss!r}: a loss of "
            "slices sees no whole batch. Choose one.",
        ),
    ]


def unused_freeze_options(args: Options, policy: str) -> list[str]:
    """Return warnings about options that have no effect with a policy, named as in `freeze_policy`."""
    defaults = _defaults(args)
    return [
        f"{name}={getattr(args, name)!r} does nothing with freeze_policy={policy!r}: "
        + ("no layer freezes." if policy == "none" else f"expected one of {readers}.")
        for name, readers in POLICIES_READING.items()
        if policy not in readers and getattr(args, name) != defaults[name]
    ]


OF_THE_MACHINE = (
    "pipeline_timeout", "pipeline_gather_at_end", "pipeline_compute_metrics", "activation_cache_dir",
    "activation_cache_max_gb",
)  # fmt: skip
"""Options that say how and where, which a file of options may set for all runs alike."""


def unused_by_trainer(args: Options, names: Iterable[str]) -> str | None:
    """Return a warning about those of the options `names` that a run left to Trainer ignores; None if none is set."""
    if args.was_plain:
        return (
            "TrainingArguments have no options of the pipeline, so this run trains as with Trainer. Use "
            "PipeTransformerArguments to freeze layers, to store their activations or to set micro-batches."
        )
    defaults = _defaults(args)
    # What asks for the one stage and the one micro-batch that there are is no mistake.
    as_asked = {"pipeline_parallel_size", "pipeline_parallel_num_microbatches", "elastic", *OF_THE_MACHINE}
    set_ones = [
        f"{name}={getattr(args, name)!r}"
        for name in names
        # What switches something off asks for nothing that Trainer would not do.
        if name not in as_asked and getattr(args, name) not in (defaults[name], "off", "never")
    ]
    if not set_ones:
        return None
    return (
        f"{', '.join(set_ones)}: no effect, because nothing freezes and no batch is divided, so that this run trains "
        "as with Trainer. Freeze something (requires_grad_(False) in the script, freeze_layers), set "
        "pipeline_parallel_num_microbatches, or leave them out."
    )


def _defaults(args: Options) -> dict[str, Any]:
    # Those of the instance's own class: a class that combines ours with TRL's may have others.
    return {option.name: option.default for option in fields(args)}
