"""Stored views of augmented images beside fresh augmentation and beside none: accuracy and time.

    python scripts/study_views.py --data ../shared/data --models ../shared/models --folder benchmarks/views \
        --output benchmarks/views.json

A small pretrained ViT on CIFAR-10 (2,000 images, random crop and flip, 10 epochs), the first half of its layers frozen
from the first step. With `activation_cache_views=V` a run stores V draws of each image and takes them in turn. Beside
it: each image augmented and computed anew, and each image stored as it is.

A finished run is a line of FOLDER/views.jsonl: start the script again and it goes on where it stopped, seed by seed.
Time is that of `study_front.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from front_report import in_force, paired, read_records
from front_tasks import SETTINGS, TASKS, Task
from study_front import RATES_SEED, Contender, add_line, is_done, run, settings_of
from transformers.utils import logging


SEEDS = (0, 1, 2, 3, 4)
NUM_EPOCHS = 10
VIEWS = (1, 2, 4, 8)
PLAIN, AUGMENTED = "cifar10", "cifar10_augmented"
FRESH, NONE = "fresh augmentation", "no augmentation"
METRIC = SETTINGS[AUGMENTED].metric
HALF_FROZEN = {"freeze_policy": "fixed", "freeze_at": f"0:{SETTINGS[AUGMENTED].num_layers // 2}"}


def contenders() -> dict[str, tuple[str, Contender]]:
    """Task and contender by name."""
    cached = {**HALF_FROZEN, "activation_cache": "on"}
    found = {
        FRESH: (AUGMENTED, Contender("full", NUM_EPOCHS, {**HALF_FROZEN, "activation_cache": "off"})),
        NONE: (PLAIN, Contender("full", NUM_EPOCHS, cached)),
    }
    for count in VIEWS:
        options = {**cached, "activation_cache_views": count}
        found[f"views: {count}"] = (AUGMENTED, Contender("full", NUM_EPOCHS, options))
    return found


def settings_in_force() -> dict[str, dict[str, Any]]:
    """Everything that a run's result hangs on but its seed, by contender."""
    return {
        name: {**settings_of(SETTINGS[task], contender), "task": task}
        for name, (task, contender) in contenders().items()
    }


def finish(options: argparse.Namespace) -> None:
    """Every run that has no line yet, all contenders of a seed before the next seed."""
    path, wanted, tasks = options.folder / "views.jsonl", settings_in_force(), dict[str, Task]()
    for seed in options.seeds:
        for name, (task_name, contender) in contenders().items():
            if name not in options.contenders or is_done(path, name, seed, wanted[name]):
                continue
            settings = SETTINGS[task_name]
            if task_name not in tasks:
                tasks[task_name] = TASKS[task_name](options.data, options.models)
                # What is imported and compiled at the first use must not be the first contender's.
                run(tasks[task_name], settings, contender, RATES_SEED, max_steps=2)
            result = run(tasks[task_name], settings, contender, seed)
            add_line(path, {"contender": name, **result, "settings": wanted[name]})


def make_report(folder: Path) -> dict[str, Any]:
    """Means over seeds, and each contender minus fresh augmentation, paired by seed."""
    runs = in_force(read_records(folder / "views.jsonl"), settings_in_force())
    rows = []
    for name, by_seed in runs.items():
        if not by_seed:
            continue
        shared = sorted(by_seed.keys() & runs[FRESH].keys())
        differences = {s: by_seed[s]["scores"][METRIC] - runs[FRESH][s]["scores"][METRIC] for s in shared}
        times = [by_seed[seed]["seconds"] / runs[FRESH][seed]["seconds"] for seed in shared]
        rows.append({
            "contender": name, "seeds": sorted(by_seed),
            METRIC: round(statistics.mean(record["scores"][METRIC] for record in by_seed.values()), 2),
            "seconds": round(statistics.mean(record["seconds"] for record in by_seed.values()), 1),
            "hits": round(statistics.mean(record["hits"] for record in by_seed.values())),
            "minus_fresh": paired(differences), "time_of_fresh": round(statistics.mean(times), 3) if times else None,
        })  # fmt: skip
    return {
        "date": date.today().isoformat(), "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "epochs": NUM_EPOCHS, "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the parquet files")
    parser.add_argument("--models", type=Path, required=True, help="folder of the small ViT")
    parser.add_argument("--folder", type=Path, required=True, help="for the lines of finished runs")
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--contenders", nargs="+", default=list(contenders()), choices=contenders())
    parser.add_argument("--report", action="store_true", help="write the table of what is there, run nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not options.report:
        finish(options)
    report = make_report(options.folder)
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["rows"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
