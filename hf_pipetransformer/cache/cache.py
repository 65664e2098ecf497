"""Activation cache of one data set: one rank of a pipeline completes batches from its records and writes new ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_pipetransformer.cache.assembly import LENGTH_FIELD, BatchAssembler, Indices, SampleSource
from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.records import StoredRecords
from hf_pipetransformer.cache.store import ActivationStore, Counts
from hf_pipetransformer.comm.staging import CopyStream, is_apart
from hf_pipetransformer.data.batches import CacheTags, SampleBatch, real_lengths, take_rows
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.folder import StoreFolder
    from hf_pipetransformer.engine.program import MicroBatch


CHECKED_HITS = 256
"""After this many cached samples a few are still read from the data set, to verify that it has not changed."""

CHECKED_AT_ONCE = 4
"""Most samples of a batch that are verified, as the first of each epoch are: callbacks change data sets between."""

MAX_BATCHES_IN_FLIGHT = 16
"""Maximum number of micro-batches waiting in pinned memory to be written; beyond it, training waits for the disk."""


class ActivationCache:
    """Reader of the activations that the frozen blocks compute (PipeTransformer, section 3.4); `writer` stores them.

    A failure of the store turns the cache off with one warning; from then on, every sample is computed.
    """

    def __init__(
        self,
        store: ActivationStore,
        source: SampleSource,
        device: torch.device | None = None,
        folder: StoreFolder | None = None,
    ) -> None:
        self.store = store
        self._folder = folder
        """Of a store that this process has made."""
        self.source = source
        self.counts = Counts()
        self.level = 0
        self.stamp = 0
        """Number of `use_weights` calls: batches read under an older one are read again."""
        self.weights_id = 0
        self.is_off = False
        self._num_distrusted = 0
        self._level_of_id: dict[int, int] = {}
        self._hits_unchecked = 0
        self._has_warned = False
        self._pins = is_apart(device or torch.device("cpu"))
        # One thread, as one batch at most is read ahead.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="activation-cache")
        self._ahead: tuple[Indices, int, Future[StoredRecords]] | None = None
        """Samples, padded length and pending records of the batch expected next."""
        self.writer = RecordWriter(self, device or torch.device("cpu"))

    def use_weights(self, keys: Sequence[str]) -> None:
        """Switch to the weights named by `keys`, see `chain_keys`; records of other weights are no longer served."""
        self.stamp += 1
        # What was read ahead are records of the weights before.
        self._ahead = None
        self.writer.forget_pending()
        if self._num_distrusted:
            keys = [key and f"{key} {self.store.run_id} {self._num_distrusted}" for key in keys]
        self._level_of_id = {self.store.weights_id(key): level for level, key in enumerate(keys) if level}
        self.level = len(keys) - 1
        self.weights_id = self.store.weights_id(keys[-1])

    def distrust(self) -> None:
        """Let the next `use_weights` serve no record of before: the same weights compute another output now.

        Ranks that call it equally often share records from then on, and no later run does.
        """
        self._num_distrusted += 1

    def verify_next(self) -> None:
        """Have the inputs of the next stored samples verified."""
        self._hits_unchecked = CHECKED_HITS

    def switch_off(self, reason: str) -> None:
        """Stop serving and storing, on all ranks of this node."""
        if not self.is_off:
            logger.warning(f"The activation cache is off from here on, samples are computed: {reason}")
        self.is_off = True
        self.store.drop(reason)

    def close(self) -> None:
        self._reader.shutdown()
        self.writer.close()
        self.store.close()
        if self._folder is not None:
            self._folder.close(self.counts.hits, self.counts.misses)

    def select(self, samples: list[int]) -> list[int]:
        """Return those of `samples` that must be read from the data set."""
        index, entries, hit = self._found(samples)
        # A record of an earlier run counts only after its sample was read and compared in this run.
        is_served = hit & self.store.are_compared(index, entries)
        return [sample for sample, served in zip(samples, is_served.tolist(), strict=True) if not served]

    def complete(
        self, samples: list[int], read: list[int], batch: Mapping[str, Any], agree: Callable[[int], int]
    ) -> SampleBatch:
        """Return the batch of all `samples`, with stored activations of those that have one; see `RecordSource`."""
        source = self.source
        if not samples:
            # Collective: a replica without samples takes part as well.
            agree(0)
            return SampleBatch()
        # A batch selected before the cache went off lacks samples; the way below reads them.
        if self.is_off and len(read) == len(samples):
            return SampleBatch.of(source.padded(batch, agree(source.length_of(batch))))
        agreed: list[int] = []

        # `_completed` may run twice, but the other replicas take part in `agree` only once.
        def agree_once(length: int) -> int:
            if not agreed:
                agreed.append(agree(length))
            return agreed[0]

        try:
            return self._completed(samples, read, batch, agree_once)
        except (StoreDamagedError, KeyError) as error:
            # The padded length is independent of what is stored, so the length the replicas agreed on is still valid.
            self.switch_off(str(error))
            # Now the store answers that nothing is stored, so all samples that are missing are read.
            return self._completed(samples, read, batch, agree_once)

    def _completed(
        self, samples: list[int], read: list[int], batch: Mapping[str, Any], agree: Callable[[int], int]
    ) -> SampleBatch:
        index, entries, hit = self._found(samples)
        parts = BatchAssembler(self.source)
        # The store may have changed since `select`: use records that appeared, read samples whose record is gone.
        is_read = np.isin(index, read)
        hit = self._compared(index, entries, hit, is_read, batch)
        parts.add(is_read & ~hit, batch, is_read)
        parts.read(~hit & ~is_read, samples)
        lengths = self.source.lengths_in(entries[hit])
        # Agreed on before records are read: the length sets the shape that they are read into.
        length = agree(parts.padded_length(lengths, is_checked=not self.is_off))
        records = self._read_records(index[hit], length) if hit.any() else None
        levels = np.zeros(len(index), dtype=np.int64)
        if records is not None:
            # By the ids that came with the records: the entries above are older.
            levels[hit] = self._levels(records.weights_ids)
            if self.source.keeps_padding:
                # Stored as part of a shorter batch, a record lacks padding positions that the loss sees.
                levels[hit] *= records.lengths >= self.source.kept_of(length)
            lost = hit & (levels == 0)
            if lost.any():
                # Or another process has started to overwrite the record.
                records = records.take(levels[hit] > 0)
                parts.read(lost, samples)
                hit &= ~lost
        if self.level:
            self.counts.hits += int(hit.sum())
            self.counts.misses += len(samples) - int(hit.sum())
        inputs, digests, hidden = parts.joined(levels > 0, records, length)
        # As int64 of the same bits, because torch supports uint64 in few operations.
        tagged, num_layers, known = (torch.from_numpy(values) for values in (index, levels, digests.view(np.int64)))
        return CacheTags(tagged, num_layers, known, self.stamp, hidden).attach(SampleBatch(inputs))

    def _compared(self, index: Indices, entries: Any, hit: Any, is_read: Any, batch: Mapping[str, Any]) -> Any:
        """Return the part of the mask `hit` whose records match the inputs of the data set in this run.

        Records of an earlier run count only after their sample was read and compared: the name of a kept store covers
        just a few collated samples, so a change elsewhere shows only here.
        """
        known = hit & self.store.are_compared(index, entries)
        asked = hit & ~known & is_read
        if not asked.any():
            return known
        _, found = self.source.digests(batch)
        same = asked.copy()
        same[is_read] &= found == entries["input_digest"][is_read]
        self.store.set_compared(index[same], entries["input_digest"][same])
        self.counts.checked += int(same.sum())
        others = index[asked & ~same]
        if len(others) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The activation cache of an earlier run has records of different inputs (first: sample "
                f"{others[0]}); these samples are computed again."
            )
        return known | same

    def _found(self, samples: list[int]) -> tuple[Indices, Any, Any]:
        """Return samples as an array, their entries, and the mask of those that have a record for these weights."""
        index = np.asarray(samples, dtype=np.int64)
        try:
            entries = self.store.entries(index)
        except StoreDamagedError as error:
            self.switch_off(str(error))
            # After `switch_off` the store touches no file: each entry comes back empty.
            entries = self.store.entries(index)
        return index, entries, self._levels(entries["weights_id"]) > 0

    def _levels(self, weights_ids: Indices) -> Indices:
        """Return the number of blocks each record covers; 0 for other weights."""
        return np.array([self._level_of_id.get(found, 0) for found in weights_ids.tolist()], dtype=np.int64)

    def stored_share(self, samples: Indices) -> float:
        """Return the share of the samples' records that are stored for the present weights; 0 to 1.

        Raises:
            StoreDamagedError: the index cannot be read.
        """
        ids = self.store.weights_ids(samples)
        return float(np.isin(ids, list(self._level_of_id)).mean())

    def some_records(self, most: int) -> list[dict[str, Any]]:
        """Return samples that have records for the present weights, as inputs, activations and level.

        At most `most` samples of each level; those whose input is not the stored one any more are left out.
        """
        levels = self._levels(self.store.weights_ids(np.arange(self.store.num_samples)))
        return [self._some_of_level(level, np.flatnonzero(levels == level), most) for level in sorted({*levels} - {0})]

    def _some_of_level(self, level: int, samples: Indices, most: int) -> dict[str, Any]:
        source = self.source
        samples = samples[np.linspace(0, len(samples) - 1, min(most, len(samples))).astype(np.int64)]
        entries = self.store.entries(samples)
        batch = source.read(samples.tolist())
        lengths, digests = source.digests(batch)
        length = source.length_of(batch)
        records = self.store.read(samples, length)
        tokens = lengths if source.is_text else np.full(len(samples), length)
        tokens = np.where(digests == entries["input_digest"], np.minimum(tokens, records.lengths), 0)
        return {"level": int(level), "batch": dict(batch), "activation": records.activation, "tokens": tokens.tolist()}

    def prefetch(self, samples: list[int]) -> None:
        """Start reading the next batch's records, as far as there are any; the result may go unused.

        Not if samples without a record, whose lengths are not known, decide to what length the others are padded.
        """
        self._ahead = None
        index, entries, hit = self._found(samples)
        if not hit.any():
            return
        index = index[hit]
        length = self.source.padded_length(int(self.source.lengths_in(entries[hit]).max()))
        if not hit.all() and length != self.source.padded_length(1):
            return
        self._ahead = index, length, self._reader.submit(self._read_ahead, index, length)

    def _read_ahead(self, index: Indices, length: int) -> StoredRecords:
        records = self.store.read(index, length)
        return replace(records, activation=records.activation.pin_memory()) if self._pins else records

    def _read_records(self, index: Indices, length: int) -> StoredRecords:
        start = time.perf_counter()
        try:
            self._check_inputs(index)
            ahead, self._ahead = self._ahead, None
            # Records may have come or gone since the batch was predicted, and its length with them.
            if ahead is not None and ahead[1] == length and np.array_equal(ahead[0], index):
                return ahead[2].result()
            return self.store.read(index, length)
        finally:
            self.counts.read_seconds += time.perf_counter() - start

    def _check_inputs(self, index: Indices) -> None:
        """Read inputs of stored samples again, at first in an epoch; raise if the data set has changed."""
        self._hits_unchecked += len(index)
        if self._hits_unchecked < CHECKED_HITS:
            return
        self._hits_unchecked = min(self._hits_unchecked - CHECKED_HITS, CHECKED_HITS - 1)
        some = index[:CHECKED_AT_ONCE]
        _, found = self.source.digests(self.source.read(some.tolist()))
        self.counts.checked += len(some)
        entries = self.store.entries(some)
        # An empty entry belongs to a record that is being written anew.
        differing = [
            int(number)
            for number, digest, entry in zip(some, found, entries, strict=True)
            if entry["weights_id"] and digest != entry["input_digest"]
        ]
        if differing:
            raise StoreDamagedError(
                f"sample {differing[0]} of the data set is not what it was when its activation was stored. The data "
                "set or its transform changes: set activation_cache='off', or make it give the same sample each time."
            )


class RecordWriter:
    """Writer of the activations that the engine computes, on a thread of its own if they come from a GPU."""

    def __init__(self, cache: ActivationCache, device: torch.device) -> None:
        self.cache = cache
        self._is_apart = is_apart(device)
        self._copies = CopyStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="activation-cache-writer")
        self._pending: list[Callable[[], int]] = []
        self._writing: deque[Future[int]] = deque()

    def write(self, micro_batch: MicroBatch, hidden: torch.Tensor) -> None:
        """Store the activations after `level` blocks of the samples that have no record at that level yet."""
        tags = micro_batch.tags
        assert tags is not None
        chosen = (tags.num_layers < self.cache.level).nonzero().squeeze(1)
        if self.cache.is_off or not len(chosen):
            return
        start = time.perf_counter()
        store_records = self._prepared(micro_batch, tags, hidden, chosen)
        if not self._is_apart:
            self._count_written(store_records)
        else:
            # On a GPU, a change of the weights shows one batch late: keep the record until they are verified.
            self._pending.append(store_records)
            self._count_finished(MAX_BATCHES_IN_FLIGHT)
        self.cache.counts.write_seconds += time.perf_counter() - start

    def forget_pending(self) -> None:
        """Drop records that were computed with weights that may have changed already."""
        self._pending.clear()

    def write_pending(self) -> None:
        """Hand pending records to the writer thread, once their weights are verified as unchanged."""
        while self._pending:
            self._writing.append(self._thread.submit(self._pending.pop(0)))
        self._count_finished(MAX_BATCHES_IN_FLIGHT)

    def wait(self) -> None:
        """Wait until the writer thread has stored everything handed to it."""
        self._count_finished(0)

    def close(self) -> None:
        self._thread.shutdown()

    def _count_finished(self, num_left: int) -> None:
        while self._writing and (len(self._writing) > num_left or self._writing[0].done()):
            self._count_written(self._writing.popleft().result)

    def _count_written(self, written: Callable[[], int]) -> None:
        try:
            self.cache.counts.written += written()
        # ValueError: the samples do not fit the format, such as token fields beyond int32.
        except (StoreDamagedError, OSError, ValueError) as error:
            self.cache.switch_off(str(error))

    def _prepared(
        self, micro_batch: MicroBatch, tags: CacheTags, hidden: torch.Tensor, chosen: torch.Tensor
    ) -> Callable[[], int]:
        """Start copying samples of a micro-batch to the host; return a function that stores and counts them."""
        cache, store, source = self.cache, self.cache.store, self.cache.source
        is_all = len(chosen) == len(tags.num_layers)
        given = micro_batch.inputs if micro_batch.on_host is None else micro_batch.on_host
        inputs = given if is_all else take_rows(given, chosen)
        activation = (hidden if is_all else hidden[chosen.to(hidden.device, non_blocking=True)]).detach()
        # With an asynchronous copy, clone: the model may modify the activation in place before it is read.
        arriving = self._copies.to_host(activation.to(store.record_format.dtype, copy=self._is_apart))
        samples, weights_id = tags.samples[chosen].numpy(), cache.weights_id
        fields = {name: inputs[name].cpu() for name in (*source.report.token_fields, *source.report.sample_fields)}
        lengths = np.full(len(samples), source.kept_of(activation.shape[1]))
        if source.is_text:
            real = real_lengths(fields, source.main_input)
            fields[LENGTH_FIELD] = torch.from_numpy(real.astype(np.int32))
            lengths = lengths if source.keeps_padding else real
        # The input of a cached sample was not read, so its digest comes from the record being replaced.
        has_record, found = tags.num_layers[chosen].numpy() > 0, tags.digests[chosen].numpy().view(np.uint64)

        def store_records() -> int:
            if cache.is_off:
                return 0
            digests = np.where(has_record, store.entries(samples)["input_digest"], found)
            return store.write(samples, weights_id, arriving.on_host(), lengths, fields, digests)

        return store_records
