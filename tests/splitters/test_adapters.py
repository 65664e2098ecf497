"""Models with PEFT adapters: inside the layers they are split and frozen with them, others are Trainer's."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PeftType
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
from transformers.utils.quantization_config import GgufConfig

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache.chain import settings_of
from hf_pipetransformer.planning.blocks import trained_elements
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.runtime.pipeline import PipelineShell
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import attention_of, block_of, mlp_of
from hf_pipetransformer.splitters import adapters
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.startup.costs import middle_layers
from hf_pipetransformer.startup.twin import WHOLE
from hf_pipetransformer.state.weights import check_weights, load_weights
from hf_pipetransformer.training.needs import RunOptions
from tests.planning.test_planning import rank_bytes
from tests.support.adapted import ADDS, METHODS, OUTSIDE, adapted, base_of, data_of, lora
from tests.support.costs import block_costs
from tests.support.decoders import make_decoder
from tests.support.models import build_model, collate, make_dataset, probed_with
from tests.support.usages import (
    BERT,
    USAGES,
    Usage,
    assert_same,
    outcome,
    with_adapters,
    with_added_adapter,
    with_prompts,
)


SAID = "in the loop of plain Trainer"
NOTHING = {"freeze_policy": "none", "activation_cache": "auto"}


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)


def trainer_of(model: Any, folder: Path, family: str = "bert", **options: Any) -> PipeTransformerTrainer:
    return PipeTransformerTrainer(model, arguments(folder, **options), **data_of(family))


def arguments(folder: Path, **options: Any) -> PipeTransformerArguments:
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "learning_rate": 0.05, "save_steps": 2, "logging_steps": 1,
    }  # fmt: skip
    return PipeTransformerArguments(**{**common, **options})


def batch_of(family: str) -> dict[str, torch.Tensor]:
    data = data_of(family)
    batch: dict[str, torch.Tensor] = data["data_collator"]([data["train_dataset"][i] for i in range(4)])
    return batch


def probed(model: Any, family: str) -> Probe:
    batch = batch_of(family)
    return probed_with(model.eval(), find_splitter(model), lambda inputs: model(**inputs).loss, batch)


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


# ---- adapters inside the layers ----


@pytest.mark.parametrize(
    ("family", "method"),
    [*(("llama", method) for method in METHODS), ("bert", "lora"), ("bert", "biases"), ("gpt2", "ends")],
)
def test_the_split_model_gives_what_the_whole_one_gives_and_layers_own_their_adapters(
    family: str, method: str
) -> None:
    model = adapted(family, method)
    assert adapters.why_unsplittable(model) is None
    structure = probed(model, family).structure
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, layer in enumerate(structure.layers):
        for parameter in layer.parameters():
            assert set(structure.blocks_of_parameter[names[id(parameter)]]) <= {attention_of(index), mlp_of(index)}
    shared = [name for name, blocks in structure.blocks_of_parameter.items() if len(blocks) > 1]
    assert not any(model.get_parameter(name).requires_grad for name in shared)


@ADDS
def test_an_adapter_that_was_added_belongs_to_its_layer_and_half() -> None:
    blocks = probed(adapted("bert", "lora", is_added=True), "bert").structure.blocks_of_parameter
    layer = "bert.encoder.layer.2"
    assert blocks[f"{layer}.attention.self.query.lora_B.default.weight"] == (attention_of(2),)
    assert blocks[f"{layer}.attention.output.dense.lora_A.default.weight"] == (attention_of(2),)
    assert blocks[f"{layer}.output.dense.lora_A.default.weight"] == (mlp_of(2),)


def test_layers_are_as_uniform_as_they_are_without_adapters() -> None:
    plain = [(name, p.shape) for name, p in base_of("llama").model.layers[1].named_parameters()]
    one, other = (adapted("llama", method).get_base_model() for method in ("ranks", "scattered"))
    for model in (one, other):
        assert [(name, p.shape) for name, p in adapters.base_parameters(model.model.layers[1])] == plain
    other.model.layers[1].mlp.down_proj = nn.Linear(64, 33)
    with pytest.raises(ValueError, match="no single stack"):
        find_splitter(other).layers(other)


def test_a_model_that_is_wrapped_is_known_by_its_own_name() -> None:
    # By it Trainer chooses how labels are smoothed.
    model = adapted("gpt2", "lora")
    assert PipelineShell(model, nn.Module, False)._get_name() == "GPT2LMHeadModel"


@pytest.mark.parametrize("make", [with_adapters, pytest.param(with_added_adapter, marks=ADDS)])
def test_what_neither_splits_nor_freezes_nor_stores_is_trainers(make: Any, tmp_path: Path) -> None:
    refusal = UnsupportedModelError("It cannot be split.")
    assert not RunOptions(arguments(tmp_path, **NOTHING)).wants_pipeline(make())
    for asked in ({"freeze_policy": "gradient_norm"}, {**NOTHING, "pipeline_parallel_num_microbatches": 2}):
        options = RunOptions(arguments(tmp_path, **asked))
        assert options.wants_pipeline(make())
        assert not options.may_leave(refusal, make(), is_started=True)


def test_layers_below_the_first_adapter_are_stored(tmp_path: Path) -> None:
    assert not RunOptions(arguments(tmp_path, **NOTHING)).wants_pipeline(adapted("llama", "upper"))
    assert not RunOptions(arguments(tmp_path, **NOTHING)).wants_pipeline(adapted("llama", "scattered"))
    ours = trainer_of(
        adapted("llama", "upper"), tmp_path / "ours", "llama", freeze_policy="none", activation_cache="on",
        max_steps=12, save_strategy="no", pipeline_parallel_num_microbatches=2,
    )  # fmt: skip
    ours.train()
    assert ours.layout is not None
    assert (ours.layout.num_frozen_layers, ours.layout.cache_level) == (2, 2)
    rates = [entry["cache_hit_rate"] for entry in ours.state.log_history if "cache_hit_rate" in entry]
    assert rates == [0, 1]
    plain = Trainer(
        adapted("llama", "upper"),
        TrainingArguments(**{**plain_options(tmp_path / "plain"), "max_steps": 12, "save_strategy": "no"}),
        **data_of("llama"),
    )
    plain.train()
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)


def plain_options(folder: Path) -> dict[str, Any]:
    args = arguments(folder)
    names = ("output_dir", "max_steps", "per_device_train_batch_size", "use_cpu", "report_to", "disable_tqdm")
    return {name: getattr(args, name) for name in (*names, "learning_rate", "save_steps", "logging_steps")}


def losses(trainer: Any, after: int = 0) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > after]


def test_a_layer_that_freezes_takes_its_adapter_along(tmp_path: Path) -> None:
    trainer = trainer_of(
        adapted("bert", "lora"), tmp_path, freeze_policy="fixed", freeze_at="2:2", activation_cache="on"
    )
    trainer.train()
    before, after = (PeftModel.from_pretrained(base_of("bert"), tmp_path / f"checkpoint-{n}") for n in (2, 4))
    own = dict(after.named_parameters())
    moved = {name for name, parameter in before.named_parameters() if not torch.equal(parameter, own[name])}
    blocks = {
        block_of(trainer.pipeline_run.pipelined.pipeline.stage.view.structure.blocks_of_parameter[name][0])
        for name in moved
    }
    assert blocks == {3, 4, 5}
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    trained = {name for name, parameter in trainer.model.named_parameters() if id(parameter) in held}
    assert trained == moved
    assert sum(p.requires_grad for p in trainer.model.parameters()) == len(adapted_names(trainer.model))


def adapted_names(model: Any) -> list[str]:
    return [name for name, _ in model.named_parameters() if "lora_" in name or "modules_to_save" in name]


def test_what_the_user_froze_costs_neither_gradients_nor_moments() -> None:
    costs = block_costs(
        forward=(1.0,) * 6, backward=(1.0,) * 6, edge_backward=(1.0,) * 6, activation_bytes=(0.0,) * 6,
        parameters=(100, 50, 50, 50, 50, 10), kept=(100, 40, 50, 40, 50, 0), kept_shared=(((0, 5), 100),),
    )  # fmt: skip
    layout = Layout(2, 0, 2, 1, (0, 3, 6), 1, "1f1b")
    assert trained_elements(layout, costs) == [10, 20]
    # 16 bytes of what is trained, 4 of the rest; the head's copy of the embeddings is frozen too.
    assert rank_bytes(layout, costs, 1) == [10 * 16 + 190 * 4, 20 * 16 + 90 * 4 + 100 * 4]
    both = rank_bytes(replace(layout, num_replicas=2), costs, 1)
    # A single backward moves the gradients of one block after the other into the replicas' buffers.
    assert both == [10 * 20 + 190 * 4, 20 * 16 + 10 * 4 + 90 * 4 + 100 * 4]
    frozen = replace(layout, num_frozen_layers=1)
    assert trained_elements(frozen, costs) == [0, 20]


def test_the_layer_that_is_measured_trains_its_adapters_alone() -> None:
    model = adapted("llama", "upper")
    assert list(middle_layers(WHOLE, probed(model, "llama").structure)) == [3]


def test_what_stored_activations_hang_on_names_the_adapters(tmp_path: Path) -> None:
    args, model = arguments(tmp_path), adapted("bert", "lora")
    before = settings_of(model, args)
    model.save_pretrained(tmp_path / "saved")
    assert settings_of(model, args) == before == settings_of(adapted("bert", "lora"), args)
    louder = adapted("bert", "lora")
    louder.base_model.model.bert.encoder.layer[0].attention.self.query.scale_layer(2.0)
    assert settings_of(louder, args) != before
    with model.disable_adapter():
        assert settings_of(model, args) != before
    assert "adapters" not in settings_of(base_of("bert"), args)


# ---- files ----


def test_saved_adapters_load_and_merge_and_what_they_merge_into_trains_on(tmp_path: Path) -> None:
    trainer = trainer_of(with_adapters(), tmp_path / "adapters", freeze_policy="gradient_norm")
    trainer.train()
    trainer.save_model()
    batch = collate(list(make_dataset("bert_sequence", 4)))
    expected = logits(trainer.model, batch)
    loaded = PeftModel.from_pretrained(build_model("bert_sequence"), tmp_path / "adapters")
    assert torch.equal(logits(loaded, batch), expected)
    merged = trainer.model.merge_and_unload()
    torch.testing.assert_close(logits(merged, batch), expected)
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    whole = trainer_of(merged, tmp_path / "whole", freeze_policy="fixed", freeze_at="2:1")
    whole.train()
    assert whole.layout is not None and whole.layout.num_frozen_layers == 1


@pytest.mark.parametrize("is_added", [False, pytest.param(True, marks=ADDS)])
def test_adapters_of_a_checkpoint_are_taken_up_to_the_bit(is_added: bool, tmp_path: Path) -> None:
    options = {"freeze_policy": "fixed", "freeze_at": "3:1"}
    whole = trainer_of(adapted("bert", "lora", is_added), tmp_path / "whole", **options)
    whole.train()
    other = adapted("bert", "lora", is_added)
    for name in adapted_names(other):
        nn.init.normal_(other.get_parameter(name))
    resumed = trainer_of(other, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed, 2) == losses(whole, 2)


def test_the_best_adapters_are_loaded_at_the_end_and_checkpoints_of_plain_trainer_are_gone_on_from(
    tmp_path: Path,
) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "max_steps": 6,
        "greater_is_better": True,
    }
    data = {**data_of("bert"), "eval_dataset": make_dataset("bert_sequence", 8, seed=1)}
    plain = Trainer(
        adapted("bert", "lora"), TrainingArguments(**{**plain_options(tmp_path / "plain"), **best}), **data
    )
    plain.model_accepts_loss_kwargs = False  # transformers#47688
    plain.train()
    args = arguments(tmp_path / "ours", **NOTHING, **best, pipeline_parallel_num_microbatches=2)
    ours = PipeTransformerTrainer(adapted("bert", "lora"), args, **data)
    ours.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert ours.layout is not None and ours.layout.num_microbatches == 2
    assert losses(ours, 2) == pytest.approx(losses(plain, 2), rel=1e-5)
    step = ours.state.best_global_step
    assert step == plain.state.best_global_step < 6
    folder = tmp_path / ("plain" if step == 2 else "ours") / f"checkpoint-{step}"
    loaded = PeftModel.from_pretrained(base_of("bert"), folder)
    assert torch.equal(logits(loaded, batch_of("bert")), logits(ours.model, batch_of("bert")))


def test_several_adapters_are_loaded_each_from_its_folder(tmp_path: Path) -> None:
    model, other = adapted("bert", "lora"), adapted("bert", "lora")
    for each in (model, other):
        each.add_adapter("second", lora("bert", r=3, init_lora_weights=False, modules_to_save=None))
        each.set_adapter("default")
    for name in adapted_names(model):
        nn.init.normal_(model.get_parameter(name))
    model.save_pretrained(tmp_path)
    assert adapters.adapter_files(str(tmp_path)) == [adapters.FILE, f"second/{adapters.FILE}"]
    check_weights(str(tmp_path))
    load_weights(other, str(tmp_path))
    for adapter in ("default", "second"):
        for each in (model, other):
            each.set_adapter(adapter)
        assert torch.equal(logits(model, batch_of("bert")), logits(other, batch_of("bert")))


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    adapted("bert", "lora").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds adapters, and BertForSequenceClassification has none: add them"):
        load_weights(base_of("bert"), str(tmp_path))
    with pytest.raises(ValueError, match="not those of this model"):
        load_weights(adapted("bert", "ranks"), str(tmp_path))
    opened = adapted("bert", "lora")
    opened.base_model.model.bert.pooler.dense.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="no weights for .*pooler.*which is trained"):
        load_weights(opened, str(tmp_path))


# ---- adapters that no stage would own ----


def test_a_store_is_left_out_with_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = outcome(USAGES["prompts"], PipeTransformerTrainer, {"activation_cache": "on"}, tmp_path / "ours")
    assert len([record for record in caplog.records if SAID in record.message]) == 1
    assert_same(ours, outcome(USAGES["prompts"], Trainer, {}, tmp_path / "plain"))
    assert ours["is_left"]


def test_nothing_is_said_where_nothing_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(with_prompts(), tmp_path, freeze_policy="none")
    assert SAID not in caplog.text


def test_freezing_around_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="freeze_layers=2 can freeze no layer: .* Use plain LoRA"):
        trainer_of(with_prompts(), tmp_path, freeze_layers=2)


def test_a_function_that_makes_a_model_with_prompts_is_told_of_in_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**BERT["given"](), "model_init": with_prompts}
    usage = Usage(**{**BERT, "model": lambda: None, "given": lambda: given})
    ours = outcome(usage, PipeTransformerTrainer, {"pipeline_head_slices": "auto"}, tmp_path / "ours")
    assert len([record for record in caplog.records if SAID in record.message]) == 1
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))
    with pytest.raises(UnsupportedModelError, match="freeze_policy=gradient_norm can freeze no layer"):
        outcome(usage, PipeTransformerTrainer, {"freeze_policy": "gradient_norm"}, tmp_path / "frozen")


@pytest.mark.parametrize("method", list(OUTSIDE))
def test_parts_of_a_pipeline_are_refused_when_the_trainer_is_made(method: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt_encoder\S+ of the PEFT adapters .* lies outside of the layers"):
        trainer_of(adapted("gpt2", method), tmp_path, "gpt2", pipeline_parallel_num_microbatches=2)


def test_what_has_not_been_tried_is_refused_by_its_name() -> None:
    model = adapted("llama", "lora")
    model.peft_config["default"].trainable_token_indices = [1]
    assert "LORA with trainable_token_indices" in str(adapters.why_unsplittable(model))
    model.peft_config["default"].trainable_token_indices = None
    model.peft_config["default"].peft_type = PeftType.ADALORA
    assert "kind ADALORA" in str(adapters.why_unsplittable(model))


QUICKLY_SAVED = ("biases", "whole-ends", "vera")


@pytest.mark.parametrize(
    ("method", "is_added"),
    [
        pytest.param("lora", True, marks=ADDS),
        *((method, False) for method in QUICKLY_SAVED),
        *(pytest.param(method, False, marks=pytest.mark.slow) for method in METHODS if method not in QUICKLY_SAVED),
    ],
)
def test_adapters_are_saved_from_what_they_are_said_to_be_saved_from(
    method: str, is_added: bool, tmp_path: Path
) -> None:
    model = adapted("llama", method, is_added)
    model.save_pretrained(tmp_path / "whole")
    names = adapters.saved_names(model)
    assert names and len(names) < len(list(model.parameters()))
    ParameterStore(model).release(keep=set(names))
    model.save_pretrained(tmp_path / "part")
    found, expected = (load_file(tmp_path / which / adapters.FILE) for which in ("part", "whole"))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_code_of_a_user_saves_is_not_known() -> None:
    model = adapted("gpt2", "lora")
    model.save_pretrained = lambda folder: None
    assert adapters.saved_names(model) is None


def read_from_gguf(model: Any) -> Any:
    """Leave on a model what transformers leaves on one whose weights it dequantized while it read a GGUF file."""
    config = GgufConfig()
    model.hf_quantizer = GgufHfQuantizer(config)
    model.is_quantized, model.quantization_method = True, config.quant_method
    model.config.quantization_config = config
    return model


def test_a_model_that_was_dequantized_from_a_gguf_file_trains_like_any_other(tmp_path: Path) -> None:
    losses = []
    for name, prepare in (("plain", lambda model: model), ("gguf", read_from_gguf)):
        torch.manual_seed(0)
        trainer = trainer_of(
            prepare(make_decoder("llama")), tmp_path / name, "llama", pipeline_parallel_num_microbatches=2
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_model_that_keeps_the_blocks_of_its_gguf_file_is_refused(tmp_path: Path) -> None:
    model = read_from_gguf(make_decoder("llama"))
    head = model.lm_head
    head.weight = torch.nn.Parameter(torch.zeros(head.weight.shape, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="purely quantized models"):
        trainer_of(model, tmp_path, "llama", pipeline_parallel_num_microbatches=2)
