"""Values that modules take and return: the tensors in them, and the rows that a batch has in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from transformers.utils import ModelOutput

from hf_pipetransformer.data.batches import MASK, shown_lengths


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array


GRID = "grid_thw"
OF_THE_LOSS = "num_items_in_batch"
"""Argument that Trainer has for the loss, and that models hand to their parts among others."""


class NotStorableError(ValueError):
    """Input or output of a frozen part that cannot be stored; the text says why, to go on after a part's name."""


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
    # Exact types only, because a subclass may hold more than its items.
    if type(value) in (tuple, list):
        return type(value)(rebuilt(each, change) for each in value)
    if type(value) is dict:
        return {name: rebuilt(each, change) for name, each in value.items()}
    raise NotStorableError(f"has a {type(value).__name__} among its inputs or outputs, expected tensors")


def form_of(value: Any) -> str:
    """Return a value as text, without what is in its tensors; raises like `tensors_of`."""
    # On the CPU, so that the text names no device.
    return repr(rebuilt(value, lambda tensor: tensor.new_empty(0, device="cpu")))


def no_row_each(outputs: Sequence[torch.Tensor], num_rows: int) -> str:
    """Return why outputs that do not have a row for each row of the call cannot be stored."""
    shapes = ", ".join(str(tuple(each.shape)) for each in outputs)
    return f"gives outputs of shape {shapes or 'none'} for {num_rows} rows"


@dataclass(frozen=True)
class Rows:
    """Arguments of a call of a frozen part, row by row.

    Args:
        given: positional and keyword arguments.
        tensors: in them; modules may write into containers that they are given.
        number: rows of the tensors that have one for each image, tile, sound or text.
        lengths: `(number,)` tokens, frames or patches of each row up to its padding; None if rows are not padded.
        is_flat: True if rows lie one behind the other in the first tensor, as patches of images beside a grid of them.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: tuple[torch.Tensor, ...]
    number: int
    lengths: Array | None = None
    is_flat: bool = False

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], cuts_padding: bool = True) -> Rows:
        """Find the rows of a call; with `cuts_padding` those of an `attention_mask` end at their last real token.

        An argument `grid_thw` `(images, 3)` has the patches of images in time, height and width, as for Qwen2-VL.

        Raises:
            NotStorableError: there is nothing that rows could be known by.
        """
        given: Any = rebuilt([tuple(args), dict(kwargs)], lambda tensor: tensor)
        tensors = tuple(tensors_of(given))
        if not tensors or not tensors[0].dim():
            raise NotStorableError("takes no tensor with a row for each sample")
        grid = kwargs.get(GRID)
        if isinstance(grid, torch.Tensor) and grid.dim() == 2 and int(grid.prod(1).sum()) == tensors[0].shape[0]:
            sizes = grid.detach().prod(1).cpu().numpy().astype(np.int64)
            return cls(tuple(given), tensors, len(sizes), sizes, is_flat=True)
        places = [kwargs, *(each for each in args if isinstance(each, dict))]
        number, mask = tensors[0].shape[0], next((each[MASK] for each in places if MASK in each), None)
        is_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2 and tensors[0].shape[:2] == mask.shape
        if not cuts_padding or not is_mask or not number:
            return cls(tuple(given), tensors, number)
        assert isinstance(mask, torch.Tensor)
        # A row without any token keeps one: the store takes no empty records.
        return cls(tuple(given), tensors, number, np.maximum(shown_lengths(mask), 1))

    @property
    def length(self) -> int:
        """Padded length of the rows, of those that lie one behind the other the longest one's; 0 without lengths."""
        if self.lengths is None:
            return 0
        return int(self.lengths.max(initial=0)) if self.is_flat else int(self.tensors[0].shape[1])

    @property
    def _read(self) -> list[Any]:
        """Arguments that outputs may depend on."""
        args, kwargs = self.given
        # It differs from step to step, and no output of a part depends on it.
        return [args, {name: value for name, value in kwargs.items() if name != OF_THE_LOSS}]

    def take(self, rows: Array, length: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of some rows, cut to or padded with zeros to a length if one is given."""

        def of_rows(tensor: torch.Tensor) -> torch.Tensor:
            if not self._has_rows(tensor) and not self._is_flat(tensor):
                return tensor
            found = self.rows_of(tensor, rows)
            if length is None or found.dim() < 2 or found.shape[1] != self.length:
                return found
            padding = found.new_zeros(len(found), max(0, length - found.shape[1]), *found.shape[2:])
            return torch.cat([found[:, :length], padding], dim=1)

        args, kwargs = rebuilt(list(self.given[0]), of_rows), rebuilt(self.given[1], of_rows)
        return tuple(args), kwargs

    def share_of(self, tensor: torch.Tensor) -> int:
        """Return how many of a flat call's patches have one entry in a tensor; 0 if it has one for each row."""
        if not self.is_flat or self._has_rows(tensor) or not tensor.dim() or not tensor.shape[0]:
            return 0
        assert self.lengths is not None
        share, rest = divmod(int(self.lengths.sum()), tensor.shape[0])
        # No entry may come from the patches of two rows.
        return 0 if rest or (self.lengths % share).any() else share

    def rows_of(self, tensor: torch.Tensor, rows: Array) -> torch.Tensor:
        """Return the entries of some rows in an argument or an output of the call."""
        if share := self.share_of(tensor):
            assert self.lengths is not None
            parts = tensor.split((self.lengths // share).tolist())
            return torch.cat([parts[row] for row in np.asarray(rows).tolist()])
        return tensor[torch.from_numpy(np.asarray(rows, np.int64)).to(tensor.device)]

    @property
    def form(self) -> str:
        """Arguments that are no tensors and that outputs may depend on, and the places of the tensors, as text."""
        return form_of(self._read)

    @property
    def kind(self) -> bytes:
        """Hash of what is no row's content: shapes without the number of rows, dtypes, options of the call.

        Without the padded length where rows are cut to their own.
        """
        hasher = xxhash.xxh3_128()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if self._is_flat(tensor):
                hasher.update(f"flat {tuple(tensor.shape[1:])} {tensor.dtype}".encode())
            elif not self._has_rows(tensor):
                # The same for all rows, so its content is part of what each of them is computed from.
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
        columns = [self._bytes_of_rows(tensor) for tensor in tensors_of(self._read)]
        found = np.empty((self.number, 2), np.uint64)
        for row in range(self.number):
            # What all rows have in common is hashed once.
            hasher = start.copy()
            for column in filter(None, columns):
                hasher.update(column[row].data)
            found[row] = np.frombuffer(hasher.digest(), np.uint64)
        return found

    def _bytes_of_rows(self, tensor: torch.Tensor) -> list[Array]:
        """Return what each row has in an argument; nothing if that is no row's."""
        host = tensor.detach().cpu()
        if self._is_flat(tensor):
            assert self.lengths is not None
            values = _bytes(host.reshape(tensor.shape[0], -1))
            return [part.reshape(-1) for part in np.split(values, np.cumsum(self.lengths)[:-1])]
        if not self._has_rows(tensor):
            return []
        values = _bytes(host.reshape(self.number, -1))
        if not self._is_cut(tensor) or self.lengths is None:
            return list(values)
        bytes_of_token = values.shape[1] // self.length
        return [row[: bytes_of_token * length] for row, length in zip(values, self.lengths.tolist(), strict=True)]

    def _is_flat(self, tensor: torch.Tensor) -> bool:
        return self.share_of(tensor) == 1

    def _is_cut(self, tensor: torch.Tensor) -> bool:
        return self.lengths is not None and not self.is_flat and tensor.dim() > 1 and tensor.shape[1] == self.length

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.number


def _bytes(rows: torch.Tensor) -> Array:
    """Return a matrix as bytes, row by row."""
    found: Array = rows.contiguous().view(torch.uint8).numpy()
    return found
