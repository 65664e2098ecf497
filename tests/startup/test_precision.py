"""Checks at the start compute in full precision, whatever the run computes in; and what may be a placeholder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.startup.model import in_float32, in_full_precision, undisturbed
from tests.support.models import build_model, collate, make_rows, probed_with


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_lifted_and_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    model = build_model("bert_masked").to(dtype)
    parameters, before = dict(model.named_parameters()), snapshot(model)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    batch = collate(make_rows("bert_masked", 4))
    with in_full_precision(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model(**batch).loss.backward()
    assert all(parameters[name] is p and p.dtype is dtype for name, p in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    images = in_float32(
        SampleBatch({"pixel_values": torch.ones(2, dtype=torch.float16), "labels": torch.ones(2).long()})
    )
    assert [value.dtype for value in images.values()] == [torch.float32, torch.int64]


def test_autocast_is_off_also_where_the_loss_turns_it_on() -> None:
    model, batch = build_model("bert_sequence"), collate(make_rows("bert_sequence", 4))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    exact = model(**batch).loss
    assert not torch.equal(loss(), exact)
    with torch.autocast("cpu", torch.bfloat16):
        with in_full_precision(model):
            assert torch.equal(loss(), exact)
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.equal(loss(), exact)
    assert not torch.is_autocast_enabled("cpu")


def test_products_are_not_rounded_inside_and_as_before_after() -> None:
    model = build_model("bert_sequence")
    kernels: Any = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
    before = [kernel.fp32_precision for kernel in kernels]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with in_full_precision(model):
            assert [kernel.fp32_precision for kernel in kernels] == ["ieee"] * 3
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before[2]
    assert [kernel.fp32_precision for kernel in kernels] == before


def test_attention_that_takes_half_precision_only_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert query.dtype is torch.bfloat16
        return sdpa_attention_forward(module, query, *args, **kwargs)

    # What transformers takes for a flash attention by its name.
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *_args, **_kwargs: None)
    AttentionInterface.register("picky_flash", picky)
    model, batch = build_model("bert_sequence").bfloat16(), collate(make_rows("bert_sequence", 4))
    model.set_attn_implementation("picky_flash")
    with undisturbed(model):
        probed_with(model, find_splitter(model), lambda inputs: model(**inputs).loss, batch)
    assert model.config._attn_implementation == "picky_flash"


def probed(loss: Callable[[PreTrainedModel, dict[str, Any]], torch.Tensor], weights: torch.dtype) -> Any:
    model, batch = build_model("vit").to(weights), collate(make_rows("vit", 6))
    with undisturbed(model):
        return probed_with(model, find_splitter(model), lambda inputs: loss(model, inputs), batch)


def of_the_head_alone(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).loss


def with_a_teacher(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """A thousandth of a thousandth of the loss hangs on the images: below every tolerance."""
    outputs = model(**inputs)
    taught = inputs["pixel_values"].to(outputs.logits.dtype).flatten(1)[:, : outputs.logits.shape[1]]
    return outputs.loss + 1e-6 * (outputs.logits * taught).mean()


def with_a_gradient_only(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """The images change no bit of the loss."""
    loss = model(**inputs).loss
    return loss + 1e-6 * inputs["pixel_values"].square().mean() * (loss - loss.detach())


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_later_stages_get_the_images_if_anything_reads_them(weights: torch.dtype) -> None:
    assert probed(of_the_head_alone, weights).placeholders == {"pixel_values"}
    for loss in (with_a_teacher, with_a_gradient_only):
        assert probed(loss, weights).placeholders == set()


def test_the_own_precision_of_the_run_is_what_stages_send() -> None:
    found = probed(of_the_head_alone, torch.bfloat16)
    assert set(found.boundary_dtypes) == {torch.bfloat16}


def test_a_small_difference_of_the_split_model_is_seen_under_bf16() -> None:
    model, batch = build_model("vit").bfloat16(), collate(make_rows("vit", 6))
    splitter = find_splitter(model)
    right = splitter.run_mlp
    splitter.run_mlp = lambda layer, hidden: right(layer, hidden) * 1.001
    with undisturbed(model), pytest.raises(UnsupportedModelError, match="when it is split"):
        probed_with(model, splitter, lambda inputs: model(**inputs).loss, batch)
