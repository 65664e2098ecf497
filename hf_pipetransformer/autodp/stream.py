"""A loader for data sets without indices: rank 0 reads, and gives every pipeline its part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.dealt import DealtLoader
from hf_pipetransformer.autodp.draws import SharedDraws
from hf_pipetransformer.autodp.loader import SkipEmpty, worker_options
from hf_pipetransformer.autodp.topology import PipelineGroups


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had one after the other."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))


class StreamLoader(DealtLoader):
    """Yields this replica's part of every global batch of a stream, on every stage of its pipeline.

    Args:
        loader: over global batches; only rank 0 iterates it.
        groups: this rank's pipeline; a transition changes it (`follow`).
        placeholders: see `PipelineLoader`.
        timeout: seconds that a stage may wait for its batch.
        total_batch_size: samples in a full global batch.
        repeat_small: for evaluation, see `ReplicaBatchSampler`.
        shared: see `PipelineLoader`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        groups: PipelineGroups,
        placeholders: frozenset[str],
        timeout: float,
        total_batch_size: int,
        repeat_small: bool,
        shared: SharedDraws | None,
    ) -> None:
        super().__init__(loader, groups, placeholders, timeout, total_batch_size, 0, repeat_small, shared)

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
    def num_done(self) -> int:
        return self._next * self.total_batch_size

    @property
    def group_size(self) -> int | None:
        return None

    def order_state(self) -> torch.Tensor | None:
        return None

    def _begin_epoch(self) -> None:
        self._next, self._first = self._first, 0

    def _at_next(self) -> Iterator[Any]:
        coming = iter(self.loader)
        for _ in islice(coming, self._next):
            pass
        return coming


def make_stream_loader(
    dataset: Any,
    collate: Any,
    global_batch_size: int,
    args: PipeTransformerArguments,
    groups: PipelineGroups,
    placeholders: frozenset[str],
    is_training: bool,
    shared: SharedDraws | None = None,
) -> StreamLoader:
    """The loader of a data set that can only be iterated; see `make_pipeline_loader` for the arguments."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=global_batch_size, collate_fn=SkipEmpty(collate), **worker_options(args)
    )
    return StreamLoader(
        loader,
        groups,
        placeholders,
        args.pipeline_timeout,
        global_batch_size,
        not is_training,
        shared,
    )
