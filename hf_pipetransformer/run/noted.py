"""What `compute_loss` notes beside the loss, as the trainers of TRL do: averages over a batch, of all its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.batches import count_items
from hf_pipetransformer.pipeline.recompute import runs_again
from hf_pipetransformer.run import host


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
