"""Slices of the head that a run of two stages takes where the logits of whole sequences do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.head_slices_worker import train
from tests.distributed.scenarios import records, start


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def test_as_few_as_fit_are_taken_with_trainers_numbers(tmp_path: Path) -> None:
    start(train, tmp_path, 1, timeout=60)
    (expected,) = records(tmp_path, 1)
    output = start(train, tmp_path, 2, timeout=120).outputs[0]
    first, second = records(tmp_path, 2)
    assert first["roomy"]["slices"] == second["roomy"]["slices"] == 1
    assert first["tight"]["slices"] == second["tight"]["slices"] == 2
    for name in ("roomy", "tight"):
        for found, plain in zip(first[name]["logged"], expected["plain"], strict=True):
            assert found == pytest.approx(plain, rel=1e-5)
    assert "pipeline_head_slices='auto': the head runs on whole sequences. The fullest device is expected" in output
    assert "pipeline_head_slices='auto': the head runs in 2 slices. The fullest device is expected to need" in output
