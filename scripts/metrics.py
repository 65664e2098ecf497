"""The metrics of GLUE and of image classification in numpy: nothing to download, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


Metric = Callable[[np.ndarray, np.ndarray], float]


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of predictions that equal their label."""
    return float((predictions == labels).mean())


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 in a task of two classes; 0 when neither predictions nor labels hold class 1."""
    positives = float((predictions == 1).sum() + (labels == 1).sum())
    return 2 * float(((predictions == 1) & (labels == 1)).sum()) / positives if positives else 0.0


def matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of two classes (the CoLA metric); 0 when either side holds one class only."""
    return pearson(predictions == 1, labels == 1)


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Pearson correlation; 0 when either side is constant."""
    x, y = (values.astype(np.float64) - values.mean() for values in (predictions, labels))
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else 0.0


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Spearman rank correlation; equal values share their mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return pearson(ranks(predictions), ranks(labels))


def mean_squared_error(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared error of a regression."""
    return float(((predictions.astype(np.float64) - labels) ** 2).mean())


CLASSIFICATION: dict[str, Metric] = {"accuracy": accuracy}
REGRESSION: dict[str, Metric] = {"mse": mean_squared_error}
WITH_F1: dict[str, Metric] = {"accuracy": accuracy, "f1": f1}
GLUE: dict[str, dict[str, Metric]] = dict.fromkeys(("mnli", "qnli", "rte", "sst2", "wnli"), CLASSIFICATION)
GLUE |= dict.fromkeys(("mrpc", "qqp"), WITH_F1)
GLUE |= {
    "cola": {"matthews_correlation": matthews_correlation},
    "stsb": {"pearson": pearson, "spearmanr": spearman},
}


def predictions_from_logits(logits: np.ndarray | tuple[np.ndarray, ...], is_regression: bool) -> np.ndarray:
    """Logits `(samples, classes)` to class ids `(samples,)`, or to values `(samples,)` for a regression."""
    scores = logits[0] if isinstance(logits, tuple) else logits
    return scores.reshape(-1) if is_regression else scores.argmax(axis=-1)
