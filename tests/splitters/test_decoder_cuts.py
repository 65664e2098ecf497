"""Where decoders may be cut: those of Llama's layer and GPT-2 between attention and MLP, the others between layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hf_pipetransformer.splitters.base import GenericSplitter, UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe
from tests.splitters.test_families import broken, inputs_of
from tests.support.decoders import CUT_INSIDE, DECODERS, collate_tokens, make_decoder, make_rows
from tests.support.models import probed_with


def probed(model: Any, splitter: Any) -> Probe:
    """Compares the model with the chain of its smallest stages."""
    return probed_with(model, splitter, lambda inputs: model(**inputs).loss, collate_tokens(make_rows(4)))


@pytest.mark.parametrize("name", DECODERS)
def test_each_family_has_its_splitter_which_gives_what_the_whole_model_gives(name: str) -> None:
    torch.manual_seed(0)
    model = make_decoder(name, initializer_range=0.2).eval()
    splitter = find_splitter(model)
    is_cut_inside = splitter.cuts_inside_layers
    assert is_cut_inside == (name in CUT_INSIDE), "see CUT_INSIDE of tests/support/decoders.py"
    assert probed(model, splitter).structure.cut_positions() == [
        *(range(11) if is_cut_inside else (0, 1, 3, 5, 7, 9, 10))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_with_eager_attention_too(name: str) -> None:
    model = make_decoder(name, initializer_range=0.2, attn_implementation="eager").eval()
    assert model.config._attn_implementation == "eager"
    probed(model, find_splitter(model))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_moe"])
def test_a_wrong_half_is_seen(name: str) -> None:
    model = make_decoder(name, initializer_range=0.2, attn_implementation="eager").eval()
    splitter = find_splitter(model)
    assert probed(model, splitter).structure.cuts_inside_layers
    right = splitter.run_mlp
    splitter.run_mlp = lambda layer, hidden: right(layer, hidden) - 0.01 * hidden  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="when it is split"):
        probed(model, splitter)


@pytest.mark.parametrize("name", CUT_INSIDE)
def test_a_half_uses_no_other_weights_than_the_structure_says(name: str) -> None:
    model, batch = make_decoder(name).eval(), collate_tokens(make_rows(3))
    splitter, users = find_splitter(model), probed(model, find_splitter(model)).structure.blocks_of_parameter
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for index, layer in enumerate(splitter.layers(model)):
            hidden, args, kwargs = inputs_of(layer, lambda: model(**batch, use_cache=False))
            halves = {
                2 * index + 1: partial(splitter.run_attention, layer, hidden, *args, **kwargs),
                2 * index + 2: partial(splitter.run_mlp, layer, hidden),
            }
            for block, run in halves.items():
                expected = run()
                with broken(p for key, p in weights.items() if block not in users[key]):
                    assert torch.equal(run(), expected)


def test_the_generic_splitter_cuts_them_between_layers() -> None:
    model = make_decoder("llama").eval()
    assert probed(model, GenericSplitter()).structure.cut_positions() == [0, 1, 3, 5, 7, 9, 10]


def test_gpt2_may_read_what_an_encoder_said() -> None:
    """Its cross attention belongs to the first half of a layer."""
    torch.manual_seed(0)
    model = make_decoder("gpt2", initializer_range=0.2, add_cross_attention=True).eval()
    batch = collate_tokens(make_rows(4))
    batch["encoder_hidden_states"] = torch.randn(4, 3, model.config.n_embd)
    batch["encoder_attention_mask"] = torch.tensor([[1, 1, 0]] * 4)
    found = probed_with(model, find_splitter(model), lambda inputs: model(**inputs).loss, batch).structure
    assert found.cuts_inside_layers
    assert found.blocks_of_parameter["transformer.h.1.crossattention.c_attn.weight"] == (3,)
