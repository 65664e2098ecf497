"""Units add up to whole steps, also where the script trains a part of the model."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.splitters.profile import UnitProfile
from hf_pipetransformer.startup import whole_steps
from hf_pipetransformer.startup.whole_steps import correct_by_steps


FACTOR = 0.5
"""What a unit takes in a row, of what it takes alone."""


def corrected(
    monkeypatch: pytest.MonkeyPatch, trained: Collection[int], num_layers: int = 4
) -> tuple[UnitProfile, UnitProfile]:
    """The profile of units alone and the corrected one, where steps take exactly what units in a row take.

    Args:
        trained: units.
        num_layers: of the model.
    """
    last = 2 * num_layers + 1
    model = nn.ParameterDict({str(unit): nn.Parameter(torch.ones(1), unit in trained) for unit in range(last + 1)})
    structure: Any = SimpleNamespace(
        num_layers=num_layers, num_units=last + 1, units_of_parameter={str(unit): (unit,) for unit in range(last + 1)}
    )
    alone = UnitProfile(*([cost] * (last + 1) for cost in (1.0, 2.0, 1.25, 0.0)))

    def time_ranges(*parts: Any) -> list[tuple[float, float]]:
        found = []
        for units in parts[5]:
            begin = max(units.start, min(trained))
            backward = sum(alone.backward[begin : units.stop])
            if 0 < begin < units.stop:
                backward -= alone.backward[begin] - alone.edge_backward[begin]
            found.append((2 * FACTOR * len(units), 2 * FACTOR * backward))
        return found

    monkeypatch.setattr(whole_steps, "time_ranges", time_ranges)
    subject: Any = SimpleNamespace(model=model, splitter=None, loss=None)
    return alone, correct_by_steps(alone, subject, structure, {"input_ids": torch.zeros(2, 3)})


@pytest.mark.parametrize("first", range(9))
def test_units_below_the_first_that_is_trained_have_no_backward(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0: the embeddings are trained too; from an MLP on layers are frozen in part."""
    alone, found = corrected(monkeypatch, range(first, 10))
    assert found.forward == pytest.approx([FACTOR * each for each in alone.forward])
    assert found.backward[first:] == pytest.approx([FACTOR * each for each in alone.backward[first:]])
    assert found.edge_backward[1:-1] == pytest.approx([FACTOR * each for each in alone.edge_backward[1:-1]])


@pytest.mark.parametrize("trained", [(0, 7, 8, 9), (1, 2, 7, 8, 9), (3, 4, 9)])
def test_where_layers_between_are_frozen_units_stay_as_measured(
    trained: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their backward computes no gradients of weights, and no factor is that of all layers."""
    alone, found = corrected(monkeypatch, trained)
    assert found == alone


def test_one_layer_that_is_trained_is_below_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, found = corrected(monkeypatch, range(4), num_layers=1)
    assert found.backward == pytest.approx([FACTOR * each for each in alone.backward])
