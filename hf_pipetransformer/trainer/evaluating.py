"""Evaluation and prediction through the pipeline, with one copy of every sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from hf_pipetransformer.autodp.gathering import ReplicaGather
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.stream import StreamLoader
from hf_pipetransformer.batches import batch_size
from hf_pipetransformer.trainer.starting import StartingTrainer


class EvaluatingTrainer(StartingTrainer):
    """`evaluate` and `predict` of Trainer over stages and replicas."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, through the pipeline; every rank gets the same metrics."""
        with self.run.patience.reporting_faults(), self._evaluating(eval_dataset):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict as `Trainer.predict` does, through the pipeline; every rank gets all predictions in order."""
        with self.run.patience.reporting_faults(), self._evaluating(test_dataset):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Trainer's loop; one that is given another loader than this trainer makes is refused."""
        assert self._stage is not None
        if not isinstance(dataloader, PipelineLoader):
            raise ValueError(
                f"get_eval_dataloader or get_test_dataloader returned a {type(dataloader).__name__}, which knows "
                "nothing of stages. Build it with self._get_dataloader, or override _get_eval_sampler instead."
            )
        outer, gather = self._eval_gather, ReplicaGather(self._stage.groups, dataloader)
        self._eval_gather = self.gather_function = gather
        try:
            # Entered here too: an `evaluate` of a user's own calls this method itself.
            with self.run.patience.reporting_faults(), self._evaluating(dataloader.dataset):
                output: EvalLoopOutput = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        finally:
            self._eval_gather = outer
        if not isinstance(dataloader, StreamLoader):
            return output
        # Trainer counts what this replica saw.
        metrics = dict(output.metrics or {})
        if gather.losses:
            metrics[f"{metric_key_prefix}_loss"] = self._loss_of_stream(gather.losses, dataloader)
        return output._replace(num_samples=dataloader.num_seen, metrics=metrics)

    def _loss_of_stream(self, batch_losses: list[torch.Tensor], loader: StreamLoader) -> float:
        """The mean of the batches' losses, `(1,)` each, as Trainer takes it in one process.

        It does not know how many samples a stream has, so each batch but the last counts as a full one.
        """
        losses = torch.cat(batch_losses).double().cpu()
        weights = torch.full_like(losses, loader.total_batch_size)
        weights[-1] = sum(loader.samples_of_replicas())
        is_counted = losses.isfinite()
        if not self.args.logging_nan_inf_filter or not is_counted.any():
            is_counted[:] = True
        return float((losses * weights)[is_counted].sum() / weights[is_counted].sum())

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """One evaluation batch: the loss is that of the global batch, one entry for each of this replica's samples."""
        assert self._eval_gather is not None
        assert self._runner is not None
        num_items, num_samples = self._count_items(inputs), batch_size(inputs)
        is_plain = type(self).compute_loss is Trainer.compute_loss and self.label_smoother is None
        has_loss = all(inputs.get(name) is not None for name in self.label_names)
        self._runner.sends_loss_only = (
            prediction_loss_only and has_loss and is_plain and self.compute_loss_func is None
        )
        try:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._runner.sends_loss_only = False
        if loss is not None:
            loss = self._eval_gather.mean(loss, num_items).expand(num_samples)
        return loss, logits, labels

    @contextmanager
    def _evaluating(self, dataset: Any) -> Iterator[None]:
        """The pipeline is up inside, for evaluation or prediction, in training or without."""
        dataset = self.eval_dataset if dataset is None else dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        stage = self._started(next(iter(dataset.values())) if isinstance(dataset, dict) else dataset)
        if stage.view.is_installed:
            yield
            return
        stage.store.move(stage.own_names(), self.args.device)
        try:
            with stage.active():
                yield
        finally:
            # In training a callback that has the whole model may evaluate: the stage stays where it is.
            if stage.groups.num_stages > 1 and stage.reducer is None:
                stage.store.move(stage.own_names(), torch.device("cpu"))
