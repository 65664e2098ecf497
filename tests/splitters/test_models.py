"""The tiny models must be hard enough: what they leave out, no equality test can see."""

import copy

import pytest
import torch
from torch import nn

from hf_pipetransformer.splitters.families import find_splitter
from tests.support.models import (
    IGNORED,
    MODELS,
    NUM_LAYERS,
    build_model,
    collate,
    has_zero_gradient,
    make_dataset,
    make_rows,
    real_positions,
)


def loss_of(model, rows):
    return model(**collate(rows)).loss


@pytest.mark.parametrize("name", MODELS)
def test_models_and_data_are_always_alike(name):
    first, second = build_model(name, seed=3), build_model(name, seed=3)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    assert make_rows(name, 5, seed=1) == make_rows(name, 9, seed=1)[:5]
    assert make_rows(name, 5, seed=1) != make_rows(name, 5, seed=2)
    assert list(make_dataset(name, 4)[1]) == list(make_rows(name, 4)[1])
    assert sum(isinstance(module, nn.Dropout) and module.p > 0 for module in first.modules()) == 0
    assert len(find_splitter(first).layers(first)) == NUM_LAYERS


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].task not in ("image", "audio")])
def test_text_has_changing_lengths_and_padding_matters(name):
    rows = make_rows(name, 16)
    lengths = {len(row["input_ids"]) for row in rows}
    assert len(lengths) > 5
    model = build_model(name)
    batch = collate(rows)
    with torch.no_grad():
        masked = model(**batch).loss
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        assert abs(model(**batch).loss - masked) > 1e-4 * masked


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].task in ("token", "masked")])
def test_token_batches_weigh_differently(name):
    counts = [sum(label != IGNORED for label in row["labels"]) for row in make_rows(name, 53)]
    assert len(set(counts)) > 5
    assert counts.count(0) >= 8


def test_masked_language_model_shares_its_embedding_with_its_head():
    model = build_model("bert_masked")
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_moves_the_loss(name):
    rows = make_rows(name, 8)
    model = build_model(name)
    whole = loss_of(model, rows)
    for layer in range(NUM_LAYERS):
        changed = copy.deepcopy(model)
        stack = find_splitter(changed).layers(changed)
        for parameter in stack[layer].parameters():
            parameter.data.mul_(1.1)
        assert abs(loss_of(changed, rows) - whole) > 1e-4 * abs(whole)


@pytest.mark.parametrize("name", MODELS)
def test_only_parameters_without_any_gradient_are_left_out_of_comparisons(name):
    model = build_model(name).double()
    rows = make_rows(name, 8)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in collate(rows).items()}
    model(**batch).loss.backward()
    sizes = {key: p.grad.abs().max() for key, p in model.named_parameters() if p.grad is not None}
    largest = max(sizes.values())
    left_out = {key for key in sizes if has_zero_gradient(name, key)}
    assert left_out == {key for key, size in sizes.items() if size < 1e-12 * largest}
    assert left_out == {key for key, size in sizes.items() if size < 1e-6 * largest}


@pytest.mark.parametrize("name", MODELS)
def test_which_losses_honour_the_number_of_items(name):
    batch = collate(make_rows(name, 8))
    model = build_model(name)
    with torch.no_grad():
        plain = model(**batch).loss
        scaled = model(**batch, num_items_in_batch=torch.tensor(16)).loss
    changed = not torch.isclose(plain, scaled)
    assert changed == MODELS[name].loss_uses_num_items


def test_real_positions_cover_the_tokens_only():
    lengths = [len(row["input_ids"]) for row in make_rows("bert_token", 13)]
    positions = real_positions("bert_token", 13)
    assert positions.sum(dim=1).tolist() == lengths
    assert real_positions("vit", 13) is None
