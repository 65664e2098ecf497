"""Launches of many short runs, all of one layout together, and what their ranks wrote down."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launcher import LaunchError
from tests.distributed.scenarios import read_notes, run_each


# Seconds a launch may take: to start, and for each run.
START_SECONDS = 120
RUN_SECONDS = 15

Layout = tuple[int, int]
"""K stages x R replicas."""


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one run wrote down, and the tensors that rank 0 saved."""

    ranks: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]

    @property
    def history(self) -> list[dict[str, float]]:
        return self.ranks[0]["log_history"]

    def logged(self, key: str) -> list[dict[str, float]]:
        """Return the entries of the log that have `key`."""
        return [entry for entry in self.history if key in entry]

    def starting_with(self, *prefixes: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.tensors.items() if name.startswith(prefixes)}

    def named(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors that start with `prefix`, without it."""
        return {name.removeprefix(prefix): value for name, value in self.starting_with(prefix).items()}


class Launches:
    """Launches the selected runs, all of one layout together, when the first of them is asked for.

    Args:
        scenario: runs a list of cases, of which each has its `name`.
        folder: for what the runs write.
        cases: by layout and name; those of plain Trainer in one process have the layout None.
        strict: layouts that run under the double of NCCL.
    """

    def __init__(
        self,
        scenario: Callable[..., None],
        folder: Path,
        cases: Mapping[Layout | None, Mapping[str, Any]],
        strict: Collection[Layout] = (),
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.cases = cases
        self.strict = strict
        self._output: dict[Layout | None, str] = {}
        self._refused: dict[Layout | None, str] = {}

    def ranks(self, layout: Layout | None, name: str, allows_errors: bool = False) -> list[dict[str, Any]]:
        """Return what each rank noted of a run."""
        folder = self._folder(layout)
        if layout not in self._output:
            folder.mkdir()
            try:
                self._output[layout] = self._launch_all(layout, folder)
            except LaunchError as error:
                self._output[layout] = self._refused[layout] = str(error)
        if layout in self._refused:
            pytest.fail(self._refused[layout], pytrace=False)
        num_ranks = layout[0] * layout[1] if layout else 1
        return read_notes(folder, name, num_ranks, self._output[layout], allows_errors)

    def outcome(self, layout: Layout | None, name: str) -> Outcome:
        ranks = self.ranks(layout, name)
        return Outcome(ranks, load_file(self._folder(layout) / f"{name}.safetensors"))

    def _folder(self, layout: Layout | None) -> Path:
        return self.folder / (f"{layout[0]}x{layout[1]}" if layout else "reference")

    def _launch_all(self, layout: Layout | None, folder: Path) -> str:
        return run_each(
            self.scenario,
            folder,
            self.cases[layout],
            layout[0] * layout[1] if layout else 1,
            (START_SECONDS, RUN_SECONDS),
            options={"num_stages": layout[0]} if layout else {},
            strict_nccl=layout in self.strict,
        )
