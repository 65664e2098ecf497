"""Start of a training: the model is inspected, its layout decided, its stages and what runs the steps are built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import has_length

from hf_pipetransformer.cache.opening import remove_old_stores
from hf_pipetransformer.cache.training import TrainingCache, begin_cache
from hf_pipetransformer.comm.topology import check_agreement
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.loader import PipelineLoader, request_of
from hf_pipetransformer.elastic.controller import LayoutController
from hf_pipetransformer.elastic.decisions import Decisions
from hf_pipetransformer.elastic.transition import Transitions, check_unfreezing, longest_pipeline
from hf_pipetransformer.freeze.policies import coming_spans
from hf_pipetransformer.freeze.policy import DecisionClock, FreezePolicy, check_policy, make_clock
from hf_pipetransformer.planning.layouts import reachable_shapes
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.report.events import read_known_microbatches, read_unfit
from hf_pipetransformer.report.origin import origin_of
from hf_pipetransformer.runtime.optimizer_state import OptimizerState
from hf_pipetransformer.schedules.placement import Placement, pipeline_sizes
from hf_pipetransformer.startup.planner import StartDecision
from hf_pipetransformer.startup.slices import choose_head_slices
from hf_pipetransformer.state.resumption import Resumption, read_plan
from hf_pipetransformer.state.run_state import RunDescription
from hf_pipetransformer.state.saving import Checkpoints
from hf_pipetransformer.training.expectation import in_words, make_forecast
from hf_pipetransformer.training.loaders import check_undivided
from hf_pipetransformer.training.metrics import MetricAccumulator
from hf_pipetransformer.training.steps import Steps
from hf_pipetransformer.training.synchronous import SynchronousSteps
from hf_pipetransformer.training.training import Training


if TYPE_CHECKING:
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.startup.planner import RunPlanner
    from hf_pipetransformer.training.context import TrainingContext
    from hf_pipetransformer.training.pipeline_session import PipelineSession


def steps_under(layout: Layout) -> type[Steps]:
    """Return how steps run under a layout: of an asynchronous schedule synchronously once a single stage is left."""
    if not layout.abilities.overlaps_steps:
        return SynchronousSteps
    from hf_pipetransformer.training.asynchronous import AsynchronousSteps

    return AsynchronousSteps


@dataclass
class TrainingSetup:
    """Training before its optimizer exists.

    Args:
        names: `id` of each parameter of the whole model to its name.
    """

    run: PipelineSession
    decision: StartDecision
    names: Mapping[int, str]
    description: RunDescription

    @property
    def context(self) -> TrainingContext:
        return self.run.context

    def announce(self) -> None:
        """Report the start to the events file and the screen."""
        layout, plans, saved = self.decision.layout, self.decision.plans, self.run.resumption
        policy = self.run.policy.describe() if self.decision.replay is None else "replayed"
        fields = plans.describe(layout, policy, self.decision.freezes, self.run.pipeline.start_up.trainer_adds_up)
        fields["nodes"] = list(map(len, self.context.topology.nodes))
        if saved is not None:
            fields["resumed_from"] = saved.folder
        fields["origin"] = origin_of(self.context.trainer) if self.context.topology.rank == 0 else None
        step, epoch = (0, 0.0) if saved is None else (saved.step, saved.epoch)
        # With step and epoch, which Trainer has not set yet.
        self.context.journal.log.write("run", step, epoch, layout=layout.as_event(), **fields)
        if self.context.topology.rank == 0:
            one_stage = plans.one_stage_in_words(layout)
            announce(
                f"PipeTransformer: {layout}, {layout.schedule}. {fields['expectation']}{one_stage}", is_decision=True
            )
            if layout.pipeline_size > 1 and self.context.gains.is_of_script:
                announce(
                    "The loss is the script's: behind the model's call the last stage alone runs it. What it changes "
                    "on the trainer reaches all ranks after each batch, what it prints or keeps elsewhere does not."
                )

    def training(self, given: Any, max_steps: int) -> Training:
        """Build the training around Trainer's optimizer. Collective: call on every rank.

        Raises:
            ValueError: the ranks' own loaders differ in length, or an option does not fit the model.
        """
        loader = given if isinstance(given, PipelineLoader) else None
        if loader is None:
            length = len(given) if has_length(given) else None
            check_agreement(self.context.topology, "training loaders", {"number of batches": length})
        steps_per_epoch = self._steps_per_epoch(given, max_steps)
        cache = self._cache(given, steps_per_epoch)
        pipeline, replay = self.run.pipeline, self.decision.replay
        stage, args = pipeline.stage, self.context.args
        clock = make_clock(args.freeze_interval, args.freeze_warmup, steps_per_epoch, max_steps)
        decisions = self._decisions(clock, cache)
        if replay is None and self.run.policy.freezes:

            def predict() -> None:
                announce(decisions.outlook(stage.layout, steps_per_epoch))
                if self.run.resumption is None:
                    self._expect(clock, cache)

            # `decide` makes an error of a user's policy end the run on every rank.
            self.context.topology.decide(predict)
        controller = LayoutController(self.context, decisions, stage, replay)
        optimizer = self._optimizer(cache)
        metrics = MetricAccumulator(self.context)

        return Training(
            context=self.context,
            pipeline=pipeline,
            loader=loader,
            optimizer=optimizer,
            controller=controller,
            transitions=Transitions(self.context, pipeline, controller, optimizer, cache, loader),
            cache=cache,
            checkpoints=Checkpoints(
                self.context, pipeline, loader, optimizer, controller, self.description, self.decision.began_under
            ),
            metrics=metrics,
            make_steps=lambda: steps_under(pipeline.layout)(self.context, pipeline, loader, metrics, controller),
        )

    def _expect(self, clock: DecisionClock, cache: TrainingCache | None) -> None:
        """Announce the predicted training time on rank 0, next to the time with nothing frozen."""
        policy, layout, least = self.run.policy, self.run.pipeline.layout, self.context.args.freeze_min_active_layers
        if policy.may_unfreeze:
            return
        spans = coming_spans(policy, clock, layout.num_layers, layout.num_frozen_layers, least)
        # Nothing more freezes, so there is no second duration to compare with.
        if all(span.num_frozen <= layout.num_frozen_layers for span in spans):
            return
        forecast = make_forecast(self.context.trainer, self.run.pipeline, cache)
        seconds, full = forecast.seconds(spans), forecast.full_seconds(clock.max_steps)
        with self.context.journal.at(0, 0.0):
            self.context.journal.write("profile", what="expectation", seconds=seconds, full_seconds=full)
        announce(in_words(seconds, full, policy.is_certain, layout.num_frozen_layers))

    def _decisions(self, clock: DecisionClock, cache: TrainingCache | None) -> Decisions:
        plans, stage, args = self.decision.plans, self.run.pipeline.stage, self.context.args
        blocks_of_parameter = stage.view.structure.blocks_of_parameter
        return Decisions(
            policy=self.run.policy,
            clock=clock,
            args=args,
            inputs=plans.inputs(self.decision.began_under, self._known_microbatches()),
            num_frozen=stage.layout.num_frozen_layers,
            blocks_of_parameter={n: blocks for n, blocks in blocks_of_parameter.items() if stage.store.trainable[n]},
            write=self.context.journal.write,
            cache=None if cache is None else cache.planner,
            num_frozen_by_user=plans.num_frozen_by_user,
        )

    def _steps_per_epoch(self, loader: Any, max_steps: int) -> int:
        args, policy = self.context.args, self.run.policy
        num_layers = self.run.pipeline.layout.num_layers
        warnings = list(check_policy(policy, num_layers, max_steps, args.freeze_min_active_layers))
        steps_per_epoch = max_steps
        if has_length(loader):
            steps_per_epoch = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
        elif args.freeze_interval == "epoch" and policy.freezes:
            warnings.append(
                "freeze_interval='epoch': the data set has no length, so no decision comes before the end. Set "
                "freeze_interval to a number of steps or a share of the run."
            )
        for text in warnings if self.context.topology.rank == 0 else ():
            logger.warning(text)
        return steps_per_epoch

    def _cache(self, loader: Any, steps_per_epoch: int) -> TrainingCache | None:
        # One rank of each node cleans up: several that delete the same files would get in each other's way.
        if self.context.topology.is_first_here:
            remove_old_stores(self.context.args)
        media = self.run.pipeline.start_up.probe.structure.media
        if media is not None and media.frozen:
            return None  # Encoders that the script froze are parts of their own, see `Session.storing_on_stages`.
        if not self.decision.stores:
            args = self.context.args
            options = ("activation_cache", "activation_cache_keep")
            asked = [name for name in options if getattr(args, name) not in ("auto", "off", 0, False)]
            for name in asked if self.context.topology.rank == 0 else ():
                logger.warning(
                    f"{name}={getattr(args, name)!r} has no effect: no layer of the stack is frozen or will be, so "
                    f"nothing is cached. Choose a freeze_policy, or leave {name} out."
                )
            return None
        if media is not None:
            return None  # Images beside a text are no row that a record could be found by.
        return begin_cache(self.context, self.run.pipeline, loader, steps_per_epoch)

    def _known_microbatches(self) -> dict[tuple[int, int], int]:
        """Return the best number of micro-batches M by stages K and chunks V, from checkpoint or events file."""
        saved = None if self.run.resumption is None else self.run.resumption.known_microbatches
        if saved is not None:
            return saved
        plans, layout = self.decision.plans, self.run.pipeline.layout
        path = self.context.journal.log.path if plans.measures_microbatches and layout.pipeline_size > 1 else None
        samples = self.context.args.train_samples_per_device
        # Rank 0 alone has an events file.
        known = self.context.topology.decide(
            # As lists, for a message has no tuples as keys.
            lambda: [[*shape, m] for shape, m in read_known_microbatches(path, layout, samples).items()]
        )
        return {(k, v): m for k, v, m in known}

    def _optimizer(self, cache: TrainingCache | None) -> OptimizerState:
        """Build this stage's part of the optimizer, and the groups that its migrations need."""
        layout, stage, elastic = self.run.pipeline.layout, self.run.pipeline.stage, self.context.args.elastic
        optimizer = trainer_compat.torch_optimizer(self.context.trainer)
        # With a cache, cuts can move even if layers are frozen only from the start, also in a resumed run that lost
        # its cache.
        adapts = elastic and (self.decision.freezes or cache is not None or layout.cache_level > 0)
        # A user's optimizer is reassembled at the end, and unfreezing may bring back the first number of stages.
        longest = self.decision.longest
        may_move = self.decision.replay is not None or (longest > 1 and (adapts or self.run.keeps_optimizer))
        if adapts:
            # Create the process groups of later layouts now: that takes longer than a transition should.
            most = len(self.run.pipeline.start_up.probe.structure.cut_positions()) - 1
            wanted = self.decision.plans.wanted_chunks
            sizes = pipeline_sizes(longest, self.context.topology.local_world_size)
            for size, num_chunks in reachable_shapes(layout.schedule, wanted, sizes, most):
                self.context.topology.groups(Placement(size, num_chunks, layout.placement))
        state = OptimizerState(optimizer, stage.store.named(), self.context.topology, may_move, self.names)
        state.frozen_by_script = tuple(name for name in state.group_of if not stage.store.trainable[name])
        if layout.pipeline_size > 1:
            # The first stage that uses a shared parameter updates it; the others receive the value.
            state.keep(stage.trained_here())
        elif not stage.store.trains_all:
            state.hold(stage.trained_here(), {})  # Trainer made it for the parameters that may unfreeze, too.
        return state


def start_training(run: PipelineSession, loader: Any, first: Any) -> TrainingSetup | None:
    """Inspect the model, decide on its layout, and build this rank's stage; None if the run is left to Trainer.

    Collective: call on every rank.

    Args:
        loader: Trainer's own loader, or the user's.
        first: first batch of the user's loader; None of Trainer's own.

    Raises:
        ValueError: the loader is the user's own, and there may be more than one stage.
    """
    context, policy, resumption, request = run.context, run.policy, run.resumption, request_of(loader)
    # Before the model is split: stages may replace parameters, whereas a user's optimizer refers to these.
    names = {id(parameter): name for name, parameter in context.trainer.model.named_parameters()}
    description = resumption.description if resumption else RunDescription(context.run, context.topology, policy)
    start_up = run.inspect_or_leave(first if request is None else request, is_training=True)
    if start_up is None:
        return None
    decision = decide(context, start_up.plans, resumption, policy)
    if request is None:
        # Once more: `auto`, or a layout to grow back to, has given the number of stages only now.
        check_undivided(loader, "get_train_dataloader", decision.longest)
    # Refused while the model is whole, before any weight moves.
    named, users = context.trainer.model.named_parameters(), start_up.probe.structure.blocks_of_parameter
    steps_under(decision.layout).check(
        decision.layout, {name: users[name] for name, p in named if p.requires_grad}, context.args
    )
    check_unfreezing(context.args, policy, decision.replay, decision.longest)
    run.build(start_up, decision)
    return TrainingSetup(run, decision, names, description)


def decide(
    context: TrainingContext, plans: RunPlanner, resumption: Resumption | None, policy: FreezePolicy
) -> StartDecision:
    """Decide how a training begins, or goes on as it was saved. Collective: call on every rank."""
    args, topology = context.args, context.topology
    replay, first = read_plan(plans), None
    if args.head_slices is None:
        plans = _with_head_slices(context, plans, resumption, replay)
    if resumption is not None:
        layout = resumption.choose_layout(plans, replay, topology.world_size, policy)
        first, sums = resumption.first_layout, resumption.sums_in_float32(plans, layout)
    else:
        layout = plans.layout() if replay is None else replay[0]
        sums = plans.sums_in_float32(layout)
        is_replaced = replay is None and plans.replaced_by is not None and args.pipeline_loss == "auto"
        if is_replaced and topology.rank == 0 and not plans.fits(layout):
            logger.warning(
                f"The loss of the whole batch takes all forwards before the first backward "
                f"(pipeline_schedule={plans.schedule!r}), which is not expected to fit in memory. Use more "
                "stages, smaller batches or pipeline_checkpoint='layers'; or, for a loss that is a mean over samples "
                "or label tokens, pipeline_loss='parts'."
            )
    longest, freezes = longest_pipeline(layout, first, policy, replay), policy.freezes or replay is not None
    plans = replace(plans, sums=sums)
    return StartDecision(plans, layout, first or layout, longest, replay, freezes)


def _with_head_slices(
    context: TrainingContext, plans: RunPlanner, resumption: Resumption | None, replay: Mapping[int, Layout] | None
) -> RunPlanner:
    """Choose the slices of the head for a run that leaves them open. Collective: call on every rank."""
    topology, num_frozen = context.topology, plans.num_frozen_by_user
    if resumption is not None and not resumption.is_plain:
        num_frozen = max(num_frozen, resumption.state.layout.num_frozen_layers)

    def first(planner: RunPlanner) -> Layout:
        return planner.choose(num_frozen) if replay is None else replay[0]

    def unfit(planner: RunPlanner) -> int:
        return read_unfit(context.journal.log.path, planner.conditions)

    def choose() -> list[int]:
        if context.args.pipeline_size is not None:
            topology.check_pipeline_size(context.args.pipeline_size)
        saved = None if resumption is None else resumption.saved_head_slices(plans, topology.world_size, unfit)
        if saved is not None:
            chosen, line = saved, f"pipeline_head_slices='auto': {saved.head_slices} as in the run that was saved."
        else:
            chosen, line = choose_head_slices(plans, first, unfit)
        announce(line, is_decision=True)
        return [chosen.num_head_slices, chosen.unfit]

    number, num_unfit = topology.decide(choose)
    if resumption is not None and topology.rank == 0:
        resumption.compare_head_slices(number)
    return replace(plans, head_slices=number, unfit=num_unfit)
