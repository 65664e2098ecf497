"""What reaches the host without a wait: the filter of losses, frozen weights, rows of the cache, inputs one ahead."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig, MistralConfig

from hf_pipetransformer.cache.chain import PrefixWatch
from hf_pipetransformer.comm.staging import CopyStream, KnownMask, pinned
from hf_pipetransformer.compat.trainer_compat import SelfFilteringLoss
from hf_pipetransformer.data.batches import take_rows
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
    return layer, PrefixWatch(layer.parameters)


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


_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 30,
}
_MASKED = {
    "bert": BertConfig(**_SMALL),
    "llama": LlamaConfig(**_SMALL),
    # Its layers see the last four tokens only.
    "mistral": MistralConfig(**_SMALL, num_key_value_heads=2, sliding_window=4),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=30),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("hides", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", _MASKED)
def test_a_mask_that_the_host_knows_is_not_read_from_the_device(name: str, hides: bool, attention: str):
    torch.manual_seed(0)
    model = AutoModel.from_config(_MASKED[name], attn_implementation=attention).train()
    model.config.use_cache = False  # As Trainer sets it.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokens = torch.randint(2, 30, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, 4:] = 0 if hides else 1
    expected = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    expected.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    stand_in = DeviceStandIn()
    with stand_in.active():
        known = KnownMask.of(mask.to(DEVICE, non_blocking=True), mask)
        found = model.to(DEVICE)(input_ids=tokens.to(DEVICE, non_blocking=True), attention_mask=known)
        assert not [wait for wait in stand_in.waits if "masking_utils" in wait], stand_in.waits
        assert type(found.last_hidden_state) is torch.Tensor
        found.last_hidden_state.sum().backward()
    assert torch.equal(found.last_hidden_state, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_a_mask_answers_for_itself_only():
    """What is cut out of it, or what it became, is read."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    known = KnownMask.of(mask.clone(), mask)
    assert not known.all() and not known.to(torch.bool).all() and known.to(torch.bool).sum() == 7
    assert known[:, :3].all() and type(known[:, :3]) is torch.Tensor and (known + 1).all()
    assert torch.equal(known.all(dim=1), mask.all(dim=1)) and torch.equal(known[[1, 1]].all(), torch.tensor(True))
    assert known[:, -4:].to(torch.bool).sum() == 7
    assert take_rows({"mask": known}, torch.tensor([1]))["mask"].all()
    assert not take_rows({"mask": known}, torch.tensor([1, 0]))["mask"].all()
    known[0, 3] = 1
    assert known.all()
