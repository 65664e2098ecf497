"""`PipeTransformerTrainer`, its twin for `Seq2SeqTrainer`, and the mixin that adds a pipeline to other trainers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, get_args

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.options.arguments import PipeTransformerArguments, with_pipeline_options
from hf_pipetransformer.report.console import shorten_console
from hf_pipetransformer.report.events import EVENTS_FILE, EventLog
from hf_pipetransformer.report.failure import FailureReporter, recorded
from hf_pipetransformer.runtime.context import PlanPrinted
from hf_pipetransformer.state.saving import rotate, writing
from hf_pipetransformer.trainer.overrides import PipelineAccelerator, PipelineOverrides
from hf_pipetransformer.training.needs import RunOptions, check_constructor_arguments, explaining_loss
from hf_pipetransformer.training.session import Session


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.freeze.policy import FreezePolicy
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.base import Splitter


@dataclass(frozen=True)
class BoundArguments:
    """Call of a trainer's constructor; `values` has all arguments by parameter name, `args` is one of them."""

    positional: list[Any]
    named: dict[str, Any]
    args: PipeTransformerArguments
    values: dict[str, Any]

    @property
    def model(self) -> torch.nn.Module | None:
        """Model of the call; None if the constructor builds it later, as TRL's trainers do from a model name."""
        if self.values.get("model") is None and self.values.get("model_init") is None:
            return _only_one(self.values, torch.nn.Module)
        model = self.values.get("model")
        return model if isinstance(model, torch.nn.Module) else None


def bind_arguments(kind: type, mixin: type, positional: tuple[Any, ...], named: dict[str, Any]) -> BoundArguments:
    """Rewrite the call of the constructor after a mixin, with arguments that have the pipeline's options.

    The arguments are the value named `args`, or else the only `TrainingArguments`; without any, defaults are used.

    Raises:
        ValueError: the constructor takes no such arguments, or requires another class.
    """
    makers = list(_makers(kind, mixin))
    call, by_name = list(positional), dict(named)
    taken = _parameters(makers, Parameter.VAR_POSITIONAL)
    names = [each.name for each in taken if each.kind <= Parameter.POSITIONAL_OR_KEYWORD][: len(call)]
    values = {**dict(zip(names, call, strict=False)), **named}
    found = values.get("args")
    if not isinstance(found, TrainingArguments):
        found = _only_one(values, TrainingArguments) or found
    args = with_pipeline_options(_checked(makers, found))
    if found is not None:
        call = [args if value is found else value for value in call]
        by_name = {name: args if value is found else value for name, value in named.items()}
    elif "args" in names:
        call[names.index("args")] = args
    else:
        by_name["args"] = args
    return BoundArguments(call, by_name, args, values)


def check_handed_on(trainer: Trainer) -> None:
    """Refuse a trainer whose constructor replaced the arguments before it called Trainer's."""
    args = trainer.args
    if not (isinstance(args, PipeTransformerArguments) and args.is_taken):
        raise ValueError(
            f"{type(trainer).__name__} has {type(args).__name__} that its constructor made anew, without the "
            "pipeline's options: hand the `args` that the constructor is given on to Trainer's, and set options there."
        )


def _makers(kind: type, mixin: type) -> Iterator[type]:
    """Iterate over the classes after the mixin that define a constructor, up to Trainer."""
    order = kind.__mro__
    for each in order[order.index(mixin) + 1 : order.index(Trainer) + 1]:
        if "__init__" in vars(each):
            yield each


def _parameters(makers: list[type], rest: Any) -> Iterator[Parameter]:
    """Iterate over the parameters of constructors; one that takes a rest, of this kind, hands it on to the next."""
    for maker in makers:
        parameters = list(inspect.signature(vars(maker)["__init__"]).parameters.values())[1:]
        yield from parameters
        if all(each.kind is not rest for each in parameters):
            return


def _checked(makers: list[type], args: TrainingArguments | None) -> TrainingArguments:
    """Refuse arguments that a trainer would replace by its own class, without the pipeline's options."""
    name, named = makers[0].__name__, _parameters(makers, Parameter.VAR_KEYWORD)
    parameter = next(
        (each for each in named if each.name == "args" and each.kind is not Parameter.VAR_POSITIONAL), None
    )
    if args is None and parameter is None:
        raise ValueError(
            f"{name} was given no TrainingArguments, and its constructor has no parameter `args`: the pipeline reads "
            "its options from them. Give the constructor a parameter `args`, and hand it on to Trainer's."
        )
    annotation = None if parameter is None else parameter.annotation
    kinds = [kind for kind in get_args(annotation) or (annotation,) if isinstance(kind, type)]
    # Of a union, take the class named first.
    kind = next((kind for kind in kinds if issubclass(kind, TrainingArguments)), TrainingArguments)
    if args is None:
        return kind(output_dir="tmp_trainer")
    if not isinstance(args, kind):
        raise ValueError(
            f"{name} takes {kind.__name__}, found {type(args).__name__}. Define a class with the options of both, "
            f"`@dataclass class Arguments({kind.__name__}, PipeTransformerArguments)`, or pass {kind.__name__}, which "
            "gets the defaults of the pipeline."
        )
    return args


def _only_one(values: dict[str, Any], kind: type) -> Any:
    """Return the only value of a class; None if there is none, or several."""
    found = [value for value in values.values() if isinstance(value, kind)]
    return found[0] if len(found) == 1 else None


class PipeTransformerMixin(PipelineOverrides):
    """Splits a `Trainer`'s model into K pipeline stages and R replicas, with the same numerical results.

    Put it before the trainer in the bases: `class MyTrainer(PipeTransformerMixin, SomeTrainer)`. That trainer's own
    `compute_loss`, `prediction_step`, `log` and so on keep working.

    Args:
        positional: positional arguments of the trainer's constructor, `args` ([`PipeTransformerArguments`]) among them
            or in `named`; plain `TrainingArguments` get default pipeline options.
        named: keyword arguments of the trainer's constructor.
        policy ([`FreezePolicy`], *optional*): decides which layers freeze; overrides `freeze_policy`.
        splitter ([`Splitter`], *optional*): maps the model to layers, for models that the library does not know; by
            default chosen by `config.model_type`.

    Raises:
        ValueError: an option, model or data set does not work with a pipeline; the message says what to change.
    """

    @recorded()
    def __init__(
        self,
        *positional: Any,
        policy: FreezePolicy | None = None,
        splitter: Splitter | None = None,
        **named: Any,
    ) -> None:
        given = bind_arguments(type(self), PipeTransformerMixin, positional, named)
        args, model = given.args, given.model
        options = RunOptions(args, policy, splitter)
        if model is not None:
            trainer_compat.drop_marks_of_gguf(model)
        # The last class of this library before the user's trainer.
        wants_pipeline = check_constructor_arguments(super(PipelineOverrides, self), options, model, given.values)
        is_on_stages = wants_pipeline and args.world_size > 1
        num_stages = args.pipeline_size or 1
        if args.world_size > 1 and num_stages > 1:
            trainer_compat.check_loaders(type(self), num_stages)
        with trainer_compat.with_attributes(args, {"is_on_stages": is_on_stages}):
            super().__init__(*given.positional, **given.named)
        # After the constructor, since only now it shows which arguments it gave to Trainer's.
        check_handed_on(self)
        self.pipeline_run = self.accelerator.session = Session(self, options, wants_pipeline)
        shorten_console(self.callback_handler)
        if is_on_stages and not args.plan_only:
            trl_compat.precompute_reference(self)

    # Trainer has no other place for an accelerator of one's own, and makes a new one for each trial of a search.
    def create_accelerator_and_postprocess(self) -> None:
        """Make Trainer's accelerator one for stages."""
        super().create_accelerator_and_postprocess()
        self.accelerator = PipelineAccelerator(self.accelerator)
        options = getattr(self.gather_function, "keywords", {})
        # Trainer has bound the method of its own accelerator, which is used no more.
        self.gather_function = partial(self.accelerator.gather_for_metrics, **options)

    @property
    def layout(self) -> Layout | None:
        """Current layout; None before the first training, evaluation or prediction."""
        return self.pipeline_run.layout

    @property
    def topology(self) -> Topology:
        return self.pipeline_run.context.topology

    @property
    def events(self) -> EventLog:
        return self.pipeline_run.context.journal.log

    # The layout is a part of the entry, which is in the history already when `on_log` is called. Here and not in
    # `PipelineOverrides`: entries of runs on one stage are recorded after their end, too.
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Trainer does, plus the layout as scalars in the first training entry and after each change.

        The entry is written to the events file, too, also where Trainer evaluates by itself.
        """
        run = self.pipeline_run
        if run.is_inside_stage:
            run.context.gains.note_log(logs)
            return
        if not run.is_left_to_trainer:
            run.pipelined.add_scalars(logs)
        super().log(logs, start_time)
        run.note_log(logs)

    # The failure report, the lock of the folder and the choice of a checkpoint come before anything of Trainer runs.
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer.train` does; `pipeline_gather_at_end` says if `trainer.model` is whole on every rank then.

        A resumed run is bit-identical under the same settings and number of processes. With others, or from a
        checkpoint of plain Trainer, it resumes too and warns about the differences.

        Raises:
            ValueError: something does not work with a pipeline, or this run cannot resume from the checkpoint.
            PipelineError: another rank failed; the message names the first cause.
            SystemExit: with `plan_only`, after the plan, with status 0 on every rank.
        """
        timeouts = self.pipeline_run.context.timeouts
        reporter = FailureReporter(
            self.args.output_dir,
            os.path.join(self.args.output_dir, EVENTS_FILE),
            bool(resume_from_checkpoint),
            timeouts,
            timeouts.find_checkpoint,
            # Waits of a run that is left to Trainer are not watched, so the main thread may never get to a handler.
            handles_sigterm=self.args.world_size == 1 or self.pipeline_run.wants_pipeline,
        )
        try:
            with (
                reporter,
                self.pipeline_run.train_call(resume_from_checkpoint, trial, ignore_keys_for_eval) as folder,
            ):
                return super().train(folder, trial, ignore_keys_for_eval)
        except PlanPrinted:
            self.end()
            raise

    # Here and not in `PipelineOverrides`: only Trainer's own loop has frozen parts to look up.
    def get_train_dataloader(self) -> Any:
        """Make Trainer's loader, which in a training may leave samples unread whose outputs are stored."""
        loader, run = super().get_train_dataloader(), vars(self).get("pipeline_run")
        if run is None or not run.is_left_to_trainer:
            return loader
        is_unseen = run.is_in_train and not trainer_compat.shows_batches(self)
        return run.stored_parts.following(loader, is_unseen)

    # In place of the forward and backward of one rank.
    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Train on a batch; the last one of an accumulation also reduces the gradients.

        On stages it returns a scalar whose mean over all ranks is the batch's loss, which Trainer's loop sums without
        reading it; to a method of the script's before it in the MRO, the batch's loss itself. Frozen parts are looked
        up where they were computed.
        """
        run = self.pipeline_run
        with run.stored_parts.step(inputs):
            if run.is_left_to_trainer:
                with explaining_loss(self, inputs):
                    loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
                return loss
            loss = run.pipelined.training.run_batch(inputs, num_items_in_batch)
        # A method of the script's, in a class before this one, reads it on each rank.
        if getattr(self.training_step, "__func__", None) is not PipeTransformerMixin.training_step:
            losses = run.context.topology.gather(loss.item())
            return loss * 0 + sum(losses) / len(losses)
        if self.args.logging_nan_inf_filter:
            return trainer_compat.SelfFilteringLoss.of(loss, 1 + self.state.global_step - self._globalstep_last_logged)
        return loss

    # Here and not in `PipelineOverrides`: frozen parts are looked up in runs that are left to Trainer, too.
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Evaluate a batch; frozen parts are looked up here, too."""
        generates = bool(getattr(self.args, "predict_with_generate", False))
        # A method of the script's may read outputs that nobody asks for.
        loss_alone = prediction_loss_only and trainer_compat.kind_with(self, "prediction_step") is Trainer
        with self.pipeline_run.stored_parts.evaluating(inputs, generates, loss_alone):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # From the first file of a checkpoint to the last the folder is marked incomplete: `on_save` comes after. Here and
    # not in `PipelineOverrides`: checkpoints of runs that are left to Trainer are protected, too.
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run, step = self.pipeline_run, self.state.global_step
        # No checkpoint without a look at what its steps have read.
        run.stored_parts.serving.check_thoroughly()
        folder = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")
        own = None if run.is_left_to_trainer else run.pipelined.training.checkpoints
        with (
            writing(folder, run.context, own) as complete,
            trainer_compat.ending_checkpoints_with(self, complete, partial(rotate, step=step)),
        ):
            super()._save_checkpoint(model, trial)

    # The card is written from what the run recorded, and pushed by Trainer right after it.
    def create_model_card(
        self, *positional: Any, data: str | None = None, comparison: str | None = None, **named: Any
    ) -> None:
        """Write the trainer's model card with what the run recorded: layouts, frozen layers, cache, versions, command.

        Its figures are in `model_card.json` beside it. Runs that are left to Trainer get such a card too.

        Args:
            positional: positional arguments of the trainer's method.
            data: description of the data set.
            comparison: output folder or results file of another run, such as one of plain Trainer, for its results
                beside these.
            named: keyword arguments of the trainer's method.

        Raises:
            ValueError: `comparison` has no results.
        """
        from hf_pipetransformer.report.card import write_card

        super().create_model_card(*positional, **named)
        if self.is_world_process_zero():
            write_card(self, data, comparison)

    # Not in the output of `train`, which has Trainer's names alone and is logged. Here and not in `PipelineOverrides`:
    # a run on one stage is left to Trainer again once it has ended.
    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Save metrics as Trainer does, those of `train` with times, layouts and the cache of the last training."""
        results = self.pipeline_run.results if split == "train" else {}
        super().save_metrics(split, {**metrics, **results}, combined)

    def whole_model(self, device: torch.device | str = "cpu") -> AbstractContextManager[None]:
        """Wrap code that needs the whole `trainer.model`, with its own forward, on every rank; changes to it are kept.

        Collective: enter and leave on every rank, between two steps of a training or outside of one.

        Args:
            device: where the parts of a model on several stages are put together, such as `args.device` to run it
                there. A model on one stage stays where it is.

        Raises:
            ValueError: called inside a step, where the other stages do not take part; or the whole model does not fit
                into the free memory there.
        """
        return self.pipeline_run.whole_model(torch.device(device))

    def generate(
        self, inputs: torch.Tensor | Mapping[str, Any], **generation_kwargs: Any
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Generate tokens as `model.generate(**inputs, **generation_kwargs)` does, through the pipeline.

        Collective: call on every rank with the same inputs, between two steps of a training or outside of one. Every
        rank gets all rows, `(batch, tokens)`. Each stage keeps the keys and values of its own layers, and replicas
        share the rows; when sampling, each generates all of them, with the random numbers of one process.

        Args:
            inputs: prompts padded on the left, as a tokenizer returns them, or their `input_ids` alone.
            generation_kwargs: keyword arguments of `model.generate`.

        Raises:
            ValueError: ranks have different inputs; or the model, with several stages, cannot generate so.
        """
        return self.pipeline_run.pipelined.evaluations.generate(inputs, generation_kwargs)


class PipeTransformerTrainer(PipeTransformerMixin, Trainer):
    """`Trainer` whose model is split into K pipeline stages and R replicas, with the same numerical results.

    Start it with `accelerate launch` on `K * R` processes. Takes all arguments of `Trainer`.

    Args:
        args ([`PipeTransformerArguments`]): `TrainingArguments` with the pipeline's options.
        policy ([`FreezePolicy`], *optional*): decides which layers freeze; overrides `freeze_policy`.
        splitter ([`Splitter`], *optional*): maps the model to layers, for models that the library does not know; by
            default chosen by `config.model_type`.

    Raises:
        ValueError: an option, model or data set does not work with a pipeline; the message says what to change.
    """


@dataclass
class Seq2SeqPipelineArguments(Seq2SeqTrainingArguments, PipeTransformerArguments):
    """Options of `Seq2SeqTrainingArguments`, such as `predict_with_generate`, and of `PipeTransformerArguments`."""


class Seq2SeqPipelineTrainer(PipeTransformerMixin, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with frozen parts computed once; with a pipeline and freezing, for causal language models."""
