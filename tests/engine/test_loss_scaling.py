"""fp16: the ranks agree on an overflow, also those that saw none."""

from __future__ import annotations

import pytest
import torch

from hf_pipetransformer.engine.losses import agree_on_overflow


def step(gradient: float | None, elsewhere: float) -> tuple[float, float]:
    """One scaled step of one rank; `elsewhere` is what the other ranks found. Returns the weight and the scale."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    if gradient is not None:
        weight.grad = torch.tensor([gradient])

    def largest(tensor: torch.Tensor) -> None:
        tensor.clamp_(min=elsewhere)

    agree_on_overflow(scaler, optimizer, torch.device("cpu"), largest)
    scaler.step(optimizer)
    scaler.update()
    return weight.item(), scaler.get_scale()


def test_without_overflow_the_step_is_unscaled_and_taken() -> None:
    assert step(gradient=2.0, elsewhere=0.0) == (0.5, 4.0)


@pytest.mark.parametrize(("gradient", "elsewhere"), [(float("inf"), 0.0), (2.0, 1.0), (None, 1.0)])
def test_an_overflow_anywhere_skips_the_step_here_and_halves_the_scale(gradient: float, elsewhere: float) -> None:
    assert step(gradient, elsewhere) == (1.0, 2.0)


def test_a_stage_without_gradients_steps_with_the_others() -> None:
    assert step(gradient=None, elsewhere=0.0) == (1.0, 4.0)
