"""Accuracy against time: full fine-tuning for few and for many epochs beside everything that is to be cheaper.

    python -m scripts.bench front --tasks sst2 squad --seeds 0 1 --contenders 'full*' LoRA

Tasks are in `tasks.py`: MiniLM on SST-2, on SQuAD's questions and on tags of their answers, each with the dropout of
its configuration and without; a small ViT on CIFAR-10; others. Each of `contenders.py` trains in one process with one
thread (`runs.py`). Full fine-tuning runs for 1, 2, 3, ... epochs, each with a learning-rate schedule of its own; the
others are compared with it at equal time (`report.py`). A finished run is a line of benchmarks/front/TASK.jsonl; one
with other settings than those in force counts as not done.
"""

from __future__ import annotations

import fnmatch
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..measure import REPOSITORY, Settings, experiment, launch
from .contenders import SETTINGS, VIEWS, Runs, add_record, cells_of, in_force, read_records
from .picture import write_picture
from .report import as_markdown, front_report, views_report


SEEDS = (0, 1, 2, 3, 4)


@experiment("front.json", minutes=1500, quick_minutes=2, processes=1, is_study=True)
def front(settings: Settings) -> dict[str, Any]:
    """Accuracy against time on eleven tasks, all contenders."""
    runs = _runs(settings, "front", list(SETTINGS), ["cifar10", "first 1/2 frozen, half of the epochs"])
    report = front_report(runs)
    pages = settings.of(REPOSITORY / "docs", settings.folder)
    write_picture(report, pages / "front.svg")
    (pages / "front.md").write_text(as_markdown(report))
    return report


@experiment("views.json", minutes=180, quick_minutes=4, processes=1, is_study=True)
def views(settings: Settings) -> dict[str, Any]:
    """Stored views of augmented images, half of a ViT's layers frozen, beside fresh augmentation."""
    return views_report(_runs(settings, VIEWS, [VIEWS], [VIEWS, "views: 1"])[VIEWS])


def _runs(settings: Settings, name: str, groups: Sequence[str], quick: Sequence[str]) -> dict[str, Runs]:
    """Finish what was chosen, and return all finished runs by group.

    Args:
        name: of the folder in benchmarks/ with the finished runs; those of a quick look are elsewhere.
        groups: tasks, or `views`; each has a file.
        quick: group and contender of a quick look, with the first seed.
    """
    folder = settings.of(REPOSITORY / "benchmarks" / name, settings.folder)
    names = list(dict.fromkeys(name for group in groups for name in cells_of(group)))
    tasks = _matching("tasks", settings.tasks or settings.of(groups, quick[:1]), groups)
    contenders = _matching("contenders", settings.contenders or settings.of(names, quick[1:]), names)
    seeds = settings.of(SEEDS, SEEDS[:1]) if settings.seeds is None else settings.seeds
    where = settings.data, settings.models, folder
    if seeds:
        launch(finish, 1, *where, tasks, seeds, contenders, minutes=math.inf)
    return finished(folder, groups)


def finished(folder: Path, groups: Iterable[str]) -> dict[str, Runs]:
    """All runs that count, by group."""
    settings = {group: {name: cell.settings for name, cell in cells_of(group).items()} for group in groups}
    return {group: in_force(read_records(folder / f"{group}.jsonl"), settings[group]) for group in groups}


def _matching(option: str, patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Names that were given, in full or by a pattern."""
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    for pattern in [pattern for pattern in found if not found[pattern]]:
        sys.exit(f"Found --{option} {pattern!r}; expected names or patterns of {', '.join(sorted(names))}.")
    return [name for name in names if any(name in matching for matching in found.values())]


def finish(data: str, models: str, folder: str, groups: list[str], seeds: list[int], contenders: list[str]) -> None:
    """Do every run that has no line yet, all contenders of a seed before the next seed; started by `launch`."""
    from .runs import WARM_UP, WARM_UP_SEED, run  # These find the example scripts on the path of `launch`.
    from .tasks import make_task

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for group in groups:
        cells, tasks = cells_of(group), dict[str, Any]()
        for seed, name in product(seeds, [name for name in cells if name in contenders]):
            # Read anew each time, as another process may have written.
            if seed in finished(Path(folder), [group])[group][name]:
                continue
            task, contender, settings = cells[name]
            if task not in tasks:
                tasks[task] = make_task(task, Path(data), Path(models))
                # What is imported and compiled at the first use must not be the first contender's.
                run(tasks[task], SETTINGS[task], WARM_UP, WARM_UP_SEED, max_steps=2)
            found = run(tasks[task], SETTINGS[task], contender, seed)
            record = {"contender": name, "seed": seed, "settings": settings, **found}
            add_record(Path(folder, f"{group}.jsonl"), record)
