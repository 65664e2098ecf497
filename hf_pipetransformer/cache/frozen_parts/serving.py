"""Frozen parts whose records are read in a run: their checks, what follows from changes, and their end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from transformers import TrainerState

from hf_pipetransformer.cache.frozen_parts.served import Form, Plan, Records
from hf_pipetransformer.report import announce, duration, printable


if TYPE_CHECKING:
    from hf_pipetransformer.cache.frozen_parts.contents import ContentStore
    from hf_pipetransformer.comm.topology import Peers


LEAST_TIMES, MOST_TIMES = 3, 512
"""Steps of which a median is told, and that one is taken of."""
MOST_CHANGES = 3
"""Changes of a part after which nothing of it is stored any more."""


class PartsRun(Protocol):
    """View of a trainer's present run, for the storing of frozen parts."""

    @property
    def args(self) -> Any:
        """Trainer's arguments, with those of the store."""

    @property
    def state(self) -> TrainerState: ...

    @property
    def topology(self) -> Peers: ...

    @property
    def model(self) -> nn.Module:
        """The model that the loss calls, with its adapters."""

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """Modules whose outputs may be stored, by their path in the bare model."""

    @property
    def train_dataset(self) -> Any: ...

    @property
    def eval_dataset(self) -> Any:
        """One, or a dict of several; None if there is none."""

    @property
    def train_loader(self) -> Any: ...

    @property
    def is_whole(self) -> bool:
        """False if processes or threads run copies or parts of the modules."""

    @property
    def sends_buffers(self) -> bool:
        """True if buffers are written anew in every forward, as DistributedDataParallel does."""

    @property
    def reads_loss_alone(self) -> bool:
        """True if training reads nothing of the model's outputs but its loss."""

    def note(self, **fields: Any) -> None:
        """Write an event of the cache to the journal."""

    def end_plan(self) -> None:
        """Leave the script after a plan; called with `plan_only` alone."""


@dataclass(frozen=True)
class Price:
    """Size of what would be stored of a part, and whether that pays.

    Args:
        num_rows: that the run is expected to compute.
        needed_bytes: of all records, `record_bytes` each.
        reason: of the decision; `is_used` is its outcome.
    """

    num_rows: int
    record_bytes: float
    needed_bytes: float
    is_used: bool
    reason: str


class Stores(Protocol):
    """Prices and stores of parts; see `training.part_stores.PartStores`."""

    @property
    def is_endless(self) -> bool: ...

    def price(self, form: Form, num_samples: int) -> Price: ...

    def open(self, plan: Plan, form: Form, price: Price, settings: str) -> ContentStore | str: ...


class StepTimes:
    """Seconds of steps while outputs are stored for the first time, and once all of them are read."""

    def __init__(self) -> None:
        self._stored, self._read = list[float](), list[float]()
        self._first: int | None = None
        self._before = (-1, 0.0)

    def begin(self, epoch: int) -> None:
        """Note the first epoch in which outputs are stored."""
        self._first = epoch if self._first is None else self._first

    def note(self, epoch: int) -> None:
        """Note that a step begins."""
        (last_epoch, last), now = self._before, time.perf_counter()
        self._before = epoch, now
        # From the third epoch on, as the second one stores what was watched in the first.
        if self._first is not None and epoch == last_epoch and epoch != self._first + 1:
            times = self._stored if epoch == self._first else self._read
            times.append(now - last)
            del times[:-MOST_TIMES]

    def in_words(self) -> str | None:
        """Return both medians; None if steps of one kind are missing."""
        if min(len(self._stored), len(self._read)) < LEAST_TIMES:
            return None
        stored, read = map(statistics.median, (self._stored, self._read))
        return f"Steps took {duration(stored)} while outputs were stored, and {duration(read)} once they were read."


class ServingParts:
    """Parts of a model whose outputs are read in one training."""

    def __init__(self, run: PartsRun) -> None:
        self.run = run
        self.records: list[Records] = []
        self.epoch = -1
        """Epoch of the last batch that was checked."""
        self._checked_at = 0
        self._was_due = True
        self.times = StepTimes()
        self.has_served = False
        """True once there was a part."""

    @property
    def present_epoch(self) -> int:
        return int(self.run.state.epoch or 0)

    def begin(self) -> None:
        """Begin a training."""
        self.has_served, self.epoch, self._checked_at = False, self.present_epoch, self.run.state.global_step
        self._was_due, self.times = True, StepTimes()

    def add(self, records: Records) -> None:
        """Read from records from here on."""
        for part in records.plan.parts:
            part.weights_changed = self.notice_changed_weights
        records.since_epoch, records.num_states = self.present_epoch, records.plan.num_states
        records.begin()
        self.times.begin(self.present_epoch)
        self.records.append(records)
        self.has_served = True

    def check(self) -> None:
        """Follow what has changed since the last batch; where an epoch begins, all bytes of weights that were due."""
        self.notice_changed_weights()
        self.times.note(self.present_epoch)
        if self.present_epoch != self.epoch:
            for records in self.records if self._was_due else ():
                if records.have_bytes_changed():
                    records.distrust()
            self.epoch = self.present_epoch
            for records in self.records:
                # A process alone knows all records: it has written them itself or found them when it opened the store.
                if self.run.topology.is_distributed:
                    records.store.look_again()
                records.fills = not len(records.store)
                self._stop_if_useless(records)

    def notice_changed_weights(self) -> None:
        """Follow weights that have changed, also where that is seen when a part is called."""
        for records in self.records:
            if records.is_trained:
                self.say(f"{records.plan.name} is not frozen any more: it is computed as in Trainer from here on.")
                self._stop(records)
            elif records.have_weights_changed():
                text = f"Weights of {records.plan.name} were changed from outside: its outputs are computed again."
                self._compute_again(records, text, records.num_changes)

    def _compute_again(self, records: Records, text: str, number: int) -> None:
        """Say why the outputs of a part are computed again, for the `number`th time."""
        records.since_epoch = self.present_epoch
        self.say(text)
        if number >= MOST_CHANGES:
            self.say(f"{records.plan.name} changes again and again: it is computed as in Trainer from here on.")
            self._stop(records)

    def check_thoroughly(self) -> None:
        """Check all bytes of the parts' weights, and what they compute: after an epoch, and before a checkpoint."""
        for records in self.records:
            if not records.is_what_it_was():
                records.distrust()
            records.has_served_since_check()
        self._checked_at = self.run.state.global_step

    def say_wrong(self, records: Records) -> None:
        """Say which steps may have read records that do not hold."""
        has_served, name = records.has_served_since_check(), records.plan.name
        step = self.run.state.global_step
        if records.plan.is_of_script and not records.has_been_proven and not records.are_weights_others:
            self.say(
                f"{name} is frozen and computed as in Trainer in every epoch: its own code gives something else for "
                "samples that come a second time, in another batch."
            )
            self._stop(records)
            return
        text = f"{name} was changed from outside: its outputs are computed again."
        if has_served and step > self._checked_at:
            text = (
                f"{name} computes something else than what was stored, and no version counter shows it (a write past "
                f"autograd, or something random). Steps {self._checked_at + 1} to {step} may have read outputs that "
                "did not hold any more; from here on they are computed again. Change it between epochs "
                "(on_epoch_begin), or write with parameter.copy_() under torch.no_grad()."
            )
        self._compute_again(records, text, records.num_distrusted)

    def _stop_if_useless(self, records: Records) -> None:
        """End the storing of a part none of whose inputs came again in a whole epoch."""
        if records.plan.num_states != records.num_states:
            # With other attributes it has other records.
            records.num_states, records.since_epoch = records.plan.num_states, self.epoch
        # The first epoch only writes, so hits must have come by the end of the second if inputs come again at all.
        first = records.since_epoch + records.plan.notes_first
        if self.epoch < first + 2 or records.have_come_again or not records.counts.misses:
            return
        self.say(
            f"{records.plan.name} is computed from here on: none of its inputs came a second time (random "
            "augmentation?), so nothing is stored any more."
        )
        self._stop(records)

    def _stop(self, records: Records) -> None:
        self._close(records)
        self.records = [each for each in self.records if each is not records]

    def end_epoch(self, is_last: bool) -> None:
        """Check parts of which a check is due, and write down what this process has read and computed in the epoch."""
        self._was_due = is_last or any(records.is_check_due() for records in self.records)
        if self._was_due:
            self.check_thoroughly()
        elif all(records.is_checked for records in self.records):
            self._checked_at = self.run.state.global_step
        if not self.has_served:
            return
        counts = [records.counts.since_report() for records in self.records]
        hits, misses = (sum(each[name] for each in counts) for name in ("hits", "misses"))
        stored = sum(records.store.bytes_stored for records in self.records)
        self.run.note(what="epoch", hits=hits, misses=misses, bytes_stored=stored)

    def end(self) -> None:
        """Give the stores back, and say what was saved."""
        is_used = bool(self.records)
        for records in self.records:
            self._close(records)
        self.records = []
        if is_used and (text := self.times.in_words()) is not None:
            self.say(text)

    def _close(self, records: Records) -> None:
        counts = records.counts
        records.end()
        looked_up = counts.hits + counts.misses
        if looked_up:
            where = " by this process" if self.run.topology.is_distributed else ""
            self.say(
                f"{records.plan.name}: {counts.hits} of {looked_up} outputs were read instead of computed{where} "
                f"({counts.hits / looked_up:.0%})."
            )

    def say(self, text: str) -> None:
        if self.run.topology.rank == 0:
            # Names of modules are the script's.
            announce(printable(text))
