"""Checks for options that exclude or require each other, run before training starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hf_pipetransformer.schedules import Abilities, schedules_that


Options = Any
"""`PipeTransformerArguments`, with every option already parsed."""

_DECIDING = ("gradient_norm", "schedule")
POLICIES_READING = {
    "freeze_alpha": ("gradient_norm", "schedule"),
    "freeze_rule": ("gradient_norm",),
    "freeze_interval": _DECIDING,
    "freeze_warmup": _DECIDING,
    "freeze_min_active_layers": _DECIDING,
}
"""Built-in policies that read each of these options; a custom policy reads all but the first two."""

OPTIONS_OF_SCHEDULES: dict[str, Callable[[Abilities], bool]] = {
    "pipeline_token_slices": lambda able: able.cuts_tokens,
    "pipeline_weights": lambda able: able.overlaps_steps,
    "pipeline_clip": lambda able: able.overlaps_steps,
    "pipeline_drain_interval": lambda able: able.overlaps_steps,
}
"""Ability that a schedule needs for each of these options to do anything."""


def check_combinations(args: Options) -> None:
    """Check all combinations of options.

    Raises:
        ValueError: two options exclude each other, or one requires another.
    """
    _check_freezing(args)
    _check_chunks(args)
    _check_schedule(args)
    _check_views(args)


def _check_chunks(args: Options) -> None:
    fewest, most = args.schedule.abilities.min_chunks, args.schedule.abilities.max_chunks
    if not fewest <= args.num_chunks <= most:
        raise ValueError(
            f"pipeline_chunks={args.pipeline_chunks} with pipeline_schedule={args.pipeline_schedule!r}: expected "
            + (f"{fewest}" if fewest == most else f"{fewest} to {most}")
            + " stages a rank. Choose another schedule, or leave pipeline_chunks out."
        )


def _check_schedule(args: Options) -> None:
    able, schedule = args.schedule.abilities, f"pipeline_schedule={args.pipeline_schedule!r}"
    defaults = _defaults(args)
    for name, can in OPTIONS_OF_SCHEDULES.items():
        if getattr(args, name) != defaults[name] and not can(able):
            needed = " or ".join(map(repr, schedules_that(can)))
            raise ValueError(
                f"{name}={getattr(args, name)!r} needs pipeline_schedule={needed}, found {args.pipeline_schedule!r}."
            )
    if able.overlaps_steps and args.pipeline_checkpoint == "except_last":
        raise ValueError(
            f"pipeline_checkpoint='except_last' with {schedule}, which has no last micro-batch: set it to 'always' or "
            "'never'."
        )
    if able.overlaps_steps and args.fp16:
        raise ValueError(
            f"fp16=True with {schedule}: stages would have to agree in every step whether it is skipped. Use "
            "bf16=True, or pipeline_schedule='1f1b'."
        )
    if args.torch_compile and not able.runs_steps_whole:
        raise ValueError(
            f"torch_compile with {schedule} has not been verified: use another schedule, or leave torch_compile out."
        )
    if args.activation_cache == "on" and not able.runs_steps_whole:
        why = "stored activations are those of whole sequences" if able.cuts_tokens else "nothing is stored there"
        raise ValueError(
            f"activation_cache='on' with {schedule}: {why}. Leave activation_cache out, or use "
            "pipeline_schedule='1f1b'."
        )


def _check_views(args: Options) -> None:
    asked = f"activation_cache_views={args.activation_cache_views}"
    if args.activation_cache_views and args.activation_cache == "off":
        raise ValueError(f"{asked} with activation_cache='off': leave one of them out.")
    if args.activation_cache_views and not args.schedule.abilities.runs_steps_whole:
        raise ValueError(
            f"{asked} with pipeline_schedule={args.pipeline_schedule!r}: nothing is stored there. Leave "
            "activation_cache_views out, or use pipeline_schedule='1f1b'."
        )


def _check_freezing(args: Options) -> None:
    if args.freeze_policy == "fixed" and not args.freeze_at:
        raise ValueError("freeze_policy='fixed' needs freeze_at='step:layers,...', found none.")
    if args.freeze_policy != "fixed" and args.freeze_at:
        raise ValueError(f"freeze_at={args.freeze_at!r} needs freeze_policy='fixed', found {args.freeze_policy!r}.")
    if args.layout_plan is not None and not os.path.isfile(args.layout_plan):
        raise ValueError(
            f"layout_plan={args.layout_plan!r} is not a file: expected the pipetransformer_events.jsonl of a run."
        )


def unused_freeze_options(args: Options, policy: str) -> list[str]:
    """Return warnings about options that have no effect with a policy, named as in `freeze_policy`."""
    defaults = _defaults(args)
    return [
        f"{name}={getattr(args, name)!r} does nothing with freeze_policy={policy!r}: "
        + ("no layer freezes." if policy == "none" else f"expected one of {readers}.")
        for name, readers in POLICIES_READING.items()
        if policy not in readers and getattr(args, name) != defaults[name]
    ]


def _defaults(args: Options) -> dict[str, Any]:
    return {field.name: field.default for field in fields(args)}
