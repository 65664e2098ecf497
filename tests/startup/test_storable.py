"""Modes and attributes of the modules around the start-up checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.startup.model import undisturbed


class Hooked(nn.Module):
    """Makes hooks in its first forward, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[Any] = []

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "has_hooks", False):
            self.inner.register_forward_hook(lambda _module, _args, output: self.seen.append(output))
            self.has_hooks = True
        return self.inner(given)


def test_hooks_that_a_forward_made_are_gone_with_the_note_of_it() -> None:
    """After a check that failed Trainer goes on: one hook of two, each seen twice, would be another model."""
    model = Hooked().train()

    def check() -> None:
        with undisturbed(model):
            model(torch.ones(1, 2))
            raise ValueError("cannot be split")

    with pytest.raises(ValueError, match="cannot be split"):
        check()
    assert model.training
    model.seen.clear()
    model(torch.ones(1, 2))
    assert len(model.seen) == 1
