"""Values that modules take and return: the tensors in them, and the rows that a batch has in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from transformers.utils import ModelOutput

from hf_pipetransformer.cache.files import Array


MASK = "attention_mask"
OF_THE_LOSS = "num_items_in_batch"
"""Argument that Trainer has for the loss, and that models hand to their parts among others."""


class NotStorableError(ValueError):
    """What a frozen part takes or gives cannot be stored; the text says why, to go on after a part's name."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value of tuples, lists, dicts and `ModelOutput`s, in a fixed order.

    Raises:
        NotStorableError: an object of another kind is in it, such as a cache of keys and values.
    """
    found: list[torch.Tensor] = []
    rebuilt(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a value with each tensor changed; raises like `tensors_of`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: rebuilt(each, change) for name, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(rebuilt(each, change) for each in value)
    if type(value) is dict:
        return {name: rebuilt(each, change) for name, each in value.items()}
    raise NotStorableError(f"has a {type(value).__name__} among its inputs or outputs, expected tensors")


@dataclass(frozen=True)
class Rows:
    """What a frozen part was called with, row by row.

    Args:
        given: positional and keyword arguments.
        tensors: in them; modules may write into containers that they are given.
        number: rows of the tensors that have one for each image, tile, sound or text.
        lengths: `(number,)` tokens or frames of each row up to its padding; None if rows are not padded.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: tuple[torch.Tensor, ...]
    number: int
    lengths: Array | None = None

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], cuts_padding: bool = True) -> Rows:
        """Find the rows of a call; with `cuts_padding` those of an `attention_mask` end at their last real token.

        Raises:
            NotStorableError: there is nothing that rows could be known by.
        """
        given: Any = rebuilt([tuple(args), dict(kwargs)], lambda tensor: tensor)
        tensors = tuple(tensors_of(given))
        if not tensors or not tensors[0].dim():
            raise NotStorableError("takes no tensor with a row for each sample")
        places = [kwargs, *(each for each in args if isinstance(each, dict))]
        number, mask = tensors[0].shape[0], next((each[MASK] for each in places if MASK in each), None)
        is_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2 and tensors[0].shape[:2] == mask.shape
        if not cuts_padding or not is_mask or not number:
            return cls(tuple(given), tensors, number)
        assert isinstance(mask, torch.Tensor)
        shown = mask.detach().cpu() != 0
        ends = torch.where(shown.any(1), shown.shape[1] - shown.flip(1).int().argmax(1), 1)
        return cls(tuple(given), tensors, number, ends.numpy().astype(np.int64))

    @property
    def length(self) -> int:
        """Padded length of the rows; 0 if they are not padded."""
        return int(self.tensors[0].shape[1]) if self.lengths is not None else 0

    @property
    def _read(self) -> list[Any]:
        """Arguments that outputs may depend on."""
        args, kwargs = self.given
        return [args, {name: value for name, value in kwargs.items() if name != OF_THE_LOSS}]

    def take(self, rows: Array, length: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of some rows, cut to or padded with zeros to a length if one is given."""
        chosen = torch.from_numpy(np.asarray(rows, np.int64))

        def of_rows(tensor: torch.Tensor) -> torch.Tensor:
            if not self._has_rows(tensor):
                return tensor
            found = tensor[chosen.to(tensor.device)]
            if length is None or found.dim() < 2 or found.shape[1] != self.length:
                return found
            padding = found.new_zeros(len(found), max(0, length - found.shape[1]), *found.shape[2:])
            return torch.cat([found[:, :length], padding], dim=1)

        args, kwargs = rebuilt(list(self.given[0]), of_rows), rebuilt(self.given[1], of_rows)
        return tuple(args), kwargs

    @property
    def form(self) -> str:
        """What is no tensor of the arguments that outputs may depend on, and where the tensors are."""
        return repr(rebuilt(self._read, lambda tensor: tensor.new_empty(0, device="cpu")))

    @property
    def kind(self) -> bytes:
        """Hash of what is no row's content: shapes without the number of rows, dtypes, options of the call.

        Without the padded length where rows are cut to their own.
        """
        hasher = xxhash.xxh3_128()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not self._has_rows(tensor):
                hasher.update(f"whole {tuple(tensor.shape)} {tensor.dtype}".encode())
                hasher.update(_bytes(tensor.detach().cpu().reshape(1, -1)).data)
            elif self._is_cut(tensor):
                hasher.update(f"tokens {tuple(tensor.shape[2:])} {tensor.dtype}".encode())
            else:
                hasher.update(f"rows {tuple(tensor.shape[1:])} {tensor.dtype}".encode())
            return tensor.new_empty(0, device="cpu")

        # What is no tensor is told by its text.
        hasher.update(repr(rebuilt(self._read, note)).encode())
        return hasher.digest()

    def digests(self, salt: bytes) -> Array:
        """Return two words `(number, 2)` a row: a 128-bit hash of all that the row is computed from, and of `salt`."""
        start = xxhash.xxh3_128(salt + self.kind)
        columns: list[tuple[Array, int]] = []
        for tensor in filter(self._has_rows, tensors_of(self._read)):
            values = _bytes(tensor.detach().cpu().reshape(self.number, -1))
            columns.append((values, values.shape[1] // self.length if self._is_cut(tensor) else 0))
        found = np.empty((self.number, 2), np.uint64)
        for row in range(self.number):
            hasher = start.copy()
            for values, bytes_of_token in columns:
                end = bytes_of_token * int(self.lengths[row]) if self.lengths is not None else 0
                hasher.update(values[row, : end if bytes_of_token else None].data)
            found[row] = np.frombuffer(hasher.digest(), np.uint64)
        return found

    def _is_cut(self, tensor: torch.Tensor) -> bool:
        return self.lengths is not None and tensor.dim() > 1 and tensor.shape[1] == self.length

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.number


def _bytes(rows: torch.Tensor) -> Array:
    """Return a matrix as bytes, row by row."""
    found: Array = rows.contiguous().view(torch.uint8).numpy()
    return found
