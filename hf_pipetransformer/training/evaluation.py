"""Pass over a data set through the pipeline: its batches, its losses, and what is gathered over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_pipetransformer.comm.transfers import all_gather_trees, gather_rows, reduced
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.data.batches import SampleBatch, sequence_length
from hf_pipetransformer.data.flattened import num_left_out
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.runtime.execution import LoaderBatch
from hf_pipetransformer.runtime.messages import only_loss, without_rows
from hf_pipetransformer.splitters.base import main_input_of
from hf_pipetransformer.training.metrics import MetricAccumulator, loss_apart, on_first_rank


if TYPE_CHECKING:
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.runtime.execution import Prediction
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.training.context import TrainingContext


REMEDY = (
    "Name the output in ignore_keys_for_eval of train() or ignore_keys of evaluate() and predict(), let "
    "preprocess_logits_for_metrics return one row a sample, or evaluate on one replica "
    "(pipeline_parallel_size as large as the number of processes, and elastic=False)."
)


class Evaluation:
    """Pass over a data set through the pipeline, with one copy of every sample under any layout.

    Predictions, labels and inputs are gathered over the replicas; the loss of a global batch is the mean over them.

    With `is_for_first_rank`, rank 0 alone keeps what is gathered but the losses, and computes the metrics; other ranks
    get tensors of no samples.
    """

    def __init__(
        self, context: TrainingContext, pipeline: Pipeline, loader: PipelineLoader, is_for_first_rank: bool = False
    ) -> None:
        self.context = context
        self.trainer = context.trainer
        self.pipeline = pipeline
        self.groups = pipeline.stage.groups
        self.loader = loader
        self.is_for_first_rank = is_for_first_rank
        self._told_num_items = False
        """True if Trainer asked for the item count of the current batch, to pass it to the loss."""
        self.metrics = MetricAccumulator(context)
        self.fills_batches = self.trainer.gather_function == self.trainer.accelerator.gather
        """True if the last batch's loss counts as that of a full one, as with `Seq2SeqTrainer`, which takes `gather`
        in place of `gather_for_metrics` before each evaluation."""
        self.is_flattened = pipeline.start_up.samples.sequences is not None
        """True if the rows `(1, tokens, ...)` of the replicas are joined to the row that one process has."""
        is_split = pipeline.layout.pipeline_size > 1 and trainer_compat.alone_reads_outputs(self.trainer)
        self.preprocess = self.trainer.preprocess_logits_for_metrics if is_split else None
        """User's `preprocess_logits_for_metrics` where the last stage calls it, for each micro-batch."""
        self._is_sent_to_first = is_split and is_for_first_rank
        is_own_loss = trainer_compat.has_plain_loss(self.trainer)
        is_whole = pipeline.layout.pipeline_size == 1 and pipeline.runner.scope is not LossScope.BATCH
        self._loss = None if is_whole or is_own_loss else self.trainer.compute_loss
        """Loss that is not the model's own, of a model or batch that is split: it may call parts of the model."""
        self._batch = SampleBatch()
        """Batch of this replica as it was read: a method of the script's may have made a dict of its own of it."""
        self._token_counts: list[int] | None = None
        """Tokens of the replicas' rows in the current batch, once they were counted."""
        self._losses: list[torch.Tensor] = []
        """Loss of each global batch so far, `(1,)` each."""
        self._is_loss_next = False

    def in_trainers_loop(self) -> AbstractContextManager[None]:
        """Wrap Trainer's loop: what it gathers, preprocesses and computes from it."""
        own: dict[str, Any] = {"gather_function": self.gather}
        # Trainer's own counts the items of all ranks, stages included.
        if not trainer_compat.is_overridden(self.trainer, "_get_num_items_in_batch"):
            own["_get_num_items_in_batch"] = self._num_items_told
        # Around a method of the script's, too, wherever it stands in the MRO.
        own["prediction_step"] = partial(self._predicted, own_step(self.trainer))
        if self.preprocess is not None:
            own["preprocess_logits_for_metrics"] = None
        if self._loss is not None:
            own["compute_loss"] = partial(self._loss_inside_stages, self._loss)
        if self.is_for_first_rank:
            own["compute_metrics"] = on_first_rank(self.trainer.compute_metrics, self.context.topology)
        return trainer_compat.with_attributes(self.trainer, own)

    def _predicted(
        self,
        own: Callable[..., Any],
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Run one batch; gives the global batch's loss, repeated for each of this replica's samples."""
        kind = trainer_compat.kind_with(self.trainer, "prediction_step")
        generates = kind is Seq2SeqTrainer and trainer_compat.generates(self.trainer)
        reads_loss_only = kind in (Trainer, Seq2SeqTrainer) and (prediction_loss_only or generates)
        with self._running(inputs, reads_loss_only, ignore_keys) as batch:
            loss, logits, labels = own(model, batch, prediction_loss_only, ignore_keys=ignore_keys, **options)
        return self._global_loss(loss), logits, labels

    @contextmanager
    def _running(
        self, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> Iterator[dict[str, Any]]:
        """Wrap a batch; the last stage keeps and sends the others only what somebody can read.

        Yields the batch for the model, with what a frozen reference says of it.
        """
        trainer, shell, batch = self.trainer, self.pipeline.shell, self.loader.present.like(inputs)
        if trl_compat.reference(trainer, shell) is not None:
            batch = batch | self.reference_of(batch)
        self._told_num_items = False
        self.metrics.begin_batch(batch)
        self._batch, self._token_counts = self.loader.present.like(inputs), None
        # Every replica has all of a smaller batch.
        is_cut = self.loader.size >= self.pipeline.layout.num_replicas
        prediction = replace(
            self._prediction_of(batch),
            reduce=self._reduction(inputs, loss_only, ignore_keys),
            is_read_by_first=self._is_sent_to_first,
        )
        with ExitStack() as stack:
            stack.enter_context(self.metrics.record_part(batch))
            stack.enter_context(self.pipeline.evaluating(is_cut, prediction))
            stack.enter_context(trl_compat.reading_reference(trainer, batch))
            yield trainer_compat.sent(trainer, batch)

    def _prediction_of(self, batch: SampleBatch) -> Prediction:
        """Return how the shell predicts, with how the samples lie in a batch, whose entries Trainer prepares."""
        # What pieces have for themselves is moved here.
        samples = batch.like({}).changed(partial(trainer_compat.sent, self.trainer))
        return replace(self.pipeline.shell.prediction, samples=samples)

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
            batch = LoaderBatch(SampleBatch(inputs), forward, 0, prepare, shared=self.pipeline.shared_rng)
            loss, outputs = runner.predict_whole(batch, shell.prediction)
        # The metrics may read it.
        self.context.gains.share(self.groups)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def reference_of(self, batch: SampleBatch) -> dict[str, torch.Tensor]:
        """Return what a frozen reference says of a batch. Collective: call on every rank of the pipeline."""
        prepared, shell = trainer_compat.preparation(self.trainer)(batch), self.pipeline.shell
        found: dict[str, torch.Tensor] = self.pipeline.runner.predict(
            prepared,
            partial(trl_compat.reference_entries, self.trainer, shell),
            self._prediction_of(batch),
        )
        return found

    def gathered_reference(self, batch: SampleBatch) -> dict[str, torch.Tensor]:
        """Return what a frozen reference says of a global batch. Collective: call on every rank."""
        return {name: self.gather(value).cpu() for name, value in self.reference_of(batch).items()}

    def _num_items_told(self, batches: list[Any], device: torch.device) -> torch.Tensor | None:
        """Return the items of the samples that the loss sees, for Trainer to pass them. Collective."""
        # Whether the loss is divided by all items or is its own mean decides how replicas average it.
        self._told_num_items = True
        if not any("labels" in batch for batch in batches) or not trainer_compat.takes_num_items(self.trainer):
            return None
        count = sum(trainer_compat.items_of(self.trainer, batch) for batch in batches)
        if self.pipeline.shell.prediction.joins_replicas:
            what = f"adding the items of an evaluation over {self.groups.replicas}"
            count = int(reduced(torch.tensor(count), self.groups.replica_control, what))
        return torch.tensor(float(count), device=device)

    def _global_loss(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Return the global batch's loss, repeated per sample of this replica, from the replica's mean loss."""
        if loss is None:
            return None
        count = trainer_compat.items_of if self._told_num_items else trainer_compat.items_of_own_mean
        found, num_items = loss.detach(), count(self.trainer, self._batch)
        if self.groups.replica_control is not None:
            # A replica without items has the loss nan (0 / 0), which would spread to all by the sum.
            # In float64, or each number of replicas would round in its own way.
            share = loss.double().cpu() * num_items if num_items else torch.zeros((), dtype=torch.float64)
            sums = torch.stack([share, torch.tensor(float(num_items), dtype=torch.float64)])
            what = f"adding the losses of an evaluation over {self.groups.replicas}"
            reduced(sums, self.groups.replica_control, what)
            found = (sums[0] / sums[1]).to(loss.dtype).to(loss.device)
        self._losses.append(found.reshape(1))
        self._is_loss_next = True
        return self._losses[-1].expand(self._batch.size)

    def completed(self, output: EvalLoopOutput, metric_key_prefix: str) -> EvalLoopOutput:
        """Correct Trainer's output for a stream: it covers this replica only. Collective: call on every rank."""
        self.metrics.publish("eval", self.groups)
        if not self.loader.is_stream:
            return output
        metrics = dict(output.metrics or {})
        if self._losses:
            metrics[f"{metric_key_prefix}_loss"] = self._loss_of_stream()
        return output._replace(num_samples=self.loader.num_seen, metrics=metrics)

    def _loss_of_stream(self) -> float:
        """Average the batches' losses as Trainer does in one process.

        Trainer does not know the length of a stream, so each batch but the last counts as a full one.
        """
        # In float64, so that the mean of many batches has no rounding of its own.
        losses = torch.cat(self._losses).double().cpu()
        weights = torch.full_like(losses, self.loader.total_batch_size)
        weights[-1] = sum(self.loader.samples_of_replicas())
        is_counted = losses.isfinite()
        if not self.trainer.args.logging_nan_inf_filter or not is_counted.any():
            is_counted[:] = True
        return float((losses * weights)[is_counted].sum() / weights[is_counted].sum())

    # ---- over the replicas ----

    def gather(self, values: Any) -> Any:
        """Gather tensors of shape `(own samples, ...)` to `(samples of the global batch, ...)`, or of their rows."""
        # Trainer gathers a batch's loss first, whose mean every rank computes for itself.
        is_loss, self._is_loss_next = self._is_loss_next, False
        if is_loss and self.fills_batches:
            return self._losses[-1].expand(self.loader.total_batch_size)
        if self.groups.num_replicas == 1 and self._batch.rows == 1 and not is_loss:
            return self._as_one_process(values)
        # The loss goes to all: on each rank Trainer compares it, to find the best model or to stop early.
        gather = partial(self._gather, is_for_first=self.is_for_first_rank and not is_loss)

        def gather_blocks(tensor: torch.Tensor) -> torch.Tensor:
            size, rows = self._batch.size, self._batch.rows
            is_of_rows = not is_loss and rows > 1 and len(tensor) == size * rows
            if is_of_rows:
                return torch.cat([gather(block) for block in tensor.split(size)])
            if not is_loss and self.groups.num_replicas > 1:
                self._check_rows(tensor)
            return gather(tensor)

        return recursively_apply(gather_blocks, values)

    def _as_one_process(self, values: Any) -> Any:
        """Return what accelerate's gather returns on one process, where values need not have one row a sample."""
        loader = self.loader
        if self.is_for_first_rank and not self.groups.is_first:
            return recursively_apply(without_rows, values)
        if self.fills_batches or not loader.end_of_dataloader or loader.remainder <= 0:
            return values
        try:
            return recursively_apply(lambda tensor: tensor[: loader.remainder], values)
        except IndexError:  # With a scalar among them accelerate cuts none.
            return values

    def _gather(self, tensor: torch.Tensor, is_for_first: bool) -> torch.Tensor:
        if is_for_first and not self.groups.is_first:
            return without_rows(tensor)
        if not self.is_flattened or tensor.dim() < 2 or self.groups.replica_control is None:
            return self._gather_rows(tensor, self.loader.samples_of_replicas(), is_for_first)
        # A row `(1, tokens, ...)`, which Trainer has padded to the replica with most tokens. Counted once a batch: all
        # of its outputs have the same tokens.
        num_tokens = sequence_length(self._batch, main_input_of(self.trainer.model))
        if self._token_counts is None:
            counts = all_gather_trees(num_tokens, self.groups.replica_control, self.groups.num_replicas)
            self._token_counts = counts
        # Outputs of one value less are zero between the replicas, see `Axis.joined`.
        missing = num_left_out([tensor.shape], [max(self._token_counts)])
        # A batch smaller than the number of replicas is whole on each.
        samples = self.loader.samples_of_replicas()
        told = [each if size else 0 for each, size in zip(self._token_counts, samples, strict=True)]
        found = self._gather_rows(tensor[0, : num_tokens - missing], told, is_for_first)
        return found[None, : sum(told) - missing]

    def _check_rows(self, tensor: torch.Tensor) -> None:
        """Check that a tensor has a row for each sample of this replica, as nobody knows how to join others."""
        # A replica without samples of its own runs the whole batch, as a batch smaller than the replicas does.
        own = self.loader.samples_of_replicas()[self.groups.replica] or self.loader.size
        is_elsewhere = self.is_for_first_rank and not self.groups.is_first
        is_one_row = self.is_flattened and tensor.dim() > 1
        if is_elsewhere or is_one_row or has_rows(tensor, own):
            return
        raise ValueError(
            f"An evaluation batch of {own} samples on each of {self.groups.num_replicas} replicas gave a prediction "
            f"or label of shape {tuple(tensor.shape)}: expected one row a sample, as each replica has samples of its "
            f"own. {REMEDY}"
        )

    def _gather_rows(self, tensor: torch.Tensor, counts: list[int], is_for_first: bool) -> torch.Tensor:
        groups, first = self.groups, self.groups.replica_ranks[0]
        if groups.replica_group is None:
            return tensor[: counts[0]]
        where = f"of {groups.replicas} on rank {first}" if is_for_first else f"over {groups.replicas}"
        what = f"gathering predictions {where}"
        parts = gather_rows(tensor, counts, groups.replica_group, what, first if is_for_first else None)
        return torch.cat(parts) if parts else without_rows(tensor)


def own_step(trainer: Trainer) -> Any:
    """Return a trainer's `prediction_step`, also where an evaluation around this one has put its own in its place."""
    step: Any = trainer.prediction_step
    is_inside = isinstance(step, partial) and isinstance(getattr(step.func, "__self__", None), Evaluation)
    return step.args[0] if is_inside else step


class UsersEvaluation:
    """Pass over a user's own loader with the whole model on each rank, with the same meaning as for plain Trainer."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def completed(self, output: EvalLoopOutput, _metric_key_prefix: str) -> EvalLoopOutput:
        return output


def has_rows(tensor: torch.Tensor, num_samples: int) -> bool:
    """Return True if a tensor has a row for each sample."""
    return tensor.dim() > 0 and len(tensor) == num_samples


def shape_without_rows(trainer: Trainer, model: Any, ignored: list[str] | None, batch: SampleBatch) -> str | None:
    """Return the shape of the first tensor that evaluations of a training gather and that has no row for each sample.

    None if there is none, or if it takes an evaluation to know: it reads the loss alone, generates, or runs code of
    the script's on the outputs.
    """
    if trainer.compute_metrics is None or trainer.args.eval_strategy == "no" or trainer_compat.generates(trainer):
        return None
    is_known = not trainer_compat.is_overridden(trainer, "prediction_step")
    # In the evaluation itself, the first batch is looked at.
    is_known &= trainer_compat.has_known_loss(trainer) or trainer_compat.has_plain_loss(trainer)
    is_known &= trainer.preprocess_logits_for_metrics is None
    if not is_known or trainer.args.prediction_loss_only or batch.sequences is not None:
        return None
    found: list[str] = []
    # Of TRL's pairs, an output has a row for each pair or for each of its texts.
    sizes = {batch.size, batch.size * batch.rows}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if not any(has_rows(tensor, each) for each in sizes):
            found.append(str(tuple(tensor.shape)))
        return tensor

    # What raises here raises in the evaluation, with its own cause.
    with loss_apart(trainer), suppress(Exception), torch.no_grad():
        # Copies, as a model may change its inputs in place.
        _, outputs = trainer.compute_loss(model, dict(batch.mapped(torch.Tensor.clone)), return_outputs=True)
        read = trainer_compat.preprocessed(trainer, lambda logits, _labels: logits, ignored, outputs, batch)
        recursively_apply(look, read["preprocessed"])
    return found[0] if found else None
