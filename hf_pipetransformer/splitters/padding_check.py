"""Whether a model's loss sees padding: then what padded positions hold must be stored with a sample's activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.check import Compute, gradient_norms, gradients_discarded
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.splitters.view import StageExit, StageView


LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-4


def sees_padding(
    model: nn.Module, splitter: Splitter, structure: Structure, compute: Compute, inputs: dict[str, Any]
) -> bool:
    """Put noise on the hidden states at masked positions: does the loss or any gradient change?

    A mean over tokens that are not ignored does not see padding, a softmax over positions (question answering) does.

    Args:
        compute: the loss of the whole model.
        inputs: a tiny batch with `attention_mask`, `(batch, seq)`, that masks some positions.
    """
    view = StageView(model, splitter, structure)
    masked = inputs["attention_mask"] == 0
    try:
        view.install(range(1))
        try:
            compute(dict(inputs))
            raise AssertionError("a view without the head leaves the model early")
        except StageExit as stage_exit:
            hidden = stage_exit.hidden.detach()
        view.install(range(1, structure.num_units))
        noise = torch.randn_like(hidden) * masked[..., None]
        (loss, norms), (noisy_loss, noisy_norms) = (
            _loss_and_norms(model, view, compute, inputs, entering) for entering in (hidden, hidden + noise)
        )
    finally:
        view.remove()
    same_loss = abs(loss - noisy_loss) <= LOSS_TOLERANCE * max(abs(loss), 1e-3)
    same_norms = float((norms - noisy_norms).norm()) <= GRADIENT_TOLERANCE * max(float(norms.norm()), 1e-3)
    return not (same_loss and same_norms)


def _loss_and_norms(
    model: nn.Module, view: StageView, compute: Compute, inputs: dict[str, Any], entering: torch.Tensor
) -> tuple[float, torch.Tensor]:
    view.received = entering
    with gradients_discarded(model):
        loss = compute(dict(inputs))
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach()), gradient_norms(model)
