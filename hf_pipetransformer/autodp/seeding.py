"""Reading random samples so that a draw hangs on nothing but seed, sample and its own number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from hf_pipetransformer.autodp.draws import (
    is_generator,
    objects_in,
    present_states,
    set_state,
    set_states,
    state_of,
)
from hf_pipetransformer.autodp.padding import pad_batch, sequence_length
from hf_pipetransformer.autodp.views import ItemCode, Views


class DrawnRow(NamedTuple):
    """A sample as the data set gave it for an item, see `views`."""

    item: int
    row: Any


def plain_row(row: Any) -> Any:
    """What a user's collator knows of a sample."""
    return row.row if isinstance(row, DrawnRow) else row


class SeededGenerators:
    """The global generators of Python, numpy and torch, and such that objects of the user hold, seeded for each draw.

    Args:
        holders: data set and collator; they are searched a few levels deep.
        seed: of the run.
    """

    def __init__(self, holders: Sequence[Any], seed: int) -> None:
        self.holders = holders
        self.seed = seed
        self._slots: list[tuple[Any, str, Any]] = []
        self._held: list[Any] = []
        self._has_looked = False

    def __getstate__(self) -> dict[str, Any]:
        # A worker has objects of its own.
        return {**vars(self), "_slots": [], "_held": [], "_has_looked": False}

    def drawn(self, draw: Callable[[], Any]) -> Any:
        """What `draw` gives; the states of all generators are the same after it.

        It calls `begin` before what it draws for an item. If the user's objects make a generator meanwhile, it is
        called once more, for that one was not seeded.
        """
        self._look()
        found = self._drawn_once(draw)
        return self._drawn_once(draw) if self._look() else found

    def _drawn_once(self, draw: Callable[[], Any]) -> Any:
        with self._kept():
            return draw()

    def _look(self) -> bool:
        """Find the generators that are held, if they are others than they were; whether they are."""
        now = [(vars(owner).get(name), value) for owner, name, value in self._slots]
        changed = [pair for pair in now if pair[0] is not pair[1]]
        if self._has_looked and not any(is_generator(value) for pair in changed for value in pair):
            return False
        slots = [(owner, *slot) for owner in objects_in(self.holders) for slot in list(vars(owner).items())]
        # Some make their generator when they first need it.
        self._slots = [slot for slot in slots if slot[2] is None or is_generator(slot[2])]
        self._held = list({id(value): value for _, _, value in self._slots if value is not None}.values())
        self._has_looked = True
        return True

    @contextmanager
    def _kept(self) -> Iterator[None]:
        states, held = present_states(), [(generator, state_of(generator)) for generator in self._held]
        try:
            yield
        finally:
            set_states(states)
            for generator, state in held:
                set_state(generator, state)

    def begin(self, sample: int, draw: int, what: str) -> None:
        """What is drawn from here on is of this draw of a sample; `what` says by whom it is drawn."""
        random.seed(self._seed(what, sample, draw, 0))
        np.random.seed(self._seed(what, sample, draw, 1) % 2**32)
        # torch.manual_seed would seed the GPUs too, even those that are not in use yet.
        torch.default_generator.manual_seed(self._seed(what, sample, draw, 2))
        for number, generator in enumerate(self._held, start=3):
            _seed(generator, self._seed(what, sample, draw, number))

    def _seed(self, what: str, sample: int, draw: int, number: int) -> int:
        """63 bits; no two generators draw alike."""
        return xxhash.xxh3_64_intdigest(f"{what} {self.seed} {sample} {draw} {number}".encode()) >> 1


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


class SeededSamples(Dataset[Any]):
    """A data set by items; the first ones are draw 0 of each sample.

    Args:
        dataset: the user's.
        code: says what an item is.
        generators: of the data set.
    """

    def __init__(self, dataset: Any, code: ItemCode, generators: SeededGenerators) -> None:
        self.dataset = dataset
        self.code = code
        self.generators = generators

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> DrawnRow:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[DrawnRow]:
        rows: list[DrawnRow] = self.generators.drawn(lambda: [DrawnRow(int(item), self._row(item)) for item in items])
        return rows

    def _row(self, item: int) -> Any:
        sample = self.code.samples_of(item)
        self.generators.begin(sample, self.code.draws_of(item), "sample")
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.dataset[sample] if fetch is None else fetch([sample])[0]


class SeededCollator:
    """A collator that draws for each sample apart, so that no draw hangs on the others in a batch.

    Args:
        collate: the user's.
        code: says what an item is.
        generators: of the collator.
        main_input: name of the input that the embeddings read.
        pad_token_id: what fills it.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        code: ItemCode,
        generators: SeededGenerators,
        main_input: str,
        pad_token_id: int,
    ) -> None:
        self.collate = collate
        self.code = code
        self.generators = generators
        self.main_input = main_input
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        return self._joined(self.generators.drawn(lambda: [self._alone(row) for row in rows]))

    def _alone(self, row: Any) -> Mapping[str, Any]:
        item = row.item if isinstance(row, DrawnRow) else 0
        self.generators.begin(self.code.samples_of(item), self.code.draws_of(item), "batch")
        batch: Mapping[str, Any] = self.collate([plain_row(row)])
        return batch

    def _joined(self, batches: list[Mapping[str, Any]]) -> dict[str, Any]:
        longest = max(sequence_length(batch, self.main_input) for batch in batches)
        if batches[0][self.main_input].dim() == 2:
            batches = [pad_batch(batch, self.main_input, longest, self.pad_token_id) for batch in batches]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@dataclass(frozen=True)
class SeededReading:
    """How random samples are read of which views are stored.

    Args:
        samples: by items.
        collate: what they give to a batch.
        views: which items an epoch takes.
    """

    samples: SeededSamples
    collate: SeededCollator | PlainRows
    views: Views


class PlainRows:
    """A collator of rows of `SeededSamples` that draws nothing itself.

    Args:
        collate: the user's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        return self.collate([plain_row(row) for row in rows])
