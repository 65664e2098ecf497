"""Needs of a run: a pipeline, from its options and its model, or else plain Trainer; and what its loss takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hf_pipetransformer.comm.errors import LossDoesNotDecomposeError, ModelSettingError
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.freeze.policies import make_policy
from hf_pipetransformer.options.arguments import READERS, PipeTransformerArguments
from hf_pipetransformer.options.combinations import unused_by_trainer, unused_freeze_options
from hf_pipetransformer.options.refusals import (
    check_arguments,
    check_dataset,
    check_launch,
    check_model,
    check_output_dir,
    warn_about_options,
)
from hf_pipetransformer.report import logger
from hf_pipetransformer.splitters.adapters import bare_model, has_adapters, why_unsplittable
from hf_pipetransformer.splitters.base import (
    Splitter,
    UnsupportedModelError,
    is_causal_lm,
    layers_of,
    main_input_of,
    maximal_frozen,
)
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.script_code import hooked_by_script


if TYPE_CHECKING:
    from hf_pipetransformer.freeze.policy import FreezePolicy


LEFT_TO_TRAINER = (UnsupportedModelError, ModelSettingError, LossDoesNotDecomposeError)
"""Reasons for which a run without a pipeline of its own is Trainer's."""


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

    def wants_pipeline(self, model: Any) -> bool:
        """Return True if a pipeline is to train unless none can; `model` is None if it is not built yet."""
        args, caches = self.args, self.args.activation_cache
        if args.plan_only or self.freezes or self.asks_for_parts:
            return True
        if _leaves_adapters_to_trainer(model):
            return caches == "on"
        # Trainer's own loop looks up what the script froze, see `cache.frozen_parts`; but `auto` slices of the head
        # take a pipeline.
        if args.world_size == 1 or args.head_slices is None:
            return args.head_slices is None
        # Trainer's replicas do not give the numbers of one process.
        return args.pipeline_size != 1 or not has_adapters(model) or caches == "on" or self._may_store(model)

    def may_leave(self, error: ValueError, model: Any, is_started: bool) -> bool:
        """Return True if `error`, for which no pipeline can train, leaves the run to Trainer's loop.

        It does unless the user asked for what Trainer lacks. What is frozen may be stored there, too.

        Args:
            is_started: the model was inspected, so that the options are known to be sound.
        """
        args, caches = self.args, self.args.activation_cache == "on"
        if args.plan_only:
            is_kind = isinstance(error, UnsupportedModelError)
            return is_kind and not (self.freezes or self.asks_for_parts) and _has_parts(model)
        if self.freezes:
            return False
        if is_started and args.is_undivided:
            return True
        if self.asks_for_parts:
            return False
        # A run that merely would gain by a pipeline goes on without one, for whatever reason.
        if _leaves_adapters_to_trainer(model) or not (caches or (args.world_size > 1 and args.pipeline_size != 1)):
            return True
        return isinstance(error, LEFT_TO_TRAINER) and (not caches or _has_parts(model))

    def refusal(self, error: ValueError) -> ValueError:
        """Return what to raise for a model or loss that no pipeline can run, with the option that asked for one."""
        if self.asks_for_parts or not self.freezes or not isinstance(error, LEFT_TO_TRAINER):
            return error
        args = self.args
        name = (
            "policy" if self.policy is not None else "freeze_policy" if args.freeze_layers is None else "freeze_layers"
        )
        asked = type(self.policy).__name__ if self.policy is not None else getattr(args, name)
        return type(error)(
            f"{name}={asked} can freeze no layer: {error} What the script itself freezes (requires_grad_(False)) is "
            f"computed once without {name}, too."
        )

    @property
    def freezes(self) -> bool:
        """True if layers are to freeze while the run goes on, or before its first step."""
        return self.args.freeze_policy != "none" if self.policy is None else self.policy.freezes

    def _may_store(self, model: Any) -> bool:
        """Return True if parameters below the adapters look frozen, so their activations could be stored."""
        if self.args.activation_cache != "auto":
            return False
        try:
            first = layers_of(find_splitter(model), bare_model(model))[0]
        except Exception:  # Any error in finding layers means there are none to store.
            return False
        return not any(parameter.requires_grad for parameter in first.parameters())

    @property
    def asks_for_parts(self) -> bool:
        """True if options ask for stages, micro-batches, or what these alone can do."""
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


def _has_parts(model: Any) -> bool:
    """Return True if modules of the model are frozen, whose outputs Trainer's own loop may store."""
    return model is not None and bool(maximal_frozen(bare_model(model)))


def check_constructor_arguments(below: Any, options: RunOptions, model: Any, values: Mapping[str, Any]) -> bool:
    """Check a trainer's arguments before its constructor runs; return False if the run is left to Trainer.

    Refuses what cannot work, and warns about options that mean something else. `below` is the trainer's `super()`,
    `values` are its arguments by name.
    """
    args = options.args
    # Before anything else: independent trainings would pass every check below.
    check_launch(args)
    check_output_dir(args)
    if not options.wants_pipeline(model):
        args.leave_recomputing_to_trainer()
        # Of what is frozen, Trainer's own loop stores what it can.
        stores = args.world_size == 1 and args.head_slices is not None and (model is None or _has_parts(model))
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
    except ValueError as error:
        if not options.may_leave(error, model, is_started=False):
            refusal = options.refusal(error)
            raise refusal from (None if refusal is error else error)
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
        logger.warning(f"Without stages, in the loop of plain Trainer: {error}")


def check_trained_model(model: Any, options: RunOptions, users_optimizer: Any) -> None:
    """Refuse a model or an optimizer that cannot be put on the stages that the options name."""
    reason = why_unsplittable(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{reason}. Use plain LoRA, or ask for no stages, micro-batches, layout_plan or freezing: "
            "the model is then trained as by Trainer."
        )
    num_stages = 1 if options.args.world_size == 1 else options.args.pipeline_size
    check_model(model, num_stages, options.args.is_undivided, (users_optimizer, None))


@contextmanager
def explaining_loss(trainer: Trainer, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Wrap a loss of a batch; of what it raises for want of an input, a label or a weight to train, name the cause.

    Raises:
        ValueError: with the cause, from the error that showed it, and of its kind if Trainer may take the run over.
    """
    try:
        yield
    except Exception as error:
        reason = _why_no_loss(trainer, sorted(inputs), error)
        if reason is None:
            raise
        # What stages cannot train Trainer may.
        kind = type(error) if isinstance(error, LEFT_TO_TRAINER) else ValueError
        raise kind(reason) from error


def _why_no_loss(trainer: Trainer, names: list[str], error: Exception) -> str | None:
    model: Any = bare_model(trainer.model)
    kind, main_input, labels, said = type(model).__name__, main_input_of(model), trainer.label_names, str(error)
    if "does not require grad" in said:
        return why_nothing_trains(trainer)
    # A loss of the script's, and what it needs, are not known.
    if not trainer_compat.has_plain_loss(trainer):
        return None
    is_of_call = isinstance(error, (ValueError, TypeError, AttributeError, KeyError))
    if is_of_call and not {main_input, "inputs_embeds"} & {*names}:
        return (
            f"The batches lack {main_input!r}, from which {kind} computes: found {names}. Add it to the data set "
            "(tokenizer, image processor) or make it in data_collator; Trainer drops columns that no forward takes."
        )
    # By what Trainer and Python say, since some models compute a loss of their own from no labels.
    lacks_loss = "did not return a loss" in said
    if not labels and (lacks_loss or "unexpected keyword argument" in said):
        return (
            f"{kind} computes no loss, since its forward takes no labels: use a class with a head "
            "(AutoModelForSequenceClassification, ...), or override compute_loss."
        )
    if lacks_loss and not {*labels} & {*names}:
        return (
            f"The batches have no labels: {kind} computes its loss from {labels}, found {names}. Add them to the data "
            "set, or make them in data_collator."
        )
    return None


def why_nothing_trains(trainer: Trainer) -> str | None:
    """Return why a model with a loss of its own cannot train; None if some of its parameters do."""
    if any(parameter.requires_grad for parameter in trainer.model.parameters()):
        return None
    return (
        "No parameter of the model requires gradients, so that nothing would train: leave those to be trained, such "
        "as the head, out of requires_grad_(False)."
    )


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
