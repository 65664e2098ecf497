"""What the simulation of the paper's machine counts: values of weights that a kind moves, worked by hand."""

from __future__ import annotations

import pytest

from scripts.bench.async_simulation import BERT_48, Moves, largest_batch, moves, throughput


@pytest.mark.parametrize(
    ("kind", "stage", "expected"),
    [
        # Adam reads weight, gradient and two moments, and writes all but the gradient.
        ("vanilla", 0, Moves(0, 0, 7)),
        # A copy aside and a prediction from the weight and two moments; the copy comes back for the backward.
        ("pipeoptim", 0, Moves(2 + 4, 2, 7)),
        ("pipeoptim", 2, Moves(0, 0, 7)),
        # A copy aside, which is kept, and the old version in; the current one comes back for the update.
        ("stashing", 0, Moves(0, 2 + 2, 2 + 7)),
        ("stashing", 2, Moves(0, 0, 7)),
        # The last of three stages predicts an update in both passes, and both see the same values.
        ("spectrain", 2, Moves(2 + 4, 0, 2 + 7)),
    ],
)
def test_values_that_a_kind_moves(kind: str, stage: int, expected: Moves) -> None:
    assert moves(kind, stage, 3, 1, "adam") == expected


def test_gpipe_waits_and_versions_take_room_for_samples() -> None:
    found = {name: largest_batch(name, BERT_48, 4) for name in ("vanilla", "pipeoptim", "stashing")}
    assert found["vanilla"] > found["pipeoptim"] > found["stashing"]
    plain, waiting = (throughput(name, BERT_48, 4, 64, float("inf")) for name in ("vanilla", "gpipe"))
    assert 1.7 < plain / waiting < 7 / 4
