"""RNG states: shared between ranks, rank by rank, and those of generators inside a data set or collator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import set_seed


CPU = torch.device("cpu")

States = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""RNG states of torch, numpy and Python, as `random_state` returns them."""


def random_state(device: torch.device = CPU) -> States:
    """Return the state of this process's global generators as tensors and JSON values, ready for a file."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    # numpy's words are uint32, which torch supports in few operations: int64 holds them.
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    values = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), int(position), int(has_gauss), float(cached)],
    }
    return tensors, values


def set_random_state(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], device: torch.device = CPU
) -> None:
    """Restore what `random_state` returned."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    kind, *rest = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


def same_states(a: States, b: States) -> bool:
    return a[1] == b[1] and all(torch.equal(b[0][name], state) for name, state in a[0].items())


class SharedRngState:
    """RNG states that the global generators of a single process would have, kept on each rank during training.

    Models draw from the ranks' own generators, which differ. Only rank 0 reads data that draws at random, so its
    states count. Torch's state advances identically on every rank, since all ranks draw the order of the samples from
    it.
    """

    def __init__(self, states: States) -> None:
        self.states = states
        """Shared states; inside of `drawing` this rank's own."""

    @property
    def torch_state(self) -> torch.Tensor:
        return self.states[0]["torch"]

    @torch_state.setter
    def torch_state(self, state: torch.Tensor) -> None:
        # A copy of its own, because a received state is a view into its message.
        self.states = ({**self.states[0], "torch": state.clone()}, self.states[1])

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the shared states inside the context; amid it, once more, from this rank's own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        present = random_state()
        set_random_state(*self.states)
        self.states = present


def drawing_from(shared: SharedRngState | None) -> AbstractContextManager[None]:
    """Draw from `shared` inside the context; None leaves the global generators as they are."""
    return nullcontext() if shared is None else shared.drawing()


def seed_on_host(of_python: int, of_numpy: int, of_torch: int) -> None:
    """Seed the global generators of the host, and those of no device."""
    random.seed(of_python)
    # numpy takes 32 bits.
    np.random.seed(of_numpy % 2**32)
    # torch.manual_seed would seed the GPUs too, even those that are not in use yet.
    torch.default_generator.manual_seed(of_torch)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Give the generators of the host and of one device their states back at the end of the context."""
    own = random_state(device)
    try:
        yield
    finally:
        set_random_state(*own, device)


@contextmanager
def drawing_with(seed: int, device: torch.device) -> Iterator[None]:
    """Draw the numbers of a seed inside the context; the generators get their own states back at the end."""
    with random_state_kept(device):
        set_seed(seed)
        yield


@contextmanager
def drawing_alike(share: Callable[[Any], Any], device: torch.device) -> Iterator[None]:
    """Draw the same random numbers on several ranks inside the context.

    They start from the states of the rank that `share`, a broadcast, sends from. Ranks whose own states were others
    get these back at the end.
    """
    own = random_state(device)
    tensors, values = share([*own])
    is_own = same_states((tensors, values), own)
    set_random_state({name: state.clone() for name, state in tensors.items()}, values, device)
    try:
        yield
    finally:
        if not is_own:
            set_random_state(*own, device)


# ---- generators inside the user's objects ----

# The holders themselves, and what is one to three references away.
_DEPTH = 4
# Longer ones are taken for data rather than for parts of an object.
_LONGEST_LIST = 32


class Generators:
    """Random number generators of torch, numpy and Python inside data sets, collators, samplers or loaders.

    A generator is found if it is an attribute of one of the `holders`, or of an object at most three references away
    from one, through attributes, bound methods, partials, and lists, tuples and dicts of at most 32 entries.
    Attributes that are None are watched too, since some objects create their generator on first use. Generators in
    closures, module globals or `__slots__` are not found.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        attributes = [(owner, name, value) for owner in objects_in(holders) for name, value in vars(owner).items()]
        self._slots = [slot for slot in attributes if slot[2] is None or is_generator(slot[2])]
        self.found = list({id(value): value for _, _, value in self._slots if value is not None}.values())

    def created(self) -> list[tuple[Any, str]]:
        """Return the owners and names of attributes that were None and hold a generator now."""
        return [
            (owner, name)
            for owner, name, value in self._slots
            if value is None and is_generator(vars(owner).get(name))
        ]

    def states(self) -> list[Any]:
        return [state_of(generator) for generator in self.found]

    def restore(self, states: Sequence[Any]) -> None:
        """Restore what `states` returned."""
        for generator, state in zip(self.found, states, strict=True):
            set_state(generator, state)


def draws_from_now_on(*holders: Any) -> Callable[[], bool]:
    """Return a function that returns True if random numbers have been drawn since, or a generator made.

    Covers the global generators and those inside `holders`, see `Generators`.
    """
    generators = Generators(holders)

    def present() -> str:
        # As text, in which states of all kinds can be compared.
        return json.dumps([random_state(), generators.states()], default=lambda value: value.tolist())

    before = present()
    return lambda: bool(generators.created()) or present() != before


@contextmanager
def generators_kept(*holders: Any) -> Iterator[None]:
    """Restore the global generators and those inside `holders` (see `Generators`) at the end of the context."""
    generators = Generators(holders)
    # The user's code may draw on GPUs; saving their states must not initialize one that is not in use.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    own = generators.states()
    try:
        # The second keeps the states of GPUs.
        with random_state_kept(CPU), torch.random.fork_rng(devices=devices):
            yield
    finally:
        generators.restore(own)
        # As it was before, or the run would draw from a generator that this trial has created and advanced.
        for owner, name in generators.created():
            vars(owner)[name] = None


class NotedDraws:
    """A collator that notes, for all processes, if random numbers are drawn in one that reads samples.

    Args:
        collate: the collator, which gets what it would get.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate
        self._flag = torch.zeros(1, dtype=torch.uint8).share_memory_()
        self._after: States | None = None

    @property
    def seen(self) -> bool:
        return bool(self._flag)

    def __call__(self, samples: list[Any]) -> Any:
        """Collate samples, which were read after the call before, in the same process."""
        before = random_state()
        batch = self.collate(samples)
        after = random_state()
        if not same_states(after, before) or not (self._after is None or same_states(before, self._after)):
            self._flag.fill_(1)
        self._after = after
        return batch


def fetch_samples(dataset: Any, indices: Sequence[int]) -> Any:
    """Return samples the way a DataLoader does: with `__getitems__` if the data set has it."""
    fetch = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if fetch is None else fetch(indices)


def objects_in(holders: Sequence[Any]) -> list[Any]:
    """Return the objects with attributes that are reachable from `holders`, each once."""
    found: dict[int, Any] = {}
    level = list(holders)
    for _ in range(_DEPTH):
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
            # Objects may refer to each other in a circle: each is entered once.
            elif isinstance(getattr(value, "__dict__", None), dict) and id(value) not in found:
                found[id(value)] = value
                reached += vars(value).values()
        level = reached
    return list(found.values())


def is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)
