"""Children of a Sequential on devices, as `Pipe` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hf_pipetransformer.pipe.stages import Expanding, check_module, normalised, split_by_balance


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
