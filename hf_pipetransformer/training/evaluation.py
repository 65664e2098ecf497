"""Evaluation and prediction through the pipeline, with one copy of every sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from transformers.trainer_utils import EvalLoopOutput

from hf_pipetransformer import trainer_compat, trl_compat
from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.data.batches import batch_size, for_model, rows_per_sample
from hf_pipetransformer.data.loader import PipelineLoader, Request, request_of
from hf_pipetransformer.data.reading import is_stream
from hf_pipetransformer.report import progress_bar
from hf_pipetransformer.runtime.context import Context
from hf_pipetransformer.runtime.execution import only_loss, without_rows
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.training.callbacks import giving_whole_model
from hf_pipetransformer.training.loaders import check_undivided, with_shared_rng
from hf_pipetransformer.training.metrics import MetricAccumulator, on_first_rank
from hf_pipetransformer.training.starting import Starter


class Evaluation:
    """Pass over a data set through the pipeline.

    With `is_for_first_rank`, rank 0 alone keeps predictions, labels and inputs, and computes the metrics.
    """

    is_users = False

    def __init__(
        self, context: Context, pipeline: Pipeline, loader: PipelineLoader, is_for_first_rank: bool = False
    ) -> None:
        self.trainer = context.trainer
        self.pipeline = pipeline
        self.loader = loader
        self.told_num_items = False
        """True if Trainer asked for the item count of the current batch, to pass it to the loss."""
        self.metrics = MetricAccumulator(context)
        self.gather = ReplicaGather(pipeline.stage.groups, loader, is_for_first_rank)
        is_split = pipeline.layout.pipeline_size > 1 and trainer_compat.alone_reads_outputs(self.trainer)
        self.preprocess = self.trainer.preprocess_logits_for_metrics if is_split else None
        """User's `preprocess_logits_for_metrics` where the last stage calls it, for each micro-batch."""
        self._is_sent_to_first = is_split and is_for_first_rank
        self._compute_metrics = (
            on_first_rank(self.trainer.compute_metrics, context.topology) if is_for_first_rank else None
        )

    @contextmanager
    def in_trainers_loop(self) -> Iterator[None]:
        """Wrap Trainer's loop: what it gathers, preprocesses and computes from it."""
        trainer = self.trainer
        with ExitStack() as stack:
            stack.enter_context(trainer_compat.gathering_with(trainer, self.gather))
            if self.preprocess is not None:
                stack.enter_context(trainer_compat.without_preprocessing(trainer))
            if self._compute_metrics is not None:
                stack.enter_context(trainer_compat.computing_metrics_with(trainer, self._compute_metrics))
            yield

    @contextmanager
    def running(
        self, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> Iterator[dict[str, Any]]:
        """Wrap a batch; the last stage keeps and sends the others only what somebody can read.

        Yields the batch for the model, with what a frozen reference says of it.
        """
        trainer, runner = self.trainer, self.pipeline.runner
        runner.rows_per_sample = rows_per_sample(inputs)
        self.gather.own_shape = batch_size(inputs), runner.rows_per_sample
        reference = trl_compat.reference(trainer, self.pipeline.shell)
        batch = for_model(inputs)
        if reference is not None:
            batch |= self.reference_of(batch)
        has_loss = all(inputs.get(name) is not None for name in trainer.label_names)
        if loss_only and has_loss and trainer_compat.has_plain_loss(trainer):
            runner.reduce = only_loss
        elif self.preprocess is not None:
            runner.reduce = partial(trainer_compat.preprocessed, trainer, self.preprocess, ignore_keys)
        runner.is_read_by_first = self._is_sent_to_first
        self.told_num_items = False
        self.metrics.begin_batch(inputs)
        try:
            with self.metrics.record_part(batch):
                yield batch
        finally:
            runner.reduce, runner.is_read_by_first, runner.rows_per_sample = None, False, 1

    @torch.no_grad()
    def reference_of(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what a frozen reference says of a batch. Collective: call on every rank of the pipeline."""
        prepared = trainer_compat.preparation(self.trainer)(batch)
        found: dict[str, torch.Tensor] = self.pipeline.runner.predict(
            prepared, partial(trl_compat.reference_entries, self.trainer, self.pipeline.shell)
        )
        return found

    def gathered_reference(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what a frozen reference says of a global batch. Collective: call on every rank."""
        self.pipeline.runner.rows_per_sample = rows_per_sample(inputs)
        try:
            return {name: self.gather(value).cpu() for name, value in self.reference_of(for_model(inputs)).items()}
        finally:
            self.pipeline.runner.rows_per_sample = 1

    def global_loss(self, loss: torch.Tensor | None, num_items: int, num_samples: int) -> torch.Tensor | None:
        """Return the global batch's loss, repeated per sample of this replica, from the replica's mean loss."""
        return None if loss is None else self.gather.mean(loss, num_items).expand(num_samples)

    def completed(self, output: EvalLoopOutput, metric_key_prefix: str) -> EvalLoopOutput:
        """Correct Trainer's output for a stream: it covers this replica only. Collective: call on every rank."""
        self.metrics.publish("eval")
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
        losses = torch.cat(self.gather.losses).double().cpu()
        weights = torch.full_like(losses, loader.total_batch_size)
        weights[-1] = sum(loader.samples_of_replicas())
        is_counted = losses.isfinite()
        if not self.trainer.args.logging_nan_inf_filter or not is_counted.any():
            is_counted[:] = True
        return float((losses * weights)[is_counted].sum() / weights[is_counted].sum())


class UsersEvaluation:
    """Pass over a user's own loader with the whole model on each rank, with the same meaning as for plain Trainer."""

    is_users = True

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


class ReplicaGather:
    """Replacement for `accelerator.gather_for_metrics` that returns one copy of every sample under any layout.

    `loader` knows how many samples each replica has in the current batch. With `is_for_first_rank`, all but the losses
    goes to rank 0 alone; other ranks get tensors of no samples.
    """

    def __init__(self, groups: PipelineGroups, loader: PipelineLoader, is_for_first_rank: bool = False) -> None:
        self.groups = groups
        self.loader = loader
        self.is_for_first_rank = is_for_first_rank
        self.own_shape = 0, 1
        """Samples of this replica in the current batch, and rows of a sample, see `batches`."""
        self.losses: list[torch.Tensor] = []
        """Loss of each global batch so far, `(1,)` each."""
        self._is_loss_next = False

    def __call__(self, values: Any) -> Any:
        """Gather tensors of shape `(own samples, ...)` to `(samples of the global batch, ...)`, or of their rows."""
        # Trainer gathers a batch's loss first, whose mean every rank computes for itself.
        is_loss, self._is_loss_next = self._is_loss_next, False
        gather = self._gather_to_first if self.is_for_first_rank and not is_loss else self._gather

        def gather_blocks(tensor: torch.Tensor) -> torch.Tensor:
            size, rows = self.own_shape
            is_of_rows = not is_loss and rows > 1 and len(tensor) == size * rows
            return torch.cat([gather(block) for block in tensor.split(size)]) if is_of_rows else gather(tensor)

        return recursively_apply(gather_blocks, values)

    def mean(self, loss: torch.Tensor, num_items: int) -> torch.Tensor:
        """Compute the global batch's loss, `(1,)`, from this replica's mean loss over `num_items`."""
        self.losses.append(self._mean(loss, num_items))
        self._is_loss_next = True
        return self.losses[-1]

    def _mean(self, loss: torch.Tensor, num_items: int) -> torch.Tensor:
        group = self.groups.replica_control
        if group is None:
            return loss.detach().reshape(1)
        share = loss.double().cpu() * num_items if num_items else torch.zeros((), dtype=torch.float64)
        sums = torch.stack([share, torch.tensor(float(num_items), dtype=torch.float64)])
        guarded(
            lambda: dist.all_reduce(sums, group=group), f"averaging the evaluation loss over {self.groups.replicas}"
        )
        return (sums[0] / sums[1]).to(loss.dtype).to(loss.device).reshape(1)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        counts = self.loader.samples_of_replicas()
        group = self.groups.replica_group
        if group is None:
            return tensor[: counts[0]]
        own = _with_rows(tensor, max(counts))
        parts = [torch.empty_like(own) for _ in counts]
        guarded(lambda: dist.all_gather(parts, own, group=group), f"gathering predictions over {self.groups.replicas}")
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _gather_to_first(self, tensor: torch.Tensor) -> torch.Tensor:
        counts, groups = self.loader.samples_of_replicas(), self.groups
        if not groups.is_first:
            return without_rows(tensor)
        if groups.replica_group is None:
            return tensor[: counts[0]]
        own, first = _with_rows(tensor, max(counts)), groups.replica_ranks[0]
        parts = None if groups.replica else [torch.empty_like(own) for _ in counts]
        guarded(
            lambda: dist.gather(own, parts, dst=first, group=groups.replica_group),
            f"gathering predictions of {groups.replicas} on rank {first}",
        )
        if parts is None:
            return without_rows(tensor)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first `rows` samples, followed by zeros where there are fewer."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    own = tensor.new_zeros((rows, *tensor.shape[1:]))
    own[: min(rows, tensor.shape[0])] = tensor[:rows]
    return own


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

    def __init__(self, starter: Starter) -> None:
        self.starter = starter
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
        trainer = self.starter.context.trainer
        makes_loader = self.starter.num_stages == 1 and trainer_compat.is_overridden(trainer, method)
        awaits_loader = makes_loader or trainer_compat.is_overridden(trainer, "evaluate")
        outer, self._is_metrics_only = self._is_metrics_only, is_metrics_only
        try:
            with self._up(None if awaits_loader else self._request(dataset)):
                yield
        finally:
            self._is_metrics_only = outer

    def _take_first_rank_only(self) -> bool:
        """Decide where the next loop's metrics are computed; the one after it, in a callback say, is for all ranks."""
        context, (is_wanted, self._is_metrics_only) = self.starter.context, (self._is_metrics_only, False)
        return (
            is_wanted
            and context.topology.world_size > 1
            and context.args.pipeline_compute_metrics == "first_rank"
            and context.trainer.compute_metrics is not None
            and not trainer_compat.is_overridden(context.trainer, "evaluation_loop")
        )

    def _request(self, dataset: Any) -> Request:
        """Return the request that Trainer will make; for a dict of data sets, the one for the first."""
        trainer = self.starter.context.trainer
        dataset = trainer.eval_dataset if dataset is None else dataset
        dataset = trainer.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        return Request(first, "Evaluation", trainer.args.eval_batch_size, trainer_compat.eval_sampler(trainer))

    @contextmanager
    def _up(self, request: Request | None) -> Iterator[bool]:
        """Wrap an evaluation; yields False without a pipeline, which can start only for a known request."""
        starter = self.starter
        with starter.context.timeouts.reporting_faults():
            if not starter.is_started(request):
                yield False
                return
            starter.pipeline.settle()
            with giving_whole_model(starter.context.trainer, starter.pipeline), _installed(starter.pipeline):
                yield True

    def reference_of(self, dataset: Any, samples_per_rank: int) -> Any:
        """Return a data set with what a frozen reference says of its samples; None without a pipeline.

        Collective: call on every rank. The reference is the model as it is now, without its adapters.
        """
        starter, trainer = self.starter, self.starter.context.trainer
        if is_stream(dataset):
            return None
        request, was_training = Request(dataset, "Reference", samples_per_rank), trainer.model.training
        with self._up(request) as is_up:
            if not is_up:
                return None
            evaluation = Evaluation(starter.context, starter.pipeline, starter.loader(request))
            is_shown = starter.context.topology.rank == 0 and not trainer.args.disable_tqdm
            entries = []
            trainer.model.eval()
            with progress_bar("Computing what the reference says", len(evaluation.loader), is_shown) as bar:
                for batch in evaluation.loader:
                    entries.append(evaluation.gathered_reference(batch))
                    bar.update(1)
            trainer.model.train(was_training)
        return trl_compat.with_columns(dataset, entries)

    @contextmanager
    def loop(self, given: Any) -> Iterator[Evaluation | UsersEvaluation]:
        """Wrap Trainer's evaluation loop; the yielded evaluation names the loader, the pipeline's or the user's."""
        starter, request = self.starter, request_of(given)
        cache = starter.cache
        is_users = request is None and not isinstance(given, PipelineLoader)
        if is_users:
            check_undivided(given, "get_eval_dataloader or get_test_dataloader", starter.num_stages)
        outer, left = self._present, starter.is_left_to_trainer
        is_for_first_rank = self._take_first_rank_only()
        try:
            # Entered here as well: a user's own `evaluate` may call the loop directly.
            with self._up(request) as is_up:
                if is_users or not is_up:
                    shared = starter.pipeline.shared_rng if is_up else None
                    self._present = UsersEvaluation(with_shared_rng(given, shared))
                    starter.is_left_to_trainer = left or not is_up
                    yield self._present
                    return
                loader = given if request is None else starter.loader(request)
                self._present = evaluation = Evaluation(starter.context, starter.pipeline, loader, is_for_first_rank)
                storing = nullcontext() if cache is None else cache.storing_for(loader)
                with evaluation.in_trainers_loop(), storing:
                    yield evaluation
        finally:
            self._present = outer
            if is_users:
                starter.is_left_to_trainer = left
