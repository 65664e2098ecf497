"""Rows of a run's first batch: those that it is inspected with, and if each is a sample or a part of a flat one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.data.batches import (
    IGNORED_LABEL,
    MAIN_INPUTS,
    SampleBatch,
    first_tokens,
    take_rows,
    take_samples,
    take_sequences,
)
from hf_pipetransformer.data.flattened import CUMULATIVE, MARKS, Sequences
from hf_pipetransformer.splitters.base import is_causal_lm
from hf_pipetransformer.startup.model import ProbeTarget, gradients_discarded, run_stage


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.splitters.structure import Structure


NUM_PROBE_SAMPLES = 6


@dataclass(frozen=True)
class FirstBatch:
    """First batch of a run, empty on ranks that do not read.

    Args:
        num_samples: number of samples that it was made of; None if nobody tells.
        media: names in it of what has no row for each sample: images, videos or sounds beside tokens.
        collated: collates some of its samples by themselves, which cannot be cut from it then; None if nobody can.
    """

    batch: SampleBatch
    num_samples: int | None = None
    media: frozenset[str] = frozenset()
    collated: Callable[[int, int], SampleBatch] | None = None

    def read(self, num_samples: int) -> SampleBatch:
        """Return at most `num_samples` samples, the first ones if they have what the batch has, as one batch."""
        if not self.media:
            return take_samples(self.batch, slice(0, num_samples))
        if self.collated is None or self.num_samples is None or self.num_samples <= num_samples:
            return self.batch
        starts = range(0, self.num_samples, num_samples)
        parts = (self.collated(start, start + num_samples) for start in starts)
        return next(part for part in parts if self.media & {*part})


def probe_samples(
    first: FirstBatch, main_input: str, count: Callable[[Mapping[str, Any]], int], most: int = NUM_PROBE_SAMPLES
) -> SampleBatch:
    """Return a few rows of the run's first batch.

    Args:
        count: returns the number of items of a batch that the loss averages over.

    Raises:
        ValueError: the data set is empty, or the rows of a batch do not belong to one sample each.
    """
    batch = first.batch
    size = batch.size if first.num_samples is None else first.num_samples
    if not size:
        raise ValueError("The data set is empty: expected at least one sample.")
    check_rows(batch, size, main_input)
    found = batch
    if batch.num_rows > most:
        found = first.read(most) if first.media else take_rows(batch, torch.arange(most))
    labels = found.get("labels")
    # Without any label a loss is nan, which says nothing of a model's stages.
    if isinstance(labels, torch.Tensor) and not count(found):
        found = found | {"labels": torch.zeros_like(labels)}
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


_REMEDY = (
    "Expected one row a sample: use a collator that pads, such as DataCollatorWithPadding; or one row of all samples "
    "with position_ids that begin again, at the same number, with each, as DataCollatorWithFlattening gives them."
)


def check_rows(inputs: SampleBatch, num_samples: int, main_input: str | None = None) -> None:
    """Refuse a batch that is not flattened and whose rows do not belong to one sample of the data set each.

    Args:
        num_samples: number of samples that were collated into `inputs`.
        main_input: name of the model's main input; None tries the usual names.

    Raises:
        ValueError: the collator put several samples into one row without position_ids that tell them apart or
            without labels of tokens, or the numbers of rows and samples differ.
    """
    if inputs.sequences is not None:
        _check_flattened(inputs, inputs.sequences)
        return
    marks = [name for name in MARKS if inputs.get(name) is not None]
    if marks:
        raise ValueError(
            f"The collator concatenates samples: {num_samples} samples gave a batch with {', '.join(marks)}. {_REMEDY}"
        )
    positions, expected = inputs.get("position_ids"), num_samples * inputs.rows
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and len(positions) != expected:
        row = _first_restart(positions, inputs.get("attention_mask"))
        if row is not None:
            raise ValueError(
                f"Several samples stand in row {row} of a batch: its position_ids begin again, "
                f"{positions[row].tolist()[:32]}. {_REMEDY}"
            )
    for name in MAIN_INPUTS if main_input is None else [main_input]:
        value = inputs.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) != expected:
            raise ValueError(
                f"{num_samples} samples gave a batch whose {name!r} has shape {tuple(value.shape)}, "
                f"{len(value)} rows. Micro-batches and replicas take whole samples, of as many rows each. {_REMEDY}"
            )


def _check_flattened(inputs: Mapping[str, Any], flattened: Sequences) -> None:
    for name in CUMULATIVE:
        # An empty sample begins where the next one does.
        bounds = sorted({int(bound) for bound in inputs.get(name, flattened.bounds)})
        if bounds != list(flattened.bounds):
            raise ValueError(
                f"{name} says that the sequences of a row begin at {bounds[:8]}, but its position_ids begin again "
                f"at {list(flattened.bounds[:8])}: let the collator give both for the same sequences."
            )
    labels, shape = inputs.get("labels"), (1, flattened.bounds[-1])
    if isinstance(labels, torch.Tensor) and labels.shape != shape:
        raise ValueError(
            f"A row of several samples has labels of shape {tuple(labels.shape)}: expected {shape}, a label for each "
            "token, for otherwise the row cannot be cut. Use a collator that pads, such as DataCollatorWithPadding."
        )


def _first_restart(positions: torch.Tensor, attention_mask: Any) -> int | None:
    """Return the first row whose positions, `(batch, seq)`, decrease and then increase again; None if there is none.

    Padding cannot trigger this: it is masked, or repeats one position and so decreases at most once.
    """
    is_real = torch.ones_like(positions, dtype=torch.bool)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == positions.shape:
        is_real = attention_mask.bool()
    for row, (values, real) in enumerate(zip(positions, is_real, strict=True)):
        steps = values[real].diff()
        falls = (steps < 0).nonzero()
        if len(falls) and bool((steps[int(falls[0]) :] > 0).any()):
            return row
    return None


def why_across(target: ProbeTarget) -> str | None:
    """Return why the row of a flattened batch cannot be cut: a sample predicts the next one's first token."""
    flattened, labels = target.inputs.sequences, target.inputs.get("labels")
    if flattened is None or labels is None or "shift_labels" in target.inputs or not is_causal_lm(target.model):
        return None
    starts = list(flattened.bounds[1:-1])
    if bool((labels[0, starts] == IGNORED_LABEL).all()):
        return None
    return (
        f"The labels of a row of several samples are {labels[0, starts].tolist()[:8]} where the second and later ones "
        f"begin, so that the last token of a sample predicts the first of the next: expected {IGNORED_LABEL}, with "
        "which a row can be cut. Use separator_id=-100 of DataCollatorWithFlattening, or pipeline_loss='batch'."
    )


def why_mixed(target: ProbeTarget, structure: Structure) -> str | None:
    """Return why a flattened batch cannot be cut: its sequences see each other; None if they do not.

    The loss of one sequence must have no gradient in what the layers get of those before it, not even a tiny one.
    """
    inputs = target.inputs
    if inputs.sequences is not None and len(inputs.sequences) == 1:
        # Two samples with gradients may not fit into memory: half of one, twice.
        inputs = take_sequences(first_tokens(inputs, -(-inputs.sequences.bounds[-1] // 2)), [0, 0])
    flattened, labels = inputs.sequences, inputs.get("labels")
    if flattened is None or not isinstance(labels, torch.Tensor) or labels.shape != (1, flattened.bounds[-1]):
        return None
    # The token before a sequence predicts its first one, if that has a label.
    counts = [int((each[1:] != IGNORED_LABEL).sum()) for each in labels[0].split(flattened.lengths)]
    # The sequence with most labels comes last, where all others could be seen from it.
    *before, last = sorted(range(len(flattened)), key=counts.__getitem__)
    if not counts[last]:
        return None
    inputs = take_sequences(inputs, [*before, last])
    start = inputs["labels"].shape[1] - flattened.lengths[last]
    inputs["labels"][:, : start + 1] = IGNORED_LABEL
    with target.view(structure) as view, gradients_discarded(target.model):
        with torch.no_grad():
            entering = run_stage(view, range(1), None, lambda: target.loss(dict(inputs)))
        entering = entering.detach().requires_grad_()
        loss = run_stage(view, range(1, structure.num_blocks), entering, lambda: target.loss(dict(inputs)))
        torch.autograd.backward(loss)
    if entering.grad is None or not entering.grad[:, :start].any():
        return None
    return (
        f"{type(target.model).__name__} lets the samples of a row see each other: it does not read from position_ids "
        "where they begin (no model does with use_cache=True), and Trainer would mix them as well. Use a collator "
        "that pads, such as DataCollatorWithPadding."
    )
