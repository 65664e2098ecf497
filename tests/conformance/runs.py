"""Launches of many short runs, and the comparison of what two runs wrote down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.scenarios import read_notes, run_each
from tests.support.comparison import relative_difference, untimed


__all__ = ["LAYOUT_SCALARS", "TOLERANCE", "Launches", "Layout", "Outcome", "Run", "differences", "differs", "logged"]

# Seconds a launch may take: to start, and for each run.
START_SECONDS = 120
RUN_SECONDS = 15

TOLERANCE = 1e-5

Layout = tuple[int, int]

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


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one run wrote down."""

    ranks: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]

    def starting_with(self, *prefixes: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.tensors.items() if name.startswith(prefixes)}


class Launches:
    """Launches the selected runs, all of one layout together, when the first of them is asked for.

    Args:
        scenario: calls `conformance_worker.run_listed`.
        folder: for what the runs write.
        runs: those of all layouts; with `Run.reference` for what is compared.
    """

    def __init__(self, scenario: Callable[..., None], folder: Path, runs: Sequence[Run]) -> None:
        self.scenario = scenario
        self.folder = folder
        self.runs = runs
        self.output: dict[Layout | None, str] = {}

    def ranks(self, run: Run) -> list[dict[str, Any]]:
        """What each rank noted of `run`."""
        folder = self._folder(run.layout)
        if run.layout not in self.output:
            folder.mkdir()
            self.output[run.layout] = self._launch_all(run.layout, folder)
        num_ranks = run.layout[0] * run.layout[1] if run.layout else 1
        return read_notes(folder, run.name, num_ranks, self.output[run.layout], allows_errors=True)

    def outcome(self, run: Run) -> Outcome:
        ranks = self.ranks(run)
        errors = [f"rank {rank}:\n{values['error']}" for rank, values in enumerate(ranks) if "error" in values]
        if errors:
            pytest.fail("\n".join([str(run), *errors]), pytrace=False)
        return Outcome(ranks, load_file(self._folder(run.layout) / f"{run.name}.safetensors"))

    def _folder(self, layout: Layout | None) -> Path:
        return self.folder / (f"{layout[0]}x{layout[1]}" if layout else "reference")

    def _launch_all(self, layout: Layout | None, folder: Path) -> str:
        return run_each(
            self.scenario,
            folder,
            {
                run.name: {"name": run.name, "features": dict(run.features)}
                for run in self.runs
                if run.layout == layout
            },
            layout[0] * layout[1] if layout else 1,
            (START_SECONDS, RUN_SECONDS),
            options={"num_stages": layout[0]} if layout else {},
        )


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
