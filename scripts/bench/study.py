"""What studies share: which of their runs are to be done, the lines of finished ones, and differences paired by seed.

A study has groups (tasks, or `views`); a finished run of a contender with a seed is a line of the group's file. One
with other settings than those in force counts as not done.
"""

from __future__ import annotations

import fnmatch
import json
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from .measure import REPOSITORY, Settings, interval_95, launch


SEEDS = (0, 1, 2, 3, 4)
DEFAULTS = "freeze_defaults"
"""Among the settings of a run with a policy: the options of freezing that were left as they are."""
Record = dict[str, Any]
"""A finished run: a line of a file."""
Runs = dict[str, dict[int, Record]]
"""By contender and seed."""


# ---- which runs ----


def do_chosen(
    settings: Settings, name: str, contenders: Mapping[str, Collection[str]], finish: Callable[..., None],
    quick_groups: Sequence[str], quick_contenders: Sequence[str],
) -> Path:  # fmt: skip
    """Do the runs that were chosen and are not finished, and return the folder of all that are.

    Args:
        name: of the folder in benchmarks/ with the finished runs; those of a quick look are elsewhere.
        contenders: by group.
        finish: does them, from the folders of data, models and runs, groups, seeds and contenders.
        quick_groups: of a quick look, with the first seed.
    """
    folder = settings.of(REPOSITORY / "benchmarks" / name, settings.folder)
    names = list(dict.fromkeys(each for group in contenders.values() for each in group))
    groups = matching("tasks", settings.tasks or settings.of(list(contenders), quick_groups), contenders)
    chosen = matching("contenders", settings.contenders or settings.of(names, quick_contenders), names)
    seeds = settings.of(SEEDS, SEEDS[:1]) if settings.seeds is None else settings.seeds
    if seeds:
        launch(finish, 1, settings.data, settings.models, folder, groups, seeds, chosen, minutes=math.inf)
    return folder


def matching(option: str, patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Names that were given, in full or by a pattern."""
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    for pattern in [pattern for pattern in found if not found[pattern]]:
        sys.exit(f"Found --{option} {pattern!r}; expected names or patterns of {', '.join(sorted(names))}.")
    return [name for name in names if any(name in each for each in found.values())]


def missing(runs: Callable[[], Runs], seeds: Iterable[int], contenders: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield seed and contender of each run that has no line yet, all contenders of a seed before the next seed.

    Args:
        runs: reads the finished ones, each time anew, as another process may have written.
    """
    return ((seed, name) for seed, name in product(seeds, contenders) if seed not in runs()[name])


# ---- lines of finished runs ----


def read_records(path: Path) -> list[Record]:
    """Read a file; a last line that was cut off is left out."""
    lines = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1] if line]


def add_record(path: Path, record: Record, result: str) -> None:
    """Add a line at once, as several processes may write, and print the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{path.stem}, seed {record['seed']}, {result}", flush=True)


def are_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether settings are the same; an option that one of them does not know yet has changed nothing."""
    of_found, of_expected = found.get(DEFAULTS, {}), expected.get(DEFAULTS, {})
    if any(of_found[name] != of_expected[name] for name in of_found.keys() & of_expected.keys()):
        return False
    return {**found, DEFAULTS: None} == {**expected, DEFAULTS: None}


def in_force(records: Iterable[Record], settings: Mapping[str, dict[str, Any]]) -> Runs:
    """Select the first run of each contender and seed with the settings (by contender) that the study has now.

    Results of contenders that the study no longer has stay.
    """
    runs: Runs = {name: {} for name in settings}
    for record in records:
        name = record["contender"]
        if name not in settings or are_same(record["settings"], settings[name]):
            runs.setdefault(name, {}).setdefault(record["seed"], record)
    return runs


# ---- figures ----


def paired(differences: Mapping[int, float], digits: int = 3) -> dict[str, Any]:
    """Mean of differences by seed, and its 95 % interval where there are two or more."""
    values = [differences[seed] for seed in sorted(differences)]
    row: dict[str, Any] = {"seeds": sorted(differences), "points": [round(value, digits) for value in values]}
    row["mean"] = round(statistics.mean(values), digits) if values else None
    if len(values) > 1:
        row["interval_95"] = [round(end, digits) for end in interval_95(values)]
    return row
