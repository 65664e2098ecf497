"""Trees of tensors as one flat byte message: JSON describes, raw bytes follow. No pickle."""

from __future__ import annotations

import json
from typing import Any

import torch


_ALIGNMENT = 16
_HEADER_BYTES = 8


def pack(tree: Any) -> torch.Tensor:
    """Serialise nested dicts, lists and tuples of tensors and plain JSON values into a `uint8` tensor.

    A tensor whose elements all share one memory cell (an expanded placeholder) travels as that single element.

    Raises:
        TypeError: a leaf is neither a tensor nor a JSON value.
    """
    chunks: list[torch.Tensor] = []
    description = _describe(tree, chunks)
    header = json.dumps(description).encode()
    start = _aligned(_HEADER_BYTES + len(header))
    sizes = [chunk.numel() for chunk in chunks]
    message = torch.zeros(start + sum(_aligned(size) for size in sizes), dtype=torch.uint8)
    message[:_HEADER_BYTES].view(torch.int64)[0] = len(header)
    message[_HEADER_BYTES : _HEADER_BYTES + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for chunk, size in zip(chunks, sizes, strict=True):
        message[start : start + size] = chunk
        start += _aligned(size)
    return message


def unpack(message: torch.Tensor) -> Any:
    """The inverse of `pack`. The tensors are views into `message`."""
    header_size = int(message[:_HEADER_BYTES].view(torch.int64)[0])
    header = bytes(message[_HEADER_BYTES : _HEADER_BYTES + header_size].numpy())
    reader = _Reader(message, _aligned(_HEADER_BYTES + header_size))
    return reader.build(json.loads(header))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _describe(tree: Any, chunks: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensor = tree.detach().cpu()
        is_placeholder = tensor.numel() > 1 and not any(tensor.stride())
        shape = list(tensor.shape)
        if is_placeholder:
            tensor = tensor.as_strided((1,), (1,))
        chunks.append(tensor.contiguous().reshape(-1).view(torch.uint8))
        return {"t": str(tensor.dtype).removeprefix("torch."), "s": shape, "p": is_placeholder}
    if isinstance(tree, dict):
        return {"d": [[key, _describe(value, chunks)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"l" if isinstance(tree, list) else "u": [_describe(value, chunks) for value in tree]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"v": tree}
    raise TypeError(
        f"A batch or model output holds a {type(tree).__name__}, which cannot be sent to the other pipeline stages: "
        "expected tensors, numbers, strings, None, or dicts, lists and tuples of these. Remove it in the collator."
    )


class _Reader:
    """Walks a description and cuts the tensors out of the message."""

    def __init__(self, message: torch.Tensor, start: int) -> None:
        self.message = message
        self.position = start

    def build(self, node: dict[str, Any]) -> Any:
        if "t" in node:
            return self._tensor(getattr(torch, node["t"]), node["s"], node["p"])
        if "d" in node:
            return {key: self.build(value) for key, value in node["d"]}
        if "l" in node:
            return [self.build(value) for value in node["l"]]
        if "u" in node:
            return tuple(self.build(value) for value in node["u"])
        return node["v"]

    def _tensor(self, dtype: torch.dtype, shape: list[int], is_placeholder: bool) -> torch.Tensor:
        count = 1 if is_placeholder else torch.Size(shape).numel()
        size = count * dtype.itemsize
        raw = self.message[self.position : self.position + size]
        self.position += _aligned(size)
        tensor = raw.view(dtype)
        return tensor.expand(shape) if is_placeholder else tensor.view(shape)
