"""Token slices beside whole sequences: a Llama of 8 layers x 384 on two stages.

Contenders are `1f1b` with the most micro-batches that the batch allows, equal slices, and the slices that a run plans
from times that it measures at its start.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from hf_pipetransformer.schedules.layout import Layout

from .measure import Settings, alternate, experiment, launch, ratios, report, summary
from .models import RandomModel, llama
from .training import train


SHAPES = ((2, 512), (2, 1024), (2, 2048))
"""Sequences of a batch, and tokens of a sequence."""
NUM_STEPS, NUM_WARM = 6, 2
WHOLE, PLANNED = "1f1b, whole sequences", "planned slices"
CONTENDERS = {
    WHOLE: {"pipeline_schedule": "1f1b"},
    **{f"{count} equal slices": {"pipeline_token_slices": str(count)} for count in (2, 4, 8)},
    PLANNED: {},
}


def compare(samples: int, length: int, rounds: int) -> dict[str, Any]:
    """Median step times of all contenders by turns, on the ranks of a launch."""
    model = RandomModel(partial(llama, num_tokens=length), samples, 8)
    layouts: dict[str, Layout] = {}

    def step_seconds(name: str, options: dict[str, Any]) -> float:
        common = {"pipeline_parallel_size": "2", "pipeline_schedule": "token", "max_steps": NUM_STEPS}
        trainer = train(model.task(NUM_STEPS + 1), samples, **{**common, "pipeline_gather_at_end": "never", **options})
        layouts[name] = trainer.layout
        return statistics.median(trainer.clock.seconds[NUM_WARM:])

    turns = {name: partial(step_seconds, name, options) for name, options in CONTENDERS.items()}
    seconds = alternate(turns, rounds)
    equal = [name for name in CONTENDERS if name not in (WHOLE, PLANNED)]
    best = min(equal, key=lambda name: statistics.median(seconds[name]))
    return {
        "seconds": {name: summary(each) for name, each in seconds.items()},
        "cuts": {name: [each.num_microbatches, each.token_slices] for name, each in layouts.items()},
        "planned, times as fast as whole sequences": summary(ratios(seconds[WHOLE], seconds[PLANNED]), 2),
        "best equal slices": best,
        "planned, times as fast as these": summary(ratios(seconds[best], seconds[PLANNED]), 2),
    }


@experiment("tokens.json", minutes=36, quick_minutes=1)
def tokens(settings: Settings) -> dict[str, Any]:
    """Token slices, equal and planned, beside whole sequences, by length (TeraPipe's Figures 5 to 9)."""
    rows = []
    for samples, length in settings.of(SHAPES, SHAPES[:1]):
        found = launch(compare, 2, samples, length, settings.of(5, 1))
        rows.append({"sequences": samples, "tokens": length, **found})
        report(f"{samples} x {length}", found)
    return {"rows": rows}
