"""Loaders of a pipeline: which samples each rank reads, and from which RNG state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler
from transformers.trainer_utils import seed_worker

from hf_pipetransformer.comm.staging import is_apart
from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.data.batches import SampleBatch, join_pieces, pads_on_left
from hf_pipetransformer.data.loader import PipelineLoader, Request, request_of
from hf_pipetransformer.data.reading import (
    DispatchedReading,
    EpochReading,
    PipelineLink,
    ReplicaReading,
    StreamReading,
    is_stream,
)
from hf_pipetransformer.data.rng import (
    SharedRngState,
    States,
    drawing_from,
    draws_from_now_on,
    generators_kept,
    random_state,
)
from hf_pipetransformer.data.sampler import (
    BatchCollator,
    EpochOrder,
    ReplicaBatchSampler,
    Samples,
    order_of_run,
    torch_loader,
)
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.planning.layouts import evaluation_microbatches
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import media_of


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


class LateLoader:
    """Loader that Trainer iterates while the pipeline is started at its first batch.

    Until then it is the one that Trainer or the script made, with its length and attributes.

    Args:
        given: that loader.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.loader: Any = None
        """Loader of the pipeline; None before the start."""
        self.begun: Iterator[Any] | None = None
        """Iterator of the first epoch, if its first batch has been read from it."""

    @property
    def _present(self) -> Any:
        return self.given if self.loader is None else self.loader

    def __getattr__(self, name: str) -> Any:
        if name in ("given", "loader"):
            raise AttributeError(name)  # Before `__init__` sets it, as in unpickling.
        # Of Trainer's own, its loop would look for a sampler to tell the epoch, which the pipeline's loader does.
        if name == "batch_sampler" and self.loader is None and request_of(self.given) is not None:
            return None
        return getattr(self._present, name)

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Any]:
        # Of a generator this runs when the first batch is asked for, and the pipeline is started.
        begun, self.begun = self.begun, None
        yield from self._present if begun is None else begun

    def read_first(self, shared: SharedRngState | None, is_kept: bool) -> Any:
        """Return the first batch of a user's own loader, which the first epoch begins with if it `is_kept`.

        Raises:
            ValueError: there is none.
        """
        self.loader = with_shared_rng(self.given, shared)
        with nullcontext() if is_kept else generators_kept(self.given):
            batches = iter(self.loader)
            first = next(batches, None)
        if first is None:
            raise ValueError(f"The {type(self.given).__name__} is empty: expected at least one batch.")
        self.begun = chain([first], batches) if is_kept else None
        return first


def begin_reading(
    context: TrainingContext,
    request: Request,
    shared: SharedRngState | None,
    last_seeded: int | None = None,
    is_ahead: bool = False,
) -> Begun:
    """Read the first batch of a data set, before the layout is known that it is read under.

    Collective: call on every rank.

    Args:
        last_seeded: what torch was last seeded with when the run began; None for what it was last seeded with now.
        is_ahead: True if other random numbers are drawn before those of the order of its samples.
    """
    trainer, topology, args = context.trainer, context.topology, context.args
    dataset, collate = trainer_compat.dataset_and_collator(trainer, request.dataset, request.description)
    found = Begun(request, dataset, collate, torch.initial_seed() if last_seeded is None else last_seeded)
    # Rank 0 is stage 0 of replica 0 under every layout.
    rank, ranks = topology.rank, tuple(range(topology.world_size))
    alone = PipelineGroups(1, len(ranks), 0, rank, (rank,), ranks, None, None, None, None)
    link = PipelineLink(alone, frozenset(), args.pipeline_timeout)
    reader = _reader(context, found, shared, replica=0, num_replicas=1, keeps=media_of(trainer.model) is not None)
    kind = StreamReading if is_stream(dataset) else DispatchedReading
    found.reading = reading = kind(reader, link, shared, args.pipeline_timeout, request.is_training)
    start = time.perf_counter()
    if not is_stream(dataset) and (args.dataloader_num_workers or len(topology.nodes) > 1 or is_ahead):
        # Workers read for one replica each, and what is stored on several nodes decides the order of the first epoch
        # too: here a few samples are read that the run reads again.
        size = min(len(dataset), max(2, args.global_batch_size(request.batch_size) // args.world_size))
        with generators_kept(dataset, collate):
            has_drawn = draws_from_now_on(dataset, collate)
            if rank == 0:
                found.batch = reader.collate_fn(Samples(dataset).__getitems__(list(range(size))))
            draws = has_drawn()
        found.num_samples = size
    else:
        found.batch = reading.begin_run((dataset, collate))
        # Workers do not tell it of a stream.
        found.num_samples, draws = reader.collate_fn.num_samples or None, reading.draws
    found.seconds = time.perf_counter() - start
    found.samples, reader.collate_fn.keeps = reader.collate_fn.samples, False
    found.draws, found.is_flattened, found.pads_on_left = topology.decide(
        lambda: [draws, found.batch.sequences is not None, pads_on_left(found.batch)]
    )
    return found


@dataclass
class Begun:
    """Data set whose first batch has been read.

    Args:
        last_seeded: what torch was last seeded with then, which the order of the samples follows.
    """

    request: Request
    dataset: Any
    collate: Any
    last_seeded: int
    reading: DispatchedReading = field(init=False)
    batch: SampleBatch = field(default_factory=SampleBatch, init=False)
    """On rank 0."""
    num_samples: int | None = field(default=None, init=False)
    """Samples of that batch, there; None if nobody tells."""
    seconds: float = field(default=0.0, init=False)
    """Time to read it, there."""
    draws: bool = field(default=False, init=False)
    """True if reading it drew random numbers."""
    is_flattened: bool = field(default=False, init=False)
    """True if its samples are one after the other in one row."""
    pads_on_left: bool = field(default=False, init=False)
    """True if its texts begin later where they are shorter."""
    samples: list[Any] = field(default_factory=list, init=False)
    """Samples of the first batch, there, of a model whose batches cannot be cut."""

    def collated(self, start: int, stop: int) -> SampleBatch:
        """Return some samples of the first batch by themselves."""
        with generators_kept(self.collate):
            return SampleBatch(self.collate(self.samples[start:stop]))

    def is_for(self, request: Request) -> bool:
        """Return True if a request is for the same batches."""
        own = self.request
        is_same = own.dataset is request.dataset and own.is_training == request.is_training
        return is_same and own.batch_size == request.batch_size and own.reads_all == request.reads_all


def _reader(
    context: TrainingContext, begun: Begun, shared: SharedRngState | None, replica: int, num_replicas: int, **how: Any
) -> Any:
    """Return torch's loader of a data set, of the parts of a replica; `how` is for `BatchCollator`."""
    args, request, dataset = context.args, begun.request, begun.dataset
    rows, batch_size = trl_compat.rows_of_sample(context.trainer), args.global_batch_size(request.batch_size)
    seconds = context.timeouts.step_seconds if request.is_training else context.timeouts.rest_seconds
    collator = BatchCollator(begun.collate, rows, **how)
    if is_stream(dataset):
        return torch_loader(dataset, collator, args, seconds, batch_size=batch_size)
    order = begun.reading.order if "reading" in vars(begun) else None
    if order is None:
        # Trainer draws a sampler's seed as it makes the loader; here from the states that continue one process.
        with drawing_from(shared):
            sampler = order_of_run(
                dataset, request.sampler(dataset), args, args.global_batch_size, shared, begun.last_seeded
            )
        drops_last = args.dataloader_drop_last and not request.reads_all
        order = EpochOrder(BatchSampler(sampler, batch_size, drops_last))
    batches = ReplicaBatchSampler(order, replica, num_replicas, not request.is_training)
    seed_workers = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
    # As in Trainer, which seeds the workers of training loaders alone.
    worker_init = seed_workers if request.is_training else None
    return torch_loader(Samples(dataset), collator, args, seconds, batch_sampler=batches, worker_init_fn=worker_init)


def make_loader(context: TrainingContext, pipeline: Pipeline, begun: Begun) -> PipelineLoader:
    """Build a data set's loader for this rank's place, which goes on from the batch that was read."""
    args, start_up, shared = context.args, pipeline.start_up, pipeline.shared_rng
    groups, request = pipeline.stage.groups, begun.request
    # Metrics that read the inputs need their values on every rank, even those that no later stage reads.
    placeholders = frozenset() if "inputs" in args.include_for_metrics else start_up.probe.placeholders
    link = PipelineLink(groups, placeholders, args.pipeline_timeout)
    reading: EpochReading = begun.reading
    num_pieces = _num_pieces(pipeline, begun)
    # Workers have their own RNG states and read for all replicas in parallel: no dispatching with workers.
    # Samples that stay the same are read by each replica; a flattened batch does not say where a sample ends.
    if not is_stream(begun.dataset) and (args.dataloader_num_workers or not begun.draws):
        padding = replace(start_up.padding, on_left=begun.pads_on_left)
        how = {"num_pieces": num_pieces or 0, "join": partial(join_pieces, padding)}
        reader = _reader(context, begun, shared, groups.replica, groups.num_replicas, **how)
        first = begun.reading if begun.reading.has_first else None
        common = padding if start_up.pads_alike else None
        reading = ReplicaReading(reader, link, shared, common, begun=first)
        reading.is_first_uncut = num_pieces is not None or (begun.is_flattened and groups.num_replicas > 1)
    reading.link, reading.shared = link, shared
    pins_memory = args.dataloader_pin_memory and is_apart(args.device)
    batch_size = args.global_batch_size(request.batch_size)
    return PipelineLoader(begun.dataset, reading, batch_size, pins_memory)


def _num_pieces(pipeline: Pipeline, begun: Begun) -> int | None:
    """Return the number of pieces that a replica's batches are collated in, 0 for none; None if batches may be cut.

    Raises:
        ValueError: samples cannot be read or collated by pieces, or the loss sees those of all replicas.
    """
    layout, start_up, is_training = pipeline.layout, pipeline.start_up, begun.request.is_training
    size = begun.request.batch_size * layout.pipeline_size
    num_pieces = layout.num_microbatches if is_training else evaluation_microbatches(layout, size)
    num_parts, scope = num_pieces * layout.num_replicas, start_up.plans.scope
    if start_up.probe.structure.media is None or num_parts == 1:
        return None
    name = type(bare_model(pipeline.stage.view.model)).__name__
    reasons = {
        "the data set or its collator draws random numbers": begun.draws,
        "the data set is a stream": is_stream(begun.dataset),
        "the collator puts all samples into one row": begun.is_flattened,
        "the loss sees the samples of all replicas": layout.num_replicas > 1 and scope is LossScope.BATCH,
    }
    if any(reasons.values()):
        why = next(reason for reason, is_so in reasons.items() if is_so)
        raise ValueError(
            f"Images, videos and sounds have no row for each sample, so that a batch of {name} is collated in parts, "
            f"{num_parts} here (micro-batches x replicas), and {why}. Use one part: as many stages as processes, and "
            "pipeline_parallel_num_microbatches=1."
        )
    # An evaluation on one stage calls the model once a batch.
    return num_pieces if is_training or layout.pipeline_size > 1 else 0


def share_rng_state(topology: Topology) -> SharedRngState | None:
    """Share rank 0's RNG states for data and sample order; None on one process. Collective: call on every rank.

    The ranks' own RNG states differ in a training (see `Seeds`); these continue those of a single process.
    """
    return None if topology.world_size == 1 else SharedRngState(states_of_first_rank(topology, random_state()))


def states_of_first_rank(topology: Topology, own: States) -> States:
    """Broadcast rank 0's RNG states. Collective: call on every rank."""
    tensors, values = topology.broadcast([own[0], own[1]])
    return {name: value.clone() for name, value in tensors.items()}, values
