"""Exact match and F1 of SQuAD v1.1 and v2, as their official evaluation scripts define them, in plain Python.

Source: Rajpurkar, Zhang, Lopyrev, Liang (2016); Rajpurkar, Jia, Liang (2018); the evaluation scripts v1.1 and v2.0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, one blank between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, truth: str) -> float:
    """1 if both are the same text once normalised, else 0."""
    return float(normalise(prediction) == normalise(truth))


def word_f1(prediction: str, truth: str) -> float:
    """F1 over the words of both, each as often as it occurs; 0 if they share none."""
    predicted, true = normalise(prediction).split(), normalise(truth).split()
    num_shared = sum((Counter(predicted) & Counter(true)).values())
    return 2 * num_shared / (len(predicted) + len(true)) if num_shared else 0.0


def question_scores(
    predictions: Mapping[str, str], truths: Mapping[str, Sequence[str]], allows_no_answer: bool
) -> dict[str, tuple[float, float]]:
    """Exact match and F1 of each question, 0 to 1, each with the truth that it is best with.

    Args:
        predictions: id -> answer given, empty for none; a question that is not in it scores 0.
        truths: id -> the answers that count as right.
        allows_no_answer: v2, where a question without a true answer is answered rightly by an empty text.
    """
    scores = {}
    for name, true in truths.items():
        if allows_no_answer:
            true = [text for text in true if normalise(text)] or [""]
        if name not in predictions or not true:
            scores[name] = 0.0, 0.0
            continue
        exact = max(exact_match(predictions[name], text) for text in true)
        f1 = max(word_f1(predictions[name], text) for text in true)
        # Two texts without words share none; in v2 they are the same answer.
        scores[name] = exact, max(exact, f1) if allows_no_answer else f1
    return scores


def squad_metrics(predictions: Mapping[str, str], truths: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """`exact_match` and `f1` of SQuAD v1.1, in per cent of all questions."""
    exact, f1 = _means(question_scores(predictions, truths, allows_no_answer=False), list(truths))
    return {"exact_match": exact, "f1": f1}


def squad_v2_metrics(
    predictions: Mapping[str, str],
    truths: Mapping[str, Sequence[str]],
    best_texts: Mapping[str, str],
    null_score_differences: Mapping[str, float],
) -> dict[str, float]:
    """`exact` and `f1` of SQuAD v2 in per cent: of all questions, those with (`HasAns`) and without answer (`NoAns`).

    With the best value over all thresholds of the difference (`best_exact`, `best_f1`), and the threshold (`_thresh`).

    Args:
        predictions: id -> answer given, empty for none.
        truths: id -> the answers that count as right; none for a question without answer.
        best_texts: id -> the answer that would be given if one had to be.
        null_score_differences: id -> score of no answer minus that of the best text.
    """
    scores = question_scores(predictions, truths, allows_no_answer=True)
    answered = [name for name, true in truths.items() if true]
    unanswered = [name for name, true in truths.items() if not true]
    metrics = {}
    for prefix, names in (("", list(truths)), ("HasAns_", answered), ("NoAns_", unanswered)):
        if names:
            exact, f1 = _means(scores, names)
            metrics |= {f"{prefix}exact": exact, f"{prefix}f1": f1, f"{prefix}total": len(names)}
    # The official sweep: from no answer at all on, questions get their text in the order of the difference.
    scores = question_scores(best_texts, truths, allows_no_answer=True)
    order = sorted(truths, key=lambda name: null_score_differences[name])
    for index, metric in enumerate(("exact", "f1")):
        # To a question without answer any text is wrong.
        gains = [scores[name][index] if truths[name] else -bool(best_texts[name]) for name in order]
        totals = np.cumsum([len(unanswered), *gains])
        threshold = [0.0, *(float(null_score_differences[name]) for name in order)][totals.argmax()]
        metrics |= {f"best_{metric}": float(100 * totals.max() / len(truths)), f"best_{metric}_thresh": threshold}
    return metrics


def _means(scores: Mapping[str, tuple[float, float]], names: Sequence[str]) -> tuple[float, float]:
    exact, f1 = (100 * sum(scores[name][index] for name in names) / len(names) for index in (0, 1))
    return exact, f1
