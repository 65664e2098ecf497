"""What stages compute, without a process group: every program gives the gradients of the model in one piece."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import ElectraConfig, ElectraForTokenClassification

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.data.batches import CacheTags
from hf_pipetransformer.engine.linear_layers import SharedCasts, WeightGradients, linear_layers
from hf_pipetransformer.engine.program import MicroBatch, ModelProgram
from hf_pipetransformer.engine.reduction import last_gradients
from hf_pipetransformer.engine.wrappers import CachedEntryProgram, RecomputingProgram, recomputed_micro_batches
from hf_pipetransformer.schedules.actions import Action, ActionList, Op
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.view import StageView
from tests.support.decoders import collate_tokens, make_decoder
from tests.support.decoders import make_rows as decoder_rows
from tests.support.models import NUM_TOKEN_LABELS, build_model, collate, has_zero_gradient, make_rows
from tests.support.one_process import CPU, ModelPipeline, trace, whole_gradients


MODELS = ["bert_sequence", "bert_masked", "vit", "electra_token"]
NUM_SAMPLES = 5

# Sums of other groups of numbers: a few last bits of float32.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def batch_of(name: str, num_samples: int = NUM_SAMPLES) -> dict[str, torch.Tensor]:
    batch = collate(make_rows(name, num_samples))
    if "labels" in batch and batch["labels"].dim() > 1:
        # As many labels in each sample, so that means over micro-batches add up with the samples' weights.
        batch["labels"] = batch["input_ids"] % NUM_TOKEN_LABELS
    return batch


def assert_same_gradients(name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        if not has_zero_gradient(name, parameter):
            torch.testing.assert_close(found[parameter], gradient, **CLOSE, msg=parameter)


def pipeline_of(name: str, model: nn.Module, schedule_name: str, pipeline_size: int, num_chunks: int, **more: Any):
    """A pipeline and its table, the blocks cut evenly."""
    schedule = find_schedule(schedule_name)
    placement = Placement(pipeline_size, num_chunks, schedule.abilities.placement)
    inputs = batch_of(name)
    num_blocks = trace(model, inputs).num_blocks
    boundaries = [num_blocks * stage // placement.num_stages for stage in range(placement.num_stages + 1)]
    pipeline = ModelPipeline(
        model, boundaries, placement, inputs, 3, splits=schedule.abilities.splits_backward, **more
    )
    return pipeline, schedule.table(pipeline_size, 3, num_chunks)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("schedule", "pipeline_size", "num_chunks"),
    [("1f1b", 1, 1), ("1f1b", 3, 1), ("interleaved_1f1b", 2, 2), ("zb_h1", 1, 1), ("zb_h1", 3, 1), ("zb_v", 2, 2)],
)
def test_stages_give_the_gradients_of_the_whole_model(
    name: str, schedule: str, pipeline_size: int, num_chunks: int
) -> None:
    model = build_model(name)
    pipeline, table = pipeline_of(name, model, schedule, pipeline_size, num_chunks)
    loss, gradients = whole_gradients(model, batch_of(name))
    torch.testing.assert_close(pipeline.run(table), loss)
    assert_same_gradients(name, pipeline.gradients(), gradients)


def test_a_linear_layer_of_the_embeddings_may_be_as_wide_as_the_others() -> None:
    name = "electra_token"
    config = ElectraConfig(**{**build_model(name).config.to_dict(), "embedding_size": 32})
    model = ElectraForTokenClassification(config)
    model.electra.embeddings_project = nn.Linear(32, 32)
    pipeline, table = pipeline_of(name, model, "zb_v", 2, 2)
    assert model.electra.embeddings_project in trace(model, batch_of(name)).entries
    loss, gradients = whole_gradients(model, batch_of(name))
    torch.testing.assert_close(pipeline.run(table), loss)
    assert_same_gradients(name, pipeline.gradients(), gradients)


# ---- split backward ----


def one_stage(
    name: str,
    blocks: range | None = None,
    autocast: bool = False,
    splits: bool = True,
    by_layer: bool = False,
    is_compiled: bool = False,
) -> tuple[nn.Module, ModelProgram, MicroBatch]:
    model = build_model(name)
    inputs = batch_of(name)
    structure = trace(model, inputs)
    compiled = partial(torch.compile, backend="aot_eager") if is_compiled else None
    view = StageView(model, find_splitter(model), structure, compiled, recomputes_layers=by_layer)

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return model(**given).loss

    own = blocks or range(structure.num_blocks)
    with torch.no_grad():
        shape = tuple(view.run(range(1), None, lambda: model(**inputs)).shape)
    program = ModelProgram(view, own, torch.float32, True, WeightGradients(linear_layers(model) if splits else []))
    return model, program, MicroBatch(0, inputs, 0.5, shape, forward, loss_scale=3.0)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_both_halves_of_a_backward_give_the_whole(name: str, autocast: bool) -> None:
    model, program, micro_batch = one_stage(name, autocast=autocast)
    loss = program.forward(micro_batch, None)
    assert program.backward(micro_batch, None) is None
    expected = gradients_of(model)
    model.zero_grad()

    torch.testing.assert_close(program.forward(micro_batch, None), loss, rtol=0, atol=0)
    assert program.backward_input(micro_batch, None) is None
    split = {id(p) for layer in linear_layers(model) for p in layer.parameters()}
    tied = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for parameter_name, parameter in model.named_parameters():
        is_late = id(parameter) in split - tied
        assert (parameter.grad is None) == (is_late or parameter_name not in expected), parameter_name
    program.backward_weight(micro_batch)
    assert_same_gradients(name, gradients_of(model), expected)

    # The same as the layers' own backward, bit for bit or nearly so.
    plain = copy.deepcopy(model)
    plain.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        own_loss = plain(**micro_batch.inputs).loss
    (own_loss * 1.5).backward()
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if autocast else CLOSE
    for (parameter_name, parameter), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        if own.grad is not None and not has_zero_gradient(name, parameter_name):
            torch.testing.assert_close(parameter.grad, own.grad, **tolerance, msg=parameter_name)
            assert parameter.grad.dtype == parameter.dtype


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_a_middle_stage_sends_the_same_input_gradient_before_its_weights_have_any(autocast: bool) -> None:
    model, program, micro_batch = one_stage("vit", range(2, 5), autocast)
    plain_model, plain, plain_batch = one_stage("vit", range(2, 5), autocast, splits=False)
    generator = torch.Generator().manual_seed(3)
    received = torch.randn(micro_batch.activation_shape, generator=generator)
    gradient = torch.randn(micro_batch.activation_shape, generator=generator)
    plain.forward(plain_batch, received.clone())
    whole = plain.backward(plain_batch, gradient)
    expected = gradients_of(plain_model)
    program.forward(micro_batch, received.clone())
    torch.testing.assert_close(program.backward_input(micro_batch, gradient), whole, rtol=0, atol=0)
    assert not any("weight" in name and "norm" not in name for name in gradients_of(model))
    program.backward_weight(micro_batch)
    assert gradients_of(model).keys() == expected.keys()
    for name, value in gradients_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_weight_gradients_add_up_over_micro_batches_in_any_order() -> None:
    model, program, first = one_stage("bert_sequence")
    second = MicroBatch(1, batch_of("bert_sequence", 3), 0.25, (), first.forward)
    for micro_batch in (first, second):
        program.forward(micro_batch, None)
        program.backward(micro_batch, None)
    expected = gradients_of(model)
    model.zero_grad()
    for micro_batch in (first, second):
        program.forward(micro_batch, None)
    program.backward_input(second, None)
    program.backward_input(first, None)
    program.backward_weight(first)
    program.backward_weight(second)
    assert_same_gradients("bert_sequence", gradients_of(model), expected)


# ---- autocast ----


def _freeze_all_but_layer_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name.lower() or "ln_" in name)


def _run_under_autocast(name: str, num: int, casts: bool, split: bool, is_frozen: bool):
    """Run the forwards of `num` micro-batches, then their backwards; return copies of weights held, and results.

    The copies are in bytes over those of one copy of each weight that autocast casts.
    """
    torch.manual_seed(0)
    is_decoder = name in ("gpt2", "llama")
    model = make_decoder(name) if is_decoder else build_model(name)
    batch = collate_tokens(decoder_rows(6)) if is_decoder else batch_of(name)
    structure = trace(model, batch)
    if is_frozen:
        _freeze_all_but_layer_norms(model)
    later = WeightGradients(linear_layers(model) if split else [], SharedCasts(model if casts else None))
    view = StageView(model, find_splitter(model), structure)
    program = ModelProgram(view, range(structure.num_blocks), torch.float32, True, later)

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**given).loss

    micro_batches = [MicroBatch(i, part, 1 / num, (), forward) for i, part in enumerate([batch] * num)]
    copied = {tuple(p.bfloat16().flatten().tolist()): p.numel() for p in model.parameters() if p.dim() > 1}
    held: dict[int, torch.Tensor] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if saved.dtype is torch.bfloat16:
            held[storage.data_ptr()] = torch.empty(0, dtype=torch.bfloat16).set_(storage)
        return saved.detach()

    program.clear()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        losses = [program.forward(each, None) for each in micro_batches]
    found = Counter(tuple(each.tolist()) for each in held.values())
    for each in micro_batches:
        program.backward(each, None)
    num_bytes = sum(count * copied[values] for values, count in found.items() if values in copied)
    of_one = sum(copied[values] for values in found if values in copied)
    return num_bytes / of_one, (losses, gradients_of(model))


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("llama", False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("llama", True), ("gpt2", False), ("vit", False))),
        ("bert_sequence", True),
    ],
)
def test_micro_batches_in_flight_share_one_cast_of_the_weights(name: str, split: bool, is_frozen: bool) -> None:
    own, plain = _run_under_autocast(name, 4, casts=False, split=False, is_frozen=is_frozen)
    assert own > 3.5, "a cast for each micro-batch, else this shows nothing"
    results = plain if not split else _run_under_autocast(name, 4, False, True, is_frozen)[1]
    for num in (1, 2, 4):
        copies, found = _run_under_autocast(name, num, casts=True, split=split, is_frozen=is_frozen)
        assert 1 <= copies <= 1.2
    assert all(torch.equal(*pair) for pair in zip(found[0], results[0], strict=True))
    assert found[1].keys() == results[1].keys()
    assert all(torch.equal(gradient, results[1][key]) for key, gradient in found[1].items())


def test_casts_follow_the_weights_from_batch_to_batch() -> None:
    layer, casts = nn.Linear(3, 3), SharedCasts()
    first = casts.of(layer.weight, torch.bfloat16)
    assert casts.of(layer.weight, torch.bfloat16) is first
    with torch.no_grad():
        layer.weight.add_(1)
        casts.clear()
        again = casts.of(layer.weight, torch.bfloat16)
    assert torch.equal(again, layer.weight.bfloat16())
    assert again.requires_grad, "made under no_grad, it serves forwards that are trained too"


class _Twice(nn.Module):
    """One linear layer used twice, and one whose weight somebody froze."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.weight.requires_grad_(False)
        self.own = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(self.frozen(self.shared(x)))).square().sum()


def test_a_layer_used_twice_gets_one_gradient_and_a_frozen_weight_none() -> None:
    model, x = _Twice(), torch.randn(4, 3)
    model(x).backward()
    expected = gradients_of(model)
    model.zero_grad()
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: calls.update([f"{name} {gradient.dim()}"]))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    later = WeightGradients(linear_layers(model))
    with later.split_linears():
        loss = model(x)
    with later.put_off(0):
        loss.backward()
    assert not gradients_of(model)
    assert not calls
    later.accumulate(0)
    expected_calls = ["shared.weight", "shared.bias", "frozen.bias", "own.weight"]
    expected_calls += [f"{name} {model.get_parameter(name).dim()}" for name in expected_calls]
    assert calls == dict.fromkeys(expected_calls, 1)
    for name, value in gradients_of(model).items():
        torch.testing.assert_close(value, expected[name])
    assert all("forward" not in vars(layer) for layer in linear_layers(model))


def test_what_was_put_off_is_freed() -> None:
    layer, later = nn.Linear(3, 3), WeightGradients([])
    later.layers.append(layer)
    x = torch.randn(2, 3).requires_grad_()
    with later.split_linears():
        hidden = x * 2
        loss = layer(hidden).square().sum()
    kept = weakref.ref(hidden)
    del hidden
    with later.put_off(7):
        loss.backward()
    del loss
    assert kept() is not None
    later.accumulate(7)
    assert kept() is None
    assert layer.weight.grad is not None


def test_a_gradient_that_a_hook_changes_is_added_as_it_leaves_the_hook() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    later = WeightGradients(linear_layers(layer))
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    layer(x).sum().backward()
    expected = gradients_of(layer)
    layer.zero_grad()
    with later.split_linears():
        loss = layer(input=x).sum()
    with later.put_off(0):
        loss.backward()
    later.accumulate(0)
    torch.testing.assert_close(gradients_of(layer), expected)


def test_other_linear_layers_keep_their_own_backward() -> None:
    """Subclasses, and layers whose weight is computed from others."""
    assert not linear_layers(nn.MultiheadAttention(4, 2))
    with pytest.warns(FutureWarning, match="weight_norm"):
        assert not linear_layers(nn.utils.weight_norm(nn.Linear(3, 3)))
    assert not linear_layers(nn.utils.spectral_norm(nn.Linear(3, 3)))


class _Recomputing(nn.Module):
    """Recomputes its square layers by itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant).square().sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_may_recompute_activations_by_itself(use_reentrant: bool) -> None:
    model, x = _Recomputing(use_reentrant), torch.randn(4, 3, requires_grad=True)
    model(x).backward()
    expected, entered = gradients_of(model), x.grad
    model.zero_grad()
    x.grad = None
    later = WeightGradients(linear_layers(model))
    with later.split_linears():
        loss = model(x)
    with later.put_off(0):
        loss.backward()
    assert not gradients_of(model)
    later.accumulate(0)
    torch.testing.assert_close(gradients_of(model), expected)
    torch.testing.assert_close(x.grad, entered)


def test_a_backward_of_the_models_own_is_refused() -> None:
    layer = nn.Linear(3, 2)
    later = WeightGradients(linear_layers(layer))
    with (
        later.split_linears(),
        pytest.raises(PipelineError, match="A backward ran inside the model .*pipeline_schedule='1f1b'"),
    ):
        layer(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True, None], ids=["by the model", "reentrant", "by the stage"])
@pytest.mark.parametrize(("schedule", "num_chunks"), [("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)])
def test_stages_may_recompute_layer_by_layer(schedule: str, num_chunks: int, use_reentrant: bool | None) -> None:
    name = "bert_sequence"
    model = build_model(name).train()
    loss, gradients = whole_gradients(model, batch_of(name))
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    pipeline, table = pipeline_of(name, model, schedule, 2, num_chunks, by_layer=use_reentrant is None)
    torch.testing.assert_close(pipeline.run(table), loss)
    assert_same_gradients(name, pipeline.gradients(), gradients)


# ---- recomputation ----


def rows_of(text: str) -> ActionList:
    ops = {op.value: op for op in Op}
    return tuple(Action(ops[entry[0]], int(entry[1]), int(entry[3]) if "." in entry else 0) for entry in text.split())


@pytest.mark.parametrize(
    ("actions", "chunk", "mode", "expected"),
    [
        ("F0 F1 F2 B2 B1 B0", 0, "always", {0, 1}),
        ("F0 F1 F2 B2 B1 B0", 0, "except_last", {0, 1}),
        ("F0 F1 F2 B2 B1 B0", 0, "never", set()),
        ("F0 F1 B0 F2 B1 B2", 0, "always", {0, 1, 2}),
        ("F0 F1 B0 F2 B1 B2", 0, "except_last", {0, 1}),
        ("F0 B0 F1 B1", 0, "always", set()),
        ("F0 I0 F1 I1 W0 W1", 0, "always", set()),
        ("F0 F1 I0 W0 I1 W1", 0, "always", {0, 1}),
        ("F0 F0.1 B0.1 B0", 0, "always", {0}),
        ("F0 F0.1 B0.1 B0", 1, "always", set()),
        ("F0 F1.1 B1.1 F1 B1 F0.1 B0.1 B0", 0, "always", {0}),
    ],
)
def test_what_is_recomputed(actions: str, chunk: int, mode: str, expected: set[int]) -> None:
    assert recomputed_micro_batches(rows_of(actions), chunk, mode) == expected


@pytest.mark.parametrize("mode", ["always", "layers"])
@pytest.mark.parametrize("splits", [False, True], ids=["B", "I and W"])
def test_recomputation_draws_the_same_dropout(splits: bool, mode: str) -> None:
    actions = rows_of("F0 F1 I0 W0 I1 W1" if splits else "F0 F1 B0 B1")
    found = []
    for recompute in ("never", mode):
        model, plain, first = one_stage("bert_sequence", by_layer=recompute == "layers")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        second = MicroBatch(1, batch_of("bert_sequence", 3), 0.25, (), first.forward)
        program = plain if recompute == "layers" else RecomputingProgram(plain, recompute, 0, CPU)
        program.extend(actions)
        torch.manual_seed(5)
        losses = [program.forward(micro_batch, None) for micro_batch in (first, second)]
        for micro_batch in (first, second):
            if splits:
                program.backward_input(micro_batch, None)
                program.backward_weight(micro_batch)
            else:
                program.backward(micro_batch, None)
        found.append((losses, gradients_of(model), torch.get_rng_state()))
    (losses, gradients, state), (other_losses, other_gradients, other_state) = found
    assert losses == other_losses
    assert torch.equal(state, other_state)
    assert gradients.keys() == other_gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(other_gradients[name], value, rtol=0, atol=0)


def _noted(kept: list[int], tensor: torch.Tensor) -> torch.Tensor:
    kept.append(tensor.data_ptr())
    return tensor


def test_recomputation_of_compiled_layers_gives_the_same_gradients() -> None:
    """A compiled forward keeps what its backward needs in a node of its own, which the recomputation has to fill."""
    found = []
    for by_layer in (False, True):
        torch.compiler.reset()
        model, program, micro_batch = one_stage("bert_sequence", splits=False, by_layer=by_layer, is_compiled=True)
        torch.manual_seed(5)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_noted, kept), lambda t: t):
            loss = program.forward(micro_batch, None)
        program.backward(micro_batch, None)
        found.append((loss, gradients_of(model), len(set(kept))))
    (loss, gradients, num_kept), (other_loss, other_gradients, other_num_kept) = found
    assert loss == other_loss and other_num_kept < num_kept
    assert gradients.keys() == other_gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(other_gradients[name], value, rtol=0, atol=0)


def test_recomputation_keeps_no_activation() -> None:
    model, plain, micro_batch = one_stage("bert_sequence")
    program = RecomputingProgram(plain, "always", 0, CPU)
    program.extend(rows_of("F0 F1 B0 B1"))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
        program.forward(micro_batch, None)
    assert not saved


class _Alive:
    """Bytes of the outputs of all modules that anything keeps alive, at most."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        for module in model.modules():
            module.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self._outputs.append(weakref.ref(output))
        alive = [each.untyped_storage() for ref in self._outputs if (each := ref()) is not None]
        storages = {each.data_ptr(): each.nbytes() for each in alive}
        self.most = max(self.most, sum(storages.values()))


def _step_of_decoder(name: str, num_layers: int, by_layer: bool, splits: bool = False):
    """Run two micro-batches of a decoder with its KV cache on, first both forwards; return the peak and results."""
    torch.manual_seed(0)
    model = make_decoder(name, num_hidden_layers=num_layers).train()
    batch = collate_tokens(decoder_rows(4))
    structure = trace(model, batch)
    view = StageView(model, find_splitter(model), structure, recomputes_layers=by_layer)
    later = WeightGradients(linear_layers(model) if splits else [])
    program = ModelProgram(view, range(structure.num_blocks), torch.float32, True, later)
    alive = _Alive(model)
    micro_batches = [MicroBatch(i, batch, 0.5, (), lambda given: model(**given).loss) for i in range(2)]
    losses = [program.forward(each, None) for each in micro_batches]
    for each in micro_batches:
        program.backward(each, None)
    boundary = 4 * batch["input_ids"].numel() * model.config.hidden_size
    return alive.most / boundary, (losses, gradients_of(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_recomputing_layers_keeps_what_enters_them_and_one_layers_activations(name: str) -> None:
    few, _ = _step_of_decoder(name, 2, by_layer=True)
    many, found = _step_of_decoder(name, 6, by_layer=True)
    kept_of_few, _ = _step_of_decoder(name, 2, by_layer=False)
    kept_of_many, expected = _step_of_decoder(name, 6, by_layer=False)
    assert many - few <= 4 * 2 * 1.05, "four layers more, each with an input in two micro-batches"
    assert kept_of_many - kept_of_few >= 4 * 2 * 3, "else this shows nothing"
    assert torch.equal(torch.stack(found[0]), torch.stack(expected[0]))
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(gradient, expected[1][key]) for key, gradient in found[1].items())


# ---- stages ----


def _hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(
        lambda _module, _args, output: (output[0] * 2,) if isinstance(output, tuple) else output * 2
    )


def _patched(layer: nn.Module) -> None:
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        return (output[0] * 2,) if isinstance(output, tuple) else output * 2

    layer.forward = forward


@pytest.mark.parametrize("edit", [_hooked, _patched])
def test_what_a_script_puts_on_the_last_layer_of_a_stage_is_in_what_leaves_it(
    edit: Callable[[nn.Module], None],
) -> None:
    """Also if another stage of the model has run since."""
    _, program, micro_batch = one_stage("bert_sequence", range(3))
    view = program.view
    micro_batch = replace(micro_batch, is_predicted=True)
    before = program.forward(micro_batch, None)
    view.narrow(range(view.structure.num_blocks))
    edit(view.structure.layers[0])
    torch.testing.assert_close(program.forward(micro_batch, None), before * 2)


def test_a_frozen_stage_keeps_nothing() -> None:
    _, program, micro_batch = one_stage("bert_sequence", range(3))
    with torch.no_grad():
        output = program.forward(micro_batch, None)
    assert not output.requires_grad
    with pytest.raises(KeyError):
        program.backward(micro_batch, torch.ones_like(output))


def test_a_loss_without_items_counts_nothing() -> None:
    model, program, micro_batch = one_stage("bert_sequence")
    empty = MicroBatch(0, micro_batch.inputs, 0.0, (), lambda given: model(**given).loss * float("nan"))
    assert float(program.forward(empty, None)) == 0.0
    program.backward(empty, None)
    assert not gradients_of(model)


def test_an_activation_of_another_shape_is_an_error() -> None:
    _, program, micro_batch = one_stage("bert_sequence", range(3))
    narrower = MicroBatch(0, micro_batch.inputs, 1.0, (1, 2, 3), micro_batch.forward)
    with pytest.raises(PipelineError, match=r"where the next one expects \(1, 2, 3\)"):
        program.forward(narrower, None)


def test_a_model_that_skips_the_stages_last_layer_is_an_error() -> None:
    model, program, micro_batch = one_stage("bert_sequence", range(3))
    skips = MicroBatch(0, micro_batch.inputs, 1.0, micro_batch.activation_shape, lambda _: torch.zeros(()))
    with pytest.raises(PipelineError, match="it skipped the stage's last layer"):
        program.forward(skips, None)


# ---- the cached entry ----


@pytest.mark.parametrize("name", ["bert_sequence", "electra_token"])
@pytest.mark.parametrize("stop", [4, 8, None], ids=["wholly-below", "entry-inside", "with-the-head"])
def test_each_sample_runs_only_through_what_its_stored_activation_does_not_cover(stop: int | None, name: str) -> None:
    """Five samples, of which none, one and two layers are stored; the entry lies above two layers."""
    entry_block = 5
    model = build_model(name).eval()
    inputs = batch_of(name)
    structure = trace(model, inputs)
    view = StageView(model, find_splitter(model), structure)

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**given).loss

    def hidden_after(num_layers: int) -> torch.Tensor:
        with torch.no_grad():
            return view.run(range(2 * num_layers + 1), None, lambda: forward(inputs))

    levels = torch.tensor([0, 2, 1, 0, 2])
    stored = torch.zeros_like(hidden_after(1))
    for level in (1, 2):
        stored[levels == level] = hidden_after(level)[levels == level]
    blocks = range(stop or structure.num_blocks)
    shape = tuple(stored.shape)

    def program_of(own: range) -> ModelProgram:
        return ModelProgram(view, own, torch.float32, False, WeightGradients(linear_layers(model)))

    view.install(blocks)
    whole = program_of(blocks)
    above = program_of(range(entry_block, blocks.stop)) if entry_block < blocks.stop else None
    below = range(min(entry_block, blocks.stop))
    program = CachedEntryProgram(view, below, entry_block, above, whole, torch.float32, torch.float32, CPU)
    samples = torch.arange(NUM_SAMPLES)
    tags = CacheTags(samples, levels, torch.zeros(len(samples), 2, dtype=torch.int64), 1, stored)
    written: list[torch.Tensor] = []
    micro_batch = MicroBatch(
        0, inputs, 1.0, shape, forward, tags=tags, write=lambda _, hidden: written.append(hidden.clone())
    )
    plain = MicroBatch(1, inputs, 1.0, shape, forward)
    expected = whole.forward(plain, None).detach()
    if above is None:
        expected[levels == 2] = stored[levels == 2]  # It goes on with the others to where it enters.

    executed: Counter[int] = Counter()
    for index, layer in enumerate(structure.layers):
        layer.register_forward_pre_hook(
            lambda _, args, index=index: executed.update({index: len(args[0])}) if _runs(view, index) else None
        )
    found = program.forward(micro_batch, None)
    torch.testing.assert_close(found.detach(), expected)
    # Two samples begin at the embeddings, one above the first layer.
    assert executed[0] == 2
    assert executed[1] == 3
    if stop is None or stop > entry_block:
        torch.testing.assert_close(written, [hidden_after(2)])
    else:
        assert not written
    if above is None:
        assert not found.requires_grad
        return
    gradient = None if stop is None else torch.ones(shape)
    program.backward(micro_batch, gradient)
    gradients = gradients_of(model)
    assert gradients
    assert all(structure.blocks_of_parameter[name][0] >= entry_block for name in gradients)
    # A batch of which nothing is stored runs whole, and one of which nothing is stored yet in two parts.
    torch.testing.assert_close(program.forward(plain, None).detach(), expected)
    fresh = replace(
        micro_batch,
        tags=CacheTags(samples, torch.zeros_like(levels), torch.zeros(len(samples), 2, dtype=torch.int64), 0, None),
    )
    for _ in range(2):
        torch.testing.assert_close(program.forward(fresh, None).detach(), expected)


def _runs(view: StageView, index: int) -> bool:
    return bool({2 * index + 1, 2 * index + 2} & set(view.blocks))


# ---- the last gradients of a step ----


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ("F0 B0 F1 B1", {"B1": "linear norm"}),
        ("F0 F1 I0 I1 W0 W1", {"I1": "norm", "W1": "linear"}),
        ("F0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1", {"B1.1": "upper", "B1": "linear norm both"}),
        ("F0 F0.1 I0.1 I0 W0 W0.1", {"I0": "norm", "W0": "linear", "W0.1": "upper both"}),
        ("F0 F0.1 B0.1", {"B0.1": "upper both"}),
    ],
)
def test_the_last_gradient_of_each_parameter(actions: str, expected: dict[str, str]) -> None:
    chunks = {"linear": {0}, "norm": {0}}
    if "." in actions:
        chunks |= {"upper": {1}, "both": {0, 1}}
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in chunks}
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = last_gradients(
        rows_of(actions),
        {parameters[name]: users for name, users in chunks.items()},
        {parameter for name, parameter in parameters.items() if name != "norm"},
    )
    assert {str(action): {names[id(p)] for p in own} for action, own in found} == {
        action: set(text.split()) for action, text in expected.items()
    }
