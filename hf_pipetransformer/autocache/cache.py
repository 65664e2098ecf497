"""One data set's stored activations, as one rank of a pipeline reads and writes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_pipetransformer.autocache.parts import Indices, Parts, SampleSource, merged, positions_of
from hf_pipetransformer.autocache.rows import Rows, field_column
from hf_pipetransformer.autocache.samples import real_lengths
from hf_pipetransformer.autocache.store import ActivationStore
from hf_pipetransformer.autocache.table import StoreDamagedError
from hf_pipetransformer.autodp.padding import fill_value, pad_batch
from hf_pipetransformer.batches import take_rows
from hf_pipetransformer.cache_tags import CacheTags
from hf_pipetransformer.pipeline.engine import MicroBatch
from hf_pipetransformer.report.events import logger
from hf_pipetransformer.staging import Arriving, CopyStream, is_apart


LENGTH_FIELD = "pipetransformer_length"
"""Side field of a row of text: how many tokens its sample has, padding not counted."""

CHECKED_HITS = 256
"""One in so many stored samples is read from the data set all the same, to see that it still is what it was."""


MAX_BATCHES_IN_FLIGHT = 16
"""Micro-batches whose rows wait in pinned memory to be stored; beyond it training waits for the disk."""


@dataclass
class CacheCounts:
    """What a cache did since it was last asked.

    Args:
        hits: samples whose activation was read.
        misses: samples that were read from the data set.
        written: rows that were stored.
        checked: hits whose input was read again and compared.
        read_seconds: spent on reading rows.
        write_seconds: spent on storing rows.
    """

    hits: int = 0
    misses: int = 0
    written: int = 0
    checked: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


class ActivationCache:
    """Completes batches from the store, and stores what the frozen layers gave (PipeTransformer, section 3.4).

    Whatever goes wrong with the store ends its use with one warning: then every sample is computed.

    Args:
        store: the rows, shared by all processes of the node.
        source: the samples.
        device: where rows go, and come from; None for the CPU.
    """

    def __init__(self, store: ActivationStore, source: SampleSource, device: torch.device | None = None) -> None:
        self.store = store
        self.source = source
        device = device or torch.device("cpu")
        self._is_apart = is_apart(device)
        self._copies = CopyStream(device)
        self.counts = CacheCounts()
        self.level = 0
        self.stamp = 0
        """How often the weights that rows count for were named."""
        self._weights_id = 0
        self._level_of_id: dict[int, int] = {}
        self._hits_unchecked = 0
        self._is_off = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="activation-cache")
        self._ahead: _ReadAhead | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="activation-cache-writer")
        self._pending: list[_Pending] = []
        self._writing: deque[Future[int]] = deque()

    def use_weights(self, keys: Sequence[str]) -> None:
        """From now on the weights below layer `len(keys) - 1` are those of `keys`; other rows are not served.

        Args:
            keys: by number of layers, from 0 on, what identifies everything that their output hangs on.
        """
        self.stamp += 1
        self._ahead = None
        self._pending.clear()
        self._level_of_id = {self.store.weights_id(key): level for level, key in enumerate(keys) if level}
        self.level = len(keys) - 1
        self._weights_id = self.store.weights_id(keys[-1])

    def take_counts(self) -> dict[str, float]:
        """What was done since this was last called."""
        counts, self.counts = asdict(self.counts), CacheCounts()
        return counts

    def switch_off(self, reason: str) -> None:
        """Serve and store nothing any more, on no rank of this node."""
        if not self._is_off:
            logger.warning(f"The activation cache is off from here on, samples are computed: {reason}")
        self._is_off = True
        self.store.drop(reason)

    def close(self) -> None:
        """Let go of the store."""
        self._reader.shutdown()
        self._writer.shutdown()
        self.store.close()

    # ---- reading: the loader's side ----

    def select(self, samples: list[int]) -> list[int]:
        """Those of `samples` that must be read from the data set."""
        levels = self._known(self._entries(np.asarray(samples, dtype=np.int64)))
        return [sample for sample, level in zip(samples, levels, strict=True) if not level]

    def complete(
        self, samples: list[int], read: list[int], batch: Mapping[str, Any], agree: Callable[[int], int]
    ) -> dict[str, Any]:
        """The batch of all `samples`, with the stored activations of those that have one; see `RowSource`."""
        if not samples:
            agree(0)
            return {}
        if self._is_off and len(read) == len(samples):
            return self._as_read(batch, agree)
        agree_once = _Once(agree)
        try:
            return self._completed(samples, read, batch, agree_once)
        except (StoreDamagedError, KeyError) as error:
            # The length of a batch never hangs on what is stored, so what the replicas agreed on still holds.
            self.switch_off(str(error))
            return self._completed(samples, read, batch, agree_once)

    def _completed(
        self, samples: list[int], read: list[int], batch: Mapping[str, Any], agree: Callable[[int], int]
    ) -> dict[str, Any]:
        index = np.asarray(samples, dtype=np.int64)
        entries = self._entries(index)
        hit = self._known(entries) > 0
        parts = Parts(self.source)
        # What was read although it is stored by now is taken from the store; what was counted on and is gone is read.
        is_read = positions_of(read, samples)
        parts.add(is_read & ~hit, batch, is_read)
        parts.read(~hit & ~is_read, samples)
        known = entries[hit][field_column(LENGTH_FIELD)] if self.source.is_text else []
        length = agree(self._padded_length(parts, known))
        if self.source.keeps_padding:
            # It was stored for a shorter batch.
            hit = self._without(hit, entries["length"] < length, parts, samples)
        rows = self._read_rows(index[hit], length) if hit.any() else None
        if rows is not None:
            lost = np.zeros_like(hit)
            lost[hit] = self._levels_of(rows.weights_ids) == 0
            if lost.any():
                # Another process was writing it.
                rows = rows.take(~lost[hit])
                hit = self._without(hit, lost, parts, samples)
        self.counts.hits += int(hit.sum())
        self.counts.misses += len(samples) - int(hit.sum())
        return self._assembled(index, hit, rows, parts, length)

    def _as_read(self, batch: Mapping[str, Any], agree: Callable[[int], int]) -> dict[str, Any]:
        """A batch that was read whole, as without a cache."""
        source = self.source
        if not source.is_text:
            agree(0)
            return dict(batch)
        length = agree(batch[source.main_input].shape[1])
        return pad_batch(batch, source.main_input, length, source.pad_token_id)

    def _entries(self, index: Indices) -> Any:
        """What the index says of samples; zeros once the cache is off."""
        try:
            return self.store.entries(index)
        except StoreDamagedError as error:
            self.switch_off(str(error))
            return self.store.entries(index)

    def _known(self, entries: Any) -> Indices:
        """Layers that each row holds the output of; 0 if not of the weights that are loaded now."""
        return self._levels_of(entries["weights_id"])

    def _levels_of(self, ids: Indices) -> Indices:
        return np.array([self._level_of_id.get(found, 0) for found in ids.tolist()], dtype=np.int64)

    def _without(self, hit: npt.NDArray[np.bool_], lost: Any, parts: Parts, samples: list[int]) -> Any:
        """`hit` without what turned out not to be there, which is read from the data set now."""
        parts.read(hit & lost, samples)
        return hit & ~lost

    def _padded_length(self, parts: Parts, known: Any) -> int:
        """Length that the collator would have padded the whole batch to.

        Raises:
            StoreDamagedError: what was read is not padded by the rule that the probe found.
        """
        rule = self.source.report.padding
        if not self.source.is_text or rule is None:
            return self.source.row_length
        read = max((batch[self.source.main_input].shape[1] for _, batch, _ in parts.found), default=0)
        expected = [rule.length(int(lengths.max())) for lengths in parts.lengths]
        if self._is_off:
            return max(read, *expected)
        if expected and read != max(expected):
            raise StoreDamagedError(
                f"a batch was padded to {read} tokens, where the first samples made {max(expected)} expected. Pad in "
                "the collator, or to one length, or set activation_cache='off'."
            )
        return max([*expected, *(rule.length(int(length)) for length in known)])

    def prefetch(self, samples: list[int]) -> None:
        """Begin to read the rows of the next batch, if it will need nothing else: a guess that may come to nothing."""
        self._ahead = None
        index = np.asarray(samples, dtype=np.int64)
        entries = self._entries(index)
        if not len(index) or not (self._known(entries) > 0).all():
            return
        length = self.source.row_length
        if self.source.is_text:
            rule = self.source.report.padding
            assert rule is not None
            length = rule.length(int(entries[field_column(LENGTH_FIELD)].max()))
        self._ahead = _ReadAhead(index, length, self._reader.submit(self._read_and_pin, index, length))

    def _read_and_pin(self, index: Indices, length: int) -> Rows:
        rows = self.store.read(index, length)
        return replace(rows, activation=rows.activation.pin_memory()) if self._is_apart else rows

    def _read_rows(self, index: Indices, length: int) -> Rows:
        start = time.perf_counter()
        try:
            self._check_inputs(index)
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead.length == length and np.array_equal(ahead.index, index):
                return ahead.rows.result()
            return self.store.read(index, length)
        finally:
            self.counts.read_seconds += time.perf_counter() - start

    def _check_inputs(self, index: Indices) -> None:
        """Now and then read a stored sample's input again: a data set that changes must not be served from the store.

        Raises:
            StoreDamagedError: the sample is not what it was when its activation was stored.
        """
        self._hits_unchecked += len(index)
        if self._hits_unchecked < CHECKED_HITS:
            return
        self._hits_unchecked -= CHECKED_HITS
        sample = index[:1]
        _, found = self.source.digests(self.source.read(sample.tolist()))
        self.counts.checked += 1
        (entry,) = self.store.entries(sample)
        if entry["weights_id"] and found[0] != entry["input_digest"]:
            raise StoreDamagedError(
                f"sample {sample[0]} of the data set is not what it was when its activation was stored. The data set "
                "or its transform changes: set activation_cache='off', or make it give the same sample each time."
            )

    def _assembled(
        self, index: Indices, hit: npt.NDArray[np.bool_], rows: Rows | None, parts: Parts, length: int
    ) -> dict[str, Any]:
        levels = np.zeros(len(index), dtype=np.int64)
        digests = np.zeros(len(index), dtype=np.uint64)
        for where, _, found in parts.found:
            digests[where] = found
        hidden = None
        if rows is not None and hit.any():
            levels[hit] = self._levels_of(rows.weights_ids)
            hidden = rows.activation
            if not hit.all():
                hidden = hidden.new_zeros(len(index), *hidden.shape[1:])
                hidden[torch.from_numpy(np.flatnonzero(hit))] = rows.activation
        stored = None if rows is None else self._fields_of(rows, length)
        inputs = merged(len(index), hit, stored, parts, length)
        tags = CacheTags(
            torch.from_numpy(index),
            torch.from_numpy(levels),
            torch.from_numpy(digests.view(np.int64)),
            self.stamp,
            hidden,
        )
        return tags.attach(inputs)

    def _fields_of(self, rows: Rows, length: int) -> dict[str, torch.Tensor]:
        """The inputs of stored samples, padded as by the collator."""
        fields = {name: value for name, value in rows.fields.items() if name != LENGTH_FIELD}
        if not self.source.is_text:
            placeholder = torch.zeros(1, dtype=self.source.main_dtype)
            fields[self.source.main_input] = placeholder.expand(len(rows.weights_ids), *self.source.main_shape)
            return fields
        beyond = torch.arange(length) >= torch.from_numpy(rows.lengths.astype(np.int64))[:, None]
        for name in self.source.report.token_fields:
            usual = fill_value(name, self.source.main_input, self.source.pad_token_id)
            fill = self.source.report.fill_values.get(name, usual)
            if fill:
                fields[name][beyond] = fill
        return fields

    # ---- writing: the engine's side ----

    def write(self, micro_batch: MicroBatch, hidden: torch.Tensor) -> None:
        """Store the activations after `level` layers of those samples that are not stored so far up."""
        tags = micro_batch.tags
        assert tags is not None
        rows = (tags.num_layers < self.level).nonzero().squeeze(1)
        if self._is_off or not len(rows):
            return
        start = time.perf_counter()
        pending = self._rows_to_write(micro_batch, tags, hidden, rows)
        if not self._is_apart:
            self._count_written(lambda: self._write(pending))
        else:
            self._pending.append(pending)
            self._count_finished(MAX_BATCHES_IN_FLIGHT)
        self.counts.write_seconds += time.perf_counter() - start

    def write_pending(self) -> None:
        """The weights are those that were named, so what was computed with them may be stored: by a thread."""
        while self._pending:
            self._writing.append(self._writer.submit(self._write, self._pending.pop(0)))
        self._count_finished(MAX_BATCHES_IN_FLIGHT)

    def wait_for_writes(self) -> None:
        """Wait until all that may be stored is."""
        self._count_finished(0)

    def _count_finished(self, num_left: int) -> None:
        while self._writing and (len(self._writing) > num_left or self._writing[0].done()):
            self._count_written(self._writing.popleft().result)

    def _count_written(self, written: Callable[[], int]) -> None:
        try:
            self.counts.written += written()
        except (StoreDamagedError, OSError, ValueError) as error:
            self.switch_off(str(error))

    def _rows_to_write(
        self, micro_batch: MicroBatch, tags: CacheTags, hidden: torch.Tensor, rows: torch.Tensor
    ) -> _Pending:
        """Those rows of a micro-batch, on their way to the host."""
        is_all = len(rows) == len(tags.num_layers)
        given = micro_batch.inputs if micro_batch.on_host is None else micro_batch.on_host
        inputs = given if is_all else take_rows(given, rows)
        activation = (hidden if is_all else hidden[rows.to(hidden.device, non_blocking=True)]).detach()
        num_tokens = activation.shape[1]
        # A copy of its own where it is read later: the model may go on to change it in place.
        arriving = self._copies.to_host(activation.to(self.store.row_format.dtype, copy=self._is_apart))
        index = tags.samples[rows].numpy()
        names = [*self.source.report.token_fields, *self.source.report.sample_fields]
        fields = {name: inputs[name].cpu() for name in names}
        lengths = np.full(len(index), num_tokens, dtype=np.int64)
        if self.source.is_text:
            real = real_lengths(fields, self.source.main_input)
            fields[LENGTH_FIELD] = torch.from_numpy(real.astype(np.int32))
            lengths = lengths if self.source.keeps_padding else real
        has_row, digests = tags.num_layers[rows].numpy() > 0, tags.digests[rows].numpy().view(np.uint64)
        return _Pending(index, self._weights_id, arriving, lengths, fields, digests, has_row)

    def _write(self, pending: _Pending) -> int:
        if self._is_off:
            return 0
        digests = np.where(pending.has_row, self.store.entries(pending.index)["input_digest"], pending.digests)
        activation = pending.activation.on_host()
        return self.store.write(
            pending.index, pending.weights_id, activation, pending.lengths, pending.fields, digests
        )


@dataclass(frozen=True)
class _Pending:
    """Rows to store.

    Args:
        index: the samples, `(n,)`.
        weights_id: of the weights that they were computed with.
        activation: `(n, seq, hidden)`, on its way to the host, in the stored dtype.
        lengths: tokens of each, `(n,)`.
        fields: inputs that are stored with it.
        digests: of the inputs that were read, `(n,)`.
        has_row: whether an earlier row knows the digest of the input, `(n,)`.
    """

    index: Indices
    weights_id: int
    activation: Arriving[torch.Tensor]
    lengths: Indices
    fields: dict[str, torch.Tensor]
    digests: npt.NDArray[np.uint64]
    has_row: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _ReadAhead:
    """Rows that are being read for the batch that is expected next."""

    index: Indices
    length: int
    rows: Future[Rows]


class _Once:
    """Calls a collective function the first time, and gives the same answer again after that."""

    def __init__(self, call: Callable[[int], int]) -> None:
        self.call = call
        self.answer: int | None = None

    def __call__(self, value: int) -> int:
        if self.answer is None:
            self.answer = self.call(value)
        return self.answer
