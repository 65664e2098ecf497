"""Which inputs may be cached: a function of the sample's index alone, with padding that follows a rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from hf_pipetransformer.cache.inputs import NUM_DRAWS, NUM_SAMPLES, PaddingRule, examine_inputs
from hf_pipetransformer.data.batches import real_lengths, sample_digests
from tests.support.models import collate, make_dataset


TEXT = ("input_ids", frozenset[str]())
IMAGES = ("pixel_values", frozenset({"pixel_values"}))
IMAGE = (3, 4, 4)


def tokenizer(**options) -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", **options
    )


def texts(lengths, **columns) -> Dataset:
    """Tokenised text of these lengths."""
    generator = random.Random(0)
    rows = [[generator.randrange(5, 45) for _ in range(length)] for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], **columns})


LENGTHS = [3, 17, 9, 5, 12, 18, 33, 7, 4, 30, 21, 11]


def images(num_samples: int = 12) -> Dataset:
    pixels = np.random.default_rng(0).normal(size=(num_samples, *IMAGE)).astype(np.float32)
    return Dataset.from_dict({"pixel_values": pixels.tolist(), "labels": list(range(num_samples))})


def with_transform(change) -> Dataset:
    """Images whose pixels go through `change`, one by one, at every reading."""

    def transform(columns):
        pixels = [change(np.asarray(image, dtype=np.float32)) for image in columns["pixel_values"]]
        return {**columns, "pixel_values": pixels}

    dataset = images()
    dataset.set_transform(transform)
    return dataset


def stacked(rows):
    return {
        "pixel_values": torch.stack([torch.as_tensor(row["pixel_values"], dtype=torch.float32) for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


# ---- what is fine ----


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("bert_sequence", PaddingRule("multiple", 1)),
        ("bert_token", PaddingRule("multiple", 1)),
        ("bert_masked", PaddingRule("multiple", 1)),
        ("bert_question", PaddingRule("fixed", 20)),
        ("vit", PaddingRule("none")),
    ],
)
def test_data_that_never_changes_is_fine(name, padding):
    report = examine_inputs(make_dataset(name, 40), collate, *(IMAGES if name == "vit" else TEXT))
    assert (report.reason, report.padding) == (None, padding)
    assert report.seconds_per_sample > 0


def test_the_fields_of_text_are_found():
    dataset = texts(LENGTHS, labels=list(range(12)), weights=[[0.5, 1.0]] * 12)
    report = examine_inputs(dataset, DataCollatorWithPadding(tokenizer()), *TEXT)
    assert report.token_fields == {"input_ids": torch.int64, "attention_mask": torch.int64}
    assert report.sample_fields == {"labels": (torch.int64, ()), "weights": (torch.float32, (2,))}


def test_fill_values_are_what_the_collator_pads_with():
    dataset = texts(LENGTHS, labels=[[1] * length for length in LENGTHS])
    collator = DataCollatorForTokenClassification(tokenizer())
    assert examine_inputs(dataset, collator, *TEXT).fill_values == {
        "input_ids": 0,
        "attention_mask": 0,
        "labels": -100,
    }
    unpadded = examine_inputs(texts([9] * 12), default_data_collator, *TEXT)
    assert (unpadded.reason, unpadded.fill_values) == (None, {})


def test_floating_point_values_of_tokens_are_token_fields():
    def collate_weighted(rows):
        batch = collate(rows)
        return {**batch, "weights": batch["input_ids"] / 7 * batch["attention_mask"]}

    report = examine_inputs(texts(LENGTHS), collate_weighted, *TEXT)
    assert report.token_fields["weights"] == torch.float32


def test_images_that_only_the_embeddings_read_are_no_field():
    report = examine_inputs(images(), stacked, *IMAGES)
    assert report.token_fields == {}
    assert report.sample_fields == {"labels": (torch.int64, ())}


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_a_small_data_set_is_fine(num_samples):
    assert examine_inputs(images(num_samples), stacked, *IMAGES).reason is None
    assert examine_inputs(texts(LENGTHS[:num_samples]), collate, *TEXT).reason is None


def test_transforms_that_are_always_alike_are_fine():
    assert examine_inputs(with_transform(lambda pixels: pixels[..., ::-1].copy()), stacked, *IMAGES).reason is None


def test_the_data_set_is_read_like_a_loader_does():
    class Plain:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            assert isinstance(index, int)
            return {"input_ids": [index + 5] * (index + 1), "attention_mask": [1] * (index + 1)}

    class Fetching(Plain):
        def __getitems__(self, indices):
            return [super(Fetching, self).__getitem__(index) for index in indices]

        def __getitem__(self, index):
            raise NotImplementedError

    for dataset in (Plain(), Fetching()):
        report = examine_inputs(dataset, collate, *TEXT)
        assert (report.reason, report.padding) == (None, PaddingRule("multiple", 1))


# ---- what is random ----


def flip(pixels):
    return pixels[..., ::-1].copy() if torch.rand(()) < 0.5 else pixels


def flip_with_numpy(pixels):
    return pixels[..., ::-1].copy() if np.random.rand() < 0.5 else pixels


def flip_with_python(pixels):
    return pixels[..., ::-1].copy() if random.random() < 0.5 else pixels


@pytest.mark.parametrize("change", [flip, flip_with_numpy, flip_with_python])
def test_a_random_flip_is_found(change):
    report = examine_inputs(with_transform(change), stacked, *IMAGES)
    assert "random augmentation" in report.reason and "'pixel_values'" in report.reason
    assert "or give each image several rows, each augmented in a way of its own" in report.reason
    assert report.padding is None and report.seconds_per_sample > 0


def test_augmentation_of_a_twentieth_of_the_readings_is_found():
    def seldom(pixels):
        return pixels + 1 if random.random() < 0.05 else pixels

    assert "random augmentation" in examine_inputs(with_transform(seldom), stacked, *IMAGES).reason


def test_a_masking_collator_is_found():
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.15)
    report = examine_inputs(texts([12] * 12), collator, *TEXT)
    assert "random tokens or labels: 'input_ids', 'labels'" in report.reason and "mask once" in report.reason


def test_random_labels_of_images_are_found():
    def noisy(rows):
        batch = stacked(rows)
        return {**batch, "labels": batch["labels"] + torch.randint(0, 2, batch["labels"].shape)}

    reason = examine_inputs(images(), noisy, *IMAGES).reason
    assert "random tokens or labels: 'labels'" in reason


# ---- what mixes ----


def mixup(rows):
    batch = stacked(rows)
    share, order = np.random.beta(1.0, 1.0), torch.randperm(len(rows))
    return {**batch, "pixel_values": share * batch["pixel_values"] + (1 - share) * batch["pixel_values"][order]}


def rolled(rows):
    batch = stacked(rows)
    return {**batch, "labels": batch["labels"].roll(1)}


def centred(rows):
    batch = stacked(rows)
    return {**batch, "pixel_values": batch["pixel_values"] - batch["pixel_values"].mean(0)}


def in_order_of_labels(rows):
    return stacked(sorted(rows, key=lambda row: row["labels"]))


@pytest.mark.parametrize(
    ("mixing", "field"),
    [(mixup, "pixel_values"), (rolled, "labels"), (centred, "pixel_values"), (in_order_of_labels, "labels")],
)
def test_collators_that_mix_samples_are_found(mixing, field):
    reason = examine_inputs(images(), mixing, *IMAGES).reason
    assert "mixes samples" in reason and repr(field) in reason


# ---- what cannot be stored ----


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (lambda n: ["a"] * n, "'extra' in the batch, a list"),
        (lambda n: None, "'extra' in the batch, a NoneType"),
        (lambda n: torch.tensor(1.0), "'extra' of shape () in a batch of "),
        (lambda n: torch.zeros(3, n), "'extra' of shape (3, "),
    ],
)
def test_fields_without_a_row_for_each_sample_are_refused(extra, found):
    def collate_extra(rows):
        return {**stacked(rows), "extra": extra(len(rows))}

    reason = examine_inputs(images(), collate_extra, *IMAGES).reason
    assert found in reason and "to use the cache" in reason


def test_unusual_data_sets_are_refused():
    class WithEpochs(list):
        def set_epoch(self, epoch):
            raise NotImplementedError

    rows = list(images())
    assert examine_inputs(rows, stacked, *IMAGES).reason is None
    assert "found a data set with set_epoch" in examine_inputs(WithEpochs(rows), stacked, *IMAGES).reason
    assert "found an empty data set" in examine_inputs([], stacked, *IMAGES).reason
    assert "without length" in examine_inputs(iter(rows), stacked, *IMAGES).reason


def moody(rows):
    batch = stacked(rows)
    return batch if len(rows) > 1 else {"pixel_values": batch["pixel_values"]}


def square(rows):
    mask = collate(rows)["attention_mask"]
    return {**collate(rows), "distances": mask[:, :, None] * mask[:, None, :]}


def even(rows):
    if len(rows) % 2:
        raise ValueError("an even batch size is needed")
    return stacked(rows)


def in_whole_numbers(rows):
    batch = stacked(rows)
    return {**batch, "pixel_values": batch["pixel_values"].long()}


def cut_mask(rows):
    batch = collate(rows)
    return {**batch, "attention_mask": batch["attention_mask"][:, 1:]}


def hiding(rows):
    batch = collate(rows)
    batch["attention_mask"][:, 2:] = 0
    return batch


def one_more(rows):
    padded = torch.nn.functional.pad
    return {name: padded(value, (0, 3)) if value.dim() == 2 else value for name, value in collate(rows).items()}


def on_the_left(rows):
    return DataCollatorWithPadding(tokenizer(padding_side="left"))(rows)


def without_mask(rows):
    return {"input_ids": collate(rows)["input_ids"]}


@pytest.mark.parametrize(
    ("collator", "given", "words"),
    [
        (stacked, ("pixel_values", frozenset()), ["more than the embeddings reads 'pixel_values'"]),
        (stacked, TEXT, ["found a batch without a tensor 'input_ids'"]),
        (list, IMAGES, ["list"]),
        (moody, IMAGES, ["'labels' are absent or of another dtype in"]),
        (even, IMAGES, ["cannot be read and collated in small batches", "an even batch size is needed"]),
        (in_whole_numbers, IMAGES, ["give token ids (batch, seq) or floating point images"]),
        (square, None, ["'distances' of shape (3, 3)", "give it one size in all batches"]),
        (cut_mask, None, ["give one value a token"]),
        (without_mask, None, ["without 'attention_mask', so that padding cannot be told from tokens"]),
        (on_the_left, None, ["padded on the left"]),
        (one_more, None, ["no known rule"]),
        (hiding, None, ["behind the last token"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_batches_that_cannot_be_stored_are_refused(collator, given, words):
    """Images with `given`, text without."""
    reason = examine_inputs(images() if given else texts(LENGTHS), collator, *(given or TEXT)).reason
    assert all(each in reason for each in words), reason


# ---- padding ----


@pytest.mark.parametrize("multiple", [8, 16, 32, 64, 128])
def test_a_multiple_is_found_also_where_lengths_are_alike(multiple):
    collator = DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=multiple)
    # The second lengths all lie in one step of 8: only the shortened sample tells 8 from a fixed 136.
    for lengths in (LENGTHS, [129, 130, 131, 133, 135, 136, 134, 132, 131]):
        expected = PaddingRule("multiple", multiple)
        if multiple >= 64 and lengths is LENGTHS:
            # No sample is longer than one step, so one length explains all that can be seen.
            expected = PaddingRule("fixed", multiple)
        assert examine_inputs(texts(lengths), collator, *TEXT).padding == expected


def test_padding_to_one_length_is_found():
    collator = DataCollatorWithPadding(tokenizer(), padding="max_length", max_length=40)
    report = examine_inputs(texts(LENGTHS), collator, *TEXT)
    assert (report.reason, report.padding) == (None, PaddingRule("fixed", 40))


def test_padding_by_the_data_set_is_found():
    rows = [collate([row, {"input_ids": [0] * 24, "attention_mask": [0] * 24}]) for row in texts([3, 17, 9, 24])]
    dataset = Dataset.from_list([{name: value[0].tolist() for name, value in row.items()} for row in rows])
    report = examine_inputs(dataset, default_data_collator, *TEXT)
    assert (report.reason, report.padding) == (None, PaddingRule("fixed", 24))


def test_text_of_one_length_needs_no_mask():
    dataset = texts([9] * 12).remove_columns("attention_mask")
    report = examine_inputs(dataset, default_data_collator, *TEXT)
    assert report.reason is None and report.padding.length(9) == 9


def test_a_field_that_is_only_by_chance_as_long_as_the_text_is_kept_whole():
    choices = [[int(column % 3 == row % 3) for column in range(24)] for row in range(12)]
    collator = DataCollatorWithPadding(tokenizer(), padding="max_length", max_length=24)
    report = examine_inputs(texts([3, 5, 7, 4] * 3, labels=choices), collator, *TEXT)
    assert report.reason is None
    assert "labels" not in report.token_fields and report.sample_fields["labels"] == (torch.int64, (24,))


def test_the_rule_gives_the_padded_length():
    assert [PaddingRule("multiple", 8).length(longest) for longest in (1, 8, 9)] == [8, 8, 16]
    assert [PaddingRule("multiple", 1).length(longest) for longest in (1, 9)] == [1, 9]
    assert [PaddingRule("fixed", 20).length(longest) for longest in (1, 20, 21)] == [20, 20, 21]
    assert PaddingRule("none").length(0) == 0


# ---- no trace ----


@pytest.mark.parametrize("change", [flip, flip_with_numpy, flip_with_python, lambda pixels: pixels[:, :, :3]])
def test_no_state_of_a_random_number_generator_changes(change):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    np.random.seed(3)
    before = states()
    examine_inputs(with_transform(change), stacked, *IMAGES)
    assert states() == before


def test_every_draw_has_seeds_of_its_own_that_hang_on_nothing_else():
    def drawn():
        found = []

        def recording(rows):
            found.append((random.random(), np.random.rand(), float(torch.rand(()))))
            return stacked(rows)

        assert examine_inputs(images(), recording, *IMAGES).reason is None
        return found

    first = drawn()
    random.random(), np.random.rand(), torch.rand(())
    assert drawn() == first
    assert all(len(set(values)) == NUM_DRAWS for values in zip(*first, strict=True))


def test_a_failing_data_set_leaves_the_generators_alone_too():
    def broken(pixels):
        torch.rand(())
        raise RuntimeError("cannot decode")

    before = torch.get_rng_state()
    assert "cannot decode" in examine_inputs(with_transform(broken), stacked, *IMAGES).reason
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("collator", "times"), [(stacked, 2), (mixup, 3)])
def test_few_samples_are_read(collator, times):
    num_read = 0

    def counted(pixels):
        nonlocal num_read
        num_read += 1
        return pixels

    examine_inputs(with_transform(counted), collator, *IMAGES)
    assert NUM_DRAWS * NUM_SAMPLES < num_read <= times * NUM_DRAWS * NUM_SAMPLES


# ---- lengths and digests ----


def test_real_lengths_end_at_the_last_token_that_the_mask_shows():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert real_lengths({"attention_mask": mask}).tolist() == [2, 3, 0, 4]
    assert real_lengths({"input_ids": mask}).tolist() == [4, 4, 4, 4]
    assert real_lengths({"tokens": mask}, "tokens").tolist() == [4, 4, 4, 4]
    assert real_lengths({"pixel_values": torch.zeros(2, 3, 4, 4)}).tolist() == [0, 0]


TOKEN_FIELDS = ("input_ids", "attention_mask", "labels")


def digests(batch, token_fields=TOKEN_FIELDS):
    return sample_digests(batch, real_lengths(batch), token_fields).tolist()


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
    assert sample_digests(padded, real_lengths(padded), TOKEN_FIELDS).dtype == np.uint64


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


def test_fields_that_are_named_are_cut_and_no_others():
    shown = {**BATCH, "choices": torch.tensor([[1, 0, 0], [0, 1, 0]])}
    changed = {**BATCH, "choices": torch.tensor([[1, 0, 1], [0, 1, 0]])}
    assert digests(shown)[0] != digests(changed)[0]
    # The third column is padding of the first sample.
    assert digests(shown, [*TOKEN_FIELDS, "choices"]) == digests(changed, [*TOKEN_FIELDS, "choices"])
