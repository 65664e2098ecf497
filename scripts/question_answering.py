"""Extractive question answering: questions, windows of their contexts, answers from logits, SQuAD's metrics."""

from __future__ import annotations

import json
import logging
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value
from script_utils import load_files
from transformers import BatchEncoding, EvalPrediction, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput


logger = logging.getLogger(__name__)

ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
SQUAD_COLUMNS = Features(
    {name: Value("string") for name in ("id", "title", "context", "question")} | {"answers": ANSWERS}
)
OUTSIDE = -1
"""Where a token of a window starts and ends if it is none of the context's."""
Span = tuple[int, int]
"""Characters of a context from and up to which a text stands."""
PostProcess = Callable[[Dataset, Dataset, tuple[np.ndarray, np.ndarray], str], EvalPrediction]


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
        if self.is_training:
            answers = (batch["answers"][origin] for origin in origins)
            found = [answer_tokens(encoded, window, each) for window, each in enumerate(answers)]
            spans = [span or (null, null) for span, null in zip(found, nulls, strict=True)]
            columns = {"start_positions": [start for start, _ in spans], "end_positions": [end for _, end in spans]}
        else:
            spans = []
            for window, pairs in enumerate(offsets):
                is_context = np.array([part == 1 for part in encoded.sequence_ids(window)])
                pairs = np.array(pairs, dtype=np.int32).reshape(-1, 2)
                spans.append(np.where(is_context, pairs.T, np.int32(OUTSIDE)))
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


def answer_tokens(encoded: BatchEncoding, window: int, answers: dict[str, Any] | None) -> tuple[int, int] | None:
    """First and last token of the first answer; None if there is none, or if the window does not hold all of it."""
    text = next(iter(answer_texts(answers)), "")
    if not text.strip():
        return None
    # Without blanks at its ends, at which no token need start or end.
    start = answers["answer_start"][0] + len(text) - len(text.lstrip())
    ends = start, start + len(text.strip()) - 1
    first, last = (encoded.char_to_token(window, character, sequence_index=1) for character in ends)
    return None if first is None or last is None else (first, last)


# ---- answers ----


@dataclass
class AnswerOptions:
    """Which of the possible answers is given."""

    n_best_size: int = HfArg(default=20, help="Starts, ends and candidates that are looked at.")
    max_answer_length: int = HfArg(default=30, help="Tokens of the longest answer that is given.")
    version_2_with_negative: bool = HfArg(default=False, help="Questions may have no answer, as in SQuAD v2.")
    null_score_diff_threshold: float = HfArg(
        default=0.0, help="No answer is given where its score exceeds the best answer's by more (v2 only)."
    )


@dataclass(frozen=True)
class Answer:
    """What was found for one question."""

    name: str  # its id
    text: str  # the answer given; empty for none
    best_text: str  # the best one that is not empty, if there is any
    null_score_difference: float | None  # score of no answer minus that of `best_text`; None for v1
    candidates: list[dict[str, Any]]  # `text`, `score` (two logits) and `probability` (among them), the best first


def find_answers(
    questions: Dataset, windows: Dataset, logits: tuple[np.ndarray, np.ndarray], options: AnswerOptions
) -> list[Answer]:
    """The best answer to each question over all its windows.

    Args:
        questions: `id` and `context`.
        windows: of these questions, as `WindowMaker` makes them for evaluation.
        logits: of start and end, each `(windows, positions)`; positions beyond a window's tokens are not looked at.

    Raises:
        ValueError: there are not as many logits as windows.
    """
    start_logits, end_logits = (np.asarray(part, dtype=np.float64) for part in logits)
    if not len(start_logits) == len(end_logits) == len(windows):
        raise ValueError(
            f"Found logits for {len(start_logits)} starts and {len(end_logits)} ends of answers; expected one for "
            f"each of {len(windows)} windows."
        )
    # By question: the score of each span, in the order of the windows; and the score of no answer.
    scores: dict[str, dict[Span, float]] = {name: {} for name in questions["id"]}
    null_scores = dict.fromkeys(scores, math.inf)
    columns = windows.select_columns(["example_id", "null_position", "token_starts", "token_ends"])
    for window, starts, ends in zip(columns, start_logits, end_logits, strict=True):
        name, null = window["example_id"], window["null_position"]
        # The smallest: windows without the answer rate none high, and the one that has it decides.
        null_scores[name] = min(null_scores[name], starts[null] + ends[null])
        for span, score in best_spans(starts, ends, window, options):
            scores[name][span] = max(score, scores[name].get(span, -math.inf))
    return [
        choose(question, scores[question["id"]], null_scores[question["id"]], options)
        for question in questions.select_columns(["id", "context"])
    ]


def best_spans(
    start_logits: np.ndarray, end_logits: np.ndarray, window: dict[str, Any], options: AnswerOptions
) -> list[tuple[Span, float]]:
    """The best spans of a window between a good start and a good end, each with its score."""
    starts, ends = np.asarray(window["token_starts"]), np.asarray(window["token_ends"])
    context = np.flatnonzero(starts != OUTSIDE)

    def best(logits: np.ndarray) -> np.ndarray:
        # A stable order: of equal logits the earlier position, on every machine.
        return context[np.argsort(-logits[context], kind="stable")[: options.n_best_size]]

    pairs = np.meshgrid(best(start_logits), best(end_logits), indexing="ij")
    first, last = (tokens.ravel() for tokens in pairs)
    is_span = (first <= last) & (last - first < options.max_answer_length) & (ends[last] > starts[first])
    first, last = first[is_span], last[is_span]
    scores = start_logits[first] + end_logits[last]
    order = np.argsort(-scores, kind="stable")[: options.n_best_size]
    spans = zip(starts[first[order]].tolist(), ends[last[order]].tolist(), strict=True)
    return list(zip(spans, scores[order].tolist(), strict=True))


def choose(question: dict[str, str], scores: dict[Span, float], null_score: float, options: AnswerOptions) -> Answer:
    """The answer to a question (`id`, `context`) from the scores of its spans and of no answer."""
    # Of equal scores the answer that stands first.
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: options.n_best_size]
    candidates = [(question["context"][start:end], score) for (start, end), score in best]
    text = best_text = candidates[0][0] if candidates else ""
    difference = None
    if options.version_2_with_negative:
        difference = null_score - candidates[0][1] if candidates else math.inf
        text = "" if difference > options.null_score_diff_threshold else best_text
        candidates = sorted([*candidates, ("", null_score)], key=lambda candidate: -candidate[1])
    # Less the best score, so that no exponential overflows.
    weights = np.exp([score - candidates[0][1] for _, score in candidates])
    rated = [
        {"text": text, "score": score, "probability": float(weight / weights.sum())}
        for (text, score), weight in zip(candidates, weights, strict=True)
    ]
    return Answer(question["id"], text, best_text, difference, rated)


def write_answers(answers: list[Answer], folder: Path, prefix: str) -> None:
    """Write `<prefix>_predictions.json` and `_nbest_predictions.json`; for SQuAD v2 `_null_odds.json` too."""
    contents: dict[str, dict[str, Any]] = {
        "predictions": {answer.name: answer.text for answer in answers},
        "nbest_predictions": {answer.name: answer.candidates for answer in answers},
    }
    odds = {answer.name: answer.null_score_difference for answer in answers}
    if any(odd is not None for odd in odds.values()):
        # JSON has no infinity, which stands for a context without a word.
        contents["null_odds"] = {name: None if odd == math.inf else odd for name, odd in odds.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / f"{prefix}_{name}.json").write_text(text + "\n", encoding="utf-8")


# ---- metrics: written here, as `evaluate.load("squad")` fetches its code from the hub each time ----


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, one blank between words."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_scores(text: str, truths: Sequence[str], allows_no_answer: bool = False) -> tuple[float, float]:
    """Exact match and F1 over words, 0 to 1, each with the truth that it is best with; 0 without a truth.

    With `allows_no_answer` (v2) a question without a true answer is answered rightly by an empty text.
    """
    if allows_no_answer:
        truths = [truth for truth in truths if normalise(truth)] or [""]
    given, exact, f1 = normalise(text).split(), 0.0, 0.0
    for true in (normalise(truth).split() for truth in truths):
        num_shared = sum((Counter(given) & Counter(true)).values())
        exact = max(exact, float(given == true))
        f1 = max(f1, 2 * num_shared / (len(given) + len(true)) if num_shared else 0.0)
    # Two texts without words share none; in v2 they are the same answer.
    return exact, max(exact, f1) if allows_no_answer else f1


def squad_metrics(texts: Mapping[str, str], truths: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """`exact_match` and `f1` of SQuAD v1.1, in per cent of all questions: id -> answer given, and right ones."""
    scores = [answer_scores(texts[name], true) if name in texts else (0.0, 0.0) for name, true in truths.items()]
    exact, f1 = (100 * float(np.mean(found)) for found in zip(*scores, strict=True))
    return {"exact_match": exact, "f1": f1}


def squad_v2_metrics(answers: Sequence[Answer], truths: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """`exact` and `f1` of SQuAD v2 in per cent: of all questions, those with (`HasAns`) and without answer (`NoAns`).

    With the best value over all thresholds of the difference (`best_exact`, `best_f1`), and the threshold (`_thresh`).
    """
    metrics: dict[str, float] = {}
    scores = {answer.name: answer_scores(answer.text, truths[answer.name], True) for answer in answers}
    unanswered = [name for name in scores if not truths[name]]
    answered = [name for name in scores if truths[name]]
    for prefix, names in (("", list(scores)), ("HasAns_", answered), ("NoAns_", unanswered)):
        if names:
            exact, f1 = (100 * float(np.mean([scores[name][part] for name in names])) for part in (0, 1))
            metrics |= {f"{prefix}exact": exact, f"{prefix}f1": f1, f"{prefix}total": len(names)}
    # The official sweep: from no answer at all on, questions get their text in the order of the difference.
    ordered = sorted(answers, key=lambda answer: answer.null_score_difference)
    best = [answer_scores(answer.best_text, truths[answer.name], True) for answer in ordered]
    for part, metric in enumerate(("exact", "f1")):
        # To a question without answer any text is wrong.
        gains = [
            found[part] if truths[answer.name] else -bool(answer.best_text)
            for answer, found in zip(ordered, best, strict=True)
        ]
        totals = np.cumsum([len(unanswered), *gains])
        threshold = [0.0, *(float(answer.null_score_difference) for answer in ordered)][totals.argmax()]
        metrics |= {f"best_{metric}": float(100 * totals.max() / len(answers)), f"best_{metric}_thresh": threshold}
    return metrics


# ---- a Trainer that evaluates by answers ----


class QuestionAnsweringMixin:
    """Lets a Trainer evaluate and predict by the answers that its model's logits give, not by the logits.

    Stands before the Trainer: `class MyTrainer(QuestionAnsweringMixin, PipeTransformerTrainer)`. All that `evaluate`
    and `predict` do around the loop over batches (logging, callbacks, speed) stays the Trainer's own.

    Args:
        eval_examples: the questions that `eval_dataset` holds the windows of.
        post_process_function: from questions, windows, `(start_logits, end_logits)` and the prefix of the metrics to
            what `compute_metrics` takes; without `label_ids` there are no metrics. Called on every rank, with the same
            values.
        args, kwargs: the Trainer's.
    """

    def __init__(
        self, *args: Any, eval_examples: Dataset | None = None, post_process_function: PostProcess, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(
        self, eval_dataset: Dataset | None = None, eval_examples: Dataset | None = None, **options: Any
    ) -> dict[str, float]:
        """Evaluate the answers to `eval_examples` by their windows, `eval_dataset`; every rank gets the same metrics.

        Raises:
            ValueError: questions or windows are missing, or there are several data sets.
        """
        questions = self.eval_examples if eval_examples is None else eval_examples
        self._ask(questions, self.eval_dataset if eval_dataset is None else eval_dataset)
        return super().evaluate(eval_dataset, **options)

    def predict(self, test_dataset: Dataset, test_examples: Dataset, **options: Any) -> PredictionOutput:
        """The answers to `test_examples` from their windows: what `post_process_function` gives, with its metrics."""
        self._ask(test_examples, test_dataset)
        return super().predict(test_dataset, **options)

    def _ask(self, questions: Any, windows: Any) -> None:
        if questions is None or not isinstance(windows, Dataset):
            raise ValueError(
                f"Found {type(questions).__name__} as questions and {type(windows).__name__} as their windows; "
                "expected one Dataset each. Pass eval_examples with eval_dataset, and several data sets one by one."
            )
        self._asked = questions, windows

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> EvalLoopOutput:
        """The Trainer's loop without metrics of logits; then the answers and their metrics."""
        # Answers need logits, of which Trainer gives none where it has no metrics to compute.
        options |= {"metric_key_prefix": metric_key_prefix, "prediction_loss_only": False}
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = super().evaluation_loop(*args, **options)
        finally:
            self.compute_metrics = compute_metrics
        found = self.post_process_function(*self._asked, output.predictions, metric_key_prefix)
        metrics = dict(output.metrics)
        if compute_metrics is not None and found.label_ids is not None:
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in compute_metrics(found).items()}
        return output._replace(predictions=found.predictions, label_ids=found.label_ids, metrics=metrics)
