"""Freezing and changing the layout while training: Trainer's moments, and who is asked at each."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers.trainer_utils import has_length

from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.migration import OptimizerState
from hf_pipetransformer.controller import Change, LayoutController
from hf_pipetransformer.decisions import Decisions
from hf_pipetransformer.freeze.policies import check_policy, make_clock
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.placement import Placement
from hf_pipetransformer.report.events import announce, logger, read_known_microbatches
from hf_pipetransformer.run.steps import Steps
from hf_pipetransformer.trainer.caching import CachingTrainer
from hf_pipetransformer.transition import change_layout


class AdaptingTrainer(CachingTrainer):
    """Asks before every optimizer step whether the layout changes, and changes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._controller: LayoutController | None = None
        self._optimizer_state: OptimizerState | None = None
        self._train_loader: PipelineLoader | None = None
        self._optimizer_hooks: list[Any] = []
        self._steps: Steps

    def _begin_adapting(self, loader: Any, max_steps: int) -> None:
        """The optimizer exists, the first step has not begun."""
        assert self._stage is not None
        args, layout = self.args, self._stage.layout
        policy = self.run.policy
        for text in check_policy(policy, layout.num_layers, max_steps, args.freeze_min_active_layers):
            self._warn(text)
        steps_per_epoch = max_steps
        if has_length(loader):
            steps_per_epoch = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
        elif args.freeze_interval == "epoch" and policy.freezes:
            self._warn(
                "freeze_interval='epoch': the data set has no length, so no decision comes before the end. Set "
                "freeze_interval to a number of steps or a share of the run."
            )
        self._train_loader = loader if isinstance(loader, PipelineLoader) else None
        self._steps = Steps(self, self.topology, self.run.pipeline, self._train_loader)
        self._delete_leftovers()
        if layout.num_frozen_layers or policy.freezes or self._replayed_layouts is not None:
            self._begin_cache(loader, steps_per_epoch)
        if self._replayed_layouts is not None and self._cache_planner is None:
            plan = self._replayed_layouts.items()
            self._replayed_layouts = {step: replace(planned, cache_level=0) for step, planned in plan}
        decisions = Decisions(
            policy=policy,
            clock=make_clock(args.freeze_interval, args.freeze_warmup, steps_per_epoch, max_steps),
            args=args,
            inputs=self.run.pipeline.start_up.plans.inputs(
                self._layout_of_first_step(), args.per_device_train_batch_size, self._known_microbatches(layout)
            ),
            num_frozen=layout.num_frozen_layers,
            world_size=self.topology.world_size,
            units_of_parameter=self._stage.view.structure.units_of_parameter,
            write=self.run.journal.write,
            cache=self._cache_planner,
        )
        self._controller = LayoutController(
            decisions,
            self.topology,
            self._stage,
            self.run.journal.write,
            self.run.pipeline.settings.meter,
            self._replayed_layouts,
        )
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        # A cache for layers that are frozen from the start changes the cuts too.
        adapts = policy.freezes or self._cache_planner is not None
        may_move = self._replayed_layouts is not None or (args.elastic and adapts and layout.pipeline_size > 1)
        # A user's optimizer is put together again at the end.
        may_move |= self.run.has_users_optimizer and layout.pipeline_size > 1
        self._optimizer_state = OptimizerState(
            optimizer, self._stage.store.held(), self.topology, may_move, self._group_of
        )
        part = ExitStack()
        self._optimizer_hooks += [
            optimizer.register_step_pre_hook(
                lambda *_: part.enter_context(self.run.pipeline.settings.meter.part("optimizer")) and None
            ),
            optimizer.register_step_post_hook(lambda *_: part.close()),
        ]
        if args.elastic and adapts:
            # Every length that may follow gets its groups now: making them takes longer than a transition should.
            for size in range(1, layout.pipeline_size + 1):
                if layout.pipeline_size % size == 0:
                    self.topology.groups(Placement(size, layout.num_chunks if size > 1 else 1, layout.placement))
        if layout.cache_level:
            self._follow_with_cache(self._stage, loader)

    def _end_adapting(self) -> None:
        """The last step is done and the model whole again: nobody is watched, everybody may be trained."""
        assert self._stage is not None
        self._controller = None
        self._end_cache()
        if self.run.has_users_optimizer and self._optimizer_state is not None:
            self._optimizer_state.hold({n: p for n, p in self._stage.store.held().items() if p.requires_grad}, {})

    def _forget_own_optimizer(self) -> None:
        """An optimizer that an earlier `train` made was for other stages and other frozen layers; the user's stays."""
        if not self.run.has_users_optimizer:
            self.optimizer = None
        self.run.seeds.num_transitions = 0

    def _layout_of_first_step(self) -> Layout:
        """The layout under which the run began: a resumed one began earlier."""
        assert self._stage is not None
        return self._stage.layout

    def _known_microbatches(self, layout: Layout) -> dict[int, int]:
        plans, samples = self.run.pipeline.start_up.plans, self.args.per_device_train_batch_size
        path = self.events.path if plans.measures_microbatches and layout.pipeline_size > 1 else None
        known: dict[int, int] = self.topology.decide(lambda: read_known_microbatches(path, layout, samples))
        return known

    def _warn(self, text: str) -> None:
        if self.is_world_process_zero():
            logger.warning(text)

    def _between_steps(self) -> None:
        """Between two optimizer steps: decide, and take what was decided into effect."""
        if self._controller is None or self._stage is None:
            return
        if self._controller.decides_before(self.state.global_step):
            self.run.patience.rest()  # Rank 0 may measure the disk while the others wait.
        change = self._controller.change_before(self.state.global_step, self._stage)
        if change is not None:
            if change.moves:
                self.run.patience.rest()
            self._apply(change)
        self._controller.begin_step(self._stage)

    def _watch_gradients(self, squares: torch.Tensor) -> None:
        if self._controller is not None:
            self._controller.watch_gradients(squares)

    def _run_epoch(self, **kwargs: Any) -> None:
        self.run.patience.rest()
        try:
            super()._run_epoch(**kwargs)
        finally:
            self._steps.end_epoch()
        self.run.patience.rest()
        self._report_cache()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._controller is not None:
            self._controller.end_step()
        control = self.control
        logs = control.should_log and self.state.global_step > self._globalstep_last_logged
        if logs:
            # Trainer gathers the loss first, as patient as in a step; `log` goes on from there.
            self.run.patience.is_resting = True
        elif control.should_evaluate or control.should_save:
            self.run.patience.rest()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _apply(self, change: Change) -> None:
        assert self._stage is not None
        if not change.moves:
            self._stage.layout = change.layout
            self.run.journal.write("profile", what="trial", num_microbatches=change.layout.num_microbatches)
            return
        self._move_to(change)

    def _move_to(self, change: Change) -> None:
        """A transition: the run goes on under another layout, with the same weights and the same next batch."""
        assert self._stage is not None and self._optimizer_state is not None
        start, old = time.perf_counter(), self._stage.layout
        self._notice_changed_weights()
        self._watch = None  # It holds the weights that may leave this rank.
        if self._train_loader is None and change.layout.pipeline_size != old.pipeline_size:
            raise ValueError(
                "get_train_dataloader returned a loader that knows nothing of stages, so the layout cannot change. "
                "Build it with self._get_dataloader, or set elastic=False."
            )
        self.run.journal.tried = self.run.pipeline.start_up.plans.trying(change.layout)
        stage, num_bytes = change_layout(
            self._stage,
            change.layout,
            self.run.pipeline.start_up.probe,
            self.topology,
            self.run.pipeline.settings,
            self._optimizer_state,
        )
        self.run.pipeline.take(stage)
        self._follow_with_cache(stage, self._train_loader)
        for loader in (self._train_loader, *self.run.pipeline.persistent_loaders.values()):
            if loader is not None:
                loader.follow(stage.groups)
        self.run.seeds.num_transitions += 1
        self.run.seeds.part(stage)
        seconds = time.perf_counter() - start
        self._report_transition(change, old, seconds, num_bytes)

    def _report_transition(self, change: Change, old: Layout, seconds: float, num_bytes: int) -> None:
        new, predicted, measured = change.layout, change.predicted, change.measured
        self.run.journal.write(
            "transition",
            **{"from": old.as_event(), "to": new.as_event()},
            seconds=seconds,
            bytes_moved=num_bytes,
            measured_step_s=measured,
            predicted_step_s=predicted,
            alternatives=change.alternatives,
            reason=change.reason,
        )
        if not self.is_world_process_zero():
            return
        gain = (
            ""
            if not (measured and predicted)
            else (
                f"; a step took {measured * 1e3:.0f} ms, now {predicted * 1e3:.0f} ms are predicted "
                f"({measured / predicted:.2f}x)"
            )
        )
        frozen = f"{new.num_frozen_layers} of {new.num_layers} layers frozen (before: {old.num_frozen_layers})"
        announce(
            f"Step {self.state.global_step}: {frozen}; {change.reason}. "
            f"K={old.pipeline_size} x R={old.num_replicas} -> K={new.pipeline_size} x R={new.num_replicas}, "
            f"moved {num_bytes / 2**20:.1f} MiB in {seconds:.2f} s{gain}."
        )
