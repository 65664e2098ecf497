"""Trainings of models with frozen parts on two processes, by plain Trainer and by ours."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_pipetransformer import ComputedOnce, PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts import watching
from tests.distributed.scenarios import Lines, scenario
from tests.support.frozen_models import CASES, logged, trainer_of


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
