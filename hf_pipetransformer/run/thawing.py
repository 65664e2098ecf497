"""Where layers may be thawed, and how long pipelines may grow then."""

from __future__ import annotations

from collections.abc import Mapping

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.layout import Layout


def longest_pipeline(
    layout: Layout, first: Layout | None, policy: FreezePolicy, replay: Mapping[int, Layout] | None
) -> int:
    """The longest K that a run may have from here on: it grows where layers are thawed, or as it is replayed.

    Args:
        layout: in force.
        first: under which the run began, if that was another one.
        policy: decides what freezes.
        replay: optimizer step to the layout from then on, of an earlier run; then the policy is not asked.
    """
    coming = [] if replay is None else list(replay.values())
    if replay is None and policy.may_thaw and first is not None:
        coming = [first]
    return max(each.pipeline_size for each in (layout, *coming))


def check_thawing(
    args: PipeTransformerArguments, policy: FreezePolicy, replay: Mapping[int, Layout] | None, pipeline_size: int
) -> None:
    """Refuse to thaw under schedules with which it has not been verified.

    Args:
        args: the options.
        policy: decides what freezes.
        replay: optimizer step to the layout from then on, of an earlier run; then the policy is not asked.
        pipeline_size: the longest K that the run may have.

    Raises:
        ValueError: layers may be thawed on stages that are at different steps or run slices of sequences.
    """
    counts = [] if replay is None else [layout.num_frozen_layers for _, layout in sorted(replay.items())]
    thaws = policy.may_thaw if replay is None else counts != sorted(counts)
    if thaws and pipeline_size > 1 and (args.is_asynchronous or args.cuts_tokens):
        who = "layout_plan" if replay is not None else f"the freeze policy {policy.name!r}"
        raise ValueError(
            f"pipeline_schedule={args.pipeline_schedule!r} while {who} may unfreeze layers: that has not been "
            "verified. Use pipeline_schedule='1f1b', or let the number of frozen layers only grow."
        )
