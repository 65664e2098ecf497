"""The start-up checks run few layers of a model and find what a run of all layers finds."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.data.batches import SampleBatch, batch_size
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe, Structure
from hf_pipetransformer.startup import costs
from hf_pipetransformer.startup.check import probe_model
from hf_pipetransformer.startup.costs import profile_blocks, trained_as_given
from hf_pipetransformer.startup.model import MOST_GRADIENTS, ProbeTarget, in_full_precision, undisturbed
from hf_pipetransformer.startup.storable import depends_on_padding
from hf_pipetransformer.startup.twin import WHOLE, ProbeSubmodel, as_twin, moved
from tests.support.models import MODELS, build_model, collate, enlarge_weights, make_rows


NUM_LAYERS = 6


def deep(name: str, num_layers: int = NUM_LAYERS) -> PreTrainedModel:
    """The model `name` of `MODELS` with more layers."""
    model = build_model(name)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    for key in ("layer_types", "attention_window"):  # One entry a layer.
        if isinstance(getattr(config, key, None), list):
            setattr(config, key, (getattr(config, key) * num_layers)[:num_layers])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = type(model)(config)
        enlarge_weights(model)
    return model.eval()


def target_of(model: PreTrainedModel, name: str, twin: ProbeSubmodel) -> ProbeTarget:
    batch = SampleBatch(collate(make_rows(name, 4)))
    return ProbeTarget(model, find_splitter(model), batch, lambda given, _: model(**given).loss, batch_size, twin)


def found(model: PreTrainedModel, name: str, with_twin: bool) -> Probe:
    with undisturbed(model):
        if not with_twin:
            return probe_model(target_of(model, name, WHOLE))
        with as_twin(model, find_splitter(model)) as twin:
            assert twin.passing
            return probe_model(target_of(model, name, twin))


# One of each way to be odd: tied weights, a main input of floats, weights of all layers, padding by the model itself.
OF_CI = ("bert_masked", "vit", "deberta_sequence", "mpnet_question", "modernbert_masked")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OF_CI else pytest.mark.slow) for n in MODELS])
def test_the_twin_shows_what_the_whole_model_shows(name: str) -> None:
    model = deep(name)
    expected, twins = found(model, name, False), found(model, name, True)
    functions = {"stand_ins", "other_stand_ins"}
    for field in fields(Structure):
        if field.name not in functions:
            assert getattr(twins.structure, field.name) == getattr(expected.structure, field.name), field.name
    assert twins.boundary_dtypes == expected.boundary_dtypes
    assert twins.activation == expected.activation
    assert twins.placeholders == expected.placeholders
    assert twins.block_flops == pytest.approx(expected.block_flops)


@pytest.mark.parametrize("name", ["bert_sequence", "vit"])
def test_two_layers_stand_for_equal_ones_and_all_stay_as_they_were(name: str) -> None:
    model = deep(name)
    before = {key: (id(p), p.data_ptr(), p.requires_grad) for key, p in model.named_parameters()}
    splitter = find_splitter(model)
    layers = splitter.layers(model)
    calls = [0] * NUM_LAYERS

    def counting(index: int) -> Any:
        def count(*_: Any) -> None:
            calls[index] += 1

        return count

    handles = [part.register_forward_hook(counting(i)) for i, each in enumerate(layers) for part in each.children()]
    with as_twin(model, splitter) as twin:
        model(**collate(make_rows(name, 2)))
        assert twin.representatives == (0, 0, 0, 0, 0, NUM_LAYERS - 1)
        assert {p.data_ptr() for p in twin.parameters(model)} >= {p.data_ptr() for p in layers[0].parameters()}
        assert not {id(p) for p in twin.parameters(model)} & {id(p) for p in layers[1].parameters()}
    assert [bool(count) for count in calls] == [True, False, False, False, False, True]
    for handle in handles:
        handle.remove()
    assert not any("forward" in vars(layer) or layer._forward_hooks for layer in layers)
    assert before == {key: (id(p), p.data_ptr(), p.requires_grad) for key, p in model.named_parameters()}


def test_every_kind_of_layer_computes() -> None:
    model = deep("bert_sequence", 8)
    layers = model.bert.encoder.layer
    for layer in layers[:3]:
        layer.requires_grad_(False)
    layers[4].attention.self.is_causal = True
    layers[5].output.dense.register_forward_hook(lambda *_: None)
    with as_twin(model, find_splitter(model)) as twin:
        assert twin.representatives == (0, 0, 0, 3, 4, 5, 3, 7)


def test_a_defect_of_one_layer_alone_that_its_modules_show_is_found() -> None:
    model = deep("vit")
    splitter = find_splitter(model)
    odd, right = splitter.layers(model)[3], splitter.run_mlp
    odd.is_odd = True
    splitter.run_mlp = lambda layer, hidden: right(layer, hidden) * (1.01 if layer is odd else 1)
    target = target_of(model, "vit", WHOLE)
    with as_twin(model, splitter) as twin, undisturbed(model), pytest.raises(UnsupportedModelError, match="split"):
        probe_model(ProbeTarget(model, splitter, target.inputs, target.compute, batch_size, twin))


def test_costs_of_the_twin_are_every_layers() -> None:
    model = deep("bert_sequence")
    with as_twin(model, find_splitter(model)) as twin, undisturbed(model):
        target = target_of(model, "bert_sequence", twin)
        structure = probe_model(target).structure
        with trained_as_given(model, structure):
            profile = profile_blocks(target, structure, num_repeats=1)
        with in_full_precision(model, twin):
            assert isinstance(depends_on_padding(target, probe_model(target)), bool)
    layers = profile.forward[1:-1]
    assert all(layers) and layers[0::2] == [layers[0]] * NUM_LAYERS and layers[1::2] == [layers[1]] * NUM_LAYERS
    assert all(parameter.grad is None for parameter in model.parameters())
    work = [1.0, *[2.0, 3.0] * NUM_LAYERS, 4.0]
    assert twin.share_of(work) == (1 + 2 * 5 + 4) / (1 + NUM_LAYERS * 5 + 4)


def test_blocks_are_timed_with_the_sums_of_their_gradients() -> None:
    """As a step of several micro-batches has them: without, predicted steps were 11 % too short in the median."""
    model, added = deep("bert_sequence"), []
    model.classifier.weight.register_hook(lambda _: added.append(model.classifier.weight.grad is not None))
    with as_twin(model, find_splitter(model)) as twin:
        target = target_of(model, "bert_sequence", twin)
        structure = probe_model(target).structure
        added.clear()
        with trained_as_given(model, structure):
            profile_blocks(target, structure, num_repeats=2)
    assert True in added and all(parameter.grad is None for parameter in model.parameters()), added


@pytest.mark.parametrize("model_name", ["bert_sequence", "modernbert_masked", "vit"])
def test_what_the_model_does_around_its_blocks_is_none_of_theirs(
    model_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU masks and launches took as long as a block: plans of steps were twice what the steps took."""
    model, clock = deep(model_name), [0.0]
    monkeypatch.setattr(costs, "settled_seconds", lambda _device: clock[0])
    with as_twin(model, find_splitter(model)) as twin:
        target = target_of(model, model_name, twin)
        structure = probe_model(target).structure

        def compute(inputs: Any, num_items: int) -> torch.Tensor:
            clock[0] += 1.0
            return target.compute(inputs, num_items)

        with trained_as_given(model, structure):
            profile = profile_blocks(replace(target, compute=compute), structure, num_repeats=1)
    assert profile.passing == (1.0, 0.0)
    assert profile.forward == pytest.approx([0.1 / batch_size(target.inputs)] * structure.num_blocks)
    assert profile.backward == [0.0] * structure.num_blocks


def test_layers_that_pass_on_their_input_are_neither_copied_nor_differentiated() -> None:
    model = deep("bert_masked").bfloat16()
    own = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    with as_twin(model, find_splitter(model)) as twin, in_full_precision(model, twin):
        lifted = {name for name, p in model.named_parameters() if p.dtype is torch.float32}
        assert all((name in lifted) == (id(p) not in twin.passing) for name, p in model.named_parameters())
        model(**collate(make_rows("bert_masked", 3))).loss.backward()
        assert not any(p.grad is not None for p in model.parameters() if id(p) in twin.passing)
    assert own == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def test_gradients_are_taken_of_a_bounded_number_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([nn.Linear(1, 2**11), nn.Linear(2**11, 2**12, bias=False)])
    parameters = list(model.parameters())
    assert parameters[2].numel() > MOST_GRADIENTS
    with in_full_precision(model):
        assert [p.requires_grad for p in parameters] == [True, True, False]
    assert all(p.requires_grad for p in parameters)


def test_a_whole_model_whose_first_loss_is_not_finite_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = deep("bert_sequence")
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, pipeline_parallel_num_microbatches=2,
    )  # fmt: skip
    with torch.no_grad():
        model.bert.encoder.layer[2].output.dense.weight.fill_(float("nan"))
    rows = make_rows("bert_sequence", 8)
    PipeTransformerTrainer(model, args, train_dataset=rows, data_collator=collate).train()
    said = [record.getMessage() for record in caplog.records if "expected a finite number" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("The loss of the first batch is nan")


def test_a_large_vocabulary_is_copied_only_where_the_batch_reads_it() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(2**13, 2), "head": nn.Linear(2, 2**13, bias=False)}).bfloat16()
    inputs = {"input_ids": torch.tensor([[5, 5000, -100]]), "pixel_values": torch.ones(1)}
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with in_full_precision(model, inputs=inputs):
        for name, parameter in model.named_parameters():
            assert parameter.dtype is torch.float32
            assert torch.equal(parameter[[5, 5000]], own[name][[5, 5000]].float())
            assert not parameter[[4000, 6000]].any()
    assert all(torch.equal(parameter, own[name]) for name, parameter in model.named_parameters())


def test_the_host_under_another_number_gets_no_copies() -> None:
    """Accelerate numbers the processors of several processes, and `to` copies from `cpu` to `cpu:0`."""
    weights = [torch.ones(3), torch.ones(2)]
    own = [weight.data_ptr() for weight in weights]
    with moved(weights, torch.device("cpu", 0)):
        assert [weight.data_ptr() for weight in weights] == own
