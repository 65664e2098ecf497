"""When each stage computes each micro-batch, and in which order their backwards come: read off GPipe's table. Pure."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from hf_pipetransformer.pipeline.schedules import Op, find_schedule, source_of


Clock = tuple[tuple[int, int], ...]
"""The (micro-batch, stage) pairs that are computed at one time."""


@lru_cache(maxsize=64)
def clock_cycles(num_micro_batches: int, num_stages: int) -> tuple[Clock, ...]:
    """The forwards of GPipe's table, those together that can run at one time, in the order of the stages.

    Three micro-batches, two stages (micro-batch, stage):

        (0, 0) | (1, 0) (0, 1) | (2, 0) (1, 1) | (2, 1)
    """
    times: dict[tuple[int, int], int] = {}
    for stage, row in enumerate(find_schedule("gpipe").table(num_stages, num_micro_batches)):
        now = -1
        for op, micro_batch, _ in row:
            if op is Op.FORWARD:
                source = source_of(op, stage, num_stages)
                arrived = -1 if source is None else times[micro_batch, source]
                now = 1 + max(now, arrived)
                times[micro_batch, stage] = now
    clocks: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(times.values()))]
    for entry in sorted(times, key=lambda entry: entry[1]):
        clocks[times[entry]].append(entry)
    return tuple(map(tuple, clocks))


@lru_cache(maxsize=64)
def next_backwards(num_micro_batches: int, num_stages: int, stage: int) -> dict[int, int]:
    """By micro-batch, the one whose backward comes right after its own on this stage; the last one has none."""
    row = find_schedule("gpipe").table(num_stages, num_micro_batches)[stage]
    order = [micro_batch for op, micro_batch, _ in row if op is Op.BACKWARD]
    return dict(pairwise(order))
