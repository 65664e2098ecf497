"""Extractive question answering: reading questions, and cutting their contexts into windows."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value
from script_utils import load_files
from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
SQUAD_COLUMNS = Features(
    {name: Value("string") for name in ("id", "title", "context", "question")} | {"answers": ANSWERS}
)
OUTSIDE = -1
"""Where a token of a window starts and ends if it is none of the context's."""


# ---- reading ----


def load_questions(files: dict[str, str], cache_dir: str | None) -> DatasetDict:
    """Local files, one per split: tables with SQuAD's columns, or the official nested JSON."""
    official = {split: rows for split, file in files.items() if (rows := read_official(Path(file)))}
    tables = {split: file for split, file in files.items() if split not in official}
    data = load_files(tables, cache_dir) if tables else DatasetDict()
    data.update({split: Dataset.from_list(rows, features=SQUAD_COLUMNS) for split, rows in official.items()})
    return data


def read_official(path: Path) -> list[dict[str, Any]] | None:
    """The questions of an official SQuAD file, v1.1 or v2; None if the file is none of these."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
    except json.JSONDecodeError:
        return None  # one object a line
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        return None
    rows = []
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [] if question.get("is_impossible") else question.get("answers", [])
                row = {"id": question["id"], "title": article.get("title", ""), "context": paragraph["context"]}
                row |= {"question": question["question"]}
                row |= {"answers": {name: [answer[name] for answer in answers] for name in ANSWERS}}
                rows.append(row)
    return rows


def check_questions(questions: Dataset, needs_answers: bool, allows_no_answer: bool) -> Dataset:
    """Questions with ids and answers as the rest of this file expects them.

    Args:
        questions: `id`, `context`, `question` and `answers`.
        needs_answers: for training or evaluation.
        allows_no_answer: a question may have no answer (SQuAD v2).

    Raises:
        ValueError: a column is missing, an id comes twice, or a question has no answer that must have one.
    """
    for column in ("id", "context", "question", *(["answers"] if needs_answers else [])):
        if column not in questions.column_names:
            raise ValueError(
                f"Found columns {questions.column_names}; expected `{column}`. Name the columns as SQuAD does: id, "
                "context, question, answers (of `text` and `answer_start`)."
            )
    questions = questions.cast_column("id", Value("string"))
    num_ids = len(questions.unique("id"))
    if num_ids < len(questions):
        raise ValueError(f"Found {len(questions)} questions with {num_ids} ids; expected an id of its own for each.")
    if isinstance(questions.features.get("answers"), Value):
        raise ValueError(
            f"Found answers {str(questions[0]['answers'])[:80]!r}; expected lists of `text` and `answer_start`. A CSV "
            "file cannot hold them: write the data as parquet or JSON."
        )
    if not needs_answers:
        return questions
    unanswered = [row["id"] for row in questions if not answer_texts(row["answers"])]
    if unanswered and not allows_no_answer:
        raise ValueError(
            f"Found {len(unanswered)} questions without an answer, {unanswered[0]!r} first; expected one for each. "
            "For data like SQuAD v2 pass --version_2_with_negative."
        )
    misplaced = []
    for row in questions:
        texts = answer_texts(row["answers"])
        if texts and not row["context"].startswith(texts[0], row["answers"]["answer_start"][0]):
            misplaced.append(row["id"])
    if misplaced:
        logger.warning(
            "The answers of %d questions (%r first) do not stand at their answer_start: the wrong words are learnt.",
            len(misplaced),
            misplaced[0],
        )
    return questions


def answer_texts(answers: dict[str, Any] | None) -> list[str]:
    """The texts of a question's answers; empty if it has none."""
    return list(answers["text"]) if answers else []


# ---- windows ----


@dataclass(frozen=True)
class WindowMaker:
    """Cuts contexts into windows that overlap; called by `Dataset.map` on batches of questions.

    Windows for training have `start_positions` and `end_positions`, those for evaluation `example_id`, `null_position`
    (that of the CLS token, which stands for no answer), and `token_starts` and `token_ends`: where each token starts
    and ends in the context, in characters; -1 for all others.
    """

    tokenizer: PreTrainedTokenizerBase  # a fast one, which says where in a text a token stands
    max_length: int  # tokens of a window, question and special tokens included
    stride: int  # tokens of the context that two windows, one after the other, share
    pads: bool  # every window, to `max_length`
    is_training: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # Blanks before a question are many in some data, and some tokenizers make tokens of them.
        questions = [question.lstrip() for question in batch["question"]]
        self._check_room(questions, batch)
        encoded = self.tokenizer(
            questions,
            batch["context"],
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if self.pads else False,
        )
        origins, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        cls = self.tokenizer.cls_token_id
        nulls = [ids.index(cls) if cls in ids else 0 for ids in encoded["input_ids"]]
        spans = []
        for window, pairs in enumerate(offsets):
            is_context = np.array([part == 1 for part in encoded.sequence_ids(window)])
            spans.append(np.where(is_context, np.array(pairs, dtype=np.int32).reshape(-1, 2).T, np.int32(OUTSIDE)))
        if self.is_training:
            answers = [answer_span(batch["answers"][origin]) for origin in origins]
            labels = [answer_positions(*found) for found in zip(spans, nulls, answers, strict=True)]
            columns = {"start_positions": [start for start, _ in labels], "end_positions": [end for _, end in labels]}
        else:
            columns = {
                "example_id": [batch["id"][origin] for origin in origins],
                "null_position": nulls,
                "token_starts": [starts for starts, _ in spans],
                "token_ends": [ends for _, ends in spans],
            }
        return dict(encoded) | columns

    def _check_room(self, questions: list[str], batch: dict[str, list[Any]]) -> None:
        """Raise ValueError if a window could not move on, or if nothing fits beside a question."""
        num_special = self.tokenizer.num_special_tokens_to_add(pair=True)
        for row, ids in enumerate(self.tokenizer(questions, add_special_tokens=False)["input_ids"]):
            room = self.max_length - len(ids) - num_special
            if room > self.stride:
                continue
            if len(self.tokenizer(batch["context"][row], add_special_tokens=False)["input_ids"]) > room:
                raise ValueError(
                    f"Question {batch['id'][row]!r} has {len(ids)} tokens, which leaves {room} of --max_seq_length "
                    f"{self.max_length} for its context: expected more than --doc_stride {self.stride}. Use longer "
                    "inputs or a smaller stride."
                )


def answer_span(answers: dict[str, Any] | None) -> tuple[int, int] | None:
    """Characters of the context from and up to which the first answer stands, without the blanks around it."""
    text = next(iter(answer_texts(answers)), "")
    if not text.strip():
        return None
    start = answers["answer_start"][0] + len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def answer_positions(spans: np.ndarray, null_position: int, answer: tuple[int, int] | None) -> tuple[int, int]:
    """First and last token of the answer in a window; `null_position` twice if it does not hold all of the answer.

    Args:
        spans: where each token starts and ends in the context, in characters, `(2, tokens)`; -1 for all others.
        null_position: token that stands for no answer.
        answer: characters from and up to which the answer stands; None for no answer.
    """
    starts, ends = spans
    context = np.flatnonzero(starts != OUTSIDE)
    if answer is None or not len(context) or answer[0] < starts[context[0]] or answer[1] > ends[context[-1]]:
        return null_position, null_position
    # A token may be longer than the answer ("1990s" for "1990"): all that the answer touches are its tokens.
    touched = context[(ends[context] > answer[0]) & (starts[context] < answer[1])]
    return (int(touched[0]), int(touched[-1])) if len(touched) else (null_position, null_position)
