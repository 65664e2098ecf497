"""Rows of several samples: their sequences are found, taken with all that names them, and distributed evenly."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_pipetransformer.data.batches import (
    Axis,
    SampleBatch,
    count_items,
    first_tokens,
    join_outputs,
    note_samples,
    split_batch,
    take_rows,
    take_samples,
)
from hf_pipetransformer.data.flattened import MARKS, Sequences, assign_sequences, find_sequences
from hf_pipetransformer.data.node_shares import replica_slice
from hf_pipetransformer.planning.partition import partition
from tests.support.decoders import make_rows


LENGTHS = (3, 1, 4, 2)
SAMPLES = [{"input_ids": [10 * length + place for place in range(length)]} for length in LENGTHS]
EVERYTHING = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)


def flattened(samples: Any = SAMPLES, collate: Callable[..., Any] = EVERYTHING) -> SampleBatch:
    found = note_samples(collate(samples), len(samples))
    assert isinstance(found, SampleBatch)
    return found


@pytest.mark.parametrize(
    "collate",
    [
        DataCollatorWithFlattening(),
        EVERYTHING,
        DataCollatorWithFlattening(position_ids_start=2),
        DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    ],
)
def test_sequences_begin_where_positions_begin_again(collate: Callable[..., Any]) -> None:
    assert flattened(collate=collate).sequences == Sequences((0, 3, 4, 8, 10), 4)


def test_a_packed_sample_has_several_sequences() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]},
        {"input_ids": [6, 7, 8], "seq_lengths": [3]},
    ]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=10)
    # Each token of padding is a sequence of its own.
    assert flattened(rows, collate).sequences == Sequences((0, 2, 5, 8, 9, 10), 2)
    assert flattened(rows[:1], collate).sequences == Sequences((0, 2, 5, 6, 7, 8, 9, 10), 1)


@pytest.mark.parametrize(
    ("batch", "num_samples"),
    [
        ({"input_ids": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}, 1),
        ({"input_ids": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 2, 3]])}, 2),
        ({"input_ids": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 3, 4]])}, 2),
        ({"input_ids": torch.ones(2, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}, 2),
        ({"input_ids": torch.ones(2, 4), "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}, 2),
        ({"input_ids": torch.ones(1, 4), "cu_seq_lens_q": torch.tensor([0, 2, 4])}, 2),
        ({"pixel_values": torch.ones(2, 3, 4, 4)}, 2),
    ],
)
def test_other_batches_stay_as_they_are(batch: dict[str, Any], num_samples: int) -> None:
    """A single packed row without marks may belong to a model that lets its texts see each other."""
    assert find_sequences(batch, num_samples) is None
    assert note_samples(batch, num_samples) == batch


def test_what_names_sequences_is_that_of_the_sequences_taken() -> None:
    taken = take_rows(flattened(), torch.tensor([2, 0]))
    assert taken["input_ids"].tolist() == [[40, 41, 42, 43, 30, 31, 32]]
    assert taken["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert taken["labels"].tolist() == [[-100, 41, 42, 43, -100, 31, 32]]
    expected = flattened([SAMPLES[2], SAMPLES[0]])
    for name in MARKS:
        own, other = taken[name], expected[name]
        assert type(own) is type(other), name
        if isinstance(own, torch.Tensor):
            assert own.dtype is other.dtype is torch.int32
            assert torch.equal(own, other), name
        else:
            assert own == other
    assert taken.sequences == expected.sequences
    assert taken.size == taken.num_rows == 2


@pytest.mark.parametrize("num_parts", range(1, 9))
def test_parts_hold_each_sequence_once_and_their_outputs_join_to_the_row(num_parts: int) -> None:
    samples = make_rows(7)
    whole = flattened(samples)
    parts = split_batch(whole, num_parts)
    assert len(parts) == min(num_parts, 7)
    assert all(part.sequences is None and part["input_ids"].numel() for part in parts)
    assert sum(count_items(part, shifts_labels=True) for part in parts) == count_items(whole, shifts_labels=True)
    join = Axis.of(whole, [1] * len(parts)).joined

    def outputs_of(batch: dict[str, Any]) -> dict[str, Any]:
        of_next = batch["labels"][:, 1:].clamp(min=0) * 3
        return {"logits": batch["input_ids"][..., None] * 2.0, "of_next": of_next, "loss": torch.tensor(1.0)}

    joined, expected = join_outputs(list(map(outputs_of, parts)), [0.5] * len(parts), join), outputs_of(whole)
    assert torch.equal(joined["logits"], expected["logits"])
    assert torch.equal(joined["of_next"], expected["of_next"])
    assert joined["loss"] == 0.5 * len(parts)


def test_outputs_that_are_not_by_token_are_not_joined() -> None:
    places = torch.cat([torch.arange(3, 8), torch.arange(3)])
    for shapes in ([(1, 2, 5), (1, 5, 5)], [(1, 5), (1, 2)], [(5,), (3,)], [(5, 5), (3, 5)]):
        with pytest.raises(ValueError, match="are cut apart and joined again token by token"):
            Axis(1, places, [5, 3]).joined([torch.zeros(shape) for shape in shapes])


def test_replicas_share_the_sequences_of_their_samples() -> None:
    whole = flattened([{"input_ids": [1] * (4 * number), "seq_lengths": [number] * 4} for number in range(1, 6)],
                      DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))  # fmt: skip
    parts = [take_samples(whole, slice(*bounds)) for bounds in pairwise((0, 2, 5))]
    assert [part.size for part in parts] == [2, 3]
    assert [part.num_rows for part in parts] == [8, 12]
    assert sum(part["input_ids"].shape[1] for part in parts) == whole["input_ids"].shape[1]


@pytest.mark.parametrize("num_empty", range(4))
def test_each_replica_gets_tokens_if_some_samples_have_none(num_empty: int) -> None:
    rows = [{"input_ids": [1] * length} for length in (3, 4, 2, *[0] * num_empty)]
    whole = flattened(rows, DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    size = whole.size
    assert size == whole.num_rows == 3
    for num_replicas in (2, 3):
        parts = [take_samples(whole, replica_slice(size, each, num_replicas)) for each in range(num_replicas)]
        assert sum(part["input_ids"].shape[1] for part in parts) == 9


@pytest.mark.parametrize(("num_tokens", "bounds"), [(10, (0, 3, 4, 8, 10)), (9, (0, 3, 4, 8, 9)), (4, (0, 3, 4))])
def test_a_row_may_end_early(num_tokens: int, bounds: tuple[int, ...]) -> None:
    whole = flattened()
    own = first_tokens(whole, num_tokens)
    assert own.sequences == Sequences(bounds, len(bounds) - 1)
    assert torch.equal(own["input_ids"], whole["input_ids"][:, :num_tokens])
    assert own["cu_seq_lens_q"].tolist() == list(bounds)


# ---- how even parts are ----

BALANCE = 1.1
KINDS = {
    "even texts": (16, lambda draw: draw.randint(16, 48)),
    "sentences": (64, lambda draw: max(2, int(draw.lognormvariate(3, 0.6)))),
    "chats": (32, lambda draw: max(8, int(draw.lognormvariate(5.3, 0.8)))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_parts", [2, 4])
def test_the_largest_part_is_near_the_mean(kind: str, num_parts: int) -> None:
    """Unless the longest sequence alone is above it."""
    (num, length_of), draw = KINDS[kind], random.Random(7)
    excesses = []
    for _ in range(100):
        lengths = [length_of(draw) for _ in range(num)]
        totals = [sum(lengths[number] for number in part) for part in assign_sequences(lengths, num_parts)]
        mean = sum(lengths) / num_parts
        assert sum(totals) == sum(lengths)
        assert max(totals) <= max(BALANCE * mean, max(lengths))
        excesses.append(max(totals) / mean)
    assert sum(excesses) / len(excesses) < 1.05


def test_parts_in_the_order_of_the_row_are_less_even() -> None:
    """The figures of docs/models.md: 16 sequences of 16 to 48 tokens in 4 parts, and the best cuts between them."""
    draw, excess = random.Random(7), {"any": 0.0, "in order": 0.0}
    for _ in range(100):
        lengths = [draw.randint(16, 48) for _ in range(16)]
        cuts = partition([float(length) for length in lengths], 4)
        ways = {
            "any": [sum(lengths[number] for number in part) for part in assign_sequences(lengths, 4)],
            "in order": [sum(lengths[start:stop]) for start, stop in pairwise(cuts)],
        }
        for way, totals in ways.items():
            excess[way] += max(totals) * 4 / sum(lengths) / 100 - 0.01
    assert {way: f"{share:.0%}" for way, share in excess.items()} == {"any": "2%", "in order": "11%"}


def test_parts_are_the_same_whatever_is_equal() -> None:
    assert assign_sequences([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]
    assert assign_sequences([1, 5, 1, 1], 3) == [[0, 3], [1], [2]]
    assert assign_sequences([4], 8) == [[0]]
