"""What several stages cannot generate is refused, and what replicas generate is joined as one process pads it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from hf_pipetransformer.engine.token_program import KVBuffer
from hf_pipetransformer.runtime.generation import check_generation, join_tokens, settings_of
from tests.support.decoders import make_decoder
from tests.support.models import build_model


def refuse(model: Any, **options: Any) -> None:
    check_generation(model, settings_of(model, options), options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 3}, "beam_search reorders or takes back"),
    ({"num_beams": 3, "do_sample": True}, "beam_sample reorders"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search reorders"),
    ({"assistant_model": object()}, "assisted_generation reorders"),
    ({"prompt_lookup_num_tokens": 3}, "assisted_generation reorders"),
    ({"cache_implementation": "static"}, "cache_implementation='static', and the stages have a cache of their own"),
    ({"max_time": 3.0}, "max_time=3.0, and each rank has its own clock"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5 calls the model twice"),
    ({"output_hidden_states": True}, "output_attentions and output_hidden_states are those of all layers"),
    ({"past_key_values": object()}, "past_key_values is the caller's own"),
    ({"cache": object()}, "cache is the caller's own"),
    ({"inputs_embeds": torch.zeros(1, 2, 3)}, "inputs_embeds is the caller's own"),
    ({"generation_config": GenerationConfig(num_beams=2)}, "beam_search reorders"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_stages_cannot_generate(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"Several stages cannot generate so: {re.escape(words)}"):
        refuse(make_decoder("llama"), **options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"generation_config": GenerationConfig(top_k=3)}])
def test_what_they_can(options: dict[str, Any]) -> None:
    for name in ("llama", "gemma2", "gpt2"):
        refuse(make_decoder(name), **options)


def test_models_that_stages_cannot_generate_with() -> None:
    sizes: dict[str, Any] = {"vocab_size": 9, "d_model": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8, "d_ff": 8}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder and a decoder"):
        refuse(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)))
    with pytest.raises(ValueError, match=r"layers keep a state beside keys and values \(linear_attention\)"):
        refuse(MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)))
    with pytest.raises(ValueError, match="BertForSequenceClassification cannot generate: expected a causal language"):
        settings_of(build_model("bert_sequence"), {})


@pytest.mark.parametrize(("padding", "ends", "filler"), [(7, [2, 3], 7), (None, [2, 3], 2), (None, 3, 3), (0, 3, 0)])
def test_tokens_of_replicas_are_padded_as_in_one_process(padding: Any, ends: Any, filler: int) -> None:
    settings = GenerationConfig(pad_token_id=padding, eos_token_id=ends)
    parts = [torch.tensor([[1, 4], [1, 5]]), torch.empty(0, 0, dtype=torch.long), torch.tensor([[1, 6, 6, 6]])]
    assert join_tokens(parts, settings).tolist() == [[1, 4, filler, filler], [1, 5, filler, filler], [1, 6, 6, 6]]


def test_keys_of_a_sequence_without_end_are_kept() -> None:
    """Whatever the parts in which they come, and past any length."""
    torch.manual_seed(0)
    keys, kept, start = torch.rand(2, 3, 400, 4), KVBuffer(0), 0
    for size in (7, 1, 1, 60, 1, 200, 1, 129):
        all_of_them = kept.extend(keys[..., start : start + size, :], start)
        start += size
        assert torch.equal(all_of_them, keys[..., :start, :])
    assert start == 400
