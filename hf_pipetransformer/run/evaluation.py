"""Evaluation and prediction through the pipeline, with one copy of every sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_pipetransformer.autodp.gathering import ReplicaGather
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.stream import StreamLoader
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.run import host
from hf_pipetransformer.run.noted import Noted
from hf_pipetransformer.run.pipeline import Pipeline


class Evaluation:
    """One pass over a data set.

    Args:
        trainer: whose loop it is.
        topology: the ranks.
        pipeline: runs the batches.
        loader: gives them.
    """

    is_users = False

    def __init__(self, trainer: Trainer, topology: Topology, pipeline: Pipeline, loader: PipelineLoader) -> None:
        self.trainer = trainer
        self.pipeline = pipeline
        self.loader = loader
        self.told_num_items = False
        """Whether the loss of the batch under way is told by what to divide."""
        self.noted = Noted(trainer, topology)
        self.gather = ReplicaGather(pipeline.stage.groups, loader)

    @contextmanager
    def running(self, inputs: dict[str, Any], loss_only: bool) -> Iterator[None]:
        """Inside, a batch runs; the last stage gives the others the loss alone if nobody can look at the logits."""
        trainer, runner = self.trainer, self.pipeline.runner
        has_loss = all(inputs.get(name) is not None for name in trainer.label_names)
        runner.sends_loss_only = loss_only and has_loss and host.has_plain_loss(trainer)
        self.told_num_items = False
        self.noted.begin_batch()
        try:
            with self.noted.of_part(inputs):
                yield
        finally:
            runner.sends_loss_only = False

    def global_loss(self, loss: torch.Tensor | None, num_items: int, num_samples: int) -> torch.Tensor | None:
        """The loss of the global batch, one entry for each of this replica's samples, from its own mean loss."""
        return None if loss is None else self.gather.mean(loss, num_items).expand(num_samples)

    def completed(self, output: EvalLoopOutput, metric_key_prefix: str) -> EvalLoopOutput:
        """Trainer's output, which of a stream counts what this replica saw, for all replicas. A collective call."""
        self.noted.note("eval")
        if not isinstance(self.loader, StreamLoader):
            return output
        metrics = dict(output.metrics or {})
        if self.gather.losses:
            metrics[f"{metric_key_prefix}_loss"] = self._loss_of_stream(self.loader)
        return output._replace(num_samples=self.loader.num_seen, metrics=metrics)

    def _loss_of_stream(self, loader: StreamLoader) -> float:
        """The mean of the batches' losses, `(1,)` each, as Trainer takes it in one process.

        It does not know how many samples a stream has, so each batch but the last counts as a full one.
        """
        losses = torch.cat(self.gather.losses).double().cpu()
        weights = torch.full_like(losses, loader.total_batch_size)
        weights[-1] = sum(loader.samples_of_replicas())
        is_counted = losses.isfinite()
        if not self.trainer.args.logging_nan_inf_filter or not is_counted.any():
            is_counted[:] = True
        return float((losses * weights)[is_counted].sum() / weights[is_counted].sum())


class UsersEvaluation:
    """One pass over a loader of the user's own, with the whole model on each rank: it means what it does to Trainer.

    Args:
        loader: this rank's.
    """

    is_users = True

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.told_num_items = False

    def running(self, _inputs: dict[str, Any], _loss_only: bool) -> AbstractContextManager[None]:
        """See `Evaluation`."""
        return nullcontext()

    def global_loss(self, loss: torch.Tensor | None, _num_items: int, _num_samples: int) -> torch.Tensor | None:
        """Each rank's own."""
        return loss

    def completed(self, output: EvalLoopOutput, _metric_key_prefix: str) -> EvalLoopOutput:
        """Trainer's output."""
        return output


@contextmanager
def evaluating(pipeline: Pipeline) -> Iterator[None]:
    """The pipeline is up inside, for evaluation or prediction, in training or without."""
    stage = pipeline.stage
    if stage.view.is_installed:
        yield
        return
    stage.store.move(stage.own_names(), pipeline.settings.device)
    try:
        with stage.active():
            yield
    finally:
        # In training a callback that has the whole model may evaluate: the stage stays where it is.
        if stage.groups.pipeline_size > 1 and stage.reducer is None:
            stage.store.move(stage.own_names(), torch.device("cpu"))
