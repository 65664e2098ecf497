"""Assemble a batch from samples read from the data set and samples restored from the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.records import field_column
from hf_pipetransformer.data.batches import fill_value, pad_batch, real_lengths, sample_digests, take_rows


if TYPE_CHECKING:
    from hf_pipetransformer.cache.inputs import InputReport
    from hf_pipetransformer.cache.records import StoredRecords


Indices = npt.NDArray[np.int64]

LENGTH_FIELD = "pipetransformer_length"
"""Side field of text records: the number of real tokens of the sample, padding excluded."""


@dataclass(frozen=True)
class SampleSource:
    """Access to samples whose activations are not stored.

    Args:
        read: collates the samples with these indices into a batch.
        num_positions: sequence length of the activations if samples have no token dimension.
        record_length: how many of them a record has, from the first one on; the others come as zeros.
        main_shape: shape of a sample of the main input without token dimension; cached samples get a placeholder.
        keeps_padding: True if the loss sees padding, so that records must include it.
    """

    read: Callable[[list[int]], Mapping[str, Any]]
    main_input: str
    report: InputReport
    num_positions: int
    record_length: int
    hidden_size: int
    main_shape: tuple[int, ...]
    main_dtype: torch.dtype
    pad_token_id: int
    keeps_padding: bool

    @property
    def is_text(self) -> bool:
        """True if a sample is a sequence of tokens."""
        return self.main_input in self.report.token_fields

    def digests(self, batch: Mapping[str, Any]) -> tuple[Indices, Any]:
        """Return the real length and the input digest of each sample of a batch."""
        lengths = real_lengths(batch, self.main_input)
        return lengths, sample_digests(batch, lengths, self.report.token_fields)

    def padded_length(self, longest: int) -> int:
        """Return the sequence length of a batch whose longest sample has `longest` real tokens."""
        rule = self.report.padding
        return self.num_positions if rule is None or rule.kind == "none" else rule.length(longest)

    def length_of(self, batch: Mapping[str, Any]) -> int:
        """Return the sequence length of a batch."""
        return int(batch[self.main_input].shape[1]) if self.is_text else self.num_positions

    def kept_of(self, length: int) -> int:
        """Return how many positions of a batch of this sequence length a record has."""
        return length if self.is_text else self.record_length

    def lengths_in(self, entries: Any) -> Any:
        """Return the real lengths that entries of an index tell; zeros without a token dimension."""
        return entries[field_column(LENGTH_FIELD)] if self.is_text else np.zeros(len(entries), dtype=np.int64)

    def padded(self, batch: Mapping[str, Any], length: int) -> Mapping[str, Any]:
        """Return a batch that was read, padded to a sequence length like the collator does."""
        usual = (self.main_input, length, self.pad_token_id, self.report.fill_values)
        return pad_batch(batch, *usual) if self.is_text else batch

    def stored_inputs(self, fields: Mapping[str, torch.Tensor], lengths: Any, length: int) -> dict[str, torch.Tensor]:
        """Rebuild the inputs of cached samples from their side fields, padded like the collator does."""
        inputs = {name: values for name, values in fields.items() if name != LENGTH_FIELD}
        if not self.is_text:
            # Expanded from one element: nothing reads it, so it needs no memory.
            placeholder = torch.zeros(1, dtype=self.main_dtype)
            inputs[self.main_input] = placeholder.expand(len(lengths), *self.main_shape)
            return inputs
        # Records come padded with zeros; the collator pads each field with a value of its own.
        beyond = torch.arange(length) >= torch.from_numpy(lengths.astype(np.int64))[:, None]
        for name in self.report.token_fields:
            usual = fill_value(name, self.main_input, self.pad_token_id)
            inputs[name][beyond] = self.report.fill_values.get(name, usual)
        return inputs


class BatchAssembler:
    """Parts of a batch that were read from the data set."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source
        self.found: list[tuple[npt.NDArray[np.bool_], Mapping[str, Any], Any]] = []
        """Mask of the samples in the batch, collated inputs, and digests of the inputs."""
        self._longest: list[int] = []

    def add(self, where: Any, batch: Mapping[str, Any], holds: Any) -> None:
        """Add the samples at the positions `where` from `batch`, which contains those at the positions `holds`."""
        if not where.any():
            return
        # From the full batch: the collator padded to its longest sample, even if that one is not taken.
        self._longest.append(int(real_lengths(batch, self.source.main_input).max()))
        if where.sum() < holds.sum():
            batch = take_rows(batch, torch.from_numpy(np.flatnonzero(where[holds])))
        self.found.append((where, batch, self.source.digests(batch)[1]))

    def read(self, where: Any, samples: list[int]) -> None:
        if where.any():
            self.add(where, self.source.read([samples[i] for i in np.flatnonzero(where)]), where)

    def padded_length(self, known: Any, is_checked: bool) -> int:
        """Return the length that the collator would have padded the whole batch to.

        `known` are the real lengths of the samples that were not read. With `is_checked`, raise StoreDamagedError if
        the padding of what was read does not follow the rule that the probe found.
        """
        source = self.source
        read = max((source.length_of(batch) for _, batch, _ in self.found), default=0)
        expected = max(map(source.padded_length, self._longest), default=0)
        if is_checked and read != expected:
            raise StoreDamagedError(
                f"a batch was padded to {read} tokens, after the first samples {expected} were expected. Pad in "
                "the collator, or to one length, or set activation_cache='off'."
            )
        # What was read counts too: once the cache is off, the padding need not follow the rule any more.
        return max(read, expected, *(source.padded_length(int(length)) for length in known))

    def joined(
        self, hit: Any, records: StoredRecords | None, length: int
    ) -> tuple[dict[str, torch.Tensor], Any, torch.Tensor | None]:
        """Return the inputs of the whole batch, padded, the digests of those that were read, and stored activations.

        `records` are those of the samples in the mask `hit`.
        """
        source, digests = self.source, np.zeros(len(hit), dtype=np.uint64)
        pieces: list[tuple[Any, Mapping[str, Any]]] = []
        for where, batch, found in self.found:
            digests[where] = found
            pieces.append((where, source.padded(batch, length)))
        if records is not None:
            pieces.append((hit, source.stored_inputs(records.fields, records.lengths, length)))
        hidden = _spread([(hit, records.activation)]) if records is not None and hit.any() else None
        # All pieces have the fields of the first: the probe refuses collators whose fields vary (`_check_alike`).
        inputs = {name: _spread([(where, piece[name]) for where, piece in pieces]) for name in pieces[0][1]}
        return inputs, digests, hidden


def _spread(pieces: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """Join parts of a batch by the masks that say where their samples belong."""
    where, first = pieces[0]
    # With one piece nothing is copied, and an expanded placeholder stays a single element.
    if where.all():
        return first
    whole = first.new_zeros(len(where), *first.shape[1:])
    for where, piece in pieces:
        whole[torch.from_numpy(np.flatnonzero(where))] = piece
    return whole
