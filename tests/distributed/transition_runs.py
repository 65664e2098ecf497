"""Launches the selected cases of changing layouts, all in one launch, and their references in another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launcher import launch
from tests.distributed.transition_cases import WORLD_SIZE, TransitionCase


WORKER = Path(__file__).with_name("transition_worker.py")

# Seconds a launch may take: to start, and for each case.
START_SECONDS = 120
CASE_SECONDS = 25


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one run of one case wrote down."""

    ranks: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    output: Path

    def logged(self, key: str) -> list[dict[str, float]]:
        return [entry for entry in self.ranks[0]["log_history"] if key in entry]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.output / "pipetransformer_events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def read_outcome(folder: Path, case: TransitionCase, num_ranks: int, output: str) -> Outcome:
    """What a case wrote into `folder`; fails with the ranks' `output` if it came to no end."""
    paths = [folder / f"{case.name}.rank{rank}.json" for rank in range(num_ranks)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        pytest.fail(f"{missing} were not written.\n{output}", pytrace=False)
    ranks = [json.loads(path.read_text()) for path in paths]
    errors = [f"rank {rank}:\n{values['error']}" for rank, values in enumerate(ranks) if "error" in values]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    return Outcome(ranks, load_file(folder / f"{case.name}.safetensors"), folder / f"{case.name}-output")


class TransitionRuns:
    """Launches when the first outcome is asked for.

    Args:
        folder: for everything that is written.
        selected: the cases of this session by name.
    """

    def __init__(self, folder: Path, selected: Mapping[str, TransitionCase]) -> None:
        self.folder = folder
        self.selected = selected
        self._launched: dict[str, str] = {}

    def pipeline(self, case: TransitionCase) -> Outcome:
        """The run on four processes."""
        cases = list(self.selected.values())
        return read_outcome(self.folder, case, WORLD_SIZE, self._launch("pipeline", cases, WORLD_SIZE))

    def reference(self, case: TransitionCase, kind: str) -> Outcome:
        """One process with the same freezes: `single` (the same trainer) or `plain` (transformers.Trainer)."""
        references = {c.reference.name: c.reference for c in self.selected.values() if c.compares}
        output = self._launch("references", list(references.values()), 1)
        return read_outcome(self.folder / kind, case.reference, 1, output)

    def _launch(self, trainer: str, cases: list[TransitionCase], num_processes: int) -> str:
        """Run all cases; a case that ends its launch does not take the ones behind it along. Returns all output."""
        if trainer in self._launched:
            return self._launched[trainer]
        left, output, listed = list(cases), "", self.folder / f"{trainer}.json"
        last = "plain" if trainer == "references" else "."
        while left:
            listed.write_text(json.dumps([case.as_json() for case in left]))
            result = launch(
                WORKER,
                [listed, self.folder, "--trainer", trainer],
                num_processes=num_processes,
                timeout=START_SECONDS + CASE_SECONDS * len(left),
                check=False,
                grace=70,
                strict_nccl=True,
            )
            output += result.output
            if result.returncode == 0:
                break
            done = [case for case in left if (self.folder / last / f"{case.name}.rank0.json").exists()]
            left = left[max(len(done), 1) :]
        self._launched[trainer] = output
        return output
