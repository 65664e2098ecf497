"""Need of a run for a pipeline, from its options and its model; otherwise it is left to plain Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hf_pipetransformer.cache.frozen_parts.part import maximal_frozen
from hf_pipetransformer.comm.errors import ModelSettingError
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.engine.losses import LossDoesNotDecomposeError
from hf_pipetransformer.freeze.policies import make_policy
from hf_pipetransformer.options.arguments import READERS, PipeTransformerArguments
from hf_pipetransformer.options.combinations import unused_by_trainer, unused_freeze_options
from hf_pipetransformer.options.refusals import (
    check_arguments,
    check_dataset,
    check_launch,
    check_model,
    warn_about_options,
)
from hf_pipetransformer.report import logger
from hf_pipetransformer.splitters.adapters import bare_model, has_adapters, why_unsplittable
from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, layers_of
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.script_code import hooked_by_script
from hf_pipetransformer.startup.model import is_causal_lm


if TYPE_CHECKING:
    from hf_pipetransformer.freeze.policy import FreezePolicy


class Need(Enum):
    """Need of a run for features that Trainer does not have."""

    NONE = "none"
    PREFERRED = "wish"
    """Trainer is an acceptable fallback. It lacks stored activations, the numbers of one process on several replicas
    and, for adapters that cannot be split, freezing.
    """
    REQUIRED = "must"


@dataclass(frozen=True)
class RunOptions:
    """Options of a run; `policy` and `splitter` are the user's own, if any."""

    args: PipeTransformerArguments
    policy: FreezePolicy | None = None
    splitter: Splitter | None = None

    def make_policy(self, warns: bool) -> FreezePolicy:
        """Return the policy of the run, the user's or the named one; `warns` of options that it does not read.

        Raises:
            ValueError: the options ask for two policies.
        """
        args = self.args
        if self.policy is not None and args.freeze_layers is not None:
            raise ValueError(
                f"freeze_layers={args.freeze_layers} with a policy of your own ({type(self.policy).__name__}): the "
                "policy decides alone. Give only one."
            )
        if self.policy is not None:
            return self.policy
        # A replayed run uses the recorded decisions, so unused freeze options are not worth a warning there.
        for text in unused_freeze_options(args, args.freeze_policy) if warns and args.layout_plan is None else ():
            logger.warning(text)
        return make_policy(args)

    def need(self, model: Any) -> Need:
        """Return what the options and the model require; `model` is None if it is not built yet."""
        args = self.args
        if args.plan_only:
            return Need.REQUIRED
        if _leaves_adapters_to_trainer(model) and not self._ask_for_parts:
            return Need.PREFERRED if self._freeze or args.activation_cache == "on" else Need.NONE
        # Trainer's own loop looks up what the script froze, see `cache.frozen_parts`.
        if self.only_store:
            return Need.NONE
        is_divided = args.world_size > 1 and args.pipeline_size != 1
        if is_divided or self._freeze or self._ask_for_parts or args.activation_cache == "on":
            return Need.REQUIRED
        # Trainer's replicas do not give the numbers of one process, but that alone is worth no error.
        if args.world_size > 1 and not has_adapters(model):
            return Need.PREFERRED
        # `auto` can slice the head in a pipeline only, and does without where none can run.
        if args.head_slices is None:
            return Need.PREFERRED
        return Need.PREFERRED if args.activation_cache == "auto" and _may_store(model) else Need.NONE

    def does_without(self, error: ValueError, model: Any) -> bool:
        """Return True if `error` may leave the run to Trainer: the user asked for nothing that needs a pipeline.

        Frozen parts of a model that Trainer trains may be stored, see `cache.frozen_parts`.

        A model that cannot be split is trained without freezing. If another setting or loss would make it splittable,
        the run is refused when freezing was requested.
        """
        has_parts = model is not None and bool(maximal_frozen(bare_model(model)))
        asks_for_cache = self.args.activation_cache == "on" and not has_parts
        if self._ask_for_parts or asks_for_cache:
            return False
        if self.args.plan_only:
            return has_parts and isinstance(error, UnsupportedModelError)
        if isinstance(error, (ModelSettingError, LossDoesNotDecomposeError)):
            return not self._freeze
        return isinstance(error, UnsupportedModelError)

    @property
    def may_be_left(self) -> bool:
        """False if a run asks for what Trainer does not have."""
        return not self._ask_for_parts

    @property
    def only_store(self) -> bool:
        """True if a pipeline could do nothing but store what the script froze."""
        own = self._freeze or self._ask_for_parts or self.args.plan_only
        return self.is_undivided and not own and self.args.head_slices is not None

    @property
    def is_undivided(self) -> bool:
        """True if one process computes each batch as a whole."""
        return self.args.world_size == 1 and self.args.num_microbatches in (None, 1)

    @property
    def _freeze(self) -> bool:
        return self.args.freeze_policy != "none" if self.policy is None else self.policy.freezes

    @property
    def _ask_for_parts(self) -> bool:
        args = self.args
        return (
            args.pipeline_size not in (None, 1)
            or args.num_microbatches not in (None, 1)
            or (args.pipeline_checkpoint != "never" and not args.recomputes_for_trainer)
            or args.pipeline_token_slices != "auto"
            or (args.head_slices or 1) > 1
            or args.layout_plan is not None
            or args.pipeline_trace_step is not None
            or self.splitter is not None
        )


def _leaves_adapters_to_trainer(model: Any) -> bool:
    return has_adapters(model) and (why_unsplittable(model) is not None or bool(getattr(model, "hf_device_map", None)))


def _may_store(model: Any) -> bool:
    """Return True if parameters below the adapters look frozen, so their activations could be stored."""
    try:
        first = layers_of(find_splitter(model), bare_model(model))[0]
    except Exception:  # Any error in finding layers means there are none to store.
        return False
    return not any(parameter.requires_grad for parameter in first.parameters())


def check_constructor_arguments(below: Any, options: RunOptions, model: Any, values: Mapping[str, Any]) -> bool:
    """Check a trainer's arguments before its constructor runs; return False if the run is left to Trainer.

    Refuses what cannot work, and warns about options that mean something else. `below` is the trainer's `super()`,
    `values` are its arguments by name.
    """
    args = options.args
    # Before anything else: independent trainings would pass every check below.
    check_launch(args)
    need = options.need(model)
    if need is Need.NONE:
        args.leave_recomputing_to_trainer()
        # Of what is frozen, Trainer's own loop stores what it can.
        stores = options.only_store and (model is None or bool(maximal_frozen(bare_model(model))))
        text = unused_by_trainer(args, [each for each in READERS if not (stores and each.startswith("activation_"))])
        if text is not None and args.process_index == 0:
            logger.warning(text)
        return False
    try:
        trl_compat.check_trainer(below.__self_class__, args, values)
        trainer_compat.check_taken_over(below, args)
        check_arguments(args)
        if model is not None:
            check_trained_model(model, options, values.get("optimizers", (None, None))[0])
        check_dataset(values.get("train_dataset"), "training")
    # A run that merely would gain by a pipeline goes on without one; what the user asked for must not be dropped.
    except ValueError as error:
        if need is Need.REQUIRED and not options.does_without(error, model):
            raise
        say_left_to_trainer(error)
        args.leave_recomputing_to_trainer()
        return False
    for text in warn_about_options(args) if args.process_index == 0 else ():
        logger.warning(text)
    return True


def say_left_to_trainer(error: ValueError) -> None:
    """Warn why a run goes on without a pipeline."""
    # From the environment: the trainer that knows its rank may not exist yet.
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning(f"Training without a pipeline or freezing, as plain Trainer does: {error}")


def check_trained_model(model: Any, options: RunOptions, users_optimizer: Any) -> None:
    """Refuse a model or an optimizer that cannot be put on the stages that the options name."""
    reason = why_unsplittable(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{reason}. Use plain LoRA, or ask for no stages, micro-batches or layout_plan: "
            "the model is then trained as by Trainer."
        )
    num_stages = 1 if options.args.world_size == 1 else options.args.pipeline_size
    check_model(model, num_stages, options.is_undivided, (users_optimizer, None))


def why_whole_head(trainer: Trainer) -> str | None:
    """Return why the head must see whole sequences; None if the loss is that of a causal language model alone."""
    name = type(trainer).__name__
    if trl_compat.has_fused_head(trainer):
        return f"the loss of {name} computes logits in pieces of its own and keeps none of them"
    hooked = hooked_by_script(trainer.model)
    if hooked:
        return f"a hook of the script's on {next(iter(hooked)) or 'the model'} may read whole sequences"
    is_models = trainer_compat.has_plain_loss(trainer) and trainer_compat.has_known_loss(trainer)
    if is_models and trl_compat.metrics(trainer) is None and is_causal_lm(trainer.model):
        return None
    return (
        f"the loss of {name} is more than that of a causal language model of transformers, and may read the logits of "
        "whole sequences"
    )
