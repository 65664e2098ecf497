"""Frozen parts whose records are read in a run: their checks, what follows from changes, and their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from transformers import TrainerState

from hf_pipetransformer.cache.frozen_parts.part import FrozenPart
from hf_pipetransformer.cache.frozen_parts.served import Counts, Plan, Records
from hf_pipetransformer.report import announce, printable


if TYPE_CHECKING:
    from hf_pipetransformer.cache.folder import Use
    from hf_pipetransformer.cache.frozen_parts.contents import ContentStore
    from hf_pipetransformer.cache.frozen_parts.watching import Form
    from hf_pipetransformer.cache.records import RecordFormat
    from hf_pipetransformer.comm.topology import Topology


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
    def topology(self) -> Topology: ...

    @property
    def model(self) -> nn.Module:
        """The model that the loss calls, with its adapters."""

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
    """Cost and gain of storing a part; seconds are those of a row.

    Args:
        num_rows: that the run is expected to compute.
        needed_bytes: of all records, `record_bytes` each.
        hit_seconds: what reading a record saves.
        reason: of the decision; `is_used` is its outcome.
    """

    num_rows: int
    record_bytes: float
    needed_bytes: float
    hit_seconds: float
    is_used: bool
    reason: str


class Stores(Protocol):
    """Prices and stores of parts; see `training.part_stores.PartStores`."""

    @property
    def is_endless(self) -> bool: ...

    def price(self, form: Form, num_samples: int, content: RecordFormat, taken: int) -> Price: ...

    def open(
        self, plan: Plan, content: RecordFormat, price: Price, settings: str, taken: int
    ) -> ContentStore | str: ...

    def use(self, plan: Plan, counts: Counts) -> Use: ...


class ServingParts:
    """Parts of a model whose outputs are read in one training."""

    def __init__(self, run: PartsRun, stores: Stores) -> None:
        self.run, self._stores = run, stores
        self._records: list[tuple[Records, Price]] = []
        self.epoch = -1
        """Epoch of the last batch that was checked."""
        self._checked_at = 0
        self._was_due = True
        self.has_served = False
        """True once there was a part."""

    @property
    def records(self) -> list[Records]:
        return [records for records, _ in self._records]

    @property
    def bytes_taken(self) -> int:
        return sum(records.store.bytes_taken for records in self.records)

    @property
    def present_epoch(self) -> int:
        return int(self.run.state.epoch or 0)

    def begin(self) -> None:
        """Begin a training."""
        self.has_served, self.epoch, self._checked_at = False, self.present_epoch, self.run.state.global_step
        self._was_due = True

    def add(self, records: Records, price: Price) -> None:
        """Read from records from here on."""
        for part in records.plan.parts:
            part.weights_changed = self.notice_change_of
        records.since_epoch, records.num_states = self.present_epoch, _num_states(records)
        records.begin()
        self._records.append((records, price))
        self.has_served = True

    def check(self) -> None:
        """Follow what has changed since the last batch; where an epoch begins, all bytes of weights that were due."""
        self.notice_changed_weights()
        if self.present_epoch != self.epoch:
            for records in self.records if self._was_due else ():
                if records.have_bytes_changed():
                    records.distrust()
            self.epoch = self.present_epoch
            for records in self.records:
                # A process alone knows all records: it has written them itself or found them when it opened the store.
                if self.run.topology.is_distributed:
                    records.store.look_again()
                self._stop_if_useless(records)

    def notice_changed_weights(self) -> None:
        for records in self.records:
            # `_stop` takes parts out of `_records`, not out of the list that this loop goes through.
            if records.is_trained:
                self.say(f"{records.plan.name} is not frozen any more: it is computed as in Trainer from here on.")
                self._stop(records)
            elif records.have_weights_changed():
                self._say_changed(records)

    def notice_change_of(self, part: FrozenPart) -> None:
        """Follow weights that are seen to have changed when a part is called."""
        for records in self.records:
            if part in records.plan.parts and records.have_weights_changed():
                self._say_changed(records)

    def _say_changed(self, records: Records) -> None:
        records.since_epoch = self.present_epoch
        self.say(f"Weights of {records.plan.name} were changed from outside: its outputs are computed again.")
        self._stop_if_often(records, records.num_changes)

    def _stop_if_often(self, records: Records, number: int) -> None:
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
        records.since_epoch = self.present_epoch
        has_served, name = records.has_served_since_check(), records.plan.name
        step = self.run.state.global_step
        if records.plan.is_of_script and not records.has_been_proven and not records.are_weights_others:
            self.say(
                f"{name} is frozen and computed as in Trainer in every epoch: its own code gives something else for "
                "samples that come a second time, in another batch."
            )
            self._stop(records)
            return
        if not has_served or step <= self._checked_at:
            self.say(f"{name} was changed from outside: its outputs are computed again.")
            self._stop_if_often(records, records.num_distrusted)
            return
        self.say(
            f"{name} computes something else than what was stored, and no version counter shows it (a write past "
            f"autograd, or something random). Steps {self._checked_at + 1} to {step} may have read outputs that did "
            "not hold any more; from here on they are computed again. Change it between epochs (on_epoch_begin), or "
            "write with parameter.copy_() under torch.no_grad()."
        )
        self._stop_if_often(records, records.num_distrusted)

    def _stop_if_useless(self, records: Records) -> None:
        """End the storing of a part none of whose inputs came again in a whole epoch."""
        if _num_states(records) != records.num_states:
            # With other attributes it has other records.
            records.num_states, records.since_epoch = _num_states(records), self.epoch
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
        price = next(price for each, price in self._records if each is records)
        self._close(records, price)
        self._records = [each for each in self._records if each[0] is not records]

    def end_epoch(self, is_last: bool) -> None:
        """Check parts of which a check is due, and write down what this process has read and computed in the epoch."""
        self._was_due = is_last or any(records.is_check_due() for records in self.records)
        if self._was_due:
            self.check_thoroughly()
        elif all(records.is_checked for records in self.records):
            self._checked_at = self.run.state.global_step
        if not self.has_served:
            return
        counts = [records.counts_since_report() for records in self.records]
        hits, misses = sum(each.hits for each in counts), sum(each.misses for each in counts)
        stored = sum(records.store.bytes_stored for records in self.records)
        self.run.note(what="epoch", hits=hits, misses=misses, bytes_stored=stored)

    def end(self) -> None:
        """Give the stores back, and say what was saved."""
        for records, price in self._records:
            self._close(records, price)
        self._records.clear()

    def _close(self, records: Records, price: Price) -> None:
        counts = records.counts
        records.end(self._stores.use(records.plan, counts))
        looked_up = counts.hits + counts.misses
        if looked_up:
            where = " by this process" if self.run.topology.is_distributed else ""
            self.say(
                f"{records.plan.name}: {counts.hits} of {looked_up} outputs were read instead of computed{where} "
                f"({counts.hits / looked_up:.0%}), which saved about {round(counts.hits * price.hit_seconds):,} s."
            )

    def say(self, text: str) -> None:
        if self.run.topology.rank == 0:
            # Names of modules are the script's.
            announce(printable(text))


def _num_states(records: Records) -> int:
    return sum(part.state.num_states for part in records.plan.parts)
