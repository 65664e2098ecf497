"""Options that do not go together, refused before a run begins."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from hf_pipetransformer.pipeline.schedules import find_schedule


Options = Any
"""`PipeTransformerArguments`, each option read already."""

POLICY_OF_OPTION = {
    "freeze_percentile": "gradient_change",
    "freeze_tolerance": "plasticity",
    "freeze_patience": "plasticity",
    "freeze_thaw": "plasticity",
    "freeze_max_ratio": "timely",
}
"""The one policy that each of these options is for."""

NOT_FREEZING = ("none", "timely")
_DECIDING = ("gradient_norm", "schedule", "gradient_change", "plasticity", "saliency")
POLICIES_READING = {
    "freeze_alpha": ("gradient_norm", "schedule"),
    "freeze_rule": ("gradient_norm",),
    "freeze_interval": _DECIDING,
    "freeze_warmup": (*_DECIDING, "timely"),
    "freeze_min_active_layers": _DECIDING,
}
"""The policies that read each of these options; a policy of the user's own reads all but the first two."""

SKIPPING_SCHEDULES = ("1f1b", "gpipe", "zb_h1")
"""Under which weight gradients may be skipped."""


def check_combinations(args: Options) -> None:
    """Look at all of them.

    Raises:
        ValueError: two of them exclude each other, or one needs another.
    """
    _check_freezing(args)
    check_budget_options(args)
    _check_chunks(args)
    _check_token_slices(args)
    _check_asynchronous(args)
    _check_views(args)


def _check_chunks(args: Options) -> None:
    schedule = find_schedule(args.pipeline_schedule)
    fewest, most = schedule.min_chunks, schedule.max_chunks
    if not fewest <= args.num_chunks <= most:
        raise ValueError(
            f"pipeline_chunks={args.pipeline_chunks} with pipeline_schedule={args.pipeline_schedule!r}: expected "
            + (f"{fewest}" if fewest == most else f"{fewest} to {most}")
            + " stages a rank. Choose another schedule, or leave pipeline_chunks out."
        )


def _check_token_slices(args: Options) -> None:
    if args.pipeline_token_slices != "auto" and not args.cuts_tokens:
        raise ValueError(
            f"pipeline_token_slices={args.pipeline_token_slices!r} needs pipeline_schedule='token', found "
            f"{args.pipeline_schedule!r}."
        )
    if args.cuts_tokens and args.torch_compile:
        raise ValueError(
            "torch_compile with pipeline_schedule='token' has not been verified: use another schedule, or leave "
            "torch_compile out."
        )
    if args.cuts_tokens and args.activation_cache == "on":
        raise ValueError(
            "activation_cache='on' with pipeline_schedule='token': stored activations are those of whole "
            "sequences. Leave activation_cache out, or use pipeline_schedule='1f1b'."
        )


def _check_asynchronous(args: Options) -> None:
    if not args.is_asynchronous:
        defaults = {"pipeline_weights": "pipeoptim", "pipeline_clip": "stage", "pipeline_drain_interval": None}
        for name, default in defaults.items():
            if getattr(args, name) != default:
                raise ValueError(
                    f"{name}={getattr(args, name)!r} needs pipeline_schedule='async_1f1b', found "
                    f"{args.pipeline_schedule!r}."
                )
        return
    if args.pipeline_checkpoint == "except_last":
        raise ValueError(
            "pipeline_checkpoint='except_last' with pipeline_schedule='async_1f1b', which has no last "
            "micro-batch: set it to 'always' or 'never'."
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile with pipeline_schedule='async_1f1b' has not been verified: use another schedule, or "
            "leave torch_compile out."
        )
    if args.fp16:
        raise ValueError(
            "fp16=True with pipeline_schedule='async_1f1b': stages would have to agree in every step whether it "
            "is skipped. Use bf16=True, or pipeline_schedule='1f1b'."
        )
    if args.activation_cache == "on":
        raise ValueError(
            "activation_cache='on' with pipeline_schedule='async_1f1b': nothing is stored there. Leave "
            "activation_cache out, or use pipeline_schedule='1f1b'."
        )


def _check_views(args: Options) -> None:
    asked = f"activation_cache_views={args.activation_cache_views}"
    if args.activation_cache_views and args.activation_cache == "off":
        raise ValueError(f"{asked} with activation_cache='off': leave one of them out.")
    if args.activation_cache_views and (args.cuts_tokens or args.is_asynchronous):
        raise ValueError(
            f"{asked} with pipeline_schedule={args.pipeline_schedule!r}: nothing is stored there. Leave "
            "activation_cache_views out, or use pipeline_schedule='1f1b'."
        )
    if args.activation_cache_views and args.freeze_budget == "time":
        raise ValueError(
            f"{asked} with freeze_budget='time', which counts on one epoch that fills the cache: use "
            "freeze_budget='epochs', or leave activation_cache_views out."
        )


def _check_freezing(args: Options) -> None:
    if args.freeze_policy == "fixed" and not args.freeze_at:
        raise ValueError("freeze_policy='fixed' needs freeze_at='step:layers,...', found none.")
    if args.freeze_policy != "fixed" and args.freeze_at:
        raise ValueError(f"freeze_at={args.freeze_at!r} needs freeze_policy='fixed', found {args.freeze_policy!r}.")
    defaults = {field.name: field.default for field in fields(args)}
    for name, policy in POLICY_OF_OPTION.items():
        found = getattr(args, name)
        if found != defaults[name] and args.freeze_policy != policy:
            raise ValueError(f"{name}={found!r} needs freeze_policy={policy!r}, found {args.freeze_policy!r}.")
    by_clock = args.freeze_policy in ("saliency", "timely")
    if by_clock and args.full_determinism and args.layout_plan is None:
        raise ValueError(
            f"freeze_policy={args.freeze_policy!r} with full_determinism=True: it decides by measured times, which "
            "differ from run to run. Use another policy, or replay the decisions of an earlier run with layout_plan."
        )
    if args.freeze_policy == "timely":
        check_skipping(args, "freeze_policy='timely'")
    if args.layout_plan is not None and not os.path.isfile(args.layout_plan):
        raise ValueError(
            f"layout_plan={args.layout_plan!r} is not a file: expected the pipetransformer_events.jsonl of a run."
        )


def check_budget_options(args: Options) -> None:
    """Refuse options under which no time can be planned; also of a run that begins, as options may have changed.

    Raises:
        ValueError: names the option.
    """
    if args.freeze_budget != "time":
        return
    if args.max_steps > 0:
        raise ValueError(
            f"freeze_budget='time' with max_steps={args.max_steps}: the number of steps follows from the time of "
            "num_train_epochs. Leave max_steps out, or use freeze_budget='epochs'."
        )
    if args.full_determinism and args.layout_plan is None:
        raise ValueError(
            "freeze_budget='time' with full_determinism=True: how many steps fit is decided by measured times, which "
            "differ from run to run. Use freeze_budget='epochs', or replay an earlier run with layout_plan."
        )


def unused_freeze_options(args: Options, policy: str) -> list[str]:
    """What the user should hear of options that do nothing with a policy, named as in `freeze_policy`."""
    defaults = {field.name: field.default for field in fields(args)}
    return [
        f"{name}={getattr(args, name)!r} does nothing with freeze_policy={policy!r}: "
        + ("no layer freezes." if policy in NOT_FREEZING else f"expected one of {readers}.")
        for name, readers in POLICIES_READING.items()
        if policy not in readers and getattr(args, name) != defaults[name]
    ]


def check_skipping(args: Options, what: str) -> None:
    """Refuse options that do not go with skipped weight gradients; `what` skips them.

    Raises:
        ValueError: names the option.
    """
    if args.pipeline_schedule not in SKIPPING_SCHEDULES:
        raise ValueError(
            f"{what} with pipeline_schedule={args.pipeline_schedule!r}: expected one of {SKIPPING_SCHEDULES}, whose "
            "ranks hold one stage each, whole sequences, and come to one end of a step."
        )
    if args.torch_compile:
        raise ValueError(
            f"{what} with torch_compile=True: each step skips other weight gradients, and its layers would be "
            "compiled anew. Leave torch_compile out, or use another policy."
        )
    if args.activation_cache == "on":
        raise ValueError(
            f"{what} with activation_cache='on': no layer freezes, so there is nothing to store. Leave "
            "activation_cache out, or use another policy."
        )
    if args.activation_cache_views:
        raise ValueError(
            f"{what} with activation_cache_views={args.activation_cache_views}: no layer freezes, so there is nothing "
            "to store. Leave activation_cache_views out, or use another policy."
        )
