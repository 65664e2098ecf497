"""Samplers: the order of a run's samples and each replica's part of a global batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_pipetransformer.data.batches import even_bounds, note_samples
from hf_pipetransformer.data.node_shares import Arrangement, NodeOrder, replica_slice
from hf_pipetransformer.data.rng import SharedRngState, States, fetch_samples


if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(frozen=True)
class EpochStart:
    """Position at which an epoch begins: its first batch, unless an earlier run had begun the epoch.

    Args:
        first: global batches that the earlier run had consumed.
        num_done: samples that it was trained on, if its batch size differed: the remaining ones are redistributed over
            the epoch's last batches, and the batches before are empty.
        order_state: its `EpochOrder.rng_state`; None draws a new order.
        arrangement: its arrangement; None for an epoch that this run begins.
        ahead: RNG states before the batches that it had read ahead, and their number.
    """

    first: int = 0
    num_done: int | None = None
    order_state: torch.Tensor | None = None
    arrangement: Arrangement | None = None
    ahead: tuple[States, int] | None = None
    is_resumed: bool = True


FROM_FIRST = EpochStart(is_resumed=False)
"""Beginning of an epoch that no earlier run had begun."""


class EpochOrder:
    """Global batches of an epoch, which depend on the sampler's random numbers and on `nodes`, never on the layout.

    Args:
        global_batches: yields lists of sample indices, one list per global batch.
    """

    def __init__(self, global_batches: Any) -> None:
        self.global_batches = global_batches
        self.sampler: Any = getattr(global_batches, "sampler", None)
        """Order of the samples over all replicas, which global batches are cut from."""
        self.nodes: NodeOrder | None = None
        """Assignment of samples to nodes in epochs that begin from now on; None if any node may read any sample."""
        self.is_single = True
        """True if no sample comes twice in this epoch."""
        self._batches: list[list[int]] | None = None
        self._num_done = 0
        """Samples that an earlier run did with another batch size; the others are cut into new batches."""
        self._begun_as: Arrangement | None = None
        self._rng_state: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.global_batches)

    def begin_epoch(self, start: EpochStart) -> None:
        """Discard the last epoch's order; the next one is drawn when first needed, or at once from an earlier state.

        A generator that the run itself saves is restored after drawing from an earlier state.
        """
        self._batches, self._begun_as = None, start.arrangement
        in_whole_batches = start.first * getattr(self.global_batches, "batch_size", 0)
        # If it was a whole number of batches of this size, the batches are where they would be anyway.
        self._num_done = 0 if start.num_done in (None, in_whole_batches) else start.num_done
        if start.order_state is None:
            return
        generator = self._generator()
        before = generator.get_state()
        generator.set_state(start.order_state)
        self.batches()
        if generator is torch.default_generator:
            generator.set_state(before)

    def batches(self) -> list[list[int]]:
        """Return the epoch's global batches, drawn on the first call."""
        if self._batches is None:
            # Kept from before the drawing, so that a checkpoint within the epoch can draw the same order again.
            self._rng_state = self._generator().get_state()
            own, wanted = self._group_size(), self.arrangement.group_size
            is_regrouped = own is not None and own != wanted
            # An epoch that began with groups of another size goes on in these, or its rest would be other samples.
            if is_regrouped:
                self.sampler.batch_size = wanted
            try:
                self._batches = self._drawn()
            finally:
                if is_regrouped:
                    self.sampler.batch_size = own
            samples = [index for batch in self._batches for index in batch]
            self.is_single = len(set(samples)) == len(samples)
        return self._batches

    def _drawn(self) -> list[list[int]]:
        nodes = self.arrangement.nodes
        if not self._num_done and nodes is None:
            return list(self.global_batches)
        # The sampler draws here what it would draw for the global batches, so the random numbers stay the same.
        size, order = self.global_batches.batch_size, list(self.sampler)
        rest = (order if nodes is None else nodes.arranged(order))[self._num_done :]
        num_batches = len(rest) // size if self.global_batches.drop_last else -(-len(rest) // size)
        cut = [rest[index * size : (index + 1) * size] for index in range(num_batches)]
        # Empty batches come first, so that the others keep their numbers in the epoch.
        return [[]] * (len(self) - num_batches) + cut

    def rng_state(self, is_mid_epoch: bool) -> torch.Tensor | None:
        """Return the state from which `begin_epoch` draws this epoch again, or the next one between epochs.

        None if the next epoch's order comes from a generator that the run itself saves.
        """
        if is_mid_epoch:
            return self._rng_state
        generator = self._generator()
        return None if generator is torch.default_generator else generator.get_state()

    @property
    def arrangement(self) -> Arrangement:
        """Settings that the order of this epoch depends on, besides the random numbers."""
        own = Arrangement(self._group_size(), self.nodes)
        if self._begun_as is None:
            return own
        return replace(self._begun_as, group_size=self._begun_as.group_size or own.group_size)

    def _group_size(self) -> int | None:
        return getattr(self.sampler, "batch_size", None)

    def _generator(self) -> torch.Generator:
        own: torch.Generator | None = getattr(self.sampler, "generator", None)
        return torch.default_generator if own is None else own


@dataclass(frozen=True)
class ReplicaBatch:
    """A replica's part of a global batch.

    Args:
        samples: all of its samples.
        read: those of them that are read from the data set.
        is_single: True if none of them comes a second time in this epoch or on another replica.
    """

    samples: list[int]
    read: list[int]
    is_single: bool


class ReplicaBatchSampler(Sampler[list[int]]):
    """Batch sampler that cuts one replica's part out of each global batch.

    It is its own iterator, so that `seek` can move it to another position and replica while it is being read, even by
    workers that read ahead.

    Args:
        repeat_small: for evaluation. A global batch smaller than the number of replicas goes whole to every replica,
            so that each has something of the right shape to gather (only replica 0's copy is counted). If False, for
            training, a replica may get an empty list.
    """

    def __init__(self, order: EpochOrder, replica: int, num_replicas: int, repeat_small: bool = False) -> None:
        self.order = order
        self.replica = replica
        self.num_replicas = num_replicas
        self.repeat_small = repeat_small
        self.unread: deque[ReplicaBatch] = deque()
        """Batches returned by `__next__` that the loader has not popped from here yet."""
        self.select: Callable[[list[int]], list[int]] | None = None
        """Function that returns the samples of a batch that must be read from the data set; None: all."""
        # As torch's batch samplers have them, for callbacks and accelerate.
        self.sampler = order.sampler
        self.batch_size = getattr(order.global_batches, "batch_size", None)
        self.drop_last = bool(getattr(order.global_batches, "drop_last", False))
        self._position = 0

    def __len__(self) -> int:
        return len(self.order)

    def seek(self, position: int, replica: int, num_replicas: int) -> None:
        self._position, self.replica, self.num_replicas = position, replica, num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        batches = self.order.batches()
        if self._position >= len(batches):
            raise StopIteration
        batch = batches[self._position]
        self._position += 1
        own = self._part(batch)
        # A sample that comes twice, or on several replicas, is always read: a cache row must have a single writer.
        is_single = self.order.is_single and not self._repeats(batch)
        read = self.select(own) if self.select is not None and is_single else own
        self.unread.append(ReplicaBatch(own, read, is_single))
        return read

    def part_of(self, index: int, replica: int, num_replicas: int) -> ReplicaBatch:
        """Return a replica's part of global batch `index`, all of which was read."""
        self.seek(index, replica, num_replicas)
        batch = self.order.batches()[index]
        own = self._part(batch)
        return ReplicaBatch(own, own, self.order.is_single and not self._repeats(batch))

    def upcoming(self) -> list[int]:
        """Return the samples of the batch after the last one popped from `unread`; empty if unknown."""
        if self.unread:
            return self.unread[0].samples
        batches = self.order.batches()
        # Nothing is told where samples come twice: these are read from the data set.
        return self._part(batches[self._position]) if self._position < len(batches) and self.order.is_single else []

    def _repeats(self, batch: list[int]) -> bool:
        return self.repeat_small and len(batch) < self.num_replicas

    def _part(self, batch: list[int]) -> list[int]:
        if self._repeats(batch):
            return batch
        part_of = replica_slice if self.order.nodes is None else self.order.nodes.part
        return batch[part_of(len(batch), self.replica, self.num_replicas)]


def torch_loader(
    dataset: Any, collate: BatchCollator, args: TrainingArguments, seconds: float, **options: Any
) -> DataLoader[Any]:
    """Return torch's loader with the user's options for loaders; `options` say how batches are formed.

    With several processes, a worker may take `seconds` for a batch: the others would wait for ever for one that hangs.
    """
    return DataLoader(
        dataset,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        timeout=seconds if args.dataloader_num_workers and args.world_size > 1 else 0,
        **options,
    )


def order_of_run(
    dataset: Any,
    given: Sampler[int] | None,
    args: TrainingArguments,
    global_batch_size: Callable[[int], int],
    shared: SharedRngState | None,
    last_seeded: int | None = None,
) -> Any:
    """Return Trainer's order, drawn from generators that are the same on every rank.

    Args:
        given: Trainer's sampler; None reads in order.
        global_batch_size: samples of a batch over all processes, of the size for one.
        last_seeded: what torch was last seeded with when the run began, by the script or by Trainer: without a
            `data_seed` accelerate takes it. None for what it was last seeded with now.
    """
    sampler: Any = given or SequentialSampler(dataset)
    last_seeded = torch.initial_seed() if last_seeded is None else last_seeded
    seed = args.data_seed if args.data_seed is not None else last_seeded
    # As accelerate does when it prepares a loader: seed and epoch alone decide the order.
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
    if _is_trainers_own(sampler, args):
        # It sorts by length within groups of batches, which are global batches here.
        sampler.batch_size = global_batch_size(sampler.batch_size)
    # Each rank would draw another order from its global generator.
    if shared is None and getattr(sampler, "generator", "none needed") is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return sampler


def _is_trainers_own(sampler: Any, args: TrainingArguments) -> bool:
    """Return True for a sampler such as Trainer makes with `train_sampling_strategy="group_by_length"`.

    Its groups count batches of one device; a script that makes its own chooses the size of the groups itself. Trainer
    gives a generator to those of evaluations alone.
    """
    if type(sampler) is not LengthGroupedSampler:
        return False
    of_training = args.train_batch_size * args.gradient_accumulation_steps
    return sampler.batch_size == (of_training if sampler.generator is None else args.eval_batch_size)


def draws_each_once(order: Any, num_samples: int) -> bool:
    """Return True if an order is known to contain each sample of a data set once."""
    known = (RandomSampler, SeedableRandomSampler, SequentialSampler, LengthGroupedSampler)
    # Exact types, because a subclass may draw in another way.
    return type(order) in known and len(order) == num_samples and not getattr(order, "replacement", False)


@dataclass(eq=False)
class Samples(Dataset[Any]):
    """Data set wrapper that answers an empty batch itself, since a user's transform need not accept one."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return fetch_samples(self.dataset, indices) if indices else []


@dataclass
class BatchCollator:
    """Collator around the user's: an empty batch for no samples, in others what `batches` knows of their samples.

    Args:
        rows: number of rows of a sample.
        num_pieces: that a batch is collated in because it cannot be cut; 0 to collate it whole.
        join: joins the pieces.
    """

    collate: Any
    rows: int = 1
    num_pieces: int = 0
    join: Callable[[list[Any]], dict[str, Any]] = dict
    keeps: bool = False
    """True to keep the samples of the last batch of this process."""
    num_samples: int = field(default=0, init=False)
    """Their number."""
    samples: list[Any] = field(default_factory=list, init=False)

    def __call__(self, samples: list[Any]) -> Any:
        self.num_samples = len(samples)
        self.samples = samples if self.keeps else []
        if not samples or not self.num_pieces:
            return note_samples(self.collate(samples), len(samples), self.rows) if samples else {}
        bounds = even_bounds(len(samples), self.num_pieces)
        return self.join([self.collate(samples[start:stop]) for start, stop in pairwise(bounds)])
