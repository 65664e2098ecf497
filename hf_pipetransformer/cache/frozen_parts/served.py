"""Records of a frozen part in a training: what of a call they hold, what is added, and whether they still hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from hf_pipetransformer.cache.chain import OTHER_BATCH_TOLERANCE, PrefixWatch, coarsest, differs
from hf_pipetransformer.cache.frozen_parts.values import NotStorableError
from hf_pipetransformer.cache.store import Counts
from hf_pipetransformer.comm.transfers import digest_of
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array
    from hf_pipetransformer.cache.frozen_parts.call import PartCall
    from hf_pipetransformer.cache.frozen_parts.contents import ContentStore, Leaves, Reading
    from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, PresentStep
    from hf_pipetransformer.cache.frozen_parts.values import Rows


CHECK_EVERY = 32
MOST_UNCHECKED = 256
"""Calls with records after which a row of one is computed again; of the first in each state, all rows are.

Once it has come out right many times, half as many as there were so far, up to `MOST_UNCHECKED`.
"""
NUM_COMPARED = 8
"""Rows of an earlier run's records that are compared with what the part gives now before one is used."""


@dataclass(frozen=True)
class Form:
    """Form of the records of a part, and what computing them costs.

    Args:
        rows: some rows of a call.
        length: tokens of their records, or values of records without tokens.
        width: values of a token.
        seconds: of a row of its forward and of those that it computes from.
        num_rows: in a forward of the batch.
    """

    rows: Rows
    length: int
    width: int
    dtype: torch.dtype
    seconds: float
    num_rows: int

    @classmethod
    def of(cls, reading: Reading, call: PartCall, seconds: float, num_rows: int) -> Form:
        likes = [call.template.likes[pick.number] for pick in reading.picks]
        dtype = next((each.dtype for each in likes if each.is_floating_point()), torch.float32)
        return cls(call.rows, reading.num_tokens(call), reading.width(call), dtype, seconds, num_rows)


@dataclass
class Plan:
    """Findings on a part, and decision on what to store of it.

    Args:
        parts: those that it computes from, in their order, and itself.
        is_of_script: True if code of the script's computes in it, which is never run for a check.
        is_for_outputs: True if the model's outputs, not its loss alone, are the same with zeros behind the last real
            token of a row.
        notes_first: True if it is not known that inputs come again: records are made of those that do.
        share: of a forward.
        form: of its records; None if nothing is to be stored.
        why_not: why nothing is.
        has_dropout: True if random numbers or statistics of the batch alone keep it from being stored.
    """

    parts: list[FrozenPart]
    reading: Reading
    is_of_script: bool = False
    is_for_outputs: bool = True
    notes_first: bool = False
    share: float = 0.0
    form: Form | None = None
    why_not: str | None = None
    has_dropout: bool = False

    @property
    def name(self) -> str:
        names = [each.name for each in self.parts]
        return names[0] if len(names) == 1 else f"{names[0]} {'with' if len(names) == 2 else 'to'} {names[-1]}"

    @property
    def part(self) -> FrozenPart:
        return self.parts[-1]

    @property
    def num_states(self) -> int:
        """Number of states of the parts that were seen."""
        return sum(part.state.num_states for part in self.parts)

    @property
    def size(self) -> int:
        return sum(each.numel() for part in self.parts for each in part.module.parameters())

    @property
    def key(self) -> str:
        """Properties of the part that its records depend on besides weights and inputs, as text."""
        modes = [f"{each.name} {each.in_evaluation} {each.cuts_padding}" for each in self.parts]
        return f"{modes} {self.reading}"


@dataclass
class Records:
    """Records of a part, in a store.

    Args:
        settings: everything else that outputs depend on, as text.
        precision: `fp32`, `bf16` or `fp16`.
        say_wrong: is told if records do not hold any more.
    """

    plan: Plan
    store: ContentStore
    settings: str
    precision: str
    say_wrong: Callable[[Records], None]
    counts: Counts = field(default_factory=Counts)
    num_changes: int = 0
    """How often the weights were changed."""
    are_weights_others: bool = False
    """True if bytes of the weights had changed when the records were found to hold no more."""
    num_states: int = 0
    """States of the parts that were seen up to this epoch."""
    since_epoch: int = 0
    """Epoch in which the oldest records that are used were written."""
    _unproven: frozenset[int] = field(default=frozenset(), init=False)
    """Places of records that were there before, until some of them were compared."""
    _agreed: set[int] = field(default_factory=set, init=False)
    _num_calls: Counter[bytes] = field(default_factory=Counter, init=False)
    """Calls with records, by the state and the modes of the part."""
    _num_unchecked: int = field(default=0, init=False)
    """Calls with records since rows of one were computed again."""
    fills: bool = field(default=True, init=False)
    """True up to the end of the epoch in which the first records are written."""
    _most_checked: int = field(default=0, init=False)
    """Rows of the largest call that was computed as a whole, and was what was read."""
    num_distrusted: int = field(default=0, init=False)
    """How often records were found to hold no more."""
    _seen: set[bytes] | None = field(default=None, init=False)
    _last: PartCall | None = field(default=None, init=False)
    _hits_checked: int = field(default=0, init=False)
    _has_overflown: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Look up from here on."""
        self._seen = set() if self.plan.notes_first else None
        self.use_present_weights()
        self.fills = not len(self.store)
        self.plan.part.records = self

    def end(self) -> None:
        """Compute from here on, and give the store back."""
        self.plan.part.records = None
        self._last = None
        self.store.close(self.counts.hits, self.counts.misses)

    @property
    def reading(self) -> Reading:
        return self.plan.reading

    def serves(self, step: PresentStep) -> bool:
        """Return True if what is stored is enough for the calls of a step."""
        if self.store.is_off:
            return False
        if not (self.reading.is_by_token and step.evaluates) or self.plan.is_for_outputs:
            return True
        return step.reads_loss_alone and not step.generates

    def computes_whole(self, call: PartCall) -> bool:
        """Return True if a call is computed as under Trainer.

        In the epoch that fills the store, as some row has no record yet; of a script's code, as some has not come out
        alike twice.
        """
        places = self.store.find(call.keys).tolist()
        if self.plan.is_of_script:
            return not all(place in self._agreed for place in places)
        return self.fills and min(places, default=0) < 0

    # ---- weights ----

    def use_present_weights(self) -> None:
        """Serve records of the present weights."""
        self._watch = PrefixWatch(lambda: [each for part in self.plan.parts for each in part.weights])
        self._num_calls.clear()
        self.store.use_weights(f"{weights_key(self.plan, self.settings)} {self.num_distrusted}")
        # Of an earlier run nothing is used before some of it was compared.
        self._unproven = frozenset(self.store.places)

    @property
    def is_trained(self) -> bool:
        return any(part.is_trained for part in self.plan.parts)

    def have_weights_changed(self) -> bool:
        """Return True if a look at the weights shows a change; serve the new ones then."""
        if not self._watch.has_changed():
            return False
        self.num_changes += 1
        self.use_present_weights()
        return True

    # ---- reading and writing ----

    @torch.no_grad()
    def found(self, call: PartCall) -> dict[int, torch.Tensor] | None:
        """Return the outputs of a call that records have, with those of rows that have none computed; None if none."""
        places = self.store.find(call.keys)
        is_hit = places >= 0
        # Code of the script's runs for whole batches or not at all.
        is_hit &= not (self.plan.is_of_script and self.computes_whole(call))
        if not is_hit.any() or any(each in self._unproven and each not in self._agreed for each in places.tolist()):
            return None
        kind = call.state + call.modes.precision
        number = self._num_calls[kind] + 1
        # Where records were wrong once, none is used unseen for a while.
        is_whole = number == 1 or (self.num_distrusted > 0 and number < CHECK_EVERY)
        # What depends on the company of a row shows only where it has some, and more of it.
        is_whole |= call.rows.number >= 2 * self._most_checked
        # A check reads no sample that the loader has left unread.
        if is_whole and not call.is_given:
            return None
        self._num_calls[kind] = number
        self._num_unchecked += 1
        is_due = is_whole or (call.is_given and self.is_check_due(CHECK_EVERY))
        records = self.store.read(places[is_hit], self.reading.num_tokens(call))
        if records is None:
            return None
        if is_due and self.plan.is_of_script:
            return None  # Computed as a whole, as Trainer does, and compared when it is kept.
        missing = np.flatnonzero(~is_hit)
        try:
            new = None
            if len(missing):
                leaves = call.computed(missing, known={})
                new = self._write(call, leaves, call.rows.some(missing), missing)
        # Rows of another kind than those that were tried are computed with the others.
        except NotStorableError:
            return None
        outputs = self._outputs(call, is_hit, records, new)
        if is_due:
            rows = np.arange(call.rows.number)
            rows = rows if is_whole else rows[[number // CHECK_EVERY % len(rows)]]
            if not self._holds(call, rows, outputs):
                self.distrust()
                return None
            self._last, self._num_unchecked = call.sample(1), 0
            self._most_checked = max(self._most_checked, len(rows))
        call.counted = int(is_hit.sum()), len(missing)
        self._count(*call.counted)
        return outputs

    def _outputs(
        self, call: PartCall, is_hit: Array, records: torch.Tensor, new: torch.Tensor | None = None
    ) -> dict[int, torch.Tensor]:
        """Return the outputs of a call: of some rows from `records`, of the others from `new`, zero without."""
        if is_hit.all():
            return self.reading.outputs(records, call)
        like = records if new is None else new
        whole = like.new_zeros(call.rows.number, max(records.shape[1], like.shape[1]), like.shape[2])
        whole[torch.from_numpy(is_hit), : records.shape[1]] = records.to(like)
        if new is not None:
            whole[torch.from_numpy(~is_hit), : new.shape[1]] = new
        return self.reading.outputs(whole, call)

    def _count(self, hits: int, misses: int) -> None:
        self.counts.hits += hits
        self.counts.misses += misses

    @torch.no_grad()
    def keep(self, call: PartCall, leaves: Sequence[torch.Tensor]) -> None:
        """Store what was computed for a call, and compare it with what is stored where that is still to be shown."""
        places = self.store.find(call.keys)
        is_hit = places >= 0
        # What was read before is computed now all the same.
        self._count(-call.counted[0], call.rows.number - call.counted[1])
        call.counted = 0, call.rows.number
        try:
            if is_hit.any() and not self._agrees(call, leaves, places, is_hit):
                self.distrust()
                if self.plan.part.records is not self:
                    return
                is_hit = np.zeros_like(is_hit)
            rows = np.flatnonzero(~is_hit)
            if self._seen is not None:
                names = [key.tobytes() for key in call.keys]
                rows = np.array([row for row in rows.tolist() if names[row] in self._seen], np.int64)
                self._seen.update(names)
            if len(rows):
                self._write(call, self._rows_of(call, leaves, rows), call.rows.some(rows), rows)
        # Not stored; what was computed is right.
        except NotStorableError:
            return

    def _rows_of(self, call: PartCall, leaves: Sequence[torch.Tensor], rows: Array) -> dict[int, torch.Tensor]:
        """Return some rows of what is read of the outputs, by their numbers; others may have no rows."""
        return {pick.number: call.rows.rows_of(leaves[pick.number], rows) for pick in self.reading.picks}

    def _agrees(self, call: PartCall, leaves: Sequence[torch.Tensor], places: Array, is_hit: Array) -> bool:
        records = self.store.read(places[is_hit], self.reading.num_tokens(call))
        if records is None:
            return True
        chosen = np.flatnonzero(is_hit)
        computed = self._rows_of(call, leaves, chosen)
        agrees = self._are_same(call, chosen, self._outputs(call, is_hit, records), computed)
        if agrees:
            self._agreed.update(places[is_hit].tolist())
            self._most_checked = max(self._most_checked, len(chosen))
            if len(self._unproven & self._agreed) >= NUM_COMPARED:
                self._unproven = frozenset()
        return agrees

    @property
    def has_been_proven(self) -> bool:
        """True if records were used at some time."""
        return self.counts.hits > 0

    @property
    def have_come_again(self) -> bool:
        """True if some of what is stored was asked for once more."""
        return self.counts.hits > 0 or bool(self._agreed)

    def _write(self, call: PartCall, leaves: Leaves, rows: Rows, chosen: Array) -> torch.Tensor:
        """Store the records of computed outputs of some rows, and return them."""
        records = self.reading.records(leaves, rows)
        lengths = self.reading.lengths(rows, records.shape[1])
        host = records.cpu()
        stored = host.to(self.store.dtype)
        # A value beyond the range of the dtype that is stored would come back as infinity.
        fits = (stored.isfinite() | ~host.isfinite()).flatten(1).all(1).numpy()
        if not fits.all() and not self._has_overflown:
            self._has_overflown = True
            logger.warning(
                f"{self.plan.name}: some outputs are beyond the range of activation_cache_dtype="
                f"{str(self.store.dtype).removeprefix('torch.')!r}. They are computed in every epoch."
            )
        if fits.any():
            self.store.write(call.keys[chosen][fits], stored[torch.from_numpy(fits)], lengths[fits])
        return records

    # ---- checks ----

    def _are_same(self, call: PartCall, rows: Array, outputs: dict[int, torch.Tensor], computed: Leaves) -> bool:
        """Return True if what a call is given for some of its rows is what was computed for these rows."""
        for pick in self.reading.picks:
            found, expected = call.rows.rows_of(outputs[pick.number], rows).cpu(), pick.of(computed[pick.number]).cpu()
            tolerance = OTHER_BATCH_TOLERANCE[coarsest(self.precision, self.store.dtype, expected.dtype)]
            pairs = [(found, expected)] if self.reading.share else [*zip(found, expected, strict=True)]
            if self.reading.is_by_token and call.rows.lengths is not None:
                ends = call.rows.lengths[rows].tolist()
                pairs = [(one[:end], other[:end]) for (one, other), end in zip(pairs, ends, strict=True)]
            if any(differs(one, other, tolerance) for one, other in pairs):
                return False
        return True

    def _holds(self, call: PartCall, rows: Array, outputs: dict[int, torch.Tensor]) -> bool:
        """Compute some rows of a call again, and return True if `outputs` of it are the same for them."""
        return self._are_same(call, rows, outputs, call.computed(rows, known={}))

    @property
    def is_checked(self) -> bool:
        """True if no record was read since rows were computed again."""
        return self._num_unchecked == 0

    def is_check_due(self, least: int = 1) -> bool:
        """Return True if it is time to compute rows again, `least` calls after the last time."""
        return self._num_unchecked >= max(least, min(self._num_calls.total() // 2, MOST_UNCHECKED))

    def is_what_it_was(self) -> bool:
        """Return False if bytes of the weights, or what the part makes of a row that was read, have changed."""
        if self.have_bytes_changed():
            return False
        call, self._num_unchecked = self._last, 0
        if call is None or self.plan.is_of_script or any(map(_is_past, call.chain)):
            return True
        places = self.store.find(call.keys)
        if (places < 0).any():
            return True
        records = self.store.read(places, self.reading.num_tokens(call))
        everything = np.arange(call.rows.number)
        return records is None or self._holds(call, everything, self._outputs(call, places >= 0, records))

    def distrust(self) -> None:
        """Use no record from before this call, and say so."""
        self.num_distrusted += 1
        self.are_weights_others = self.have_bytes_changed()
        self._last = None
        self._agreed.clear()
        self.say_wrong(self)
        if self.plan.part.records is self:
            self.use_present_weights()

    def have_bytes_changed(self) -> bool:
        """Return True if some byte of the weights is another one."""
        return self._watch.has_changed(thoroughly=True)

    def has_served_since_check(self) -> bool:
        """Return True if records were read since the last call."""
        before, self._hits_checked = self._hits_checked, self.counts.hits
        return self._hits_checked > before


def _is_past(call: PartCall) -> bool:
    """Return True if a call would not be made in the same way by now."""
    return call.has_written_inputs or call.state != call.part.state.digest


def weights_key(plan: Plan, settings: str) -> str:
    """Return a name for all that outputs depend on besides what the parts are called with and their attributes."""
    hasher = xxhash.xxh3_128(settings.encode())
    for part in plan.parts:
        # Its `state_dict` lacks buffers that are not saved.
        for name, value in sorted({**dict(part.module.named_buffers()), **part.module.state_dict()}.items()):
            digest = digest_of(value) if isinstance(value, torch.Tensor) else repr(value)
            hasher.update(f"{part.name} {name} {digest}\n".encode())
    hasher.update(plan.key.encode())
    return hasher.hexdigest()
