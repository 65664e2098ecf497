"""Activation cache of a training run: follows layout changes, watches frozen weights, and serves evaluation sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.cache.cache import ActivationCache
from hf_pipetransformer.cache.chain import OTHER_BATCH_TOLERANCE, FrozenWeights, coarsest, differs
from hf_pipetransformer.cache.opening import CacheInputs, CacheStores, keep_on_nodes, num_samples_here, samples_here
from hf_pipetransformer.cache.pricing import CachePlanner
from hf_pipetransformer.cache.storage import first_told, measure_storage
from hf_pipetransformer.cache.store import StoreSize, store_size
from hf_pipetransformer.comm.staging import is_apart
from hf_pipetransformer.comm.transfers import broadcast_tree
from hf_pipetransformer.data.batches import detach_tags, take_rows, take_samples
from hf_pipetransformer.planning.storing import why_not_over_nodes
from hf_pipetransformer.report import logger
from hf_pipetransformer.schedules.placement import first_above


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array
    from hf_pipetransformer.cache.inputs import SampleForm
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.engine.program import MicroBatch
    from hf_pipetransformer.runtime.context import Context
    from hf_pipetransformer.runtime.pipeline import Pipeline


NUM_CHECKED = 4
"""Samples of a batch that are computed again before records of an earlier run are used."""

NUM_HIDDEN = 3
"""Tokens that a trial without padding takes for padding."""

NUM_WATCHED = 1
"""Samples that the checks of a run compute again: twice an epoch, and of a large model each takes a while."""


class TrainingCache:
    """Cache of the frozen blocks' output, for the training samples and for evaluation sets read during training.

    The store is opened when a layout first caches blocks. `form` is that of the samples of the
    training data's `loader`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: CacheInputs,
        loader: PipelineLoader,
        form: SampleForm,
        steps_per_epoch: int,
    ) -> None:
        self.inputs = inputs
        self.run = inputs.context.run
        self.topology = inputs.topology
        self.pipeline = pipeline
        self.loader = loader
        self.form = form
        self.stores = CacheStores(inputs)
        self.planner = CachePlanner(
            mode=inputs.args.activation_cache,
            measure=lambda: measure_storage(
                inputs.base,
                form.record_format,
                form.record_length,
                # Stage 0 reads for the whole pipeline.
                inputs.args.train_samples_per_device * pipeline.layout.pipeline_size,
                len(loader.dataset),
            ),
            size=self._store_size(loader),
            steps_per_epoch=steps_per_epoch,
            write=inputs.context.journal.write,
            is_apart=is_apart(inputs.args.device),
            num_at_once=inputs.args.gradient_accumulation_steps,
            dropout_from=pipeline.start_up.plans.dropout_from,
        )
        self._opened: ActivationCache | None = None
        self._weights: FrozenWeights | None = None
        self._digests: Mapping[int, str] = {}
        self._of_evaluations: dict[int, tuple[Any, ActivationCache | None]] = {}
        self._said_evaluation_mode = False
        self._is_due = False
        self._checked_at = 0
        """Optimizer steps done at the last check that found nothing."""
        self._has_served = False
        """True if batches since then have used stored activations."""
        self._unproven = set[int]()
        """Levels whose records of an earlier run were not compared yet with what the layers give now."""

    def _store_size(self, loader: PipelineLoader) -> StoreSize:
        """Return the bytes that a loader's samples need and may take here, at training's record length."""
        num_samples, here = len(loader.dataset), num_samples_here(self.topology, loader.dataset)
        how = (self.form.record_format, self.form.record_length, here)
        return store_size(self.stores.max_bytes(), num_samples, *how)

    # ---- following the layout ----

    def follow(self) -> None:
        """Serve records of the present weights after a transition. Collective: call on every rank."""
        stage = self.pipeline.stage
        if stage.layout.cache_level and self._opened is None and self.planner.mode != "off":
            self._opened = self.stores.open(self.loader, self.form)
            if self._opened is None:
                self.planner.mode = "off"
            else:
                self.planner.follow(self._opened, samples_here(self.topology, self.loader).numpy())
        if self._opened is None:
            return
        self._say_who_is_in_evaluation_mode()
        # Before the loader takes from the cache, which serves records of the weights named last.
        self._name_weights(self._opened)
        self.loader.take_from(self._opened, is_asked=True)

    @property
    def write(self) -> Callable[[MicroBatch, torch.Tensor], None] | None:
        """Callback that stores the activations of a micro-batch; None until a layout caches blocks."""
        return None if self._opened is None else self._opened.writer.write

    def prepare_transition(self) -> None:
        """Drop references to weights that may leave this rank. Collective: call on every rank of a pipeline."""
        # The last moment at which changes since the last check show: the reference to the weights goes.
        self.check()
        self._weights = None

    def _say_who_is_in_evaluation_mode(self) -> None:
        stage = self.pipeline.stage
        drops = stage.layout.cache_level >= self.planner.dropout_from
        if drops and self.topology.rank == 0 and not self._said_evaluation_mode:
            self._said_evaluation_mode = True
            logger.warning(
                f"What the script froze of the embeddings and the first {stage.layout.cache_level} layers runs in "
                "evaluation mode, without dropout, because its activations are stored. activation_cache='off' keeps "
                "it in training mode, as in Trainer."
            )

    def _name_weights(self, cache: ActivationCache) -> None:
        stage, self._weights = self.pipeline.stage, None
        if not stage.layout.cache_level:
            self._digests = {}  # They may change unnoticed while nothing is cached.
            cache.use_weights([""])
            return
        samples = take_samples(self.pipeline.start_up.samples, slice(0, NUM_WATCHED))
        compute = partial(self._output_after, stage.layout.cache_level, samples)
        self._weights = FrozenWeights(stage, self.run.args, self._digests, compute)
        self._digests = self._weights.digests
        self._use_weights(cache)
        if self._told(cache.is_off):
            return
        if self._weights.computes_other_than(self._output_after(stage.layout.cache_level, samples, seed=1)):
            cache.switch_off(
                "what enters the frozen layers, or what they give, is drawn at random in evaluation mode, too (masks "
                "over time, for example), so that no record holds in a second epoch."
            )
        elif self._depends_on_padding(stage.layout.cache_level, self._weights.precision):
            cache.switch_off(
                "what the frozen layers give for a sample depends on how far its batch is padded (a convolution over "
                "tokens, or segments of the whole length, or padding that the loss reads), so that no record would do "
                "in another batch."
            )

    def _depends_on_padding(self, level: int, precision: str) -> bool:
        """Return True if the layers give something else for a sample without its padding. Collective."""
        batch = self.pipeline.start_up.samples
        mask = batch.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return False
        lengths, padded = (mask != 0).sum(1).tolist(), mask.shape[1]
        row = min(range(len(lengths)), key=lengths.__getitem__)
        # Text that is padded on the left is not stored. Without padding, the last tokens are taken for some.
        length = min(lengths[row], padded - NUM_HIDDEN)
        if length < 1 or not mask[row, :length].all():
            return False
        whole = take_samples(batch, slice(row, row + 1))
        hidden = torch.arange(padded, device=mask.device) < length
        whole["attention_mask"] = whole["attention_mask"] * hidden
        expected = self._output_after(level, whole)
        # Where the loss reads padding, a record has that of its own batch, and serves longer batches.
        for kept in (length, *([padded - 1] if self.pipeline.start_up.sees_padding else [])):
            cut = {
                name: value[:, :kept]
                if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == padded
                else value
                for name, value in whole.items()
            }
            found = self._output_after(level, cut)
            # The last tokens by themselves, too: of a long text a convolution changes these few alone.
            for end in ((slice(None), slice(kept)), (slice(None), slice(kept - min(kept, NUM_HIDDEN), kept))):
                if differs(found[end], expected[end], OTHER_BATCH_TOLERANCE[precision]):
                    return True
        return False

    def _use_weights(self, cache: ActivationCache) -> None:
        """Serve records of the present weights. Collective: call on every rank of a pipeline."""
        assert self._weights is not None
        # Ranks of other pipelines may have come to distrust what these have not, before a transition joined them.
        cache.follow(self._told(cache.state))
        cache.use_weights(self._weights.keys)
        if cache is self._opened:
            self._unproven = set(range(1, cache.level + 1)) if self._told(cache.store.num_found) else set()

    def _told(self, value: Any) -> Any:
        """Return what the first rank of the pipeline has. Collective: call on every rank of it."""
        groups = self.pipeline.stage.groups
        return broadcast_tree(value, groups.pipeline_ranks[0], groups.pipeline_control, self.topology.rank)

    def _agrees(self, cache: ActivationCache, inputs: Mapping[str, Any]) -> bool:
        """Return False if records that a batch has are not what the layers give now; serve others then.

        Collective: call on every rank of a pipeline.
        """
        assert self._weights is not None
        is_first = self.pipeline.stage.groups.is_first
        for some in self._told(_some_records(inputs, self._unproven, NUM_CHECKED) if is_first else None):
            given, lengths = self._output_after(some["level"], some["batch"]), cache.form.kept_of(some["batch"])
            if not _are_alike(given, some["activation"], lengths, self._weights.precision):
                cache.distrust()
                self._use_weights(cache)
                self._say(
                    "The activations that an earlier run has stored are computed again: the frozen layers have the "
                    "same weights and settings, but compute something else for the same samples. Expected the "
                    "modules, their attributes and their hooks of that run."
                )
                return False
            self._unproven.discard(some["level"])
        return True

    def _output_after(self, level: int, batch: Mapping[str, Any], seed: int = 0) -> torch.Tensor:
        """Return what the embeddings and `level` layers give for a batch. Collective: every rank of a pipeline."""
        forward = self.run.forward_of(self.pipeline.shell, batch)
        return self.pipeline.stage.output_below(first_above(level), forward, seed)

    def current(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return a training batch, looked up again if frozen weights have changed since (by a callback or a load).

        Collective: call on every rank of a pipeline.

        Raises:
            ValueError: the script lets a layer train whose output is stored.
        """
        trained = None if self._weights is None else self._weights.trained
        if trained is not None:
            raise ValueError(
                f"{trained} was frozen when training started, and requires_grad is True now, while the outputs of "
                "its layer are read from the activation cache: it would not be trained. Set activation_cache='off', "
                "with which layers may be unfrozen in a run."
            )
        if self._is_due:
            self.check()
        else:
            self.notice_changed_weights(at_once=False)
        plain, tags = detach_tags(inputs)
        if self._opened is None or tags is None:
            return inputs
        if not self.loader.is_as_yielded(inputs):
            return plain  # Code of the script's has changed it behind the loader, on all ranks alike.
        # The loader reads ahead, so this batch may come from records of the weights before.
        if tags.stamp != self._opened.stamp:
            inputs = self.loader.look_up_again(inputs)
        if self._unproven and not self._agrees(self._opened, inputs):
            inputs = self.loader.look_up_again(inputs)
        _, tags = detach_tags(inputs)
        self._has_served |= tags is not None and bool(tags.num_layers.any())
        return inputs

    def notice_changed_weights(self, at_once: bool = True) -> None:
        """Check the frozen weights: if changed, compute new keys; if not, release pending records for writing.

        Collective: call on every rank of a pipeline. Without `at_once` the GPU is not synchronized, and a write past
        autograd is noticed one batch late there.
        """
        if self._opened is None or self._weights is None:
            return
        before = self._weights
        if not before.have_changed(at_once):
            self._opened.writer.write_pending()
            return
        self._digests = {}
        self._name_weights(self._opened)
        # Writing a tensor the values that it has moves the version counter as well; the records then hold on.
        if self._weights.keys != before.keys:
            self._say("Weights of frozen layers were changed from outside: their activations are computed again.")
        elif before.computes_other_than(self._weights.output):
            self._end_or_distrust("what they compute")

    # ---- checks ----

    def begin_epoch(self) -> None:
        """Have the next batch checked, after the callbacks that come before it."""
        self._is_due = True

    def check(self) -> None:
        """Check that the frozen layers are and compute what they did when records were written.

        Sees any byte of their weights, the settings, and by a few samples everything that changes what they compute.
        Collective: call on every rank of a pipeline.

        Raises:
            ValueError: they changed unseen, and batches since the last check may have read records of before.
        """
        self._is_due = False
        self.notice_changed_weights()
        if self._opened is not None and self._weights is not None and (changed := self._weights.what_changed()):
            self._end_or_distrust(changed)
        self._checked_at, self._has_served = self.run.state.global_step, False

    def check_end(self) -> None:
        """Check what the last steps have read, unless that was done since. Collective: see `check`."""
        if self.run.state.global_step != self._checked_at:
            self.check()

    def _end_or_distrust(self, changed: str) -> None:
        """Compute everything again, or end the run if batches have used stored activations since the last check."""
        if self._has_served:
            first, last = self._checked_at + 1, max(self.run.state.global_step, self._checked_at + 1)
            raise ValueError(
                f"Steps {first} to {last} may have used stored activations that do not hold any more: frozen layers "
                f"were changed ({changed}) after the check before step {first}, and no version counter shows it: "
                "a write past autograd (parameter.data[0] = 1), a hook, another module or an attribute. Change them "
                "between epochs (on_epoch_begin), write with parameter.copy_() under torch.no_grad(), or set "
                "activation_cache='off'."
            )
        self._say(f"Frozen layers were changed from outside ({changed}): their activations are computed again.")
        opened = self._opened
        assert opened is not None
        for cache in (opened, *(cache for _, cache in self._of_evaluations.values() if cache is not None)):
            cache.distrust()
        self._digests = {}
        self._name_weights(opened)

    def _say(self, text: str) -> None:
        groups = self.pipeline.stage.groups
        if groups.is_first and groups.replica == 0:
            logger.warning(text)

    # ---- evaluation sets ----

    def serve(self, loader: PipelineLoader, dataset: Any) -> None:
        """Let an evaluation during training use the cache, if the set will be read again and caching it pays."""
        if self._opened is None or self._weights is None or self.run.args.dataloader_persistent_workers:
            return  # A loader that persists would keep records of before.
        # One process may have found damage that the others have not met yet.
        if not self.run.hides_batches_of(dataset) or any(self.topology.gather(self._opened.is_off)):
            return
        self.check()
        if id(dataset) not in self._of_evaluations:
            cached_layers, passes_left = self.pipeline.layout.cache_level, self._evaluations_left()
            fits_share = self._store_size(loader).share
            pays = self.topology.decide(
                lambda: self.planner.pays_for_evaluation(cached_layers, passes_left, fits_share)
            )
            if not pays:
                return
            form = self.inputs.form_of(loader, is_training=False)
            opened = None if form is None else self.stores.open(loader, form, is_training=False)
            # Nothing compares what an earlier run has stored of an evaluation.
            if opened is not None and self._told(opened.store.num_found):
                opened.distrust()
            # Keep a reference to the data set: after garbage collection its id could be reused.
            self._of_evaluations[id(dataset)] = dataset, opened
        _, cache = self._of_evaluations[id(dataset)]
        if cache is not None:
            self._use_weights(cache)
            loader.take_from(cache)

    def _evaluations_left(self) -> float:
        """Return how often the evaluation set will be read, including this time."""
        args, state = self.run.args, self.run.state
        if args.eval_strategy == "no":
            return 1
        steps = state.eval_steps if args.eval_strategy == "steps" else self.planner.steps_per_epoch
        return 1 + (state.max_steps - state.global_step) // max(1, int(steps))

    @contextmanager
    def storing_for(self, loader: Any) -> Iterator[None]:
        """Store the activations of predictions made inside this context, in the cache of `loader`'s data set."""
        cache, pipeline = getattr(loader, "records", None), self.pipeline
        if not isinstance(cache, ActivationCache):
            yield
            return
        shell, runner = pipeline.shell, pipeline.runner

        def write_now(micro_batch: MicroBatch, hidden: torch.Tensor) -> None:
            cache.writer.write(micro_batch, hidden)
            cache.writer.write_pending()  # Weights do not change during an evaluation.

        try:
            # Even with one stage: only the engine can start a forward from stored activations.
            with shell.predicting(runner, replace(shell.prediction, write=write_now)):
                yield
        finally:
            cache.writer.wait()

    # ---- reports, and the end ----

    def report(self) -> tuple[int, int, int]:
        """Log the epoch's cache statistics; return the numbers of hits, misses and bytes stored.

        Collective: call on every rank.
        """
        if self._opened is None:
            return 0, 0, 0
        if is_apart(self.run.args.device):
            self.notice_changed_weights()
            # Otherwise early samples of the next epoch would miss records that are still being written.
            self._opened.writer.wait()
        # The ranks of a machine share one store, whose bytes count once.
        num_bytes = self._opened.store.bytes_stored if self.topology.is_first_here else 0
        counts = self.topology.gather({"bytes_stored": num_bytes, **self._opened.counts.since_report()})
        totals = {name: sum(count[name] for count in counts) for name in counts[0]}
        self.inputs.context.journal.write("cache", what="epoch", **totals)
        self._opened.end_epoch()
        self._drop_on_all_nodes(self._opened)
        reads = totals["hits"] + totals["misses"]
        if reads:
            # A separate log entry: Trainer has already logged the last step, and the run may end here.
            self.run.log({"cache_hit_rate": totals["hits"] / reads})
        return int(totals["hits"]), int(totals["misses"]), int(totals["bytes_stored"])

    def _drop_on_all_nodes(self, cache: ActivationCache) -> None:
        """Abandon the cache on all nodes if one node has abandoned its store. Collective: call on every rank.

        The reason (a data set that changes) may apply to every node, and the plan counts on hits that one node no
        longer has. The ranks of the same node already know.
        """
        reason = first_told(self.topology, cache.store.dropped)
        if reason is None:
            return
        self.planner.mode = "off"
        if cache.store.dropped is None:
            cache.switch_off(reason)

    def close(self) -> None:
        """Close the stores; delete those that are not to be kept."""
        self.stores.close()


def _some_records(inputs: Mapping[str, Any], levels: set[int], most: int) -> list[dict[str, Any]]:
    """Return at most `most` samples of a batch that have records of a level, for some levels: inputs, activations."""
    batch, tags = detach_tags(inputs)
    if tags is None or tags.hidden is None:
        return []
    found = []
    for level in sorted(levels & {*tags.num_layers.tolist()}):
        rows = (tags.num_layers == level).nonzero().squeeze(1)[:most]
        found.append({"level": level, "batch": dict(take_rows(batch, rows)), "activation": tags.hidden[rows].clone()})
    return found


def _are_alike(output: torch.Tensor, stored: torch.Tensor, lengths: Array, precision: str) -> bool:
    """Return True if the layers' output is that of stored records of these lengths."""
    # Records stored in 16 bits are rounded more than the precision of the run says.
    tolerance = OTHER_BATCH_TOLERANCE[coarsest(precision, stored.dtype, output.dtype)]
    shown = torch.arange(output.shape[1]) < torch.from_numpy(lengths)[:, None]
    return not differs(output[shown], stored[shown].to(output.dtype), tolerance)


def begin_cache(context: Context, pipeline: Pipeline, loader: Any, steps_per_epoch: int) -> TrainingCache | None:
    """Check if activations can be cached and set up the cache; None if not. Collective: call on every rank.

    Over several nodes the samples are assigned to nodes even if pipelines span them, and may do so to the end: their
    order must not depend on K.

    Raises:
        ValueError: the user asked for a cache in a folder that cannot contain one, or while pipelines span nodes.
    """
    if context.args.activation_cache == "off":
        return None
    size, node_size = pipeline.layout.pipeline_size, context.topology.local_world_size
    why = why_not_over_nodes(size, node_size) if size > node_size else None
    if why is not None and context.args.activation_cache == "on":
        raise ValueError(f"activation_cache='on', and {why}. Use 'auto', which waits for that, or 'off'.")
    inputs = CacheInputs(context, pipeline.start_up, pipeline.layout.abilities)
    form = inputs.form_of(loader)
    if form is None:
        return None
    keep_on_nodes(context, loader)
    if why is not None:
        inputs.say_off(f"{why}.", is_training=True)
    return TrainingCache(pipeline, inputs, loader, form, steps_per_epoch)
