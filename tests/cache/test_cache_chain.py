"""Keys of the frozen prefix: they change with what lies below, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from hf_pipetransformer.cache.chain import PrefixWatch, block_digests, chain_keys
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import trace_structure
from tests.support.models import NUM_LAYERS, build_model, collate, make_dataset


NAMES = ["bert_sequence", "bert_masked", "vit"]
HEAD = 2 * NUM_LAYERS + 1


def traced(name):
    """A tiny model, and who uses its parameters and buffers."""
    model = build_model(name)
    inputs = collate(list(make_dataset(name, 2)))
    structure = trace_structure(model, find_splitter(model), lambda: model(**inputs))
    return model, {**structure.blocks_of_parameter, **structure.blocks_of_buffer}


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def keys_of(model, users, num_frozen=NUM_LAYERS, context="sdpa"):
    return chain_keys(block_digests(tensors(model), users, range(2 * num_frozen + 1)), num_frozen, context)


def first_changed(users):
    """The first key that hangs on a tensor with these users: that of the layer of the first of them."""
    return max((min(users) + 1) // 2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_element_changes_the_keys_above_it_and_no_others(name):
    model, users = traced(name)
    before = keys_of(model, users)
    assert before[0] == "" and len(set(before)) == NUM_LAYERS + 1
    for tensor_name, tensor in tensors(model).items():
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        after = keys_of(model, users)
        expected = first_changed(users[tensor_name])
        found = [index for index in range(NUM_LAYERS + 1) if before[index] != after[index]]
        assert found == list(range(expected, NUM_LAYERS + 1)), tensor_name
        with torch.no_grad():
            tensor.copy_(kept)
    assert keys_of(model, users) == before


def test_the_walk_above_meets_embeddings_layers_buffers_head_and_shared_weights():
    model, users = traced("bert_masked")
    assert {min(blocks) for blocks in users.values()} == set(range(HEAD + 1))
    assert any(len(blocks) > 1 for blocks in users.values())
    assert dict(model.named_buffers()) and all(0 in users[name] for name, _ in model.named_buffers())


def test_keys_of_fewer_layers_are_the_beginning_of_those_of_more():
    model, users = traced("vit")
    every = keys_of(model, users)
    for num_frozen in range(NUM_LAYERS + 1):
        assert keys_of(model, users, num_frozen) == every[: num_frozen + 1]


def test_the_context_changes_every_key():
    model, users = traced("vit")
    pairs = list(zip(keys_of(model, users)[1:], keys_of(model, users, context="eager")[1:], strict=True))
    assert len(pairs) == NUM_LAYERS and all(one != other for one, other in pairs)


def digest(tensor, name="weight"):
    return block_digests({name: tensor}, {name: (0,)}, [0])[0]


def test_a_digest_is_over_name_dtype_shape_and_bytes():
    zeros = torch.zeros(2, 6)
    different = [zeros, torch.zeros(3, 4), torch.zeros(2, 6, dtype=torch.int32), -zeros, zeros.bfloat16()]
    assert len({digest(tensor) for tensor in different}) == len(different)
    assert digest(zeros) != digest(zeros, "bias")


def test_a_digest_does_not_depend_on_the_order_in_memory():
    tensor = torch.randn(3, 5)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(torch.nn.Parameter(tensor)) == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_a_digest_sees_one_element_of_every_dtype(dtype):
    tensor = torch.zeros(5, dtype=dtype)
    changed = tensor.clone()
    changed[4] = 1
    assert digest(tensor) != digest(changed)
    assert digest(tensor[0]) != digest(changed[4])
    assert digest(tensor[:0]) == digest(changed[:0])


def test_blocks_are_independent_of_each_other():
    named = {"low": torch.zeros(2), "high": torch.ones(2), "shared": torch.ones(3)}
    users = {"low": (0,), "high": (1,), "shared": (0, 1)}
    both = block_digests(named, users, [0, 1])
    assert block_digests(named, users, [1]) == {1: both[1]}
    assert block_digests({**named, "high": torch.zeros(2)}, users, [0, 1])[0] == both[0]
    shared = block_digests({**named, "shared": torch.zeros(3)}, users, [0, 1])
    assert shared[0] != both[0] and shared[1] != both[1]
    unknown = block_digests({**named, "late": torch.zeros(1)}, users, [0, 1])
    assert unknown[0] != both[0] and unknown[1] != both[1]


def test_what_has_no_data_is_refused_only_where_it_is_needed():
    named = {"low": torch.zeros(2), "high": torch.zeros(2, device="meta")}
    users = {"low": (0,), "high": (1,), "absent": (2,)}
    assert list(block_digests(named, users, [0])) == [0]
    with pytest.raises(ValueError, match="high is a meta tensor"):
        block_digests(named, users, [0, 1])
    with pytest.raises(ValueError, match="absent is absent: the frozen prefix can be digested only"):
        block_digests(named, users, [2])


def test_a_missing_digest_is_refused():
    with pytest.raises(ValueError, match=r"\[1\] are missing"):
        chain_keys({0: "a", 2: "b"}, 1, "")


# ---- the watch ----


@pytest.fixture
def model():
    return build_model("bert_sequence")


def watch(model):
    return PrefixWatch(model.parameters)


def test_the_watch_does_not_notice_what_changes_nothing(model):
    model.to(torch.bfloat16)
    model.bert.embeddings.word_embeddings.weight.data[32] = float("nan")
    found = watch(model)
    inputs = collate(list(make_dataset("bert_sequence", 2)))
    model(**inputs).loss.backward()
    model.eval()
    model.requires_grad_(False)
    model.state_dict()
    keep = [parameter.view(-1)[:1] for parameter in model.parameters()]
    assert keep and not found.has_changed() and not found.has_changed()


CHANGES = {
    "copy_": lambda weight: weight.copy_(weight.clone()),
    "one element": lambda weight: weight.view(-1)[:1].zero_(),
    "data.copy_": lambda weight: weight.data.copy_(weight.data + 1),
    "data": lambda weight: setattr(weight, "data", weight.data.clone()),
    "transposed data": lambda weight: setattr(weight, "data", weight.data.clone().t().contiguous().t()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_watch_notices_a_change_of_any_parameter(model, change):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert matrices
    for parameter in matrices:
        found = watch(model)
        with torch.no_grad():
            change(parameter)
        assert found.has_changed()
        assert not watch(model).has_changed()


def test_the_watch_notices_another_tensor_of_the_same_values(model):
    found = watch(model)
    layer = model.bert.encoder.layer[0].output.dense
    layer.weight = torch.nn.Parameter(layer.weight.detach())
    assert found.has_changed() and found.has_changed(thoroughly=True)


def test_the_watch_notices_loading(model):
    for state in (model.state_dict(), build_model("bert_sequence", seed=1).state_dict()):
        found = watch(model)
        model.load_state_dict(state)
        assert found.has_changed()


def test_the_watch_notices_a_step_past_autograd(model):
    found = watch(model)
    for parameter in model.parameters():
        parameter.data.add_(1e-3)
    assert found.has_changed()


def test_the_watch_takes_mixed_dtypes_and_odd_tensors():
    tensors = [torch.zeros(3, 4).t(), torch.zeros(2, dtype=torch.bfloat16), torch.tensor(1.0), torch.zeros(0)]
    found = PrefixWatch(lambda: tensors)
    assert not found.has_changed()
    # The middle element of the transposed tensor, past the version counter.
    tensors[0].data.reshape(-1)
    tensors[0].data[2, 0] = 1
    assert found.has_changed()
    assert not PrefixWatch(list).has_changed()


def test_the_watch_refuses_what_has_no_data():
    with pytest.raises(ValueError, match="A meta tensor has no data to watch"):
        PrefixWatch(lambda: [torch.zeros(2, device="meta")])
