"""Opening of activation stores: which data sets can be cached, in which record format, and in which store folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from hf_pipetransformer.cache.assembly import LENGTH_FIELD, SampleSource
from hf_pipetransformer.cache.cache import ActivationCache
from hf_pipetransformer.cache.folder import (
    StoreFolder,
    Use,
    check_base,
    delete_leftovers,
    open_root,
    take_store,
)
from hf_pipetransformer.cache.inputs import InputReport, examine_inputs
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import OpenStores, cache_base, first_told, most_bytes, stored_dtype
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.node_shares import NodeOrder
from hf_pipetransformer.data.reading import DispatchedReading
from hf_pipetransformer.data.sampler import draws_each_once
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.schedules.abilities import Abilities
from hf_pipetransformer.schedules.json_values import as_json


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.context import Context
    from hf_pipetransformer.startup.planner import StartUp


def why_not_on_nodes(loader: PipelineLoader, topology: Topology) -> str | None:
    """Return why a sample could be drawn on a node other than the one that stores it; None if that is preventable."""
    order, num_samples = loader.sampler, len(loader.dataset)
    if not topology.spans_nodes or draws_each_once(order, num_samples):
        return None
    return (
        f"the run spans several nodes, and each can keep samples of its own only where an epoch is known to draw each "
        f"once: found a {type(order).__name__} of {len(order)} draws for {num_samples} samples. Use one of Trainer's "
        "own orders (train_sampling_strategy)."
    )


def keep_on_nodes(context: Context, loader: PipelineLoader) -> None:
    """Assign each node a part of the samples from the next epoch on; every rank computes it without communication."""
    args, topology = context.args, context.topology
    if not topology.spans_nodes:
        return
    seed = args.data_seed if args.data_seed is not None else args.seed
    nodes = NodeOrder(seed, tuple(map(len, topology.nodes)), loader.total_batch_size)
    loader.keep_on(nodes)
    counts = nodes.counts(len(loader.dataset))
    context.journal.write("cache", what="nodes", samples=counts, **as_json(nodes))
    if topology.rank == 0:
        announce(
            f"The run spans nodes of {', '.join(map(str, nodes.devices))} processes: each keeps its own part of the "
            f"samples ({', '.join(map(str, counts))}) for the activation cache, and an epoch shuffles inside it."
        )


def samples_here(topology: Topology, loader: PipelineLoader) -> torch.Tensor:
    """Return the indices of the training samples that this node computes, in increasing order."""
    nodes, num_samples = loader.nodes, len(loader.dataset)
    if nodes is None:
        return torch.arange(num_samples)
    here = [number for number, node in enumerate(topology.nodes) if node[0] in topology.ranks_here]
    return torch.isin(nodes.owners(num_samples), torch.tensor(here)).nonzero().squeeze(1)


def num_samples_here(topology: Topology, dataset: Any) -> int:
    """Return how many samples of a data set this node stores: its share of the ranks, rounded up."""
    return -(-len(dataset) * len(topology.ranks_here) // topology.world_size)


@dataclass(frozen=True)
class CacheInputs:
    """The one place that decides if activations of a data set may be stored, why not, and in which format."""

    context: Context
    start_up: StartUp
    abilities: Abilities
    """What the schedule can do under the layout that the run starts on."""

    @property
    def args(self) -> PipeTransformerArguments:
        return self.context.args

    @property
    def topology(self) -> Topology:
        return self.context.topology

    @property
    def base(self) -> Path:
        return cache_base(self.args)

    def source_of(self, loader: Any, is_training: bool = True) -> SampleSource | None:
        """Return a loader's samples; None, with a warning, if not cacheable. Collective: call on every rank.

        Raises:
            ValueError: the user asked for a cache in a folder that cannot contain one.
        """
        start_up, activation = self.start_up, self.start_up.probe.activation
        reason, report = self._reason_before_reading(loader), None
        if reason is None:
            report = self._examined(loader)
            reason = report.reason
        if report is None or reason is not None:
            self.say_off(str(reason), is_training)
            return None
        return SampleSource(
            read=loader.read,
            main_input=activation.main_input,
            report=report,
            num_positions=activation.hidden_shape[0],
            # Evaluations hand on outputs that no loss reads.
            record_length=start_up.record_length if is_training else activation.hidden_shape[0],
            hidden_size=activation.hidden_shape[-1],
            main_shape=activation.input_shape,
            main_dtype=start_up.main_dtype,
            pad_token_id=start_up.padding.pad_token_id,
            keeps_padding=start_up.sees_padding,
        )

    def record_format(self, source: SampleSource) -> RecordFormat:
        sample_fields = dict(source.report.sample_fields)
        if source.is_text:
            sample_fields[LENGTH_FIELD] = (torch.int32, ())
        return RecordFormat(source.hidden_size, self._stored_dtype(), source.report.token_fields, sample_fields)

    def say_off(self, reason: str, is_training: bool) -> None:
        """Log and journal why nothing of the training set, or of an evaluation set, is stored."""
        self.context.journal.write("cache", what="off" if is_training else "evaluation off", reason=reason)
        if self.topology.rank == 0:
            what = "The activation cache stays off" if is_training else "The evaluation set is not stored"
            logger.warning(f"{what}: {reason}")

    def _reason_before_reading(self, loader: Any) -> str | None:
        """Return why a loader's samples cannot be stored, as far as no sample is needed to know it. Collective."""
        activation = self.start_up.probe.activation
        # What is tested before the gather below is the same on every rank, so all ranks return early or none does.
        if (why := self.abilities.refuses.get("activation_cache")) is not None:
            return f"pipeline_schedule={self.args.pipeline_schedule!r} {why}. Use pipeline_schedule='1f1b'."
        if not isinstance(loader, PipelineLoader):
            return (
                f"get_train_dataloader returned a {type(loader).__name__}, which does not say which samples it reads. "
                "Build it with self._get_dataloader."
            )
        if loader.is_stream:
            return (
                f"the data set is a stream ({type(loader.dataset).__name__}): without indices no sample is known "
                "again. Use a data set with indices."
            )
        if (rows := self.start_up.samples.rows) > 1:
            return f"each sample has {rows} rows, such as the two texts of a pair, and a stored record has one."
        if len(activation.hidden_shape) != 2:
            shape = ("batch", *activation.hidden_shape)
            return f"the layers' activations are of shape {shape}: expected three dimensions, (batch, seq, hidden)."
        if activation.changes_length:
            return (
                f"the layers' activations have {activation.hidden_shape[0]} positions for {activation.input_shape[0]} "
                "tokens, or other numbers for other lengths: expected one a token."
            )
        if (reason := why_not_on_nodes(loader, self.topology)) is not None:
            return reason
        try:
            # One rank looks for its whole machine; the folder may be unusable on one node only, so all hear of it.
            if self.topology.is_first_here:
                check_base(self.base)
        except (OSError, ValueError) as error:
            reason = str(error)
        reason = first_told(self.topology, reason)
        # Who names a folder or asks for the cache is not left without it by a mere warning.
        if reason is not None and (self.args.activation_cache_dir is not None or self.args.activation_cache == "on"):
            raise ValueError(reason)
        return reason

    def _examined(self, loader: PipelineLoader) -> InputReport:
        """Return the ranks' common report on samples that are read. Collective: call on every rank."""
        probe = self.start_up.probe
        report = examine_inputs(loader.dataset, loader.collate_fn, probe.activation.main_input, probe.placeholders)
        try:
            # Made for its checks of the dtypes alone, which do not depend on the hidden size.
            RecordFormat(1, self._stored_dtype(), report.token_fields, report.sample_fields)
        except ValueError as error:
            report = InputReport(report.reason or str(error))
        if report.reason is None and isinstance(loader.reading, DispatchedReading):
            report = InputReport(
                "data set or collator draw random numbers, so that one process reads for all and none knows which "
                "samples it has. Give such that draw none, although what they give is the same each time."
            )
        reason = first_told(self.topology, report.reason)
        return report if reason is None else InputReport(reason)

    def _stored_dtype(self) -> torch.dtype:
        return stored_dtype(self.args, self.start_up.probe.boundary_dtypes[-1])


def remove_old_stores(args: PipeTransformerArguments) -> None:
    """Delete stores that killed runs left on this machine. Call on the first rank of the machine."""
    with suppress(OSError, ValueError):
        delete_leftovers(open_root(cache_base(args)))


NUM_KEY_SAMPLES = 32
"""Number of samples whose digests identify the inputs of a kept store."""


class CacheStores:
    """Stores of a run, one per node and shared by its ranks; `inputs` sets their format."""

    def __init__(self, inputs: CacheInputs) -> None:
        self.inputs = inputs
        self.args = inputs.args
        self.topology = inputs.topology
        self._stores = OpenStores()
        self._opened: list[ActivationCache] = []

    def open(self, loader: PipelineLoader, source: SampleSource, is_training: bool = True) -> ActivationCache | None:
        """Open a store; None, with a warning, if any node cannot. Collective: call on every rank."""
        topology = self.topology
        found = self._stores.open(topology, lambda: self._own_store(loader, source), topology.rank)
        if isinstance(found, str):
            self.inputs.say_off(found, is_training)
            return None
        folder, store = found
        if topology.rank == 0 and store.num_found:
            announce(
                f"The activation cache has the records of an earlier run for {store.num_found} of {store.num_samples} "
                "samples. A record is used once its sample has been read again and found to be the same: the first "
                "epoch saves computing, but still reads the data set."
            )
        opened = ActivationCache(store, source, self.args.device, folder)
        self._opened.append(opened)
        return opened

    def max_bytes(self) -> float:
        """Return the size limit of the next store in bytes."""
        return most_bytes(self.args, self._stores.bytes_taken())

    def close(self) -> None:
        """Close all stores and delete their folders, except those that the user asked to keep."""
        for opened in self._opened:
            opened.close()

    def _own_store(self, loader: PipelineLoader, source: SampleSource) -> tuple[StoreFolder, ActivationStore]:
        """Create the node's store, or reopen one that an earlier run kept here."""
        use = Use.of(self.inputs.context.run.model, "the frozen layers", loader.dataset)
        return take_store(
            self.inputs.base,
            self._data_key(loader, source),
            len(loader.dataset),
            self.inputs.record_format(source),
            int(self.max_bytes()),
            use if self.args.activation_cache_keep else None,
        )

    def _data_key(self, loader: PipelineLoader, source: SampleSource) -> str | None:
        """Return a name for samples and record format that a later run recognizes; None without a fingerprint."""
        num_samples, fingerprint = len(loader.dataset), getattr(loader.dataset, "_fingerprint", None)
        if fingerprint is None:
            if self.args.activation_cache_keep:
                logger.warning(
                    f"activation_cache_keep: a {type(loader.dataset).__name__} has no fingerprint that a later run "
                    "could know it by, so the store is not kept. Use a datasets.Dataset."
                )
            return None
        # A data set's fingerprint does not cover the collator, so a few collated samples are hashed as well.
        spread = sorted({i * num_samples // NUM_KEY_SAMPLES for i in range(NUM_KEY_SAMPLES)})
        _, digests = source.digests(source.read(spread))
        # Another record format gets another folder. The name is hashed since a fingerprint may be any text.
        record_format = json.dumps(self.inputs.record_format(source).to_json(), sort_keys=True)
        # Input digests stop at the last real token; stored records may include padding.
        fills = sorted(source.report.fill_values.items())
        padded = f"\0{source.pad_token_id}\0{fills}" if source.is_text and source.keeps_padding else ""
        part = "" if source.record_length == source.num_positions else f"\0{source.record_length}"
        name = xxhash.xxh3_128_hexdigest(f"{fingerprint}\0{record_format}{padded}{part}".encode())
        return f"{name}-{num_samples}-{xxhash.xxh3_64_hexdigest(digests.tobytes())}"
