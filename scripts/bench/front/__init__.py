"""Accuracy against time: full fine-tuning for few and for many epochs beside everything that is to be cheaper.

    python -m scripts.bench front --tasks sst2 squad --seeds 0 1 --contenders 'full*' LoRA

Tasks are in `tasks.py`: MiniLM on SST-2, on SQuAD's questions and on tags of their answers, each with the dropout of
its configuration and without; a small ViT on CIFAR-10; others. Each of `contenders.py` trains in one process with one
thread (`runs.py`). Full fine-tuning runs for 1, 2, 3, ... epochs, each with a learning-rate schedule of its own; the
others are compared with it at equal time (`report.py`). Finished runs are the lines of benchmarks/front/TASK.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..measure import REPOSITORY, Settings, experiment
from ..study import Runs, add_record, do_chosen, in_force, missing, read_records
from .contenders import SETTINGS, VIEWS, cells_of
from .picture import write_picture
from .report import as_markdown, front_report, views_report


@experiment("front.json", minutes=1500, quick_minutes=2, processes=1, is_study=True)
def front(settings: Settings) -> dict[str, Any]:
    """Accuracy against time on all tasks, all contenders."""
    runs = _runs(settings, "front", list(SETTINGS), ["cifar10"], ["first 1/2 frozen, half of the epochs"])
    report = front_report(runs)
    pages = settings.of(REPOSITORY / "docs", settings.folder)
    write_picture(report, pages / "front.svg")
    (pages / "front.md").write_text(as_markdown(report))
    return report


@experiment("views.json", minutes=180, quick_minutes=4, processes=1, is_study=True)
def views(settings: Settings) -> dict[str, Any]:
    """Stored views of augmented images, half of a ViT's layers frozen, beside fresh augmentation."""
    return views_report(_runs(settings, VIEWS, [VIEWS], [VIEWS], ["views: 1"])[VIEWS])


def _runs(settings: Settings, name: str, groups: Sequence[str], *quick: Sequence[str]) -> dict[str, Runs]:
    """Finish what was chosen, and return all finished runs by group; see `do_chosen`."""
    contenders = {group: cells_of(group) for group in groups}
    return finished(do_chosen(settings, name, contenders, finish, *quick), groups)


def finished(folder: Path, groups: Iterable[str]) -> dict[str, Runs]:
    """All runs that count, by group."""
    return {group: _of_group(folder, group) for group in groups}


def _of_group(folder: Path, group: str) -> Runs:
    settings = {name: cell.settings for name, cell in cells_of(group).items()}
    return in_force(read_records(folder / f"{group}.jsonl"), settings)


def finish(data: str, models: str, folder: str, groups: list[str], seeds: list[int], contenders: list[str]) -> None:
    """Do every run that has no line yet; started by `launch`."""
    from .runs import WARM_UP, WARM_UP_SEED, run  # These find the example scripts on the path of `launch`.
    from .tasks import make_task

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for group in groups:
        cells, tasks = cells_of(group), dict[str, Any]()
        chosen = [name for name in cells if name in contenders]
        for seed, name in missing(partial(_of_group, Path(folder), group), seeds, chosen):
            task, contender, settings = cells[name]
            if task not in tasks:
                tasks[task] = make_task(task, Path(data), Path(models))
                # What is imported and compiled at the first use must not be the first contender's.
                run(tasks[task], SETTINGS[task], WARM_UP, WARM_UP_SEED, max_steps=2)
            found = run(tasks[task], SETTINGS[task], contender, seed)
            record = {"contender": name, "seed": seed, "settings": settings, **found}
            result = f"{name}: {found['scores']}, {found['seconds']:.0f} s"
            add_record(Path(folder, f"{group}.jsonl"), record, result)
