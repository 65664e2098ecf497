"""Content of a frozen part's records: those of its outputs that a model reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_pipetransformer.cache.frozen_parts.values import NotStorableError, Rows, no_row_each


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array
    from hf_pipetransformer.cache.frozen_parts.call import PartCall


@dataclass(frozen=True)
class Pick:
    """An output tensor of a part that the model reads: all of it, or of each row the first position alone."""

    number: int
    is_first: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, 0] if self.is_first else tensor


@dataclass(frozen=True)
class Reading:
    """Content of a record.

    Args:
        picks: the output tensors that are read, in their order.
        is_by_token: True if a record has one entry a token, up to the last real one; what lies beyond is zero.
        share: how many patches of rows that lie one behind the other have one entry in what is read; 1 otherwise.
    """

    picks: tuple[Pick, ...]
    is_by_token: bool = False
    share: int = 1

    def pick(self, number: int) -> Pick | None:
        return next((each for each in self.picks if each.number == number), None)

    def lengths(self, rows: Rows, values: int) -> Array:
        """Return the tokens of each row's record `(rows,)`, or the values of one without tokens."""
        found: Array
        if rows.lengths is not None and self.has_lengths(rows):
            found = rows.lengths // self.share
            return found
        return torch.full((rows.number,), values).numpy()

    def has_lengths(self, rows: Rows) -> bool:
        return rows.is_flat or self.is_by_token

    def records(self, leaves: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
        """Return the records `(rows, tokens, values)` of output tensors; without tokens a row's values are in a line.

        Raises:
            NotStorableError: the tensors do not have a row for each row of the call, or differ in dtype.
        """
        read = [pick.of(leaves[pick.number].detach()) for pick in self.picks]
        own = self.share if rows.is_flat else 0
        if any(rows.share_of(each) != own or not (own or each.shape[:1] == (rows.number,)) for each in read):
            raise NotStorableError(no_row_each(read, rows.number))
        kinds = {each.dtype for each in read if each.is_floating_point()}
        stored = [each.to(next(iter(kinds), torch.float32)) for each in read]
        # Masks and small whole numbers are stored among the others.
        if len(kinds) != 1 or any(
            not torch.equal(a.to(b.dtype), b) for a, b in zip(stored, read, strict=True) if not b.is_floating_point()
        ):
            names = ", ".join(sorted({str(each.dtype) for each in read}))
            raise NotStorableError(f"gives outputs of {names}, expected one kind of floating point numbers")
        if rows.is_flat:
            whole = torch.cat([each.reshape(each.shape[0], -1) for each in stored], dim=1)
            # The store takes records padded to one length, and the length of each beside them.
            return nn.utils.rnn.pad_sequence(whole.split(self.lengths(rows, 0).tolist()), batch_first=True)
        if self.is_by_token:
            return torch.cat([each.reshape(rows.number, rows.length, -1) for each in stored], dim=2)
        return torch.cat([each.reshape(rows.number, -1) for each in stored], dim=1)[:, :, None]

    def num_tokens(self, call: PartCall) -> int:
        """Return the tokens of a record for a call, or the values of one without tokens."""
        if self.has_lengths(call.rows):
            return call.rows.length // self.share
        return sum(math.prod(self._shape_of_row(call, pick)) for pick in self.picks)

    def width(self, call: PartCall) -> int:
        """Return the values of a token's entry in a record, 1 for records without tokens."""
        if not self.has_lengths(call.rows):
            return 1
        shapes = (self._shape_of_row(call, pick) for pick in self.picks)
        return sum(math.prod(shape if call.rows.is_flat else shape[1:]) for shape in shapes)

    def outputs(self, records: torch.Tensor, call: PartCall) -> dict[int, torch.Tensor]:
        """Return what `records` `(rows, tokens, values)` hold of the outputs of a call."""
        rows = call.rows
        if rows.is_flat:
            lengths = self.lengths(rows, 0).tolist()
            records = torch.cat([record[:length] for record, length in zip(records, lengths, strict=True)])
        elif not self.is_by_token:
            records = records.reshape(len(records), -1)
        found, start = dict[int, torch.Tensor](), 0
        for pick in self.picks:
            shape, like = call.template.shape(pick.number, rows), call.template.likes[pick.number]
            own_shape = [shape[0], *shape[2:]] if pick.is_first else shape
            size = math.prod(own_shape[records.dim() - 1 :])
            own = records[..., start : start + size].to(like.device, like.dtype).reshape(own_shape)
            found[pick.number] = own.requires_grad_(like.requires_grad)
            start += size
        return found

    def _shape_of_row(self, call: PartCall, pick: Pick) -> list[int]:
        shape = call.template.shape(pick.number, call.rows)
        return shape[2:] if pick.is_first else shape[1:]
