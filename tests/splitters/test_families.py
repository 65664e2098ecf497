"""Every model family in one process: its splitter, its cuts, the self-check, and what is refused."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from importlib.metadata import requires, version

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertModel,
    DataCollatorWithFlattening,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    SiglipConfig,
    SiglipModel,
    SwinConfig,
    SwinForImageClassification,
)

from hf_pipetransformer.data.batches import SampleBatch, note_samples
from hf_pipetransformer.splitters.base import GenericSplitter, UnsupportedModelError
from hf_pipetransformer.splitters.families import (
    BeitSplitter,
    BertSplitter,
    DebertaV2Splitter,
    Dinov2Splitter,
    DistilBertSplitter,
    ModernBertSplitter,
    MPNetSplitter,
    SiglipSplitter,
    ViTSplitter,
    find_splitter,
)
from hf_pipetransformer.splitters.structure import trace_structure
from hf_pipetransformer.startup.model import undisturbed
from hf_pipetransformer.startup.rows import check_rows
from scripts.bench.tables import written_table
from tests.distributed.cases import CI_CASES, FAMILY_MODELS, LAYOUTS, PRODUCT, SLOW_CASES
from tests.families_table import PAGE, families_table, frozen_table, record_table
from tests.support.models import (
    MODELS,
    NUM_LAYERS,
    attention_implementations,
    build_model,
    collate,
    make_rows,
    probed_with,
)


SPLITTERS = {
    "BERT": BertSplitter,
    "RoBERTa": BertSplitter,
    "XLM-RoBERTa": BertSplitter,
    "DistilBERT": DistilBertSplitter,
    "ELECTRA": BertSplitter,
    "MPNet": MPNetSplitter,
    "DeBERTa-v2, v3": DebertaV2Splitter,
    "ModernBERT": ModernBertSplitter,
    "ViT": ViTSplitter,
    "DeiT": ViTSplitter,
    "DINOv2": Dinov2Splitter,
    "DINOv2 with registers": Dinov2Splitter,
    "BEiT": BeitSplitter,
    "SigLIP (vision)": SiglipSplitter,
    "AST": ViTSplitter,
}

# Weights that all stages use, by model; other weights belong to one block, or are tied to the head.
SHARED = {
    "mpnet_question": {"mpnet.encoder.relative_attention_bias.weight"},
    "deberta_sequence": {
        "deberta.encoder.rel_embeddings.weight",
        "deberta.encoder.LayerNorm.weight",
        "deberta.encoder.LayerNorm.bias",
    },
    "beit": {"beit.shared_position_bias.relative_position_bias_table"},
}

NUM_BLOCKS = 2 * NUM_LAYERS + 2


def probe(model, splitter, batch):
    with undisturbed(model):
        return probed_with(model, splitter, lambda inputs: model(**inputs).loss, batch)


def structure_of(name):
    model = build_model(name)
    return trace_structure(model, find_splitter(model), lambda: model(**collate(make_rows(name, 3))))


@pytest.mark.parametrize("name", MODELS)
def test_each_family_has_its_splitter(name):
    splitter = find_splitter(build_model(name))
    family = MODELS[name].family
    assert type(splitter) is SPLITTERS.get(family), f"SPLITTERS of this file says which splitter {family} has"
    assert structure_of(name).cut_positions() == list(range(NUM_BLOCKS + 1))


@pytest.mark.parametrize("name", MODELS)
def test_the_split_model_passes_the_self_check_with_every_attention(name):
    batch = collate(make_rows(name, 6))
    attentions = attention_implementations(build_model(name))
    assert attentions
    for attention in attentions:
        model = build_model(name, attention=attention)
        assert model.config._attn_implementation == attention
        probe(model, find_splitter(model), batch)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_half_fails_the_self_check(name):
    model = build_model(name)
    splitter = find_splitter(model)
    right = splitter.run_mlp
    splitter.run_mlp = lambda layer, hidden: right(layer, hidden) - 0.01 * hidden
    with pytest.raises(UnsupportedModelError, match="when it is split"):
        probe(model, splitter, collate(make_rows(name, 6)))


def test_a_count_of_calls_is_named_as_the_cause_of_a_difference():
    model, calls = build_model("bert_sequence"), []

    def loss(inputs):
        calls.append(None)
        return model(**inputs).loss * len(calls)

    with undisturbed(model), pytest.raises(UnsupportedModelError, match="in its next call: something counts calls"):
        probed_with(model, find_splitter(model), loss, collate(make_rows("bert_sequence", 6)))


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_is_used_where_the_structure_says(name):
    """A stage holds nothing else, so each half of a layer must run while all other weights are broken."""
    model, batch = build_model(name), collate(make_rows(name, 3))
    splitter, users = find_splitter(model), structure_of(name).blocks_of_parameter
    tied = {key for key, blocks in users.items() if blocks == (0, NUM_BLOCKS - 1)}
    everywhere = {key for key, blocks in users.items() if blocks == tuple(range(NUM_BLOCKS))}
    assert len(tied) == (MODELS[name].task == "masked")
    assert everywhere == SHARED.get(name, set())
    assert all(len(users[key]) == 1 for key in users.keys() - tied - everywhere)
    for index, layer in enumerate(splitter.layers(model)):
        hidden, args, kwargs = inputs_of(layer, lambda: model(**batch))
        halves = {
            2 * index + 1: partial(splitter.run_attention, layer, hidden, *args, **kwargs),
            2 * index + 2: partial(splitter.run_mlp, layer, hidden),
        }
        for block, run in halves.items():
            with torch.no_grad():
                expected = run()
                with broken(p for key, p in model.named_parameters() if block not in users[key]):
                    assert torch.equal(run(), expected)


def inputs_of(layer, forward):
    """The hidden state and the other arguments that `layer` gets in a forward."""
    calls = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        forward()
    hook.remove()
    args, kwargs = calls[0]
    return args[0], args[1:], kwargs


@contextmanager
def broken(parameters):
    kept = [(parameter, parameter.clone()) for parameter in parameters]
    for parameter, _ in kept:
        parameter.fill_(torch.nan)
    yield
    for parameter, value in kept:
        parameter.copy_(value)


@pytest.mark.parametrize("name", MODELS)
def test_the_embeddings_alone_are_replaced_by_what_a_stage_receives(name):
    kinds = [type(entry).__name__ for entry in structure_of(name).entries]
    projection = ["Linear"] if name == "electra_token" else []
    assert kinds[1:] == projection
    assert kinds[0].endswith("Embeddings")


def albert():
    sizes = {"vocab_size": 64, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 64}
    return AlbertForSequenceClassification(AlbertConfig(**sizes, num_hidden_layers=4, num_attention_heads=4))


def swin():
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 2}
    return SwinForImageClassification(SwinConfig(**sizes, depths=[1, 1], num_heads=[2, 2]))


def siglip_with_text():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text, vision = {**sizes, "vocab_size": 64}, {**sizes, "image_size": 16, "patch_size": 8}
    return SiglipModel(SiglipConfig(text_config=text, vision_config=vision))


def deberta_with_convolution():
    config = build_model("deberta_sequence").config
    config.conv_kernel_size = 3
    return DebertaV2ForSequenceClassification(config)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (albert, "shared layers"),
        (swin, "no single stack"),
        (siglip_with_text, "has the towers"),
        (deberta_with_convolution, "has a convolution beside its first layer"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(build, reason):
    model = build()
    with pytest.raises(UnsupportedModelError, match=reason):
        find_splitter(model).layers(model)


def test_a_family_without_a_splitter_is_cut_between_layers():
    config = DistilBertConfig(vocab_size=64, dim=32, n_layers=4, n_heads=4, hidden_dim=64, num_labels=3)
    model = DistilBertForSequenceClassification(config)
    found = probe(model, GenericSplitter(), collate(make_rows("bert_sequence", 6)))
    assert found.structure.cut_positions() == [0, 1, 3, 5, 7, 9, 10]
    model.config.model_type = "unheard-of"
    assert type(find_splitter(model)) is GenericSplitter


def test_every_family_and_attention_is_compared_with_trainer():
    implementations = {name: attention_implementations(build_model(name)) for name in FAMILY_MODELS}
    cases = [case for layout in LAYOUTS for case in CI_CASES[layout] + SLOW_CASES[layout]]
    compared = {(MODELS[c.model].family, c.attention or implementations.get(c.model, [""])[0]) for c in cases}
    for name in FAMILY_MODELS:
        assert {(MODELS[name].family, attention) for attention in implementations[name]} <= compared
        is_run = any(MODELS[case.model].family == MODELS[name].family for case in CI_CASES[2, 1])
        assert is_run, f"CI_CASES[2, 1] of tests/distributed/cases.py needs a run of {name}"
    for layout in [(2, 1), (2, 2), (4, 1)]:
        assert {case.model for case in PRODUCT} == MODELS.keys()
        assert all(case in CI_CASES[layout] + SLOW_CASES[layout] for case in PRODUCT)


def test_the_table_in_docs_models_is_up_to_date():
    """Run `make tables` if it is not. The version is that of the last time somebody did."""
    page = PAGE.read_text(encoding="utf-8")
    written = written_table(page, "families")
    found = re.search(r"\(transformers ([\d.]+)\)", written)
    assert found is not None
    assert written == families_table(found[1])
    needs = next(r for r in map(Requirement, requires("hf-pipetransformer")) if r.name == "transformers")
    assert Version(found[1]) in needs.specifier
    assert Version(found[1]) <= Version(version("transformers"))
    if version("transformers") == found[1]:
        assert written_table(page, "families.json") == record_table()
        assert written_table(page, "frozen_families.json") == frozen_table()


# ---- packed inputs ----


TEXTS = [{"input_ids": list(range(5, 5 + length)), "labels": [0] * length} for length in (3, 1, 4)]


def test_padded_batches_pass():
    for name in MODELS:
        check_rows(SampleBatch(collate(make_rows(name, 6))), 6)
    check_rows(SampleBatch({"features": torch.zeros(6, 2)}), 6)


@pytest.mark.parametrize(
    "positions",
    [
        [[0, 1, 2, 3], [0, 1, 2, 3]],
        [[2, 3, 4, 5], [2, 3, 1, 1]],
        [[0, 0, 1, 2], [0, 1, 2, 3]],
        [[0, 1, 2, 3]],
    ],
)
def test_positions_without_a_restart_pass(positions):
    check_rows(SampleBatch({"input_ids": torch.ones(2, 4).long(), "position_ids": torch.tensor(positions)}), 2)


def test_masked_positions_do_not_count():
    """Padding on the left is often given position 1."""
    inputs = {"input_ids": torch.ones(2, 4).long(), "position_ids": torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])}
    with pytest.raises(ValueError, match="begin again"):
        check_rows(SampleBatch(inputs), 3)
    with pytest.raises(ValueError, match="3 samples .* 2 rows"):
        check_rows(SampleBatch({**inputs, "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])}), 3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"return_position_ids": False, "return_flash_attn_kwargs": True},
            "The collator concatenates samples: .* with cu_seq_lens_q",
        ),
        ({"return_position_ids": False, "return_seq_idx": True}, "seq_idx"),
        ({"return_position_ids": False}, r"3 samples gave a batch whose 'input_ids' has shape \(1, 8\), 1 rows"),
    ],
)
def test_flattened_samples_that_no_positions_tell_apart_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        check_rows(note_samples(DataCollatorWithFlattening(**options)(TEXTS), 3), 3)
    assert "DataCollatorWithPadding" in str(refused.value)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_flattened_samples_with_positions_pass(options):
    batch = note_samples(DataCollatorWithFlattening(**options)(TEXTS), 3)
    check_rows(batch, 3)
    assert batch.sequences is not None


def test_two_accounts_of_where_sequences_begin_are_refused():
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(TEXTS)
    batch["cu_seq_lens_k"] = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_k says that the sequences .* \[0, 4, 8\], .* \[0, 3, 4, 8\]"):
        check_rows(note_samples(batch, 3), 3)


def test_flattened_samples_with_one_label_are_refused():
    batch = DataCollatorWithFlattening()(TEXTS) | {"labels": torch.tensor([1])}
    with pytest.raises(ValueError, match=r"shape \(1,\): expected \(1, 8\), a label for each token"):
        check_rows(note_samples(batch, 3), 3)


def test_rows_of_several_samples_each_are_refused():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"Several samples stand in row 0 .* begin again, \[0, 1, 2, 0, 1\]"):
        check_rows(SampleBatch({"input_ids": torch.ones(2, 5).long(), "position_ids": positions}), 4)


def test_a_packed_data_set_passes():
    """One row a sample, whatever stands in it: micro-batches and replicas take such rows whole."""
    inputs = {"input_ids": torch.ones(2, 5).long(), "position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])}
    check_rows(SampleBatch(inputs), 2)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_batch_with_other_rows_than_samples_is_refused(rows):
    with pytest.raises(ValueError, match=f"4 samples .* {rows} rows"):
        check_rows(SampleBatch({"pixel_values": torch.zeros(rows, 3, 4, 4)}), 4)
    with pytest.raises(ValueError, match=f"4 samples .* {rows} rows"):
        check_rows(SampleBatch({"features": torch.zeros(rows, 3)}), 4, main_input="features")


def test_a_module_around_two_models_of_a_family_is_refused() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
            self.one, self.other = BertModel(self.config), BertModel(self.config)

    with pytest.raises(UnsupportedModelError, match="modules with a stack of layers"):
        BertSplitter().layers(Two())
