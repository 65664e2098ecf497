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

from hf_pipetransformer.data.batches import SampleBatch, even_bounds, note_samples
from hf_pipetransformer.data.node_shares import NodeOrder, replica_slice
from hf_pipetransformer.data.rng import SharedRngState, States, fetch_samples
from hf_pipetransformer.schedules.json_values import Count, NumSamples, Positive


if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(frozen=True)
class Position:
    """Position of a run in its data, between two batches; a checkpoint has what comes before `first`.

    Args:
        epoch: epochs that are done.
        samples: samples of the present one that are done, over all replicas.
        global_batch: samples of a batch over all replicas.
        num_samples: length of an epoch, which a user's sampler may make longer than the data set; None for a stream.
        group_size: batch size of the underlying sampler, if the epoch's order depends on that (sorting by length).
        nodes: assigns the epoch's samples to nodes; None keeps the sampler's order.
        first: index of the next batch. Those before it are done, or empty.
        order_state: this rank's `EpochOrder.rng_state`; None draws a new order.
        ahead: this rank's RNG states before the batches that were read ahead, and their number.
    """

    epoch: Count
    samples: NumSamples
    global_batch: Positive
    num_samples: NumSamples | None
    group_size: Positive | None
    nodes: NodeOrder | None
    first: int = field(default=0, compare=False)
    order_state: torch.Tensor | None = field(default=None, compare=False)
    ahead: tuple[States, int] | None = field(default=None, compare=False)

    @property
    def is_split_by_node(self) -> bool:
        """True inside an epoch split by node, which Trainer would read in another order."""
        return self.nodes is not None and self.samples > 0

    def going_on(self, order: EpochOrder, skips: bool = True) -> Position:
        """Return where a run goes on from here in the batches of `order`.

        What is left of the epoch is cut into its last batches; if it makes none, the next epoch begins. Without
        `skips` the epoch starts over.
        """
        samples = self.samples if skips else 0
        left = order.batches_in(len(order.sampler) - samples)
        if not left:
            return replace(self, epoch=self.epoch + 1, samples=0, first=0)
        return replace(self, samples=samples, first=len(order) - left)

    def is_counted(self, step: int, order: EpochOrder, accumulation: int, skips: bool = True) -> bool:
        """Return True if Trainer's own arithmetic on the number of steps leads here."""
        # By division, as if all epochs had been of this length.
        epoch, updates = divmod(step, max(1, -(-len(order) // accumulation)))
        samples = updates * accumulation * order.global_batches.batch_size if skips else 0
        return not len(order) or (epoch, samples) == (self.epoch, self.samples)


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
        self._begun: Position | None = None
        """Where an earlier run has left this epoch; None if it had not begun it."""
        self._rng_state: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.global_batches)

    def batches_in(self, num_samples: int) -> int:
        """Return the number of batches that the last `num_samples` of an epoch make."""
        size = self.global_batches.batch_size
        return int(num_samples // size if self.global_batches.drop_last else -(-num_samples // size))

    def begin_epoch(self, start: Position | None = None) -> None:
        """Discard the last epoch's order; the next one is drawn when first needed, or at once from an earlier state.

        A generator that the run itself saves is restored after drawing from an earlier state. `start` is where an
        earlier run was.
        """
        self._batches, self._begun = None, start if start is not None and start.samples else None
        if start is None or start.order_state is None:
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
            own, wanted = getattr(self.sampler, "batch_size", None), self.group_size
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
        nodes = self.epochs_nodes
        if self._begun is None and nodes is None:
            return list(self.global_batches)
        # The sampler draws here what it would draw for the global batches, so the random numbers stay the same.
        size, order = self.global_batches.batch_size, list(self.sampler)
        done = 0 if self._begun is None else self._begun.samples
        rest = (order if nodes is None else nodes.arranged(order))[done:]
        num_batches = self.batches_in(len(rest))
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
    def group_size(self) -> int | None:
        """Batch size of the sampler that this epoch's order depends on, if it depends on any."""
        return (self._begun and self._begun.group_size) or getattr(self.sampler, "batch_size", None)

    @property
    def epochs_nodes(self) -> NodeOrder | None:
        """Assignment of samples to nodes in this epoch."""
        return self.nodes if self._begun is None else self._begun.nodes

    def _generator(self) -> torch.Generator:
        own: torch.Generator | None = getattr(self.sampler, "generator", None)
        return torch.default_generator if own is None else own


@dataclass(frozen=True)
class ReplicaBatch:
    """A replica's part of a global batch.

    Args:
        is_single: True if none of them comes a second time in this epoch or on another replica.
    """

    samples: list[int]
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
        self.unread.append(self._noted(own, batch))
        return own

    def part_of(self, index: int, replica: int, num_replicas: int) -> ReplicaBatch:
        """Return a replica's part of global batch `index`, which was read."""
        self.seek(index, replica, num_replicas)
        batch = self.order.batches()[index]
        own = self._part(batch)
        return self._noted(own, batch)

    def _noted(self, own: list[int], batch: list[int]) -> ReplicaBatch:
        # Of a sample that comes twice, or on several replicas, no record is made: each must have a single writer.
        return ReplicaBatch(own, self.order.is_single and not self._repeats(batch))

    def upcoming(self) -> list[int]:
        """Return the samples of the batch after the last one popped from `unread`; empty if unknown."""
        if self.unread:
            return self.unread[0].samples
        batches = self.order.batches()
        # Nothing is told where samples come twice: these have no records.
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
    join: Callable[[list[Any]], SampleBatch] = SampleBatch
    keeps: bool = False
    """True to keep the samples of the last batch of this process."""
    num_samples: int = field(default=0, init=False)
    """Their number."""
    samples: list[Any] = field(default_factory=list, init=False)

    def __call__(self, samples: list[Any]) -> Any:
        self.num_samples = len(samples)
        self.samples = samples if self.keeps else []
        if not samples or not self.num_pieces:
            return note_samples(self.collate(samples), len(samples), self.rows) if samples else SampleBatch()
        bounds = even_bounds(len(samples), self.num_pieces)
        return self.join([self.collate(samples[start:stop]) for start, stop in pairwise(bounds)])
