"""Balance the children of a Sequential over stages by measured time or memory."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values, scatter
from hf_pipetransformer.pipe.skip import Key, SkipExchange, Skippable, exchanging
from hf_pipetransformer.pipe.stages import Expanding, check_module, normalised, split_by_balance
from hf_pipetransformer.planning.partition import partition


Device = torch.device | str | int


@dataclass(frozen=True)
class Child:
    """Copy of a child on the device where it is measured, its arguments, and the skip tensors that it pops."""

    module: nn.Module
    device: torch.device
    arguments: tuple[Any, ...]
    skips: dict[Key, Tensor | None]

    def copied_inputs(self) -> tuple[tuple[Any, ...], dict[Key, Tensor | None]]:
        """Return copies of arguments and skip tensors: a run may change its inputs in place."""
        arguments, skips = tree_map_only(Tensor, torch.clone, (self.arguments, self.skips))
        return arguments, skips

    def run(self, arguments: tuple[Any, ...], skips: dict[Key, Tensor | None]) -> tuple[Any, dict[Key, Tensor | None]]:
        """Run the forward; return its output and the skip tensors stashed for later children."""
        with exchanging(SkipExchange(skips)) as exchange:
            return self.module(*arguments), exchange.left

    def now(self) -> float:
        """Return the time in seconds when all work of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def _measured(
    measure: Callable[[Child], float],
    module: nn.Sequential,
    sample: Any,
    device: Device | None,
    unpack: bool | None,
) -> list[float]:
    """Measure copies of the children, in training mode, each with what reaches it when the model runs on `sample`.

    Gradients are enabled; the RNG state is restored.
    """
    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))

    # Every child starts a new graph: its backward must not run into the children before it.
    def cut_off(tensor: Tensor) -> Tensor:
        return tensor.detach().to(place).requires_grad_(tensor.requires_grad)

    value, skips, found = sample, dict[Key, Tensor | None](), []
    with torch.random.fork_rng([place] if place.type == "cuda" else []), torch.enable_grad():
        for child in module:
            here = copy.deepcopy(child).to(place).train()
            value = tree_map_only(Tensor, cut_off, value)
            several = isinstance(value, (tuple, list)) and (_takes(here, value) if unpack is None else unpack)
            popped = {key for inner in here.modules() if isinstance(inner, Skippable) for key in inner.poppable()}
            received = {key: skips.pop(key) for key in popped & skips.keys()}
            alone = Child(here, place, tuple(value) if several else (value,), received)
            found.append(measure(alone))
            # One more run after the measured ones: the next child gets outputs of unchanged inputs.
            value, stashed = alone.run(*alone.copied_inputs())
            skips.update(tree_map_only(Tensor, cut_off, stashed))
    return found


def _seconds(share: float, child: Child) -> float:
    """Return the median time of the runs in `share` seconds, at least two; the first one is a warm-up."""
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < share:
        for tensor in (*child.module.parameters(), *_tensors((child.arguments, child.skips))):
            tensor.grad = None  # Accumulating into that of the previous run would be timed too.
        inputs = child.copied_inputs()
        start = child.now()
        outputs = child.run(*inputs)
        roots = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        seconds.append(child.now() - start)
    return median(seconds[1:])


def _activation_bytes(child: Child) -> int:
    """Count each storage that a forward leaves behind once, without parameters, buffers and inputs."""
    inputs = child.copied_inputs()
    given = _tensors((child.arguments, child.skips, inputs))
    # Weights are counted by `param_scale`, and inputs are the output of the child before.
    others = (*child.module.parameters(), *child.module.buffers(), *given)
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    # Keep the storages alive: the address of a freed one may be reused, and the two would count as one.
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = child.run(*inputs)
    for tensor in _tensors(outputs):
        note(tensor)
        for leaf in _leaves(tensor):
            note(leaf)
    return sum(storage.nbytes() for storage in kept.values())


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves whose gradient the backward of `tensor` computes; the graph keeps them alive."""
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
    """Return True if the module's forward accepts `values` as positional arguments."""
    try:
        inspect.signature(module.forward).bind(*values)
    except TypeError:
        return False
    return True


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Tensor | tuple[Any, ...],
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    unpack: bool | None = None,
) -> list[int]:
    """Split a model into stages such that the slowest stage is as fast as possible.

    Times the forward and backward of each child in training mode. Runs on copies: the model and the RNG state do not
    change.

    Args:
        sample: input of the model, one micro-batch in size.
        timeout: seconds of measurement for all children together; each child runs at least twice.
        device: where to measure; by default the first GPU, or the CPU without GPUs.
        unpack: True passes a tuple (the sample or a child's result) to the next child as several arguments, as `Pipe`
            does; False as one argument, as `GPipe` does. None unpacks it where the child's forward accepts that many.

    Returns:
        Number of children of each stage.

    Raises:
        TypeError: `module` is not an `nn.Sequential`.
        ValueError: invalid `partitions` or `timeout`, or a parameter already has a gradient.
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
    # The sample is one micro-batch already: this only unwraps NoChunk.
    measure = partial(_seconds, timeout / len(module))
    return _cut(partitions, _measured(measure, module, _first_micro_batch(sample, 1), device, unpack))


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
    """Split a model into stages such that the largest stage needs as little memory as possible.

    The memory of a child is its output for one micro-batch, the tensors that autograd saves for its backward, and its
    parameters times `param_scale`. Tensor sizes are added up, on CPU and GPU alike; allocator overhead is not seen.

    Args:
        input: input of the model, a whole mini-batch.
        chunks: micro-batches of a mini-batch; the first one is measured.
        param_scale: memory of parameters, gradients and optimizer state in multiples of the parameters: 2 to 3 for
            SGD, 4 to 5 for Adam.
        device: where to measure, as in `balance_by_time`, and `unpack`.

    Returns:
        Number of children of each stage.

    Raises:
        TypeError: `module` is not an `nn.Sequential`.
        ValueError: invalid `partitions`, `chunks` or `param_scale`.
    """
    _check(partitions, module)
    if chunks < 1:
        raise ValueError(f"Found chunks={chunks}: expected at least one micro-batch.")
    if not 0 <= param_scale < math.inf:
        raise ValueError(f"Found param_scale={param_scale}: expected a number, 0 or more.")
    first = _first_micro_batch(input, chunks)
    return _cut(partitions, bytes_of_children(module, first, param_scale, device, unpack))


def bytes_of_children(
    module: nn.Sequential, sample: Any, param_scale: float, device: Device | None = None, unpack: bool | None = None
) -> list[float]:
    """Measure the bytes of each child: output, tensors saved for backward, `param_scale` times its parameters."""

    def measure(child: Child) -> float:
        return _activation_bytes(child) + param_scale * sum(each.nbytes for each in child.module.parameters())

    return _measured(measure, module, sample, device, unpack)


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


def _first_micro_batch(sample: Any, chunks: int) -> Any:
    """Return the first of the `chunks` micro-batches that a pipeline cuts the model's input into."""
    batch = MicroBatch.of(sample)
    check_values(batch.values, "The input")
    return MicroBatch(scatter(batch.values, chunks)[0], batch.is_single).value


def _cut(partitions: int, costs: Sequence[float]) -> list[int]:
    return [end - start for start, end in pairwise(partition(costs, partitions))]


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[Device] | None = None
) -> nn.Sequential:
    """Move the children of a Sequential to the devices of their stages and group them by stage.

    Args:
        balance: number of children of each stage, from `balance_by_time` or `balance_by_size`.
        devices: one per stage; by default the GPUs, or the CPU for all stages if there are fewer GPUs than stages.

    Returns:
        A Sequential of Sequentials with names `stage.child`, both counted from 0. It passes a tuple to the next child
        as several arguments, as `Pipe` does.

    Raises:
        TypeError: `module` is not an `nn.Sequential`.
        ValueError: `balance` does not fit, a child appears twice, or stages on different devices share a parameter.
        IndexError: fewer devices than stages.
    """
    check_module(module)
    if devices is None:
        enough = torch.cuda.device_count() >= len(balance)
        devices = range(torch.cuda.device_count()) if enough else ["cpu"] * len(balance)
    stages = split_by_balance(module, balance, [normalised(torch.device(device)) for device in devices])
    return Expanding(*(Expanding(*stage.module) for stage in stages))
