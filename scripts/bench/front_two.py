"""The front of accuracy against time on two devices: does it change who wins that freezing sets devices free?

Scores are those of the study in one process (`benchmarks/front.json`), which layouts do not change: the task has no
dropout, so that every layout gives Trainer's numbers. Only the time is measured here.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PrinterCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.schedules.layout import Layout

from .front.contenders import FULL, SETTINGS, contenders
from .measure import REPOSITORY, Settings, alternate, experiment, launch, ratios, report, seconds_of, summary


HALF = "first 1/2 frozen, half of the epochs"
SEED = 0


@dataclass(frozen=True)
class Run:
    """One contender: a contender of the study on two devices.

    Args:
        of_study: its name there.
        stages: in the beginning; freezing may pack them into fewer.
    """

    of_study: str
    stages: str
    changes: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "everything, K=1 x R=2": Run(f"{FULL}1", "1"),
    "everything, K=2": Run(f"{FULL}1", "2"),
    "half frozen and stored, K=1 x R=2": Run(HALF, "1"),
    "half frozen and stored, from K=2 to K=1 x R=2": Run(HALF, "2"),
    "half frozen and stored, K=2 to the end": Run(HALF, "2", {"elastic": False}),
}
TASK = "sst2_no_dropout"


def compare(rounds: int, max_steps: int, data: str, models: str) -> dict[str, Any]:
    """Train every contender in turn on two processes: seconds by round, epochs, and the layouts of its transitions."""
    # The scripts that tasks are made with are on the path of a launch only.
    from .front.runs import arguments
    from .front.tasks import draw, make_task

    task, settings = make_task(TASK, Path(data), Path(models)), SETTINGS[TASK]
    training, named = draw(task.pool, SEED, settings.num_training), contenders(settings)
    layouts: dict[str, list[str]] = {}
    numbers = itertools.count()

    def train(title: str, most_steps: int) -> float:
        run, folder = RUNS[title], Path(f"run-{next(numbers)}")
        changes = {"max_steps": most_steps, "pipeline_parallel_size": run.stages, **run.changes}
        changes["per_device_train_batch_size"] = settings.batch // dist.get_world_size()
        args = arguments(settings, named[run.of_study], SEED, str(folder), **task.arguments, **changes)

        def whole_run() -> None:
            set_seed(SEED)
            trainer = PipeTransformerTrainer(task.model(), args, train_dataset=training, **task.given)
            trainer.remove_callback(PrinterCallback)
            trainer.train()

        seconds = seconds_of(whole_run)
        events = read_events(str(folder / EVENTS_FILE)) if (folder / EVENTS_FILE).exists() else []
        layouts[title] = [str(Layout.from_event(each["to"])) for each in events if each["event"] == "transition"]
        report(title, {"seconds": seconds, "layouts": layouts[title]})
        return seconds

    for title in list(RUNS)[:2]:  # Imports and first calls must not be the first contender's.
        train(title, 2)
    seconds = alternate({title: partial(train, title, max_steps) for title in RUNS}, rounds)
    epochs = {title: named[run.of_study].num_epochs for title, run in RUNS.items()}
    return {"seconds": seconds, "epochs": epochs, "layouts": layouts}


def row(title: str, found: dict[str, Any], study: dict[str, Any]) -> dict[str, Any]:
    """Compare a contender with full fine-tuning on as many stages at equal time, by the study's scores."""
    run = RUNS[title]
    epoch = found["seconds"]["everything, K=2" if run.stages == "2" else "everything, K=1 x R=2"]
    equal = summary(ratios(found["seconds"][title], epoch), 2)
    scores = {each["contender"]: each["mean_score"] for each in study["rows"]}
    curve = sorted((float(n.removeprefix(FULL)), s) for n, s in scores.items() if n.startswith(FULL))
    points = scores[run.of_study] - float(np.interp(equal["median"], *zip(*curve, strict=True)))
    is_shorter = equal["median"] < curve[0][0]
    return {
        "run": title, "epochs": found["epochs"][title], "seconds": summary(found["seconds"][title], 1),
        "epochs of everything in that time": equal, "score": scores[run.of_study],
        "points at equal time": f"{'at least ' * is_shorter}{points:+.2f}", "then": found["layouts"][title],
    }  # fmt: skip


@experiment("front_two.json", minutes=17, quick_minutes=2)
def front_two(settings: Settings) -> dict[str, Any]:
    """Accuracy against time on two devices: replicas, stages, and stages that freezing packs into replicas."""
    study = json.loads((REPOSITORY / "benchmarks" / "front.json").read_text())["tasks"][TASK]
    found = launch(compare, 2, settings.of(5, 1), settings.of(-1, 4), settings.data, settings.models)
    return {"rows": [row(title, found, study) for title in RUNS]}
