"""Accuracy against time: full fine-tuning for few and for many epochs beside everything that is to be cheaper.

    python scripts/study_front.py --data ../shared/data --models ../shared/models --folder benchmarks/front \
        --output benchmarks/front.json --picture docs/front.svg --table docs/front.md

Tasks are in `front_tasks.py`: MiniLM on SST-2, on SQuAD's questions and on tags of their answers, each with the
dropout of its configuration and without; a small ViT on CIFAR-10 with and without augmentation. Each contender trains
with `PipeTransformerTrainer` in one process with one thread, and is evaluated on samples that no run trains on. Full
fine-tuning runs for 1, 2, 3, ... epochs, each with a learning-rate schedule of its own; others are compared with it at
equal time (`front_report.py`).

A finished run is a line of FOLDER/TASK.jsonl: start the script again and it goes on where it stopped; several may run
side by side, with other tasks (`--tasks`) or seeds. `--report` runs nothing. A run with other settings than those in
force counts as not done.

Time is processor time, at the pace of a machine that does nothing else (`front_clock.py`), of everything that a user
waits for in training: the model is loaded, the trainer starts, measures what it decides by, trains, stores and reads.
Evaluation is apart, and so is reading and tokenizing the data, which is the same for all.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import peft
import torch
from front_clock import Pace, SteadyClock
from front_picture import write_picture
from front_report import DEFAULTS, are_same, make_report, read_records
from front_table import as_markdown
from front_tasks import SETTINGS, TASKS, Task, TaskSettings
from torch import nn
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events


SEEDS = (0, 1, 2, 3, 4)
RATES_SEED = 100
"""Of the runs that learning rates are chosen by: none of the study's."""
FULL = "full fine-tuning, epochs: "
LOGGED_STEPS = 10
"""Each of a run's losses is a mean over so many optimizer steps."""
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
LAYER = re.compile(r"(?:.*\.)?layers?\.(\d+)\..*")
"""Name of a module or parameter of a transformer layer."""

NOTHING_FROZEN = {"freeze_policy": "none", "activation_cache": "off"}
PREFIXES = {"1/6": 1 / 6, "1/3": 1 / 3, "1/2": 1 / 2, "2/3": 2 / 3}
TOPS = ("1/3", "2/3")
UNFREEZING = ((1, 1, "an epoch, then one"), (2, 1, "two epochs, then one"), (2, 2, "two epochs, then two"))
"""Epochs with a frozen prefix, epochs of everything, and their names."""
STORED = {"freeze_policy": "fixed", "activation_cache": "on"}
POLICIES: dict[str, dict[str, Any]] = {
    "gradient_norm": {},
    "schedule": {},
    "schedule, as in the paper": {"freeze_policy": "schedule", "freeze_warmup": 0.0, "freeze_min_active_layers": 0},
}
"""Options beside those that every policy has; the policy's name is the contender's if it is not among them."""
RETIRED = frozenset(
    {"gradient_change", "plasticity", "saliency", "schedule, time budget"}
    | {f"first {name} frozen, time budget" for name in PREFIXES}
)
"""Contenders that were measured before their options were removed; their results stay in the report."""


@dataclass(frozen=True)
class Contender:
    """How to train.

    Args:
        kind: of its learning rate.
        num_epochs: planned from the start, the learning rate falls linearly over them.
        options: of freezing and the cache.
        num_top_layers: only they and the head are trained, by `requires_grad`; None for all.
        lora: options of LoRA on all linear layers, if any.
    """

    kind: str
    num_epochs: float
    options: dict[str, Any] = field(default_factory=lambda: dict(NOTHING_FROZEN))
    num_top_layers: int | None = None
    lora: dict[str, Any] | None = None


def contenders(task: TaskSettings) -> dict[str, Contender]:
    """Return all contenders by name."""
    longest, num_layers = task.num_epochs, task.num_layers
    table = {f"{FULL}{epochs}": Contender("full", epochs) for epochs in (0.5, 1, 1.5, *range(2, longest + 1))}
    for name, share in PREFIXES.items():
        options = {**STORED, "freeze_at": f"0:{round(share * num_layers)}"}
        table[f"first {name} frozen"] = Contender("full", longest, options)
        table[f"first {name} frozen, half of the epochs"] = Contender("full", math.ceil(longest / 2), options)
        table[f"first {name} frozen, twice the epochs"] = Contender("full", 2 * longest, options)
    deep, steps = round(2 / 3 * num_layers), math.ceil(task.num_training / task.batch)
    halfway, unfreezing = f"{steps * longest // 2}:{deep}", f"0:{deep},{steps}:0"
    table["first 2/3 frozen halfway"] = Contender("full", longest, {**STORED, "freeze_at": halfway})
    table["first 2/3 frozen for an epoch, then none"] = Contender(
        "full", longest - 1, {**STORED, "freeze_at": unfreezing}
    )
    half = math.ceil(longest / 2)
    for name, share in (("1/2", 1 / 2), ("2/3", 2 / 3)):
        frozen = round(share * num_layers)
        for epochs, later, words in UNFREEZING:
            at = f"0:{frozen},{epochs * steps}:0"
            table[f"first {name} frozen for {words} of all"] = Contender(
                "full", epochs + later, {**STORED, "freeze_at": at}
            )
    downwards = f"0:{deep},{steps}:{round(num_layers / 3)},{2 * steps}:0"
    table["first 2/3, 1/3, nothing frozen, an epoch each"] = Contender("full", 3, {**STORED, "freeze_at": downwards})
    third = round(num_layers / 3)
    for epochs, words in ((longest, ""), (half, ", half of the epochs")):
        table[f"first 1/3 frozen, LoRA above{words}"] = Contender(
            "lora", epochs, {**STORED, "freeze_at": f"0:{third}"}, lora={**LORA, "first_layer": third}
        )
    for name in TOPS:
        num_top = round(PREFIXES[name] * num_layers)
        table[f"top {name} only, no cache"] = Contender("top", longest, num_top_layers=num_top)
    table["LoRA"] = Contender("lora", longest, lora=LORA)
    table["LoRA, half of the epochs"] = Contender("lora", math.ceil(longest / 2), lora=LORA)
    for name, changes in POLICIES.items():
        options = {"freeze_policy": name, "activation_cache": "on", **changes}
        table[name] = Contender("full", longest, options)
    return table


def settings_of(task: TaskSettings, contender: Contender) -> dict[str, Any]:
    """Everything that a run's result hangs on but its seed, as JSON gives it back."""
    settings = {"num_training": task.num_training, "batch": task.batch, "rate": task.rates[contender.kind]}
    policy = contender.options["freeze_policy"]
    if policy not in ("none", "fixed"):
        options = [option for option in fields(PipeTransformerArguments) if option.name.startswith("freeze_")]
        settings[DEFAULTS] = {o.name: o.default for o in options if o.name not in contender.options}
    return json.loads(json.dumps({**settings, **asdict(contender)}))


def prepare_model(model: Any, contender: Contender, num_layers: int) -> Any:
    """The model with what the contender trains."""
    if contender.num_top_layers is not None:
        lowest = num_layers - contender.num_top_layers
        for name, parameter in model.named_parameters():
            layer = LAYER.fullmatch(name)
            is_below = int(layer[1]) < lowest if layer else "embeddings." in name
            parameter.requires_grad_(not is_below)
    if contender.lora is None:
        return model
    options = dict(contender.lora)
    first = options.pop("first_layer", 0)
    layers = [(n, LAYER.fullmatch(f"{n}.")) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    linear = [name for name, layer in layers if layer and int(layer[1]) >= first]
    parts = [(name, part) for name, part in model.named_children() if name != model.base_model_prefix]
    heads = [name for name, part in parts if any(True for _ in part.parameters())]
    config = peft.LoraConfig(target_modules=linear, modules_to_save=heads, **options)
    return peft.get_peft_model(model, config)


def run(task: Task, settings: TaskSettings, contender: Contender, seed: int, **changes: Any) -> dict[str, Any]:
    """Train and evaluate once; `changes` are options of the trainer."""
    training = task.training(seed, settings.num_training)
    with tempfile.TemporaryDirectory(prefix="study-front-") as folder:
        clock = SteadyClock()
        set_seed(seed)
        model = prepare_model(task.model(), contender, settings.num_layers)
        trainer = PipeTransformerTrainer(
            model=model, args=arguments(task.arguments, settings, contender, seed, folder, **changes),
            train_dataset=training, **task.given,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Pace(clock))
        output = trainer.train()
        clock.lap()
        path = Path(folder) / EVENTS_FILE
        # One process that freezes nothing is Trainer itself: it writes no events.
        events = read_events(str(path)) if path.exists() else []
        start = time.process_time()
        trainer.model.eval()
        with torch.inference_mode():
            scores = task.score(trainer.model)
        return {
            "seed": seed, "settings": settings_of(settings, contender), "seconds": round(clock.seconds, 2),
            "processor_seconds": round(clock.processor_seconds, 2), "gauge_seconds": spread(clock.gauged),
            "scores": {name: round(score, 4) for name, score in scores.items()},
            "training_loss": round(output.training_loss, 5), "num_steps": output.global_step,
            "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
            "evaluation_seconds": round(time.process_time() - start, 2), **course(events),
        }  # fmt: skip


def arguments(
    of_task: dict[str, Any], settings: TaskSettings, contender: Contender, seed: int, folder: str, **changes: Any
) -> PipeTransformerArguments:
    """Options of the run."""
    options: dict[str, Any] = {
        "output_dir": folder, "activation_cache_dir": folder, "seed": seed, "pipeline_parallel_size": "1",
        "per_device_train_batch_size": settings.batch, "num_train_epochs": contender.num_epochs,
        "learning_rate": settings.rates[contender.kind], "lr_scheduler_type": "linear", "warmup_steps": 0.1,
        "weight_decay": 0.01, "logging_steps": LOGGED_STEPS, "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none",
        **of_task, **contender.options, **changes,
    }  # fmt: skip
    return PipeTransformerArguments(**options)


def spread(values: list[float]) -> list[float]:
    """Smallest, median and largest."""
    return [round(value, 4) for value in (min(values), statistics.median(values), max(values))]


def course(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Which step froze how many layers, how often the cache was read, and why it was not."""
    frozen = [(e["step"], e["to"]["num_frozen_layers"]) for e in events if e["event"] == "transition"]
    started = [(e["step"], e["layout"]["num_frozen_layers"]) for e in events if e["event"] == "run"]
    cache = [e for e in events if e["event"] == "cache"]
    return {
        "frozen": sorted(started + frozen), "hits": sum(e["hits"] for e in cache if e["what"] == "epoch"),
        "cache_off": [e["reason"] for e in cache if e["what"] == "off"],
    }  # fmt: skip


def finish(options: argparse.Namespace) -> None:
    """Every run that has no line yet, all contenders of a seed before the next seed."""
    for name in options.tasks:
        settings, path = SETTINGS[name], options.folder / f"{name}.jsonl"
        wanted = {n: c for n, c in contenders(settings).items() if is_chosen(n, options.contenders)}
        cells = [(contender, seed) for seed in options.seeds for contender in wanted]
        task = None
        for contender, seed in cells:
            if is_done(path, contender, seed, settings_of(settings, wanted[contender])):
                continue
            if task is None:
                task = TASKS[name](options.data, options.models)
                # What is imported and compiled at the first use must not be the first contender's.
                run(task, settings, contenders(settings)["first 1/2 frozen"], RATES_SEED, max_steps=2)
            add_line(path, {"contender": contender, **run(task, settings, wanted[contender], seed)})


def is_done(path: Path, contender: str, seed: int, settings: dict[str, Any]) -> bool:
    """Whether a run has its line; the file is read anew each time, as another process may have written it."""
    found = [record for record in read_records(path) if (record["contender"], record["seed"]) == (contender, seed)]
    return any(are_same(record["settings"], settings) for record in found)


def add_line(path: Path, record: dict[str, Any]) -> None:
    """A run is done."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    what = f"{path.stem}, seed {record['seed']}, {record['contender']}"
    print(f"{what}: {record['scores']}, {record['seconds']:.0f} s", flush=True)


def is_chosen(name: str, chosen: list[str] | None) -> bool:
    """Whether a contender was named, in full or by a pattern."""
    return chosen is None or any(fnmatchcase(name, pattern) for pattern in chosen)


def try_rates(options: argparse.Namespace) -> None:
    """Runs of one contender with other learning rates; nothing is written."""
    name, contender, *rates = options.rates
    if name not in TASKS or contender not in contenders(SETTINGS[name]) or not rates:
        sys.exit(f"Found --rates {name} {contender!r}; expected a task, a contender and learning rates.")
    task, settings = TASKS[name](options.data, options.models), SETTINGS[name]
    chosen = contenders(settings)[contender]
    for rate in rates:
        changed = {"learning_rate": float(rate)}
        print(name, contender, rate, run(task, settings, chosen, RATES_SEED, **changed)["scores"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the parquet files")
    parser.add_argument("--models", type=Path, required=True, help="folder of the small ViT")
    parser.add_argument("--folder", type=Path, required=True, help="for the lines of finished runs")
    parser.add_argument("--output", type=Path, help="JSON file for the report")
    parser.add_argument("--picture", type=Path, help="SVG file for the picture")
    parser.add_argument("--table", type=Path, help="Markdown file for the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="several may run side by side")
    parser.add_argument("--contenders", nargs="+", help="names or patterns such as 'first*'; all by default")
    parser.add_argument("--report", action="store_true", help="write table and picture of what is there, run nothing")
    parser.add_argument("--rates", nargs="+", help="TASK CONTENDER RATE...: runs of another seed, no table")
    options = parser.parse_args()
    names = {name for task in options.tasks for name in contenders(SETTINGS[task])}
    for pattern in options.contenders or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            parser.error(f"No contender is called {pattern!r}. There are: {', '.join(sorted(names))}.")
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.rates:
        try_rates(options)
        return
    if not options.report:
        finish(options)
    in_force = {
        name: {c: settings_of(SETTINGS[name], contender) for c, contender in contenders(SETTINGS[name]).items()}
        for name in TASKS
    }
    report = make_report(options.folder, in_force, {name: SETTINGS[name].metric for name in TASKS}, FULL, RETIRED)
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture is not None:
        write_picture(report, options.picture)
    table = as_markdown(report)
    print(table)
    if options.table is not None:
        options.table.write_text(table)


if __name__ == "__main__":
    main()
