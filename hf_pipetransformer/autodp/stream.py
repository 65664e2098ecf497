"""A loader for data sets without indices: rank 0 reads, and gives every pipeline its part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import torch
from torch.utils.data import IterableDataset

from hf_pipetransformer.autodp.dealt import DealtLoader
from hf_pipetransformer.autodp.shares import Arrangement


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had one after the other."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))


class StreamLoader(DealtLoader):
    """Yields this replica's part of every global batch of a stream, on every stage of its pipeline.

    For the arguments see `PipelineLoader`; `loader` reads global batches, and rank 0 alone iterates it.
    """

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def num_samples(self) -> int:
        """Nobody knows."""
        return 0

    @property
    def num_done(self) -> int:
        return self.position * self.total_batch_size

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement()

    def order_state(self) -> torch.Tensor | None:
        return None

    def _begin_epoch(self) -> None:
        self._next, self._first = self._first, 0

    def _at_next(self) -> Iterator[Any]:
        coming = iter(self.loader)
        for _ in islice(coming, self._next):
            pass
        return coming
