"""What two runs with features of Trainer wrote down, compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.distributed.launches import Outcome
from tests.support.comparison import relative_difference, untimed


__all__ = ["IN_EVERY_ENTRY", "LAYOUT_SCALARS", "TOLERANCE", "differences", "differs", "logged"]

TOLERANCE = 1e-5

# Trainer puts these into entries of the pipeline's own too.
IN_EVERY_ENTRY = {"epoch", "step", "num_input_tokens_seen"}
LAYOUT_SCALARS = {
    *("pipeline_stages", "pipeline_chunks", "pipeline_replicas", "pipeline_microbatches"),
    *("frozen_layers", "cached_layers", "cache_hit_rate"),
    *("samples_per_second", "tokens_per_second", "memory_gb", "bubble_share"),
}
"""What the pipeline logs of its own."""


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
