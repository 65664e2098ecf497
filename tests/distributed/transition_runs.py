"""Launches the selected cases of changing layouts, all in one launch, and their references in another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.distributed.launches import Outcome
from tests.distributed.scenarios import read_notes, run_each
from tests.distributed.transition_cases import WORLD_SIZE, TransitionCase
from tests.distributed.transition_worker import run_all


# Seconds a launch may take: to start, and for each case.
START_SECONDS = 120
CASE_SECONDS = 25

PIPELINE, REFERENCES = ("pipeline",), ("single", "plain")


def read_outcome(folder: Path, case: TransitionCase, num_ranks: int, output: str) -> Outcome:
    """What a case wrote into `folder`; fails with the ranks' `output` if it came to no end."""
    ranks = read_notes(folder, case.name, num_ranks, output)
    return Outcome(ranks, folder / case.name)


class TransitionRuns:
    """Launches when the first outcome is asked for.

    Args:
        folder: for everything that is written.
        selected: the cases of this session by name.
    """

    def __init__(self, folder: Path, selected: Mapping[str, TransitionCase]) -> None:
        self.folder = folder
        self.selected = selected
        self._launched: dict[tuple[str, ...], str] = {}

    def pipeline(self, case: TransitionCase) -> Outcome:
        """The run on four processes."""
        cases = list(self.selected.values())
        return read_outcome(self.folder, case, WORLD_SIZE, self._launch(PIPELINE, cases, WORLD_SIZE))

    def reference(self, case: TransitionCase, kind: str) -> Outcome:
        """One process with the same freezes: `single` (the same trainer) or `plain` (transformers.Trainer)."""
        references = {c.reference.name: c.reference for c in self.selected.values() if c.compares}
        output = self._launch(REFERENCES, list(references.values()), 1)
        return read_outcome(self.folder / kind, case.reference, 1, output)

    def _launch(self, kinds: tuple[str, ...], cases: list[TransitionCase], num_processes: int) -> str:
        if kinds not in self._launched:
            self._launched[kinds] = run_each(
                run_all,
                self.folder,
                {case.name: case.as_json() for case in cases},
                num_processes,
                (START_SECONDS, CASE_SECONDS),
                noted_in="." if kinds == PIPELINE else kinds[-1],
                options={"kinds": kinds},
                strict_nccl=True,
            )
        return self._launched[kinds]
