"""Accuracy against time: layers frozen from the start and stored, beside full fine-tuning for fewer epochs.

    python -m scripts.bench front

MiniLM on SST-2, with the dropout of its configuration, and on SQuAD's questions, without; a small ViT on CIFAR-10.
Each run is one process with one thread. Full fine-tuning runs for 1, 1.5, 2, ... epochs, each with a learning-rate
schedule of its own; a frozen prefix is compared with that curve at equal time, seed by seed. Training samples are
drawn by seed; the samples that scores are taken on are the same for all seeds, and no run trains on them.

A finished run is a line of benchmarks/front/TASK.jsonl and is not run again: the study goes on where it stopped, and
several processes may share the work. The lines of contenders that are no longer run stay, and so do the tasks of
front.json that are no longer run.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    TrainerCallback,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

from .measure import REPOSITORY, Settings, experiment, interval_95, launch
from .models import VIT_FOLDER, cifar10_images, minilm_folder


FULL = "full fine-tuning, epochs: "
SEEDS = range(5)
HELD_OUT_SEED, NUM_HELD_OUT_SENTENCES, NUM_HELD_OUT_QUESTIONS = 20_210_718, 5_000, 2_500
EVALUATION_BATCH, QUESTION_TOKENS = 64, 64
GAUGE_SECONDS, STEPS_APART = 0.018, 3
"""Of the fixed piece of work: what times are given for, near that of one idle core; and after how many steps."""
Record = dict[str, Any]
Runs = dict[str, dict[int, Record]]
"""Finished runs by contender and seed."""
Point = tuple[float, float]
"""Seconds and score."""


# ---- what is run


@dataclass(frozen=True)
class Task:
    """What the runs of a task have in common.

    Args:
        make: reads the data from the folders of data and models.
        metric: the score, in percent, that is compared.
        num_training: samples.
        num_epochs: of the longest full fine-tuning.
        batch: samples of an optimizer step.
        num_layers: of the model.
        rate: learning rate.
    """

    make: Callable[[Path, Path], TaskData]
    metric: str
    num_training: int
    num_epochs: int
    batch: int
    num_layers: int
    rate: float

    def contenders(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each contender, which a result depends on; the learning rate falls linearly."""
        full = {"freeze_policy": "none", "activation_cache": "off"}
        chosen = {f"{FULL}{epochs}": (epochs, full) for epochs in (1, 1.5, *range(2, self.num_epochs + 1))}
        for name, share in (("1/2", 1 / 2), ("2/3", 2 / 3)):
            frozen = f"0:{round(share * self.num_layers)}"
            stored = {"freeze_policy": "fixed", "activation_cache": "on", "freeze_at": frozen}
            chosen[f"first {name} frozen, half of the epochs"] = math.ceil(self.num_epochs / 2), stored
        common = {"num_training": self.num_training, "batch": self.batch, "rate": self.rate, "kind": "full"}
        more = {"num_top_layers": None, "lora": None}
        return {
            name: {**common, "num_epochs": epochs, "options": options, **more}
            for name, (epochs, options) in chosen.items()
        }


@dataclass(frozen=True)
class TaskData:
    """Data and models.

    Args:
        pool: what training samples are drawn from.
        model: makes the pretrained model with a new head; with LoRA, from the contender's settings of it.
        score: of a model in evaluation mode, on the samples that are held out, in percent.
        arguments: options of Trainer that the data need.
        collator: makes a batch of samples.
    """

    pool: Dataset
    model: Callable[..., Any]
    score: Callable[[Any], dict[str, float]]
    arguments: dict[str, Any]
    collator: Any


def draw(rows: Dataset, seed: int, count: int | None = None) -> Dataset:
    """Draw rows, or put all of them in a random order."""
    return rows.select(torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist())


# ---- tasks


def text_task(auto: Any, pool: Dataset, score: Callable[[Any], dict[str, float]], tokenizer: Any) -> TaskData:
    """MiniLM with batches of similar lengths, as one trains texts."""
    model = partial(auto.from_pretrained, minilm_folder(), num_labels=2)
    return TaskData(
        pool, model, score, {"train_sampling_strategy": "group_by_length"}, DataCollatorWithPadding(tokenizer)
    )


def outputs_of(model: Any, rows: Dataset, collate: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield which rows, and the model's output for them."""
    inputs = rows.select_columns(["input_ids", "token_type_ids", "attention_mask"])
    order = sorted(range(len(rows)), key=[len(ids) for ids in rows["input_ids"]].__getitem__)
    for start in range(0, len(order), EVALUATION_BATCH):
        chosen = order[start : start + EVALUATION_BATCH]
        yield chosen, model(**collate([inputs[index] for index in chosen]))


def sst2(data: Path, _models: Path) -> TaskData:
    """Sentiment of sentences; held out are the validation sentences and 5,000 training sentences."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    rows = load_dataset("parquet", data_files={name: str(data / f"sst2_{name}.parquet") for name in ("train", "dev")})
    training = draw(rows["train"], HELD_OUT_SEED)
    away = training.select(range(NUM_HELD_OUT_SENTENCES)).cast(rows["dev"].features)

    def tokenize(batch: dict[str, Any]) -> Any:
        return tokenizer(batch["sentence"], truncation=True, max_length=128)

    parts = training.select(range(NUM_HELD_OUT_SENTENCES, len(training))), concatenate_datasets([rows["dev"], away])
    pool, held_out = (part.map(tokenize, batched=True, remove_columns=["sentence", "idx"]) for part in parts)
    labels = torch.tensor(held_out["label"][:])

    def score(model: Any) -> dict[str, float]:
        found = outputs_of(model, held_out, DataCollatorWithPadding(tokenizer))
        right = sum(int((output.logits.argmax(-1) == labels[chosen]).sum()) for chosen, output in found)
        return {"accuracy": 100 * right / len(labels)}

    return text_task(AutoModelForSequenceClassification, pool, score, tokenizer)


def answer_sentence(row: dict[str, Any]) -> dict[str, Any]:
    """Cut the context of a question to the sentence with its first answer; answers outside of it are left out.

    A whole context would take four times as long. A sentence ends with a full stop and a space: an answer that holds
    them lies in several.
    """
    context, answers = row["context"], row["answers"]
    spans = [(start, start + len(text)) for start, text in zip(answers["answer_start"], answers["text"], strict=True)]
    before, after = context.rfind(". ", 0, spans[0][0]), context.find(". ", spans[0][1])
    first, last = (before + 2 if before >= 0 else 0), (after + 1 if after >= 0 else len(context))
    kept = [(start, end) for start, end in spans if first <= start and end <= last]
    found = {"text": [context[start:end] for start, end in kept], "answer_start": [start - first for start, _ in kept]}
    return {"context": context[first:last], "answers": found}


def squad(data: Path, _models: Path) -> TaskData:
    """Start and end of the answer in its sentence, by F1 of words; without dropout, which frozen layers have not."""
    import run_qa  # `launch` has the scripts on its path.
    from question_answering import find_answers, squad_metrics

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    options = run_qa.QuestionDataArguments(
        dataset_name="squad", max_seq_length=QUESTION_TOKENS, doc_stride=0, pad_to_max_length=False
    )

    def fits(batch: dict[str, Any]) -> list[bool]:
        encoded = tokenizer([question.lstrip() for question in batch["question"]], batch["context"], verbose=False)
        return [len(ids) <= QUESTION_TOKENS for ids in encoded["input_ids"]]

    def questions_of(name: str) -> Dataset:
        rows = load_dataset("parquet", data_files=str(data / f"squad_v1_{name}.parquet"), split="train")
        return rows.map(answer_sentence).filter(fits, batched=True)

    questions = draw(questions_of("dev"), HELD_OUT_SEED, NUM_HELD_OUT_QUESTIONS)
    windows = run_qa.make_windows(questions, tokenizer, options, is_training=False)
    pool = run_qa.make_windows(questions_of("train_partial"), tokenizer, options, is_training=True)
    truths = {row["id"]: row["answers"]["text"] for row in questions}

    def score(model: Any) -> dict[str, float]:
        starts, ends = np.full((2, len(windows), QUESTION_TOKENS), -np.inf)
        for chosen, output in outputs_of(model, windows, DataCollatorWithPadding(tokenizer)):
            for logits, found in ((starts, output.start_logits), (ends, output.end_logits)):
                logits[chosen, : found.shape[1]] = found.numpy()
        answers = find_answers(questions, windows, (starts, ends), options)
        return squad_metrics({answer.name: answer.text for answer in answers}, truths)

    task = text_task(AutoModelForQuestionAnswering, pool, score, tokenizer)

    def without_dropout() -> Any:
        model = task.model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return TaskData(pool, without_dropout, score, task.arguments, task.collator)


def cifar10(data: Path, models: Path) -> TaskData:
    """Images that are decoded each time they are read; held out are 4,000 test images. The ViT has no dropout."""
    _, pool, test = cifar10_images(data, models, 20_000, 4_000)
    held_out = test[:]
    pixels, labels = torch.stack(held_out["pixel_values"]), torch.tensor(held_out["labels"])
    model = partial(
        AutoModelForImageClassification.from_pretrained, models / VIT_FOLDER, num_labels=10,
        ignore_mismatched_sizes=True,
    )  # fmt: skip

    def score(model: Any) -> dict[str, float]:
        found = [model(pixel_values=part).logits.argmax(-1) for part in pixels.split(EVALUATION_BATCH)]
        return {"accuracy": 100 * float((torch.cat(found) == labels).float().mean())}

    # A transform of the data set needs a column that no model takes.
    return TaskData(pool, model, score, {"remove_unused_columns": False}, default_data_collator)


TASKS = {
    "sst2": Task(sst2, "accuracy", 3_000, 4, 32, 6, 1e-4),
    "squad_no_dropout": Task(squad, "f1", 1_000, 4, 16, 6, 2e-4),
    "cifar10": Task(cifar10, "accuracy", 2_000, 5, 32, 12, 3e-4),
}


# ---- runs


class SteadyClock(TrainerCallback):
    """Adds up processor seconds from its making on, at the pace of a machine that does nothing else.

    What else runs slows each core, by half or more where cores share caches and memory: processor time then says as
    much about the neighbours as about the work. So a fixed piece of work is done every few steps, and each stretch of
    time counts by how long that piece took around it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """As they would be if the fixed piece of work took `GAUGE_SECONDS` all the time."""
        self._gauged = gauge()
        self._last = time.process_time()

    def lap(self) -> None:
        """Take what has passed into account, and gauge again."""
        passed, before = time.process_time() - self._last, self._gauged
        self._gauged = gauge()
        self.seconds += passed * GAUGE_SECONDS * 2 / (before + self._gauged)
        self._last = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % STEPS_APART == 0:
            self.lap()


def gauge() -> float:
    """Processor seconds of a fixed piece of work, as a transformer has it: products, and passes over memory."""
    one, other, weights = torch.ones(1024, 384), torch.ones(384, 1536), torch.ones(4_000_000)
    start = time.thread_time()  # What other threads of this process do meanwhile is not part of it.
    for _ in range(2):
        torch.nn.functional.gelu(one @ other)
        weights.mul_(0.5).add_(weights, alpha=0.5)
    return time.thread_time() - start


def run(task: TaskData, settings: Mapping[str, Any], seed: int, **changes: Any) -> Record:
    """Train and evaluate once; `changes` are options of the trainer.

    Seconds are those of everything that a user waits for in training: the model is loaded, the trainer starts,
    measures what it decides by, trains, stores and reads. Evaluation is apart, and so is reading the data.
    """
    training = draw(task.pool, seed, settings["num_training"])
    with tempfile.TemporaryDirectory(prefix="front-") as folder:
        clock = SteadyClock()
        set_seed(seed)
        options: dict[str, Any] = {
            "output_dir": folder, "activation_cache_dir": folder, "seed": seed, "pipeline_parallel_size": "1",
            "per_device_train_batch_size": settings["batch"], "num_train_epochs": settings["num_epochs"],
            "learning_rate": settings["rate"], "lr_scheduler_type": "linear", "warmup_steps": 0.1,
            "weight_decay": 0.01, "logging_steps": 10, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
            "dataloader_pin_memory": False, "report_to": "none",
        }  # fmt: skip
        trainer = PipeTransformerTrainer(
            model=task.model(**settings["lora"] or {}), train_dataset=training, data_collator=task.collator,
            args=PipeTransformerArguments(**options | settings["options"] | task.arguments | changes),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        output = trainer.train()
        clock.lap()
        trainer.model.eval()
        with torch.inference_mode():
            scores = {name: round(score, 4) for name, score in task.score(trainer.model).items()}
    return {"seconds": round(clock.seconds, 2), "scores": scores, "num_steps": output.global_step}


def finished(path: Path, settings: Mapping[str, Mapping[str, Any]]) -> Runs:
    """Read the first run of each contender and seed; one with other settings than those of now does not count.

    Args:
        path: file of the task; a last line that was cut off is left out.
        settings: of the contenders that are run. Results of others stay.
    """
    runs: Runs = {name: {} for name in settings}
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        record = json.loads(line)
        name = record["contender"]
        if settings.get(name, record["settings"]) == record["settings"]:
            runs.setdefault(name, {}).setdefault(record["seed"], record)
    return runs


def finish(
    data: str, models: str, folder: str, tasks: Mapping[str, Task], contenders: list[str], seeds: list[int]
) -> None:
    """Do every run that has no line yet, all contenders of a seed before the next seed; started by `launch`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, kind in tasks.items():
        path, settings, task = Path(folder, f"{name}.jsonl"), kind.contenders(), None
        path.parent.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            for contender in contenders or settings:
                if seed in finished(path, settings)[contender]:  # Another process may have written it.
                    continue
                if task is None:
                    task = kind.make(Path(data), Path(models))
                    # What is imported and compiled at the first use must not be the first contender's.
                    run(task, list(settings.values())[-1], seed=100, max_steps=2)
                found = run(task, settings[contender], seed)
                record = {"contender": contender, "seed": seed, "settings": settings[contender], **found}
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{name}, seed {seed}, {contender}: {found['scores']}, {found['seconds']:.0f} s", flush=True)


# ---- the report


def at_equal_time(curve: Sequence[Point], seconds: float) -> float | None:
    """The curve's score after so many seconds, linear between its points; None before its first point.

    After its last point it is that one's: whoever has more time may still stop there.
    """
    return float(np.interp(seconds, *zip(*curve, strict=True))) if curve and seconds >= curve[0][0] else None


def seconds_to(curve: Sequence[Point], score: float) -> float | None:
    """Seconds after which the curve first reaches a score, linear between its points.

    None if it never does, or if its first point is beyond already.
    """
    if not curve or curve[0][1] > score:
        return None
    for (before, low), (after, high) in pairwise([curve[0], *curve]):
        if high >= score:
            return before + (after - before) * (score - low) / (high - low) if high > low else before
    return None


def paired(differences: Mapping[int, float]) -> dict[str, Any]:
    """Mean of differences by seed, and its 95 % interval where there are two or more."""
    values = [differences[seed] for seed in sorted(differences)]
    row: dict[str, Any] = {"seeds": sorted(differences), "points": [round(value, 3) for value in values]}
    row["mean"] = round(statistics.mean(values), 3) if values else None
    if len(values) > 1:
        row["interval_95"] = [round(end, 3) for end in interval_95(values)]
    return row


def mean_point(points: Sequence[Point]) -> Point:
    return statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points)


def task_report(runs: Runs, metric: str, curve: str = FULL) -> dict[str, Any]:
    """The mean curve of the contenders whose names begin so, and a row for each contender that has a run."""
    points = {
        name: {seed: (each["seconds"], each["scores"][metric]) for seed, each in sorted(by_seed.items())}
        for name, by_seed in runs.items()
        if by_seed
    }
    full = {name: by_seed for name, by_seed in points.items() if name.startswith(curve)}
    seeds = sorted({seed for by_seed in full.values() for seed in by_seed})
    # Over the numbers of epochs that most seeds have; a seed that lacks one of them has no curve.
    lengths = [by_seed for by_seed in full.values() if 2 * len(by_seed) > len(seeds)]
    whole = [seed for seed in seeds if all(seed in by_seed for by_seed in lengths)]
    curves = {seed: sorted(by_seed[seed] for by_seed in lengths) for seed in whole}
    rows = []
    for name, own in points.items():
        seconds, score = mean_point(list(own.values()))
        row = {
            "contender": name, "settings": next(iter(runs[name].values()))["settings"], "seeds": list(own),
            "seconds": [x for x, _ in own.values()], "scores": [y for _, y in own.values()],
            "mean_seconds": round(seconds, 2), "mean_score": round(score, 3),
        }  # fmt: skip
        if shared := {seed: curves[seed] for seed in own if seed in curves}:
            row |= {} if name in full else beside_curve(own, shared)
            longest = {seed: full_curve[-1] for seed, full_curve in shared.items()}
            row["against_longest_full"] = paired({seed: own[seed][1] - score for seed, (_, score) in longest.items()})
            times = [own[seed][0] / seconds for seed, (seconds, _) in longest.items()]
            row["time_over_longest_full"] = round(statistics.median(times), 3)
        rows.append(row)
    return {"metric": metric, "num_runs": sum(map(len, runs.values())), "curve": mean_curve(curves), "rows": rows}


def mean_curve(curves: Mapping[int, Sequence[Point]]) -> list[Point]:
    """Over seeds."""
    return [mean_point(points) for points in zip(*curves.values(), strict=True)]


def beside_curve(points: Mapping[int, Point], curves: Mapping[int, Sequence[Point]]) -> dict[str, Any]:
    """A contender's points by seed beside the curves of the same seeds, at equal time and at equal score."""
    then = {seed: at_equal_time(curve, points[seed][0]) for seed, curve in curves.items()}
    seconds, score = mean_point([points[seed] for seed in curves])
    mean = mean_curve(curves)  # A curve of one seed rises too unevenly.
    reached = seconds_to(mean, score)
    return {
        "against_full_at_equal_time": paired(
            {seed: points[seed][1] - other for seed, other in then.items() if other is not None}
        ),
        "score_is_beyond_full": score > max(score for _, score in mean),
        "times_as_fast_at_equal_score": None if reached is None else round(reached / seconds, 3),
    }


@experiment("front.json", minutes=300, quick_minutes=2, processes=1)
def front(settings: Settings) -> dict[str, Any]:
    """Accuracy against time: stored prefixes beside full fine-tuning on three tasks."""
    results = REPOSITORY / "benchmarks"
    folder = settings.of(results / "front", settings.folder)
    tasks = settings.of(TASKS, {"cifar10": TASKS["cifar10"]})
    contenders = settings.of([], ["first 1/2 frozen, half of the epochs"])
    seeds = settings.of(list(SEEDS), [0])
    launch(
        finish, 1, str(settings.data), str(settings.models), str(folder), tasks, contenders, seeds, minutes=math.inf
    )
    runs = {name: finished(folder / f"{name}.jsonl", TASKS[name].contenders()) for name in tasks}
    others = settings.of(json.loads((results / "front.json").read_text())["tasks"], {})
    return {"tasks": others | {name: task_report(found, TASKS[name].metric) for name, found in runs.items()}}
