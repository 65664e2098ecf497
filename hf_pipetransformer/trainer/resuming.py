"""Going on from a checkpoint: to the bit under the same layout, or elsewhere."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers.trainer as stock
from transformers.trainer_utils import SaveStrategy

from hf_pipetransformer import checkpoint
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.stream import is_stream
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.plain_checkpoint import (
    is_plain,
    read_plain_optimizer,
    read_plain_scheduler,
    read_plain_state,
    set_plain_random_state,
    trainers_groups,
)
from hf_pipetransformer.refusals import check_same_kinds, check_same_run
from hf_pipetransformer.report.events import announce, logger
from hf_pipetransformer.startup import RunPlanner, StartUp, check_agreement
from hf_pipetransformer.trainer.remainder import Remainder, find_remainder
from hf_pipetransformer.trainer.saving import ORDER, POSITION, SHARED, SavingTrainer


_LAYOUT_ARGUMENTS = (
    *("pipeline_parallel_size", "pipeline_parallel_num_microbatches", "pipeline_schedule", "pipeline_chunks"),
)


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on.

    Args:
        folder: the checkpoint.
        state: its `state.json`.
    """

    folder: str
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state["step"])

    @property
    def is_plain(self) -> bool:
        """Whether it was saved by plain Trainer."""
        return self.state["layout"] is None

    @property
    def layout(self) -> Layout:
        """The layout in force in the last of them."""
        return Layout.from_event(self.state["layout"])

    @property
    def first_layout(self) -> Layout:
        """The layout under which the run began."""
        return Layout.from_event(self.state["first_layout"])


class ResumingTrainer(SavingTrainer):
    """Goes on from checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resumption: Resumption | None = None
        self._began_under: Layout | None = None
        self._saved_here: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
        self._is_elsewhere = False
        self._remainder: Remainder | None = None
        self._corrected_epoch: float | None = None

    # ---- which checkpoint, and whether this run may go on from it ----

    @contextmanager
    def _resuming(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Looks for what to go on from before anything is loaded, and gives its folder; None for a fresh start.

        Raises:
            ValueError: on every rank alike: there is no such checkpoint, it is not complete, or of another run.
        """
        where = resume_from_checkpoint or None
        check_agreement(self.topology, "arguments of train()", {"resume_from_checkpoint": str(where)})
        self._check_shared_folder()
        self._run_description = self.topology.decide(self._described_run)
        self._began_under = self._saved_here = self._remainder = self._data_description = None
        self._is_elsewhere = False
        if where is not None:
            self._resumption = Resumption(**self.topology.decide(lambda: self._read_resumption(where)))
        try:
            yield None if self._resumption is None else self._resumption.folder
        finally:
            self._resumption = None

    def _read_resumption(self, where: Any) -> dict[str, Any]:
        if where is True:
            folder, state = self._latest_checkpoint()
        else:
            folder = os.fspath(where)
            state = self._read_checkpoint(folder)
        if state["layout"] is None:
            logger.warning(
                f"{folder!r} was saved by plain Trainer: whether its files are whole and its data are the same is not "
                "known. The run goes on with its weights, optimizer and learning rates."
            )
        else:
            told = check_same_run(folder, state, {**self._run_description, "data": self._described_data()})
            if told is not None:
                logger.warning(told)
        return {"folder": folder, "state": state}

    def _read_checkpoint(self, folder: str) -> dict[str, Any]:
        if not is_plain(folder):
            return checkpoint.read_state(folder)
        num_samples = self._described_data()["num_samples"]
        return read_plain_state(folder, num_samples, self.args.dataloader_drop_last)

    def _latest_checkpoint(self) -> tuple[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = {}

        def read(folder: str) -> None:
            states[folder] = self._read_checkpoint(folder)

        folder, reasons = checkpoint.latest_sound(self.args.output_dir, read)
        if folder is None:
            raise ValueError(
                f"resume_from_checkpoint=True: found no sound checkpoint in output_dir={self.args.output_dir!r}, "
                f"expected a checkpoint-N of an earlier run. {' '.join(reasons)}".strip()
            )
        for reason in reasons:
            logger.warning(f"Passed over on the way to {folder!r}: {reason}")
        return folder, states[folder]

    # ---- taking up what was saved ----

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Called by `Trainer.train` while the model is whole. Trainer's own only warns of weights that it misses."""
        self._refused_alike(lambda: checkpoint.load_weights(model or self.model, resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """As Trainer's, which leaves models as they are that are saved under other names (ViT)."""
        folder = self.state.best_model_checkpoint
        if not checkpoint.has_weights(folder):
            super()._load_best_model()
            return
        logger.info(f"Loading the best model from {folder} (score: {self.state.best_metric}).")
        checkpoint.load_weights(self.model, folder)

    def _first_layout(self, start_up: StartUp) -> Layout:
        """The layout in force when the checkpoint was saved: it hangs on measured times and is not planned anew.

        Unless it does not fit the processes or the settings of this run: then as many layers stay frozen.
        """
        if self._resumption is None or self._resumption.is_plain:
            self._is_elsewhere = self._resumption is not None
            return super()._first_layout(start_up)
        layout, step, plan = self._resumption.layout, self._resumption.step, self._replayed_layouts
        structure = start_up.probe.structure
        if layout.num_layers != structure.num_layers:
            raise ValueError(
                f"{self._resumption.folder!r} has {layout.num_layers} layers, expected {structure.num_layers}: pass "
                "the same splitter as in the run that was saved."
            )
        self._is_elsewhere = not self._is_still_asked_for(layout, start_up.plans)
        planned = plan[max(start for start in plan if start < step)] if plan is not None else layout
        # A run may replay a plan without the plan's cache.
        is_as_planned = replace(planned, cache_level=layout.cache_level) == layout
        if planned.num_frozen_layers != layout.num_frozen_layers or not (is_as_planned or self._is_elsewhere):
            raise ValueError(
                f"layout_plan={self.args.layout_plan!r} has before step {step}: {planned}; boundaries "
                f"{planned.boundaries}. {self._resumption.folder!r} was saved under {layout}; boundaries "
                f"{layout.boundaries}. Resume with the plan of the run that was saved."
            )
        if not self._is_elsewhere:
            return layout
        if plan is not None:
            return planned
        return start_up.plans.layout(self.args.per_device_train_batch_size, layout.num_frozen_layers)

    def _is_still_asked_for(self, layout: Layout, plans: RunPlanner) -> bool:
        """Whether the layout of the run that was saved may stay: the same processes and wishes, and it fits."""
        assert self._resumption is not None
        before, now = self._resumption.state["arguments"], self._run_description["arguments"]
        return (
            layout.pipeline_size * layout.num_replicas == self.topology.world_size
            and set(layout.boundaries) <= set(plans.probe.structure.cut_positions())
            and all(before.get(name) == now[name] for name in _LAYOUT_ARGUMENTS)
            and (layout.pipeline_size > plans.unfit or layout.pipeline_size == self.args.num_stages)
        )

    def _layout_of_first_step(self) -> Layout:
        if self._began_under is None:
            saved = self._resumption
            anew = saved is None or self._is_elsewhere
            self._began_under = super()._layout_of_first_step() if anew or saved is None else saved.first_layout
        return self._began_under

    def _known_microbatches(self, layout: Layout) -> dict[int, int]:
        if self._resumption is None or self._is_elsewhere:
            return super()._known_microbatches(layout)
        # The run that was saved may have found more since.
        known = self._resumption.state["decisions"]["known_microbatches"]
        return {int(num_stages): int(count) for num_stages, count in known.items()}

    def _begin_adapting(self, loader: Any, max_steps: int) -> None:
        super()._begin_adapting(loader, max_steps)
        if self._resumption is not None:
            self._take_up(self._resumption)
        if self.args.save_strategy != SaveStrategy.NO and not self.args.save_only_model:
            # Better said now than at the first checkpoint.
            self._refused_alike(self._check_savable)

    def _take_up(self, saved: Resumption) -> None:
        """Optimizer, schedules, decisions and counts as they were; the model and the layout are so already."""
        assert self._stage is not None and self._controller is not None
        state, stage = saved.state, self._stage
        if saved.is_plain:
            self._take_up_plain(saved)
            return
        self._refused_alike(lambda: check_same_kinds(saved.folder, state, self._kinds()))
        self._refused_alike(lambda: self._take_up_optimizer(saved))
        self.run.seeds.num_starts, self.run.seeds.num_transitions = state["num_starts"], state["num_transitions"]
        self._saved_here = self._refused_alike(lambda: self._random_state_of(saved))
        self.lr_scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        weights = self._refused_alike(lambda: self._weights_at_last_decision(saved))
        self._controller.load_state(state["decisions"], weights, self._is_elsewhere)
        if self.is_world_process_zero():
            announce(f"Resumed from {saved.folder} at step {saved.step}: {stage.layout}.")

    def _take_up_plain(self, saved: Resumption) -> None:
        """Optimizer, schedule and, on one process, random numbers of plain Trainer."""
        assert self._stage is not None and self._optimizer_state is not None
        own, trained, store = self._optimizer_state, self._trained_here(), self._stage.store
        active = [name for name in store.named() if store.is_active(name)]
        groups = trainers_groups(active, self._run_description["decaying"])
        shapes = {name: tuple(parameter.shape) for name, parameter in store.named().items()}
        states, options = self._refused_alike(
            lambda: read_plain_optimizer(saved.folder, groups, shapes, checkpoint.group_options(own.optimizer))
        )
        own.hold(trained, {name: state for name, state in states.items() if name in trained})
        checkpoint.set_group_options(own.optimizer, options)
        self.lr_scheduler.load_state_dict(self._refused_alike(lambda: read_plain_scheduler(saved.folder)))
        if self.topology.world_size > 1 or not self._refused_alike(lambda: set_plain_random_state(saved.folder)):
            self.run.seeds.part(self._stage)
        tensors, values = checkpoint.random_state(self.args.device)
        if self.run.pipeline.shared_generator is not None:
            tensors[SHARED] = self.run.pipeline.shared_generator.get_state()
        self._saved_here = tensors, values | {"unlogged_loss": 0.0, "last_logged_step": saved.step}
        if self.is_world_process_zero():
            announce(f"Resumed from plain Trainer's {saved.folder} at step {saved.step}: {self._stage.layout}.")

    def _take_up_optimizer(self, saved: Resumption) -> None:
        """What this rank trains may lie in the files of any ranks of the run that was saved."""
        assert self._stage is not None and self._optimizer_state is not None
        own, store, trained = self._optimizer_state, self._stage.store, self._trained_here()
        states: dict[str, dict[str, Any]] = {}
        for position in range(saved.layout.pipeline_size):
            name = checkpoint.optimizer_file(position)
            tensors, header = checkpoint.read_part(saved.folder, name, lambda key: key.rpartition("|")[0] in trained)
            strangers = [name for name in header["names"] if not store.is_active(name)]
            if strangers:
                raise ValueError(
                    f"{saved.folder!r} has optimizer state for {strangers[0]} (one of {len(strangers)}), which this "
                    "run does not train: resume with the optimizer of the run that was saved."
                )
            values = {key: value for key, value in header["values"].items() if key.rpartition("|")[0] in trained}
            states |= checkpoint.join_optimizer_state(tensors, values)
        own.hold(trained, states)
        checkpoint.set_group_options(own.optimizer, header["groups"])

    def _weights_at_last_decision(self, saved: Resumption) -> dict[str, torch.Tensor]:
        """Of what this stage trains, as far as the policy of the run that was saved asked for them."""
        found: dict[str, torch.Tensor] = {}
        trained = self._trained_here()
        for position in range(saved.layout.pipeline_size):
            name = checkpoint.weights_file(position)
            if checkpoint.has_part(saved.folder, name):
                found |= checkpoint.read_part(saved.folder, name, trained.__contains__)[0]
        return {name: value.to(self.args.device) for name, value in found.items()}

    def _random_state_of(self, saved: Resumption) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's random numbers as they were; elsewhere new ones, and the order of the samples as it was."""
        assert self._stage is not None
        layout, there = self._stage.layout, saved.layout
        if (layout.pipeline_size, layout.num_replicas) == (there.pipeline_size, there.num_replicas):
            return checkpoint.read_part(saved.folder, checkpoint.random_file(self.topology.rank))
        first, values = checkpoint.read_part(saved.folder, checkpoint.random_file(0))
        # What all ranks draw alike: one process draws it from its only generator.
        common = first.get(SHARED, first["torch"])
        seed = self.args.seed + 1_000_003 * (1 + self.topology.rank) + 7_919 * (1 + saved.step)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        tensors, own_values = checkpoint.random_state(self.args.device)
        tensors |= {SHARED: common} if self.topology.world_size > 1 else {"torch": common}
        if ORDER in first:
            tensors[ORDER] = first[ORDER]
        own_values |= {key: value for key, value in values.items() if key in (POSITION, "last_logged_step")}
        return tensors, own_values | {"unlogged_loss": saved.state["unlogged_loss"]}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Nothing here: `_begin_adapting` does it, when parameters and their groups are known by name."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing here, see above."""

    # ---- going on with the next batch ----

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Trainer's numbers of epochs and steps; they are others if the run goes on with batches of another size."""
        values = super().set_initial_training_values(args, dataloader)
        saved, place = self._resumption, None if self._resumption is None else self._resumption.state["place"]
        if saved is None or place is None or not isinstance(dataloader, PipelineLoader):
            return values
        if is_stream(self.train_dataset):
            self._check_same_batches(saved, dataloader)
            return values
        num_epochs, updates, num_examples, num_samples, total, steps_in_epoch, max_steps = values
        rest = self._remainder = find_remainder(
            place,
            saved.step,
            dataloader.num_samples,
            dataloader.total_batch_size,
            args.dataloader_drop_last,
            args.gradient_accumulation_steps,
            skips=not args.ignore_data_skip,
        )
        if rest is not None and args.max_steps > 0:
            num_epochs = rest.num_epochs(saved.step, max_steps, updates)
        elif rest is not None:
            max_steps = rest.last_step(saved.step, args.num_train_epochs, updates)
        return num_epochs, updates, num_examples, num_samples, total, steps_in_epoch, max_steps

    def _check_same_batches(self, saved: Resumption, loader: PipelineLoader) -> None:
        before, now = saved.state["place"]["global_batch"], loader.total_batch_size
        if before != now:
            raise ValueError(
                f"{saved.folder!r} was saved with {before} samples a batch over all replicas, expected {now}: a data "
                "set without indices goes on in batches of the same size. Change per_device_train_batch_size so that "
                "its product with the number of processes stays the same."
            )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        return place if self._remainder is None else (self._remainder.epoch, 0)

    def _run_epoch(self, **kwargs: Any) -> None:
        self._epoch_index = kwargs["epoch"]
        if self._saved_here is None or kwargs["epoch"] != kwargs["epochs_trained"]:
            super()._run_epoch(**kwargs)
            return
        self._take_up_unlogged_loss()
        if self.state.global_step >= self.state.max_steps:
            # Trainer would take one step more.
            self._load_rng_state(None)
            self.control.should_training_stop = True
            return
        if self._remainder is not None:
            self._begin_remainder(self._remainder, kwargs)
        elif self._train_loader is not None:
            # For an epoch's begin; in the middle Trainer asks for a skip.
            self._train_loader.starting_at(0, self._saved_here[0].get(ORDER))
        with self._skipping_batches():
            super()._run_epoch(**kwargs)

    def _begin_remainder(self, rest: Remainder, kwargs: dict[str, Any]) -> None:
        """To Trainer the rest of the epoch is an epoch."""
        assert self._train_loader is not None and self._resumption is not None and self._saved_here is not None
        place = self._resumption.state["place"]
        is_same_epoch = rest.epoch == place["epoch"] and rest.num_done == place["samples"]
        order = self._saved_here[0].get(ORDER) if is_same_epoch else None
        self._train_loader.starting_at(rest.first, order, rest.num_done, place["group_size"])
        kwargs |= {"steps_in_epoch": rest.num_batches, "num_update_steps_per_epoch": rest.num_updates}

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        rest = self._remainder
        if rest is not None and self._epoch_index == rest.epoch and self.state.epoch != self._corrected_epoch:
            self.state.epoch = self._corrected_epoch = rest.epoch_at(self.state.epoch - rest.epoch)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @contextmanager
    def _skipping_batches(self) -> Iterator[None]:
        """Inside, Trainer's way to skip batches knows `PipelineLoader`.

        Trainer calls a function of accelerate that makes a new loader from what it knows of torch's; there is no
        method to override, so its name in Trainer's module is lent for the one call.
        """
        original = stock.skip_first_batches

        def skip(loader: Any, num_batches: int = 0) -> Any:
            stock.skip_first_batches = original
            if not isinstance(loader, PipelineLoader):
                return original(loader, num_batches)
            assert self._saved_here is not None and self._resumption is not None
            tensors, values = self._saved_here
            place = self._resumption.state["place"] or {}
            # Trainer counts from the first step on where it does not know how long an epoch is.
            position = values.get(POSITION, num_batches)
            return loader.starting_at(position, tensors.get(ORDER), group_size=place.get("group_size"))

        stock.skip_first_batches = skip
        try:
            yield
        finally:
            stock.skip_first_batches = original

    def _between_steps(self) -> None:
        # Trainer restores the generators in the middle of an epoch only after the batches of the first step are
        # fetched, and so undoes what collators drew and what a transition seeded anew.
        if self._train_loader is not None:
            self._load_rng_state(None)
        super()._between_steps()

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        """Restore this rank's random number generators, once: Trainer asks for it at two places."""
        if self._saved_here is not None:
            checkpoint.set_random_state(*self._saved_here, self.args.device)
            if self.run.pipeline.shared_generator is not None:
                self.run.pipeline.shared_generator.set_state(self._saved_here[0][SHARED])
            self._saved_here = None

    def _take_up_unlogged_loss(self) -> None:
        """What has been lost since the last log entry belongs to the next one, not to this call's mean."""
        assert self._saved_here is not None
        values = self._saved_here[1]
        self._tr_loss += values["unlogged_loss"]
        self._globalstep_last_logged = values["last_logged_step"]
        self._total_loss_scalar -= sum(self.topology.gather(values["unlogged_loss"])) / self.topology.world_size
