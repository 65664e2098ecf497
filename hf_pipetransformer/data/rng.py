"""RNG states: shared between ranks, rank by rank, and those of generators inside a data set or collator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from hf_pipetransformer.data.augmentation import AugmentationSlots, ItemCode
from hf_pipetransformer.data.batches import pad_batch, sequence_length


def random_state(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of this process's global generators as tensors and JSON values, ready for a file."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    values = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), int(position), int(has_gauss), float(cached)],
    }
    return tensors, values


def set_random_state(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    kind, *rest = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


_CPU = torch.device("cpu")
_NUM_SAMPLES = 4
_DEPTH = 4
_LONGEST_LIST = 32

States = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""RNG states of torch, numpy and Python on the CPU, as `random_state` returns them."""


def present_states() -> States:
    """Return the CPU states of this process's global generators."""
    return random_state(_CPU)


def set_states(states: States) -> None:
    """Set the CPU states of this process's global generators."""
    set_random_state(*states, _CPU)


class SharedRngState:
    """RNG states that the global generators of a single process would have, kept on each rank during training.

    Models draw from the ranks' own generators, which differ. Only rank 0 reads data that draws at random, so its
    states count. Torch's state advances identically on every rank, since all ranks draw the order of the samples from
    it.
    """

    def __init__(self, states: States) -> None:
        self.states = states

    @property
    def torch_state(self) -> torch.Tensor:
        return self.states[0]["torch"]

    @torch_state.setter
    def torch_state(self, state: torch.Tensor) -> None:
        self.states = ({**self.states[0], "torch": state.clone()}, self.states[1])

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Swap the shared states into the global generators inside the context, and save them when it ends."""
        own = present_states()
        set_states(self.states)
        try:
            yield
        finally:
            self.states = present_states()
            set_states(own)


def draws_at_random(dataset: Any, collate: Any) -> bool:
    """Return True if reading and collating some samples of an indexed data set draws random numbers.

    Covers the global generators and those that the data set or collator contains. All of them are restored afterwards.
    """
    count = len(dataset)
    indices = sorted({index * count // _NUM_SAMPLES for index in range(_NUM_SAMPLES)}) if count else []
    with generators_kept(dataset, collate) as has_drawn:
        # Samples that cannot be collated fail later, where the user sees the error in context.
        with suppress(Exception):
            fetch = getattr(dataset, "__getitems__", None)
            collate([dataset[index] for index in indices] if fetch is None else fetch(indices))
        return has_drawn()


@contextmanager
def generators_kept(*holders: Any) -> Iterator[Callable[[], bool]]:
    """Restore all generators at the end of the context: the global ones and those inside the user's objects.

    Yields a function that returns True if one of them has been advanced or created since. `holders`, data sets and
    collators, are searched a few levels deep.
    """
    states = present_states()
    # Attributes that are None count too: some objects create their generator on first use.
    slots = [(of, name, value) for of in objects_in(holders) for name, value in list(vars(of).items())]
    held = [(value, state_of(value)) for _, _, value in slots if is_generator(value)]
    made = [(of, name, value) for of, name, value in slots if value is None]

    def has_drawn() -> bool:
        own = [_comparable(state_of(generator)) for generator, _ in held]
        return (
            _comparable(present_states()) != _comparable(states)
            or own != [_comparable(state) for _, state in held]
            or any(is_generator(vars(of).get(name)) for of, name, _ in made)
        )

    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield has_drawn
    finally:
        set_states(states)
        for generator, state in held:
            set_state(generator, state)
        for of, name, value in made:
            if is_generator(vars(of).get(name)):
                vars(of)[name] = value


def objects_in(holders: Any, depth: int = _DEPTH) -> list[Any]:
    """Return the objects with attributes that are reachable from `holders`, each once."""
    found: dict[int, Any] = {}
    level = list(holders)
    for _ in range(depth):
        reached: list[Any] = []
        for value in level:
            if isinstance(value, MethodType):
                reached.append(value.__self__)
            elif isinstance(value, partial):
                reached += [value.func, *value.args, *value.keywords.values()]
            elif isinstance(value, (list, tuple)) and len(value) <= _LONGEST_LIST:
                reached += value
            elif isinstance(value, dict) and len(value) <= _LONGEST_LIST:
                reached += value.values()
            elif isinstance(getattr(value, "__dict__", None), dict) and id(value) not in found:
                found[id(value)] = value
                reached += vars(value).values()
        level = reached
    return list(found.values())


def is_generator(value: Any) -> bool:
    """Return True for a random number generator of torch, numpy or Python."""
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def state_of(generator: Any) -> Any:
    """Return a generator's state in the form that `set_state` takes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Restore a generator to a state that `state_of` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def _comparable(state: Any) -> str:
    return json.dumps(state, default=lambda value: value.tolist())


class DrawnRow(NamedTuple):
    """Sample as the data set returned it for an item; `augmentation` defines items."""

    item: int
    row: Any


def plain_row(row: Any) -> Any:
    """Return the sample as the user's collator expects it."""
    return row.row if isinstance(row, DrawnRow) else row


class SeededGenerators:
    """Generators of Python, numpy and torch, and those inside `holders`, seeded for each draw of a sample."""

    def __init__(self, holders: Sequence[Any], seed: int) -> None:
        self.holders = holders
        self.seed = seed
        self._slots: list[tuple[Any, str, Any]] = []
        self._held: list[Any] = []
        self._has_looked = False

    def __getstate__(self) -> dict[str, Any]:
        # A worker process has its own copies of the user's objects, so it must search them again.
        return {**vars(self), "_slots": [], "_held": [], "_has_looked": False}

    def drawn(self, draw: Callable[[], Any]) -> Any:
        """Return the result of `draw`, and restore all generators afterwards.

        `draw` must call `begin` before it draws for an item. If the user's objects create a generator during the call,
        `draw` runs a second time, because the new generator was not seeded.
        """
        self._look()
        found = self._drawn_once(draw)
        return self._drawn_once(draw) if self._look() else found

    def _drawn_once(self, draw: Callable[[], Any]) -> Any:
        with self._kept():
            return draw()

    def _look(self) -> bool:
        """Find the generators inside the user's objects if they may have changed; return True if it searched."""
        now = [(vars(owner).get(name), value) for owner, name, value in self._slots]
        changed = [pair for pair in now if pair[0] is not pair[1]]
        if self._has_looked and not any(is_generator(value) for pair in changed for value in pair):
            return False
        slots = [(owner, *slot) for owner in objects_in(self.holders) for slot in list(vars(owner).items())]
        # Attributes that are None count too: some objects create their generator on first use.
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
        """Seed all generators for one draw of a sample; `what` is part of the seed."""
        random.seed(self._seed(what, sample, draw, 0))
        np.random.seed(self._seed(what, sample, draw, 1) % 2**32)
        # torch.manual_seed would seed the GPUs too, even those that are not in use yet.
        torch.default_generator.manual_seed(self._seed(what, sample, draw, 2))
        for number, generator in enumerate(self._held, start=3):
            _seed(generator, self._seed(what, sample, draw, number))

    def _seed(self, what: str, sample: int, draw: int, number: int) -> int:
        """Return a 63-bit seed, different for each generator."""
        return xxhash.xxh3_64_intdigest(f"{what} {self.seed} {sample} {draw} {number}".encode()) >> 1


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


class SeededSamples(Dataset[Any]):
    """Data set indexed by items; items below the number of samples are draw 0 of each sample."""

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
    """Collator that draws for each sample separately, so the draws do not depend on the rest of the batch.

    Args:
        main_input: name of the input that the embeddings read, padded with `pad_token_id`.
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
    """Parts for reading random samples whose slots are stored; `samples` is indexed by items."""

    samples: SeededSamples
    collate: SeededCollator | PlainRows
    slots: AugmentationSlots


class PlainRows:
    """Collator of rows of `SeededSamples` that draws nothing itself."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        return self.collate([plain_row(row) for row in rows])
