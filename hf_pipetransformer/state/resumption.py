"""Resuming a run: which checkpoint, under which layout, and at which position in the data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.freeze.policy import FreezePolicy
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.events import read_layouts
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.startup.planner import RunPlanner, StartUp
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.description import RunDescription, check_same_run
from hf_pipetransformer.state.plain_checkpoint import check_trainers, is_plain, read_plain_state


@dataclass(frozen=True)
class Remainder:
    """Rest of an epoch, in batches of the current size.

    Args:
        num_done: samples of the epoch that were trained before the checkpoint.
        first: index of the next batch, chosen such that the epoch's last batch keeps its usual index.
        share: fraction of the epoch left, in (0, 1].
    """

    epoch: int
    num_done: int
    first: int
    num_batches: int
    num_updates: int
    share: float

    def epoch_at(self, part: float) -> float:
        """Return the fractional epoch when the fraction `part` of the rest is done."""
        return self.epoch + 1 - (1 - part) * self.share

    def last_step(self, step: int, num_epochs: float | Fraction, updates_per_epoch: int) -> int:
        """Return the total number of optimizer steps of the run, `step` of which are done."""
        total = math.ceil(num_epochs * updates_per_epoch)
        return step + max(0, total - ((self.epoch + 1) * updates_per_epoch - self.num_updates))

    def num_epochs(self, step: int, max_steps: int, updates_per_epoch: int) -> int:
        """Return the number of epochs that the run has entered when it reaches `max_steps`."""
        return self.epoch + 1 + math.ceil(max(0, max_steps - step - self.num_updates) / updates_per_epoch)


def find_remainder(
    place: Mapping[str, Any],
    step: int,
    num_samples: int,
    batch_size: int,
    drops_last: bool,
    accumulation: int,
    skips: bool,
) -> Remainder | None:
    """Compute the rest of the epoch that a checkpoint was saved in.

    None if Trainer's own step arithmetic finds the same position, or if no batch is ever full.

    Args:
        place: `epoch`, and the number of its `samples` that were done.
        batch_size: samples per batch, over all replicas.
        skips: skip the samples that were done; otherwise the epoch starts over.
    """

    def batches_of(count: int) -> int:
        return count // batch_size if drops_last else math.ceil(count / batch_size)

    in_epoch = batches_of(num_samples)
    if not in_epoch:
        return None
    updates_per_epoch = max(1, math.ceil(in_epoch / accumulation))
    epoch, num_done = place["epoch"], place["samples"] if skips else 0
    left = batches_of(num_samples - num_done)
    if not left:
        epoch, num_done, left = epoch + 1, 0, in_epoch
    first = in_epoch - left
    trainers_epoch, updates = divmod(step, updates_per_epoch)
    trainers_first = updates * accumulation if skips else 0
    if (trainers_epoch, trainers_first) == (epoch, first) and num_done == first * batch_size:
        return None
    return Remainder(epoch, num_done, first, left, math.ceil(left / accumulation), left / in_epoch)


_LAYOUT_ARGUMENTS = (
    *("pipeline_parallel_size", "pipeline_parallel_num_microbatches", "pipeline_schedule", "pipeline_chunks"),
)


class Resumption:
    """Run that continues from a checkpoint: bit-identical under the same layout, otherwise under a new one."""

    def __init__(self, folder: str, state: dict[str, Any], description: RunDescription) -> None:
        self.folder = folder
        self.state = state
        self.description = description
        self.args: PipeTransformerArguments = description.trainer.args
        self.is_plain = state["layout"] is None
        """True if plain Trainer saved the checkpoint."""
        self.is_elsewhere = self.is_plain
        """True if the layout differs from the saved one; final after `choose_layout`."""
        self.remainder: Remainder | None = None
        """Rest of the current epoch; None if Trainer's own step arithmetic finds the position."""
        self._replanned: Layout | None = None

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return int(self.state["step"])

    @property
    def place(self) -> dict[str, Any] | None:
        """Position of the run in its data; None if the loader was the user's own."""
        found: dict[str, Any] | None = self.state["place"]
        return found

    @property
    def layout(self) -> Layout:
        """Layout of the last step before the checkpoint."""
        return Layout.from_event(self.state["layout"])

    def choose_layout(
        self, start_up: StartUp, plan: Mapping[int, Layout] | None, world_size: int, policy: FreezePolicy
    ) -> Layout:
        """Return the saved layout or, if that does not fit this run, a new one that freezes the same number of layers.

        A fitting layout is never planned again, since plans depend on measured times. `plan` has replayed layouts by
        step; None lets `policy` decide what freezes and unfreezes.
        """
        batch_size = self.args.train_samples_per_device
        if self.is_plain:
            return start_up.plans.layout(batch_size) if plan is None else plan[0]
        layout, structure = self.layout, start_up.probe.structure
        if layout.num_layers != structure.num_layers:
            raise ValueError(
                f"{self.folder!r} has {layout.num_layers} layers, expected {structure.num_layers}: pass the same "
                "splitter as in the run that was saved."
            )
        self.is_elsewhere = not self._is_still_asked_for(layout, start_up.plans, world_size)
        planned = layout if plan is None else plan[max(start for start in plan if start < self.step)]
        # A plan may be replayed without the activation cache it was recorded with.
        with_cache = replace(planned, cache_level=layout.cache_level, fresh_share=layout.fresh_share)
        is_as_planned = with_cache == layout
        if planned.num_frozen_layers != layout.num_frozen_layers or not (is_as_planned or self.is_elsewhere):
            raise ValueError(
                f"layout_plan={self.args.layout_plan!r} has before step {self.step}: {planned}; boundaries "
                f"{planned.boundaries}. {self.folder!r} was saved under {layout}; boundaries {layout.boundaries}. "
                "Resume with the plan of the run that was saved."
            )
        if self.is_elsewhere and plan is None:
            if policy.may_unfreeze:
                # A layout that fits the frozen model may have too few stages for what unfreezes later.
                self._replanned = start_up.plans.layout(batch_size)
            return start_up.plans.layout(batch_size, layout.num_frozen_layers)
        return planned if self.is_elsewhere else layout

    def _is_still_asked_for(self, layout: Layout, plans: RunPlanner, world_size: int) -> bool:
        """Return True if the saved layout still fits: same number of processes, same layout options, enough memory."""
        before, now = self.state["arguments"], self.description.fields["arguments"]
        return (
            layout.pipeline_size * layout.num_replicas == world_size
            and set(layout.boundaries) <= set(plans.probe.structure.cut_positions())
            and all(before.get(name) == now[name] for name in _LAYOUT_ARGUMENTS)
            and (layout.pipeline_size > plans.unfit or layout.pipeline_size == self.args.pipeline_size)
        )

    @property
    def first_layout(self) -> Layout | None:
        """Layout that the run began under, or would have begun under; None if that is the current one."""
        return self._replanned if self.is_elsewhere else Layout.from_event(self.state["first_layout"])

    @property
    def has_same_policy(self) -> bool:
        """True if the freeze policy has the class of the saved run's policy, whose state it can load."""
        own = self.description.fields["policy_class"]
        return bool(self.state.get("policy_class", own) == own)

    @property
    def known_microbatches(self) -> dict[tuple[int, int], int] | None:
        """Saved best number of micro-batches M, by stages K and chunks V; None if it must be measured again."""
        if self.is_elsewhere:
            return None
        return {(k, v): m for k, v, m in self.state["decisions"]["known_microbatches"]}

    def counts(self, values: tuple[Any, ...], loader: Any, num_train_epochs: float | Fraction) -> tuple[Any, ...]:
        """Adjust the result of `Trainer.set_initial_training_values` for batches of another size."""
        args, place = self.args, self.place
        if place is None or not isinstance(loader, PipelineLoader):
            return values
        if loader.is_stream:
            self._check_same_batches(place["global_batch"], loader)
            return values
        num_epochs, updates, num_examples, num_samples, total, steps_in_epoch, max_steps = values
        rest = self.remainder = find_remainder(
            place,
            self.step,
            loader.num_samples,
            loader.total_batch_size,
            args.dataloader_drop_last,
            args.gradient_accumulation_steps,
            skips=not args.ignore_data_skip,
        )
        if rest is not None and args.max_steps > 0:
            num_epochs = rest.num_epochs(self.step, max_steps, updates)
        elif rest is not None:
            max_steps = rest.last_step(self.step, num_train_epochs, updates)
        return num_epochs, updates, num_examples, num_samples, total, steps_in_epoch, max_steps

    def _check_same_batches(self, before: int, loader: PipelineLoader) -> None:
        now = loader.total_batch_size
        if before != now:
            raise ValueError(
                f"{self.folder!r} was saved with {before} samples a batch over all replicas, expected {now}: a data "
                "set without indices goes on in batches of the same size. Change per_device_train_batch_size so that "
                "its product with the number of processes stays the same."
            )


def is_of_pipeline(where: str | bool | None, output_dir: str) -> bool:
    """Return True if a pipeline saved the checkpoint `where`, or the newest one if `where` is True."""
    folder = checkpoint.newest(output_dir) if where is True else where
    return bool(folder) and os.path.isdir(os.path.join(str(folder), checkpoint.STATE_FOLDER))


def find_for_trainer(output_dir: str, needs_weights: bool) -> tuple[str | None, bool]:
    """Find the newest whole checkpoint, or None, for a run that Trainer may take, and whether a pipeline saved it.

    A checkpoint of a pipeline is returned unchecked: `find_resumption` verifies it.

    Raises:
        ValueError: there are checkpoints, but none is whole; or one cannot be read.
    """
    reasons: list[str] = []
    for folder in checkpoint.newest_first(output_dir):
        checkpoint.check_readable(folder)
        if os.path.isdir(os.path.join(folder, checkpoint.STATE_FOLDER)):
            return folder, True
        try:
            check_trainers(folder, needs_weights)
        except ValueError as error:
            reasons.append(str(error))
        else:
            _tell_passed_over(folder, reasons)
            return folder, False
    if reasons:
        raise ValueError(_no_sound_checkpoint(output_dir, reasons))
    return None, False


def _tell_passed_over(folder: str, reasons: list[str]) -> None:
    for reason in reasons:
        logger.warning(f"Passed over on the way to {folder!r}: {reason}")


def _no_sound_checkpoint(output_dir: str, reasons: list[str]) -> str:
    return (
        f"resume_from_checkpoint=True: found no sound checkpoint in output_dir={output_dir!r}, expected a "
        f"checkpoint-N of an earlier run. {' '.join(reasons)}"
    ).strip()


def find_resumption(where: str | bool, topology: Topology, description: RunDescription) -> Resumption:
    """Find the checkpoint to resume from: `where`, or the newest sound one if True. Collective: call on every rank.

    Raises:
        ValueError: on every rank, if there is no such checkpoint, it is incomplete, or it is of another run.
    """
    folder, state = topology.decide(lambda: list(_read(where, description)))
    return Resumption(folder, state, description)


def _read(where: str | bool, description: RunDescription) -> tuple[str, dict[str, Any]]:
    folder, state = _read_newest(description) if where is True else (str(where), _read_state(str(where), description))
    if state["layout"] is None:
        logger.warning(
            f"{folder!r} was saved by plain Trainer: whether its files are whole and its data are the same is not "
            "known. The run goes on with its weights, optimizer and learning rates."
        )
        return folder, state
    told = check_same_run(folder, state, {**description.fields, "data": description.data()})
    if told is not None:
        logger.warning(told)
    return folder, state


def _read_state(folder: str, description: RunDescription) -> dict[str, Any]:
    checkpoint.check_readable(folder)
    if not is_plain(folder):
        return checkpoint.read_state(folder)
    args = description.trainer.args
    num_samples = description.data()["num_samples"]
    return read_plain_state(folder, num_samples, args.dataloader_drop_last, args.splits_batches)


def _read_newest(description: RunDescription) -> tuple[str, dict[str, Any]]:
    output_dir, states = description.trainer.args.output_dir, {}

    def read(folder: str) -> None:
        states[folder] = _read_state(folder, description)

    folder, reasons = checkpoint.latest_sound(output_dir, read)
    if folder is None:
        raise ValueError(_no_sound_checkpoint(output_dir, reasons))
    _tell_passed_over(folder, reasons)
    return folder, states[folder]


def read_plan(args: PipeTransformerArguments, structure: Structure, topology: Topology) -> dict[int, Layout] | None:
    """Read the layouts of an earlier run, by step; None without `layout_plan`. Collective: call on every rank.

    Raises:
        ValueError: the layouts are for another model, number of processes or schedule.
    """
    path = args.layout_plan
    if path is None:
        return None
    layouts = read_layouts(path)
    check_agreement(topology, "layout plans", {f"step {s}": str(layouts[s].as_event()) for s in layouts})
    for step, layout in layouts.items():
        found = (layout.num_layers, layout.pipeline_size * layout.num_replicas)
        expected = (structure.num_layers, topology.world_size)
        on_cuts = set(layout.boundaries) <= set(structure.cut_positions())
        if found != expected or not on_cuts:
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} a layout for {found[0]} layers on {found[1]} "
                f"processes with boundaries {layout.boundaries}: expected {expected[0]} layers on {expected[1]} "
                "processes. Replay a plan with the model and the number of processes that it was made with."
            )
        if layout.schedule != args.pipeline_schedule:
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} a layout under {layout.schedule!r}, but "
                f"pipeline_schedule={args.pipeline_schedule!r}: set pipeline_schedule={layout.schedule!r}."
            )
    if min(layouts) != 0:
        raise ValueError(f"layout_plan={path!r} begins at step {min(layouts)}: expected a plan from step 0 on.")
    return layouts
