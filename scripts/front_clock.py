"""Processor time as it would be on a machine that does nothing else.

What else runs on a machine slows each of its cores, by half or more where cores share caches and memory: processor
time then says as much about the neighbours as about the work. So a fixed piece of work is done again and again beside
what is measured, and each stretch of time counts by how long that piece took around it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback


GAUGE_SECONDS = 0.018
"""Of the fixed piece of work: what times are given for, near that of one idle core where the figures were taken."""
STEPS_APART = 3


class SteadyClock:
    """Adds up processor seconds of this process from its making on, the fixed pieces of work apart."""

    def __init__(self) -> None:
        self.processor_seconds = 0.0
        """As the system counts them."""
        self.seconds = 0.0
        """As they would be if the fixed piece of work took `GAUGE_SECONDS` all the time."""
        self.gauged: list[float] = [gauge()]
        self._last = time.process_time()

    def lap(self) -> None:
        """Take what has passed into account, and gauge again."""
        passed = time.process_time() - self._last
        self.gauged.append(gauge())
        self.processor_seconds += passed
        self.seconds += passed * GAUGE_SECONDS * 2 / (self.gauged[-2] + self.gauged[-1])
        self._last = time.process_time()


class Pace(TrainerCallback):
    """Gauges every few optimizer steps."""

    def __init__(self, clock: SteadyClock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See `TrainerCallback`."""
        if state.global_step % STEPS_APART == 0:
            self.clock.lap()


def gauge() -> float:
    """Processor seconds of a fixed piece of work, as a transformer has it: products, and passes over memory."""
    one, other, weights = torch.ones(1024, 384), torch.ones(384, 1536), torch.ones(4_000_000)
    start = time.thread_time()  # What other threads of this process do meanwhile is not part of it.
    for _ in range(2):
        torch.nn.functional.gelu(one @ other)
        weights.mul_(0.5).add_(weights, alpha=0.5)
    return time.thread_time() - start
