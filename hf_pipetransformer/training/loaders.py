"""Loaders of a pipeline: which samples each rank reads, and from which RNG state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler
from transformers.trainer_utils import seed_worker

from hf_pipetransformer.comm.staging import is_apart
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.data.loader import PipelineLoader, Request
from hf_pipetransformer.data.reading import (
    DispatchedReading,
    PipelineLink,
    Reading,
    ReplicaReading,
    StreamReading,
    is_stream,
)
from hf_pipetransformer.data.rng import SharedRngState, States, drawing_from, draws_at_random, random_state
from hf_pipetransformer.data.sampler import (
    BatchCollator,
    EpochOrder,
    ReplicaBatchSampler,
    Samples,
    order_of_run,
    torch_loader,
)


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.training.context import TrainingContext


def check_undivided(loader: Any, method: str, num_stages: int | None) -> None:
    """Refuse a user's own loader unless there is exactly one stage; None means the number is not known yet."""
    if num_stages != 1:
        raise ValueError(
            f"{method} returned a {type(loader).__name__}, which knows nothing of stages: build it with "
            "self._get_dataloader, override the sampler or the data collator instead, or set "
            "pipeline_parallel_size=1."
        )


class UsersLoader:
    """User's own loader on one of several replicas: as under Trainer, all replicas draw the same random numbers."""

    def __init__(self, loader: Any, shared: SharedRngState) -> None:
        self.loader = loader
        self.shared = shared

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # Before `__init__` sets it, as in unpickling.
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # An iterator draws when it is made: torch takes the seed of its workers.
        with self.shared.drawing():
            batches = iter(self.loader)
        while True:
            # Left between two batches, as steps draw numbers of this rank's own.
            with self.shared.drawing():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def with_shared_rng(loader: Any, shared: SharedRngState | None) -> Any:
    """Make a user's own loader draw from `shared`, if there is one."""
    return loader if shared is None else UsersLoader(loader, shared)


def make_loader(context: TrainingContext, pipeline: Pipeline, request: Request) -> PipelineLoader:
    """Build a data set's loader for this rank's place."""
    trainer, topology, args = context.trainer, context.topology, context.args
    start_up, shared = pipeline.start_up, pipeline.shared_rng
    rows = trl_compat.rows_of_sample(trainer)
    dataset, collate = trainer_compat.dataset_and_collator(trainer, request.dataset, request.description)
    batch_size, groups = args.global_batch_size(request.batch_size), pipeline.stage.groups
    # Metrics that read the inputs need their values on every rank, even those that no later stage reads.
    placeholders = frozenset() if "inputs" in args.include_for_metrics else start_up.probe.placeholders
    link = PipelineLink(groups, placeholders, args.pipeline_timeout)
    pins_memory = args.dataloader_pin_memory and is_apart(args.device)
    seconds = context.timeouts.step_seconds if request.is_training else context.timeouts.rest_seconds
    reading: Reading
    if is_stream(dataset):
        reader = torch_loader(dataset, BatchCollator(collate, rows), args, seconds, batch_size=batch_size)
        reading = StreamReading(reader, link, shared, args.pipeline_timeout, request.is_training)
        return PipelineLoader(dataset, reading, batch_size, pins_memory)
    # Trainer draws a sampler's seed as it makes the loader; here from the states that continue one process.
    with drawing_from(shared):
        sampler = order_of_run(
            dataset, request.sampler(dataset), args, args.global_batch_size, shared, pipeline.last_seeded
        )
    drops_last = args.dataloader_drop_last and not request.reads_all
    order = EpochOrder(BatchSampler(sampler, batch_size, drops_last))
    batches = ReplicaBatchSampler(order, groups.replica, groups.num_replicas, not request.is_training)
    seed_workers = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
    # As in Trainer, which seeds the workers of training loaders alone.
    worker_init = seed_workers if request.is_training else None
    samples, collator = Samples(dataset), BatchCollator(collate, rows)
    reader = torch_loader(samples, collator, args, seconds, batch_sampler=batches, worker_init_fn=worker_init)
    # Workers have their own RNG states and read for all replicas in parallel: no dispatching with workers.
    # Rank 0 decides: ranks that read in different ways would wait for each other.
    if not args.dataloader_num_workers and topology.decide(lambda: draws_at_random(dataset, collate)):
        reading = DispatchedReading(reader, link, shared, args.pipeline_timeout, request.is_training)
    else:
        reading = ReplicaReading(reader, link, shared, start_up.common_length)
    return PipelineLoader(dataset, reading, batch_size, pins_memory)


def share_rng_state(topology: Topology) -> SharedRngState | None:
    """Share rank 0's RNG states for data and sample order; None on one process. Collective: call on every rank.

    The ranks' own RNG states differ in a training (see `Seeds`); these continue those of a single process.
    """
    return None if topology.world_size == 1 else SharedRngState(states_of_first_rank(topology, random_state()))


def states_of_first_rank(topology: Topology, own: States) -> States:
    """Broadcast rank 0's RNG states. Collective: call on every rank."""
    tensors, values = topology.broadcast([own[0], own[1]])
    return {name: value.clone() for name, value in tensors.items()}, values
