"""Whether a pipeline gets shorter once layers are frozen: the paper's rule by memory, and one by throughput. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_pipetransformer.layout import Layout


TIE = 0.01
"""Predicted times closer than this share of the least are equal: fewer ranks then leave less to go wrong."""


@dataclass(frozen=True)
class Candidate:
    """A layout that could come next.

    Args:
        layout: the layout.
        predicted_seconds: of one optimizer step.
        fits: whether what its fullest rank holds fits a device.
    """

    layout: Layout
    predicted_seconds: float
    fits: bool


def compress_by_memory(
    current_size: int,
    largest_rank_size: Callable[[int], float],
    initial_largest: float,
    allowed: Sequence[int],
) -> int:
    """Halve the pipeline as long as no rank gets more than the fullest had at the start.

    PipeTransformer, Eq. 2 (`<=`; Algorithm 1, line 30, has `<`), with sizes as the measure of memory.

    Args:
        current_size: K.
        largest_rank_size: size of what the fullest rank holds for a K, frozen layers counted by their factor.
        initial_largest: the same at the start of the run, in the same unit.
        allowed: lengths that the pipeline may have.

    Returns:
        The new K; `current_size` if it stays.
    """
    size = current_size
    while size % 2 == 0 and size // 2 in allowed and largest_rank_size(size // 2) <= initial_largest:
        size //= 2
    return size


def choose_by_throughput(candidates: Sequence[Candidate]) -> Candidate:
    """The fitting candidate with the least predicted seconds; among equals (`TIE`) the shortest pipeline.

    If none fits, the longest pipeline: it needs the least memory.

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("There is no layout to choose from: expected at least one candidate.")
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return max(candidates, key=lambda candidate: candidate.layout.pipeline_size)
    limit = (1 + TIE) * min(candidate.predicted_seconds for candidate in fitting)
    equals = [candidate for candidate in fitting if candidate.predicted_seconds <= limit]
    return min(equals, key=lambda candidate: (candidate.layout.pipeline_size, candidate.predicted_seconds))
