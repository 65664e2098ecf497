"""Whether each row of a batch is one sample: batches are cut into micro-batches and given to replicas by rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
_MARKS_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What flattening collators add, beside `position_ids`, to say where samples begin."""

_REMEDY = (
    "Expected one row a sample: use a collator that pads, such as DataCollatorWithPadding, in place of "
    "DataCollatorWithFlattening; or pack the data set itself, into rows with position_ids that begin again with each "
    "text."
)


def check_not_packed(inputs: Mapping[str, Any], num_samples: int, main_input: str | None = None) -> None:
    """Refuse a batch in which a row is not one sample of the data set, whatever that is.

    Args:
        inputs: a collated batch.
        num_samples: how many samples were collated into it.
        main_input: name of the model's main input; None looks for the usual names.

    Raises:
        ValueError: the collator put several samples into one row, or rows and samples differ in number.
    """
    marks = [name for name in _MARKS_OF_PACKING if inputs.get(name) is not None]
    if marks:
        raise ValueError(
            f"The collator concatenates samples: {num_samples} samples gave a batch with {', '.join(marks)}. {_REMEDY}"
        )
    positions = inputs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and len(positions) != num_samples:
        row = _first_restart(positions, inputs.get("attention_mask"))
        if row is not None:
            raise ValueError(
                f"Several samples stand in row {row} of a batch: its position_ids begin again, "
                f"{positions[row].tolist()[:32]}. {_REMEDY}"
            )
    names = [main_input] if main_input is not None else _MAIN_INPUTS
    for name in names:
        value = inputs.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) != num_samples:
            raise ValueError(
                f"{num_samples} samples gave a batch whose {name!r} has shape {tuple(value.shape)}, "
                f"{len(value)} rows. Micro-batches and replicas take whole samples, a row each. {_REMEDY}"
            )


def _first_restart(positions: torch.Tensor, attention_mask: Any) -> int | None:
    """The first row whose positions, `(batch, seq)`, fall and rise again; None if there is none.

    Padding repeats one position, so it falls at most once, or is masked.
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
