"""What asynchronous 1F1B costs in accuracy: six kinds of weights, two tasks, two optimizers, several seeds.

    python -m scripts.bench async-study --tasks sst2 --seeds 5 6 7 --contenders 'adamw K=4*'

Each run fine-tunes a pretrained model for a short while in one process, which plays all stages of the pipeline
(`async_stages.py`), and is evaluated on sentences or images that no run trains on.

Settings: learning rate linear after a warm-up of a tenth of the steps, no clipping, no dropout, bf16 autocast; the
word embeddings of MiniLM are not trained (half of its weights, which a short run hardly moves). One drain, at the end.
`double_buffer` with four stages cuts each mini-batch into four micro-batches (it needs three), the others train with
one micro-batch a step. What SpecTrain and XPipe do with AdamW is this package's generalisation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DataCollatorWithPadding, default_data_collator, get_linear_schedule_with_warmup

from hf_pipetransformer.engine.weights.rates import coming_rates
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES, ForwardPass, PipeOptim, find_weights

from .async_stages import Batch, Part, SimulatedRank, cut, run_window
from .measure import Settings, experiment
from .models import cifar10_images, sst2
from .study import Record, Runs, add_record, do_chosen, missing, paired, read_records


NUM_STEPS, NUM_HELD_OUT = 160, 1_000
DRAIN_INTERVAL, ERRORS_EVERY = 8, 20
BATCHES = {"sst2": 16, "cifar10": 8}
# Of those tried on synchronous runs of another seed. SST-2 with momentum at 1e-2 gives synchronous runs two
# points more, and is the highest rate that they bear: every asynchronous kind fails there with four stages.
RATES = {"sst2": {"adamw": 1e-4, "momentum": 5e-3}, "cifar10": {"adamw": 3e-4, "momentum": 2e-3}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.01, fused=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9, fused=True),
}
SYNCHRONOUS = "synchronous"
VARIANTS = ("drained", "drained, constant s", "current learning rate")


class ConstantLag(PipeOptim):
    """PipeOptim as the paper has it: K - 1 - stage updates ahead, also where fewer will come."""

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.num_updates + forward.num_stages - 1 - forward.stage


class Contender(NamedTuple):
    """How to train: `kind` is of weights, or `synchronous`; `variant` is empty, or what of `pipeoptim` is changed."""

    optimizer: str
    num_stages: int
    kind: str
    variant: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.optimizer, f"K={self.num_stages}", self.kind, self.variant)))


CONTENDERS = {
    str(each): each
    for optimizer in OPTIMIZERS
    for each in (
        Contender(optimizer, 1, SYNCHRONOUS),
        *(Contender(optimizer, k, kind) for k, kind in product((4, 2), WEIGHTS_NAMES)),
        *(Contender(optimizer, 4, "pipeoptim", variant) for variant in VARIANTS),
    )
}


# ---- data ----


class Task(NamedTuple):
    """A pretrained model, and samples, of which those that are held out come first."""

    model: Any
    rows: list[dict[str, Any]]
    collate: Callable[[list[dict[str, Any]]], Batch]

    def batch(self, indices: list[int]) -> Batch:
        """Of any samples."""
        return self.collate([self.rows[index] for index in indices])

    def length(self, index: int) -> int:
        """Tokens of a sample; images are all alike."""
        return len(self.rows[index].get("input_ids", ()))

    def batches(self, num_steps: int, size: int, seed: int) -> list[list[int]]:
        """Which samples each step trains on: similar lengths together, the same for every contender of a seed."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(self.rows) - NUM_HELD_OUT, generator=generator)[: num_steps * size]
        indices = (drawn + NUM_HELD_OUT).tolist()
        pools = [sorted(indices[i : i + 16 * size], key=self.length) for i in range(0, len(indices), 16 * size)]
        cut_up = [pool[i : i + size] for pool in pools for i in range(0, len(pool), size)]
        return [cut_up[i] for i in torch.randperm(len(cut_up), generator=generator).tolist()]


def make_task(name: str, data: Path, models: Path) -> Task:
    """MiniLM on SST-2, or the small ViT on CIFAR-10, whose images are decoded once."""
    eager = {"attn_implementation": "eager"}  # The faster one here: short sequences on a CPU.
    if name == "cifar10":
        model, training, held_out = cifar10_images(data, models, 4_000, NUM_HELD_OUT, **eager)
        return Task(model, [*held_out, *training], default_data_collator)
    given = sst2(data, 10_000, is_drawn=True, **eager)
    training, held_out = given["train_dataset"], given["eval_dataset"]
    chosen = training.select([*range(NUM_HELD_OUT - len(held_out)), *range(2_000, 10_000)])
    columns = ["input_ids", "attention_mask", "label"]
    rows = [row for part in (held_out, chosen) for row in part.select_columns(columns)]
    return Task(given["model"], rows, DataCollatorWithPadding(given["processing_class"]))


# ---- runs ----


def new_model(pretrained: Any) -> Any:
    """The model with a head drawn anew."""
    model = type(pretrained).from_pretrained(
        pretrained.name_or_path, config=pretrained.config, ignore_mismatched_sizes=True, attn_implementation="eager"
    )
    if hasattr(model, "bert"):
        model.bert.embeddings.word_embeddings.requires_grad_(False)
    return model.train()


def make_rank(part: Part, stage: int, contender: Contender, rate: float, num_micro_batches: int) -> SimulatedRank:
    """A stage; where each window is one micro-batch, in synchronous runs, the kind of weights does not matter."""
    name, num_stages, kind, variant = contender
    optimizer = OPTIMIZERS[name](part.trained(), lr=rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, NUM_STEPS // 10, NUM_STEPS)
    rates = coming_rates(None if variant == "current learning rate" else scheduler, optimizer)
    of_kind = ConstantLag() if "constant" in variant else find_weights("vanilla" if kind == SYNCHRONOUS else kind)
    weights = StageWeights(of_kind, stage, num_stages, optimizer, rates, num_micro_batches, say=lambda _: None)
    return SimulatedRank(part, optimizer, scheduler, weights)


def run(name: str, task: Task, contender: Contender, seed: int) -> Record:
    """Train and evaluate once."""
    start_s = time.process_time()
    torch.manual_seed(seed)
    model, rate, size = new_model(task.model), RATES[name][contender.optimizer], BATCHES[name]
    steps = task.batches(NUM_STEPS, size, seed)
    num_micro_batches = 4 if contender.kind == "double_buffer" and contender.num_stages > 2 else 1
    parts = cut(model, task.batch(steps[0]), contender.num_stages)
    ranks = [make_rank(part, stage, contender, rate, num_micro_batches) for stage, part in enumerate(parts)]
    losses, errors = [], []

    def note(*_: Any) -> None:
        """Take errors now and then, when the first stage, the last to do so, has done a step."""
        step = ranks[0].scheduler.last_epoch + 1
        if step % ERRORS_EVERY == 0 and len(ranks) > 1:
            found = [rank.weights.take_errors() for rank in ranks]
            errors.append({"step": step, "stages": [None if error is None else asdict(error) for error in found]})

    ranks[0].optimizer.register_step_post_hook(note)
    interval = 1 if len(ranks) == 1 else DRAIN_INTERVAL if "drained" in contender.variant else NUM_STEPS
    for start in range(0, NUM_STEPS, interval):
        samples = [index for step in steps[start : start + interval] for index in step]
        length = size // num_micro_batches
        window = [task.batch(samples[i : i + length]) for i in range(0, len(samples), length)]
        losses.append(run_window(ranks, window))
    parts[0].view.remove()
    return {
        "task": name, **contender._asdict(), "seed": seed, "rate": rate, "num_steps": NUM_STEPS,
        "num_correct": count_correct(task, model), "num_evaluated": NUM_HELD_OUT,
        "training_loss": statistics.mean(losses), "errors": errors,
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }  # fmt: skip


def count_correct(task: Task, model: Any) -> int:
    """Of the samples that are held out."""
    model.eval()
    order, total = sorted(range(NUM_HELD_OUT), key=task.length), 0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, NUM_HELD_OUT, 50):
            batch = task.batch(order[start : start + 50])
            total += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return total


def runs_of(folder: Path, task: str) -> Runs:
    """Finished runs of a task; those with another learning rate or number of steps do not count."""
    runs: Runs = {name: {} for name in CONTENDERS}
    for record in read_records(folder / f"{task}.jsonl"):
        contender = Contender(*(record[key] for key in Contender._fields))
        if (record["rate"], record["num_steps"]) == (RATES[task][contender.optimizer], NUM_STEPS):
            runs[str(contender)].setdefault(record["seed"], record)
    return runs


def finish(data: str, models: str, folder: str, tasks: list[str], seeds: list[int], contenders: list[str]) -> None:
    """Do every run that has no line yet; started by `launch`."""
    for name in tasks:
        task = make_task(name, Path(data), Path(models))
        for seed, contender in missing(partial(runs_of, Path(folder), name), seeds, contenders):
            record = run(name, task, CONTENDERS[contender], seed)
            result = f"{contender}: {record['num_correct']} of {NUM_HELD_OUT}, {record['cpu_seconds']} s"
            add_record(Path(folder, f"{name}.jsonl"), record, result)


# ---- the report ----


def accuracy(record: Record) -> float:
    """In percent."""
    return 100 * record["num_correct"] / record["num_evaluated"]


def compared(runs: Mapping[int, Record], others: Mapping[int, Record]) -> dict[str, Any]:
    """Accuracies of runs and differences to others, over the seeds of both."""
    found = {seed: accuracy(runs[seed]) for seed in sorted(runs.keys() & others.keys())}
    means = paired({seed: value - accuracy(others[seed]) for seed, value in found.items()}, digits=2)
    row = {
        "seeds": means["seeds"], "accuracy_percent": [round(value, 2) for value in found.values()],
        "mean_accuracy_percent": round(statistics.mean(found.values()), 2) if found else None,
        "mean_difference_points": means["mean"],
    }  # fmt: skip
    return row | ({"interval_95_points": means["interval_95"]} if any(means.get("interval_95", ())) else {})


def mean_errors(group: list[Record]) -> list[dict[str, Any]]:
    """Of each stage over the runs, by the part of the run."""
    names = ("s", "error", "error_unpredicted")
    parts = []
    for pieces in zip(*(record["errors"] for record in group), strict=True):
        stages = []
        for errors in zip(*(piece["stages"] for piece in pieces), strict=True):
            known = [error for error in errors if error is not None]
            stages.append({name: statistics.mean(e[name] for e in known) for name in names} if known else None)
        parts.append({"until_step": pieces[0]["step"], "stages": stages})
    return parts


def report(folder: Path) -> dict[str, Any]:
    """Make the table of all finished runs."""
    runs, rows = {task: runs_of(folder, task) for task in sorted(RATES)}, list[dict[str, Any]]()
    for task, contender in product(runs, sorted(CONTENDERS.values())):
        of_seeds = runs[task][str(contender)]
        if not of_seeds:
            continue
        against = {"synchronous": Contender(contender.optimizer, 1, SYNCHRONOUS)}
        if contender.variant:
            without = "drained" if contender.variant == "drained, constant s" else ""
            against["pipeoptim"] = contender._replace(variant=without)
        for name, other in against.items():
            differences = compared(of_seeds, runs[task][str(other)])
            rows.append({"task": task, **contender._asdict(), "against": name, **differences})
        rows[-1]["errors"] = mean_errors(list(of_seeds.values()))
        rows[-1]["cpu_seconds"] = round(statistics.mean(each["cpu_seconds"] for each in of_seeds.values()), 1)
    settings = {"num_steps": NUM_STEPS, "num_held_out": NUM_HELD_OUT, "batches": BATCHES, "rates": RATES}
    return {**settings, "num_runs": sum(len(each) for found in runs.values() for each in found.values()), "rows": rows}


@experiment("async_study.json", minutes=180, quick_minutes=3, processes=1, is_study=True)
def async_study(settings: Settings) -> dict[str, Any]:
    """Accuracy of asynchronous kinds of weights beside synchronous runs: SST-2 and CIFAR-10, paired by seed."""
    quick = list(RATES), list(CONTENDERS)[:2]
    return report(do_chosen(settings, "async_study", dict.fromkeys(RATES, CONTENDERS), finish, *quick))
