"""One data set's stored activations, as one rank of a pipeline reads and writes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_pipetransformer.cache.inputs import real_lengths
from hf_pipetransformer.cache.parts import DRAW_FIELD, LENGTH_FIELD, Indices, Parts, SampleSource, positions_of
from hf_pipetransformer.cache.rows import Rows, field_column
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.cache.table import StoreDamagedError
from hf_pipetransformer.comm.staging import CopyStream, is_apart
from hf_pipetransformer.data.batches import CacheTags, pad_batch, take_rows
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.report import logger


CHECKED_HITS = 256
"""One in so many stored samples is read from the data set all the same, to see that it still is what it was."""

MAX_BATCHES_IN_FLIGHT = 16
"""Micro-batches whose rows wait in pinned memory to be stored; beyond it training waits for the disk."""


@dataclass
class CacheCounts:
    """What a cache did since it was last asked: samples, rows, and seconds spent on rows.

    A hit is a sample whose activation was read, a miss one that was computed; a checked sample is a hit whose input
    was read from the data set all the same and compared. Where nothing is to be stored, none of the samples counts.
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
        self.stamp = 0  # How often the weights that rows count for were named.
        self._weights_id = 0
        self._level_of_id: dict[int, int] = {}
        self._hits_unchecked = 0
        self._is_off = False
        self._has_warned = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="activation-cache")
        self._ahead: tuple[Indices, int, Future[Rows]] | None = None
        """Samples and length of the rows that are being read for the batch that is expected next."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="activation-cache-writer")
        self._pending: list[Callable[[], int]] = []
        self._writing: deque[Future[int]] = deque()

    def use_weights(self, keys: Sequence[str]) -> None:
        """From now on the weights are those of `keys`, see `chain_keys`; rows of others are not served."""
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
        index = np.asarray(samples, dtype=np.int64)
        entries = self._entries(index)
        is_served = (self._levels_of(index, entries) > 0) & self.store.are_compared(
            self.source.rows_of(index), entries
        )
        return [sample for sample, served in zip(samples, is_served.tolist(), strict=True) if not served]

    def complete(
        self, samples: list[int], read: list[int], batch: Mapping[str, Any], agree: Callable[[int], int]
    ) -> dict[str, Any]:
        """The batch of all `samples`, with the stored activations of those that have one; see `RowSource`."""
        if not samples:
            agree(0)
            return {}
        if self._is_off and len(read) == len(samples):
            return self._as_read(batch, agree)
        agreed: list[int] = []

        def agree_once(length: int) -> int:
            if not agreed:
                agreed.append(agree(length))
            return agreed[0]

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
        hit = self._levels_of(index, entries) > 0
        parts = Parts(self.source)
        # What was read although it is stored by now is taken from the store; what was counted on and is gone is read.
        is_read = positions_of(read, samples)
        hit = self._compared(index, entries, hit, is_read, batch)
        parts.add(is_read & ~hit, batch, is_read)
        parts.read(~hit & ~is_read, samples)
        known = entries[hit][field_column(LENGTH_FIELD)] if self.source.is_text else []
        length = agree(parts.padded_length(known, is_checked=not self._is_off))
        if self.source.keeps_padding:
            # It was stored for a shorter batch.
            too_short = hit & (entries["length"] < length)
            parts.read(too_short, samples)
            hit &= ~too_short
        rows = self._read_rows(index[hit], length) if hit.any() else None
        if rows is not None:
            lost = np.zeros_like(hit)
            lost[hit] = self._levels_in(index[hit], rows) == 0
            if lost.any():
                # Another process was writing it.
                rows = rows.take(~lost[hit])
                parts.read(lost, samples)
                hit &= ~lost
        if self.level:
            self.counts.hits += int(hit.sum())
            self.counts.misses += len(samples) - int(hit.sum())
        levels = np.zeros(len(index), dtype=np.int64)
        if rows is not None:
            levels[hit] = self._levels_in(index[hit], rows)
        return parts.joined(index, levels, rows, self.stamp, length)

    def _compared(self, index: Indices, entries: Any, hit: Any, is_read: Any, batch: Mapping[str, Any]) -> Any:
        """Those of `hit` whose rows are of the inputs that the data set gives in this run.

        Rows that an earlier run left are compared with what was read; those whose sample was not read count for
        nothing yet. The name of a store knows a few samples of the collator's only, and a change may be in others.
        """
        rows = self.source.rows_of(index)
        known = hit & self.store.are_compared(rows, entries)
        asked = hit & ~known & is_read
        if not asked.any():
            return known
        _, found = self.source.digests(batch)
        same = asked.copy()
        same[is_read] &= found == entries["input_digest"][is_read]
        self.store.set_compared(rows[same], entries["input_digest"][same])
        self.counts.checked += int(same.sum())
        others = index[asked & ~same]
        if len(others) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"The activation cache of an earlier run has rows of other inputs than data set and collator give now "
                f"(sample {self.source.sample_of(int(others[0]))} is the first): such samples are computed anew."
            )
        return known | same

    def _as_read(self, batch: Mapping[str, Any], agree: Callable[[int], int]) -> dict[str, Any]:
        """A batch that was read whole, as without a cache."""
        source = self.source
        length = agree(batch[source.main_input].shape[1] if source.is_text else 0)
        return pad_batch(batch, source.main_input, length, source.pad_token_id) if source.is_text else dict(batch)

    def _entries(self, index: Indices) -> Any:
        """What the index says of samples; zeros once the cache is off."""
        places = self.source.rows_of(index)
        try:
            return self.store.entries(places)
        except StoreDamagedError as error:
            self.switch_off(str(error))
            return self.store.entries(places)

    def _levels_of(self, index: Indices, entries: Any) -> Indices:
        """Layers that each sample's row holds the output of, by its entry; 0 if of other weights or another draw."""
        views = self.source.views
        return self._levels(index, entries["weights_id"], None if views is None else entries[field_column(DRAW_FIELD)])

    def _levels_in(self, index: Indices, rows: Rows) -> Indices:
        """The same of rows that were read."""
        views = self.source.views
        return self._levels(index, rows.weights_ids, None if views is None else rows.fields[DRAW_FIELD].numpy())

    def _levels(self, index: Indices, ids: Indices, draws: Any) -> Indices:
        levels, views = self._levels_of_ids(ids), self.source.views
        if views is not None:
            # The place may hold an older draw, or one of a run that went on from another point.
            levels[draws != views.draws_of(index)] = 0
        return levels

    def _levels_of_ids(self, ids: Indices) -> Indices:
        return np.array([self._level_of_id.get(found, 0) for found in ids.tolist()], dtype=np.int64)

    def stored_share(self, samples: Indices) -> float:
        """Share of the rows of some samples that are stored, of the weights that are loaded now.

        Raises:
            StoreDamagedError: the index cannot be read.
        """
        ids = self.store.weights_ids(self.source.all_rows_of(samples))
        return float((self._levels_of_ids(ids) > 0).mean())

    def prefetch(self, samples: list[int]) -> None:
        """Begin to read the rows of the next batch, if it will need nothing else: a guess that may come to nothing."""
        self._ahead = None
        index = np.asarray(samples, dtype=np.int64)
        entries = self._entries(index)
        if not len(index) or not self._levels_of(index, entries).all():
            return
        longest = int(entries[field_column(LENGTH_FIELD)].max()) if self.source.is_text else 0
        length = self.source.padded_length(longest)
        self._ahead = index, length, self._reader.submit(self._read_and_pin, index, length)

    def _read_and_pin(self, index: Indices, length: int) -> Rows:
        rows = self.store.read(self.source.rows_of(index), length)
        return replace(rows, activation=rows.activation.pin_memory()) if self._is_apart else rows

    def _read_rows(self, index: Indices, length: int) -> Rows:
        start = time.perf_counter()
        try:
            self._check_inputs(index)
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[1] == length and np.array_equal(ahead[0], index):
                return ahead[2].result()
            return self.store.read(self.source.rows_of(index), length)
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
        _, found = self.source.digests(self.source.read(index[:1].tolist()))
        self.counts.checked += 1
        (entry,) = self.store.entries(self.source.rows_of(index[:1]))
        if entry["weights_id"] and found[0] != entry["input_digest"]:
            sample = self.source.sample_of(int(index[0]))
            raise StoreDamagedError(
                f"sample {sample} of the data set is not what it was when its activation was stored. The data set or "
                "its transform changes: set activation_cache='off', or make it give the same sample each time."
            )

    # ---- writing: the engine's side ----

    def write(self, micro_batch: MicroBatch, hidden: torch.Tensor) -> None:
        """Store the activations after `level` layers of those samples that are not stored so far up."""
        tags = micro_batch.tags
        assert tags is not None
        rows = (tags.num_layers < self.level).nonzero().squeeze(1)
        if self._is_off or not len(rows):
            return
        start = time.perf_counter()
        store_rows = self._prepared(micro_batch, tags, hidden, rows)
        if not self._is_apart:
            self._count_written(store_rows)
        else:
            self._pending.append(store_rows)
            self._count_finished(MAX_BATCHES_IN_FLIGHT)
        self.counts.write_seconds += time.perf_counter() - start

    def write_pending(self) -> None:
        """The weights are those that were named, so what was computed with them may be stored: by a thread."""
        while self._pending:
            self._writing.append(self._writer.submit(self._pending.pop(0)))
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

    def _prepared(
        self, micro_batch: MicroBatch, tags: CacheTags, hidden: torch.Tensor, rows: torch.Tensor
    ) -> Callable[[], int]:
        """Begin to copy those rows of a micro-batch to the host; what stores them, and says how many."""
        is_all = len(rows) == len(tags.num_layers)
        given = micro_batch.inputs if micro_batch.on_host is None else micro_batch.on_host
        inputs = given if is_all else take_rows(given, rows)
        activation = (hidden if is_all else hidden[rows.to(hidden.device, non_blocking=True)]).detach()
        # A copy of its own where it is read later: the model may go on to change it in place.
        arriving = self._copies.to_host(activation.to(self.store.row_format.dtype, copy=self._is_apart))
        samples, weights_id, views = tags.samples[rows].numpy(), self._weights_id, self.source.views
        index = self.source.rows_of(samples)
        names = [*self.source.report.token_fields, *self.source.report.sample_fields]
        fields = {name: inputs[name].cpu() for name in names}
        lengths = np.full(len(index), activation.shape[1], dtype=np.int64)
        if self.source.is_text:
            real = real_lengths(fields, self.source.main_input)
            fields[LENGTH_FIELD] = torch.from_numpy(real.astype(np.int32))
            lengths = lengths if self.source.keeps_padding else real
        if views is not None:
            fields[DRAW_FIELD] = torch.from_numpy(views.draws_of(samples).astype(np.int32))
        # An earlier row knows the digest of an input that was not read.
        has_row, found = tags.num_layers[rows].numpy() > 0, tags.digests[rows].numpy().view(np.uint64)

        def store_rows() -> int:
            if self._is_off:
                return 0
            digests = np.where(has_row, self.store.entries(index)["input_digest"], found)
            return self.store.write(index, weights_id, arriving.on_host(), lengths, fields, digests)

        return store_rows
