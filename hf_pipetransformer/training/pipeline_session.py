"""Additions of a pipeline to the runs of one trainer, through its calls of `train()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerControl

from hf_pipetransformer.comm.topology import check_agreement
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.loader import PipelineLoader, Request, request_of
from hf_pipetransformer.data.rng import Generators, set_random_state
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.runtime.gathering import check_whole
from hf_pipetransformer.startup.planner import StartDecision
from hf_pipetransformer.state.resumption import find_resumption
from hf_pipetransformer.state.run_state import RunDescription, check_shared_folder, saves_state
from hf_pipetransformer.training.builder import PipelineBuilder
from hf_pipetransformer.training.callbacks import SavesOnSignal, running_callbacks
from hf_pipetransformer.training.evaluations import Evaluations
from hf_pipetransformer.training.loaders import (
    LateLoader,
    check_undivided,
    make_loader,
    share_rng_state,
    states_of_first_rank,
)
from hf_pipetransformer.training.start import TrainingSetup, start_training
from hf_pipetransformer.training.weights import ModelWeights


if TYPE_CHECKING:
    from hf_pipetransformer.cache.training import TrainingCache
    from hf_pipetransformer.training.session import Session
    from hf_pipetransformer.training.training import Training


class PipelineSession(PipelineBuilder):
    """Additions of a pipeline to the runs of one trainer, one call of `train()` after the other.

    Only parts that follow the trainer's changing attributes (`state`, `args`, `model`, `optimizer`, ...) get the
    `Trainer` itself, in their `TrainingContext`.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.evaluations = Evaluations(self)
        self.weights = ModelWeights(self)
        self.present: Training | None = None
        """Training in progress."""
        self.is_waiting = False
        """True while a training waits for its first batch, with which its pipeline is started."""
        self.loader: Any = None
        """Loader that the current training reads."""
        self.signals: SavesOnSignal
        """Signal handling of the current training."""
        self.operations: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        """Trainer's estimate of a batch's floating-point operations, by the shapes of its inputs."""
        # A policy changes its state in place, and a second `train()` must find it as it was.
        self._policys_start = deepcopy(dict(self.policy.state()))
        self._made_optimizer: Any = None
        self._setup: TrainingSetup
        self.late: LateLoader
        """Loader of the current training, as Trainer's loop has it."""
        self.keeps_optimizer = False
        self._flags: dict[str, bool] = {}
        """Which parameters required gradients when the training began."""
        self._max_steps: int | None = None
        self._epoch: tuple[ExitStack, dict[str, Any]] | None = None
        """Context of the epoch that waits for its first batch, and its arguments."""
        self._until_left = ExitStack()
        """What `start` has entered, for the call in progress."""

    @property
    def cache(self) -> TrainingCache | None:
        """Activation cache of the training in progress."""
        return None if self.present is None else self.present.cache

    @property
    def training(self) -> Training:
        if self.present is None:
            raise RuntimeError("There is no training: train() alone calls this.")
        return self.present

    # ---- one call of `train()` ----

    @contextmanager
    def train_call(self, where: str | bool | None, ignored_outputs: list[str] | None) -> Iterator[str | bool | None]:
        """Wrap a call of `Trainer.train`, see `Session.train_call`; `leave` ends it, also after an error."""
        trainer, topology = self.context.trainer, self.context.topology
        self.ignored_outputs = ignored_outputs
        with ExitStack() as self._until_left:
            topology.decide(self.context.journal.log.check)
            # With `model_init` Trainer makes a new model, and the old one need not be whole.
            if trainer.model_init is None:
                self.weights.put_together()
                check_whole(trainer.model)
            check_agreement(topology, "arguments of train()", {"resume_from_checkpoint": str(where)})
            check_shared_folder(trainer.args, topology)
            if where is not None:
                description = RunDescription(self.context.run, topology, self.policy)
                self.resumption = find_resumption(where, topology, description)
            yield None if self.resumption is None else self.resumption.folder

    def print_plan(self, loader: Any, values: tuple[Any, ...]) -> None:
        """Print the plan instead of training. Collective: call on every rank.

        `values` are those of `Trainer.set_initial_training_values`.

        Raises:
            PlanPrinted: unless the run is left to Trainer, whose first step raises it.
        """
        from hf_pipetransformer.training.plan_only import print_plan

        request, (_, steps_per_epoch, *_, max_steps) = request_of(loader), values
        given = LateLoader(loader).read_first(None, is_kept=False) if request is None else request
        print_plan(self, given, max_steps, steps_per_epoch)

    def begin(self, loader: Any) -> Any:
        """Begin a training, whose pipeline is started when the loop asks for its first batch, or now if it resumes.

        Collective: call on every rank. Returns the loader to read instead of the given one.
        """
        trainer = self.context.trainer
        self.weights.users_optimizer = None
        self.operations.clear()  # The model may be another one now.
        # Forget an earlier training's policy state; on a resume, `prepare` restores the checkpoint's.
        # A copy again, as the policy may go on to change what it is given.
        self.policy.load_state(deepcopy(self._policys_start))
        if trainer.optimizer is not None and trainer.optimizer is self._made_optimizer:
            if self.context.topology.rank == 0:
                logger.warning(
                    "This training begins with a new optimizer. Plain Trainer goes on with that of the one before, "
                    "its state and learning rates, if the same trainer trains twice."
                )
            trainer.optimizer = None  # It was built for other stages and other frozen layers.
        self.keeps_optimizer = trainer.optimizer is not None
        self.late = LateLoader(loader)
        if request_of(loader) is None:
            check_undivided(loader, "get_train_dataloader", self.context.args.pipeline_size or 1)
        self.is_waiting = False
        self._begun = self.last_seeded = self._shell = None
        # What a checkpoint says of the data comes before Trainer counts its steps; and a run that is left to Trainer's
        # loop may need a model that is compiled or shared with other processes before.
        options = self.session.options
        may_be_left = not options.asks_for_parts or (options.args.is_undivided and not options.freezes)
        is_other = self.context.topology.world_size > 1 or self.context.args.torch_compile
        if self.resumption is not None or (is_other and may_be_left):
            kept = Generators([loader])
            states = kept.states()
            if self._start():
                return self.loader
            kept.restore(states)
            return loader
        self._max_steps = self._epoch = None
        self._flags = {name: parameter.requires_grad for name, parameter in trainer.model.named_parameters()}
        self.is_waiting = True
        return self.late

    def start(self, evaluates_first: bool = False) -> None:
        """Start the pipeline of a training that waits for it, if one does. Collective: call on every rank.

        Args:
            evaluates_first: True if random numbers of an evaluation are drawn before those of the first epoch.
        """
        if not self.is_waiting:
            return
        self.is_waiting, self.evaluates_first = False, evaluates_first
        with self._flags_of_begin():
            if not self._start() or self._max_steps is None:
                return
            self.context.trainer.callback_handler.train_dataloader = self.loader
            self.prepare(self._max_steps)
        if self._epoch is not None:
            stack, arguments = self._epoch
            # A new run has all of its first epoch before it.
            stack.enter_context(self.training.epoch(arguments))

    @contextmanager
    def _flags_of_begin(self) -> Iterator[None]:
        """Have parameters require gradients inside as when Trainer's optimizer was made.

        Callbacks may freeze for a time what it goes on to hold; what they have changed comes back.
        """
        model = self.context.trainer.model
        now = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        changed = {name for name, flag in now.items() if self._flags.get(name, flag) != flag}
        self._set_flags(changed, self._flags)
        try:
            yield
        finally:
            self._set_flags(changed, now)

    def _set_flags(self, names: set[str], flags: Mapping[str, bool]) -> None:
        for name, parameter in self.context.trainer.model.named_parameters():
            # What other stages hold requires none.
            if name in names and not parameter.is_meta:
                parameter.requires_grad_(flags[name])

    def _start(self) -> bool:
        """Move the model onto its stages and give each rank its own RNG state. Collective: call on every rank.

        A model that cannot be split is left to Trainer if the run can do without a pipeline; then nothing freezes, and
        False is returned.

        Raises:
            ValueError: the loader is the user's own, and there may be more than one stage.
        """
        context, trainer, late = self.context, self.context.trainer, self.late
        loader, request = late.given, request_of(late.given)
        # Before anything is read or drawn: they go on with what one process would draw.
        self.shared_rng = shared = share_rng_state(context.topology)
        self.last_seeded = context.topology.broadcast(torch.initial_seed())
        is_new = self.resumption is None and not self.evaluates_first
        first = late.read_first(shared, is_kept=is_new) if request is None else None
        setup = start_training(self, loader, first)
        if setup is None:
            self.session.cast_to_masters()
            self.weights.load_expected(None)
            late.begun = late.begun or self._rest_of_epoch()
            return False
        self._setup, pipeline = setup, self.pipeline
        self.weights.load_expected(pipeline.stage)
        self._until_left.enter_context(running_callbacks(trainer, pipeline, self))
        setup.announce()
        pipeline.shared_rng = shared
        # After the shared state is taken: from here on, each rank draws numbers of its own (dropout).
        context.seeds.begin(pipeline.stage.groups)
        self._until_left.enter_context(pipeline.stage.active())
        self._until_left.enter_context(self.session.storing_on_stages(pipeline, self.reads_at_random))
        self.signals = SavesOnSignal(context)
        self._until_left.callback(self.signals.give_back)
        self.loader = late
        if request is not None:
            self.loader = late.loader = self.loader_of(request)
        return True

    # ---- a pipeline for evaluations, and its loaders ----

    @property
    def num_stages(self) -> int | None:
        """Number of stages K now or at the next start; None if not known yet."""
        if self._is_of_this_model:
            return self.pipeline.layout.pipeline_size
        size: int | None = self.context.args.pipeline_size
        return 1 if self.context.topology.world_size == 1 else size

    def is_started(self, request: Request | Any | None) -> bool:
        """Return True if a pipeline of the current model exists, starting one for `request` if needed.

        `request` is what `inspect` takes. False without one to start for, or if the run is left to Trainer.
        """
        # A training that waits for its first batch comes first: its optimizer has the weights as they are.
        self.start(evaluates_first=True)
        if self._is_of_this_model and (self._knows_loss or not self._has_labels(request)):
            return True
        start_up = None if request is None else self.inspect_or_leave(request, is_training=False)
        if start_up is not None:
            layout = start_up.plans.layout()
            alone = StartDecision(start_up.plans, layout, layout, layout.pipeline_size, is_training=False)
            self.build(start_up, alone)
        return start_up is not None

    def _has_labels(self, request: Request | Any | None) -> bool:
        """Return True if a request's data set has labels. Collective: call on every rank."""
        if not isinstance(request, Request):
            return False
        batch = self._begin(request).batch
        names = self.context.topology.decide(lambda: [name for name, value in batch.items() if value is not None])
        return set(self.context.trainer.label_names) <= {*names}

    def loader_of(self, request: Request) -> PipelineLoader:
        """Return the pipeline's loader for a request; evaluation loaders may persist."""
        pipeline, args = self.pipeline, self.context.args
        # As with Trainer, which keeps evaluation loaders for the sake of their workers alone.
        persists = request.key is not None and args.dataloader_persistent_workers
        if persists and request.key in pipeline.persistent_loaders:
            return pipeline.persistent_loaders[str(request.key)]
        begun, self._begun = self._begin(request), None
        self.evaluates_first = False
        loader = make_loader(self.context, pipeline, begun)
        # Prompts go through the layers token by token.
        is_read = request.is_training or trainer_compat.generates(self.context.trainer)
        cache = None if is_read else self.cache
        if cache is not None and not loader.is_stream:
            cache.serve(loader, request.dataset)
        if persists:
            pipeline.persistent_loaders[str(request.key)] = loader
        return loader

    def _rest_of_epoch(self) -> Iterator[Any] | None:
        """Return the batches of the epoch that was begun, for a run that is left to Trainer on one process, if any."""
        begun, self._begun = self._begun, None
        return begun.reading.alone() if begun is not None and begun.reading.has_first else None

    # ---- the loop ----

    def counts(self, values: tuple[Any, ...], loader: Any) -> tuple[Any, ...]:
        """Adjust the result of `Trainer.set_initial_training_values` for a resumed run."""
        if self.session.is_left_to_trainer or self.resumption is None:
            return values
        return self.resumption.counts(values, loader, self.context.args.num_train_epochs)

    def prepare(self, max_steps: int) -> None:
        """Build the training around the optimizer that Trainer has just made, and restore a checkpoint's state.

        Collective: call on every rank.

        Raises:
            ValueError: on every rank, if the state cannot be restored, or this run's cannot be saved.
        """
        if not self.keeps_optimizer:
            self._made_optimizer = self.context.trainer.optimizer
        if self.is_waiting:
            self._max_steps = max_steps
            return
        topology = self.context.topology
        self.present = training = self._setup.training(self.loader, max_steps)
        self.weights.users_optimizer = training.optimizer if self.keeps_optimizer else None
        if training.cache is not None:
            training.cache.follow()
        if self.resumption is not None:
            training.checkpoints.restore(self.resumption)
            training.resumption = self.resumption
        if saves_state(self.context.args):
            # Fail now instead of at the first checkpoint.
            topology.together(training.checkpoints.check_savable)

    @contextmanager
    def epoch(self, arguments: dict[str, Any]) -> Iterator[bool]:
        """Wrap Trainer's loop over one epoch, see `Training.epoch`."""
        if not self.is_waiting:
            with self.training.epoch(arguments) as goes_on:
                yield goes_on
            return
        with ExitStack() as stack:
            self._epoch = stack, arguments
            yield True

    def finish(self) -> None:
        """End the training after the last step, and give the user the model back. Collective: call on every rank."""
        self.start()  # It had no step.
        if self.session.is_left_to_trainer:
            return
        pipeline, training, trainer = self.pipeline, self.training, self.context.trainer
        self.present = None
        pipeline.steps = None
        training.metrics.publish("train", pipeline.stage.groups)  # Trainer logs once more after the loop.
        self.signals.give_back()  # Before Trainer's callback restores the signal handlers.
        training.end()
        training.tracer.end()
        self.session.results = training.summary.as_results(
            trainer.state.global_step, pipeline.layout.num_frozen_layers
        )
        if self.context.topology.rank == 0:
            announce(training.summary.in_words() or "No step was left to train.")
        # The best model is read stage by stage, so the stages stay until `_load_best_model`, which Trainer calls next.
        loads_best = trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None
        if not loads_best or trainer_compat.is_overridden(trainer, "_load_best_model"):
            self.weights.give_back()
        shared, pipeline.shared_rng = pipeline.shared_rng, None
        self.shared_rng = None
        if shared is not None:
            # Only rank 0 reads data sets that draw random numbers, so its RNG state is ahead of the others'.
            set_random_state(*states_of_first_rank(self.context.topology, shared.states))

    def leave(self) -> None:
        """Detach from trainer, model and optimizer after `train()`, also after an error.

        A model that an error left on several stages stays there; a model that is whole can be trained again.
        """
        training, pipeline = self.present, self.in_force
        self.present, self.is_waiting = None, False
        self._begun = self.shared_rng = self.resumption = self.weights.expected = None
        if training is not None:
            training.end()
        if pipeline is not None:
            pipeline.steps = None
        if pipeline is None or pipeline.stage.reducer is None:
            return
        # Putting it together is collective, and after an error other ranks may not come.
        if pipeline.stage.is_spread:
            pipeline.stage.reducer.remove()
        else:
            self.weights.give_back()

    def before_callbacks(self) -> None:
        """Correct the epoch that Trainer has just counted."""
        if self.training.resumption is not None:
            self.training.resumption.correct_epoch()

    def after_callbacks(self, control: TrainerControl) -> None:
        """Finish a step, also at the end of an epoch: Trainer logs, evaluates and saves next, as `control` says.

        Collective: call on every rank.
        """
        self.signals.after_step(control)
        logs = control.should_log and trainer_compat.has_unlogged_steps(self.context.trainer)
        self.training.end_step(logs, control.should_evaluate or control.should_save)

    @property
    def counts_inputs(self) -> bool:
        """True if this rank counts inputs: one rank per pipeline does."""
        pipeline = self.in_force
        return pipeline is None or pipeline.stage.groups.is_first

    @contextmanager
    def counting_tokens(self) -> Iterator[bool]:
        """Wrap Trainer's token counting; yields True on the one rank per pipeline that counts.

        Trainer's own gather would wait for the ranks that do not count; the sum over ranks is taken here instead.
        """
        trainer = self.context.trainer
        if trainer.args.include_num_input_tokens_seen == "no":
            yield False
            return
        # Trainer adds this batch's tokens to a count that is the same on all ranks: only the difference is summed.
        before = trainer.state.num_input_tokens_seen
        with trainer.accelerator.as_one_process():
            yield self.counts_inputs
        own = trainer.state.num_input_tokens_seen - before
        trainer.state.num_input_tokens_seen = before + sum(self.context.topology.gather(own))

    def add_scalars(self, logs: dict[str, float]) -> None:
        """Add the layout's scalars to a training log entry; logging may be slow, so the long timeout applies."""
        if self.context.timeouts.is_resting:
            self.context.timeouts.rest()
        if "loss" in logs and self.present is not None:
            logs.update(self.present.take_scalars())
