"""Base weights in 4 and 8 bits: released, filled, moved as what they are; other bytes or scales are other weights."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.splitters.adapters import why_unsplittable
from hf_pipetransformer.splitters.quantized import (
    is_packed,
    named_scales,
    num_bytes,
    prepare_quantized,
    put_in_evaluation_mode,
    why_not_moved,
)
from hf_pipetransformer.training.builder import PipelineBuilder
from tests.cache.test_cache_run import Known, cache_events
from tests.splitters.test_adapters import arguments
from tests.support.adapted import adapted, base_of, data_of


NAME = "model.layers.1.mlp.up_proj.weight"  # 128 x 64 weights.
BATCH = {"input_ids": torch.arange(1, 33).view(2, 16)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**BATCH).logits


@pytest.mark.parametrize(
    ("family", "scales"),
    [
        # 128 blocks of 64 weights, a byte each; a code of 256 for these, one float32 for 256 of them, and their mean.
        ("llama-nf4", 128 + 4 * (16 + 256 + 1 + 1)),
        ("llama-fp4", 4 * (128 + 16)),
    ],
)
def test_a_weight_takes_half_a_byte_and_its_scales(family: str, scales: int) -> None:
    assert num_bytes(base_of(family).get_parameter(NAME)) == 128 * 64 // 2 + scales


def test_in_8_bits_it_takes_a_byte_and_each_row_a_scale() -> None:
    model = base_of("llama-int8")
    for _ in range(2):
        prepare_quantized(model)
        assert num_bytes(model.get_parameter(NAME)) == 128 * 64 + 4 * 128
        logits(model)


@pytest.mark.parametrize("family", ["llama-nf4", "llama-fp4", "llama-int8"])
def test_weights_that_were_released_compute_the_same_once_they_are_filled(family: str) -> None:
    model = base_of(family)
    prepare_quantized(model)
    expected, store = logits(model), ParameterStore(model)
    bytes_of = {name: p.detach().clone() for name, p in store.named().items() if "layers" in name}
    store.release(keep=set(store.named()) - set(bytes_of))
    released = store.named()[NAME]
    assert released.is_meta and released.dtype is (torch.int8 if family == "llama-int8" else torch.uint8)
    store.fill({name: value.data for name, value in bytes_of.items()})
    assert type(store.named()[NAME]) is type(released) is not torch.nn.Parameter
    assert torch.equal(logits(model), expected)


def test_bytes_packed_for_inference_are_unpacked_and_stay_so() -> None:
    model = base_of("llama-nf4").eval()
    if not model.model.layers[1].mlp.up_proj.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512 for bfloat16")
    before = model.get_parameter(NAME).detach().clone()
    logits(model)
    assert model.get_parameter(NAME).shape != before.shape
    prepare_quantized(model)
    assert torch.equal(model.get_parameter(NAME), before)
    logits(model)
    assert torch.equal(model.get_parameter(NAME), before)


def test_a_processor_that_packs_for_inference_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = base_of("llama-nf4")
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = True
    topology = SimpleNamespace(rank=0)
    builder: Any = SimpleNamespace(
        context=SimpleNamespace(trainer=SimpleNamespace(model=model), topology=topology, args=None)
    )
    with pytest.raises(AttributeError):  # It goes on with the inspection, for which this is too little.
        PipelineBuilder.inspect(builder, None, is_training=True)
    assert "packs weights of 4 bits anew in the first evaluation" in caplog.text
    assert not prepare_quantized(model)


@pytest.mark.parametrize(("family", "dtype"), [("qwen2-nf4", torch.bfloat16), ("qwen2-int8", torch.float32)])
def test_forwards_leave_biases_as_they_are(family: str, dtype: torch.dtype) -> None:
    """Otherwise ranks that have run a layer hold its bias in another dtype than those that have not."""
    model = base_of(family)
    prepare_quantized(model)
    bias = model.get_parameter("model.layers.1.self_attn.q_proj.bias")
    address = bias.data_ptr()
    assert bias.dtype is dtype and bias.any()
    with torch.autocast("cpu", torch.bfloat16):
        logits(model)
    assert bias.data_ptr() == address


def test_in_8_bits_no_bytes_stay_that_were_released() -> None:
    model = base_of("llama-int8")
    logits(model)
    prepare_quantized(model)
    logits(model)
    address = model.get_parameter(NAME).data_ptr()

    def alive() -> bool:
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        return any(each.dtype is torch.int8 and each.data_ptr() == address for each in tensors)

    assert alive()
    ParameterStore(model).release(keep=set())
    assert not alive()


def test_frozen_rows_in_8_bits_are_independent_of_their_batch() -> None:
    """Evaluation is not: an outlier in one row changes how the others are rounded."""
    model = base_of("llama-int8")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight *= 3
    prepare_quantized(model)
    for set_mode, depends in ((put_in_evaluation_mode, False), (torch.nn.Module.eval, True)):
        set_mode(model)
        with torch.no_grad():
            whole, alone = model(**BATCH).logits[:1], model(BATCH["input_ids"][:1]).logits
        assert torch.allclose(whole, alone, rtol=1e-5, atol=1e-6) is not depends


def test_a_layer_in_8_bits_computes_as_it_did_before_it_was_prepared() -> None:
    expected, model = logits(base_of("llama-int8")), base_of("llama-int8")
    prepare_quantized(model)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(copy.deepcopy(model)), expected)


def losses(folder: Path, family: str, is_given: bool = True) -> list[float]:
    """Train on two micro-batches; the model is given, or made by the trainer."""
    given = {"model": adapted(family, "lora")} if is_given else {"model_init": lambda: adapted(family, "lora")}
    args = arguments(folder, pipeline_parallel_num_microbatches=2)
    trainer = PipeTransformerTrainer(args=args, **given, **data_of(family))
    trainer.train()
    assert not any(p.quant_state.shape[0] == p.shape[0] for p in trainer.model.parameters() if is_packed(p))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_model_that_the_trainer_makes_is_not_packed_either(tmp_path: Path) -> None:
    """Packed bytes have no gradients."""
    assert losses(tmp_path / "made", "llama-nf4", is_given=False) == losses(tmp_path / "given", "llama-nf4")


def test_bytes_may_be_stored_as_another_dtype(tmp_path: Path) -> None:
    assert losses(tmp_path / "bfloat16", "llama-stored") == losses(tmp_path / "uint8", "llama-fp4")


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({"quantization_method": SimpleNamespace(value="gptq")}, "quantized by gptq is not split"),
        ({"is_loaded_in_4bit": True}, None),
        ({"is_loaded_in_8bit": True}, None),
    ],
)
def test_other_kinds_are_refused_by_their_names(marks: dict[str, Any], words: str | None) -> None:
    reason = why_not_moved(SimpleNamespace(is_quantized=True, **marks))
    assert reason is None if words is None else words in str(reason)


def test_adapters_on_weights_of_another_kind_are_refused() -> None:
    model = adapted("llama", "lora")
    model.get_base_model().is_quantized = True
    assert "quantized" in str(why_unsplittable(model))


def hits(folder: Path, model: Any) -> list[int]:
    """Train with a store that earlier runs kept; return the records that were read, by epoch."""
    options = {"activation_cache": "on", "activation_cache_keep": True, "activation_cache_dir": str(folder / "cache")}
    args = arguments(folder / "run", num_train_epochs=2, max_steps=-1, **options)
    data = data_of("llama")
    trainer = PipeTransformerTrainer(model, args, **{**data, "train_dataset": Known(data["train_dataset"])})
    trainer.train()
    return [event["hits"] for event in cache_events(trainer, "epoch")][-2:]


def test_records_of_other_scales_are_not_served(tmp_path: Path) -> None:
    """Equal bytes with other scales are other weights."""
    first = hits(tmp_path, adapted("llama-fp4", "upper"))
    again = hits(tmp_path, adapted("llama-fp4", "upper"))
    model = adapted("llama-fp4", "upper")
    scale = next(scale for name, key, scale in named_scales(model) if ".0.mlp.up_proj" in name and "absmax" in key)
    scale *= 2
    assert (first[0], again[0] > 0, hits(tmp_path, model)[0]) == (0, True, 0)
