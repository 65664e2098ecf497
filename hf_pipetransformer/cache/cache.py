"""Activation cache of one data set: one rank of a pipeline finds the records of batches and writes new ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from hf_pipetransformer.cache.files import Array, StoreDamagedError
from hf_pipetransformer.cache.records import StoredRecords
from hf_pipetransformer.cache.store import ActivationStore, Counts
from hf_pipetransformer.comm.staging import CopyStream, is_apart
from hf_pipetransformer.data.batches import CacheTags, SampleBatch, take_rows
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.folder import StoreFolder
    from hf_pipetransformer.cache.inputs import SampleForm
    from hf_pipetransformer.engine.program import MicroBatch


Indices = npt.NDArray[np.int64]

MAX_BATCHES_IN_FLIGHT = 16
"""Maximum number of micro-batches waiting in pinned memory to be written; beyond it, training waits for the disk."""


class ActivationCache:
    """Reader of the activations that the frozen blocks compute (PipeTransformer, section 3.4); `writer` stores them.

    A failure of the store turns the cache off with one warning; from then on, every sample is computed.
    """

    def __init__(
        self,
        store: ActivationStore,
        form: SampleForm,
        device: torch.device | None = None,
        folder: StoreFolder | None = None,
    ) -> None:
        self.store = store
        self._folder = folder
        """Of a store that this process has made."""
        self.form = form
        self.counts = Counts()
        self.level = 0
        self.stamp = 0
        """Number of `use_weights` calls: batches read under an older one are read again."""
        self.weights_id = 0
        self.is_off = False
        self._num_distrusted = 0
        self._level_of_id: dict[int, int] = {}
        self._num_changed = self._num_same = 0
        """Samples with a record that were read in this epoch, and found to be others, or the same."""
        # An earlier run may have had other samples.
        self._may_be_of_others = store.num_found > 0
        self._has_said_changed = self._has_said_unfit = False
        self._pins = is_apart(device or torch.device("cpu"))
        # One thread, as one batch at most is read ahead.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="activation-cache")
        self._ahead: tuple[Indices, int, Future[StoredRecords]] | None = None
        """Samples, length and pending records of the batch expected next."""
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

    @property
    def state(self) -> list[int]:
        """State that the ranks of a pipeline have in common: how often weights were named, and distrusted."""
        return [self.stamp, self._num_distrusted]

    def follow(self, state: list[int]) -> None:
        """Go on from the `state` of another rank."""
        self.stamp, self._num_distrusted = state

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

    def tagged(self, samples: list[int], batch: SampleBatch, before: CacheTags | None = None) -> SampleBatch:
        """Return a batch of these samples with the activations of those that have a record; see `RecordSource`."""
        if before is not None:
            self._count(before.num_layers.numpy(), -1)
        if self.is_off or not samples:
            return batch
        if (why := self.form.why_unfit(batch, len(samples))) is not None:
            if not self._has_said_unfit:
                self._has_said_unfit = True
                logger.warning(f"Nothing is stored of some batches, which are computed in every epoch: {why}")
            return batch
        digests, index = self.form.digests(batch), np.asarray(samples, dtype=np.int64)
        try:
            levels, hidden = self._found(index, digests, batch)
        except StoreDamagedError as error:
            self.switch_off(str(error))
            return batch
        self._count(levels)
        # As int64 of the same bits, because torch supports uint64 in few operations.
        tagged, num_layers, words = (torch.from_numpy(values) for values in (index, levels, digests.view(np.int64)))
        return CacheTags(tagged, num_layers, words, self.stamp, hidden).attach(batch)

    def _found(self, index: Indices, digests: Array, batch: SampleBatch) -> tuple[Indices, torch.Tensor | None]:
        """Return of how many layers the output is known for a sample `(batch,)`, and these outputs, zero for others.

        Raises:
            StoreDamagedError: a file of the store is gone or was changed.
        """
        entries = self.store.entries(index)
        levels = self._levels(entries["weights_id"])
        is_same = (entries["digest"] == digests).all(axis=1)
        self._note_changed(index[(levels > 0) & ~is_same], int(((levels > 0) & is_same).sum()))
        # Stored as part of a shorter batch, a record lacks padding positions that the loss sees.
        levels[~is_same | (entries["length"] < self.form.kept_of(batch))] = 0
        hit = levels > 0
        if not hit.any():
            return levels, None
        records = self._read_records(index[hit], self.form.length_of(batch))
        # By the ids that came with the records: the entries above are older, and another process may have started to
        # overwrite a record.
        levels[hit] = self._levels(records.weights_ids)
        if hit.all():
            return levels, records.activation
        whole = records.activation.new_zeros(len(index), *records.activation.shape[1:])
        whole[torch.from_numpy(np.flatnonzero(hit))] = records.activation
        return levels, whole

    def _count(self, levels: Indices, times: int = 1) -> None:
        if self.level:
            self.counts.hits += times * int((levels > 0).sum())
            self.counts.misses += times * int((levels == 0).sum())

    def _note_changed(self, changed: Indices, num_same: int) -> None:
        """Count samples with a record that were read again, and say once if some are others now."""
        self._num_changed += len(changed)
        self._num_same += num_same
        if len(changed) and not self._has_said_changed:
            self._has_said_changed = True
            logger.warning(
                f"Sample {changed[0]} of the data set is not what it was when its activation was stored. Such samples "
                "are computed again."
            )

    def end_epoch(self) -> None:
        """Stop storing if most samples that had a record were others when they were read again."""
        changed, same, is_of_run = self._num_changed, self._num_same, not self._may_be_of_others
        self._num_changed, self._num_same, self._may_be_of_others = 0, 0, False
        if changed > same and is_of_run and not self.is_off:
            self.switch_off(
                f"{changed} of {changed + same} samples were others when they were read again. The data set, its "
                "transform or the collator changes them (augmentation, or values that depend on the others in a "
                "batch): make them give the same sample each time, or set activation_cache='off'."
            )

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

    def prefetch(self, samples: list[int]) -> None:
        """Start reading the next batch's records, as far as there are any; the result may go unused."""
        self._ahead = None
        index = np.asarray(samples, dtype=np.int64)
        try:
            entries = self.store.entries(index)
        # Said when the batch itself is looked up.
        except StoreDamagedError:
            return
        hit = self._levels(entries["weights_id"]) > 0
        if self.is_off or not hit.any():
            return
        length = int(entries["length"][hit].max())
        self._ahead = index[hit], length, self._reader.submit(self._read_ahead, index[hit], length)

    def _read_ahead(self, index: Indices, length: int) -> StoredRecords:
        records = self.store.read(index, length)
        return replace(records, activation=records.activation.pin_memory()) if self._pins else records

    def _read_records(self, index: Indices, length: int) -> StoredRecords:
        start = time.perf_counter()
        try:
            ahead, self._ahead = self._ahead, None
            # Records may have come or gone since the batch was predicted.
            if ahead is None or not np.array_equal(ahead[0], index):
                return self.store.read(index, length)
            found = ahead[2].result()
            # To what length the batch is padded was not known.
            return replace(found, activation=pad(found.activation, (0, 0, 0, length - ahead[1])))
        finally:
            self.counts.read_seconds += time.perf_counter() - start


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
        # ValueError: an activation does not fit the format.
        except (StoreDamagedError, OSError, ValueError) as error:
            self.cache.switch_off(str(error))

    def _prepared(
        self, micro_batch: MicroBatch, tags: CacheTags, hidden: torch.Tensor, chosen: torch.Tensor
    ) -> Callable[[], int]:
        """Start copying samples of a micro-batch to the host; return a function that stores and counts them."""
        cache, store = self.cache, self.cache.store
        is_all = len(chosen) == len(tags.num_layers)
        given = micro_batch.inputs if micro_batch.on_host is None else micro_batch.on_host
        lengths = cache.form.kept_of(given if is_all else take_rows(given, chosen))
        activation = (hidden if is_all else hidden[chosen.to(hidden.device, non_blocking=True)]).detach()
        # With an asynchronous copy, clone: the model may modify the activation in place before it is read.
        arriving = self._copies.to_host(activation.to(store.record_format.dtype, copy=self._is_apart))
        samples, weights_id = tags.samples[chosen].numpy(), cache.weights_id
        digests = tags.digests[chosen].numpy().view(np.uint64)

        def store_records() -> int:
            if cache.is_off:
                return 0
            return store.write(samples, weights_id, arriving.on_host(), lengths, digests)

        return store_records
