"""Lengths and digests of the samples of a batch, by which stored activations are found again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
import xxhash


MASK = "attention_mask"


def real_lengths(batch: Mapping[str, Any], main_input: str = "input_ids") -> np.ndarray:
    """Return the number of tokens per sample, `(batch,)`, up to the last one that the attention mask shows.

    Without a 2-D mask, every sample has the full length of the main input; without a token dimension, 0.
    """
    mask, value = batch.get(MASK), batch.get(main_input)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        shown = mask.cpu().numpy() != 0
        return np.where(shown.any(axis=1), shown.shape[1] - np.argmax(shown[:, ::-1], axis=1), 0)
    if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
        return np.full(value.shape[0], value.shape[1])
    count = next((len(other) for other in batch.values() if isinstance(other, torch.Tensor) and other.dim()), 0)
    return np.zeros(count, dtype=np.int64)


def sample_digests(batch: Mapping[str, Any], lengths: np.ndarray, token_fields: Collection[str]) -> np.ndarray:
    """Return one digest per sample, uint64 `(batch,)`, over all its tensors, independent of padding and of the batch.

    Tensors named in `token_fields`, `(batch, seq)`, are cut to the real lengths `(batch,)`.
    """
    digests = field_digests(batch, lengths, token_fields)
    if not digests:
        return np.full(len(lengths), xxhash.xxh3_64_intdigest(b""), dtype=np.uint64)
    stacked = np.stack([digests[name] for name in sorted(digests)], axis=1)
    return np.array([xxhash.xxh3_64_intdigest(each.tobytes()) for each in stacked], dtype=np.uint64)


def field_digests(
    batch: Mapping[str, Any], lengths: np.ndarray, token_fields: Collection[str]
) -> dict[str, np.ndarray]:
    """Return a digest per sample, uint64 `(batch,)`, for each tensor: over its name, dtype, shape and bytes."""
    digests: dict[str, np.ndarray] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        is_cut = name in token_fields
        # Part of the digest, as tensors of other dtypes or shapes can have the same bytes.
        head = f"{name}\0{value.dtype}\0{'' if is_cut else tuple(value.shape[1:])}\0".encode()
        data = value.detach().cpu().contiguous().reshape(value.shape[0], -1).view(torch.uint8).numpy()
        found = np.empty(len(data), dtype=np.uint64)
        for index, content in enumerate(data):
            hasher = xxhash.xxh3_64(head)
            hasher.update(content[: int(lengths[index]) * value.element_size()] if is_cut else content)
            found[index] = hasher.intdigest()
        digests[name] = found
    return digests
