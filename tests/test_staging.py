"""What reaches the host without a wait: the filter of losses, frozen weights, rows of the cache, inputs one ahead."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_pipetransformer.cache.chain import PrefixWatch
from hf_pipetransformer.comm.staging import CopyStream, pinned
from hf_pipetransformer.trainer_compat import SelfFilteringLoss
from tests.doubles.device import DEVICE, DeviceStandIn


@pytest.mark.parametrize("value", [0.75, math.nan, math.inf, -math.inf])
def test_a_loss_filters_itself_as_trainer_would(value: float):
    expected = torch.tensor(3.0)
    loss, num_logged = torch.tensor(value), 4
    if torch.isnan(loss) or torch.isinf(loss):
        expected += expected / num_logged
    else:
        expected += loss

    stand_in = DeviceStandIn()
    with stand_in.active():
        found = torch.full((), 3.0, device=DEVICE)
        own = SelfFilteringLoss.of(torch.full((), value, device=DEVICE), num_logged)
        assert not (torch.isnan(own) or torch.isinf(own))
        assert own.device == found.device
        found += own
    assert not stand_in.waits and type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert own.item() == pytest.approx(value, nan_ok=True)


def watched() -> tuple[nn.Linear, PrefixWatch]:
    layer = nn.Linear(8, 8).to(DEVICE)
    return layer, PrefixWatch(list(layer.parameters()))


def test_frozen_weights_on_a_device_are_compared_without_waiting():
    stand_in = DeviceStandIn()
    with stand_in.active():
        layer, watch = watched()
        stand_in.taken()
        assert not watch.has_changed(at_once=False)
        layer.weight.data.mul_(2)
        assert not watch.has_changed(at_once=False), "asked for now, looked at by the next call"
        assert watch.has_changed(at_once=False)
        assert not stand_in.waits


def test_frozen_weights_on_a_device_are_compared_at_once_where_that_is_asked_for():
    with DeviceStandIn().active():
        layer, watch = watched()
        layer.weight.data.mul_(2)
        assert watch.has_changed()


def test_versions_of_frozen_weights_need_no_device():
    with DeviceStandIn().active():
        layer, watch = watched()
        with torch.no_grad():
            layer.weight.mul_(2)
        assert watch.has_changed(at_once=False)


def test_a_batch_is_pinned_but_for_its_placeholders():
    stand_in = DeviceStandIn()
    with stand_in.active():
        batch = pinned({"labels": torch.zeros(4), "image": torch.zeros(1).expand(4, 3), "name": "x"})
        assert batch["labels"].is_pinned() and batch["image"].stride() == (0, 0) and batch["name"] == "x"


def test_a_copy_to_the_host_is_begun_and_not_waited_for():
    stand_in = DeviceStandIn()
    with stand_in.active():
        there = torch.arange(4.0, device=DEVICE) * 2
        arriving = CopyStream(DEVICE).to_host(there)
    assert not stand_in.waits
    assert arriving.on_host().tolist() == [0, 2, 4, 6]
