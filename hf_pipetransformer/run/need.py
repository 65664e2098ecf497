"""Whether a run needs a pipeline at all: one process that freezes and stores nothing is left to Trainer."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.splitters import Splitter


class Need(Enum):
    """How much a run needs what Trainer does not do: a wish is left out where it does not work."""

    NONE = "none"
    WISH = "wish"
    MUST = "must"


def need_of(
    args: PipeTransformerArguments, policy: FreezePolicy | None, splitter: Splitter | None, model: Any
) -> Need:
    """What the options and the model ask for.

    Args:
        args: the options.
        policy: the user's own; None for the one that the options name.
        splitter: the user's own.
        model: None where it is not made yet.
    """
    freezes = args.freeze_policy != "none" if policy is None else policy.freezes
    asks_for_parts = (
        args.pipeline_size not in (None, 1)
        or args.num_microbatches not in (None, 1)
        or args.pipeline_checkpoint != "never"
        or args.layout_plan is not None
        or splitter is not None
    )
    if args.world_size > 1 or freezes or asks_for_parts:
        return Need.MUST
    if args.activation_cache == "on":
        return Need.MUST
    has_frozen = model is not None and any(not parameter.requires_grad for parameter in model.parameters())
    return Need.WISH if has_frozen and args.activation_cache == "auto" else Need.NONE
