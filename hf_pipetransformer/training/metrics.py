"""Metric accumulators: what losses note beside them, and the summary of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer

from hf_pipetransformer import trainer_compat as host
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import count_items
from hf_pipetransformer.engine.wrappers import runs_again
from hf_pipetransformer.schedules.layout import Layout


Part = tuple[int, int, dict[str, float]]
"""The number of a batch, the labels of a part of it, and the part's averages by name."""


def averages(parts: list[Part]) -> dict[str, float]:
    """Of each name the mean over batches, of each batch over its labels, as if each had been one part."""
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for batch, num_items, values in parts:
        for name, value in values.items():
            of_batch = sums[name][batch]
            of_batch[0] += num_items * value
            of_batch[1] += num_items
    return {
        name: sum(total / max(count, 1.0) for total, count in of_name.values()) / len(of_name)
        for name, of_name in sums.items()
    }


@contextmanager
def noting_apart(trainer: Trainer) -> Iterator[host.Notes]:
    """What is noted inside, by mode and name, is handed out and noted nowhere; nothing is gathered of other ranks."""
    notes = host.notes(trainer)
    if notes is None:
        yield {}
        return
    kept = dict(notes)
    apart: host.Notes = {mode: defaultdict(list) for mode in notes}
    notes.update(apart)
    try:
        with host.gathering_nothing(trainer.accelerator):
            yield apart
    finally:
        notes.update(kept)


@contextmanager
def noting_nothing(trainer: Trainer) -> Iterator[None]:
    """A loss that is no step's."""
    with noting_apart(trainer), host.counting_no_tokens(trainer):
        yield


@dataclass
class Noted:
    """Collects what the parts of batches note, on the ranks that compute losses.

    Args:
        trainer: whose `compute_loss` notes.
        topology: the ranks.
    """

    trainer: Trainer
    topology: Topology
    _batch: int = field(default=0, init=False)
    _parts: dict[str, list[Part]] = field(default_factory=lambda: {"train": [], "eval": []}, init=False)

    def begin_batch(self, inputs: dict[str, Any] | None = None) -> None:
        """What follows is of the next batch; its tokens are counted where it is given, for its parts overlap."""
        self._batch += 1
        if inputs and host.num_tokens_read(self.trainer) is not None:
            mask, tokens = inputs.get("attention_mask"), inputs.get("input_ids")
            num_tokens = int(mask.sum()) if mask is not None else 0 if tokens is None else tokens.numel()
            host.count_tokens_read(self.trainer, num_tokens)

    @contextmanager
    def of_part(self, inputs: dict[str, Any]) -> Iterator[None]:
        """The loss of a part of a batch is computed inside; a stage that has none leaves with an error."""
        if host.notes(self.trainer) is None:
            yield
            return
        # These trainers train causal models: the first token of a sequence is predicted by none.
        num_items = count_items(inputs, shifts_labels=True) if inputs else 0
        with noting_apart(self.trainer) as apart, host.counting_no_tokens(self.trainer):
            yield
        if runs_again():
            return  # Noted when it ran first.
        for mode, notes in apart.items():
            values = {name: values[-1] for name, values in notes.items() if values and name != "num_tokens"}
            if values:
                self._parts[mode].append((self._batch, num_items, values))

    def note(self, mode: str) -> None:
        """Note the averages over all ranks where the trainer's own log finds them. A collective call."""
        notes = host.notes(self.trainer)
        if notes is None:
            return
        found = self.topology.gather({"parts": self._parts[mode], "tokens": host.num_tokens_read(self.trainer)})
        self._parts[mode] = []
        together = averages([part for each in found for part in each["parts"]])
        notes[mode].update({name: [value] for name, value in together.items()})
        if together and host.num_tokens_read(self.trainer) is not None:
            notes[mode]["num_tokens"] = [sum(each["tokens"] for each in found)]


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
