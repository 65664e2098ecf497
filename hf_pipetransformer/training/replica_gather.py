"""Gathering of an evaluation's predictions and losses over replicas, and search for outputs that they cannot join."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from transformers import Trainer

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.transfers import all_gather_trees, gather_rows
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.batches import batch_size, rows_per_sample
from hf_pipetransformer.data.flattened import num_left_out, sequences_of
from hf_pipetransformer.runtime.messages import without_rows


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups
    from hf_pipetransformer.data.loader import PipelineLoader


REMEDY = (
    "Name the output in ignore_keys_for_eval of train() or ignore_keys of evaluate() and predict(), let "
    "preprocess_logits_for_metrics return one row a sample, or evaluate on one replica "
    "(pipeline_parallel_size as large as the number of processes, and elastic=False)."
)


class ReplicaGather:
    """Replacement for `accelerator.gather_for_metrics` that returns one copy of every sample under any layout.

    `loader` knows how many samples each replica has in the current batch. With `is_for_first_rank`, all but the losses
    goes to rank 0 alone; other ranks get tensors of no samples. With `fills_batches` the last batch's loss counts as
    that of a full one, as with `Seq2SeqTrainer`, whose own gather drops nothing. With `is_flattened`, the rows
    `(1, tokens, ...)` of the replicas are joined to the row that one process has.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        loader: PipelineLoader,
        is_for_first_rank: bool = False,
        fills_batches: bool = False,
        is_flattened: bool = False,
    ) -> None:
        self.groups = groups
        self.loader = loader
        self.is_for_first_rank = is_for_first_rank
        self.fills_batches = fills_batches
        self.is_flattened = is_flattened
        self._num_samples, self._rows, self._num_tokens = 0, 1, 0
        self._token_counts: list[int] | None = None
        self.losses: list[torch.Tensor] = []
        """Loss of each global batch so far, `(1,)` each."""
        self._is_loss_next = False

    def begin_batch(self, num_samples: int, rows: int, num_tokens: int) -> None:
        """Start the next batch.

        Args:
            num_samples: of this replica.
            rows: of a sample, see `batches`.
            num_tokens: of this replica's row, if the batch is flattened.
        """
        self._num_samples, self._rows, self._num_tokens = num_samples, rows, num_tokens
        self._token_counts = None

    def __call__(self, values: Any) -> Any:
        """Gather tensors of shape `(own samples, ...)` to `(samples of the global batch, ...)`, or of their rows."""
        # Trainer gathers a batch's loss first, whose mean every rank computes for itself.
        is_loss, self._is_loss_next = self._is_loss_next, False
        if is_loss and self.fills_batches:
            return self.losses[-1].expand(self.loader.total_batch_size)
        if self.groups.num_replicas == 1 and self._rows == 1 and not is_loss:
            return self._as_one_process(values)
        # The loss goes to all: on each rank Trainer compares it, to find the best model or to stop early.
        gather = partial(self._gather, is_for_first=self.is_for_first_rank and not is_loss)

        def gather_blocks(tensor: torch.Tensor) -> torch.Tensor:
            size = self._num_samples
            is_of_rows = not is_loss and self._rows > 1 and len(tensor) == size * self._rows
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

    def mean(self, loss: torch.Tensor, num_items: int) -> torch.Tensor:
        """Compute the global batch's loss, `(1,)`, from this replica's mean loss over `num_items`."""
        found = loss.detach()
        if self.groups.replica_control is not None:
            # A replica without items has the loss nan (0 / 0), which would spread to all by the sum.
            # In float64, or each number of replicas would round in its own way.
            share = loss.double().cpu() * num_items if num_items else torch.zeros((), dtype=torch.float64)
            sums = self._summed(torch.stack([share, torch.tensor(float(num_items), dtype=torch.float64)]))
            found = (sums[0] / sums[1]).to(loss.dtype).to(loss.device)
        self.losses.append(found.reshape(1))
        self._is_loss_next = True
        return self.losses[-1]

    def num_items_of_all(self, num_items: int) -> int:
        """Return the items of the global batch, of which this replica has `num_items`. Collective."""
        return int(self._summed(torch.tensor(num_items)))

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        group = self.groups.replica_control
        if group is not None:
            what = f"adding the losses and items of an evaluation over {self.groups.replicas}"
            guarded(lambda: dist.all_reduce(values, group=group), what)
        return values

    def _gather(self, tensor: torch.Tensor, is_for_first: bool) -> torch.Tensor:
        if is_for_first and not self.groups.is_first:
            return without_rows(tensor)
        if not self.is_flattened or tensor.dim() < 2 or self.groups.replica_control is None:
            return self._gather_rows(tensor, self.loader.samples_of_replicas(), is_for_first)
        # A row `(1, tokens, ...)`, which Trainer has padded to the replica with most tokens. Counted once a batch: all
        # of its outputs have the same tokens.
        if self._token_counts is None:
            counts = all_gather_trees(self._num_tokens, self.groups.replica_control, self.groups.num_replicas)
            self._token_counts = counts
        # Outputs of one value less are zero between the replicas, see `flattened.join_tokens`.
        missing = num_left_out([tensor.shape], [max(self._token_counts)])
        # A batch smaller than the number of replicas is whole on each.
        samples = self.loader.samples_of_replicas()
        told = [each if size else 0 for each, size in zip(self._token_counts, samples, strict=True)]
        found = self._gather_rows(tensor[0, : self._num_tokens - missing], told, is_for_first)
        return found[None, : sum(told) - missing]

    def _check_rows(self, tensor: torch.Tensor) -> None:
        """Check that a tensor has a row for each sample of this replica, as nobody knows how to join others."""
        # A replica without samples of its own runs the whole batch, as a batch smaller than the replicas does.
        own = self.loader.samples_of_replicas()[self.groups.replica] or self.loader.progress.size
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


def has_rows(tensor: torch.Tensor, num_samples: int) -> bool:
    """Return True if a tensor has a row for each sample."""
    return tensor.dim() > 0 and len(tensor) == num_samples


def shape_without_rows(trainer: Trainer, model: Any, inputs: dict[str, Any], ignored: list[str] | None) -> str | None:
    """Return the shape of the first tensor that evaluations of a training gather and that has no row for each sample.

    None if there is none, or if it takes an evaluation to know: it reads the loss alone, generates, or runs code of
    the script's on the outputs. `inputs` is a batch for the model.
    """
    if trainer.compute_metrics is None or trainer.args.eval_strategy == "no" or trainer_compat.generates(trainer):
        return None
    is_known = not trainer_compat.is_overridden(trainer, "prediction_step")
    # In the evaluation itself, the first batch is looked at.
    is_known &= trainer_compat.has_known_loss(trainer) or trainer_compat.has_plain_loss(trainer)
    is_known &= trainer.preprocess_logits_for_metrics is None
    if not is_known or trainer.args.prediction_loss_only or sequences_of(inputs) is not None:
        return None
    size = batch_size(inputs)
    found: list[str] = []
    # Of TRL's pairs, an output has a row for each pair or for each of its texts.
    sizes = {size, size * rows_per_sample(inputs)}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if not any(has_rows(tensor, each) for each in sizes):
            found.append(str(tuple(tensor.shape)))
        return tensor

    # What raises here raises in the evaluation, with its own cause.
    with suppress(Exception), torch.no_grad():
        _, outputs = trainer.compute_loss(model, dict(inputs), return_outputs=True)
        read = trainer_compat.preprocessed(trainer, lambda logits, _labels: logits, ignored, outputs, inputs)
        recursively_apply(look, read["preprocessed"])
    return found[0] if found else None
