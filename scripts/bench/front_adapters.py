"""Accuracy against time of LoRA: adapters in the upper layers alone, above lower layers that are stored.

    python -m scripts.bench front-adapters

SmolLM2-135M in bfloat16 on questions of SQuAD as text and on its passages. Layers without adapters below the first
adapter are computed once, as nothing in them trains. Runs, times and comparisons are those of `front.py`; the curve is
LoRA in all layers for 1, 2 and 3 epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import DataCollatorForTokenClassification

from .front import HELD_OUT_SEED, Task, TaskData, answer_sentence, draw, finish, finished, task_report
from .measure import REPOSITORY, Settings, experiment, launch
from .models import smollm2, with_adapters


CURVE = "adapters in all layers, epochs: "
RANK, NUM_HELD_OUT, EVALUATION_BATCH = 16, {"questions": 400, "passages": 128}, 16
PASSAGE_TOKENS, QUESTION_TOKENS = 128, 96
IGNORED = -100
"""Label of a token that no loss counts."""


@dataclass(frozen=True)
class AdapterTask(Task):
    """A task whose contenders differ by the layers that have adapters."""

    def contenders(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each contender, which a result depends on; the learning rate falls linearly."""
        trained = {"freeze_policy": "none", "activation_cache": "off"}
        stored = {"freeze_policy": "none", "activation_cache": "on"}
        chosen = {f"{CURVE}{epochs}": (epochs, 0, trained) for epochs in range(1, self.num_epochs + 1)}
        for name, share, epochs in (("half", 1 / 2, (3, 5)), ("third", 2 / 3, (5,))):
            first = round(share * self.num_layers)
            chosen |= {f"adapters in the upper {name}, epochs: {each}": (each, first, stored) for each in epochs}
        common = {"num_training": self.num_training, "batch": self.batch, "rate": self.rate}
        return {
            name: {**common, "num_epochs": epochs, "options": options, "lora": {"rank": RANK, "first_layer": first}}
            for name, (epochs, first, options) in chosen.items()
        }


@cache
def _pretrained() -> tuple[Any, Any]:
    """Weights that are copied for each run, and the tokenizer: reading them takes seconds."""
    model, tokenizer = smollm2()
    tokenizer.padding_side = "right"
    return model, tokenizer


def make_model(rank: int, first_layer: int) -> Any:
    """SmolLM2 with adapters from a layer on."""
    loaded, _ = _pretrained()
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    return with_adapters(model, rank, first_layer)


def predictions(model: Any, rows: Any, collate: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits and labels of the tokens that count, row by row."""
    order = sorted(range(len(rows)), key=[len(ids) for ids in rows["input_ids"]].__getitem__)
    causal = model.get_base_model()
    for start in range(0, len(order), EVALUATION_BATCH):
        batch = collate([rows[index] for index in order[start : start + EVALUATION_BATCH]])
        labels = batch.pop("labels")[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = causal.model(**batch).last_hidden_state[:, :-1]
            for own, wanted in zip(hidden, labels, strict=True):
                counts = wanted != IGNORED
                yield causal.lm_head(own[counts]).float(), wanted[counts]


def scores_of(model: Any, rows: Any, collate: Any) -> dict[str, float]:
    """Score what is held out.

    Returns:
        `log_likelihood` of a token, in nats; `tokens` that the model would choose, in percent; `exact_match`: rows
        whose tokens are all chosen, which is what greedy decoding writes, in percent.
    """
    likelihood, right, count, whole = 0.0, 0, 0, 0
    for logits, wanted in predictions(model, rows, collate):
        likelihood -= float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        chosen = logits.argmax(-1) == wanted
        right, count, whole = right + int(chosen.sum()), count + len(wanted), whole + bool(chosen.all())
    return {
        "log_likelihood": likelihood / count, "tokens": 100 * right / count, "exact_match": 100 * whole / len(rows)
    }  # fmt: skip


def text_task(pool: Any, held_out: Any) -> TaskData:
    """Rows of `input_ids`, `attention_mask` and `labels`, in batches of similar lengths."""
    collate = DataCollatorForTokenClassification(_pretrained()[1])
    arguments = {"train_sampling_strategy": "group_by_length", "bf16": True}
    return TaskData(pool, make_model, lambda model: scores_of(model, held_out, collate), arguments, collate)


def questions(data: Path, _models: Path) -> TaskData:
    """Answer from the sentence that has it, as text; the loss counts the words of the answer and the end."""
    _, tokenizer = _pretrained()

    def as_text(row: dict[str, Any]) -> dict[str, Any]:
        prompt = f"{row['context'].strip()}\nQuestion: {row['question'].strip()}\nAnswer:"
        asked = tokenizer(prompt)["input_ids"]
        answer = [*tokenizer(f" {row['answers']['text'][0]}")["input_ids"], tokenizer.eos_token_id]
        ids = asked + answer
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [IGNORED] * len(asked) + answer}

    def rows_of(name: str) -> Any:
        rows = load_dataset("parquet", data_files=str(data / f"squad_v1_{name}.parquet"), split="train")
        rows = rows.map(answer_sentence).map(as_text, remove_columns=rows.column_names)
        return rows.filter(lambda row: len(row["input_ids"]) <= QUESTION_TOKENS)

    return text_task(rows_of("train_partial"), draw(rows_of("dev"), HELD_OUT_SEED, NUM_HELD_OUT["questions"]))


def passages(data: Path, _models: Path) -> TaskData:
    """First 128 tokens of passages, each token from those before it."""
    _, tokenizer = _pretrained()

    def rows_of(name: str) -> Any:
        rows = load_dataset("parquet", data_files=str(data / f"squad_v1_{name}.parquet"), split="train")
        texts = list(dict.fromkeys(rows["context"]))
        ids = [own[:PASSAGE_TOKENS] for own in tokenizer(texts)["input_ids"] if len(own) >= PASSAGE_TOKENS]
        columns = {"input_ids": ids, "attention_mask": [[1] * PASSAGE_TOKENS] * len(ids), "labels": ids}
        return type(rows).from_dict(columns)

    return text_task(rows_of("train_partial"), draw(rows_of("dev"), HELD_OUT_SEED, NUM_HELD_OUT["passages"]))


def _task(make: Callable[[Path, Path], TaskData], metric: str, num_training: int, rate: float) -> AdapterTask:
    return AdapterTask(make, metric, num_training, num_epochs=3, batch=8, num_layers=30, rate=rate)


TASKS = {
    "adapters_questions": _task(questions, "exact_match", 384, 1e-3),
    "adapters_passages": _task(passages, "log_likelihood", 128, 1e-3),
}


@experiment("front_adapters.json", minutes=240, quick_minutes=3, processes=1)
def front_adapters(settings: Settings) -> dict[str, Any]:
    """Accuracy against time: LoRA above stored layers beside LoRA in all layers, SmolLM2 on two tasks."""
    folder = settings.of(REPOSITORY / "benchmarks" / "front", settings.folder)
    tasks = settings.of(TASKS, {"adapters_passages": _task(passages, "log_likelihood", 16, 1e-3)})
    contenders = settings.of([], ["adapters in the upper half, epochs: 3"])
    seeds = settings.of([0, 1, 2], [0])
    launch(
        finish, 1, str(settings.data), str(settings.models), str(folder), tasks, contenders, seeds, minutes=math.inf
    )
    runs = {name: finished(folder / f"{name}.jsonl", task.contenders()) for name, task in tasks.items()}
    return {"tasks": {name: task_report(found, tasks[name].metric, CURVE) for name, found in runs.items()}}
