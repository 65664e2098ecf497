"""Price and store of a frozen part: whether reading its outputs pays, and the store that a node's processes share."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hf_pipetransformer.cache.folder import StoreFolder, Use, take_store
from hf_pipetransformer.cache.frozen_parts.call import Deferred
from hf_pipetransformer.cache.frozen_parts.contents import ContentStore
from hf_pipetransformer.cache.frozen_parts.served import weights_key
from hf_pipetransformer.cache.frozen_parts.serving import Price
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import OpenStores, cache_base, measure_storage, most_bytes, stored_dtype
from hf_pipetransformer.cache.store import ActivationStore, store_size
from hf_pipetransformer.comm.staging import is_apart
from hf_pipetransformer.planning.storing import Storing, decide_cache, epochs_of_a_record


if TYPE_CHECKING:
    from hf_pipetransformer.cache.frozen_parts.served import Form, Plan
    from hf_pipetransformer.cache.frozen_parts.serving import PartsRun
    from hf_pipetransformer.cache.frozen_parts.values import Rows


WORTH_SECONDS = 2.0
"""Predicted gain over the run, in seconds, below which `auto` makes no store."""
SPARE = 1024
"""Places of a small store beyond those of the rows that are known of; an index is sparse."""


class PartStores:
    """Prices and stores of the frozen parts of a training."""

    def __init__(self, run: PartsRun) -> None:
        self._run, self._topology, self._stores = run, run.topology, OpenStores()

    @property
    def args(self) -> Any:
        return self._run.args

    def price(self, form: Form, num_samples: int) -> Price:
        """Return what storing a part costs and saves; raises like `RecordFormat` and `measure_storage`.

        Args:
            num_samples: of the batch in which the part was seen.
        """
        base, num_rows = cache_base(self.args), self._num_rows(form.num_rows / num_samples)
        length, rows, content = form.length, form.rows, self._record_format(form)
        size = store_size(self._most_bytes, num_rows, content, length)
        speed = measure_storage(base, content, length, rows.number, num_rows)
        hashing = _seconds_of_hashing(rows)
        # A record is found by the hash of its inputs, so that each read and each write takes a hash too.
        read, write = speed.read + hashing, speed.write + hashing
        mode = self.args.activation_cache
        is_beside = is_apart(self.args.device)
        storing = Storing((0.0, form.seconds), read, write, is_beside, mode=mode, fits_share=size.share)
        way = decide_cache(storing, 1, self._epochs_left())
        saved = (way.seconds["compute"] - way.seconds.get("write", math.inf)) * num_rows
        is_used = way.use and (mode == "on" or saved >= WORTH_SECONDS)
        return Price(num_rows, content.record_bytes(length), size.needed, is_used, way.reason)

    def open(self, plan: Plan, form: Form, price: Price, settings: str) -> ContentStore | str:
        """Return the node's store, which its first process makes, or why some node has none. Collective.

        Args:
            settings: everything besides weights and inputs that outputs depend on, as text.
        """
        topology = self._topology
        writer, num_writers = topology.ranks_here.index(topology.rank), len(topology.ranks_here)

        def make() -> tuple[StoreFolder, ActivationStore]:
            # Evaluations may compute more rows than are known of.
            num_places, limit = 2 * price.num_rows + SPARE, int(self._most_bytes)
            use, content = Use.of(self._run.model, plan.name, self._run.train_dataset), self._record_format(form)
            key = self._key_of_store(plan, content, settings)
            return take_store(cache_base(self.args), key, num_places, content, limit, use, goes_on=True)

        found = self._stores.open(topology, make, writer)
        if isinstance(found, str):
            return found
        folder, store = found
        return ContentStore(store, writer, num_writers, folder)

    def _record_format(self, form: Form) -> RecordFormat:
        return RecordFormat(form.width, stored_dtype(self.args, form.dtype))

    @property
    def _most_bytes(self) -> float:
        # The option bounds the stores of all parts together.
        return most_bytes(self.args, self._stores.bytes_taken())

    def _num_rows(self, of_a_sample: float) -> int:
        if self.is_endless:
            samples = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            return math.ceil(of_a_sample * samples * self._steps_of_pass)
        # Evaluations look parts up, too.
        evaluated = self._run.eval_dataset
        others = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
        known = [each for each in (self._run.train_dataset, *others) if each is not None]
        # More than an estimate from a few samples.
        return math.ceil(1.1 * of_a_sample * sum(len(each) for each in known if hasattr(each, "__len__")))

    @property
    def is_endless(self) -> bool:
        """True if nobody knows how long a pass over the data set is before its end."""
        return not hasattr(self._run.train_dataset, "__len__") or not hasattr(self._run.train_loader, "__len__")

    @property
    def _steps_of_pass(self) -> float:
        state = self._run.state
        if self.is_endless:
            return float(state.global_step) / max(1, int(state.epoch or 0))
        return max(1, len(self._run.train_loader) // self.args.gradient_accumulation_steps)

    def _epochs_left(self) -> float:
        state, topology = self._run.state, self._topology
        epochs = (state.max_steps - state.global_step) / max(1, self._steps_of_pass)
        # Trainer deals the samples anew to all processes in each epoch, unless it reads them in their order.
        is_dealt = getattr(self.args, "train_sampling_strategy", None) != "sequential"
        return epochs_of_a_record(epochs, round(topology.world_size / len(topology.ranks_here)) if is_dealt else 1)

    def _key_of_store(self, plan: Plan, content: RecordFormat, settings: str) -> str | None:
        if not self.args.activation_cache_keep:
            return None
        return f"part-{xxhash.xxh3_128_hexdigest(f'{weights_key(plan, settings)}{content.to_json()}'.encode())}"


def _seconds_of_hashing(rows: Rows) -> float:
    start = time.perf_counter()
    # What is deferred is known by hashes that were taken before.
    rows.digests(b"", key_of=lambda each, _: np.zeros((rows.number, 2), np.uint64) if type(each) is Deferred else None)
    return (time.perf_counter() - start) / rows.number
