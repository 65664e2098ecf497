"""How many children of a Sequential each stage takes, by what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hf_pipetransformer.autopipe.partition import partition
from hf_pipetransformer.pipe.child_costs import bytes_of_children, seconds_of_children
from hf_pipetransformer.pipe.micro_batches import NoChunk


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
