"""The tasks of the study: data, models, and scores on samples that no run trains on.

Training samples are drawn by seed; the samples that are held out are the same for all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from augmentation import augment
from datasets import Dataset, concatenate_datasets, load_dataset
from qa_answers import AnswerOptions, find_answers
from qa_metrics import squad_metrics
from qa_utils import OUTSIDE, answer_texts
from run_qa import QuestionDataArguments, make_windows
from sklearn.datasets import load_digits
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from ..models import minilm_folder


HELD_OUT_SEED, NUM_HELD_OUT_SENTENCES, NUM_HELD_OUT_QUESTIONS, NUM_HELD_OUT_DIGITS = 20_210_718, 5_000, 2_500, 797
EVALUATION_BATCH = 64
QUESTION_TOKENS = 64
"""Questions that take more with the sentence of their answer are left out, so that each is one window."""
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
PIXEL_MEAN, PIXEL_STD = np.array([0.48, 0.448, 0.398]), np.array([0.277, 0.269, 0.282])
TAGS = {"O": 0, "B": 1, "I": 2}
IGNORED = -100
"""Tag of a token outside of the context, which counts neither in the loss nor in the score."""


@dataclass(frozen=True)
class Task:
    """Data and models.

    Args:
        pool: what training samples are drawn from.
        model: makes the pretrained model with a new head.
        score: of a model in evaluation mode, on the samples that are held out, in percent.
        arguments: options of Trainer that the data need.
        given: what Trainer is given beside model, arguments and training samples.
    """

    pool: Dataset
    model: Callable[[], Any]
    score: Callable[[Any], dict[str, float]]
    arguments: dict[str, Any]
    given: dict[str, Any]


def make_task(name: str, data: Path, models: Path) -> Task:
    """Read a task's data from the folders of data and models."""
    base = name.removesuffix("_no_dropout")
    task = TASKS[base](data, models)
    return task if base == name else replace(task, model=lambda: without_dropout(task.model()))


def without_dropout(model: nn.Module) -> nn.Module:
    """Take the dropout out of all layers, as it is out of frozen ones: contenders are alike in it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def draw(rows: Dataset, seed: int, count: int | None = None) -> Dataset:
    """Draw rows, or put all of them in a random order."""
    return rows.select(torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].tolist())


# ---- texts: MiniLM ----


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(minilm_folder())


def text_task(
    auto: Any, pool: Dataset, score: Callable[[Any], dict[str, float]], collator: Any = DataCollatorWithPadding,
    num_labels: int = 2,
) -> Task:  # fmt: skip
    """MiniLM with batches of similar lengths, as one trains texts."""
    model = partial(auto.from_pretrained, minilm_folder(), num_labels=num_labels)
    given = {"data_collator": collator(tokenizer())}
    return Task(pool, model, score, {"train_sampling_strategy": "group_by_length"}, given)


def outputs_of(model: Any, rows: Dataset) -> Iterator[tuple[list[int], Any]]:
    """Yield which rows, and the model's output for them."""
    collate, inputs = DataCollatorWithPadding(tokenizer()), rows.select_columns(INPUTS)
    order = sorted(range(len(rows)), key=[len(ids) for ids in rows["input_ids"]].__getitem__)
    for start in range(0, len(order), EVALUATION_BATCH):
        chosen = order[start : start + EVALUATION_BATCH]
        yield chosen, model(**collate([inputs[index] for index in chosen]))


def text_classes(pool: Dataset, held_out: Dataset) -> Task:
    """Two classes of texts, by accuracy."""
    labels = torch.tensor(held_out["label"][:])

    def score(model: Any) -> dict[str, float]:
        right = sum(int((o.logits.argmax(-1) == labels[rows]).sum()) for rows, o in outputs_of(model, held_out))
        return {"accuracy": 100 * right / len(labels)}

    return text_task(AutoModelForSequenceClassification, pool, score)


def sst2(data: Path, models: Path) -> Task:
    """Sentiment of sentences; held out are the validation sentences and 5,000 training sentences."""
    rows = load_dataset("parquet", data_files={name: str(data / f"sst2_{name}.parquet") for name in ("train", "dev")})
    training = draw(rows["train"], HELD_OUT_SEED)
    away = training.select(range(NUM_HELD_OUT_SENTENCES)).cast(rows["dev"].features)

    def tokenize(batch: dict[str, Any]) -> Any:
        return tokenizer()(batch["sentence"], truncation=True, max_length=128)

    parts = training.select(range(NUM_HELD_OUT_SENTENCES, len(training))), concatenate_datasets([rows["dev"], away])
    return text_classes(*(part.map(tokenize, batched=True, remove_columns=["sentence", "idx"]) for part in parts))


def entailment(data: Path, models: Path) -> Task:
    """Pairs of a question of SQuAD and a sentence of its context: does it hold the answer? As QNLI is made.

    Every second question comes with the sentence of its answer, the others with another one. No setting was chosen on
    this task.
    """

    def pair(rows: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        questions, sentences, labels = [], [], []
        columns = rows["question"], rows["context"], rows["answers"]
        for index, question, context, answers in zip(indices, *columns, strict=True):
            right = answer_sentence({"context": context, "answers": answers})["context"]
            others = [sentence for sentence in context.split(". ") if sentence not in right]
            holds_answer = index % 2 == 0
            if holds_answer or others:
                questions.append(question.lstrip())
                sentences.append(right if holds_answer else others[index % len(others)])
                labels.append(int(holds_answer))
        encoded = tokenizer()(questions, sentences, truncation=True, max_length=QUESTION_TOKENS)
        return {**encoded, "label": labels}

    rows = [load_squad(data, name) for name in ("train_partial", "dev")]
    pool, held_out = (r.map(pair, with_indices=True, batched=True, remove_columns=r.column_names) for r in rows)
    return text_classes(pool, draw(held_out, HELD_OUT_SEED, NUM_HELD_OUT_QUESTIONS))


def load_squad(data: Path, name: str) -> Dataset:
    return load_dataset("parquet", data_files=str(data / f"squad_v1_{name}.parquet"), split="train")


# ---- SQuAD v1.1, each context cut to the sentence of the answer: whole ones would take four times as long ----


def load_questions(data: Path) -> tuple[Dataset, Dataset]:
    """Load those for training, and those of the development set that are held out."""

    def fits(batch: dict[str, Any]) -> list[bool]:
        encoded = tokenizer()([question.lstrip() for question in batch["question"]], batch["context"], verbose=False)
        return [len(ids) <= QUESTION_TOKENS for ids in encoded["input_ids"]]

    names = "train_partial", "dev"
    training, held_out = (load_squad(data, name).map(answer_sentence).filter(fits, batched=True) for name in names)
    return training, draw(held_out, HELD_OUT_SEED, NUM_HELD_OUT_QUESTIONS)


def windows_of(questions: Dataset, is_training: bool) -> Dataset:
    options = QuestionDataArguments(
        dataset_name="squad", max_seq_length=QUESTION_TOKENS, doc_stride=0, pad_to_max_length=False
    )
    return make_windows(questions, tokenizer(), options, is_training=is_training)


def answer_sentence(row: dict[str, Any]) -> dict[str, Any]:
    """Cut the context of a question to the sentence with its first answer; answers outside of it are left out.

    A sentence ends with a full stop and a space: an answer that holds them lies in several.
    """
    context, answers = row["context"], row["answers"]
    spans = [(start, start + len(text)) for start, text in zip(answers["answer_start"], answers["text"], strict=True)]
    before, after = context.rfind(". ", 0, spans[0][0]), context.find(". ", spans[0][1])
    first, last = (before + 2 if before >= 0 else 0), (after + 1 if after >= 0 else len(context))
    kept = [(start, end) for start, end in spans if first <= start and end <= last]
    found = {"text": [context[start:end] for start, end in kept], "answer_start": [start - first for start, _ in kept]}
    return {"context": context[first:last], "answers": found}


def squad(data: Path, models: Path) -> Task:
    """Start and end of the answer, by F1 of words."""
    training, questions = load_questions(data)
    windows = windows_of(questions, is_training=False)
    truths = {row["id"]: answer_texts(row["answers"]) for row in questions}

    def score(model: Any) -> dict[str, float]:
        starts, ends = np.full((2, len(windows), QUESTION_TOKENS), -np.inf)
        for rows, output in outputs_of(model, windows):
            for logits, found in ((starts, output.start_logits), (ends, output.end_logits)):
                logits[rows, : found.shape[1]] = found.numpy()
        answers = find_answers(questions, windows, (starts, ends), AnswerOptions())
        return squad_metrics({answer.name: answer.text for answer in answers}, truths)

    return text_task(AutoModelForQuestionAnswering, windows_of(training, is_training=True), score)


def answers(data: Path, models: Path) -> Task:
    """Which tokens of a context answer a question: tags B, I and O.

    As each context holds one answer, the span that the tags favour most is taken, and scored by F1 of its tokens, as a
    mean over questions. By the likeliest tag of each token a model that has learnt little would find nothing at all.
    """
    training, questions = load_questions(data)
    windows, spans = windows_of(questions, is_training=False), spans_of(questions)
    starts = windows["token_starts"]

    def score(model: Any) -> dict[str, float]:
        scores = []
        for rows, output in outputs_of(model, windows):
            for row, logits in zip(rows, output.logits.numpy(), strict=True):
                found = best_span(logits[: len(starts[row])], np.array(starts[row]) != OUTSIDE)
                scores.append(span_f1(found, spans[row]))
        return {"f1": 100 * float(np.mean(scores)), "exact_match": 100 * float(np.mean(np.array(scores) == 1))}

    pool = windows_of(training, is_training=False)
    tags = [answer_tags(*found) for found in zip(pool["token_starts"], spans_of(training), strict=True)]
    pool = pool.select_columns(INPUTS).add_column("labels", tags)
    return text_task(AutoModelForTokenClassification, pool, score, DataCollatorForTokenClassification, len(TAGS))


def spans_of(questions: Dataset) -> list[range]:
    """The tokens of each answer; each question is one window."""
    windows = windows_of(questions, is_training=True)
    ends = zip(windows["start_positions"], windows["end_positions"], strict=True)
    return [range(first, last + 1) for first, last in ends]


def answer_tags(token_starts: Sequence[int], span: range) -> list[int]:
    """Return the tag of each token of a window.

    Args:
        token_starts: where each token starts in the context; -1 for all others.
        span: the answer's tokens; outside of the context for no answer.
    """
    tags = [IGNORED if start == OUTSIDE else TAGS["O"] for start in token_starts]
    if tags[span[0]] != IGNORED:
        tags[span.start : span.stop] = [TAGS["B"]] + [TAGS["I"]] * (len(span) - 1)
    return tags


def best_span(logits: np.ndarray, is_context: np.ndarray) -> range:
    """From the token that is most likely B rather than O on, as long as I is more likely than O.

    Args:
        logits: `(tokens, tags)`.
        is_context: which tokens may answer, `(tokens,)`.
    """
    over_outside = np.where(is_context[:, None], logits - logits[:, [TAGS["O"]]], -np.inf)
    first = int(over_outside[:, TAGS["B"]].argmax())
    goes_on = np.append(over_outside[first + 1 :, TAGS["I"]] > 0, False)
    return range(first, first + 1 + int(goes_on.argmin()))


def span_f1(found: range, true: range) -> float:
    """Tokens of both spans, twice, over the tokens of each."""
    return 2 * len(set(found) & set(true)) / (len(found) + len(true))


# ---- images: a small pretrained ViT, which has no dropout ----


def image_task(models: Path, pool: Dataset, pixels: torch.Tensor, labels: torch.Tensor) -> Task:
    """Ten classes of images, by accuracy on `pixels`, `(images, channels, height, width)`."""
    folder = models / "vit-12x192-patch4-32px"
    model = partial(
        AutoModelForImageClassification.from_pretrained, folder, num_labels=10, ignore_mismatched_sizes=True
    )

    def score(model: Any) -> dict[str, float]:
        found = [model(pixel_values=part).logits.argmax(-1) for part in pixels.split(EVALUATION_BATCH)]
        return {"accuracy": 100 * float((torch.cat(found) == labels).float().mean())}

    # A transform of the data set needs a column that no model takes.
    return Task(pool, model, score, {"remove_unused_columns": False}, {"data_collator": default_data_collator})


def cifar10(data: Path, models: Path, augments: bool = False) -> Task:
    """Images that are decoded each time they are read; held out are 4,000 test images.

    With `augments`, a random crop after padding by 4 pixels, and a random flip.
    """
    files = {"train": f"{data}/cifar10_train_20000.parquet", "test": f"{data}/cifar10_test_4000.parquet"}
    rows = load_dataset("parquet", data_files=files)
    pixels = torch.stack([pixels_of(image) for image in rows["test"]["image"]])
    pool = rows["train"].with_transform(partial(read_images, augments=augments))
    return image_task(models, pool, pixels, torch.tensor(rows["test"]["label"][:]))


def read_images(rows: dict[str, Any], augments: bool) -> dict[str, Any]:
    """Decode the images of a batch, and if wanted crop and flip them anew."""
    images = [image.convert("RGB") for image in rows["image"]]
    images = [augment(image) for image in images] if augments else images
    return {"pixel_values": [pixels_of(image) for image in images], "labels": rows["label"]}


def pixels_of(image: Any) -> torch.Tensor:
    """`(channels, height, width)`, normalised."""
    pixels = (np.asarray(image.convert("RGB")) / 255.0 - PIXEL_MEAN) / PIXEL_STD
    return torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)


def digits(data: Path, models: Path) -> Task:
    """Handwritten digits of scikit-learn, enlarged to 32 px; held out are 797. No setting was chosen on it."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
    pixels = nn.functional.interpolate(pixels, (32, 32), mode="bilinear").expand(-1, 3, -1, -1).numpy()
    rows = draw(Dataset.from_dict({"pixel_values": pixels, "labels": labels}).with_format("torch"), HELD_OUT_SEED)
    away = rows[:NUM_HELD_OUT_DIGITS]
    pool = rows.select(range(NUM_HELD_OUT_DIGITS, len(rows)))
    return image_task(models, pool, away["pixel_values"], away["labels"])


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "sst2": sst2, "sst2_middle": sst2, "sst2_long": sst2, "squad": squad, "squad_middle": squad, "answers": answers,
    "entailment": entailment, "cifar10": cifar10, "cifar10_augmented": partial(cifar10, augments=True),
    "digits": digits,
}  # fmt: skip
"""Made from the folders of data and models; text tasks also without dropout, see `make_task`."""
