"""The stores of one training, one a data set: opening them together, naming their samples, leaving nothing behind."""

from __future__ import annotations

import json
import uuid
from functools import partial
from pathlib import Path

import xxhash

from hf_pipetransformer.autocache.cache import ActivationCache
from hf_pipetransformer.autocache.folder import StoreFolder, safe_max_bytes, take_store
from hf_pipetransformer.autocache.parts import SampleSource
from hf_pipetransformer.autocache.store import ActivationStore
from hf_pipetransformer.autocache.table import StoreDamagedError
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.report.events import announce, logger
from hf_pipetransformer.run.cache_inputs import CacheInputs


NUM_KEY_SAMPLES = 32
"""Samples that say whether a store that was kept is of the same inputs."""


class CacheStores:
    """Opens stores, in the form that `inputs` says, and closes them: one a node, which its ranks share."""

    def __init__(self, inputs: CacheInputs) -> None:
        self.inputs = inputs
        self.args = inputs.args
        self.topology = inputs.topology
        self._opened: list[ActivationCache] = []
        self._folders: list[StoreFolder] = []

    def open(self, loader: PipelineLoader, source: SampleSource, is_training: bool = True) -> ActivationCache | None:
        """A store for the samples of a loader; None if there is no room, on any node. A collective call."""
        topology, store, error = self.topology, None, None
        taken = self._bytes_taken()
        try:
            store = self._own_store(loader, source) if topology.is_first_here else None
        except (OSError, ValueError, StoreDamagedError) as found:
            error = str(found)
        made = topology.gather(["" if store is None else str(store.folder), "" if store is None else store.key, error])
        path, key, error = made[topology.ranks_here[0]]
        try:
            if error is None and store is None:
                store = ActivationStore.open(Path(path), topology.rank, key)
        except (OSError, ValueError, StoreDamagedError) as found:
            error = str(found)
        reason = self.inputs.first_told(error)
        if store is None or reason is not None:
            if store is not None:
                store.close()
            self.inputs.say_off(str(reason), is_training)
            return None
        if topology.rank == 0 and store.num_found:
            announce(
                f"The activation cache has the rows of an earlier run for {store.num_found} of {store.num_samples} "
                "samples. A row is used once its sample has been read again and found to be the same: the first epoch "
                "saves computing, but still reads the data set."
            )
        # All stores have one bound: what one takes the others cannot have.
        store.bytes_beside = partial(self._bytes_beside, store, taken)
        opened = ActivationCache(store, source, self.args.device)
        self._opened.append(opened)
        return opened

    def max_bytes(self) -> float:
        """What the next store may hold."""
        asked = self.args.activation_cache_max_gb
        if asked is None:
            return safe_max_bytes(self.inputs.base)
        return max(0.0, asked * 1e9 - self._bytes_taken())

    def _bytes_taken(self) -> int:
        return sum(cache.store.bytes_taken for cache in self._opened)

    def _bytes_beside(self, store: ActivationStore, taken: int) -> int:
        """What other stores have taken since they had taken `taken`."""
        return self._bytes_taken() - store.bytes_taken - taken

    def close(self) -> None:
        """Nothing is left behind, unless it was asked for."""
        for opened in self._opened:
            opened.close()
        for folder in self._folders:
            if folder.is_kept:
                folder.release()
            else:
                folder.remove()

    def _own_store(self, loader: PipelineLoader, source: SampleSource) -> ActivationStore:
        """The store that this rank makes for all on this node, or one that an earlier run kept here."""
        key = self._data_key(loader, source)
        folder, store = take_store(
            self.inputs.base,
            key or f"unnamed-{uuid.uuid4().hex}",
            len(loader.dataset) * source.num_views,
            self.inputs.row_format(source),
            int(self.max_bytes()),
            self.topology.world_size,
            row_length=0 if source.is_text else source.row_length,
        )
        self._folders.append(folder)
        if self.args.activation_cache_keep and key is not None:
            folder.keep()
        return store

    def _data_key(self, loader: PipelineLoader, source: SampleSource) -> str | None:
        """Names the samples, if that is possible: only a store of the same ones may be read again."""
        num_samples, fingerprint = len(loader.dataset), getattr(loader.dataset, "_fingerprint", None)
        if fingerprint is None:
            if self.args.activation_cache_keep:
                logger.warning(
                    f"activation_cache_keep: a {type(loader.dataset).__name__} has no fingerprint that a later run "
                    "could know it by, so the store is not kept. Use a datasets.Dataset."
                )
            return None
        # The fingerprint does not know the collator.
        spread = sorted({i * num_samples // NUM_KEY_SAMPLES for i in range(NUM_KEY_SAMPLES)})
        _, digests = source.digests(source.read(spread))
        # A kept store of rows of another kind stays beside this one. Any text may be a fingerprint.
        row_format = json.dumps(self.inputs.row_format(source).to_json(), sort_keys=True)
        # Draws are the seed's.
        drawn = "" if loader.views is None else f"\0{source.num_views}\0{loader.views.seed}"
        # Digests of inputs end with the real tokens, rows may not.
        fills = sorted(source.report.fill_values.items())
        padded = f"\0{source.pad_token_id}\0{fills}" if source.is_text and source.keeps_padding else ""
        name = xxhash.xxh3_128_hexdigest(f"{fingerprint}\0{row_format}{drawn}{padded}".encode())
        return f"{name}-{num_samples}-{xxhash.xxh3_64_hexdigest(digests.tobytes())}"
