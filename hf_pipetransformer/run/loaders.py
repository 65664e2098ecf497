"""Loaders of a pipeline: which samples each rank reads, and how they come."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from transformers import Trainer

from hf_pipetransformer.autodp.dealt import make_dealt_loader
from hf_pipetransformer.autodp.draws import SharedDraws, States, draws_at_random, present_states
from hf_pipetransformer.autodp.loader import PipelineLoader, make_pipeline_loader
from hf_pipetransformer.autodp.stream import is_stream, make_stream_loader
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.run import host
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.staging import is_apart


def make_loader(
    trainer: Trainer,
    topology: Topology,
    pipeline: Pipeline,
    given: Any,
    description: str,
    batch_size: int,
    sampler_fn: Any,
    is_training: bool,
) -> PipelineLoader:
    """A loader of a data set for this rank's place in a pipeline.

    Args:
        trainer: of the options, the columns and the collator.
        topology: the ranks.
        pipeline: that the batches are for.
        given: the data set.
        description: what it is for, in a word.
        batch_size: samples of a batch by rank.
        sampler_fn: makes Trainer's sampler; None for a stream.
        is_training: what the loader is for.
    """
    args, start_up = trainer.args, pipeline.start_up
    dataset, collate = host.dataset_and_collator(trainer, given, description)
    options: dict[str, Any] = {
        "dataset": dataset,
        "collate": collate,
        "global_batch_size": batch_size * topology.world_size,
        "args": args,
        "groups": pipeline.stage.groups,
        "placeholders": frozenset() if "inputs" in args.include_for_metrics else start_up.probe.placeholders,
        "is_training": is_training,
        "shared": pipeline.shared_draws,
    }
    loader: PipelineLoader
    if is_stream(dataset):
        loader = make_stream_loader(**options)
    else:
        shared = pipeline.shared_draws
        with nullcontext() if shared is None else shared.drawing():
            options["sampler"] = sampler_fn(dataset) if sampler_fn is not None else None
        # Workers draw from generators of their own, and read for all replicas at the same time.
        if not args.dataloader_num_workers and topology.decide(lambda: draws_at_random(dataset, collate)):
            loader = make_dealt_loader(**options)
        else:
            loader = make_pipeline_loader(**options, common_length=start_up.common_length)
    loader.pins_memory = args.dataloader_pin_memory and is_apart(args.device)
    return loader


def share_draws(topology: Topology) -> SharedDraws | None:
    """Rank 0's random numbers, for what data and orders draw, as in one process. None on one process.

    The ranks' own generators part now; what one process draws from its goes on here.
    """
    return None if topology.world_size == 1 else SharedDraws(states_of_first_rank(topology, present_states()))


def states_of_first_rank(topology: Topology, own: States) -> States:
    """Those that rank 0 has. A collective call."""
    tensors, values = topology.broadcast([own[0], own[1]])
    return {name: value.clone() for name, value in tensors.items()}, values
