"""The stores of frozen parts of one run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hf_pipetransformer.cache.frozen_parts.contents import ContentStore
from hf_pipetransformer.cache.frozen_parts.serving import Price
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.training.part_stores import PartStores


BOUND = 10**6


def stores_of_two(folder: Path) -> list[ContentStore]:
    """Stores of two parts that were opened one after the other, before either had a record."""
    args = SimpleNamespace(
        activation_cache_dir=str(folder),
        activation_cache_max_gb=BOUND / 1e9,
        activation_cache_keep=False,
        activation_cache_dtype="auto",
    )
    run: Any = SimpleNamespace(
        args=args,
        topology=Topology(timeout=5, local_world_size=None),
        model=torch.nn.Linear(1, 1),
        train_dataset=range(9),
    )
    form: Any = SimpleNamespace(width=64, dtype=torch.float32)
    stores, opened = PartStores(run), list[ContentStore]()
    for name in ("tower", "encoder"):
        plan: Any = SimpleNamespace(name=name)
        store = stores.open(plan, form, Price(1000, 1024.0, 1e6, True, ""), "")
        assert isinstance(store, ContentStore)
        store.use_weights("weights")
        opened.append(store)
    return opened


def fill(store: ContentStore, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, 2**63, (50, 2)).astype(np.uint64)
    store.write(keys, torch.ones(50, 4, 64), np.full(50, 4))


def test_stores_of_all_parts_share_one_bound(tmp_path: Path) -> None:
    opened = stores_of_two(tmp_path)
    for step in range(20):
        for number, store in enumerate(opened):
            fill(store, 2 * step + number)
    taken = sum(store._store.bytes_taken for store in opened)
    assert 0.95 * BOUND < taken <= BOUND
    for store in opened:
        store.close()
