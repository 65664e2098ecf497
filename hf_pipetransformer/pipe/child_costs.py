"""What each child of a Sequential costs: seconds, and bytes. Measured on copies, one child at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hf_pipetransformer.pipe.skip.exchange import SkipExchange, exchanging
from hf_pipetransformer.pipe.skip.namespace import Key
from hf_pipetransformer.pipe.skip.skippable import Skippable


@dataclass(frozen=True)
class Inputs:
    """What a child gets: its arguments, and the skip tensors that it pops."""

    arguments: tuple[Any, ...]
    skips: dict[Key, Tensor | None]

    def renewed(self) -> Inputs:
        """Copies for one run, which may change them in place."""
        return Inputs(_map(self.arguments, torch.clone), _map(self.skips, torch.clone))


@dataclass(frozen=True)
class Child:
    """A copy of a child in training mode on the device it is measured on."""

    module: nn.Module
    inputs: Inputs

    def run(self, inputs: Inputs) -> tuple[Any, dict[Key, Tensor | None]]:
        """What its forward returns, and what it stashes for others."""
        with exchanging(SkipExchange(inputs.skips)) as exchange:
            return self.module(*inputs.arguments), exchange.left

    def forget_gradients(self) -> None:
        """Of an earlier run: adding to them would be measured too."""
        for tensor in (*self.module.parameters(), *_tensors((self.inputs.arguments, self.inputs.skips))):
            tensor.grad = None


def seconds_of_children(
    module: nn.Sequential, sample: Any, timeout: float, device: torch.device, unpack: bool | None
) -> list[float]:
    """Seconds of a forward and backward of each child, about `timeout` for all of them together."""
    share = timeout / len(module)
    with _random_state_kept(device):
        return [_seconds(child, share, device) for child in _children(module, sample, device, unpack)]


def bytes_of_children(
    module: nn.Sequential, sample: Any, param_scale: float, device: torch.device, unpack: bool | None
) -> list[float]:
    """Bytes that each child keeps: its output, what its backward needs, and `param_scale` times its parameters."""
    with _random_state_kept(device):
        children = _children(module, sample, device, unpack)
        return [_activation_bytes(child) + param_scale * _parameter_bytes(child.module) for child in children]


def _children(module: nn.Sequential, sample: Any, device: torch.device, unpack: bool | None) -> Iterator[Child]:
    """Each child with the values that reach it when the model is given `sample`."""

    def cut_off(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    value, skips = sample, dict[Key, Tensor | None]()
    for child in module:
        here = copy.deepcopy(child).to(device).train()
        value = _map(value, cut_off)
        several = isinstance(value, (tuple, list)) and (_takes(here, value) if unpack is None else unpack)
        popped = {key for inner in here.modules() if isinstance(inner, Skippable) for key in inner.poppable()}
        received = {key: skips.pop(key) for key in popped & skips.keys()}
        measured = Child(here, Inputs(tuple(value) if several else (value,), received))
        yield measured
        value, stashed = measured.run(measured.inputs.renewed())
        skips.update(_map(stashed, cut_off))


def _seconds(child: Child, share: float, device: torch.device) -> float:
    """The median of the runs in `share` seconds, two at least; the first is left out."""
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < share:
        child.forget_gradients()
        inputs = child.inputs.renewed()
        start = _now(device)
        outputs = child.run(inputs)
        roots = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        seconds.append(_now(device) - start)
    return median(seconds[1:])


def _activation_bytes(child: Child) -> int:
    """Bytes of what a forward leaves, each storage once: neither parameters, buffers nor inputs, which others made."""
    inputs = child.inputs.renewed()
    given = [(each.arguments, each.skips) for each in (child.inputs, inputs)]
    others = (*child.module.parameters(), *child.module.buffers(), *_tensors(given))
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    # The storages themselves: the address of one that is given back may be another's.
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = child.run(inputs)
    for tensor in _tensors(outputs):
        note(tensor)
        for leaf in _leaves(tensor):
            note(leaf)
    return sum(storage.nbytes() for storage in kept.values())


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors whose gradient the backward of `tensor` computes; its graph keeps them."""
    to_visit, seen = [tensor.grad_fn], set()
    while to_visit:
        node = to_visit.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        to_visit += [earlier for earlier, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def _takes(module: nn.Module, values: Sequence[Any]) -> bool:
    """Whether the forward can be called with so many arguments."""
    try:
        inspect.signature(module.forward).bind(*values)
    except TypeError:
        return False
    return True


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with the tensors inside replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        found = [_map(each, function) for each in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map(value, note)
    return found


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Gradients are computed inside, and random numbers drawn there leave no trace."""
    devices: Iterable[torch.device] = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        yield


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
