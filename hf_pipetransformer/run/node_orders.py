"""Keeping training samples on nodes, so that a stored activation is on the node that reads it."""

from __future__ import annotations

from typing import Any

import torch

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.reading import draws_each_once
from hf_pipetransformer.autodp.shares import NodeOrder
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.report.events import announce
from hf_pipetransformer.run.journal import Journal


def why_not_on_nodes(loader: PipelineLoader, topology: Topology) -> str | None:
    """Why a sample may be drawn on another node than it was stored on; None if it is not, or can be kept from it."""
    order, num_samples = loader.sampler, len(loader.dataset)
    if not topology.spans_nodes or draws_each_once(order, num_samples):
        return None
    return (
        f"the run spans several nodes, and each can keep samples of its own only where an epoch is known to draw each "
        f"once: found a {type(order).__name__} of {len(order)} draws for {num_samples} samples. Use one of Trainer's "
        "own orders (train_sampling_strategy)."
    )


def keep_on_nodes(
    args: PipeTransformerArguments, topology: Topology, journal: Journal, loader: PipelineLoader
) -> None:
    """From the next epoch on each node draws samples of its own, if there are several; said, and noted.

    It hangs on options and topology alone, and so is the same on every rank.
    """
    if not topology.spans_nodes:
        return
    seed = args.data_seed if args.data_seed is not None else args.seed
    nodes = NodeOrder(seed, tuple(map(len, topology.nodes)), loader.total_batch_size)
    loader.keep_on(nodes)
    counts = nodes.counts(len(loader.dataset))
    journal.write("cache", what="nodes", samples=counts, **nodes.as_json())
    if topology.rank == 0:
        announce(
            f"The run spans nodes of {', '.join(map(str, nodes.devices))} processes: each keeps its own part of the "
            f"samples ({', '.join(map(str, counts))}) for the activation cache, and an epoch shuffles inside it."
        )


def samples_here(topology: Topology, loader: PipelineLoader) -> torch.Tensor:
    """Those of a data set for training that this node computes, in the order of the data set."""
    nodes, num_samples = loader.nodes, len(loader.dataset)
    if nodes is None:
        return torch.arange(num_samples)
    here = [number for number, node in enumerate(topology.nodes) if node[0] in topology.ranks_here]
    return torch.isin(nodes.owners(num_samples), torch.tensor(here)).nonzero().squeeze(1)


def num_rows_here(topology: Topology, dataset: Any) -> int:
    """Samples of a data set that this node stores: as many of them as of the ranks are here."""
    return -(-len(dataset) * len(topology.ranks_here) // topology.world_size)
