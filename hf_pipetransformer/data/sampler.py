"""Samplers: the order of a run's samples and each replica's part of a global batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.data.augmentation import AugmentationSlots
from hf_pipetransformer.data.node_shares import Arrangement, NodeOrder, replica_slice
from hf_pipetransformer.data.rng import SeededReading, SharedRngState
from hf_pipetransformer.options.arguments import PipeTransformerArguments


@dataclass(frozen=True)
class Drawn:
    """Batch that the sampler returned.

    Args:
        samples: all of its samples.
        read: those of them that are read from the data set.
        is_single: True if none of them is drawn a second time in this epoch or by another replica.
    """

    samples: list[int]
    read: list[int]
    is_single: bool


class ReplicaBatchSampler(Sampler[list[int]]):
    """Sampler that cuts one replica's part out of each global batch.

    The samples of step `t` depend on `global_batches`, and on `nodes` where each node always reads the same samples,
    never on the number of replicas. The sampler is its own iterator, so that `seek` can move it to another position
    and replica while it is being read, even by workers that read ahead.

    Args:
        global_batches: yields lists of sample indices, one list per global batch.
        repeat_small: for evaluation. A global batch smaller than the number of replicas goes whole to every replica,
            so that each has something of the right shape to gather (only replica 0's copy is counted). If False, for
            training, a replica may get an empty list.
    """

    def __init__(
        self,
        global_batches: Iterable[list[int]],
        replica: int,
        num_replicas: int,
        repeat_small: bool = False,
    ) -> None:
        self.global_batches = global_batches
        self.replica = replica
        self.num_replicas = num_replicas
        self.repeat_small = repeat_small
        self.num_drawn = 0
        """Batches returned since the sampler was created."""
        self.drawn: deque[Drawn] = deque()
        """Batches returned by `__next__` that the loader has not popped from here yet."""
        self.draws_once = True
        """True if no sample comes twice in this epoch."""
        self.select: Callable[[list[int]], list[int]] | None = None
        """Function that returns the samples of a batch that must be read from the data set; None: all."""
        self.nodes: NodeOrder | None = None
        """Assignment of samples to nodes; None if any node may read any sample."""
        self.slots: AugmentationSlots | None = None
        """AugmentationSlots of random samples. If set, the sampler returns items in place of samples, see
        `augmentation`.
        """
        self._batches: list[list[int]] | None = None
        self._num_done = 0
        self._drawn_from: torch.Tensor | None = None
        self._arrangement: Arrangement | None = None
        """Arrangement of this epoch, if an earlier run began it."""
        self._position = 0

    @property
    def sampler(self) -> Any:
        """Sampler that global batches are cut from, if there is one."""
        return getattr(self.global_batches, "sampler", None)

    @property
    def batch_size(self) -> int | None:
        return getattr(self.global_batches, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        return bool(getattr(self.global_batches, "drop_last", False))

    def begin_epoch(self, num_done: int = 0, arrangement: Arrangement | None = None) -> None:
        """Discard the order of the last epoch; the next one is drawn when it is first needed.

        Args:
            num_done: samples of the new epoch that an earlier run was trained on with another batch size. The
                remaining ones are redistributed over the epoch's last batches; the batches before are empty.
            arrangement: of the earlier run that began this epoch; None for an epoch that this run begins.
        """
        self._batches = None
        self._num_done = num_done
        self._position = 0
        self._arrangement = arrangement

    def draw(self) -> list[list[int]]:
        if self._batches is None:
            self._drawn_from = self._stream().get_state()
            with self._grouping():
                is_usual = not self._num_done and self.arrangement.nodes is None
                self._batches = list(self.global_batches) if is_usual else self._dealt()
            samples = [index for batch in self._batches for index in batch]
            self.draws_once = len(set(samples)) == len(samples)
        return self._batches

    def _dealt(self) -> list[list[int]]:
        """Return the batches of a resumed or node-arranged epoch: the samples that are not done, in their order."""
        batches: Any = self.global_batches
        size, order, nodes = batches.batch_size, list(batches.sampler), self.arrangement.nodes
        rest = (order if nodes is None else nodes.arranged(order))[self._num_done :]
        num_batches = len(rest) // size if batches.drop_last else -(-len(rest) // size)
        cut = [rest[index * size : (index + 1) * size] for index in range(num_batches)]
        return [[]] * (len(self) - num_batches) + cut

    def _stream(self) -> torch.Generator:
        own: torch.Generator | None = getattr(self.sampler, "generator", None)
        return torch.default_generator if own is None else own

    def order_state(self, is_mid_epoch: bool) -> torch.Tensor | None:
        """Return the RNG state for `draw_as_from` to draw this epoch again, or the next one between epochs.

        None if the next epoch's order comes from a generator that the run itself saves.
        """
        if is_mid_epoch:
            return self._drawn_from
        stream = self._stream()
        return None if stream is torch.default_generator else stream.get_state()

    @property
    def arrangement(self) -> Arrangement:
        """Settings that the order of this epoch depends on, besides the random numbers."""
        own, begun = Arrangement(self._own_group_size(), self.nodes), self._arrangement
        return own if begun is None else replace(begun, group_size=begun.group_size or own.group_size)

    def _own_group_size(self) -> int | None:
        return getattr(self.sampler, "batch_size", None)

    @contextmanager
    def _grouping(self) -> Iterator[None]:
        """Set the underlying sampler's batch size to that of this epoch's arrangement inside the context."""
        own, wanted = self._own_group_size(), self.arrangement.group_size
        if own is None or wanted is None or own == wanted:
            yield
            return
        sampler = self.sampler
        sampler.batch_size = wanted
        try:
            yield
        finally:
            sampler.batch_size = own

    def draw_as_from(
        self, order_state: torch.Tensor, num_done: int = 0, arrangement: Arrangement | None = None
    ) -> None:
        """Draw the order of this epoch as an earlier run did from its `order_state`; see `begin_epoch` for the rest.

        A generator that the run itself saves is restored afterwards.
        """
        stream = self._stream()
        before = stream.get_state()
        stream.set_state(order_state)
        self.begin_epoch(num_done, arrangement)
        self.draw()
        if stream is torch.default_generator:
            stream.set_state(before)

    def seek(self, position: int, replica: int, num_replicas: int) -> None:
        self._position, self.replica, self.num_replicas = position, replica, num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        if self._batches is not None and self._position >= len(self._batches):
            self.begin_epoch()
        return self

    def __next__(self) -> list[int]:
        batches = self.draw()
        if self._position >= len(batches):
            raise StopIteration
        indices = batches[self._position]
        self._position += 1
        self.num_drawn += 1
        own = self._items(self._part(indices))
        # A sample that comes twice, or on several replicas, is always read: a cache row must have a single writer.
        is_single = self.draws_once and not self._repeats(indices)
        read = self.select(own) if self.select is not None and is_single else own
        self.drawn.append(Drawn(own, read, is_single))
        return read

    def upcoming(self) -> list[int]:
        """Return the samples of the batch after the last one popped from `drawn`; empty if unknown."""
        if self.drawn:
            return self.drawn[0].samples
        if self._batches is None or self._position >= len(self._batches) or not self.draws_once:
            return []
        return self._items(self._part(self._batches[self._position]))

    def _items(self, samples: list[int]) -> list[int]:
        return samples if self.slots is None else self.slots.items(samples)

    def _repeats(self, indices: list[int]) -> bool:
        return self.repeat_small and len(indices) < self.num_replicas

    def _part(self, indices: list[int]) -> list[int]:
        if self._repeats(indices):
            return indices
        part_of = replica_slice if self.nodes is None else self.nodes.part
        return indices[part_of(len(indices), self.replica, self.num_replicas)]

    def __len__(self) -> int:
        assert isinstance(self.global_batches, Sized)
        return len(self.global_batches)

    def set_epoch(self, epoch: int) -> None:
        if self.slots is not None:
            self.slots.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def indexed_reader(
    dataset: Any,
    collate: Any,
    sampler: Sampler[int] | None,
    batch_size: int,
    args: PipeTransformerArguments,
    groups: PipelineGroups,
    is_training: bool,
    shared: SharedRngState | None,
    seeded: SeededReading | None = None,
) -> DataLoader[Any]:
    """Return torch's loader over one replica's part of each global batch.

    Args:
        sampler: Trainer's sampler; None reads in order. A random one becomes identical on every rank.
        batch_size: samples of a global batch.
        is_training: True if a replica may be left without samples, and workers are seeded.
        shared: see `PipelineLoader`.
        seeded: how to read random samples whose slots are stored; None for all others.
    """
    order = order_of_run(dataset, sampler, args, shared)
    global_batches = BatchSampler(order, batch_size, args.dataloader_drop_last)
    own_batches = ReplicaBatchSampler(global_batches, groups.replica, groups.num_replicas, not is_training)
    worker_init = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
    own_batches.slots = None if seeded is None else seeded.slots
    return DataLoader(
        Samples(dataset) if seeded is None else seeded.samples,
        batch_sampler=own_batches,
        collate_fn=SkipEmpty(collate if seeded is None else seeded.collate),
        **_worker_options(args),
        worker_init_fn=worker_init if is_training else None,
    )


def stream_reader(dataset: Any, collate: Any, batch_size: int, args: PipeTransformerArguments) -> DataLoader[Any]:
    """Return torch's loader over the global batches of a stream; `batch_size` is that of a global batch."""
    return DataLoader(dataset, batch_size=batch_size, collate_fn=SkipEmpty(collate), **_worker_options(args))


def _worker_options(args: PipeTransformerArguments) -> dict[str, Any]:
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "in_order": args.dataloader_in_order,
    }


def order_of_run(
    dataset: Any, given: Sampler[int] | None, args: PipeTransformerArguments, shared: SharedRngState | None
) -> Any:
    """Return Trainer's order for this seed, drawn from generators that are the same on every rank."""
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
    sampler = copy.copy(sampler)  # Leave the user's own sampler as it is; it may be used again.
    if isinstance(sampler, LengthGroupedSampler):
        # It sorts by length within groups of batches, which are global batches here.
        sampler.batch_size = args.global_batch_size(sampler.batch_size)
    if shared is None and getattr(sampler, "generator", "none needed") is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


def draws_each_once(order: Any, num_samples: int) -> bool:
    """Return True if an order is known to contain each sample of a data set once."""
    if type(order) in (RandomSampler, SeedableRandomSampler) and order.replacement:
        return False
    known = (RandomSampler, SeedableRandomSampler, SequentialSampler, LengthGroupedSampler)
    return type(order) in known and len(order) == num_samples


class Samples(Dataset[Any]):
    """Data set wrapper that answers an empty batch itself, since a user's transform need not accept one."""

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
    """Collator that turns an empty list of samples into an empty batch instead of calling the user's collator."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else {}
