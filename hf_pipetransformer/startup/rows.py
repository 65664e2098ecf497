"""Checks of the rows of a run's first batches: one sample each, or samples that a flattened batch keeps apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.data.batches import IGNORED_LABEL, MAIN_INPUTS, labels_by_row, rows_per_sample
from hf_pipetransformer.data.flattened import CUMULATIVE, MARKS, Sequences, first_tokens, sequences_of, take_sequences
from hf_pipetransformer.startup.model import ProbeTarget, gradients_discarded, is_causal_lm, run_stage


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.structure import Structure


_REMEDY = (
    "Expected one row a sample: use a collator that pads, such as DataCollatorWithPadding; or one row of all samples "
    "with position_ids that begin again, at the same number, with each, as DataCollatorWithFlattening gives them."
)


def check_rows(inputs: Mapping[str, Any], num_samples: int, main_input: str | None = None) -> None:
    """Refuse a batch that is not flattened and whose rows do not belong to one sample of the data set each.

    Args:
        num_samples: number of samples that were collated into `inputs`.
        main_input: name of the model's main input; None tries the usual names.

    Raises:
        ValueError: the collator put several samples into one row without position_ids that tell them apart or
            without labels of tokens, or the numbers of rows and samples differ.
    """
    flattened = sequences_of(inputs)
    if flattened is not None:
        _check_flattened(inputs, flattened)
        return
    marks = [name for name in MARKS if inputs.get(name) is not None]
    if marks:
        raise ValueError(
            f"The collator concatenates samples: {num_samples} samples gave a batch with {', '.join(marks)}. {_REMEDY}"
        )
    positions, expected = inputs.get("position_ids"), num_samples * rows_per_sample(inputs)
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
    flattened, labels = sequences_of(target.inputs), target.inputs.get("labels")
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
    inputs, flattened = target.inputs, sequences_of(target.inputs)
    if flattened is not None and len(flattened) == 1:
        # Two samples with gradients may not fit into memory: half of one, twice.
        inputs = take_sequences(first_tokens(inputs, -(-flattened.bounds[-1] // 2)), [0, 0])
        flattened = sequences_of(inputs)
    labels = labels_by_row(inputs)
    if flattened is None or labels is None:
        return None
    # The token before a sequence predicts its first one, if that has a label.
    counts = [int((each[1:] != IGNORED_LABEL).sum()) for each in labels]
    # The sequence with most labels comes last, where all others could be seen from it.
    *before, last = sorted(range(len(flattened)), key=counts.__getitem__)
    if not counts[last]:
        return None
    inputs = take_sequences(inputs, [*before, last])
    start = inputs["labels"].shape[1] - flattened.lengths[last]
    inputs["labels"][:, : start + 1] = IGNORED_LABEL
    view = target.view(structure)
    try:
        with gradients_discarded(target.model):
            with torch.no_grad():
                entering = run_stage(view, range(1), None, lambda: target.loss(dict(inputs)))
            entering = entering.detach().requires_grad_()
            loss = run_stage(view, range(1, structure.num_blocks), entering, lambda: target.loss(dict(inputs)))
            torch.autograd.backward(loss)
    finally:
        view.remove()
    if entering.grad is None or not entering.grad[:, :start].any():
        return None
    return (
        f"{type(target.model).__name__} lets the samples of a row see each other: it does not read from position_ids "
        "where they begin (no model does with use_cache=True), and Trainer would mix them as well. Use a collator "
        "that pads, such as DataCollatorWithPadding."
    )
