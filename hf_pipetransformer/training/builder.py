"""Starting a pipeline: the model is inspected in one piece, and put on its stages or left to plain Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_pipetransformer.comm.errors import LossDoesNotDecomposeError
from hf_pipetransformer.comm.topology import check_agreement
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.compat.known_losses import KnownLoss, known_loss
from hf_pipetransformer.data.batches import SampleBatch, note_samples
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.engine.head import HeadSlices
from hf_pipetransformer.engine.losses import LossRule, LossScope
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.options.refusals import check_communication_hook, check_dataset
from hf_pipetransformer.planning.course import num_passes
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.runtime.generation import check_generation, generate_in_stages, settings_of
from hf_pipetransformer.runtime.loss_call import OF_LAYERS
from hf_pipetransformer.runtime.pipeline import Pipeline, PipelineShell
from hf_pipetransformer.runtime.stage import StageSettings
from hf_pipetransformer.runtime.wiring import start_stage
from hf_pipetransformer.splitters.adapters import bare_model, entries_taken
from hf_pipetransformer.splitters.base import (
    Media,
    MediaSplitter,
    Splitter,
    UnsupportedModelError,
    main_input_of,
    media_of,
)
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.quantized import num_weights, prepare_quantized
from hf_pipetransformer.splitters.script_code import hooked_by_script
from hf_pipetransformer.startup.model import ProbeTarget
from hf_pipetransformer.startup.planner import StartDecision, replacing_schedule
from hf_pipetransformer.startup.rows import FirstBatch, most_samples, probe_samples
from hf_pipetransformer.startup.slices import why_whole_by_options
from hf_pipetransformer.startup.start import inspect_model
from hf_pipetransformer.training.callbacks import check_callbacks
from hf_pipetransformer.training.evaluation import REMEDY, shape_without_rows
from hf_pipetransformer.training.loaders import Begun, begin_reading
from hf_pipetransformer.training.metrics import loss_apart
from hf_pipetransformer.training.needs import (
    LEFT_TO_TRAINER,
    check_trained_model,
    explaining_loss,
    say_left_to_trainer,
    why_nothing_trains,
    why_whole_head,
)


if TYPE_CHECKING:
    from hf_pipetransformer.data.rng import SharedRngState
    from hf_pipetransformer.splitters.structure import Structure
    from hf_pipetransformer.startup.planner import StartUp
    from hf_pipetransformer.state.resumption import Resumption
    from hf_pipetransformer.training.context import TrainingContext
    from hf_pipetransformer.training.needs import RunOptions
    from hf_pipetransformer.training.session import Session


class PipelineBuilder:
    """Moves a trainer's model onto stages, unless the run is left to Trainer.

    Lives as long as the trainer; each `train()` starts a new `Pipeline`, and so does an evaluation before any.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.context = session.context
        self.policy = session.policy
        self.in_force: Pipeline | None = None
        self.resumption: Resumption | None = None
        self.ignored_outputs: list[str] | None = None
        """Outputs that evaluations of the training do not gather."""
        self._overrode_loss_kwargs = False
        self._shell: PipelineShell | None = None
        self.shared_rng: SharedRngState | None = None
        """RNG states that one process would have, of a training that is started."""
        self.last_seeded: int | None = None
        """What torch was last seeded with when the last training began, with which evaluations go on."""
        self.evaluates_first = False
        """True if the training that starts evaluates before its first step."""
        self._begun: Begun | None = None
        """Data set whose first batch has been read, for a loader that is yet to be made."""
        self._knows_loss = True
        """False if the model was inspected with samples without labels, of a data set to predict or of prompts."""

    @property
    def reads_at_random(self) -> bool:
        """True if reading the first batch of the training that is started drew random numbers."""
        return self._begun is not None and self._begun.draws

    @property
    def shell(self) -> PipelineShell:
        """Model as Trainer's loop sees it, before and after the start."""
        if self._shell is None or self._shell.module is not self.context.trainer.model:
            accelerator = self.context.trainer.accelerator
            self._shell = PipelineShell(self.context.trainer.model, accelerator.autocast, accelerator.native_amp)
        return self._shell

    @property
    def pipeline(self) -> Pipeline:
        if self.in_force is None:
            raise RuntimeError("The pipeline has not started: train(), evaluate() or predict() come first.")
        return self.in_force

    @property
    def _is_of_this_model(self) -> bool:
        """True if the pipeline was built from the model that the trainer has now."""
        return self.in_force is not None and self.in_force.stage.view.model is self.context.trainer.model

    @property
    def reading_seconds(self) -> float:
        """Seconds to read and collate a sample of the first batch; 0 if none was read, or on other ranks than 0."""
        begun = self._begun
        return begun.seconds / begun.num_samples if begun is not None and begun.num_samples else 0.0

    def _begin(self, request: Request) -> Begun:
        """Read the first batch of a request, whose loader goes on from it. Collective: call on every rank."""
        if self._begun is None or not self._begun.is_for(request):
            self._begun = begin_reading(self.context, request, self.shared_rng, self.last_seeded, self.evaluates_first)
        return self._begun

    def inspect_or_leave(self, given: Request | Any, is_training: bool) -> StartUp | None:
        """Call `inspect`; return None for an unsupported model or loss whose run Trainer can take over."""
        try:
            return self.inspect(given, is_training)
        except LEFT_TO_TRAINER as error:
            # Trainer can only resume a run from its own kind of checkpoint.
            model, resumption = self.context.trainer.model, self.resumption if is_training else None
            resumes_own = resumption is not None and not resumption.is_plain
            if resumes_own or not self.session.options.may_leave(error, model, is_started=True):
                refusal = self.session.options.refusal(error)
                raise refusal from (error.__cause__ if refusal is error else error)
            say_left_to_trainer(error)
        # Both were the pipeline's task: to recompute, and to move the model, which Trainer has left where it was.
        self.context.args.leave_recomputing_to_trainer()
        trainer_compat.place_model(self.context.trainer)
        self.session.trains_alone = self.session.evaluates_alone = True
        return None

    def inspect(self, given: Request | Any, is_training: bool) -> StartUp:
        """Check data set, model and loss, and measure the model. Collective: call on every rank.

        `given` is the request made to Trainer's loader, or the first batch of a loader of the user's own.

        Raises:
            ValueError: something does not work with a pipeline.
        """
        trainer, topology, args = self.context.trainer, self.context.topology, self.context.args
        _prepare_model(self.context)
        if isinstance(given, Request):
            _check_data(self.context, given, is_training)
        if is_training and trainer_compat.has_plain_loss(trainer) and (why := why_nothing_trains(trainer)):
            raise ValueError(why)
        if self._overrode_loss_kwargs:
            trainer.model_accepts_loss_kwargs = True  # As it was before; the model may be another one now.
            self._overrode_loss_kwargs = False
        scope = self._scope_of_loss()
        # A script may have replaced the arguments since the trainer was made.
        options = replace(self.session.options, args=args)
        check_communication_hook(trainer.accelerator)
        check_trained_model(trainer.model, options, trainer.optimizer if is_training else None)
        splitter, media = self._splitter(options)
        shell = self.shell
        shell.forget_parameters()  # Some models build parts of themselves in their first forward.
        # A loss may read this flag.
        shell.training = is_training
        count, ignored = partial(trainer_compat.items_of, trainer), self.ignored_outputs if is_training else None
        why_whole = why_whole_head(trainer) or why_whole_by_options(args, scope)
        # Where the head stays whole whatever happens, as many samples run as in any run.
        may_slice_head = is_training and args.head_slices != 1 and why_whole is None
        # The run goes on from it, so the numbers that reading it draws are the run's.
        rows = trl_compat.rows_of_sample(trainer)
        if isinstance(given, Request):
            begun, names = self._begin(given), frozenset() if media is None else media.names
            collated = begun.collated if begun.samples else None
            first = FirstBatch(begun.batch, begun.num_samples, names & begun.batch.names, collated)
        else:
            first = FirstBatch(note_samples(given, None, rows))
        parts = (first, main_input_of(trainer.model), count, most_samples(args, may_slice_head))
        # Of rank 0 for all: findings on different samples could lead ranks to different decisions.
        samples = topology.decide(lambda: probe_samples(*parts))
        if media is not None and not media.names & samples.names and topology.rank == 0:
            logger.warning(
                f"No sample of the first batch has {', '.join(sorted(media.names))}: stages are tried and cut with "
                "text alone, and a batch with images, videos or sounds would end the run."
            )
        if is_training and (args.head_slices or 1) > 1 and why_whole is not None:
            raise ValueError(
                f"pipeline_head_slices={args.head_slices} would change the numbers: {why_whole}. Leave the option out."
            )
        # TRL's trainers compute their loss in evaluations too, also of batches that have no labels.
        needs_loss = is_training or trl_compat.metrics(trainer) is not None
        needs_loss = needs_loss or all(samples.get(name) is not None for name in trainer.label_names)
        self._knows_loss = needs_loss
        labels = samples.get("labels")
        known, passes = known_loss(trainer, labels), labels is not None and trainer_compat.takes_num_items(trainer)
        # Who asks for parts of a loss that is not known gets the sum that Trainer takes over the batches of a step.
        is_sum = trainer_compat.is_divided(trainer, labels) if known is None else known is KnownLoss.DIVIDED and passes
        # Code of the script's is not run before its step: of its loss, the model's forward stands for all.
        has_loss = needs_loss and trainer_compat.has_known_loss(trainer)
        compute = partial(_loss, trainer, shell) if has_loss else partial(_outputs, trainer, shell, ())
        complete = partial(trl_compat.with_reference, trainer, shell)
        with explaining_loss(trainer, samples) if is_training else nullcontext():
            start_up = inspect_model(
                ProbeTarget(
                    trainer.model,
                    splitter,
                    samples,
                    compute,
                    count,
                    complete=complete,
                    has_reference=trl_compat.reference(trainer, shell) is not None,
                    scope=scope,
                    rule=LossRule.SUM if is_sum else LossRule.MEAN,
                    shape_without_rows=partial(shape_without_rows, trainer, shell, ignored),
                    why_whole_head=why_whole,
                    # A loss may make others of the labels than the model takes.
                    without_labels=None if has_loss else partial(_outputs, trainer, shell, trainer.label_names),
                ),
                args,
                topology,
                is_training,
                first.read if is_training else None,
                self.context.journal.log.path if is_training else None,
                self._num_passes() if is_training else 1.0,
            )
        if not (trainer_compat.has_known_loss(trainer) or args.is_undivided):
            _check_hooks(trainer.model, start_up.probe.structure)
        if not trainer_compat.has_known_loss(trainer):
            # It may read in later steps what it does not read of the first samples.
            start_up = replace(start_up, reads_first=False)
        if not (trainer_compat.has_plain_loss(trainer) or trainer_compat.has_known_loss(trainer)):
            # Or of the batch, on any stage.
            start_up = replace(start_up, probe=replace(start_up.probe, placeholders=frozenset()))
        if passes and known is KnownLoss.MEAN:
            start_up = self._dividing_itself(start_up, is_training)
        return start_up

    def _num_passes(self) -> float:
        """Return how often a training comes to the same samples; 1 if nobody knows, or if they are drawn anew."""
        args, data = self.context.args, self.context.trainer.train_dataset
        if self.reads_at_random or not hasattr(data, "__len__"):
            return 1.0
        return num_passes(args, self.context.topology.world_size, len(data))

    def _splitter(self, options: RunOptions) -> tuple[Splitter, Media | None]:
        """Return the splitter of the model, and the media that it takes beside tokens where stages are asked for.

        Raises:
            UnsupportedModelError: the options ask for what stages of a model with media cannot do.
        """
        model = self.context.trainer.model
        # Not asked for stages, Trainer's loop computes what is frozen once, towers above all.
        media = media_of(model) if options.asks_for_parts else None
        if options.splitter is not None or media is None:
            return options.splitter or find_splitter(model), None
        if options.freezes or options.args.layout_plan or trl_compat.rows_of_sample(self.context.trainer) > 1:
            raise UnsupportedModelError(
                f"{type(bare_model(model)).__name__} takes images, videos or sounds beside tokens: its layers cannot "
                "freeze or move on stages while a run goes on, and its samples have one row each. Leave out "
                "freeze_policy and layout_plan (requires_grad_(False) freezes from the start), or use "
                "transformers.Trainer for pairs of texts."
            )
        return MediaSplitter(), media

    def _scope_of_loss(self) -> LossScope:
        """Return the samples that one call of the loss sees.

        Raises:
            LossDoesNotDecomposeError: the loss sees whole batches, and the schedule never has one at once.
        """
        args, asked = self.context.args, self.context.args.pipeline_loss
        # A loss that is not known may compare samples with each other, which a sum over micro-batches loses.
        if asked == "auto":
            asked = "batch" if known_loss(self.context.trainer) is None else "parts"
            if asked == "batch" and not args.abilities.runs_steps_whole:
                raise LossDoesNotDecomposeError(
                    f"pipeline_schedule={args.pipeline_schedule!r} adds the losses of parts of a batch, and this loss "
                    "is not known to be their mean or sum, as most losses of transformers and TRL are. Use "
                    "pipeline_schedule='1f1b', which computes the loss of whole batches, or pipeline_loss='parts' if "
                    "it is a mean over samples or label tokens, or a sum divided by num_items_in_batch."
                )
        scope = LossScope(asked)
        is_trusted = scope is LossScope.PARTS and known_loss(self.context.trainer) is None
        if is_trusted and self.context.topology.rank == 0:
            logger.warning(
                "pipeline_loss='parts' adds the losses of micro-batches and replicas of a loss that is not known: "
                "nothing checks that it is a mean over samples or label tokens, or divided by num_items_in_batch."
            )
        if replacing_schedule(args, scope) is not None and self.context.topology.rank == 0:
            announce(
                f"One call of the loss sees the samples of the whole {scope.value} (pipeline_loss): all forwards "
                f"run before the first backward, as in gpipe, not {args.pipeline_schedule}."
            )
        return scope

    def _dividing_itself(self, start_up: StartUp, is_training: bool) -> StartUp:
        """Let Trainer divide the loss: the model accepts `num_items_in_batch` but ignores it (transformers#47688)."""
        trainer, args = self.context.trainer, self.context.args
        was_divided = trainer_compat.is_divided(trainer, start_up.samples.get("labels"))
        self._overrode_loss_kwargs = bool(trainer.model_accepts_loss_kwargs)
        trainer.model_accepts_loss_kwargs = False
        adds_up = was_divided and not trainer_compat.is_divided(trainer, None)
        if adds_up and is_training and args.gradient_accumulation_steps > 1 and self.context.topology.rank == 0:
            logger.warning(
                f"{type(trainer.model).__name__} takes num_items_in_batch and ignores it. With "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} Trainer adds up the losses of the "
                "batches of a step, and with them the gradients (transformers#47688); here they are averaged, as in "
                "one batch. Set trainer.model_accepts_loss_kwargs=False for Trainer to average them too, or "
                "trainer.loss_is_scaled_for_ga=True to add them up here too."
            )
        return replace(start_up, trainer_adds_up=adds_up)

    def build(self, start_up: StartUp, decision: StartDecision) -> Pipeline:
        """Build this rank's stage as a start has decided. Collective: call on every rank.

        Raises:
            ValueError: a callback reads the model where it cannot have it, or an evaluation could not generate or
                join what the replicas predict.
        """
        trainer, args, plans, layout = self.context.trainer, self.context.args, decision.plans, decision.layout
        start_up, is_training = replace(start_up, plans=plans), decision.is_training
        # Pipelines that get shorter when layers freeze leave ranks free, which become replicas.
        may_have_replicas = layout.num_replicas > 1 or (layout.num_stages > 1 and args.elastic and self.policy.freezes)
        if is_training and may_have_replicas and start_up.shape_without_rows is not None:
            raise ValueError(
                f"Evaluations of this run join outputs of shape {start_up.shape_without_rows} of "
                f"{start_up.samples.size} samples over replicas: expected one row a sample. {REMEDY}"
            )
        # A pipeline of one stage has the whole model on each rank, which callbacks may read and generate with.
        if decision.longest > 1:
            check_callbacks(trainer.callback_handler.callbacks, self.context.topology)
            if trainer_compat.generates(trainer):
                model, beams = bare_model(trainer.model), getattr(args, "generation_num_beams", None)
                options = {} if beams is None else {"num_beams": beams}
                check_generation(model, settings_of(model, options), options)
        # Before weights move: should memory run out from here on, the record names the layout that was too large.
        self.context.journal.tried = plans.trying(layout) if is_training else {}
        compiled = None
        if args.torch_compile:
            compiled = partial(torch.compile, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        settings = StageSettings(
            start_up.probe,
            self.context.topology,
            args.device,
            args.pipeline_timeout,
            args.pipeline_checkpoint,
            StepMeter(args.device),
            compiled,
            is_mixed=trainer.accelerator.native_amp,
            sums_in_float32=is_training and plans.sums_in_float32(layout),
            masters_in_float32=args.pipeline_master_dtype is not None,
            head_slices=HeadSlices(plans.num_head_slices, start_up.loss_rule),
        )
        stage = start_stage(trainer.model, start_up.splitter, layout, settings, is_training)
        self.in_force = Pipeline(start_up, self.shell, settings, trainer_compat.shifts_labels(trainer), stage)
        generate_in_stages(self.in_force)
        return self.in_force


def _prepare_model(context: TrainingContext) -> None:
    """Make a quantized model fit for stages, and say what is inspected."""
    model, is_first = context.trainer.model, context.topology.rank == 0
    if prepare_quantized(model) and is_first:
        logger.warning(
            "On this processor (AVX512 for bfloat16) bitsandbytes packs weights of 4 bits anew in the first "
            "evaluation. From then on, in training too, it rounds their scales to bfloat16 and gives no gradient "
            "through them, which changes plain Trainer's losses. Here the weights stay as they were loaded."
        )
    if is_first:
        size = sum(map(num_weights, model.parameters()))
        announce(f"Inspecting the model ({type(model).__name__}, {size / 1e6:,.3g} million parameters)...")


def _check_hooks(model: Any, structure: Structure) -> None:
    """Refuse hooks by which a loss of the script's may read what layers compute: it has that of one stage alone."""
    inside = {id(module) for layer in structure.layers for module in layer.modules()}
    found = next((name for name, module in hooked_by_script(model).items() if id(module) in inside), None)
    if found is not None:
        raise UnsupportedModelError(
            f"The loss may read what a hook on {found} notes, which runs on the stage of that layer alone, by "
            "micro-batches: return it from the model's forward, take the hook away, or use transformers.Trainer."
        )


def _check_data(context: TrainingContext, request: Request, is_training: bool) -> None:
    """Refuse a data set that is missing, empty, of different lengths on the ranks, or of a kind that is refused.

    Collective: call on every rank.
    """
    what = "Training" if is_training else "Evaluation"
    if request.dataset is None:
        raise ValueError(f"{what} needs a data set: pass {'train' if is_training else 'eval'}_dataset.")
    check_dataset(request.dataset, what.lower())
    # Before the next check: where one rank alone has no samples, only that rank would end, and the others would wait.
    length = len(request.dataset) if has_length(request.dataset) else None
    check_agreement(context.topology, "data set", {"number of samples": length})
    if length == 0:
        raise ValueError(f"The {what.lower()} data set has no samples: expected at least one.")


def _loss(trainer: Trainer, shell: PipelineShell, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
    device = next(trainer.model.parameters()).device  # A model too large for the device is still on the CPU here.
    passes = "labels" in inputs and trainer_compat.takes_num_items(trainer)
    items = torch.tensor(num_items, device=device) if passes else None
    with loss_apart(trainer), trl_compat.reading_reference(trainer, inputs):
        loss: torch.Tensor = trainer.compute_loss(shell, _copied(inputs), num_items_in_batch=items)
    return loss


def _outputs(
    trainer: Trainer, shell: PipelineShell, left_out: Sequence[str], inputs: dict[str, Any], _num_items: int
) -> torch.Tensor:
    """Return a scalar of what the model gives for a batch, in place of a loss of the script's."""
    given = entries_taken(trainer.model, _copied(inputs))
    found = _numbers_of(shell(**{name: value for name, value in given.items() if name not in left_out}))
    # Any scalar that the outputs enter does: it only has to show whether the split model gives the same ones.
    return sum((each.float().square().mean() for each in found), torch.zeros(()))


def _numbers_of(outputs: Any) -> list[torch.Tensor]:
    """Return the floating point tensors of a model's output, but for those of its layers."""
    named = (
        outputs if isinstance(outputs, dict) else dict(enumerate(outputs if isinstance(outputs, tuple) else [outputs]))
    )
    found = [value for name, value in named.items() if name not in OF_LAYERS and isinstance(value, torch.Tensor)]
    return [value for value in found if value.is_floating_point()]


def _copied(inputs: dict[str, Any]) -> SampleBatch:
    """Copy the tensors of a batch for the model: it runs many times, and a model may modify it in place."""
    return SampleBatch.of(inputs).mapped(torch.Tensor.clone)
