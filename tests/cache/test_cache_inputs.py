"""Which batches records are made of, and by what a sample is known again."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_pipetransformer.cache.inputs import SampleForm
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.data.batches import SampleBatch, real_lengths, sample_digests
from hf_pipetransformer.data.flattened import Sequences
from tests.support.models import collate, make_dataset


TEXT = ("input_ids", "attention_mask")


# ---- lengths and digests ----


def test_real_lengths_end_at_the_last_token_that_the_mask_shows():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert real_lengths({"attention_mask": mask}).tolist() == [2, 3, 0, 4]
    assert real_lengths({"input_ids": mask}).tolist() == [4, 4, 4, 4]
    assert real_lengths({"tokens": mask}, "tokens").tolist() == [4, 4, 4, 4]
    assert real_lengths({"pixel_values": torch.zeros(2, 3, 4, 4)}).tolist() == [0, 0]


def digests(batch, pad_token_id=0):
    found = sample_digests(batch, real_lengths(batch), "input_ids", pad_token_id)
    assert found.dtype == np.uint64 and found.shape == (len(batch["input_ids"]), 2)
    return list(map(tuple, found.tolist()))


def test_digests_depend_neither_on_padding_nor_on_partners():
    rows = list(make_dataset("bert_token", 6))
    together = digests(collate(rows))
    assert len(set(together)) == 6
    assert [digests(collate([row]))[0] for row in rows] == together
    padded = {
        name: torch.nn.functional.pad(value, (0, 5), value=-100 if name == "labels" else 0)
        for name, value in collate(rows).items()
    }
    assert digests(padded) == together


BATCH = {
    "input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]),
    "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    "flags": torch.tensor([True, False]),
    "weights": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "boxes": torch.arange(16.0).reshape(2, 2, 4),
}


@pytest.mark.parametrize("name", ["input_ids", "flags", "weights", "boxes"])
def test_every_field_is_in_the_digest_of_its_row_alone(name):
    changed = BATCH[name].clone()
    first = (0,) * changed.dim()
    changed[first] = ~changed[first] if changed.dtype == torch.bool else changed[first] + 1
    before, after = digests(BATCH), digests({**BATCH, name: changed})
    assert before[0] != after[0] and before[1] == after[1]


def test_the_mask_is_in_the_digest():
    holes = torch.tensor([[1, 1, 0], [1, 0, 1]])
    assert digests({**BATCH, "attention_mask": holes})[1] != digests(BATCH)[1]


def test_names_and_dtypes_are_in_the_digest_and_their_order_is_not():
    renamed = {"flagged" if name == "flags" else name: value for name, value in BATCH.items()}
    assert digests(renamed)[0] != digests(BATCH)[0]
    assert digests({**BATCH, "flags": BATCH["flags"].to(torch.uint8)})[0] != digests(BATCH)[0]
    swapped = {**BATCH, "flags": BATCH["weights"], "weights": BATCH["flags"]}
    assert digests(swapped)[0] != digests(BATCH)[0]
    assert digests(dict(reversed(BATCH.items()))) == digests(BATCH)


def test_what_is_not_padding_behind_the_last_token_is_in_the_digest():
    longer = {name: torch.nn.functional.pad(value, (0, 2)) for name, value in BATCH.items() if name in TEXT}
    assert digests(longer) == digests({name: BATCH[name] for name in TEXT})
    # Padded with other tokens than those of the tokenizer, as a model that has no mask in its loss would see.
    assert digests(longer, pad_token_id=1)[0] != digests(longer)[0]
    marked = {**longer, "choices": torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 0, 0]])}
    unmarked = {**longer, "choices": torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]])}
    before, after = digests(unmarked), digests(marked)
    assert before[0] != after[0] and before[1] == after[1]


# ---- batches of which no records are made ----


FORM = SampleForm("input_ids", None, 3, 3, RecordFormat(4, torch.float32), 0, keeps_padding=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": None}, "the batches have no tensor 'input_ids', the model's main input"),
        ({"scale": torch.tensor(2.0)}, r"'scale' in a batch of 2 samples is of shape \(\): let the collator return"),
        ({"names": ["a", "b"]}, "'names' in a batch of 2 samples is a list: let the collator return"),
        ({"crops": torch.zeros(3, 4)}, r"'crops' in a batch of 2 samples is of shape \(3, 4\)"),
        ({"attention_mask": torch.ones(2, 3, 3)}, "beside 'input_ids' of shape .*: give one value a token"),
        ({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "text is padded on the left, or has no token: set"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "text is padded on the left, or has no token: set"),
    ],
)  # fmt: skip
def test_a_batch_that_has_no_row_of_each_sample_to_go_by_is_told_apart(changes, words):
    assert FORM.why_unfit(BATCH) is None
    found = FORM.why_unfit({**BATCH, **changes})
    assert found is not None and re.search(words, found)


def test_rows_that_are_not_those_of_the_samples_or_of_another_size_are_told_apart():
    assert "the collator gave 2 rows for 3 samples: let it return one a sample" in str(FORM.why_unfit(BATCH, 3))
    images = replace(FORM, main_input="pixel_values", shape=(3, 4, 4))
    found = str(images.why_unfit({"pixel_values": torch.zeros(2, 3, 6, 6)}))
    assert (
        "'pixel_values' is of shape (3, 6, 6) a sample, after (3, 4, 4) in the first batch: give it one size" in found
    )


def test_texts_in_one_row_have_no_records_of_their_own():
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    row = SampleBatch({"input_ids": ids}, sequences=Sequences((0, 2, 5), 2))
    assert "2 samples lie in one row of 5 tokens, of which no sample has a record" in str(FORM.why_unfit(row))


def test_a_record_has_the_tokens_that_the_loss_may_see():
    assert FORM.kept_of(BATCH).tolist() == [2, 3] and FORM.length_of(BATCH) == 3
    assert replace(FORM, keeps_padding=True).kept_of(BATCH).tolist() == [3, 3]
    images = replace(FORM, main_input="pixel_values", shape=(3, 4, 4), num_positions=5, record_length=1)
    pixels = {"pixel_values": torch.zeros(2, 3, 4, 4)}
    assert images.why_unfit(pixels) is None
    assert images.kept_of(pixels).tolist() == [1, 1] and images.length_of(pixels) == 5


def test_a_sample_of_one_number_has_a_digest() -> None:
    items = torch.tensor([3, 4, 3])
    first, second, third = sample_digests({"items": items}, np.ones(3, dtype=np.int64), "items", 0).tolist()
    assert first == third != second
