"""Resuming: which checkpoint, under which layout, and where in the data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.data.dispatching import StreamLoader
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
    """The rest of an epoch, in batches of the size that they have now.

    Args:
        epoch: its number, 0 is the first.
        num_done: samples of it that the run was trained with.
        first: number of the batch that comes next, counted so that the epoch ends with its usual last number.
        num_batches: batches that are left.
        num_updates: optimizer steps that are left.
        share: of the epoch.
    """

    epoch: int
    num_done: int
    first: int
    num_batches: int
    num_updates: int
    share: float

    def epoch_at(self, part: float) -> float:
        """The epoch as a number with a fraction, when a `part` of the rest is done."""
        return self.epoch + 1 - (1 - part) * self.share

    def last_step(self, step: int, num_epochs: float | Fraction, updates_per_epoch: int) -> int:
        """Optimizer steps of the whole run, of which `step` are done, if it goes on to the end of its epochs."""
        total = math.ceil(num_epochs * updates_per_epoch)
        return step + max(0, total - ((self.epoch + 1) * updates_per_epoch - self.num_updates))

    def num_epochs(self, step: int, max_steps: int, updates_per_epoch: int) -> int:
        """Epochs that a run begins until it has done `max_steps` steps."""
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
    """The rest of the epoch in which a run was saved; None if Trainer's count of steps leads to the same place.

    None also where no batch is ever full.

    Args:
        place: `epoch` and `samples`, those of it that were done.
        step: optimizer steps that were done.
        num_samples: of an epoch.
        batch_size: samples of a batch over all replicas.
        drops_last: whether a last batch that is not full is left out.
        accumulation: batches of an optimizer step.
        skips: whether the samples that were done are skipped; else the epoch begins anew.
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
    """A run that goes on: to the bit under the same layout, or elsewhere.

    Args:
        folder: the checkpoint.
        state: its `state.json`.
        description: what this run says of itself.
    """

    def __init__(self, folder: str, state: dict[str, Any], description: RunDescription) -> None:
        self.folder = folder
        self.state = state
        self.description = description
        self.args: PipeTransformerArguments = description.trainer.args
        self.is_plain = state["layout"] is None
        """Whether it was saved by plain Trainer."""
        self.is_elsewhere = self.is_plain
        """Whether the layout is not the one that it was saved under; known when the layout is."""
        self.remainder: Remainder | None = None
        """Of the epoch; None where Trainer's count of steps leads to the right place."""
        self._replanned: Layout | None = None

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state["step"])

    @property
    def place(self) -> dict[str, Any] | None:
        """Where the run was in its data; None where the loader was the user's own."""
        found: dict[str, Any] | None = self.state["place"]
        return found

    @property
    def layout(self) -> Layout:
        """The layout in force in the last step."""
        return Layout.from_event(self.state["layout"])

    def choose_layout(
        self, start_up: StartUp, plan: Mapping[int, Layout] | None, world_size: int, policy: FreezePolicy
    ) -> Layout:
        """The layout in force when the checkpoint was saved: it hangs on measured times and is not planned anew.

        Unless it does not fit the processes or the settings of this run: then as many layers stay frozen. `plan` are
        the layouts by step, if they are replayed; else `policy` decides what freezes and thaws.
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
        # A run may replay a plan without the plan's cache.
        with_cache = replace(planned, cache_level=layout.cache_level, fresh_share=layout.fresh_share)
        is_as_planned = with_cache == layout
        if planned.num_frozen_layers != layout.num_frozen_layers or not (is_as_planned or self.is_elsewhere):
            raise ValueError(
                f"layout_plan={self.args.layout_plan!r} has before step {self.step}: {planned}; boundaries "
                f"{planned.boundaries}. {self.folder!r} was saved under {layout}; boundaries {layout.boundaries}. "
                "Resume with the plan of the run that was saved."
            )
        if self.is_elsewhere and plan is None:
            if policy.may_thaw:
                # What fits now may be too short for what is thawed later.
                self._replanned = start_up.plans.layout(batch_size)
            return start_up.plans.layout(batch_size, layout.num_frozen_layers)
        return planned if self.is_elsewhere else layout

    def _is_still_asked_for(self, layout: Layout, plans: RunPlanner, world_size: int) -> bool:
        """Whether the layout of the run that was saved may stay: the same processes and wishes, and it fits."""
        before, now = self.state["arguments"], self.description.fields["arguments"]
        return (
            layout.pipeline_size * layout.num_replicas == world_size
            and set(layout.boundaries) <= set(plans.probe.structure.cut_positions())
            and all(before.get(name) == now[name] for name in _LAYOUT_ARGUMENTS)
            and (layout.pipeline_size > plans.unfit or layout.pipeline_size == self.args.pipeline_size)
        )

    @property
    def first_layout(self) -> Layout | None:
        """The layout under which the run began, or would have begun; None if it begins anew under the present one."""
        return self._replanned if self.is_elsewhere else Layout.from_event(self.state["first_layout"])

    @property
    def has_same_policy(self) -> bool:
        """Whether the freeze policy is of the class of the run that was saved, whose memory it takes up."""
        own = self.description.fields["policy_class"]
        return bool(self.state.get("policy_class", own) == own)

    @property
    def known_microbatches(self) -> dict[tuple[int, int], int] | None:
        """What the run that was saved had found for M, by K and V; None where it is looked for anew."""
        if self.is_elsewhere:
            return None
        return {(k, v): m for k, v, m in self.state["decisions"]["known_microbatches"]}

    def counts(self, values: tuple[Any, ...], loader: Any, num_train_epochs: float | Fraction) -> tuple[Any, ...]:
        """What `Trainer.set_initial_training_values` gives, for a run that goes on with batches of another size.

        Args:
            values: that it gave.
            loader: of the run.
            num_train_epochs: of the whole run, unless `max_steps` says how long it is.
        """
        args, place = self.args, self.place
        if place is None or not isinstance(loader, PipelineLoader):
            return values
        if isinstance(loader, StreamLoader):
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
    """Whether the checkpoint `where`, or the newest one if that is True, was saved by a pipeline."""
    folder = checkpoint.newest(output_dir) if where is True else where
    return bool(folder) and os.path.isdir(os.path.join(str(folder), checkpoint.STATE_FOLDER))


def find_for_trainer(output_dir: str, needs_weights: bool) -> tuple[str | None, bool]:
    """The newest whole checkpoint for a run that is left to Trainer.

    Args:
        output_dir: the run's folder.
        needs_weights: see `check_trainers`.

    Returns:
        The folder, None if there is no checkpoint; and whether a pipeline saved it, which looks at it itself.

    Raises:
        ValueError: there are checkpoints, and none is whole; or one cannot be read.
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
    """What to go on from: the checkpoint `where`, the newest sound one if that is True. A collective call.

    Raises:
        ValueError: on every rank alike: there is no such checkpoint, it is not complete, or of another run.
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
    """The layouts of an earlier run, by step; None if the user does not want them again. A collective call.

    Raises:
        ValueError: they are of another model, another number of processes or another schedule.
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
