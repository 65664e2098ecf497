"""What a training was, said at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_pipetransformer.layout import Layout


@dataclass
class Stretch:
    """Steps in a row under one layout.

    Args:
        layout: of all of them; M may change.
        predicted: seconds a step, by the plan; None where nothing was predicted.
        seconds: of each step.
    """

    layout: Layout
    predicted: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 2]


@dataclass
class Summary:
    """Notes how long each step took, under which layout. Evaluations and checkpoints between steps do not count.

    Args:
        clock: gives seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    stretches: list[Stretch] = field(default_factory=list, init=False)
    num_hits: int = field(default=0, init=False)
    num_misses: int = field(default=0, init=False)
    _predicted: float | None = field(default=None, init=False)
    _start: float | None = field(default=None, init=False)

    def begin_step(self, predicted: float | None = None) -> None:
        """An optimizer step begins, after a move to a layout of which `predicted` seconds a step are expected."""
        self._predicted = predicted
        self._start = self.clock()

    def add_reads(self, num_hits: int, num_misses: int) -> None:
        """An epoch is over in which the cache had so many of the samples asked for, and had not."""
        self.num_hits += num_hits
        self.num_misses += num_misses

    def end_step(self, layout: Layout) -> None:
        """It is done. At the end of an epoch Trainer comes by without a step."""
        if self._start is None:
            return
        seconds, self._start = self.clock() - self._start, None
        last = self.stretches[-1] if self.stretches else None
        if last is None or _kind(last.layout) != _kind(layout):
            last = Stretch(layout, self._predicted)
            self.stretches.append(last)
        last.seconds.append(seconds)

    @property
    def num_steps(self) -> int:
        """That were noted."""
        return sum(len(stretch.seconds) for stretch in self.stretches)

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return sum(sum(stretch.seconds) for stretch in self.stretches)

    def saved_seconds(self) -> float | None:
        """Seconds that later steps took less than those of the start; None if nothing was frozen after it."""
        if len(self.stretches) < 2:
            return None
        first, *later = self.stretches
        return sum(first.median * len(stretch.seconds) - sum(stretch.seconds) for stretch in later)

    def in_words(self) -> str:
        """A line for each layout, and what freezing has saved."""
        if not self.stretches:
            return ""
        lines = [f"{self.num_steps} steps in {self.seconds:.1f} s:"]
        for stretch in self.stretches:
            layout = stretch.layout
            stored = f", {layout.cache_level} of them cached" if layout.cache_level else ""
            predicted = "" if stretch.predicted is None else f" (predicted: {stretch.predicted * 1e3:.0f})"
            lines.append(
                f"  {len(stretch.seconds)} steps of {stretch.median * 1e3:.0f} ms{predicted} with "
                f"{layout.num_frozen_layers} of {layout.num_layers} layers frozen{stored}, "
                f"{layout.shape_in_words}"
            )
        if self.num_hits:
            reads = self.num_hits + self.num_misses
            lines.append(f"  Cache: {self.num_hits:,} of {reads:,} reads were hits ({self.num_hits / reads:.0%}).")
        saved = self.saved_seconds()
        if saved is not None:
            first = self.stretches[0]
            lines.append(
                f"  {saved:.1f} s less than {self.num_steps} steps of {first.median * 1e3:.0f} ms, as before the "
                "first change."
            )
        return "\n".join(lines)


def _kind(layout: Layout) -> tuple[int, ...]:
    return (layout.pipeline_size, layout.num_replicas, layout.num_frozen_layers, layout.cache_level)
