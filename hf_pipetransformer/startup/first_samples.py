"""Choice of the few samples that the start-up checks run on, out of the first batch of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.data.batches import batch_size, num_rows, take_rows, take_samples
from hf_pipetransformer.startup.rows import check_rows


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


NUM_PROBE_SAMPLES = 6


@dataclass(frozen=True)
class FirstBatch:
    """First batch of a run, with what `batches` has noted of its samples; empty on ranks that do not read."""

    batch: dict[str, Any]

    def read(self, num_samples: int) -> dict[str, Any]:
        """Return at most `num_samples` first samples as one batch."""
        return take_samples(self.batch, slice(0, num_samples))


def probe_samples(
    first: FirstBatch, main_input: str, count: Callable[[Mapping[str, Any]], int], most: int = NUM_PROBE_SAMPLES
) -> dict[str, Any]:
    """Return a few rows of the run's first batch.

    Args:
        count: returns the number of items of a batch that the loss averages over.

    Raises:
        ValueError: the data set is empty, or the rows of a batch do not belong to one sample each.
    """
    batch, size = first.batch, batch_size(first.batch)
    if not size:
        raise ValueError("The data set is empty: expected at least one sample.")
    check_rows(batch, size, main_input)
    found = batch if num_rows(batch) <= most else take_rows(batch, torch.arange(most))
    labels = found.get("labels")
    # Without any label a loss is nan, which says nothing of a model's stages.
    if isinstance(labels, torch.Tensor) and not count(found):
        found = {**found, "labels": torch.zeros_like(labels)}
    return found


def most_samples(args: PipeTransformerArguments, may_slice_head: bool = False) -> int:
    """Return how many samples the whole model can run in float32 without exceeding the memory of a training step.

    Args:
        may_slice_head: True if a step may hold the logits of a part of each sequence only.
    """
    # A step that recomputes never keeps the activations of all layers, as these runs do, and one whose head is sliced
    # never the logits of a sample.
    if args.pipeline_checkpoint != "never" or args.activation_checkpointing or may_slice_head:
        return 1
    size = args.train_samples_per_device
    # Float32 takes twice the memory of 16 bits.
    return max(1, min(NUM_PROBE_SAMPLES, size // 2 if args.bf16 or args.fp16 else size))
