"""What a collated batch says of each of its samples: real length, a digest of the input."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
import xxhash


MASK = "attention_mask"


def real_lengths(batch: Mapping[str, Any], main_input: str = "input_ids") -> np.ndarray:
    """Real tokens of each sample, `(batch,)`: where the last one is that the attention mask shows, plus one.

    Without a mask `(batch, seq)` every sample has the full length of the main input; 0 without a token dimension.
    """
    mask, value = batch.get(MASK), batch.get(main_input)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        shown = mask.cpu().numpy() != 0
        return np.where(shown.any(axis=1), shown.shape[1] - np.argmax(shown[:, ::-1], axis=1), 0)
    if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
        return np.full(value.shape[0], value.shape[1])
    count = next((len(other) for other in batch.values() if isinstance(other, torch.Tensor) and other.dim()), 0)
    return np.zeros(count, dtype=np.int64)


def row_digests(batch: Mapping[str, Any], lengths: np.ndarray, token_fields: Collection[str]) -> np.ndarray:
    """A digest of each sample, uint64 `(batch,)`, over all its tensors: independent of padding and of its partners.

    Args:
        batch: tensors with a sample dimension; anything else is left out.
        lengths: real tokens of each sample, `(batch,)`.
        token_fields: names of the tensors `(batch, seq)`, which are cut to the real length.
    """
    digests = field_digests(batch, lengths, token_fields)
    if not digests:
        return np.full(len(lengths), xxhash.xxh3_64_intdigest(b""), dtype=np.uint64)
    rows = np.stack([digests[name] for name in sorted(digests)], axis=1)
    return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], dtype=np.uint64)


def field_digests(
    batch: Mapping[str, Any], lengths: np.ndarray, token_fields: Collection[str]
) -> dict[str, np.ndarray]:
    """For each tensor a digest of each sample, over name, dtype, shape and bytes."""
    digests: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        is_cut = name in token_fields
        head = f"{name}\0{value.dtype}\0{'' if is_cut else tuple(value.shape[1:])}\0".encode()
        data = value.detach().cpu().contiguous().reshape(value.shape[0], -1).view(torch.uint8).numpy()
        found = np.empty(len(data), dtype=np.uint64)
        for index, row in enumerate(data):
            hasher = xxhash.xxh3_64(head)
            hasher.update(row[: int(lengths[index]) * value.element_size()] if is_cut else row)
            found[index] = hasher.intdigest()
        digests[name] = found
    return digests
