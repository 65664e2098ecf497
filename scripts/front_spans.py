"""The sentence of an answer, answers in it as tags of its tokens, and the span that scores of tags favour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from qa_utils import OUTSIDE


TAGS = {"O": 0, "B": 1, "I": 2}
IGNORED = -100
"""Tag of a token outside of the context, which counts neither in the loss nor in the score."""


def answer_sentence(row: dict[str, Any]) -> dict[str, Any]:
    """A question with its context cut to the sentence that holds its first answer; answers outside of it are left out.

    A sentence ends with a full stop and a space: an answer that holds them lies in several.
    """
    context, answers = row["context"], row["answers"]
    spans = [(start, start + len(text)) for start, text in zip(answers["answer_start"], answers["text"], strict=True)]
    before, after = context.rfind(". ", 0, spans[0][0]), context.find(". ", spans[0][1])
    first, last = (before + 2 if before >= 0 else 0), (after + 1 if after >= 0 else len(context))
    kept = [(start, end) for start, end in spans if first <= start and end <= last]
    found = {"text": [context[start:end] for start, end in kept], "answer_start": [start - first for start, _ in kept]}
    return {"context": context[first:last], "answers": found}


def answer_tags(token_starts: Sequence[int], first: int, last: int) -> list[int]:
    """The tag of each token of a window.

    Args:
        token_starts: where each token starts in the context; -1 for all others.
        first: token of the answer; one outside of the context stands for no answer.
        last: likewise.
    """
    tags = [IGNORED if start == OUTSIDE else TAGS["O"] for start in token_starts]
    if tags[first] != IGNORED:
        tags[first : last + 1] = [TAGS["B"], *[TAGS["I"]] * (last - first)]
    return tags


def best_span(logits: np.ndarray, is_context: np.ndarray) -> range:
    """From the token that is most likely B rather than O on, as long as I is more likely than O.

    Args:
        logits: `(tokens, tags)`.
        is_context: which tokens may answer, `(tokens,)`.
    """
    over_outside = np.where(is_context[:, None], logits - logits[:, [TAGS["O"]]], -np.inf)
    first = last = int(over_outside[:, TAGS["B"]].argmax())
    while last + 1 < len(logits) and over_outside[last + 1, TAGS["I"]] > 0:
        last += 1
    return range(first, last + 1)


def true_span(tags: Sequence[int]) -> range:
    """The tokens tagged B and I."""
    first = tags.index(TAGS["B"])
    return range(first, first + 1 + tags.count(TAGS["I"]))


def span_f1(found: range, true: range) -> float:
    """Tokens of both spans, twice, over the tokens of each."""
    return 2 * len(set(found) & set(true)) / (len(found) + len(true))
