"""Reading a data set: in which order, how much at a time, and with which workers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.draws import SharedDraws
from hf_pipetransformer.autodp.sampler import ReplicaBatchSampler
from hf_pipetransformer.autodp.seeding import SeededReading
from hf_pipetransformer.autodp.topology import PipelineGroups


def indexed_reader(
    dataset: Any,
    collate: Any,
    sampler: Sampler[int] | None,
    batch_size: int,
    args: PipeTransformerArguments,
    groups: PipelineGroups,
    is_training: bool,
    shared: SharedDraws | None,
    seeded: SeededReading | None = None,
) -> DataLoader[Any]:
    """Torch's loader over one replica's part of each global batch.

    Args:
        dataset: samples by index.
        collate: samples to a batch.
        sampler: Trainer's sampler; None reads in order. One that is random becomes the same on every rank.
        batch_size: samples of a global batch.
        args: for the loader's own options and seeds.
        groups: this rank's pipeline.
        is_training: whether a replica may be left without samples, and workers are seeded.
        shared: see `PipelineLoader`.
        seeded: how random samples are read of which views are stored; None for all others.
    """
    order = order_of_run(dataset, sampler, args, shared)
    global_batches = BatchSampler(order, batch_size, args.dataloader_drop_last)
    own_batches = ReplicaBatchSampler(global_batches, groups.replica, groups.num_replicas, not is_training)
    worker_init = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
    own_batches.views = None if seeded is None else seeded.views
    return DataLoader(
        Samples(dataset) if seeded is None else seeded.samples,
        batch_sampler=own_batches,
        collate_fn=SkipEmpty(collate if seeded is None else seeded.collate),
        **_worker_options(args),
        worker_init_fn=worker_init if is_training else None,
    )


def stream_reader(dataset: Any, collate: Any, batch_size: int, args: PipeTransformerArguments) -> DataLoader[Any]:
    """Torch's loader over the global batches of a stream; for the arguments see `indexed_reader`."""
    return DataLoader(dataset, batch_size=batch_size, collate_fn=SkipEmpty(collate), **_worker_options(args))


def _worker_options(args: PipeTransformerArguments) -> dict[str, Any]:
    """What torch's loader is told of workers and memory."""
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "in_order": args.dataloader_in_order,
    }


def order_of_run(
    dataset: Any, given: Sampler[int] | None, args: PipeTransformerArguments, shared: SharedDraws | None
) -> Any:
    """Trainer's order for this seed, not drawn from generators in which ranks differ; a sampler.

    For the arguments see `indexed_reader`.
    """
    sampler: Any = given or SequentialSampler(dataset)
    seed = args.data_seed if args.data_seed is not None else args.seed
    if type(sampler) is RandomSampler and args.accelerator_config.use_seedable_sampler:
        return SeedableRandomSampler(
            data_source=sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=torch.Generator(),
            data_seed=seed,
        )
    if args.world_size == 1:
        return sampler
    sampler = copy.copy(sampler)  # The user's own may be asked again.
    if isinstance(sampler, LengthGroupedSampler):
        # It sorts within some batches; those are global ones here.
        sampler.batch_size = args.global_batch_size(sampler.batch_size)
    if shared is None and getattr(sampler, "generator", "none needed") is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


def draws_each_once(order: Any, num_samples: int) -> bool:
    """Whether an order is known to hold each sample of a data set once: of another class than these nobody knows."""
    if type(order) in (RandomSampler, SeedableRandomSampler) and order.replacement:
        return False
    known = (RandomSampler, SeedableRandomSampler, SequentialSampler, LengthGroupedSampler)
    return type(order) in known and len(order) == num_samples


class Samples(Dataset[Any]):
    """A data set that is not asked for a batch of no samples: a user's transform need not take one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        if not indices:
            return []
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]


class SkipEmpty:
    """A collator that turns an empty list of samples into an empty batch instead of calling the user's collator."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else {}
