"""Pipeline state attached to one trainer: who trains, starting the pipeline, training, saving and evaluating."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.comm.errors import ModelSettingError
from hf_pipetransformer.comm.topology import check_agreement, get_topology
from hf_pipetransformer.data.loader import PipelineLoader, Request, request_of
from hf_pipetransformer.data.rng import set_random_state
from hf_pipetransformer.elastic.transitions import check_unfreezing, longest_pipeline
from hf_pipetransformer.engine.losses import LossDoesNotDecomposeError
from hf_pipetransformer.freeze.policies import make_policy
from hf_pipetransformer.freeze.policy import PREDICTED_SECONDS, FreezePolicy
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.options.combinations import unused_freeze_options
from hf_pipetransformer.options.refusals import comparable
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.report.events import EventLog
from hf_pipetransformer.runtime.context import CollectiveTimeouts, Context, Journal, Seeds
from hf_pipetransformer.runtime.gathering import check_whole, gather_full_state, whole_on_first_rank
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError
from hf_pipetransformer.state.description import RunDescription, check_shared_folder
from hf_pipetransformer.state.only_run import only_run
from hf_pipetransformer.state.resumption import (
    Resumption,
    find_for_trainer,
    find_resumption,
    is_of_pipeline,
    read_plan,
)
from hf_pipetransformer.state.saving import check_unlinked, clear, rotating_by_step
from hf_pipetransformer.training.callbacks import (
    SavesOnSignal,
    check_callbacks,
    give_handler_back,
    give_whole_model,
    giving_whole_model,
)
from hf_pipetransformer.training.evaluation import Evaluation, UsersEvaluation, evaluating
from hf_pipetransformer.training.loaders import (
    check_undivided,
    drawing_alike,
    make_loader,
    share_rng_state,
    states_of_first_rank,
)
from hf_pipetransformer.training.setup import TrainingSetup
from hf_pipetransformer.training.starting import (
    ModelReport,
    Need,
    Starter,
    does_without,
    is_undivided,
    need_of,
    say_left_to_trainer,
)
from hf_pipetransformer.training.training import Training
from hf_pipetransformer.training.windows import check_stages


class Run:
    """Everything a pipeline adds to one trainer; lives as long as the trainer. Collective: construct on every rank.

    Each `train()` starts a new `Pipeline`, and so does an evaluation before any `train()`. Only parts that follow the
    trainer's changing attributes (`state`, `args`, `model`, `optimizer`, ...) get the `Trainer` itself.

    `policy` and `splitter` are the user's own, or None for the defaults. Without `needs_pipeline`, Trainer's own
    methods train and evaluate.

    Raises:
        ValueError: the ranks were started with different options.
    """

    def __init__(
        self, trainer: Trainer, policy: FreezePolicy | None, splitter: Splitter | None, needs_pipeline: bool
    ) -> None:
        args: PipeTransformerArguments = trainer.args
        rest_seconds = max(args.pipeline_timeout, args.ddp_timeout)
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
        self.trainer = trainer
        self.topology = get_topology(rest_seconds, int(local_world_size) if local_world_size else None)
        self.topology.limit_waits(rest_seconds)  # An earlier trainer may have failed mid-step.
        if args.pipeline_size is not None:
            self.topology.check_pipeline_size(args.pipeline_size)
        check_agreement(self.topology, "training arguments", _shared(args))
        self.journal = Journal(trainer, EventLog(args.output_dir if trainer.is_world_process_zero() else None))
        # A batch of a new shape recompiles, so with torch_compile any step may take as long as the first one.
        step_seconds = rest_seconds if args.torch_compile else args.pipeline_timeout
        self.timeouts = CollectiveTimeouts(self.topology, self.journal, step_seconds, rest_seconds)
        self._made_optimizer: Any = None
        self._has_users_optimizer = False
        self.starter = Starter(trainer, self.topology, splitter, self.journal.log.path)
        self.seeds = Seeds(self.topology, args.seed)
        self.context = Context(trainer, self.topology, self.journal, self.timeouts, self.seeds)
        self.policy = policy or make_policy(args.freeze_policy, args.freeze_alpha, args.freeze_rule, args.freeze_at)
        if PREDICTED_SECONDS in self.policy.needs and args.full_determinism and args.layout_plan is None:
            raise ValueError(
                f"full_determinism=True: the policy {self.policy.name!r} decides by measured times, which differ from "
                "run to run. Use another policy, or replay the decisions of an earlier run with layout_plan."
            )
        # A replayed run uses the recorded decisions, so unused freeze options are not worth a warning there.
        if policy is None and args.layout_plan is None and self.topology.rank == 0:
            for text in unused_freeze_options(args, args.freeze_policy):
                logger.warning(text)
        self._policys_start = deepcopy(dict(self.policy.state()))
        self.in_force: Pipeline | None = None
        self.in_training: Training | None = None
        self.resumption: Resumption | None = None
        self._setup: TrainingSetup
        self._evaluation: Evaluation | UsersEvaluation | None = None
        self._needs_pipeline = needs_pipeline
        self._may_do_without = is_undivided(args) or need_of(args, policy, splitter, trainer.model) is not Need.MUST
        self._does_without = partial(does_without, args=args, policy=policy, splitter=splitter)
        self.is_left_to_trainer = self._evaluates_alone = not needs_pipeline or is_undivided(args)
        """True while Trainer's own methods run instead of the overrides."""
        self._in_loop = ExitStack()
        self.training_loader: Any = None
        """Loader that the current training reads."""
        self.signals: SavesOnSignal
        """Signal handling of the current training."""

    def start(self, found: ModelReport, layout: Layout, longest: int = 1) -> Pipeline:
        """Start the pipeline under `layout`; `longest` is the largest number of stages K it may grow to.

        Raises:
            ValueError: a callback reads the model where it cannot have it.
        """
        if max(layout.pipeline_size, longest) > 1:
            check_callbacks(self.trainer.callback_handler.callbacks, self.topology)
        self.journal.tried = found.start_up.plans.trying(layout) if found.is_training else {}
        self.in_force = self.starter.start(found, layout)
        return self.in_force

    @property
    def pipeline(self) -> Pipeline:
        if self.in_force is None:
            raise RuntimeError("The pipeline has not started: train(), evaluate() or predict() come first.")
        return self.in_force

    @property
    def _is_of_this_model(self) -> bool:
        """True if the pipeline was built from the model that the trainer has now."""
        return self.in_force is not None and self.in_force.stage.view.model is self.trainer.model

    def is_started(self, request: Request | None) -> bool:
        """Return True if a pipeline of the current model exists, starting one for `request` if needed.

        False if there is no request to start for, or if the run is left to Trainer.
        """
        if self._is_of_this_model:
            return True
        found = None if request is None else self._inspect(request, is_training=False)
        if found is not None:
            self.start(found, found.start_up.plans.layout(self.trainer.args.train_samples_per_device))
        return found is not None

    def _inspect(self, given: Request | Any, is_training: bool) -> ModelReport | None:
        """Run `Starter.inspect`; return None for an unsupported model or loss whose run Trainer can take over."""
        try:
            return self.starter.inspect(given, is_training)
        except (UnsupportedModelError, ModelSettingError, LossDoesNotDecomposeError) as error:
            may_do_without = self._may_do_without or self._does_without(error)
            # Trainer can only resume a run from its own kind of checkpoint.
            if not may_do_without or not (self.resumption is None or self.resumption.is_plain):
                raise
            say_left_to_trainer(error)
        self.trainer.args.leave_recomputing_to_trainer()
        trainer_compat.place_model(self.trainer)
        self.is_left_to_trainer = self._evaluates_alone = True
        return None

    # ---- training ----

    @property
    def training(self) -> Training:
        if self.in_training is None:
            raise RuntimeError("There is no training: train() alone calls this.")
        return self.in_training

    @contextmanager
    def train_call(self, resume_from_checkpoint: str | bool | None, trial: Any = None) -> Iterator[str | bool | None]:
        """Wrap a call of `Trainer.train`; yields the checkpoint folder to resume from, None for a new run.

        Raises:
            ValueError: on every rank, if there is no such checkpoint or this run cannot resume from it.
            PipelineError: an earlier training left the model on several stages.
        """
        trainer = self.trainer
        where = self._choose_who_trains(resume_from_checkpoint or None)
        if self.is_left_to_trainer:
            with self._only_run(trial):
                yield where
            return
        try:
            self.timeouts.rest()
            # The lock comes first: reported faults are written to the events file, which may belong to another run.
            with self._only_run(trial), self.timeouts.reporting_faults():
                if trainer.model_init is None:
                    check_whole(trainer.model)
                check_agreement(self.topology, "arguments of train()", {"resume_from_checkpoint": str(where)})
                check_shared_folder(trainer.args, self.topology)
                if where is not None:
                    description = RunDescription(trainer, self.topology, self.policy)
                    self.resumption = find_resumption(where, self.topology, description)
                yield None if self.resumption is None else self.resumption.folder
        finally:
            self._leave()

    def _choose_who_trains(self, where: str | bool | None) -> str | bool | None:
        """Decide whether Trainer trains; return the checkpoint to resume from, or True if it still has to be found."""
        trainer, output_dir = self.trainer, self.trainer.args.output_dir
        if not self._needs_pipeline:
            check_agreement(self.topology, "arguments of train()", {"resume_from_checkpoint=True": where is True})
        if self._needs_pipeline or where is not True or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            self.is_left_to_trainer = not self._needs_pipeline and not is_of_pipeline(where, output_dir)
            return where
        needs_weights = not trainer_compat.is_overridden(trainer, "_load_from_checkpoint")
        folder, is_pipelines = self.topology.decide(lambda: list(find_for_trainer(output_dir, needs_weights)))
        self.is_left_to_trainer = not is_pipelines
        # Without a checkpoint, Trainer raises its own error; `find_resumption` later picks the newest sound one.
        if is_pipelines or folder is None:
            return True
        # Each node may have an `output_dir` of its own, under another path.
        return os.path.join(output_dir, os.path.basename(str(folder)))

    def _only_run(self, trial: Any) -> AbstractContextManager[None]:
        """Lock `output_dir` against concurrent runs; hyperparameter trials have their own folders and need no lock."""
        args = self.trainer.args
        writes = not self.is_left_to_trainer or args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
        return only_run(args.output_dir, self.topology) if writes and trial is None else nullcontext()

    @contextmanager
    def saving_checkpoint(self, folder: str) -> Iterator[None]:
        """Wrap `Trainer._save_checkpoint` into `folder`, including the deletion of old checkpoints.

        Raises:
            ValueError: something in the folder is a symbolic link.
        """
        trainer = self.trainer
        if not self.is_left_to_trainer:
            self.topology.decide(lambda: check_unlinked(folder))
        else:
            # Not collective: one of Trainer's own callbacks may save on one process only, and each writes its RNG.
            check_unlinked(folder)
            if trainer.args.should_save:
                clear(folder, num_ranks=self.topology.world_size if self.topology.world_size > 1 else 0)
        with rotating_by_step(trainer.state.global_step):
            yield

    @contextmanager
    def training_loop(self) -> Iterator[None]:
        """Wrap Trainer's training loop; leaving it undoes what `begin_training` entered."""
        with ExitStack() as self._in_loop:
            yield

    def begin_training(self, loader: Any) -> Any:
        """Move the model onto its stages and give each rank its own RNG state. Collective: call on every rank.

        A model that cannot be split is left to Trainer if the run can do without a pipeline; then nothing freezes.

        Returns the loader to read instead of the given one.

        Raises:
            ValueError: the loader is the user's own, and there may be more than one stage.
        """
        trainer, topology, resumption = self.trainer, self.topology, self.resumption
        request = request_of(loader)
        if request is None:
            check_undivided(loader, "get_train_dataloader", trainer.args.pipeline_size or 1)
        # Forget an earlier training's policy state; on a resume, `Training.begin` restores the checkpoint's.
        self.policy.load_state(deepcopy(self._policys_start))
        if trainer.optimizer is self._made_optimizer:
            trainer.optimizer = None  # It was built for other stages and other frozen layers.
        self._has_users_optimizer = trainer.optimizer is not None
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        description = RunDescription(trainer, topology, self.policy) if resumption is None else resumption.description
        found = self._inspect(loader if request is None else request, is_training=True)
        if found is None:
            return loader
        start_up, args = found.start_up, trainer.args
        replay = read_plan(args, start_up.probe.structure, topology)
        if resumption is not None:
            layout = resumption.choose_layout(start_up, replay, topology.world_size, self.policy)
        else:
            layout = start_up.plans.layout(args.train_samples_per_device) if replay is None else replay[0]
        first = None if resumption is None else resumption.first_layout
        longest = longest_pipeline(layout, first, self.policy, replay)
        if request is None:
            check_undivided(loader, "get_train_dataloader", longest)
        trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        users = start_up.probe.structure.blocks_of_parameter
        check_stages(layout, {name: users[name] for name in trained}, args)
        check_unfreezing(args, self.policy, replay, longest)
        pipeline = self.start(found, layout, longest)
        give_whole_model(trainer, pipeline, longest)
        setup = TrainingSetup(
            self.context, self.policy, pipeline, replay, names, description, resumption, self._has_users_optimizer
        )
        setup.announce()
        pipeline.shared_rng = share_rng_state(topology)
        self.seeds.begin(pipeline.stage)
        self._setup = setup
        self._in_loop.enter_context(pipeline.stage.active())
        self.signals = SavesOnSignal(trainer, topology)
        self._in_loop.callback(self.signals.give_back)
        if request is None:
            self.training_loader = drawing_alike(loader, pipeline.shared_rng)
        else:
            self.training_loader = self.loader(request)
        return self.training_loader

    def making_optimizer(self) -> AbstractContextManager[None]:
        """Wrap Trainer's optimizer creation, which must include parameters that are frozen now but may unfreeze."""
        return self.pipeline.stage.store.all_active()

    def counts(self, values: tuple[Any, ...], loader: Any) -> tuple[Any, ...]:
        """Adjust the result of `Trainer.set_initial_training_values` for a resumed run."""
        if self.is_left_to_trainer:
            return values
        if self.resumption is None:
            return values
        return self.resumption.counts(values, loader, self.trainer.args.num_train_epochs)

    def prepare_training(self, loader: Any, max_steps: int) -> None:
        """Build the training around the optimizer that Trainer has just made. Collective: call on every rank."""
        if not self._has_users_optimizer:
            self._made_optimizer = self.trainer.optimizer
        self.in_training = self._setup.training(loader, max_steps)
        self.in_training.begin(self.resumption)

    def finish_training(self) -> None:
        """Give the user the whole model back on every rank after the last step. Collective: call on every rank."""
        pipeline, training, self.in_training = self.pipeline, self.training, None
        pipeline.steps = None
        training.steps.noted.note("train")  # Trainer logs once more after the loop.
        self.signals.give_back()  # Before Trainer's callback restores the signal handlers.
        training.end()
        if self.topology.rank == 0:
            announce(training.summary.in_words() or "No step was left to train.")
        self._give_back(pipeline, training)
        shared, pipeline.shared_rng = pipeline.shared_rng, None
        if shared is not None:
            # Only rank 0 reads data sets that draw random numbers, so its RNG state is ahead of the others'.
            set_random_state(*states_of_first_rank(self.topology, shared.states))

    def _leave(self) -> None:
        """Detach from trainer, model and optimizer after `train()`, also after an error.

        A model that an error left on several stages stays there; a model that is whole can be trained again.
        """
        pipeline, training, self.in_training = self.in_force, self.in_training, None
        self.resumption, self.is_left_to_trainer = None, self._evaluates_alone
        give_handler_back(self.trainer)
        if training is not None:
            training.end()
        if pipeline is not None:
            pipeline.steps = None
        if pipeline is None or pipeline.stage.reducer is None:
            return
        if pipeline.layout.pipeline_size > 1:
            pipeline.stage.reducer.remove()
        else:
            self._give_back(pipeline, training)

    def _give_back(self, pipeline: Pipeline, training: Training | None) -> None:
        gather_full_state(pipeline.stage)
        if training is not None and self._has_users_optimizer:
            held = pipeline.stage.store.held()
            training.optimizer.hold({name: p for name, p in held.items() if p.requires_grad}, {})
        pipeline.stage.view.remove()

    @property
    def counts_inputs(self) -> bool:
        """True if this rank counts inputs: one rank per pipeline does."""
        return self.in_force is None or self.in_force.stage.groups.is_first

    @contextmanager
    def counting_tokens(self) -> Iterator[bool]:
        """Wrap Trainer's token counting; yields True on the one rank per pipeline that counts.

        Trainer's own gather would wait for the ranks that do not count; the sum over ranks is taken here instead.
        """
        trainer = self.trainer
        if trainer.args.include_num_input_tokens_seen == "no":
            yield False
            return
        before = trainer.state.num_input_tokens_seen
        with trainer_compat.gathering_nothing(trainer.accelerator):
            yield self.counts_inputs
        own = trainer.state.num_input_tokens_seen - before
        trainer.state.num_input_tokens_seen = before + sum(self.topology.gather(own))

    def add_scalars(self, logs: dict[str, float]) -> None:
        """Add the layout's scalars to a training log entry; logging may be slow, so the long timeout applies."""
        if self.timeouts.is_resting:
            self.timeouts.rest()
        if "loss" in logs and self.in_training is not None:
            logs.update(self.in_training.take_scalars())

    # ---- the whole model ----

    def whole_model(self) -> AbstractContextManager[None]:
        """See `Pipeline.whole_model`."""
        return nullcontext() if self.in_force is None else self.in_force.whole_model()

    @contextmanager
    def whole_on_first_rank(self) -> Iterator[None]:
        """Wrap saving: rank 0 holds every saved parameter inside. In training, collective: call on every rank."""
        stage = None if self.in_force is None else self.in_force.stage
        if stage is None or stage.reducer is None:
            with self.timeouts.reporting_faults(together=False):
                yield
            return
        self.pipeline.settle()
        is_spread = stage.groups.pipeline_size > 1
        only = self.topology.decide(lambda: trainer_compat.saved_names(self.trainer)) if is_spread else None
        with self.timeouts.reporting_faults(), whole_on_first_rank(stage, only):
            yield
            self.topology.barrier()

    # ---- data and evaluation ----

    def loader(self, request: Request) -> PipelineLoader:
        """Return the pipeline's loader for a request; evaluation loaders may persist."""
        trainer, pipeline = self.trainer, self.pipeline
        persists = request.key is not None and trainer.args.dataloader_persistent_workers
        if persists and request.key in pipeline.persistent_loaders:
            return pipeline.persistent_loaders[request.key]
        freezes = pipeline.layout.num_frozen_layers or self.policy.freezes or trainer.args.layout_plan is not None
        may_store = bool(request.is_training and freezes)
        loader = make_loader(trainer, self.topology, pipeline, request, may_store)
        cache = None if self.in_training is None else self.in_training.cache
        if cache is not None and not request.is_training and not loader.is_stream:
            cache.serve(loader, request.dataset)
        if persists:
            pipeline.persistent_loaders[str(request.key)] = loader
        return loader

    @property
    def evaluation(self) -> Evaluation | UsersEvaluation:
        """Current pass over an evaluation data set."""
        if self._evaluation is None:
            raise RuntimeError("There is no evaluation: evaluate() and predict() alone call this.")
        return self._evaluation

    @contextmanager
    def evaluating(self, dataset: Any, method: str) -> Iterator[None]:
        """Wrap an evaluation of `dataset`: a data set, its name in `eval_dataset`, or a dict of several.

        Args:
            method: name of the trainer's method that makes the loader. If the user overrides it (possible with one
                stage only) or overrides `evaluate`, the data set is not known yet, and the start waits for the loader.
        """
        makes_loader = self._num_stages == 1 and trainer_compat.is_overridden(self.trainer, method)
        awaits_loader = makes_loader or trainer_compat.is_overridden(self.trainer, "evaluate")
        with self._up(None if awaits_loader else self._asked_for(dataset)):
            yield

    @property
    def _num_stages(self) -> int | None:
        """Number of stages K now or at the next start; None if not known yet."""
        if self._is_of_this_model:
            return self.pipeline.layout.pipeline_size
        size: int | None = self.trainer.args.pipeline_size
        return 1 if self.topology.world_size == 1 else size

    def _asked_for(self, dataset: Any) -> Request:
        """Return the request that Trainer will make; for a dict of data sets, the one for the first."""
        own = self.trainer.eval_dataset
        dataset = own if dataset is None else dataset
        dataset = own[dataset] if isinstance(dataset, str) else dataset
        first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        return Request(
            first, "Evaluation", self.trainer.args.eval_batch_size, trainer_compat.eval_sampler(self.trainer)
        )

    @contextmanager
    def _up(self, request: Request | None) -> Iterator[bool]:
        """Wrap an evaluation; yields False without a pipeline, which can start only for a known request."""
        with self.timeouts.reporting_faults():
            if not self.is_started(request):
                yield False
                return
            self.pipeline.settle()
            with giving_whole_model(self.trainer, self.pipeline), evaluating(self.pipeline):
                yield True

    @contextmanager
    def passing_over(self, given: Any) -> Iterator[Evaluation | UsersEvaluation]:
        """Wrap Trainer's evaluation loop; the yielded evaluation names the loader, the pipeline's or the user's."""
        trainer, request = self.trainer, request_of(given)
        is_users = request is None and not isinstance(given, PipelineLoader)
        if is_users:
            check_undivided(given, "get_eval_dataloader or get_test_dataloader", self._num_stages)
        outer, left = (self._evaluation, trainer.gather_function), self.is_left_to_trainer
        cache = None if self.in_training is None else self.in_training.cache
        try:
            # Entered here as well: a user's own `evaluate` may call the loop directly.
            with self._up(request) as is_up:
                if is_users or not is_up:
                    shared = self.pipeline.shared_rng if is_up else None
                    self._evaluation = UsersEvaluation(drawing_alike(given, shared))
                    self.is_left_to_trainer = left or not is_up
                    yield self._evaluation
                    return
                loader = given if request is None else self.loader(request)
                self._evaluation = evaluation = Evaluation(trainer, self.topology, self.pipeline, loader)
                trainer.gather_function = evaluation.gather
                with nullcontext() if cache is None else cache.storing_for(loader):
                    yield evaluation
        finally:
            self._evaluation, trainer.gather_function = outer
            if is_users:
                self.is_left_to_trainer = left

    @property
    def layout(self) -> Layout | None:
        """Current layout; None before the first start."""
        return None if self.in_force is None else self.in_force.layout


def _shared(args: PipeTransformerArguments) -> dict[str, Any]:
    """Return the arguments that must be equal on all ranks."""
    local = ("output_dir", "run_name", "disable_tqdm", "log_level", "log_level_replica", "hub_token", "local_rank")
    return comparable({key: value for key, value in args.to_dict().items() if key not in local})
