"""The stand-in for a device notes what a device would wait for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_pipetransformer.comm import staging
from tests.doubles.device import DEVICE, HOST, DeviceStandIn


Call = Callable[[torch.Tensor], object]

WAITS: dict[str, Call] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum()),
    "float": lambda t: float(t[0]),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to another dtype": lambda t: t.to("cpu", torch.float64),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "mask": lambda t: t[t > 0],
    "equal": lambda t: torch.equal(t, t + 1),
    "copy to the host": lambda t: torch.zeros(4).copy_(t),
    "copy to pageable memory": lambda t: torch.zeros(4).copy_(t, non_blocking=True),
    "copy from the host": lambda t: t.copy_(torch.zeros(4)),
    "tensor": lambda t: torch.tensor([1.0], device=DEVICE),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "blocking copy to the device": lambda t: torch.zeros(4).to(t.device),
    "index on the host": lambda t: t[torch.tensor([0, 1])],
    "derived": lambda t: (t * 2).exp().new_ones(3).cumsum(0).tolist(),
    "gradient": lambda t: _gradient(t).tolist(),
}

NO_WAITS: dict[str, Call] = {
    "arithmetic": lambda t: torch.cat([t, t.new_zeros(3)]).sum().sqrt(),
    "asynchronous copy to the device": lambda t: torch.zeros(4).to(DEVICE, non_blocking=True),
    "asynchronous copy to pinned memory": lambda t: torch.empty(4, pin_memory=True).copy_(t, non_blocking=True),
    "made there": lambda t: torch.full((), 3.0, device=DEVICE) + t,
    "the same device": lambda t: t.to(DEVICE),
    "another dtype": lambda t: t.to(torch.float64),
    "like another": lambda t: t.to(torch.zeros(1, device=DEVICE, dtype=torch.float64)),
    "host's own": lambda t: torch.zeros(4).tolist(),
    "index there": lambda t: t[torch.zeros(2, dtype=torch.int64, device=DEVICE)],
    "gradient": lambda t: _gradient(t),
    "clipping": lambda t: torch.nn.utils.clip_grads_with_norm_([_with_gradient(t)], 1.0, t.norm()),
}


def _with_gradient(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(tensor.clone())
    (parameter * parameter).sum().backward()
    return parameter


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    gradient = _with_gradient(tensor).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("call", WAITS.values(), ids=WAITS.keys())
def test_what_waits_is_noted(call: Call):
    stand_in = DeviceStandIn()
    with stand_in.active():
        tensor = torch.ones(4, device=DEVICE)
        call(tensor)
    assert stand_in.waits and all("test_device_double.py" in wait for wait in stand_in.waits)


@pytest.mark.parametrize("call", NO_WAITS.values(), ids=NO_WAITS.keys())
def test_what_does_not_wait_is_not_noted(call: Call):
    stand_in = DeviceStandIn()
    with stand_in.active():
        tensor = torch.ones(4, device=DEVICE)
        call(tensor)
    assert not stand_in.waits and not stand_in.mixtures


def test_a_mixture_is_noted():
    stand_in = DeviceStandIn()
    with stand_in.active():
        tensor = torch.ones(4, device=DEVICE)
        assert tensor.device == DEVICE and torch.ones(4).device == HOST
        tensor + torch.tensor(1.0)
        assert not stand_in.mixtures
        tensor + torch.ones(4)
    assert len(stand_in.mixtures) == 1


def test_the_package_takes_it_for_a_device_inside_only():
    with DeviceStandIn().active():
        assert staging.is_apart(DEVICE) and not staging.is_apart(HOST)
    assert not staging.is_apart(DEVICE)
