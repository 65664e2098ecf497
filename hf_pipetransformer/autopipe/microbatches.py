"""Searching the number of micro-batches M by trying: which to try, and what the trials say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_pipetransformer.autopipe.costs import UnitCosts, rank_bytes
from hf_pipetransformer.autopipe.planner import MEMORY_RESERVE
from hf_pipetransformer.layout import Layout


MULTIPLES = (6, 4, 3, 2, 1)
"""M is tried from 6K down to K (PipeTransformer, section 3.2.3)."""


def candidates(pipeline_size: int, samples_per_pipeline: int) -> list[int]:
    """The M to try for `pipeline_size` ranks, none above the number of samples, each once, large to small.

    Large first: the smallest micro-batches need the least memory.
    """
    tried = {max(1, min(multiple * pipeline_size, samples_per_pipeline)) for multiple in MULTIPLES}
    return sorted(tried, reverse=True)


def fitting_candidates(layout: Layout, costs: UnitCosts, samples_per_device: int, device_bytes: float) -> list[int]:
    """The M to try under a layout: fewer micro-batches hold more activations, so some may not fit.

    Args:
        layout: whose M is searched.
        costs: of the model's units.
        samples_per_device: samples of a batch, by device.
        device_bytes: memory of the smallest device.
    """
    samples = samples_per_device * layout.pipeline_size
    tried = candidates(layout.pipeline_size, samples)

    def fits(count: int) -> bool:
        needed = max(rank_bytes(replace(layout, num_microbatches=count), costs, samples))
        return needed <= device_bytes * (1 - MEMORY_RESERVE)

    return [count for count in tried if fits(count)] or tried[:1]


class MicrobatchTrial:
    """Tries each M for a few optimizer steps; the caller runs and times them.

    Seconds count per token, since batches differ in length. The first step of each M is a warm-up and dropped, and of
    the others the fastest counts: disturbances only ever make a step slower.

    Args:
        candidates: the M to try, in this order.
        steps_each: steps per M, the warm-up included.

    Raises:
        ValueError: nothing to try, or no step beside the warm-up.
    """

    def __init__(self, candidates: Sequence[int], steps_each: int = 3) -> None:
        if not candidates or steps_each < 2:
            raise ValueError(
                "A trial needs at least one number of micro-batches and two steps for each (the first is a warm-up), "
                f"found {list(candidates)} and {steps_each}."
            )
        self._candidates = list(candidates)
        self._steps_each = steps_each
        self._position = 0
        self._steps = 0
        self._least: dict[int, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether every M has been tried."""
        return self._position == len(self._candidates)

    def current(self) -> int:
        """The M of the next step: the one on trial, and the best once all are done."""
        return self.best() if self.is_done else self._candidates[self._position]

    def record(self, seconds: float, tokens: int) -> None:
        """What a step with `current()` took. A step without tokens says nothing and is not counted."""
        if self.is_done or tokens < 1:
            return
        if self._steps > 0:
            tried = self._candidates[self._position]
            self._least[tried] = min(seconds / tokens, self._least.get(tried, float("inf")))
        self._steps += 1
        if self._steps == self._steps_each:
            self._position += 1
            self._steps = 0

    def best(self) -> int:
        """The M with the least seconds per token so far; before any measurement the first to be tried."""
        return min(self._least, key=self._least.__getitem__) if self._least else self._candidates[0]

    def as_event(self) -> dict[int, float]:
        """Seconds per token of each M measured so far."""
        return dict(self._least)
