"""Padding a part of a global batch as a collator that saw the whole would have."""

from __future__ import annotations

import torch

from hf_pipetransformer.data.batches import pad_batch, sequence_length


BATCH = {
    "input_ids": torch.tensor([[5, 6], [7, 1]]),
    "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    "labels": torch.tensor([[2, -100], [3, -100]]),
    "start_positions": torch.tensor([0, 1]),
}


def test_tokens_masks_and_labels_get_their_own_padding() -> None:
    padded = pad_batch(BATCH, "input_ids", 4, pad_token_id=1)
    assert padded["input_ids"].tolist() == [[5, 6, 1, 1], [7, 1, 1, 1]]
    assert padded["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert padded["labels"].tolist() == [[2, -100, -100, -100], [3, -100, -100, -100]]
    assert padded["start_positions"] is BATCH["start_positions"]


def test_a_batch_of_the_common_length_stays_as_it_is() -> None:
    assert all(value is BATCH[key] for key, value in pad_batch(BATCH, "input_ids", 2, pad_token_id=1).items())
    assert sequence_length({}, "input_ids") == 0
