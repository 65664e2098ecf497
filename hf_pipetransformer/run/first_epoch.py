"""The epoch in which a resumed run goes on: with the batch that comes next, and the losses and draws as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers.trainer as stock
from transformers import Trainer

from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.shares import Arrangement
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.run import host
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.run.remainder import Remainder
from hf_pipetransformer.run.resumption import Resumption
from hf_pipetransformer.run.saving import POSITION
from hf_pipetransformer.run.taking_up import RandomNumbers


@dataclass
class FirstEpoch:
    """Leads Trainer's loop to the place that the run that was saved had come to.

    Args:
        loader: of the training samples; None for one of the user's own.
    """

    trainer: Trainer
    topology: Topology
    pipeline: Pipeline
    loader: PipelineLoader | None
    resumption: Resumption
    numbers: RandomNumbers
    _are_set: bool = field(default=False, init=False)
    _corrected_epoch: float | None = field(default=None, init=False)

    def set_random_numbers(self) -> None:
        """Restore this rank's random number generators, once: Trainer asks for it at two places."""
        if not self._are_set:
            self._are_set = True
            self.numbers.set(self.pipeline.shared_draws, self.trainer.args.device)

    @contextmanager
    def running(self, arguments: dict[str, Any]) -> Iterator[bool]:
        """Trainer's loop over the epoch runs inside, if that gives True.

        Args:
            arguments: of Trainer's loop; to it, the rest of an epoch is an epoch.
        """
        host.take_up_loss(self.trainer, self.topology, **self.numbers.values)
        if self.trainer.state.global_step >= self.trainer.state.max_steps:
            # Trainer would take one step more.
            self.set_random_numbers()
            self.trainer.control.should_training_stop = True
            yield False
            return
        rest = self.resumption.remainder
        if rest is not None:
            self._begin_remainder(rest, arguments)
        elif self.loader is not None:
            # For an epoch's begin; in the middle Trainer asks for a skip.
            self.loader.starting_at(0, self.numbers.order)
        with self._skipping_batches():
            yield True

    def _begin_remainder(self, rest: Remainder, arguments: dict[str, Any]) -> None:
        place = self.resumption.place or {}
        is_same_epoch = rest.epoch == place["epoch"] and rest.num_done == place["samples"]
        if self.loader is not None:
            order = self.numbers.order if is_same_epoch else None
            began_as = Arrangement.from_json(place) if rest.num_done else None
            self.loader.starting_at(rest.first, order, rest.num_done, began_as)
        arguments |= {"steps_in_epoch": rest.num_batches, "num_update_steps_per_epoch": rest.num_updates}

    def correct_epoch(self) -> None:
        """After a step of the rest of an epoch: how much of the epoch is done."""
        state, rest = self.trainer.state, self.resumption.remainder
        if rest is not None and state.epoch != self._corrected_epoch:
            state.epoch = self._corrected_epoch = rest.epoch_at(state.epoch - rest.epoch)

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
            # Trainer counts from the first step on where it does not know how long an epoch is.
            position = self.numbers.values.get(POSITION, num_batches)
            began_as = Arrangement.from_json(self.resumption.place or {})
            return loader.starting_at(position, self.numbers.order, arrangement=began_as, ahead=self.numbers.ahead)

        stock.skip_first_batches = skip
        try:
            yield
        finally:
            stock.skip_first_batches = original
