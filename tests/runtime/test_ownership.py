"""Where a rank's parameters lie, and which of them its process holds in memory of its own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification, MixtralConfig, MixtralForCausalLM, ViTForImageClassification

from hf_pipetransformer.runtime import gathering
from hf_pipetransformer.runtime.gathering import Room, least_room
from hf_pipetransformer.runtime.ownership import ParameterSlots, ParameterStore
from hf_pipetransformer.runtime.pipeline import PipelineShell
from hf_pipetransformer.state import weights
from hf_pipetransformer.training.evaluations import _installed
from tests.doubles.device import DEVICE, HOST, DeviceStandIn
from tests.support.models import MODELS, NUM_LAYERS, build_model, vit_config


def test_an_evaluation_before_any_training_leaves_weights_mapped_from_their_file(tmp_path: Path) -> None:
    """The own stage goes to the device; afterward each tensor is the host's own again, with any change to it."""
    build_model("bert_sequence").save_pretrained(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    store = ParameterStore(model)
    own = {name for name in store.named() if ".layer.0." in name}
    stage: Any = SimpleNamespace(
        view=SimpleNamespace(is_installed=False), groups=SimpleNamespace(pipeline_size=2), reducer=None, store=store,
        own_names=lambda: own, active=nullcontext,
    )  # fmt: skip
    pipeline: Any = SimpleNamespace(stage=stage, settings=SimpleNamespace(device=DEVICE))
    where = {name: parameter.data_ptr() for name, parameter in store.named().items()}
    before = {name: parameter.detach().clone() for name, parameter in store.named().items()}
    changed = "bert.encoder.layer.0.output.dense.bias"
    with DeviceStandIn().active():
        with _installed(pipeline):
            assert {name for name, parameter in store.named().items() if parameter.device == DEVICE} == own
            assert all(buffer.device == DEVICE for buffer in model.buffers())
            store.named()[changed].data.add_(1.0)
        assert all(tensor.device == HOST for tensor in (*model.parameters(), *model.buffers()))
    assert {name: parameter.data_ptr() for name, parameter in store.named().items()} == where
    for name, parameter in store.named().items():
        assert torch.equal(parameter, before[name] + (1.0 if name == changed else 0.0)), name


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the tensors that are read from saved weights; headers do not count."""
    keys: list[str] = []
    own = weights.safe_open

    def opening(*args: Any, **options: Any) -> Any:
        file = own(*args, **options)

        def get_tensor(key: str) -> torch.Tensor:
            keys.append(key)
            return file.get_tensor(key)

        return nullcontext(SimpleNamespace(keys=file.keys, get_slice=file.get_slice, get_tensor=get_tensor))

    monkeypatch.setattr(weights, "safe_open", opening)
    return keys


# ViT is saved under other names than its parameters have, and masked BERT has two names for one parameter.
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_stage_reads_its_own_weights_and_no_others(name: str, shard: str, read: list[str], tmp_path: Path) -> None:
    saved, model = build_model(name, seed=1), build_model(name, seed=2)
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    store = ParameterStore(model)
    own = set(list(store.named())[::3])
    store.release(keep=own)
    weights.load_weights(model, str(tmp_path), own)
    expected = dict(saved.named_parameters())
    assert len(read) == len(own)
    assert store.held().keys() == own
    assert all(torch.equal(parameter, expected[name]) for name, parameter in store.held().items())


def test_weights_that_do_not_fit_are_refused_by_their_headers(read: list[str], tmp_path: Path) -> None:
    build_model("vit").save_pretrained(tmp_path)
    deeper = ViTForImageClassification(vit_config(NUM_LAYERS + 1))
    with pytest.raises(ValueError, match="no weights for vit.layers.4"):
        weights.find_weights(deeper, str(tmp_path))
    config = vit_config(NUM_LAYERS)
    config.num_labels += 1
    with pytest.raises(ValueError, match="no weights for classifier.weight"):
        weights.find_weights(ViTForImageClassification(config), str(tmp_path))
    assert weights.find_weights(build_model("vit"), str(tmp_path)) is not None
    assert read == []


def test_a_model_whose_tensors_are_joined_from_saved_ones_is_read_as_transformers_does(tmp_path: Path) -> None:
    """Experts are saved one by one, and are one tensor of the model."""
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    saved, model = MixtralForCausalLM(config), MixtralForCausalLM(config)
    saved.save_pretrained(tmp_path)
    store = ParameterStore(model)
    own = {name for name in store.named() if ".layers.1." in name}
    store.release(keep=own)
    assert weights.find_weights(model, str(tmp_path)) is None
    weights.load_weights(model, str(tmp_path), own)
    expected = dict(saved.named_parameters())
    assert any("experts" in name for name in own) and store.held().keys() == own
    assert all(torch.equal(parameter, expected[name]) for name, parameter in store.held().items())


def test_what_fits_is_decided_by_the_node_with_the_least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a node with 100 bytes free, one on a node with 40; each measures a little different."""
    answers = [[30, 100, 0], [30, 90, 0], [30, 40, 2]]
    memory = SimpleNamespace(available=100)
    monkeypatch.setattr(gathering, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    asked = []
    topology: Any = SimpleNamespace(ranks_here=[0, 1], gather=lambda own: asked.append(own) or answers)
    assert least_room(30, topology) == Room(30, 40)
    answers[1][0] = 60
    assert least_room(30, topology) == Room(90, 90)
    assert asked == [[30, 100, 0]] * 2


@pytest.mark.parametrize("name", ["bert_masked", "vit"])
def test_slots_name_the_parameters_as_the_model_does_also_once_they_are_replaced(name: str) -> None:
    model = build_model(name)
    store, slots = ParameterStore(model), ParameterSlots(model)

    def ids(named: Any) -> list[tuple[str, int]]:
        return [(each, id(parameter)) for each, parameter in named]

    assert ids(slots.named()) == ids(model.named_parameters())
    kept = {each for each in store.named() if "layer" in each}
    weights = {each: parameter.detach().clone() for each, parameter in store.named().items()}
    store.release(kept)
    assert {each for each, parameter in slots.named() if parameter.is_meta} == set(store.named()) - kept
    assert ids(slots.named()) == ids(model.named_parameters())
    store.fill(weights)
    assert ids(slots.named()) == ids(model.named_parameters())


def test_all_gradients_are_dropped_without_a_walk_through_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("bert_masked")
    shell = PipelineShell(model, nullcontext, is_mixed=False)
    model.late = nn.Linear(2, 2)  # Some models build parts of themselves in their first forward.
    shell.zero_grad()
    model.late(torch.ones(2)).sum().backward()
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    with monkeypatch.context() as only:
        only.setattr(nn.Module, "named_modules", lambda *_: pytest.fail("walked"))
        shell.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    shell.zero_grad(set_to_none=False)
    assert not any(torch.any(p.grad) for p in model.parameters() if p.grad is not None)
