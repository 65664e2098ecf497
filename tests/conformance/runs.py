"""Short runs with features of Trainer, and the comparison of what two of them wrote down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.distributed.launches import Layout, Outcome
from tests.support.comparison import relative_difference, untimed


__all__ = ["LAYOUT_SCALARS", "TOLERANCE", "Run", "cases_of", "differences", "differs", "logged"]

TOLERANCE = 1e-5

# Trainer puts these into entries of the pipeline's own too.
IN_EVERY_ENTRY = {"epoch", "step", "num_input_tokens_seen"}
LAYOUT_SCALARS = {
    *("pipeline_stages", "pipeline_chunks", "pipeline_replicas", "pipeline_microbatches"),
    *("frozen_layers", "cached_layers", "cache_hit_rate"),
    *("samples_per_second", "tokens_per_second", "memory_gb", "bubble_share"),
}
"""What the pipeline logs of its own."""


@dataclass(frozen=True)
class Run:
    """One short run.

    Args:
        name: names its files.
        features: what it is, for the worker.
        layout: K and R; None for plain Trainer in one process.
    """

    name: str
    features: Mapping[str, str] = field(hash=False)
    layout: Layout | None

    @property
    def reference(self) -> Run:
        return Run(self.name, self.features, None)


def cases_of(runs: Sequence[Run]) -> dict[Layout | None, dict[str, Any]]:
    """Return what a scenario reads, by layout and name."""
    cases: dict[Layout | None, dict[str, Any]] = defaultdict(dict)
    for run in runs:
        cases[run.layout][run.name] = {"name": run.name, "features": dict(run.features)}
    return cases


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """What differs, by key: ours and Trainer's."""
    keys = [*found, *(key for key in expected if key not in found)]
    return {key: (found.get(key), expected.get(key)) for key in keys if differs(found.get(key), expected.get(key))}


def differs(found: Any, expected: Any) -> bool:
    """Whether numbers with a fraction differ by more than the tolerance, or anything else at all."""
    if isinstance(found, float) and isinstance(expected, float):
        return relative_difference(found, expected) > TOLERANCE
    return found != expected


def logged(outcome: Outcome) -> list[dict[str, Any]]:
    """The log without what a clock says and what the pipeline adds, be it an entry of its own."""
    own = LAYOUT_SCALARS | {"total_flos"}
    entries = outcome.ranks[0]["log_history"]
    shared = [{key: value for key, value in untimed(entry).items() if key not in own} for entry in entries]
    return [entry for entry in shared if entry.keys() - IN_EVERY_ENTRY]
