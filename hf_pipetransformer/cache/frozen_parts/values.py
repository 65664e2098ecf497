"""Values that modules take and return: the tensors in them, and the rows that a batch has in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from transformers.utils import ModelOutput

from hf_pipetransformer.data.batches import MASK, shown_lengths
from hf_pipetransformer.data.row_table import bytes_of, digests_of_rows, words_of


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array


GRID = "grid_thw"
PLACES = "pixel_position_ids"
MASKS = {"input_ids": MASK, "decoder_input_ids": f"decoder_{MASK}"}
"""Inputs of models to the masks that show which of their tokens are real."""
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


def no_row_each(outputs: Sequence[torch.Tensor], num_rows: int) -> str:
    """Return why outputs that do not have a row for each row of the call cannot be stored."""
    shapes = ", ".join(str(tuple(each.shape)) for each in outputs)
    return f"gives outputs of shape {shapes or 'none'} for {num_rows} rows"


@dataclass(frozen=True)
class Rows:
    """Arguments of a call of a frozen part, row by row.

    Args:
        given: positional and keyword arguments; modules may write into containers that they are given.
        tensors: in them, in a fixed order.
        number: rows of the tensors that have one for each image, tile, sound or text.
        lengths: `(number,)` tokens, frames or patches of each row up to its padding; None if rows are not padded.
        is_flat: True if rows lie one behind the other in the first tensor, as patches of images beside a grid of them.
        has_places: True if patches have places, by which outputs may leave out those that are padding.
        whole: `id`s of tensors that belong to all rows, however many entries they have, such as buffers.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: tuple[torch.Tensor, ...]
    number: int
    lengths: Array | None = None
    is_flat: bool = False
    has_places: bool = False
    whole: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lengths_of: Callable[[torch.Tensor], Array | None] = lambda _: None,
        is_whole: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> Rows:
        """Find the rows of a call; those of an `attention_mask` among its arguments end at their last real token.

        An argument `grid_thw` `(images, 3)` has the patches of images in time, height and width, as for Qwen2-VL; in
        `pixel_position_ids` `(images, patches, 2)` those of -1 are padding, as for Gemma 4.

        Args:
            lengths_of: gives the lengths of the rows of a tensor `(number, tokens, ...)` where no mask is given.
            is_whole: says if a tensor belongs to all rows whatever its shape.

        Raises:
            NotStorableError: there is nothing that rows could be known by.
        """
        given: Any = rebuilt([tuple(args), dict(kwargs)], lambda tensor: tensor)
        tensors = tuple(tensors_of(given))
        if not tensors or not tensors[0].dim():
            raise NotStorableError("takes no tensor with a row for each sample")
        whole = frozenset(id(each) for each in tensors if each.dim() and is_whole(each))
        grid = kwargs.get(GRID)
        if isinstance(grid, torch.Tensor) and grid.dim() == 2 and int(grid.prod(1).sum()) == tensors[0].shape[0]:
            sizes = grid.detach().prod(1).cpu().numpy().astype(np.int64)
            return cls(tuple(given), tensors, len(sizes), sizes, is_flat=True, whole=whole)
        places = [kwargs, *(each for each in args if isinstance(each, dict))]
        number, mask = tensors[0].shape[0], next((each[MASK] for each in places if MASK in each), None)
        patches, has_places = kwargs.get(PLACES), False
        if isinstance(patches, torch.Tensor) and patches.dim() == 3:
            mask, has_places = (patches >= 0).any(-1), True
        is_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2 and tensors[0].shape[:2] == mask.shape
        lengths = lengths_of_mask(mask) if is_mask and isinstance(mask, torch.Tensor) and number else None
        for tensor in tensors if not is_mask and number else ():
            lengths = lengths_of(tensor) if lengths is None and tensor.shape[:1] == (number,) else lengths
        if lengths is not None and (len(lengths) != number or tensors[0].dim() < 2):
            lengths = None
        return cls(tuple(given), tensors, number, lengths, has_places=has_places, whole=whole)

    @property
    def length(self) -> int:
        """Padded length of the rows, of those that lie one behind the other the longest one's; 0 without lengths."""
        if self.lengths is None:
            return 0
        return int(self.lengths.max(initial=0)) if self.is_flat else int(self.tensors[0].shape[1])

    @property
    def is_padded(self) -> bool:
        """True if rows of different lengths are padded to one."""
        return self.lengths is not None and not self.is_flat and bool((self.lengths < self.length).any())

    @property
    def _read(self) -> list[Any]:
        """Arguments that outputs may depend on."""
        args, kwargs = self.given
        # It differs from step to step, and no output of a part depends on it.
        return [args, {name: value for name, value in kwargs.items() if name != OF_THE_LOSS}]

    def take(
        self,
        rows: Array,
        length: int | None = None,
        instead: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of some rows, cut to a length if one is given.

        `instead` gives what a tensor is for these rows, None to take them from it.
        """

        def of_rows(tensor: torch.Tensor) -> torch.Tensor:
            other = instead(tensor)
            if other is not None:
                return other
            found = self.rows_of(tensor, rows) if self.is_by_row(tensor) else tensor
            if length is not None:
                for dim in self._token_dims(tensor):
                    found = found.narrow(dim, 0, length)
            return found

        args, kwargs = rebuilt(list(self.given[0]), of_rows), rebuilt(self.given[1], of_rows)
        return tuple(args), kwargs

    def some(self, rows: Array) -> Rows:
        """Return some of the rows, as the outputs of a call are told apart; arguments are those of all."""
        return replace(self, number=len(rows), lengths=None if self.lengths is None else self.lengths[rows])

    def few(self, most: int) -> Array:
        """Return the positions of a few rows, the shortest one among them."""
        chosen = np.arange(min(most, self.number))
        if self.lengths is not None and self.number:
            chosen[-1] = max(len(chosen) - 1, int(np.argmin(self.lengths)))
        return chosen

    def copied(self, chosen: Array, instead: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None) -> Rows:
        """Return some of the rows, with copies of their arguments for later; `instead` as in `take`."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            other = instead(tensor)
            if other is not None:
                return other
            return (self.rows_of(tensor, chosen) if self.is_by_row(tensor) else tensor.clone()).detach()

        given: Any = rebuilt(self.given, copy)
        tensors = tuple(tensors_of(given))
        pairs = zip(self.tensors, tensors, strict=True)
        # A few rows may be as many as the entries of a tensor that belongs to all.
        whole = frozenset(id(new) for old, new in pairs if not self.is_by_row(old))
        return replace(self.some(chosen), given=given, tensors=tensors, whole=whole)

    def share_of(self, tensor: torch.Tensor) -> int:
        """Return how many tokens or patches have one entry where the rows of a tensor lie one behind the other.

        0 if it has one for each row, or its entries are none of rows.
        """
        if self.lengths is None or not (self.is_flat or self.has_places):
            return 0
        if self.has_rows(tensor) or not tensor.dim() or not tensor.shape[0]:
            return 0
        share, rest = divmod(int(self.lengths.sum()), tensor.shape[0])
        # No entry may come from the patches of two rows.
        return 0 if rest or not share or (self.lengths % share).any() else share

    def rows_of(self, tensor: torch.Tensor, rows: Array) -> torch.Tensor:
        """Return the entries of some rows in an argument or an output of the call."""
        if share := self.share_of(tensor):
            assert self.lengths is not None
            parts = tensor.split((self.lengths // share).tolist())
            return torch.cat([parts[row] for row in np.asarray(rows).tolist()])
        return tensor[torch.from_numpy(np.asarray(rows, np.int64)).to(tensor.device)]

    def kind(self, cuts_padding: bool) -> bytes:
        """Return a hash of what is no row's content: shapes without the number of rows, dtypes, options of the call.

        With `cuts_padding`, without the padded length.
        """
        hasher = xxhash.xxh3_128()

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if self._is_flat(tensor):
                hasher.update(f"flat {tuple(tensor.shape[1:])} {tensor.dtype}".encode())
            elif cuts_padding and (dims := self._token_dims(tensor)):
                shape = [size for dim, size in enumerate(tensor.shape) if dim not in (0, *dims)]
                hasher.update(f"tokens {dims} {shape} {tensor.dtype}".encode())
            elif self.has_rows(tensor):
                hasher.update(f"rows {tuple(tensor.shape[1:])} {tensor.dtype}".encode())
            else:
                # The same for all rows, so its content is part of what each of them is computed from.
                hasher.update(f"whole {tuple(tensor.shape)} {tensor.dtype}".encode())
                hasher.update(bytes_of(tensor).tobytes())
            # Not made from the tensor, which may be deferred and would be used by that.
            return torch.empty(0)

        # What is no tensor is told by its text.
        hasher.update(repr(rebuilt(self._read, note)).encode())
        return hasher.digest()

    def digests(
        self,
        salt: bytes,
        cuts_padding: bool = False,
        key_of: Callable[[torch.Tensor, bool], Array | None] = lambda *_: None,
    ) -> Array:
        """Return two words `(number, 2)` a row: a 128-bit hash of all that the row is computed from, and of `salt`.

        With `cuts_padding`, without what lies beyond a row's last real token. `key_of` gives the hashes of the rows of
        a tensor that are known already; it is told if these are hashed as a whole.
        """
        start = xxhash.xxh3_128(salt + self.kind(cuts_padding))
        columns = [self._parts_of_rows(each, cuts_padding, key_of) for each in tensors_of(self._read)]

        def hashers() -> Iterator[xxhash.xxh3_128]:
            for parts in zip(*columns, strict=True):
                # What all rows have in common is hashed once.
                hasher = start.copy()
                for part in parts:
                    if part is not None:
                        hasher.update(np.ascontiguousarray(part).data)
                yield hasher

        return words_of(hashers())

    def _parts_of_rows(
        self, tensor: torch.Tensor, cuts_padding: bool, key_of: Callable[[torch.Tensor, bool], Array | None]
    ) -> Iterator[Any]:
        """Iterate over what each row has in an argument; None if that is no row's."""
        dims = self._token_dims(tensor) if cuts_padding else ()
        is_whole = self.has_rows(tensor) and not dims and not self._is_flat(tensor)
        known = key_of(tensor, is_whole)
        if known is not None:
            yield from known
        elif self._is_flat(tensor):
            assert self.lengths is not None
            yield from np.split(bytes_of(tensor), np.cumsum(self.lengths)[:-1])
        elif dims:
            assert self.lengths is not None
            values, has_rows = bytes_of(tensor), self.has_rows(tensor)
            for row, length in enumerate(self.lengths.tolist()):
                part = values[row if has_rows else 0]
                yield part[(*[slice(None)] * (dims[0] - 1), *[slice(length)] * len(dims))]
        elif is_whole:
            yield from digests_of_rows(tensor.detach().cpu())
        else:
            yield from [None] * self.number

    def _is_flat(self, tensor: torch.Tensor) -> bool:
        return self.is_flat and self.share_of(tensor) == 1

    def _token_dims(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the dimensions of an argument that go on with the padded length, for each row or for all alike."""
        if self.lengths is None or self.is_flat or tensor.dim() < 2 or tensor.shape[0] not in (1, self.number):
            return ()
        length = self.length
        if tensor.dim() == 4 and tensor.shape[3] == length and tensor.shape[2] in (1, length):
            return (2, 3) if tensor.shape[2] == length else (3,)  # A mask of pairs of tokens.
        return (1,) if tensor.shape[1] == length else ()

    def is_by_row(self, tensor: torch.Tensor) -> bool:
        """Return True for an argument of which each row has a share of its own."""
        return self.has_rows(tensor) or self._is_flat(tensor)

    def has_rows(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.number and id(tensor) not in self.whole


def lengths_of_mask(mask: torch.Tensor) -> Array:
    """Return the tokens `(rows,)` of each row up to the last real one."""
    # A row without any token keeps one: the store takes no empty records.
    return np.maximum(shown_lengths(mask), 1)


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version, which tells of writes into it; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
