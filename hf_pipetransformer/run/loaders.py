"""Loaders of a pipeline: which samples each rank reads, and how they come."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

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
        "shared": pipeline.shared_generator,
    }
    loader: PipelineLoader
    if is_stream(dataset):
        loader = make_stream_loader(**options)
    else:
        sampler = sampler_fn(dataset) if sampler_fn is not None else None
        loader = make_pipeline_loader(**options, sampler=sampler, common_length=start_up.common_length)
    loader.pins_memory = args.dataloader_pin_memory and is_apart(args.device)
    return loader


def share_generator(topology: Topology) -> torch.Generator | None:
    """Rank 0's random numbers, for what all ranks draw alike: one process draws it from its only generator.

    The ranks' own generators part now; what one process draws from its one goes on here. None on one process.
    """
    if topology.world_size == 1:
        return None
    generator = torch.Generator()
    generator.set_state(topology.broadcast(torch.get_rng_state()).clone())
    return generator
