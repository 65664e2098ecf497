"""Frozen parts on two processes: DistributedDataParallel's numbers, and one store, all of which both read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

from hf_pipetransformer import ComputedOnce, PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts import watching
from tests.distributed.scenarios import Lines, run, scenario
from tests.support.frozen_models import CASES, NUM_SAMPLES, logged, trainer_of


class Talks(PipeTransformerTrainer):
    """Compares losses with the other processes, as contrastive ones do."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self.accelerator.gather(found[0].detach() if isinstance(found, tuple) else found.detach())
        return found


@scenario
def train(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return losses and norms of both trainers, and what ours read and said."""
    watching.WORTH = 0.0
    lines = Lines()
    logging.getLogger("hf_pipetransformer").addHandler(lines)
    found: dict[str, Any] = {}
    for name in names:
        plain = logged(trainer_of(Trainer, CASES[name], folder / f"{name} plain", per_device_train_batch_size=3))
        ours = trainer_of(PipeTransformerTrainer, CASES[name], folder / f"{name} ours", per_device_train_batch_size=3)
        counts: list[list[int]] = []
        once = ours.pipeline_run.stored_parts
        end = once.end

        def note(end: Any = end, once: Any = once, counts: Any = counts, part: str = CASES[name].part) -> None:
            counts.extend([each.counts.hits, each.counts.misses] for each in once.served if each.plan.name == part)
            end()

        once.end = note
        found[name] = {"plain": plain, "ours": logged(ours), "counts": counts}
    called = trainer_of(Trainer, CASES["whisper"], folder / "called", per_device_train_batch_size=3)
    called.add_callback(ComputedOnce("on"))
    found["called"] = logged(called)
    talks = logged(trainer_of(Talks, CASES["whisper"], folder / "talks", per_device_train_batch_size=3))
    return {**found, "talks": talks, "said": lines.lines}


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
