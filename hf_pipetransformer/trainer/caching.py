"""The activation cache in a training run: whether there may be one, its store, and the weights that it hangs on."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_pipetransformer.autocache.cache import ActivationCache
from hf_pipetransformer.autocache.chain import PrefixWatch, chain_keys, unit_digests
from hf_pipetransformer.autocache.folder import (
    StoreFolder,
    check_base,
    default_base,
    delete_leftovers,
    open_root,
    safe_max_bytes,
    take_store,
)
from hf_pipetransformer.autocache.inputs import InputReport, examine_inputs
from hf_pipetransformer.autocache.parts import LENGTH_FIELD, SampleSource
from hf_pipetransformer.autocache.planner import CachePlanner, measure_storage
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.store import ActivationStore
from hf_pipetransformer.autocache.table import StoreDamagedError
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.stream import StreamLoader
from hf_pipetransformer.autodp.topology import all_gather_trees
from hf_pipetransformer.cache_tags import detach_tags
from hf_pipetransformer.execution import WritingRunner
from hf_pipetransformer.pipeline.program import MicroBatch
from hf_pipetransformer.report.events import logger
from hf_pipetransformer.staging import is_apart
from hf_pipetransformer.trainer.evaluating import EvaluatingTrainer
from hf_pipetransformer.transition import Stage


NOT_SETTINGS = ("architectures", "dtype", "_name_or_path", "transformers_version")
"""Entries of a configuration that no activation hangs on."""

NUM_KEY_SAMPLES = 32
"""Samples that say whether a store that was kept is of the same inputs."""


def _row_format_of(source: SampleSource, dtype: torch.dtype) -> RowFormat:
    sample_fields = dict(source.report.sample_fields)
    if source.is_text:
        sample_fields[LENGTH_FIELD] = (torch.int32, ())
    return RowFormat(source.hidden_size, dtype, source.report.token_fields, sample_fields)


class CachingTrainer(EvaluatingTrainer):
    """Opens the store of a run when it is first needed, keeps it true to the weights, and removes it at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache: ActivationCache | None = None
        self._cache_folders: list[StoreFolder] = []
        self._eval_caches: dict[int, tuple[Any, ActivationCache | None]] = {}
        self._chain_keys: list[str] = []
        self._cache_source: SampleSource | None = None
        self._cache_planner: CachePlanner | None = None
        self._watch: PrefixWatch | None = None
        self._cache_scalars: dict[str, float] = {}
        self._unit_digests: dict[int, str] = {}
        self._said_evaluation_mode = False

    # ---- may there be a cache ----

    def _delete_leftovers(self) -> None:
        """Whatever kind of run this is, it deletes the stores that killed ones left."""
        if self.topology.rank == 0:
            with suppress(OSError, ValueError):
                delete_leftovers(open_root(self._cache_base()))

    def _begin_cache(self, loader: Any, steps_per_epoch: int) -> None:
        """Look whether what frozen layers give may be stored, before anything is. A collective call."""
        self._cache_source = self._cache_planner = None
        if self.args.activation_cache == "off":
            return
        self._cache_source = source = self._source_of(loader)
        if source is None:
            return
        base, row_format, length = self._cache_base(), _row_format_of(source, self._stored_dtype()), source.row_length
        wanted = len(loader.dataset) * length * row_format.hidden_size * row_format.dtype.itemsize
        self._cache_planner = CachePlanner(
            mode=self.args.activation_cache,
            # Workers read while the others compute.
            input_seconds=0.0 if self.args.dataloader_num_workers else source.report.seconds_per_sample,
            measure=lambda: measure_storage(base, row_format, length),
            fits_share=min(1.0, self._max_cache_bytes() / wanted),
            steps_per_epoch=steps_per_epoch,
            write=self.run.journal.write,
        )

    def _source_of(self, loader: Any) -> SampleSource | None:
        """The samples of a loader, if what frozen layers give for them may be stored. A collective call."""
        report = self._examined(loader)
        if report.reason is not None:
            self._write_cache_event("off", reason=report.reason)
            if self.is_world_process_zero():
                logger.warning(f"The activation cache stays off: {report.reason}")
            return None
        assert self._stage is not None
        probe = self.run.pipeline.start_up.probe
        return SampleSource(
            read=lambda samples: loader.collate([loader.dataset[i] for i in samples]),
            main_input=probe.activation.main_input,
            report=report,
            row_length=probe.activation.hidden_shape[0],
            hidden_size=probe.activation.hidden_shape[-1],
            main_shape=probe.activation.input_shape,
            main_dtype=self.run.pipeline.start_up.main_dtype,
            pad_token_id=self.run.pipeline.start_up.pad_token_id,
            keeps_padding=self.run.pipeline.start_up.sees_padding,
        )

    def _examined(self, loader: Any) -> InputReport:
        """What the ranks found out about the inputs, or why they did not look."""
        assert self._stage is not None
        reason = None
        if not isinstance(loader, PipelineLoader):
            reason = (
                f"get_train_dataloader returned a {type(loader).__name__}, which does not say which samples it reads. "
                "Build it with self._get_dataloader."
            )
        elif isinstance(loader, StreamLoader):
            reason = (
                f"the data set is an {type(loader.dataset).__name__}: without indices no sample is known again. Use a "
                "data set with indices."
            )
        elif self.topology.world_size > self.topology.local_world_size:
            reason = "the run spans several nodes, and a sample may be drawn on another node than it was stored on."
        else:
            reason = self._refused_base()
        if reason is not None:
            return InputReport(reason)
        probe = self.run.pipeline.start_up.probe
        report = examine_inputs(loader.dataset, loader.collate, probe.activation.main_input, probe.placeholders)
        if report.reason is None:
            report = self._storable(report)
        # What one rank noticed holds for all.
        reasons = [reason for reason in self.topology.gather(report.reason) if reason is not None]
        return InputReport(reasons[0]) if reasons else report

    def _refused_base(self) -> str | None:
        """Why the folder cannot hold a store; one that was asked for is refused. A collective call."""
        reason = None
        if self.topology.rank == 0:
            try:
                check_base(self._cache_base())
            except (OSError, ValueError) as error:
                reason = str(error)
        reason = self.topology.broadcast(reason)
        if reason is not None and (self.args.activation_cache_dir is not None or self.args.activation_cache == "on"):
            raise ValueError(reason)
        return reason

    def _storable(self, report: InputReport) -> InputReport:
        """The report, or why rows of such fields and activations cannot be stored."""
        try:
            RowFormat(1, self._stored_dtype(), report.token_fields, report.sample_fields)
        except ValueError as error:
            return InputReport(str(error))
        return report

    def _stored_dtype(self) -> torch.dtype:
        """Precision of what is stored."""
        assert self._stage is not None
        name = self.args.activation_cache_dtype
        if name != "auto":
            asked: torch.dtype = getattr(torch, name)
            return asked
        autocast = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return autocast or self.run.pipeline.start_up.probe.boundary_dtypes[-1]

    def _cache_base(self) -> Path:
        return Path(self.args.activation_cache_dir or default_base())

    def _max_cache_bytes(self) -> float:
        asked = self.args.activation_cache_max_gb
        if asked is None:
            return safe_max_bytes(self._cache_base())
        opened = [self._cache, *(eval_cache for _, eval_cache in self._eval_caches.values())]
        return max(0.0, asked * 1e9 - sum(cache.store.bytes_stored for cache in opened if cache is not None))

    def _write_cache_event(self, what: str, **fields: Any) -> None:
        self.run.journal.write("cache", what=what, **fields)

    # ---- following the layout ----

    def _follow_with_cache(self, stage: Stage, loader: Any) -> None:
        """After a transition: serve rows that belong to the weights, up to the layout's level. A collective call."""
        level = stage.layout.cache_level
        if level and self._cache is None and self._cache_source is not None:
            self._cache = self._opened(loader, self._cache_source)
            if self._cache is None:
                self._cache_source = None
                if self._cache_planner is not None:
                    self._cache_planner.mode = "off"
            elif self._cache_planner is not None:
                store, everyone = self._cache.store, np.arange(len(loader.dataset))
                self._cache_planner.stored_share = lambda: float((store.weights_ids(everyone) > 0).mean())
                self._cache_planner.is_dropped = lambda: store.dropped is not None
        if self._cache is None:
            return
        self._say_who_is_in_evaluation_mode(stage)
        self._enter_level(stage)
        loader.take_from(self._cache)

    def _say_who_is_in_evaluation_mode(self, stage: Stage) -> None:
        if self._said_evaluation_mode or not stage.stores_what_the_user_froze() or not self.is_world_process_zero():
            return
        self._said_evaluation_mode = True
        logger.warning(
            f"What the script froze of the embeddings and the first {stage.layout.cache_level} layers runs in "
            "evaluation mode, without dropout, because its activations are stored. activation_cache='off' keeps it in "
            "training mode, as in Trainer."
        )

    def _opened(self, loader: PipelineLoader, source: SampleSource) -> ActivationCache | None:
        """A store for the samples of a loader, shared by all ranks; None if there is no room. A collective call."""
        rank, store, error = self.topology.rank, None, None
        try:
            store = self._own_store(loader, source) if rank == 0 else None
        except (OSError, ValueError, StoreDamagedError) as found:
            error = str(found)
        path, error = self.topology.broadcast(["" if store is None else str(store.folder), error])
        try:
            if error is None and store is None:
                store = ActivationStore.open(Path(path), rank)
        except (OSError, ValueError, StoreDamagedError) as found:
            error = str(found)
        errors = [answer for answer in self.topology.gather(error) if answer is not None]
        if store is None or errors:
            if store is not None:
                store.close()
            self._write_cache_event("off", reason=errors[0])
            if rank == 0:
                logger.warning(f"The activation cache stays off: {errors[0]}")
            return None
        return ActivationCache(store, source, self.args.device)

    def _own_store(self, loader: PipelineLoader, source: SampleSource) -> ActivationStore:
        """The store that this rank makes for all, or one that an earlier run kept."""
        num_samples, num_writers = len(loader.dataset), self.topology.world_size
        row_format, key = _row_format_of(source, self._stored_dtype()), self._data_key(loader, source)
        folder, store = take_store(
            self._cache_base(),
            key or f"unnamed-{uuid.uuid4().hex}",
            num_samples,
            row_format,
            int(self._max_cache_bytes()),
            num_writers,
            row_length=0 if source.is_text else source.row_length,
        )
        self._cache_folders.append(folder)
        if self.args.activation_cache_keep and key is not None:
            folder.keep()
        return store

    def _data_key(self, loader: PipelineLoader, source: SampleSource) -> str | None:
        """Names the samples, if that is possible: only a store of the same ones may be read again."""
        num_samples, fingerprint = len(loader.dataset), getattr(loader.dataset, "_fingerprint", None)
        if fingerprint is None:
            if self.args.activation_cache_keep:
                logger.warning(
                    f"activation_cache_keep: a {type(loader.dataset).__name__} has no fingerprint that a later run "
                    "could know it by, so the store is not kept. Use a datasets.Dataset."
                )
            return None
        # The fingerprint does not know the collator.
        spread = sorted({i * num_samples // NUM_KEY_SAMPLES for i in range(NUM_KEY_SAMPLES)})
        _, digests = source.digests(source.read(spread))
        # A kept store of rows of another kind stays beside this one. Any text may be a fingerprint.
        row_format = json.dumps(_row_format_of(source, self._stored_dtype()).to_json(), sort_keys=True)
        name = xxhash.xxh3_128_hexdigest(f"{fingerprint}\0{row_format}".encode())
        return f"{name}-{num_samples}-{xxhash.xxh3_64_hexdigest(digests.tobytes())}"

    def _enter_level(self, stage: Stage) -> None:
        assert self._cache is not None
        layout, structure = stage.layout, stage.view.structure
        if not layout.cache_level:
            self._cache.use_weights([""])
            return
        held = {name for name, p in stage.view.model.named_parameters() if not p.is_meta}
        tensors = {**dict(stage.view.model.named_parameters()), **dict(stage.view.model.named_buffers())}
        units_of = {**structure.units_of_parameter, **structure.units_of_buffer}
        frozen = range(layout.entry_unit)
        own = [unit for part in layout.units_of_rank(stage.groups.position) for unit in part if unit in frozen]
        missing = [unit for unit in own if unit not in self._unit_digests]
        found = unit_digests({name: t for name, t in tensors.items() if not t.is_meta}, units_of, missing)
        tree = {str(unit): digest for unit, digest in found.items()}
        group, length = stage.groups.pipeline_control, stage.groups.pipeline_size
        for answer in all_gather_trees(tree, group, length):
            self._unit_digests.update({int(unit): digest for unit, digest in answer.items()})
        self._chain_keys = chain_keys(self._unit_digests, layout.cache_level, self._chain_context())
        self._cache.use_weights(self._chain_keys)
        watched = [
            tensors[name]
            for name, units in structure.units_of_parameter.items()
            if name in held and units[0] in frozen
        ]
        self._watch = PrefixWatch(watched)

    def _chain_context(self) -> str:
        """All that stored activations hang on beside the weights."""
        config, args = self.model.config, self.args
        attention = getattr(config, "_attn_implementation", None)
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        parts = (type(self.model).__name__, attention, precision, transformers.__version__, torch.__version__)
        # Saving a model writes these into its configuration, and the weights' dtype is in their digests.
        settings = {key: value for key, value in config.to_dict().items() if key not in NOT_SETTINGS}
        return " ".join([*map(str, parts), json.dumps(settings, sort_keys=True, default=str)])

    def _current(self, inputs: dict[str, Any], loader: Any) -> dict[str, Any]:
        """A training batch, read again if a callback or a load has changed frozen weights since it was read.

        What was stored for other weights is no hit then. A collective call of a pipeline's stages.
        """
        self._notice_changed_weights(at_once=False)
        _, tags = detach_tags(inputs)
        if self._cache is None or tags is None or tags.stamp == self._cache.stamp:
            return inputs
        renewed: dict[str, Any] = loader.read_again(inputs)
        return renewed

    def _notice_changed_weights(self, at_once: bool = True) -> None:
        """Name the frozen weights anew if they are not what they were. A collective call of a pipeline's stages.

        What was computed with weights that have not been looked at is stored only after this.

        Args:
            at_once: read the device; else what a write past autograd did is noticed a batch later there.
        """
        stage = self._stage
        if self._cache is None or self._watch is None or stage is None or not stage.layout.cache_level:
            return
        changed = self._watch.has_changed(at_once)
        if stage.groups.pipeline_control is not None:
            answers = all_gather_trees(int(changed), stage.groups.pipeline_control, stage.groups.pipeline_size)
            changed = any(answers)
        if changed:
            logger.warning("Weights of frozen layers were changed from outside: their activations are computed anew.")
            self._unit_digests.clear()
            self._enter_level(stage)
        else:
            self._cache.write_pending()

    # ---- evaluation sets ----

    def _serve_evaluation(self, loader: PipelineLoader, dataset: Any) -> None:
        """Let an evaluation in training read and store activations too, if the set is read again and it pays."""
        stage = self._stage
        level = 0 if stage is None or stage.reducer is None else stage.layout.cache_level
        if self._cache is None or not level or not self._may_serve(dataset):
            return
        self._notice_changed_weights()
        if id(dataset) not in self._eval_caches:
            planner = self._cache_planner
            pays = planner is not None and planner.pays_for_evaluation(level, self._evaluations_left())
            if not self.topology.broadcast(pays):
                return
            source = self._source_of(loader)
            # The data set is held, so that its id stays its own.
            self._eval_caches[id(dataset)] = dataset, None if source is None else self._opened(loader, source)
        _, eval_cache = self._eval_caches[id(dataset)]
        if eval_cache is not None:
            eval_cache.use_weights(self._chain_keys)
            loader.take_from(eval_cache)

    def _may_serve(self, dataset: Any) -> bool:
        """Whether it is the run's own evaluation set, and nobody but Trainer looks at the batches.

        User code may call the model with a part of the batch; of a stored sample the main input is no more than a
        placeholder, and what is stored travels beside it.
        """
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        is_plain = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        is_plain &= self.label_smoother is None and type(self).prediction_step is EvaluatingTrainer.prediction_step
        shows_inputs = "inputs" in self.args.include_for_metrics
        outlives = self.args.dataloader_persistent_workers
        return any(own is dataset for own in sets) and is_plain and not shows_inputs and not outlives

    def _evaluations_left(self) -> float:
        """How often the evaluation set will be read, this time included."""
        steps_left = self.state.max_steps - self.state.global_step
        if self.args.eval_strategy == "steps":
            return 1 + steps_left // max(1, int(self.state.eval_steps))
        planner = self._cache_planner
        return 1 if planner is None or self.args.eval_strategy == "no" else 1 + steps_left // planner.steps_per_epoch

    @contextmanager
    def _keeping_for(self, loader: Any) -> Iterator[None]:
        """What the engine computes inside belongs to the data set of `loader`."""
        eval_cache = getattr(loader, "rows", None)
        if not isinstance(eval_cache, ActivationCache):
            yield
            return
        shell = self.run.pipeline.shell
        runner = shell.runner

        def write_now(micro_batch: MicroBatch, hidden: torch.Tensor) -> None:
            eval_cache.write(micro_batch, hidden)
            eval_cache.write_pending()  # Nobody changes weights while a set is evaluated.

        # Also with one stage it is the engine that knows what to do with a stored activation.
        shell.runner = WritingRunner(self.run.pipeline.runner, write_now)
        try:
            yield
        finally:
            shell.runner = runner
            eval_cache.wait_for_writes()

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        with self._keeping_for(dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    # ---- the end ----

    def _report_cache(self) -> None:
        """Once an epoch, what the cache did. A collective call."""
        if self._cache is None:
            return
        if is_apart(self.args.device):
            self._notice_changed_weights()
            # No sample of the next epoch is computed because its row is still on its way.
            self._cache.wait_for_writes()
        counts: list[Mapping[str, float]] = self.topology.gather(self._cache.take_counts())
        totals = {name: sum(count[name] for count in counts) for name in counts[0]}
        self._write_cache_event("epoch", bytes_stored=self._cache.store.bytes_stored, **totals)
        reads = totals["hits"] + totals["misses"]
        if reads:
            self._cache_scalars = {"cache_hit_rate": totals["hits"] / reads}

    def _end_cache(self) -> None:
        """Nothing is left behind, unless it was asked for."""
        for opened in (self._cache, *(eval_cache for _, eval_cache in self._eval_caches.values())):
            if opened is not None:
                opened.close()
        for folder in self._cache_folders:
            if folder.is_kept:
                folder.release()
            else:
                folder.remove()
        self._cache = self._watch = self._cache_planner = self._cache_source = None
        self._cache_folders.clear()
        self._eval_caches.clear()
        self._unit_digests.clear()
