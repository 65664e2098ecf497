"""The tasks of the study of accuracy against time: data, models, what is measured on data that no run trains on.

Training samples are drawn by seed; the samples that are held out are the same for all seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from augmentation import augment
from bench.models import minilm_folder
from datasets import Dataset, concatenate_datasets, load_dataset
from front_spans import IGNORED, TAGS, answer_sentence, answer_tags, best_span, span_f1, true_span
from qa_answers import AnswerOptions, find_answers
from qa_metrics import squad_metrics
from qa_utils import answer_texts
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


EVALUATION_BATCH = 64
QUESTION_TOKENS = 64
"""Questions that take more with the sentence of their answer are left out, so that each is one window."""
NUM_HELD_OUT_QUESTIONS = 2_500
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
PIXEL_MEAN, PIXEL_STD = np.array([0.48, 0.448, 0.398]), np.array([0.277, 0.269, 0.282])


@dataclass(frozen=True)
class TaskSettings:
    """What a task's runs have in common.

    Args:
        metric: of the scores, in percent, the one that is compared.
        num_training: samples.
        num_epochs: of the longest full fine-tuning.
        batch: samples of an optimizer step.
        num_layers: of the model.
        rates: learning rate by kind of contender.
    """

    metric: str
    num_training: int
    num_epochs: int
    batch: int
    num_layers: int
    rates: dict[str, float]


_SST2 = TaskSettings("accuracy", 3_000, 4, 32, 6, {"full": 1e-4, "top": 1e-4, "lora": 2e-3})
_QUESTIONS = TaskSettings("f1", 1_000, 4, 16, 6, {"full": 2e-4, "top": 2e-4, "lora": 2e-3})
_DIGITS = TaskSettings("accuracy", 1_000, 5, 32, 12, {"full": 3e-4, "top": 3e-4, "lora": 2e-3})
_CIFAR10 = TaskSettings("accuracy", 2_000, 5, 32, 12, {"full": 3e-4, "top": 3e-4, "lora": 2e-3})
SETTINGS = {
    "sst2": _SST2, "sst2_no_dropout": _SST2, "squad": _QUESTIONS, "squad_no_dropout": _QUESTIONS,
    "answers": _QUESTIONS, "answers_no_dropout": _QUESTIONS, "cifar10": _CIFAR10, "cifar10_augmented": _CIFAR10,
    "entailment": _SST2, "digits": _DIGITS,
}  # fmt: skip


class Task(ABC):
    """Data and models of one task.

    `pool` holds what training samples are drawn from; `arguments` are options of Trainer that the data need, `given`
    what Trainer is given beside model, arguments and training samples.
    """

    pool: Dataset
    arguments: dict[str, Any]
    given: dict[str, Any]

    def training(self, seed: int, num_samples: int) -> Dataset:
        """Samples drawn by `seed`."""
        order = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(seed))
        return self.pool.select(order[:num_samples].tolist())

    @abstractmethod
    def model(self) -> Any:
        """The pretrained model with a new head, dropout as its configuration has it."""

    @abstractmethod
    def score(self, model: Any) -> dict[str, float]:
        """What the model, in evaluation mode, reaches on the samples that are held out, in percent."""


class TextTask(Task):
    """MiniLM; batches of similar lengths, as one trains texts."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
        self.arguments = {"train_sampling_strategy": "group_by_length"}
        self.given = {"data_collator": DataCollatorWithPadding(self.tokenizer)}

    def logits(self, model: Any, rows: Dataset) -> Iterator[tuple[list[int], Any]]:
        """Which rows, and the model's output for them."""
        collate = DataCollatorWithPadding(self.tokenizer)
        order = sorted(range(len(rows)), key=[len(ids) for ids in rows["input_ids"]].__getitem__)
        inputs = rows.select_columns(list(INPUTS))
        for start in range(0, len(order), EVALUATION_BATCH):
            chosen = order[start : start + EVALUATION_BATCH]
            yield chosen, model(**collate([inputs[index] for index in chosen]))


def accuracy(task: Any, model: Any) -> dict[str, float]:
    """Return the share of a text task's held-out rows that are classified correctly, in percent."""
    labels = torch.tensor(task.held_out["label"][:])
    right = sum(int((o.logits.argmax(-1) == labels[c]).sum()) for c, o in task.logits(model, task.held_out))
    return {"accuracy": 100 * right / len(labels)}


class Sst2(TextTask):
    """Sentiment of sentences; held out are the validation sentences and 5,000 training sentences."""

    num_held_out = 5_000

    def __init__(self, data: Path, models: Path) -> None:
        super().__init__()
        rows = load_dataset("parquet", data_files={n: str(data / f"sst2_{n}.parquet") for n in ("train", "dev")})
        order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(20_210_718)).tolist()
        away = rows["train"].select(order[: self.num_held_out]).cast(rows["dev"].features)
        self.held_out = self._tokenized(concatenate_datasets([rows["dev"], away]))
        self.pool = self._tokenized(rows["train"].select(order[self.num_held_out :]))

    def _tokenized(self, rows: Dataset) -> Dataset:
        def tokenize(batch: dict[str, Any]) -> Any:
            return self.tokenizer(batch["sentence"], truncation=True, max_length=128)

        return rows.map(tokenize, batched=True, remove_columns=["sentence", "idx"])

    def model(self) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(minilm_folder(), num_labels=2)

    def score(self, model: Any) -> dict[str, float]:
        return accuracy(self, model)


class Questions(TextTask):
    """SQuAD v1.1, each context cut to the sentence of the answer; held out are questions of the development set.

    Whole contexts would take four times as long, for fewer seeds and contenders.
    """

    def __init__(self, data: Path, models: Path) -> None:
        super().__init__()
        self.options = QuestionDataArguments(
            dataset_name="squad", max_seq_length=QUESTION_TOKENS, doc_stride=0, pad_to_max_length=False
        )
        training = self._fitting(data / "squad_v1_train_partial.parquet")
        held_out = self._fitting(data / "squad_v1_dev.parquet")
        order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(20_210_718)).tolist()
        self.questions = held_out.select(order[:NUM_HELD_OUT_QUESTIONS])
        self.pool = make_windows(training, self.tokenizer, self.options, is_training=True)
        self.windows = make_windows(self.questions, self.tokenizer, self.options, is_training=False)
        self.pool_questions = training

    def _fitting(self, path: Path) -> Dataset:
        def fits(batch: dict[str, Any]) -> list[bool]:
            questions = [question.lstrip() for question in batch["question"]]
            encoded = self.tokenizer(questions, batch["context"], verbose=False)
            return [len(ids) <= QUESTION_TOKENS for ids in encoded["input_ids"]]

        rows = load_dataset("parquet", data_files=str(path), split="train").map(answer_sentence)
        return rows.filter(fits, batched=True)


class Squad(Questions):
    """Start and end of the answer; F1 of words and exact match of answers."""

    def model(self) -> Any:
        return AutoModelForQuestionAnswering.from_pretrained(minilm_folder())

    def score(self, model: Any) -> dict[str, float]:
        starts, ends = np.full((2, len(self.windows), QUESTION_TOKENS), -np.inf)
        for chosen, output in self.logits(model, self.windows):
            for logits, found in ((starts, output.start_logits), (ends, output.end_logits)):
                logits[chosen, : found.shape[1]] = found.numpy()
        answers = find_answers(self.questions, self.windows, (starts, ends), AnswerOptions())
        truths = {row["id"]: answer_texts(row["answers"]) for row in self.questions}
        return squad_metrics({answer.name: answer.text for answer in answers}, truths)


class Answers(Questions):
    """Which tokens of a context answer a question: tags B, I and O.

    As each context holds one answer, the span that the tags favour most is taken, and scored by F1 of its tokens, as a
    mean over questions, and by whether it is the whole answer. By the likeliest tag of each token a model that has
    learnt little would find nothing at all.
    """

    def __init__(self, data: Path, models: Path) -> None:
        super().__init__(data, models)
        self.given = {"data_collator": DataCollatorForTokenClassification(self.tokenizer)}
        evaluated = make_windows(self.pool_questions, self.tokenizer, self.options, is_training=False)
        self.pool = _tagged(self.pool, evaluated)
        labelled = make_windows(self.questions, self.tokenizer, self.options, is_training=True)
        self.held_out = _tagged(labelled, self.windows)

    def model(self) -> Any:
        return AutoModelForTokenClassification.from_pretrained(minilm_folder(), num_labels=len(TAGS))

    def score(self, model: Any) -> dict[str, float]:
        tags, scores = self.held_out["labels"][:], []
        for chosen, output in self.logits(model, self.held_out):
            for index, logits in zip(chosen, output.logits.numpy(), strict=True):
                found = best_span(logits[: len(tags[index])], np.array(tags[index]) != IGNORED)
                scores.append(span_f1(found, true_span(tags[index])))
        return {"f1": 100 * float(np.mean(scores)), "exact_match": 100 * float(np.mean(np.array(scores) == 1))}


def _tagged(labelled: Dataset, evaluated: Dataset) -> Dataset:
    """Windows with `labels`.

    Args:
        labelled: windows for training.
        evaluated: the same ones for evaluation, which know where tokens start.
    """
    starts = evaluated["token_starts"]
    positions = zip(starts, labelled["start_positions"], labelled["end_positions"], strict=True)
    return labelled.select_columns(list(INPUTS)).add_column("labels", [answer_tags(*found) for found in positions])


class Entailment(TextTask):
    """Pairs of a question of SQuAD and a sentence of its context: does it hold the answer? As QNLI is made.

    No setting was chosen on it.
    """

    def __init__(self, data: Path, models: Path) -> None:
        super().__init__()
        self.pool = self._pairs(data / "squad_v1_train_partial.parquet")
        held_out = self._pairs(data / "squad_v1_dev.parquet")
        order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(20_210_718)).tolist()
        self.held_out = held_out.select(order[:NUM_HELD_OUT_QUESTIONS])

    def _pairs(self, path: Path) -> Dataset:
        """Return every second question with the sentence of its answer, the others with another sentence."""

        def pair(rows: dict[str, Any], indices: list[int]) -> dict[str, Any]:
            questions, sentences, labels = [], [], []
            for index, question, context, answers in zip(
                indices, rows["question"], rows["context"], rows["answers"], strict=True
            ):
                right = answer_sentence({"context": context, "answers": answers})["context"]
                others = [sentence for sentence in context.split(". ") if sentence not in right]
                holds_answer = index % 2 == 0
                if holds_answer or others:
                    questions.append(question.lstrip())
                    sentences.append(right if holds_answer else others[index % len(others)])
                    labels.append(int(holds_answer))
            encoded = self.tokenizer(questions, sentences, truncation=True, max_length=QUESTION_TOKENS)
            return {**encoded, "label": labels}

        rows = load_dataset("parquet", data_files=str(path), split="train")
        return rows.map(pair, with_indices=True, batched=True, remove_columns=rows.column_names)

    def model(self) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(minilm_folder(), num_labels=2)

    def score(self, model: Any) -> dict[str, float]:
        return accuracy(self, model)


class Cifar10(Task):
    """A small pretrained ViT on images that are decoded each time they are read; held out are 4,000 test images."""

    augments = False

    def __init__(self, data: Path, models: Path) -> None:
        self.folder = models / "vit-12x192-patch4-32px"
        files = {"train": f"{data}/cifar10_train_20000.parquet", "test": f"{data}/cifar10_test_4000.parquet"}
        rows = load_dataset("parquet", data_files=files)
        self.pool = rows["train"].with_transform(ImageReader(self.augments))
        self.pixels = torch.stack([pixels_of(image) for image in rows["test"]["image"]])
        self.labels = torch.tensor(rows["test"]["label"][:])
        # The transform needs a column that no model takes.
        self.arguments = {"remove_unused_columns": False}
        self.given = {"data_collator": default_data_collator}

    def model(self) -> Any:
        return AutoModelForImageClassification.from_pretrained(
            self.folder, num_labels=10, ignore_mismatched_sizes=True
        )

    def score(self, model: Any) -> dict[str, float]:
        found = [model(pixel_values=pixels).logits.argmax(-1) for pixels in self.pixels.split(EVALUATION_BATCH)]
        return {"accuracy": 100 * float((torch.cat(found) == self.labels).float().mean())}


class Digits(Cifar10):
    """Handwritten digits of scikit-learn, enlarged to 32 px; held out are 797. No setting was chosen on it."""

    def __init__(self, data: Path, models: Path) -> None:
        self.folder = models / "vit-12x192-patch4-32px"
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
        pixels = nn.functional.interpolate(pixels, (32, 32), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(20_210_718))
        away, kept = order[:797], order[797:]
        rows = {"pixel_values": pixels[kept].numpy(), "labels": labels[kept.numpy()]}
        self.pool = Dataset.from_dict(rows).with_format("torch")
        self.pixels, self.labels = pixels[away], torch.tensor(labels)[away]
        self.arguments = {}
        self.given = {"data_collator": default_data_collator}


class AugmentedCifar10(Cifar10):
    """With a random crop after padding by 4 pixels, and a random flip."""

    augments = True


@dataclass(frozen=True)
class ImageReader:
    """Images of a batch decoded, and if wanted cropped and flipped anew, at each access."""

    augments: bool

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        images = [augment(image) for image in images] if self.augments else images
        return {"pixel_values": [pixels_of(image) for image in images], "labels": rows["label"]}


def pixels_of(image: Any) -> torch.Tensor:
    """`(channels, height, width)`, normalised."""
    pixels = (np.asarray(image.convert("RGB")) / 255.0 - PIXEL_MEAN) / PIXEL_STD
    return torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)


class WithoutDropout(Task):
    """Another task with a model without dropout, as layers that a run freezes are: all contenders are alike in it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.pool, self.arguments, self.given = task.pool, task.arguments, task.given

    def model(self) -> Any:
        model = self.task.model()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def score(self, model: Any) -> dict[str, float]:
        return self.task.score(model)


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "sst2": Sst2,
    "sst2_no_dropout": lambda data, models: WithoutDropout(Sst2(data, models)),
    "squad": Squad,
    "squad_no_dropout": lambda data, models: WithoutDropout(Squad(data, models)),
    "answers": Answers,
    "answers_no_dropout": lambda data, models: WithoutDropout(Answers(data, models)),
    # The small ViT has no dropout.
    "cifar10": Cifar10,
    "cifar10_augmented": AugmentedCifar10,
    "entailment": Entailment,
    "digits": Digits,
}
"""Made from the folders of data and models."""
