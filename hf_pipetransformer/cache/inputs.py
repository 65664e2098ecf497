"""Form of the samples of a data set in its batches, by which records of them are found again.

A record stands in for what frozen layers compute of a sample if the sample that was read is the one that it was made
from. Nothing is tried for it: all batches that the run reads are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_pipetransformer.cache.files import Array
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.data.batches import MASK, SampleBatch, real_lengths, sample_digests


@dataclass(frozen=True)
class SampleForm:
    """Form of samples, and what a record has of one.

    Args:
        shape: of a sample of the main input; None for texts, which may be of any length.
        num_positions: sequence length of the activations if samples have no token dimension.
        record_length: how many of them a record has, from the first one on; the others come as zeros.
        keeps_padding: True if the loss sees padding, so that records must include it.
    """

    main_input: str
    shape: tuple[int, ...] | None
    num_positions: int
    record_length: int
    record_format: RecordFormat
    pad_token_id: int
    keeps_padding: bool

    @property
    def is_text(self) -> bool:
        return self.shape is None

    def why_unfit(self, batch: Mapping[str, Any], num_samples: int | None = None) -> str | None:
        """Return why no records can be made of a batch that was read; None if they can.

        Args:
            num_samples: that it was made of; None if that is not known.
        """
        given = SampleBatch.of(batch)
        value = given.get(self.main_input)
        if not isinstance(value, torch.Tensor):
            return f"the batches have no tensor {self.main_input!r}, the model's main input ({sorted(given)})."
        if given.sequences is not None:
            return (
                f"{given.size} samples lie in one row of {value.shape[1]} tokens, of which no sample has a record of "
                "its own: let the collator pad, or pack the data set into rows of one sample each."
            )
        if num_samples not in (None, len(value)):
            return f"the collator gave {len(value)} rows for {num_samples} samples: let it return one a sample."
        if self.shape not in (None, tuple(value.shape[1:])):
            return (
                f"{self.main_input!r} is of shape {tuple(value.shape[1:])} a sample, after {self.shape} in the first "
                "batch: give it one size in all batches."
            )
        for name, entry in given.items():
            is_tensor = isinstance(entry, torch.Tensor)
            if not is_tensor or entry.dim() == 0 or len(entry) != len(value):
                found = f"of shape {tuple(entry.shape)}" if is_tensor else f"a {type(entry).__name__}"
                return (
                    f"{name!r} in a batch of {len(value)} samples is {found}: let the collator return tensors with "
                    "one entry a sample only."
                )
        mask = given.get(MASK)
        if self.is_text and mask is not None:
            if mask.shape != value.shape:
                return (
                    f"{MASK!r} is of shape {tuple(mask.shape)} beside {self.main_input!r} of shape "
                    f"{tuple(value.shape)}: give one value a token."
                )
            # A record holds the tokens from the first position to the last real one.
            if bool((mask[:, 0] == 0).any()):
                return 'text is padded on the left, or has no token: set padding_side="right" in the tokenizer.'
        return None

    def digests(self, batch: Mapping[str, Any]) -> Array:
        """Return the hashes `(batch, 2)` of the samples of a batch that fits."""
        return sample_digests(batch, self.lengths(batch), self.main_input, self.pad_token_id)

    def lengths(self, batch: Mapping[str, Any]) -> Array:
        """Return how many tokens the samples have, `(batch,)`, or positions of their activations."""
        if self.is_text:
            return real_lengths(batch, self.main_input)
        return np.full(len(batch[self.main_input]), self.num_positions)

    def length_of(self, batch: Mapping[str, Any]) -> int:
        """Return the sequence length of a batch."""
        return int(batch[self.main_input].shape[1]) if self.is_text else self.num_positions

    def kept_of(self, batch: Mapping[str, Any]) -> Array:
        """Return how many positions `(batch,)` the records of a batch have."""
        if self.is_text and not self.keeps_padding:
            return self.lengths(batch)
        return np.full(len(batch[self.main_input]), self.length_of(batch) if self.is_text else self.record_length)
