"""Random numbers that data sets and collators draw: as one process draws them, and whether they draw any."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch

from hf_pipetransformer import checkpoint


_CPU = torch.device("cpu")
_NUM_SAMPLES = 4
_DEPTH = 4
_LONGEST_LIST = 32

States = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Of the global generators of torch, numpy and Python, as `checkpoint.random_state` gives them."""


def present_states() -> States:
    """Those of this process."""
    return checkpoint.random_state(_CPU)


def set_states(states: States) -> None:
    """This process draws from them from now on."""
    checkpoint.set_random_state(*states, _CPU)


def under_name(name: str, states: States) -> States:
    """States as a file holds them beside others."""
    return {f"{name}|{key}": value for key, value in states[0].items()}, {name: states[1]}


def of_name(name: str, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> States | None:
    """The inverse of `under_name`; None if a file has none of that name."""
    if name not in values:
        return None
    prefix = f"{name}|"
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}, dict(values[name])


class SharedDraws:
    """The global generators of torch, numpy and Python as one process would have them, on each rank of a training.

    Models draw from the ranks' own, which differ. Rank 0's are what counts: it alone reads what draws at random.
    `torch`, which orders are drawn from on all ranks, goes along on every rank.

    Args:
        states: to begin with.
    """

    def __init__(self, states: States) -> None:
        self.states = states

    @property
    def torch_state(self) -> torch.Tensor:
        """That of torch's generator."""
        return self.states[0]["torch"]

    @torch_state.setter
    def torch_state(self, state: torch.Tensor) -> None:
        self.states = ({**self.states[0], "torch": state.clone()}, self.states[1])

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What is drawn from the global generators inside is drawn from these."""
        own = present_states()
        set_states(self.states)
        try:
            yield
        finally:
            self.states = present_states()
            set_states(own)


def draws_at_random(dataset: Any, collate: Any) -> bool:
    """Whether reading and collating samples of a data set with indices draws random numbers. It leaves no trace.

    From the global generators, or from such that data set or collator hold.
    """
    count = len(dataset)
    indices = sorted({index * count // _NUM_SAMPLES for index in range(_NUM_SAMPLES)}) if count else []
    with generators_kept(dataset, collate) as has_drawn:
        # Samples that make no batch are none of this function's business.
        with suppress(Exception):
            fetch = getattr(dataset, "__getitems__", None)
            collate([dataset[index] for index in indices] if fetch is None else fetch(indices))
        return has_drawn()


@contextmanager
def generators_kept(*holders: Any) -> Iterator[Callable[[], bool]]:
    """No generator is another one after this: neither the global ones, nor such that objects of the user hold.

    Gives a function that tells whether one is another one now.

    Args:
        holders: data sets and collators; they are searched a few levels deep.
    """
    states = present_states()
    # Some make their generator when they first need it.
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
    """The objects with attributes that are reached from `holders`, each once."""
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
    """Whether it draws random numbers: torch's, numpy's or Python's."""
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def state_of(generator: Any) -> Any:
    """What `set_state` takes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Let a generator draw on from a state of its kind."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def _comparable(state: Any) -> str:
    return json.dumps(state, default=lambda value: value.tolist())
