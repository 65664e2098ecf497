"""Frozen parts on two processes: DistributedDataParallel's numbers, and one store, all of which both read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.computed_once_worker import train
from tests.distributed.scenarios import run
from tests.support.frozen_models import NUM_SAMPLES


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


def test_processes_read_what_the_others_have_computed(tmp_path: Path) -> None:
    """Epochs are shuffled anew, so that each process gets rows of the other."""
    names = ["whisper", "t5", "clip"]
    ranks = run(train, tmp_path, 2, {"names": names}, timeout=150)
    for found in ranks:
        for name in names:
            told = found[name]
            np.testing.assert_allclose(told["ours"], told["plain"], rtol=1e-5, atol=1e-5)
        # Of 3 epochs, each process watches its first batch of 3 rows; all is read that any of them has stored.
        np.testing.assert_allclose(found["talks"], found["whisper"]["plain"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["called"], found["whisper"]["plain"], rtol=1e-5, atol=1e-5)
    for name in names:
        ((hits, misses),) = np.sum([found[name]["counts"] for found in ranks], axis=0).tolist()
        assert (hits, misses) == (2 * NUM_SAMPLES - 6, NUM_SAMPLES), (
            name,
            [line[:150] for line in ranks[0]["said"] if "model.encoder" in line or "computed from here" in line],
            [found[name]["counts"] for found in ranks],
        )
    read = [line for line in ranks[0]["said"] if line.startswith("model.encoder: ") and "instead of" in line]
    assert [line.split()[1] for line in read[-2:]] != ["0", "0"], "the callback's, and that of a loss that talks"
    assert any("outputs were read instead of computed by this process" in line for line in ranks[0]["said"])
