"""Answers from start and end logits, over all windows of a question; and a Trainer that evaluates by them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from qa_utils import OUTSIDE
from transformers import EvalPrediction
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput


Span = tuple[int, int]
"""Characters of a context from and up to which a text stands."""
PostProcess = Callable[[Dataset, Dataset, tuple[np.ndarray, np.ndarray], str], EvalPrediction]


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
