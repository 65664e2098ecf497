"""Opening of activation stores: which data sets can be cached, in which record format, and in which store folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from hf_pipetransformer.cache.cache import ActivationCache
from hf_pipetransformer.cache.folder import (
    StoreFolder,
    Use,
    check_base,
    delete_leftovers,
    open_root,
    take_store,
)
from hf_pipetransformer.cache.inputs import SampleForm
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import OpenStores, cache_base, first_told, most_bytes, stored_dtype
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.node_shares import NodeOrder
from hf_pipetransformer.data.reading import DispatchedReading
from hf_pipetransformer.data.sampler import draws_each_once
from hf_pipetransformer.engine.losses import LossScope
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

    def form_of(self, loader: Any, is_training: bool = True) -> SampleForm | None:
        """Return the form of a loader's samples; None, with a warning, if not cacheable. Collective.

        Raises:
            ValueError: the user asked for a cache in a folder that cannot contain one.
        """
        reason, form = self._why_not(loader), None
        try:
            form = None if reason is not None else self._form(is_training)
        except ValueError as error:
            reason = str(error)
        # The rows of the first batch, which every rank has; of others it shows when they are read.
        if form is not None:
            reason = form.why_unfit(self.start_up.samples)
        if reason is not None:
            self.say_off(reason, is_training)
            return None
        return form

    def _form(self, is_training: bool) -> SampleForm:
        """Return the form of samples; raises ValueError for a dtype that cannot be stored."""
        start_up, activation = self.start_up, self.start_up.probe.activation
        num_positions, hidden_size = activation.hidden_shape
        value = start_up.samples[activation.main_input]
        is_text = value.dim() == 2 and not value.is_floating_point()
        return SampleForm(
            main_input=activation.main_input,
            shape=None if is_text else tuple(value.shape[1:]),
            num_positions=num_positions,
            # Evaluations hand on outputs that no loss reads.
            record_length=start_up.record_length if is_training else num_positions,
            record_format=RecordFormat(hidden_size, stored_dtype(self.args, start_up.probe.boundary_dtypes[-1])),
            pad_token_id=start_up.padding.pad_token_id,
            keeps_padding=start_up.sees_padding,
        )

    def say_off(self, reason: str, is_training: bool) -> None:
        """Log and journal why nothing of the training set, or of an evaluation set, is stored."""
        self.context.journal.write("cache", what="off" if is_training else "evaluation off", reason=reason)
        if self.topology.rank == 0:
            what = "The activation cache stays off" if is_training else "The evaluation set is not stored"
            logger.warning(f"{what}: {reason}")

    def _why_not(self, loader: Any) -> str | None:
        """Return why a loader's samples cannot be stored, whatever is in them. Collective."""
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
        # A loss of whole batches shows what it gives the model.
        changer = self.context.run.changer_of_batches(self.start_up.plans.scope is LossScope.PARTS)
        if changer is not None:
            return (
                f"{changer} gets batches between the loader and the model, and may change samples whose activations "
                "are stored. Change them in the data set or the collator, or leave it out."
            )
        if isinstance(loader.reading, DispatchedReading):
            return (
                "data set or collator draw random numbers (augmentation, random masks), so that one process reads for "
                "all and samples may change from one reading to the next. Draw once, before the training, or give "
                "each sample several rows, each augmented in a way of its own (docs/recipes/imagenet.md)."
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


def remove_old_stores(args: PipeTransformerArguments) -> None:
    """Delete stores that killed runs left on this machine. Call on the first rank of the machine."""
    with suppress(OSError, ValueError):
        delete_leftovers(open_root(cache_base(args)))


class CacheStores:
    """Stores of a run, one per node and shared by its ranks; `inputs` sets their format."""

    def __init__(self, inputs: CacheInputs) -> None:
        self.inputs = inputs
        self.args = inputs.args
        self.topology = inputs.topology
        self._stores = OpenStores()
        self._opened: list[ActivationCache] = []

    def open(self, loader: PipelineLoader, form: SampleForm, is_training: bool = True) -> ActivationCache | None:
        """Open a store; None, with a warning, if any node cannot. Collective: call on every rank."""
        topology = self.topology
        found = self._stores.open(topology, lambda: self._own_store(loader, form), topology.rank)
        if isinstance(found, str):
            self.inputs.say_off(found, is_training)
            return None
        folder, store = found
        if topology.rank == 0 and store.num_found:
            announce(
                f"The activation cache has the records of an earlier run for {store.num_found} of {store.num_samples} "
                "samples. A record is used for a sample that is the same."
            )
        opened = ActivationCache(store, form, self.args.device, folder)
        self._opened.append(opened)
        return opened

    def max_bytes(self) -> float:
        """Return the size limit of the next store in bytes."""
        return most_bytes(self.args, self._stores.bytes_taken())

    def close(self) -> None:
        """Close all stores and delete their folders, except those that the user asked to keep."""
        for opened in self._opened:
            opened.close()

    def _own_store(self, loader: PipelineLoader, form: SampleForm) -> tuple[StoreFolder, ActivationStore]:
        """Create the node's store, or reopen one that an earlier run kept here."""
        use = Use.of(self.inputs.context.run.model, "the frozen layers", loader.dataset)
        return take_store(
            self.inputs.base,
            self._data_key(loader, form),
            len(loader.dataset),
            form.record_format,
            int(self.max_bytes()),
            use if self.args.activation_cache_keep else None,
        )

    def _data_key(self, loader: PipelineLoader, form: SampleForm) -> str | None:
        """Return a name for a data set and its records that a later run recognizes; None without a fingerprint."""
        num_samples, fingerprint = len(loader.dataset), getattr(loader.dataset, "_fingerprint", None)
        if fingerprint is None:
            if self.args.activation_cache_keep:
                logger.warning(
                    f"activation_cache_keep: a {type(loader.dataset).__name__} has no fingerprint that a later run "
                    "could know it by, so the store is not kept. Use a datasets.Dataset."
                )
            return None
        # Another form of records gets another folder. The name is hashed since a fingerprint may be any text.
        return f"{xxhash.xxh3_128_hexdigest(f'{fingerprint}{form}'.encode())}-{num_samples}"
