"""Execution of layout changes during training, and the limits on unfreezing and on pipeline growth."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hf_pipetransformer.cache.training import TrainingCache
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.elastic.controller import Change, LayoutController
from hf_pipetransformer.elastic.migration import OptimizerState
from hf_pipetransformer.elastic.transition import change_layout
from hf_pipetransformer.freeze.policy import FreezePolicy
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.report import announce
from hf_pipetransformer.runtime.context import Context
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.schedules.layout import Layout, counted


def longest_pipeline(
    layout: Layout, first: Layout | None, policy: FreezePolicy, replay: Mapping[int, Layout] | None
) -> int:
    """Return the largest pipeline size K that a run may have from here on.

    Pipelines grow when layers unfreeze, or as the replayed run did.

    Args:
        layout: layout in force.
        first: layout under which the run began, if it was another; unfreezing may return to it.
        replay: layouts of an earlier run by the optimizer step from which they applied; the policy is then not asked.
    """
    coming = [] if replay is None else list(replay.values())
    if replay is None and policy.may_unfreeze and first is not None:
        coming = [first]
    return max(each.pipeline_size for each in (layout, *coming))


def check_unfreezing(
    args: PipeTransformerArguments, policy: FreezePolicy, replay: Mapping[int, Layout] | None, pipeline_size: int
) -> None:
    """Refuse to unfreeze layers under schedules with which that has not been verified.

    Raises:
        ValueError: layers may unfreeze under an asynchronous schedule or one that cuts sequences into slices.
    """
    counts = [] if replay is None else [layout.num_frozen_layers for _, layout in sorted(replay.items())]
    unfreezes = policy.may_unfreeze if replay is None else counts != sorted(counts)
    if unfreezes and pipeline_size > 1 and not args.schedule.abilities.runs_steps_whole:
        who = "layout_plan" if replay is not None else f"the freeze policy {policy.name!r}"
        raise ValueError(
            f"pipeline_schedule={args.pipeline_schedule!r} while {who} may unfreeze layers: that has not been "
            "verified. Use pipeline_schedule='1f1b', or let the number of frozen layers only grow."
        )


@dataclass
class Transitions:
    """Changes the layout of a training run as its controller decides; cache, loader and optimizer state follow."""

    context: Context
    pipeline: Pipeline
    controller: LayoutController
    optimizer: OptimizerState
    cache: TrainingCache | None
    loader: PipelineLoader | None

    def before_step(self) -> Change | None:
        """Ask the controller and apply its decision; return the move to another layout, if any."""
        step, pipeline, moved = self.context.trainer.state.global_step, self.pipeline, None
        if self.controller.decides_before(step):
            self.context.timeouts.rest()  # Rank 0 may measure the disk meanwhile: raise the timeouts of the others.
        for ask in (self.controller.change_before, self.controller.change_without_cache):
            change = ask(step, pipeline.stage)
            if change is not None and change.moves:
                self.context.timeouts.rest()
                self.move(change)
                moved = change
            elif change is not None:
                pipeline.stage.layout = change.layout
                self.context.journal.write("profile", what="trial", num_microbatches=change.layout.num_microbatches)
        self.controller.begin_step(pipeline.stage)
        return moved

    def move(self, change: Change) -> None:
        """Continue the run under another layout, with the same weights and the same next batch."""
        start, old, pipeline = time.perf_counter(), self.pipeline.layout, self.pipeline
        pipeline.settle()
        if self.cache is not None:
            self.cache.prepare_transition()
        self.context.journal.tried = pipeline.start_up.plans.trying(change.layout)
        probe, settings = pipeline.start_up.probe, pipeline.settings
        stage, num_bytes = change_layout(
            pipeline.stage, change.layout, probe, self.context.topology, settings, self.optimizer
        )
        pipeline.take(stage)
        if self.cache is not None:
            self.cache.follow()
        for loader in (self.loader, *pipeline.persistent_loaders.values()):
            if loader is not None:
                loader.follow(stage.groups)
        self.context.seeds.num_transitions += 1
        self.context.seeds.part(stage)
        self._report(change, old, time.perf_counter() - start, num_bytes)

    def _report(self, change: Change, old: Layout, seconds: float, num_bytes: int) -> None:
        new, predicted, measured = change.layout, change.predicted, change.measured
        self.context.journal.write(
            "transition",
            **{"from": old.as_event(), "to": new.as_event()},
            seconds=seconds,
            bytes_moved=num_bytes,
            measured_step_s=measured,
            predicted_step_s=predicted,
            alternatives=change.alternatives,
            reason=change.reason,
        )
        if self.context.topology.rank != 0:
            return
        gain = ""
        if measured and predicted:
            gain = (
                f" A step took {measured * 1e3:.0f} ms, {predicted * 1e3:.0f} ms are predicted from here on "
                f"({measured / predicted:.2f}x)."
            )
        frozen = f"{new.num_frozen_layers} of {new.num_layers} layers frozen (before: {old.num_frozen_layers})"
        if new.num_frozen_layers < old.num_frozen_layers:
            count = old.num_frozen_layers - new.num_frozen_layers
            frozen = f"{counted(count, 'layer')} unfrozen, {frozen}"
        moved = ""
        if (old.places, old.boundaries) != (new.places, new.boundaries):
            shapes = " -> ".join(dict.fromkeys((old.shape_in_words, new.shape_in_words)))
            moved = f" {shapes}, moved {num_bytes / 2**20:.1f} MiB in {seconds:.2f} s."
        announce(f"Step {self.context.trainer.state.global_step}: {frozen}; {change.reason}.{moved}{gain}")
