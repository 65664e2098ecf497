"""Gradients are summed over replicas in buckets, each as soon as it is full."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.engine import reduction
from hf_pipetransformer.engine.embeddings import EmbeddingGradients
from hf_pipetransformer.engine.reduction import GradientReducer, GradientSums, SharedParameter
from tests.doubles.device import DEVICE, DeviceStandIn


NUM_PARAMETERS = 20


class Asked(nn.Parameter):
    """Counts how often anybody asks whether it is trained."""

    counts: Counter[int] = Counter()

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        self.counts[id(self)] += 1
        return bool(nn.Parameter.requires_grad.__get__(self))  # type: ignore[attr-defined]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each bucket that was launched; the replicas are one."""
    found: list[int] = []

    def all_reduce(flat: torch.Tensor, **_: Any) -> Any:
        found.append(flat.numel())
        return SimpleNamespace(wait=lambda *_: None)

    monkeypatch.setattr(reduction.dist, "all_reduce", all_reduce)
    return found


def step(reducer: GradientReducer, trained: list[nn.Parameter]) -> None:
    reducer.arm(trained)
    torch.stack([parameter.sum() for parameter in trained]).sum().backward()


def test_a_hook_does_not_look_through_its_whole_bucket(launched: list[int]) -> None:
    """One look at each parameter a step is enough."""
    parameters = [Asked(torch.ones(1)) for _ in range(NUM_PARAMETERS)]
    reducer = GradientReducer(parameters, object(), 1.0, "replicas")
    for _ in range(2):
        Asked.counts.clear()
        step(reducer, parameters)
        assert launched.pop() == 2 * NUM_PARAMETERS  # Before `finish`.
        reducer.finish()
        assert max(Asked.counts[id(parameter)] for parameter in parameters) == 1


def test_a_bucket_does_not_wait_for_parameters_that_are_not_trained_in_this_step(launched: list[int]) -> None:
    """Which ones are not may change from step to step."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    reducer = GradientReducer(parameters, object(), 1.0, "replicas")
    for left_out in ([0, 2], [], [3], [0, 1, 2]):
        for index, parameter in enumerate(parameters):
            parameter.requires_grad_(index not in left_out)
        step(reducer, [p for index, p in enumerate(parameters) if index not in left_out])
        assert launched.pop() == 8
        reducer.finish()
        assert [parameter.grad is None for parameter in parameters] == [index in left_out for index in range(4)]
        for parameter in parameters:
            parameter.grad = None


@pytest.mark.parametrize("used", [[0, 1], [0]], ids=["all", "one-is-missing"])
def test_the_host_asks_the_device_only_for_gradients_that_are_missing_here(
    launched: list[int], used: list[int]
) -> None:
    stand_in = DeviceStandIn()
    with stand_in.active():
        parameters = [nn.Parameter(torch.ones(1, device=DEVICE)) for _ in range(2)]
        reducer = GradientReducer(parameters, object(), 1.0, "replicas")
        for _ in range(2):
            step(reducer, [parameters[i] for i in used])
            stand_in.taken()
            reducer.finish()
            assert len(stand_in.taken()) == (len(used) < 2)
            assert [parameter.grad is not None for parameter in parameters] == [i in used for i in range(2)]
            for parameter in parameters:
                parameter.grad = None
    assert not stand_in.mixtures


def test_a_replica_without_gradients_adds_nothing_to_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what is left in the buffer from the step before."""
    sent: list[torch.Tensor] = []

    def all_reduce(flat: torch.Tensor, **_: Any) -> Any:
        sent.append(flat.clone())
        return SimpleNamespace(wait=lambda *_: None)

    monkeypatch.setattr(reduction.dist, "all_reduce", all_reduce)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    reducer = GradientReducer(parameters, object(), 1.0, "replicas")
    for trained in (parameters, parameters[:1]):
        for parameter in parameters:
            parameter.grad = None
        step(reducer, trained)
        reducer.finish()
    # The second parameter comes first; a flag each at the end says who has a gradient.
    assert [flat.tolist() for flat in sent] == [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1]]


def _backward(parameter: nn.Parameter, times: int) -> None:
    for _ in range(times):
        parameter.sum().backward()


@pytest.mark.parametrize("has_replicas", [False, True])
@pytest.mark.parametrize("in_float32", [False, True])
def test_gradients_of_half_precision_are_added_in_float32(
    launched: list[int], has_replicas: bool, in_float32: bool
) -> None:
    """300 ones add up to 256 in bfloat16, where 257 rounds to 256."""
    half, whole, unused = (nn.Parameter(torch.ones(n)) for n in (2, 3, 1))
    half.data, unused.data = half.data.bfloat16(), unused.data.bfloat16()
    parameters = [half, whole, unused]
    sums = GradientSums(parameters) if in_float32 else None
    reducer = GradientReducer(parameters, object() if has_replicas else None, 1.0, "replicas", sums)
    for _ in range(2):
        _backward(whole, 300)
        _backward(half, 299)
        assert (half.grad is None) == in_float32
        reducer.arm(parameters)
        _backward(half, 1)
        reducer.finish()
        assert bool(launched) == has_replicas
        assert half.grad is not None and half.grad.dtype is torch.bfloat16
        assert half.grad.tolist() == [300 if in_float32 else 256] * 2
        assert whole.grad is not None and whole.grad.tolist() == [300] * 3
        assert unused.grad is None
        for parameter in parameters:
            parameter.grad = None
    reducer.remove()
    _backward(half, 300)
    assert half.grad.tolist() == [256] * 2


@pytest.mark.parametrize("is_owner", [False, True])
def test_gradients_of_shared_weights_are_added_in_float32_too(launched: list[int], is_owner: bool) -> None:
    tied = nn.Parameter(torch.ones(2).bfloat16())
    shared = [SharedParameter("tied", tied, object(), None, 0, is_owner)]
    reducer = GradientReducer([], None, 1.0, "replicas", GradientSums([tied]))
    _backward(tied, 300)
    reducer.finish(shared)
    assert launched == [3]
    assert (None if tied.grad is None else tied.grad.tolist()) == ([300, 300] if is_owner else None)


def test_a_table_whose_gradient_was_kept_back_is_reduced_whole(launched: list[int]) -> None:
    """Also where its own part of another gradient came before, as that of a head with the same weight does."""
    table = nn.Embedding(10, 2)
    kept = EmbeddingGradients([table])
    reducer = GradientReducer([table.weight], object(), 1.0, "replicas")
    for ids in ([1, 2], [2, 3]):
        with kept.keeping():
            rows = table(torch.tensor(ids))
        (rows.sum() + table.weight.sum()).backward()
    assert launched == []
    reducer.arm(kept.parameters)
    kept.add()
    assert launched == [21], "by the hook, before `finish`"
    reducer.finish()
    counts = torch.tensor([2.0, 3, 4, 3, 2, 2, 2, 2, 2, 2])
    assert torch.equal(table.weight.grad, counts[:, None].expand(-1, 2))
