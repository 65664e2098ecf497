"""What a forward does besides giving its output, and how it is put back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_pipetransformer.data.effects import Alone, Effects, buffers_kept, effects_of


class Tracks(nn.Module):
    """Keeps the largest value that it has seen: written in place, or as another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.largest: torch.Tensor
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.largest.copy_(given.max())
        else:
            self.largest = torch.maximum(self.largest, given.max())
        return given


def effects(module: nn.Module) -> Effects:
    given = torch.ones(3, 2)

    def are_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, found, expected))

    return effects_of(lambda: [module(given)], module, are_alike)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_a_forward_changes_are_put_back(in_place: bool) -> None:
    module = Tracks(in_place)
    before = module.largest
    assert "keeps statistics" in str(effects(module).why_not_repeatable)
    with buffers_kept(module):
        module(torch.full((2,), 5.0))
    assert module.largest is before
    assert float(before) == 0


class Draws(nn.Module):
    """Draws one number, which counts if it is under a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 2 if torch.rand(()) < self.bound else given


def test_a_draw_that_never_counts_is_told_from_one_that_seldom_does() -> None:
    assert effects(Draws(0.0)) == Effects(None, 1)
    assert "random" in str(effects(Draws(1e-6)).why_not_repeatable)
    assert "random" in str(effects(nn.Dropout(0.1)).why_not_repeatable)
    assert effects(nn.Linear(2, 2)) == Effects(None, 0)


def test_communication_is_refused_where_processes_do_not_run_in_step() -> None:
    with pytest.raises(RuntimeError, match="the forward or the loss communicates with other processes"):
        Alone().__torch_dispatch__(SimpleNamespace(namespace="c10d"), ())
    with Alone():
        assert torch.ones(2).sum() == 2
