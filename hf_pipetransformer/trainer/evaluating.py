"""Evaluation and prediction through the pipeline, with one copy of every sample."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from hf_pipetransformer.batches import batch_size
from hf_pipetransformer.run import host
from hf_pipetransformer.trainer.starting import StartingTrainer


class EvaluatingTrainer(StartingTrainer):
    """`evaluate` and `predict` of Trainer over stages and replicas."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, through the pipeline; every rank gets the same metrics."""
        with self.run.evaluating(eval_dataset):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict as `Trainer.predict` does, through the pipeline; every rank gets all predictions in order."""
        with self.run.evaluating(test_dataset):
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
        with self.run.passing_over(dataloader) as evaluation:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        return evaluation.completed(output, metric_key_prefix)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """One evaluation batch: the loss is that of the global batch, one entry for each of this replica's samples."""
        evaluation, num_items, num_samples = self.run.evaluation, host.items_of(self, inputs), batch_size(inputs)
        with evaluation.sending(inputs, prediction_loss_only):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return evaluation.global_loss(loss, num_items, num_samples), logits, labels
