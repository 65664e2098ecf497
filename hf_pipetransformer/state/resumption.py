"""Resuming a run: which checkpoint, under which layout, and at which position in the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from accelerate import skip_first_batches

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.rng import set_random_state
from hf_pipetransformer.data.sampler import Position
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.events import read_layouts
from hf_pipetransformer.schedules.json_values import as_json, read_as
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.plain_checkpoint import check_trainers, is_plain, read_plain_scheduler, read_progress
from hf_pipetransformer.state.run_state import RankState, RunDescription, RunState, check_same_run


if TYPE_CHECKING:
    from hf_pipetransformer.freeze.policy import FreezePolicy
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.startup.planner import RunPlanner
    from hf_pipetransformer.state.saving import Checkpoints


_LAYOUT_ARGUMENTS = (
    "pipeline_parallel_size", "pipeline_parallel_num_microbatches", "pipeline_schedule", "pipeline_chunks",
)  # fmt: skip


class Resumption:
    """Run that continues from a checkpoint: bit-identical under the same layout, otherwise under a new one.

    Args:
        step, epoch, place: how far it was; all that is known if plain Trainer saved the checkpoint.
        saved: its state, if a pipeline did.
    """

    def __init__(
        self,
        folder: str,
        description: RunDescription,
        step: int,
        epoch: float | None,
        place: Position | None,
        saved: RunState | None,
    ) -> None:
        self.folder = folder
        self.description = description
        self.args = description.run.args
        self.step = step
        self.epoch = epoch
        self.place = place
        self.saved = saved
        self.is_plain = saved is None
        """True if plain Trainer saved the checkpoint."""
        self.is_elsewhere = self.is_plain
        """True if the layout differs from the saved one; final after `choose_layout`."""
        self.start: Position | None = None
        """Where the data go on; None if only Trainer's own arithmetic on the number of steps tells."""
        self.is_counted = True
        """True if Trainer's arithmetic finds the same position."""
        self.parts: Checkpoints
        """Parts of the training that goes on."""
        self.numbers: RankState
        """State of this rank alone that was saved."""
        self._are_set = False
        self._skipped: tuple[int, int] | None = None
        """Batches of the epoch that are left out, and all of its batches; None at its beginning."""
        self.first_layout = None if saved is None else saved.first_layout
        """Layout that the run began under, or would have begun under; None if that is the current one."""

    @property
    def state(self) -> RunState:
        """State that a pipeline saved; there is none if plain Trainer saved the checkpoint."""
        assert self.saved is not None
        return self.saved

    def choose_layout(
        self, plans: RunPlanner, plan: Mapping[int, Layout] | None, world_size: int, policy: FreezePolicy
    ) -> Layout:
        """Return the saved layout or, if that does not fit this run, a new one that freezes the same number of layers.

        A fitting layout is never planned again, since plans depend on measured times. `plan` has replayed layouts by
        step; None lets `policy` decide what freezes and unfreezes.
        """
        if self.is_plain:
            return plans.layout() if plan is None else plan[0]
        layout, step, structure = self.state.layout, self.state.step, plans.probe.structure
        if layout.num_layers != structure.num_layers:
            raise ValueError(
                f"{self.folder!r} has {layout.num_layers} layers, expected {structure.num_layers}: pass the same "
                "splitter as in the run that was saved."
            )
        self.is_elsewhere = not self._is_still_asked_for(layout, plans, world_size)
        if self.is_elsewhere:
            # A layout that fits the frozen model may have too few stages for what unfreezes later.
            self.first_layout = plans.layout() if plan is None and policy.may_unfreeze else None
        # A checkpoint comes before the change that is due at its step, so the layout is that of the steps before.
        planned = layout if plan is None else plan[max(start for start in plan if start < step)]
        # A plan may be replayed without the activation cache it was recorded with.
        is_as_planned = replace(planned, cache_level=layout.cache_level) == layout
        if planned.num_frozen_layers != layout.num_frozen_layers or not (is_as_planned or self.is_elsewhere):
            raise ValueError(
                f"layout_plan={self.args.layout_plan!r} has before step {step}: {planned}; boundaries "
                f"{planned.boundaries}. {self.folder!r} was saved under {layout}; boundaries {layout.boundaries}. "
                "Resume with the plan of the run that was saved."
            )
        if self.is_elsewhere and plan is None:
            return plans.layout(layout.num_frozen_layers)
        return planned if self.is_elsewhere else layout

    def _is_still_asked_for(self, layout: Layout, plans: RunPlanner, world_size: int) -> bool:
        """Return True if the saved layout still fits: same processes, same options, its nodes, its memory."""
        before, now = self.state.arguments, self.description.identity.arguments
        spans_nodes = layout.pipeline_size > plans.topology.local_world_size
        return (
            layout.pipeline_size * layout.num_replicas == world_size
            and layout.pipeline_size in plans.topology.pipeline_sizes
            # The store of one node cannot serve stages on others.
            and not (spans_nodes and layout.cache_level)
            and set(layout.boundaries) <= set(plans.probe.structure.cut_positions())
            and all(before.get(name) == now[name] for name in _LAYOUT_ARGUMENTS)
            # What ran out of memory is not tried again, unless the user asks for it by number.
            and (layout.pipeline_size > plans.unfit or layout.pipeline_size == self.args.pipeline_size)
        )

    def sums_in_float32(self, plans: RunPlanner, layout: Layout) -> bool:
        """Return True to add the gradients of half-precision weights in float32: as saved, if the layout is too."""
        planned = plans.sums_in_float32(layout)
        asked = self.description.identity.arguments["pipeline_gradient_dtype"]
        if self.is_plain or {asked, self.state.arguments["pipeline_gradient_dtype"]} != {"auto"}:
            return planned
        saved = self.state.sums_in_float32
        # The same layout goes on to the bit, which takes the same precision of its sums.
        if not self.is_elsewhere:
            return saved
        if planned != saved and plans.topology.rank == 0:
            how = "float32" if planned else "the precision of the weights"
            logger.warning(
                f"pipeline_gradient_dtype='auto': gradients are added in {how} from here on, which they were not in "
                "the run that was saved; its layout does not fit this run. Set the option to fix it."
            )
        return planned

    def saved_head_slices(
        self, plans: RunPlanner, world_size: int, unfit: Callable[[RunPlanner], int]
    ) -> RunPlanner | None:
        """Return the planner with the saved slices of the head if the saved layout goes on with them, else None.

        Like the layout, it is not chosen again while it fits, since the choice depends on measured times.
        `unfit` returns the largest pipeline length that ran out of memory with the slices of a planner.
        """
        number = None if self.is_plain else self.state.arguments.get("pipeline_head_slices")
        if not isinstance(number, int) or (number > 1 and plans.why_whole_head is not None):
            return None
        sliced = replace(plans, head_slices=number)
        sliced = replace(sliced, unfit=unfit(sliced))
        return sliced if self._is_still_asked_for(self.state.layout, sliced, world_size) else None

    def compare_head_slices(self, number: int) -> None:
        """Warn if the run has chosen another number of slices of the head than it was saved with."""
        saved = None if self.is_plain else self.state.arguments.get("pipeline_head_slices")
        if saved not in (None, number):
            logger.warning(
                f"pipeline_head_slices='auto': {number} from here on, {saved} in the run that was saved. Losses and "
                f"gradients are the same but for rounding; pipeline_head_slices={saved} keeps their bits."
            )

    @property
    def known_microbatches(self) -> dict[tuple[int, int], int] | None:
        """Saved best number of micro-batches M, by stages K and chunks V; None if it must be measured again."""
        saved = None if self.is_elsewhere else self.state.decisions["known_microbatches"]
        return None if saved is None else {(k, v): m for k, v, m in saved}

    def counts(self, values: tuple[Any, ...], loader: Any, num_train_epochs: float | Fraction) -> tuple[Any, ...]:
        """Adjust the result of `Trainer.set_initial_training_values` for batches of another size."""
        args, step, place = self.args, self.step, self.place
        # Of a loader of the user the position is not known: Trainer counts its batches.
        if place is None or not isinstance(loader, PipelineLoader):
            return values
        order, accumulation = loader.order, args.gradient_accumulation_steps
        if order is None:
            before, now = place.global_batch, loader.total_batch_size
            if before != now:
                raise ValueError(
                    f"{self.folder!r} was saved with {before} samples a batch over all replicas, expected {now}: a "
                    "data set without indices goes on in batches of the same size. Change per_device_train_batch_size "
                    "so that its product with the number of processes stays the same."
                )
            return values
        skips, (num_epochs, updates, *others, max_steps) = not args.ignore_data_skip, values
        start = self.start = place.going_on(order, skips)
        self.is_counted = start.is_counted(step, order, accumulation, skips)
        if self.is_counted:
            return values
        in_epoch = math.ceil((len(order) - start.first) / accumulation)
        # max_steps is fixed, and the epochs follow from it; otherwise the steps follow from the epochs.
        if args.max_steps > 0:
            num_epochs = start.epoch + 1 + math.ceil(max(0, max_steps - step - in_epoch) / updates)
        else:
            after = math.ceil(num_train_epochs * updates) - (start.epoch + 1) * updates
            max_steps = step + max(0, in_epoch + after)
        return num_epochs, updates, *others, max_steps

    # ---- the epoch that the run goes on in ----

    def begin_epoch(self, arguments: dict[str, Any]) -> bool:
        """Adapt the `arguments` of Trainer's loop over the epoch to what is left of it; return False if nothing is."""
        run, loader, first = self.description.run, self.parts.loader, arguments["steps_trained_in_current_epoch"]
        if run.state.global_step >= run.state.max_steps:
            # Trainer's loop checks for the end only after a step, so it would run one too many.
            self.set_random_numbers()
            run.control.should_training_stop = True
            return False
        if loader is not None:
            loader.starting_at(self._start_of(loader, first))
        elif first:
            arguments["train_dataloader"] = skip_first_batches(arguments["train_dataloader"], first)
        if first:
            self._skipped = first, arguments["steps_in_epoch"]
            left = arguments["steps_in_epoch"] - first
            updates = math.ceil(left / run.args.gradient_accumulation_steps)
            arguments |= {"steps_in_epoch": left, "num_update_steps_per_epoch": updates}
        # Within an epoch, what its beginning draws was drawn before the checkpoint.
        if not (first and self.is_counted):
            self.set_random_numbers()
        return True

    def _start_of(self, loader: PipelineLoader, num_done: int) -> Position:
        """Return where the loader begins; `num_done` batches are done as Trainer counts."""
        numbers, start, size = self.numbers, self.start, loader.total_batch_size
        if start is None:
            # Without a known epoch length, Trainer counts from the first step of the run; the saved position is right.
            first = numbers.position if num_done and numbers.position is not None else num_done
            start = Position(0, first * size, size, None, None, None, first)
        order_state = numbers.order if self.is_counted or start == self.place else None
        # What was read ahead were batches of the same size.
        ahead = numbers.ahead if self.is_counted and start.samples else None
        return replace(start, order_state=order_state, ahead=ahead)

    def set_random_numbers(self) -> None:
        """Restore this rank's RNG state, once."""
        if self._are_set:
            return
        self._are_set = True
        set_random_state(*self.numbers.own, self.args.device)
        # Only where several ranks emulate one process; one process has just got these states as its own.
        shared = self.parts.pipeline.shared_rng
        if shared is not None and self.numbers.shared is not None:
            shared.states = self.numbers.shared

    def correct_epoch(self) -> None:
        """Correct Trainer's epoch fraction after a step: it counts the batches that are left as a whole epoch."""
        if self._skipped is not None:
            state, epoch, (first, num_batches) = self.description.run.state, self.parts.epoch, self._skipped
            num_done = first + round((state.epoch - epoch) * (num_batches - first))
            state.epoch = epoch + num_done / num_batches


# ---- finding a checkpoint ----


def is_of_pipeline(where: str | bool | None, output_dir: str) -> bool:
    """Return True if a pipeline saved the checkpoint `where`, or the newest one if `where` is True."""
    folders = [where] if where else []
    if where is True:
        folders = [folder for _step, folder in checkpoint.numbered_checkpoints(output_dir)[-1:]]
    return any(checkpoint.has_state(str(folder)) for folder in folders)


def find_for_trainer(output_dir: str, needs_weights: bool) -> tuple[str | None, bool]:
    """Find the newest whole checkpoint, or None, for a run that Trainer may take, and whether a pipeline saved it.

    A checkpoint of a pipeline is returned unchecked: `find_resumption` verifies it. Raises ValueError if there are
    checkpoints, but none is whole, or one cannot be read.
    """

    def read(folder: str) -> None:
        if not checkpoint.has_state(folder):
            check_trainers(folder, needs_weights)

    folder, reasons = checkpoint.newest_verified(output_dir, read)
    is_pipelines = folder is not None and checkpoint.has_state(folder)
    if reasons and not is_pipelines:
        _report_unsound(output_dir, folder, reasons)
    return folder, is_pipelines


@contextmanager
def resumed_by_trainer(folder: str, args: PipeTransformerArguments, makes_optimizer: bool) -> Iterator[None]:
    """Wrap a training that Trainer resumes; say on rank 0 which learning rate it goes on with, if that is another one.

    Args:
        makes_optimizer: the optimizer is Trainer's, with the learning rate of the arguments.

    Raises:
        ValueError: the run trains other parameters than the one that was saved.
    """
    if makes_optimizer and args.process_index == 0 and (text := _other_learning_rate(folder, args)):
        logger.warning(f"The run goes on with other settings than it was saved with: {text}")
    try:
        yield
    except ValueError as error:
        # torch's words for an optimizer that another one's state does not fit.
        if "loaded state dict" not in str(error):
            raise
        raise ValueError(
            f"{folder!r} holds an optimizer of other parameters than this run trains ({error}). Freeze the same ones "
            f"as in the run that was saved, or start a new run from its weights: `from_pretrained({folder!r})`."
        ) from error


def _other_learning_rate(folder: str, args: PipeTransformerArguments) -> str:
    """Say which learning rate plain Trainer has saved; empty if it is that of the arguments, or not known."""
    try:
        rates = set(read_plain_scheduler(folder)["base_lrs"])
    except (ValueError, KeyError, TypeError):
        return ""
    if len(rates) != 1 or rates == {args.learning_rate}:
        return ""
    return (
        f"learning_rate={args.learning_rate} (was {rates.pop()}). As with Trainer, learning_rate of the checkpoint "
        "stays in force."
    )


def find_resumption(where: str | bool, topology: Topology, description: RunDescription) -> Resumption:
    """Find the checkpoint to resume from: `where`, or the newest sound one if True. Collective: call on every rank.

    Raises:
        ValueError: on every rank, if there is no such checkpoint, it is incomplete, or it is of another run.
    """
    # Rank 0 alone reads and hashes the files: the others get what it found as JSON.
    folder, step, epoch, place, state = topology.decide(lambda: _find(where, description))
    state = None if state is None else RunState.from_json(state)
    return Resumption(folder, description, step, epoch, read_as(Position | None, place, "place"), state)


def _find(where: str | bool, description: RunDescription) -> list[Any]:
    """Return the folder, and what a `Resumption` knows of the run, as JSON values."""
    args = description.run.args

    # Once: reading a checkpoint hashes its files, which may be large.
    @cache
    def read(folder: str) -> tuple[Any, ...]:
        if is_plain(folder):
            return *read_progress(folder, description.data["num_samples"], args), None
        state = checkpoint.read_state(folder)
        return state.step, state.epoch, state.place, state

    if where is True:
        found, reasons = checkpoint.newest_verified(args.output_dir, read)
        folder = _report_unsound(args.output_dir, found, reasons)
    else:
        folder = str(where)
        # First, as a file without permission would be reported as damaged.
        checkpoint.check_readable(folder)
        try:
            read(folder)
        except ValueError as error:
            raise ValueError(
                f"{error} Name another checkpoint in resume_from_checkpoint, or take the newest whole one with True."
            ) from error
    *_progress, state = read(folder)
    if state is not None:
        warning = check_same_run(folder, state, description.identity, description.data)
    else:
        warning = (
            f"{folder!r} was saved by plain Trainer: whether its files are whole and its data are the same is not "
            "known. The run goes on with its weights, optimizer and learning rates. "
            f"{_other_learning_rate(folder, args)}"
        ).rstrip()
    if warning is not None:
        logger.warning(warning)
    return [folder, *map(as_json, read(folder))]


def _report_unsound(output_dir: str, found: str | None, reasons: list[str]) -> str:
    """Warn of the checkpoints that were passed over for `found`, and return it; refuse if there is none."""
    if found is None:
        raise ValueError(
            f"resume_from_checkpoint=True: found no sound checkpoint in output_dir={output_dir!r}, expected a "
            f"checkpoint-N of an earlier run. {' '.join(reasons)}".strip()
        )
    for reason in reasons:
        logger.warning(f"Passed over on the way to {found!r}: {reason}")
    return found


def read_plan(plans: RunPlanner) -> dict[int, Layout] | None:
    """Read the layouts of an earlier run, by step; None without `layout_plan`. Collective: call on every rank.

    Raises:
        ValueError: the layouts are for another model, number of processes or schedule.
    """
    args, structure, topology, path = plans.args, plans.probe.structure, plans.topology, plans.args.layout_plan
    if path is None:
        return None
    layouts = read_layouts(path)
    # Each rank reads the file by itself, and on another node it may be another one.
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
        if layout.pipeline_size not in topology.pipeline_sizes:
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} pipelines of {layout.pipeline_size} ranks, and these "
                f"nodes allow {topology.pipeline_sizes}. Replay it on nodes of as many processes."
            )
        if layout.pipeline_size > topology.local_world_size:
            layouts[step] = replace(layout, cache_level=0)  # No store serves several nodes.
        runs = plans.schedule
        is_replaced = plans.replaced_by is not None and layout.schedule == args.pipeline_schedule
        if is_replaced and layout.num_chunks == 1:
            layouts[step] = replace(layouts[step], schedule=runs)
        elif layout.schedule != runs:
            remedy = (
                f"all forwards of {layout.num_chunks} stages a rank cannot come first, which the loss of the whole "
                "batch takes. Set pipeline_loss='parts'."
                if is_replaced
                else f"set pipeline_schedule={layout.schedule!r}."
            )
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} a layout under {layout.schedule!r}, but "
                f"pipeline_schedule={runs!r}: {remedy}"
            )
    if min(layouts) != 0:
        raise ValueError(f"layout_plan={path!r} begins at step {min(layouts)}: expected a plan from step 0 on.")
    return layouts
