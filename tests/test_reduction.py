"""Gradients are summed over replicas in buckets, each as soon as it is full."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.engine import reduction
from hf_pipetransformer.engine.reduction import GradientReducer
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
