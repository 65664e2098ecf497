"""Evaluation and prediction through the pipeline, with one copy of every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer_utils import EvalLoopOutput

from hf_pipetransformer.comm.topology import check_agreement
from hf_pipetransformer.comm.transfers import all_gather_trees, digest_of
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.data.batches import (
    batch_size,
    for_model,
    has_samples,
    marks_of,
    rows_per_sample,
    sequence_length,
    take_samples,
)
from hf_pipetransformer.data.flattened import sequences_of
from hf_pipetransformer.data.loader import PipelineLoader, Request, request_of
from hf_pipetransformer.data.node_shares import replica_slice
from hf_pipetransformer.data.reading import is_stream
from hf_pipetransformer.data.rng import drawing_alike
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.report import progress_bar
from hf_pipetransformer.runtime.execution import LoaderBatch
from hf_pipetransformer.runtime.generation import join_tokens, settings_of
from hf_pipetransformer.runtime.messages import only_loss
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import main_input_of
from hf_pipetransformer.training.callbacks import running_callbacks
from hf_pipetransformer.training.loaders import check_undivided, with_shared_rng
from hf_pipetransformer.training.metrics import MetricAccumulator, on_first_rank
from hf_pipetransformer.training.replica_gather import ReplicaGather


if TYPE_CHECKING:
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.training.builder import PipelineBuilder
    from hf_pipetransformer.training.context import TrainingContext


class Evaluation:
    """Pass over a data set through the pipeline.

    With `is_for_first_rank`, rank 0 alone keeps predictions, labels and inputs, and computes the metrics.
    """

    def __init__(
        self, context: TrainingContext, pipeline: Pipeline, loader: PipelineLoader, is_for_first_rank: bool = False
    ) -> None:
        self.context = context
        self.trainer = context.trainer
        self.pipeline = pipeline
        self.loader = loader
        self.told_num_items = False
        """True if Trainer asked for the item count of the current batch, to pass it to the loss."""
        self.metrics = MetricAccumulator(context)
        # `Seq2SeqTrainer` takes `gather` in place of `gather_for_metrics`, before each evaluation.
        fills_batches = self.trainer.gather_function == self.trainer.accelerator.gather
        is_flattened = sequences_of(pipeline.start_up.samples) is not None
        self.gather = ReplicaGather(pipeline.stage.groups, loader, is_for_first_rank, fills_batches, is_flattened)
        is_split = pipeline.layout.pipeline_size > 1 and trainer_compat.alone_reads_outputs(self.trainer)
        self.preprocess = self.trainer.preprocess_logits_for_metrics if is_split else None
        """User's `preprocess_logits_for_metrics` where the last stage calls it, for each micro-batch."""
        self._is_sent_to_first = is_split and is_for_first_rank
        is_own_loss = trainer_compat.has_plain_loss(self.trainer)
        is_whole = pipeline.layout.pipeline_size == 1 and pipeline.runner.scope is not LossScope.BATCH
        self._loss = None if is_whole or is_own_loss else self.trainer.compute_loss
        """Loss that is not the model's own, of a model or batch that is split: it may call parts of the model."""
        self._compute_metrics = (
            on_first_rank(self.trainer.compute_metrics, context.topology) if is_for_first_rank else None
        )

    def in_trainers_loop(self) -> AbstractContextManager[None]:
        """Wrap Trainer's loop: what it gathers, preprocesses and computes from it."""
        own: dict[str, Any] = {"gather_function": self.gather}
        if self.preprocess is not None:
            own["preprocess_logits_for_metrics"] = None
        if self._loss is not None:
            own["compute_loss"] = partial(self._loss_inside_stages, self._loss)
        if self._compute_metrics is not None:
            own["compute_metrics"] = self._compute_metrics
        return trainer_compat.with_attributes(self.trainer, own)

    @contextmanager
    def running(
        self, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> Iterator[dict[str, Any]]:
        """Wrap a batch; the last stage keeps and sends the others only what somebody can read.

        Yields the batch for the model, with what a frozen reference says of it.
        """
        trainer, shell, batch = self.trainer, self.pipeline.shell, for_model(inputs)
        marks = send_to_device(marks_of(inputs), trainer.args.device)
        if trl_compat.reference(trainer, shell) is not None:
            batch |= self.reference_of(batch, marks)
        self.told_num_items = False
        self.metrics.begin_batch(inputs)
        num_tokens = sequence_length(inputs, main_input_of(trainer.model))
        self.gather.begin_batch(batch_size(inputs), rows_per_sample(inputs), num_tokens)
        # Every replica has all of a smaller batch.
        is_cut = self.loader.progress.size >= self.pipeline.layout.num_replicas
        prediction = replace(
            shell.prediction,
            marks=marks,
            reduce=self._reduction(inputs, loss_only, ignore_keys),
            is_read_by_first=self._is_sent_to_first,
        )
        with ExitStack() as stack:
            stack.enter_context(self.metrics.record_part({**batch, **marks}))
            stack.enter_context(self.pipeline.evaluating(is_cut, prediction))
            stack.enter_context(trl_compat.reading_reference(trainer, batch))
            yield trainer_compat.sent(trainer, batch)

    def _reduction(self, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None) -> Any:
        """Return what the last stage makes of an output; None to send all of it."""
        trainer = self.trainer
        has_loss = all(inputs.get(name) is not None for name in trainer.label_names)
        if loss_only and has_loss and trainer_compat.has_plain_loss(trainer):
            return only_loss
        if self.preprocess is not None:
            return partial(trainer_compat.preprocessed, trainer, self.preprocess, ignore_keys)
        return None

    def _loss_inside_stages(
        self,
        own: Callable[..., Any],
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute the loss of a batch as in training: by its parts, or once on each rank with the model on stages."""
        shell, runner = self.pipeline.shell, self.pipeline.runner
        is_whole = self.pipeline.layout.pipeline_size == 1 and not shell.prediction.joins_replicas
        if model is not shell or is_whole or runner.present is not None or torch.is_grad_enabled():
            return own(model, inputs, return_outputs, *args, **kwargs)

        def forward(given: dict[str, Any]) -> Any:
            with self.context.gains.watching():
                return own(shell, given, True, *args, **kwargs)

        if runner.scope is LossScope.PARTS:
            loss, outputs = runner.predict(inputs, forward, shell.prediction)
        else:
            # Trainer has prepared the batch already; what other replicas send is on the host.
            prepare = partial(send_to_device, device=self.trainer.args.device)
            batch = LoaderBatch(inputs, forward, 0, prepare, shared=self.pipeline.shared_rng)
            loss, outputs = runner.predict_whole(batch, shell.prediction)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def reference_of(self, batch: dict[str, Any], marks: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what a frozen reference says of a batch, of which `marks_of` has noted `marks`.

        Collective: call on every rank of the pipeline.
        """
        prepared, shell = trainer_compat.preparation(self.trainer)(batch), self.pipeline.shell
        found: dict[str, torch.Tensor] = self.pipeline.runner.predict(
            prepared,
            partial(trl_compat.reference_entries, self.trainer, shell),
            replace(shell.prediction, marks=marks),
        )
        return found

    def gathered_reference(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what a frozen reference says of a global batch. Collective: call on every rank."""
        found = self.reference_of(for_model(inputs), marks_of(inputs))
        return {name: self.gather(value).cpu() for name, value in found.items()}

    def items_of_loss(self, num_items: int) -> int:
        """Return the items of the samples that the loss sees, of which this replica has `num_items`. Collective."""
        return self.gather.num_items_of_all(num_items) if self.pipeline.shell.prediction.joins_replicas else num_items

    def global_loss(self, loss: torch.Tensor | None, num_items: int, num_samples: int) -> torch.Tensor | None:
        """Return the global batch's loss, repeated per sample of this replica, from the replica's mean loss."""
        return None if loss is None else self.gather.mean(loss, num_items).expand(num_samples)

    def completed(self, output: EvalLoopOutput, metric_key_prefix: str) -> EvalLoopOutput:
        """Correct Trainer's output for a stream: it covers this replica only. Collective: call on every rank."""
        self.metrics.publish("eval", self.pipeline.stage.groups)
        if not self.loader.is_stream:
            return output
        metrics = dict(output.metrics or {})
        if self.gather.losses:
            metrics[f"{metric_key_prefix}_loss"] = self._loss_of_stream(self.loader)
        return output._replace(num_samples=self.loader.progress.num_seen, metrics=metrics)

    def _loss_of_stream(self, loader: PipelineLoader) -> float:
        """Average the batches' losses as Trainer does in one process.

        Trainer does not know the length of a stream, so each batch but the last counts as a full one.
        """
        # In float64, so that the mean of many batches has no rounding of its own.
        losses = torch.cat(self.gather.losses).double().cpu()
        weights = torch.full_like(losses, loader.total_batch_size)
        weights[-1] = sum(loader.samples_of_replicas())
        is_counted = losses.isfinite()
        if not self.trainer.args.logging_nan_inf_filter or not is_counted.any():
            is_counted[:] = True
        return float((losses * weights)[is_counted].sum() / weights[is_counted].sum())


class UsersEvaluation:
    """Pass over a user's own loader with the whole model on each rank, with the same meaning as for plain Trainer."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.told_num_items = False

    def running(
        self, inputs: dict[str, Any], _loss_only: bool, _ignore_keys: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext(inputs)

    def global_loss(self, loss: torch.Tensor | None, _num_items: int, _num_samples: int) -> torch.Tensor | None:
        return loss

    def completed(self, output: EvalLoopOutput, _metric_key_prefix: str) -> EvalLoopOutput:
        return output


@contextmanager
def _installed(pipeline: Pipeline) -> Iterator[None]:
    """Install the stage for evaluation or prediction, unless a training has done so."""
    stage = pipeline.stage
    if stage.view.is_installed:
        yield
        return
    if stage.groups.pipeline_size == 1:
        stage.store.move(stage.own_names(), pipeline.settings.device)
    with stage.store.lent_to(pipeline.settings.device, stage.own_names()), stage.active():
        yield


class Evaluations:
    """Calls of `evaluate()` and `predict()`, which may start a pipeline and may come inside a training."""

    def __init__(self, builder: PipelineBuilder) -> None:
        self.builder = builder
        self._present: Evaluation | UsersEvaluation | None = None
        self._is_metrics_only = False
        """True if nobody reads more than the metrics of the next loop."""

    @property
    def present(self) -> Evaluation | UsersEvaluation:
        """Current pass over an evaluation data set."""
        if self._present is None:
            raise RuntimeError("There is no evaluation: evaluate() and predict() alone call this.")
        return self._present

    @contextmanager
    def call(self, dataset: Any, method: str, is_metrics_only: bool = False) -> Iterator[None]:
        """Wrap an evaluation of `dataset`: a data set, its name in `eval_dataset`, or a dict of several.

        Args:
            method: name of the trainer's method that makes the loader. If the user overrides it (possible with one
                stage only) or overrides `evaluate`, the data set is not known yet, and the start waits for the loader.
            is_metrics_only: True if predictions are dropped once the metrics are computed.
        """
        trainer = self.builder.context.trainer
        makes_loader = self.builder.num_stages == 1 and trainer_compat.is_overridden(trainer, method)
        awaits_loader = makes_loader or trainer_compat.is_overridden(trainer, "evaluate")
        # Calls nest: a callback or `compute_metrics` may evaluate or predict inside of an evaluation.
        outer, self._is_metrics_only = self._is_metrics_only, is_metrics_only
        try:
            with self._up(None if awaits_loader else self._request(dataset)):
                yield
        finally:
            self._is_metrics_only = outer

    def generate(self, inputs: Any, options: dict[str, Any]) -> Any:
        """See `PipeTransformerMixin.generate`."""
        context, left = self.builder.context, self.builder.is_left_to_trainer
        topology, model, device = context.topology, context.trainer.model, context.args.device
        given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        # A mask may be a keyword argument: what has a row for each prompt is cut with them.
        size, tensors = (
            batch_size(given),
            {n: value for n, value in options.items() if isinstance(value, torch.Tensor)},
        )
        given |= {name: value for name, value in tensors.items() if value.dim() > 1 and has_samples(value, size)}
        options = {name: value for name, value in options.items() if name not in given}
        # Replicas share the rows and stages pass them on: unequal inputs would give mixed answers without an error.
        digests = {name: digest_of(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
        check_agreement(topology, "inputs of generate()", digests)
        settings = settings_of(bare_model(model), {**given, **options})
        with nullcontext(False) if left else self._up(given) as is_up:
            model.eval()
            given = send_to_device(given, device)
            groups = self.builder.pipeline.stage.groups if is_up else None
            # One process draws random numbers for all rows in turn, and returns one list of scores.
            is_undivided = settings.do_sample or settings.return_dict_in_generate
            if groups is None or groups.num_replicas == 1 or is_undivided:
                with drawing_alike(topology.broadcast, device) if settings.do_sample else nullcontext():
                    return model.generate(**given, **options)
            own = replica_slice(batch_size(given), groups.replica, groups.num_replicas)
            # A replica without rows comes to the gather all the same, for which the others wait.
            tokens = torch.empty(0, 0, dtype=torch.long)
            if own.stop > own.start:
                tokens = model.generate(**take_samples(given, own), **options)
            parts = all_gather_trees(tokens, groups.replica_control, groups.num_replicas)
        return join_tokens(parts, settings).to(device)

    def _take_first_rank_only(self) -> bool:
        """Decide where the next loop's metrics are computed; the one after it, in a callback say, is for all ranks."""
        context, (is_wanted, self._is_metrics_only) = self.builder.context, (self._is_metrics_only, False)
        return (
            is_wanted
            and context.topology.world_size > 1
            and context.args.pipeline_compute_metrics == "first_rank"
            and context.trainer.compute_metrics is not None
            # A loop of the user's may read predictions on every rank.
            and not trainer_compat.is_overridden(context.trainer, "evaluation_loop")
        )

    def _request(self, dataset: Any) -> Request:
        """Return the request that Trainer will make; for a dict of data sets, the one for the first."""
        trainer = self.builder.context.trainer
        dataset = trainer.eval_dataset if dataset is None else dataset
        dataset = trainer.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        return Request(first, "Evaluation", trainer.args.eval_batch_size, trainer_compat.eval_sampler(trainer))

    @contextmanager
    def _up(self, request: Any) -> Iterator[bool]:
        """Wrap an evaluation; yields False without a pipeline, which can start only for a known request.

        `request` is what `PipelineBuilder.inspect` takes, or None.
        """
        builder = self.builder
        with builder.context.timeouts.reporting_faults():
            if not builder.is_started(request):
                yield False
                return
            # Stages of an asynchronous training may be some steps apart, and an evaluation needs the weights of one.
            builder.pipeline.settle()
            with running_callbacks(builder.context.trainer, builder.pipeline), _installed(builder.pipeline):
                yield True

    def reference_of(self, dataset: Any, samples_per_rank: int) -> Any:
        """Return a data set with what a frozen reference says of its samples; None without a pipeline.

        Collective: call on every rank. The reference is the model as it is now, without its adapters.
        """
        builder, trainer = self.builder, self.builder.context.trainer
        if is_stream(dataset):
            return None
        # All samples: each needs a value in the columns that are added.
        request = Request(dataset, "Reference", samples_per_rank, reads_all=True)
        was_training = trainer.model.training
        with self._up(request) as is_up:
            if not is_up:
                return None
            evaluation = Evaluation(builder.context, builder.pipeline, builder.loader(request))
            is_shown = builder.context.topology.rank == 0 and not trainer.args.disable_tqdm
            entries = []
            trainer.model.eval()
            try:
                with progress_bar("Computing what the reference says", len(evaluation.loader), is_shown) as bar:
                    for batch in evaluation.loader:
                        entries.append(evaluation.gathered_reference(batch))
                        bar.update(1)
            finally:
                trainer.model.train(was_training)
        return trl_compat.with_columns(dataset, entries)

    @contextmanager
    def loop(self, given: Any) -> Iterator[Evaluation | UsersEvaluation]:
        """Wrap Trainer's evaluation loop; the yielded evaluation names the loader, the pipeline's or the user's."""
        builder, request = self.builder, request_of(given)
        cache = builder.cache
        is_users = request is None and not isinstance(given, PipelineLoader)
        if is_users:
            check_undivided(given, "get_eval_dataloader or get_test_dataloader", builder.num_stages)
        outer, left = self._present, builder.is_left_to_trainer
        is_for_first_rank = self._take_first_rank_only()
        try:
            # Entered here as well: a user's own `evaluate` may call the loop directly.
            with self._up(request) as is_up:
                if is_users or not is_up:
                    shared = builder.pipeline.shared_rng if is_up else None
                    self._present = UsersEvaluation(with_shared_rng(given, shared))
                    builder.is_left_to_trainer = left or not is_up
                    yield self._present
                    return
                loader = given if request is None else builder.loader(request)
                self._present = evaluation = Evaluation(builder.context, builder.pipeline, loader, is_for_first_rank)
                storing = nullcontext() if cache is None else cache.storing_for(loader)
                with evaluation.in_trainers_loop(), storing:
                    yield evaluation
        finally:
            self._present = outer
            if is_users:
                builder.is_left_to_trainer = left
