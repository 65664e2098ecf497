"""Where a rank's parameters lie, and which of them its process holds in memory of its own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import BertForSequenceClassification

from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.training.evaluation import _installed
from tests.doubles.device import DEVICE, HOST, DeviceStandIn
from tests.models import build_model


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
