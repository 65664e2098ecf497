"""Extractive question answering: reading questions, and cutting their contexts into windows."""

from __future__ import annotations

import ast
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value
from script_utils import load_files
from transformers import BatchEncoding, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
SQUAD_COLUMNS = Features(
    {name: Value("string") for name in ("id", "title", "context", "question")} | {"answers": ANSWERS}
)
NO_ANSWERS: dict[str, list[Any]] = {"text": [], "answer_start": []}
OUTSIDE = -1
"""Where a token of a window starts and ends if it is none of the context's."""


# ---- reading ----


def load_questions(files: dict[str, str], cache_dir: str | None) -> DatasetDict:
    """Local files, one per split: tables with SQuAD's columns, or the official nested JSON."""
    nested = {split: rows for split, file in files.items() if (rows := read_official(Path(file))) is not None}
    tables = {split: file for split, file in files.items() if split not in nested}
    loaded = load_files(tables, cache_dir) if tables else {}
    made = {split: Dataset.from_list(rows, features=SQUAD_COLUMNS) for split, rows in nested.items()}
    return DatasetDict({split: made[split] if split in made else loaded[split] for split in files})


def read_official(path: Path) -> list[dict[str, Any]] | None:
    """The questions of an official SQuAD file, v1.1 or v2; None if the file is none of these."""
    if path.suffix != ".json":
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None  # one object a line
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        return None
    return [
        _row(article.get("title", ""), paragraph["context"], question)
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def _row(title: str, context: str, question: dict[str, Any]) -> dict[str, Any]:
    answers = [] if question.get("is_impossible") else question.get("answers", [])
    return {
        "id": question["id"],
        "title": title,
        "context": context,
        "question": question["question"],
        "answers": {name: [answer[name] for answer in answers] for name in ANSWERS},
    }


def check_questions(questions: Dataset, needs_answers: bool, allows_no_answer: bool) -> Dataset:
    """Questions with ids and answers as the rest of this file expects them.

    Args:
        questions: `id`, `context`, `question` and `answers`; answers in a CSV file are read from their JSON.
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
    if questions.features["id"] != Value("string"):
        questions = questions.cast_column("id", Value("string"))
    names = questions["id"][:]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Found {len(names)} questions with {len(set(names))} ids; expected an id of its own for each."
        )
    if "answers" in questions.column_names and isinstance(questions.features["answers"], Value):
        features = Features({**questions.features, "answers": ANSWERS})
        questions = questions.map(lambda row: {"answers": parse_answers(row["answers"])}, features=features)
    if not needs_answers:
        return questions
    unanswered = [row["id"] for row in questions if not answer_texts(row["answers"])]
    if unanswered and not allows_no_answer:
        raise ValueError(
            f"Found {len(unanswered)} questions without an answer, {unanswered[0]!r} first; expected one for each. "
            "For data like SQuAD v2 pass --version_2_with_negative."
        )
    misplaced = [row["id"] for row in questions if _is_misplaced(row)]
    if misplaced:
        logger.warning(
            "The answers of %d questions (%r first) do not stand at their answer_start: the wrong words are learnt.",
            len(misplaced),
            misplaced[0],
        )
    return questions


def parse_answers(text: str | None) -> dict[str, list[Any]]:
    """The answers in a cell of a CSV file, as JSON or as Python prints a dict; an empty cell is no answer.

    Raises:
        ValueError: it is neither.
    """
    if text is None:
        return NO_ANSWERS
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError):
            continue
        if isinstance(found, dict) and found.keys() >= ANSWERS.keys():
            return {name: list(found[name]) for name in ANSWERS}
    raise ValueError(
        f'Found answers {text[:80]!r}; expected JSON like {{"text": ["a word"], "answer_start": [17]}}. Write the '
        "column with json.dumps, or the data as parquet."
    )


def answer_texts(answers: dict[str, Any] | None) -> list[str]:
    """The texts of a question's answers; empty if it has none."""
    return list(answers["text"]) if answers else []


def _is_misplaced(row: dict[str, Any]) -> bool:
    texts = answer_texts(row["answers"])
    return bool(texts) and not row["context"].startswith(texts[0], row["answers"]["answer_start"][0])


# ---- windows ----


@dataclass(frozen=True)
class WindowOptions:
    """How a question and its context become inputs of the model.

    Args:
        max_length: tokens of an input, question and special tokens included.
        stride: tokens of the context that two windows, one after the other, share.
        pads: whether every input is padded to `max_length`.
    """

    max_length: int
    stride: int
    pads: bool


class WindowMaker:
    """Cuts contexts into windows that overlap; called by `Dataset.map` on batches of questions.

    Windows for training have `start_positions` and `end_positions`, those for evaluation `example_id`, `null_position`
    (that of the CLS token, which stands for no answer), and `token_starts` and `token_ends`: where each token starts
    and ends in the context, in characters; -1 for all others.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: WindowOptions, is_training: bool) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"Found the tokenizer {type(tokenizer).__name__}, which does not say where in a text a token stands; "
                "expected a fast one. Convert it, or name another with --tokenizer_name."
            )
        self.tokenizer = tokenizer
        self.options = options
        self.is_training = is_training

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # Blanks before a question are many in some data, and some tokenizers make tokens of them.
        questions = [question.lstrip() for question in batch["question"]]
        self._check_room(questions, batch)
        encoded = self.tokenizer(
            questions,
            batch["context"],
            truncation="only_second",
            max_length=self.options.max_length,
            stride=self.options.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if self.options.pads else False,
        )
        origins = encoded.pop("overflow_to_sample_mapping")
        spans = [_context_spans(encoded, window) for window in range(len(origins))]
        del encoded["offset_mapping"]
        null_positions = [self._null_position(ids) for ids in encoded["input_ids"]]
        columns = dict(encoded)
        if self.is_training:
            labels = [
                answer_positions(*spans[window], null_positions[window], _answer_span(batch, origin))
                for window, origin in enumerate(origins)
            ]
            return columns | {
                "start_positions": [start for start, _ in labels],
                "end_positions": [end for _, end in labels],
            }
        return columns | {
            "example_id": [batch["id"][origin] for origin in origins],
            "null_position": null_positions,
            "token_starts": [starts for starts, _ in spans],
            "token_ends": [ends for _, ends in spans],
        }

    def _null_position(self, ids: list[int]) -> int:
        special = self.tokenizer.cls_token_id
        return ids.index(special) if special in ids else 0

    def _check_room(self, questions: list[str], batch: dict[str, list[Any]]) -> None:
        """Raise ValueError if a window could not move on, or if nothing fits beside a question."""
        num_special = self.tokenizer.num_special_tokens_to_add(pair=True)
        for row, ids in enumerate(self.tokenizer(questions, add_special_tokens=False)["input_ids"]):
            room = self.options.max_length - len(ids) - num_special
            if room > self.options.stride:
                continue
            needed = len(self.tokenizer(batch["context"][row], add_special_tokens=False)["input_ids"])
            if needed > room:
                raise ValueError(
                    f"Question {batch['id'][row]!r} has {len(ids)} tokens, which leaves {room} of --max_seq_length "
                    f"{self.options.max_length} for its context: expected more than --doc_stride "
                    f"{self.options.stride}. Use longer inputs or a smaller stride."
                )


def _context_spans(encoded: BatchEncoding, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each token of a window starts and ends in the context: two arrays `(tokens,)`."""
    spans = np.array(encoded["offset_mapping"][window], dtype=np.int32).reshape(-1, 2)
    is_context = np.array([part == 1 for part in encoded.sequence_ids(window)])
    spans[~is_context] = OUTSIDE
    return spans[:, 0], spans[:, 1]


def _answer_span(batch: dict[str, list[Any]], row: int) -> tuple[int, int] | None:
    """Characters of the context from and up to which the first answer stands, without the blanks around it."""
    answers = batch["answers"][row]
    texts = answer_texts(answers)
    if not texts or not texts[0].strip():
        return None
    start = answers["answer_start"][0] + len(texts[0]) - len(texts[0].lstrip())
    return start, start + len(texts[0].strip())


def answer_positions(
    starts: np.ndarray, ends: np.ndarray, null_position: int, span: tuple[int, int] | None
) -> tuple[int, int]:
    """First and last token of the answer in a window; `null_position` twice if it does not hold all of the answer.

    Args:
        starts: where each token starts in the context, in characters, `(tokens,)`; -1 for all others.
        ends: likewise, where it ends.
        span: characters from and up to which the answer stands; None for no answer.
    """
    context = np.flatnonzero(starts != OUTSIDE)
    if span is None or not len(context) or span[0] < starts[context[0]] or span[1] > ends[context[-1]]:
        return null_position, null_position
    # A token may be longer than the answer ("1990s" for "1990"): all that the answer touches are its tokens.
    touched = context[(ends[context] > span[0]) & (starts[context] < span[1])]
    return (int(touched[0]), int(touched[-1])) if len(touched) else (null_position, null_position)
