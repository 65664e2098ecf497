"""Whether a run needs a pipeline at all: what neither splits, freezes nor stores anything can be left to Trainer."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hf_pipetransformer.adapters import bare_model, has_adapters, why_unsplittable
from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.errors import ModelSettingError
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.pipeline.losses import LossDoesNotDecomposeError
from hf_pipetransformer.splitters import Splitter, UnsupportedModelError, find_splitter, layers_of


class Need(Enum):
    """How much a run needs what Trainer does not do."""

    NONE = "none"
    WISH = "wish"
    """Where it does not work, Trainer does: the numbers of one process on several replicas, stored activations, and
    with adapters that cannot be split also layers that freeze."""
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
    freezes = _freezes(args, policy)
    asks_for_parts = _asks_for_parts(args, splitter)
    if _leaves_adapters_to_trainer(model) and not asks_for_parts:
        return Need.WISH if freezes or args.activation_cache == "on" else Need.NONE
    is_divided = args.world_size > 1 and args.pipeline_size != 1
    if is_divided or freezes or asks_for_parts or args.activation_cache == "on":
        return Need.MUST
    if args.world_size > 1 and not has_adapters(model):
        return Need.WISH
    return Need.WISH if args.activation_cache == "auto" and _may_store(model) else Need.NONE


def does_without(
    error: ValueError, args: PipeTransformerArguments, policy: FreezePolicy | None, splitter: Splitter | None
) -> bool:
    """Return whether Trainer does a run that `error` keeps from a pipeline, since nobody asked for what that adds.

    A model that cannot be split is trained without freezing too. One that could be, with another setting or another
    loss, is refused where freezing was asked for.
    """
    if _asks_for_parts(args, splitter) or args.activation_cache == "on":
        return False
    if isinstance(error, (ModelSettingError, LossDoesNotDecomposeError)):
        return not _freezes(args, policy)
    return isinstance(error, UnsupportedModelError)


def _freezes(args: PipeTransformerArguments, policy: FreezePolicy | None) -> bool:
    return args.freeze_policy != "none" if policy is None else policy.freezes


def _asks_for_parts(args: PipeTransformerArguments, splitter: Splitter | None) -> bool:
    return (
        args.pipeline_size not in (None, 1)
        or args.num_microbatches not in (None, 1)
        or (args.pipeline_checkpoint != "never" and not args.recomputes_for_trainer)
        or args.pipeline_token_slices != "auto"
        or args.layout_plan is not None
        or splitter is not None
    )


def _leaves_adapters_to_trainer(model: Any) -> bool:
    return has_adapters(model) and (why_unsplittable(model) is not None or bool(getattr(model, "hf_device_map", None)))


def _may_store(model: Any) -> bool:
    """Whether the script froze something below what it trains, as far as is seen before the start."""
    if model is None:
        return False
    if not has_adapters(model):
        return any(not parameter.requires_grad for parameter in model.parameters())
    try:
        first = layers_of(find_splitter(model), bare_model(model))[0]
    except Exception:  # Whatever keeps a splitter from finding layers, there are none to store.
        return False
    return not any(parameter.requires_grad for parameter in first.parameters())
