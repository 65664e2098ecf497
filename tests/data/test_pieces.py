"""Batches that are collated piece by piece, since what they hold has no row for each sample."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hf_pipetransformer.comm.staging import pinned
from hf_pipetransformer.comm.transfers import pack, unpack
from hf_pipetransformer.data.batches import (
    CommonLength,
    SampleBatch,
    batch_size,
    count_items,
    join_pieces,
    pads_on_left,
    split_batch,
)
from hf_pipetransformer.data.sampler import BatchCollator
from tests.support.media_models import MODELS, PAD, make_rows


def collated(name: str, num_pieces: int, num_rows: int = 7) -> tuple[list[dict[str, Any]], SampleBatch]:
    rows = make_rows(MODELS[name], num_rows)
    join = partial(join_pieces, CommonLength("input_ids", PAD, on_left=name.endswith("left")))
    return rows, BatchCollator(MODELS[name].collate, num_pieces=num_pieces, join=join)(rows)


@pytest.mark.parametrize("name", ["llava", "llava_left", "smolvlm", "qwen2_vl"])
@pytest.mark.parametrize("num_pieces", [1, 2, 3, 7, 9])
def test_a_piece_is_what_the_collator_makes_of_its_rows_padded_as_the_batch(name: str, num_pieces: int) -> None:
    rows, batch = collated(name, num_pieces)
    whole, parts = MODELS[name].collate(rows), split_batch(batch, 2)
    assert len(parts) == min(num_pieces, 7)
    assert sum(map(batch_size, parts)) == batch_size(batch) == 7
    assert count_items(batch, True) == count_items(whole, True) == sum(count_items(part, True) for part in parts)
    for key in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(batch[key], whole[key])
        assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])
    start = 0
    for part in parts:
        alone = MODELS[name].collate(rows[start : start + batch_size(part)])
        start += batch_size(part)
        others = {*alone} - {"input_ids", "attention_mask", "labels", "mm_token_type_ids"}
        assert {*part} == {*alone}
        assert all(torch.equal(part[key], alone[key]) for key in others)


def test_the_side_of_padding_shows_in_batches_of_several_lengths() -> None:
    rows = make_rows(MODELS["llava"], 4)
    assert pads_on_left(MODELS["llava_left"].collate(rows))
    assert not pads_on_left(MODELS["llava"].collate(rows))
    assert not pads_on_left(MODELS["llava_left"].collate(rows[:1]))
    assert not pads_on_left({"input_ids": rows[0]["input_ids"]})
    pieces = [MODELS["llava_left"].collate(rows[:3]), MODELS["llava_left"].collate(rows[3:])]
    joined = join_pieces(CommonLength("input_ids", PAD), pieces)
    assert torch.equal(joined["input_ids"], MODELS["llava_left"].collate(rows)["input_ids"])


def test_what_pieces_have_for_themselves_is_no_entry_of_the_batch() -> None:
    _, batch = collated("qwen2_vl", 3)
    assert {*batch} == {"input_ids", "attention_mask", "labels", "mm_token_type_ids"}
    assert batch.names - {*batch} == {"pixel_values", "image_grid_thw"}
    # A loss may have changed the tokens that the model is called with.
    again = split_batch(batch.like({**batch}), 1)
    assert [{*part} for part in again] == [{*part} for part in split_batch(batch, 1)]


def test_later_stages_get_no_pixels() -> None:
    _, batch = collated("llava", 2)
    sent = unpack(pack(batch.with_placeholders({"pixel_values"})))
    parts = split_batch(sent, 1)
    assert [part["pixel_values"].shape for part in parts] == [
        part["pixel_values"].shape for part in split_batch(batch, 1)
    ]
    assert not any(part["pixel_values"].any() for part in parts)
    assert torch.equal(sent["input_ids"], batch["input_ids"])


def test_pieces_are_pinned_with_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (seen.append(tensor.shape), tensor)[1])
    _, batch = collated("llava", 2)
    found = batch.changed(pinned)
    assert [{*part} for part in split_batch(found, 1)] == [{*part} for part in split_batch(batch, 1)]
    assert seen.count(batch["input_ids"].shape) == 3
    assert all(part["pixel_values"].shape in seen for part in split_batch(batch, 1))


def test_no_samples_give_no_batch() -> None:
    make = partial(BatchCollator, MODELS["llava"].collate)
    assert make(num_pieces=2)([]) == make()([]) == {}
