"""What a data set is known by, so that a run notices when it goes on with other data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import numpy as np
import torch
import xxhash


NUM_SAMPLES = 8
"""Samples that are looked at."""


def describe_data(dataset: Any) -> dict[str, Any]:
    """JSON values that tell data sets apart.

    Returns:
        `num_samples`, None where it is not known; `fingerprint`, that of a `datasets.Dataset`, which changes with
        every operation; `samples`, a hash of a few samples, None where reading one twice gives two things.
    """
    is_stream = isinstance(dataset, (torch.utils.data.IterableDataset, datasets.IterableDataset))
    if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return {"num_samples": None, "fingerprint": None, "samples": None}
    return {
        "num_samples": len(dataset),
        "fingerprint": getattr(dataset, "_fingerprint", None),
        "samples": _hash_of_samples(dataset),
    }


def are_other_data(saved: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Whether two descriptions of equally long data sets are of different data, as far as can be told."""
    if saved["fingerprint"] is not None and saved["fingerprint"] == present["fingerprint"]:
        return False
    if saved["samples"] is None or present["samples"] is None:
        # Samples are drawn at random: only the fingerprint tells, if both have one.
        return None not in (saved["fingerprint"], present["fingerprint"])
    return bool(saved["samples"] != present["samples"])


def _hash_of_samples(dataset: Any) -> str | None:
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)  # What is stored, without a transform that may draw at random.
    count = len(dataset)
    spread = sorted({index * (count - 1) // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)}) if count else []
    found = set()
    for _ in range(2):
        hasher = xxhash.xxh3_128()
        for index in spread:
            for part in _parts(dataset[index]):
                hasher.update(part)
        found.add(hasher.hexdigest())
    return found.pop() if len(found) == 1 else None


def _parts(value: Any) -> Iterator[bytes]:
    """The content of a sample as bytes, whatever it is made of."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield flat.numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key in value:
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"{len(value)} items".encode()
        for item in value:
            yield from _parts(item)
    elif callable(getattr(value, "tobytes", None)):
        yield value.tobytes()
    elif value is None or isinstance(value, (str, bytes, int, float, np.generic)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()
