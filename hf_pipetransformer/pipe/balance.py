"""Balancing the children of a Sequential over devices by measured time or size."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hf_pipetransformer.pipe.micro_batches import NoChunk
from hf_pipetransformer.pipe.skips import Key, SkipExchange, Skippable, exchanging
from hf_pipetransformer.pipe.stages import Expanding, check_module, normalised, split_by_balance
from hf_pipetransformer.planning.partition import partition


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


Device = torch.device | str | int


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Any, ...],
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    unpack: bool | None = None,
) -> list[int]:
    """Cut a model so that the slowest stage is as fast as possible.

    Each child's forward and backward is timed in training mode, on a copy: the model, its gradients and the random
    state stay as they are.

    Args:
        partitions: number of stages.
        module: its children are what is counted.
        sample: what the model is called with, of the size of a micro-batch.
        timeout: seconds to measure for, all children together; each runs at least twice.
        device: where to measure; the first GPU, or the CPU where there is none.
        unpack: whether a tuple, the sample as well as a child's result, is given to the next child as several
            arguments, as `Pipe` does, or as one, as `GPipe` does. None: as several to a child whose forward can be
            called with so many.

    Returns:
        Numbers of children, one for each stage.

    Raises:
        TypeError: `module` is no Sequential.
        ValueError: fewer children than stages, no stage, a `timeout` that is no such number, or a parameter that has a
            gradient.
    """
    _check(partitions, module)
    if not 0 <= timeout < math.inf:
        raise ValueError(f"Found timeout={timeout}: expected a number of seconds, 0 or more.")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                f"some parameter already has gradient: {name!r}. Measuring starts without: call "
                "module.zero_grad(set_to_none=True) before."
            )
    sample = _first_micro_batch(sample, 1)
    return _cut(partitions, seconds_of_children(module, sample, timeout, _place(device), unpack))


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | tuple[Any, ...],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    unpack: bool | None = None,
) -> list[int]:
    """Cut a model so that the stage that needs most memory needs as little as possible.

    A child counts for what its forward keeps for its backward of one micro-batch, for its output, and for its
    parameters. Tensors are counted as autograd saves them, on any device alike; what an allocator adds is not seen.

    Args:
        partitions: number of stages.
        module: its children are what is counted.
        input: what the model is called with, a whole mini-batch.
        chunks: micro-batches of it; the first is measured.
        param_scale: how many times the memory of its parameters a child needs, with gradients and the state of the
            optimizer: 2 to 3 for SGD, 4 to 5 for Adam.
        device: where to measure; the first GPU, or the CPU where there is none.
        unpack: as of `balance_by_time`.

    Returns:
        Numbers of children, one for each stage.

    Raises:
        TypeError: `module` is no Sequential.
        ValueError: fewer children than stages, no stage, no micro-batch, or a `param_scale` that is no such number.
    """
    _check(partitions, module)
    if chunks < 1:
        raise ValueError(f"Found chunks={chunks}: expected at least one micro-batch.")
    if not 0 <= param_scale < math.inf:
        raise ValueError(f"Found param_scale={param_scale}: expected a number, 0 or more.")
    sample = _first_micro_batch(input, chunks)
    return _cut(partitions, bytes_of_children(module, sample, param_scale, _place(device), unpack))


def _check(partitions: int, module: nn.Sequential) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"Found a {type(module).__name__}: expected an nn.Sequential, whose children are counted.")
    if not len(module):
        raise ValueError(f"The nn.Sequential has no children to cut into {partitions} partitions: expected 1 or more.")
    if not 1 <= partitions <= len(module):
        raise ValueError(
            f"Cannot cut {len(module)} children into {partitions} partitions: expected 1 to {len(module)}. A stage "
            "has at least one child; take fewer stages, or write the module as more children."
        )


def _first_micro_batch(value: Any, chunks: int) -> Any:
    """What the first stage gets first, of a mini-batch in `chunks` micro-batches."""
    if isinstance(value, tuple):
        return tuple(_first_micro_batch(each, chunks) for each in value)
    if isinstance(value, NoChunk):
        return value.tensor
    return value.chunk(chunks)[0] if isinstance(value, Tensor) and value.dim() else value


def _cut(partitions: int, costs: Sequence[float]) -> list[int]:
    return [end - start for start, end in pairwise(partition(costs, partitions))]


def _place(device: Device | None) -> torch.device:
    if device is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(device)


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device | str | int] | None = None
) -> nn.Sequential:
    """Put the children on devices, those of a stage into one Sequential.

    Args:
        module: its children are moved.
        balance: how many of them each stage takes; `balance_by_time` and `balance_by_size` find it.
        devices: of the stages; the GPUs, or the CPU for all where there are fewer GPUs than stages.

    Returns:
        A Sequential of Sequentials, whose names are `stage.child`, both counted from 0. A tuple that a child returns
        is handed on as several arguments, as in `Pipe`.

    Raises:
        TypeError: `module` is no Sequential.
        ValueError: numbers that are below 1 or do not sum up to the number of children, a child that appears twice,
            or a parameter that belongs to stages on several devices.
        IndexError: fewer devices than stages.
    """
    check_module(module)
    if devices is None:
        enough = torch.cuda.device_count() >= len(balance)
        devices = range(torch.cuda.device_count()) if enough else ["cpu"] * len(balance)
    stages = split_by_balance(module, balance, [normalised(torch.device(device)) for device in devices])
    return Expanding(*(Expanding(*stage.module) for stage in stages))
