"""Padding the parts of a global batch to one length, for losses that see padding. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_pipetransformer.batches import IGNORED_LABEL


def sequence_length(batch: Mapping[str, Any], main_input: str) -> int:
    """Padded length of a batch of text; 0 for an empty one."""
    value = batch.get(main_input)
    return value.shape[1] if isinstance(value, torch.Tensor) else 0


def fill_value(key: str, main_input: str, pad_token_id: int) -> int:
    """What fills an entry of a batch of text beyond a sample's tokens: a padding token, -100 for labels, else zero."""
    return pad_token_id if key == main_input else IGNORED_LABEL if key == "labels" else 0


def pad_batch(
    batch: Mapping[str, Any],
    main_input: str,
    length: int,
    pad_token_id: int,
    fills: Mapping[str, int | float] | None = None,
) -> dict[str, Any]:
    """Pad every `(batch, seq, ...)` tensor of a batch on the right to `(batch, length, ...)`.

    Tokens get the padding token, labels -100, everything else (masks, segment ids) zero: what a padding collator that
    saw the whole global batch would have given.
    """
    current = sequence_length(batch, main_input)
    if current == length:
        return dict(batch)

    def padded(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != current:
            return value
        fill = (fills or {}).get(key, fill_value(key, main_input, pad_token_id))
        return torch.cat([value, value.new_full((value.shape[0], length - current, *value.shape[2:]), fill)], dim=1)

    return {key: padded(key, value) for key, value in batch.items()}
