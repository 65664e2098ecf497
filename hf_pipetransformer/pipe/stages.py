"""Stages: consecutive children of a Sequential on one device, and the checks that a module can be split."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.pipe.recomputation import Drawing


class Expanding(nn.Sequential):
    """Sequential that takes several arguments and passes a tuple to the next module as several."""

    def forward(self, *values: Any) -> Any:
        value: Any = values
        for module in self:
            value = module(*value) if isinstance(value, (tuple, list)) else module(value)
        return value


class WithDevice(nn.Module):
    """Module with an explicit device, for modules without parameters; building a `Pipe` moves it there."""

    def __init__(self, module: nn.Module, device: torch.device | str | int) -> None:
        super().__init__()
        self.module = module
        self.device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Stage:
    """Consecutive children of the Sequential, their device, and the generators that they draw from."""

    def __init__(self, module: nn.Sequential, device: torch.device) -> None:
        self.module, self.device, self.drawing = module, device, Drawing(device)


def check_module(module: Any) -> None:
    """Refuse a pipeline's module that is not an `nn.Sequential`, or in which a child appears twice."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"The module must be nn.Sequential to be partitioned, found {type(module).__name__}.")
    first: dict[nn.Module, str] = {}
    # named_children() leaves out the second place of a module, which is what is looked for.
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name and first.setdefault(child, name) != name:
            raise ValueError(
                f"A module with duplicate children is not supported: {name!r} is {first[child]!r} again. Make a copy "
                "of it, or write a module that calls it twice."
            )


def normalised(device: torch.device) -> torch.device:
    """Return the device with its index: `cuda` means the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_of(name: str, module: nn.Module) -> torch.device:
    """Return the device of a child's parameters and buffers (CPU if none); raise a ValueError if there are several."""
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"Module {name!r} should have all parameters on a single device, please use .to() to place the module on "
            f"a single device. Found {', '.join(sorted(map(str, devices)))}."
        )
    return normalised(devices.pop()) if devices else torch.device("cpu")


def split_by_device(module: nn.Sequential) -> list[Stage]:
    """Split a Sequential by the devices of its children.

    Consecutive children on one GPU form a stage. On the CPU each child is a stage, to try a pipeline without GPUs.
    """
    groups: list[tuple[OrderedDict[str, nn.Module], torch.device]] = []
    for name, child in module.named_children():
        device = normalised(child.device) if isinstance(child, WithDevice) else device_of(name, child)
        if not groups or groups[-1][1] != device or device.type == "cpu":
            groups.append((OrderedDict(), device))
        groups[-1][0][name] = child.module if isinstance(child, WithDevice) else child
    # Move modules only after all checks: a refused model stays where it is.
    check_shared(groups)
    for child in module.children():
        if isinstance(child, WithDevice):
            child.module.to(child.device)
    return [Stage(Expanding(children), device) for children, device in groups]


def check_shared(groups: Sequence[tuple[Mapping[str, nn.Module], torch.device]]) -> None:
    """Raise a ValueError if children on different devices share a parameter."""
    places: dict[nn.Parameter, tuple[str, torch.device]] = {}
    for children, device in groups:
        for name, child in children.items():
            for parameter in child.parameters():
                first, place = places.setdefault(parameter, (name, device))
                if place != device:
                    raise ValueError(
                        "A module with duplicate parameters in distinct children is not supported: one belongs to "
                        f"{first!r} on {place} and to {name!r} on {device}. Put both into one stage, or make a "
                        "copy of it."
                    )


def split_by_balance(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> list[Stage]:
    """Split a Sequential into stages of `balance[k]` children, moved to `devices[k]`; a tuple stays one argument."""
    children = list(module.named_children())
    if len(children) != sum(balance):
        raise ValueError(
            f"The balance must sum up to the module's {len(children)} children, found {list(balance)}. "
            "hf_pipetransformer.pipe.balance_by_time finds one."
        )
    if any(length < 1 for length in balance):
        raise ValueError(
            f"Each stage must have one child or more, found the balance {list(balance)}. Leave out stages of none."
        )
    if len(devices) < len(balance):
        raise IndexError(
            f"Too few devices for {len(balance)} stages: found {', '.join(map(str, devices)) or 'none'}. Pass one a "
            "stage in `devices`, or a shorter balance."
        )
    # More devices than stages are allowed: zip leaves the last ones idle.
    rest = iter(children)
    groups = [(OrderedDict(islice(rest, length)), device) for length, device in zip(balance, devices, strict=False)]
    check_shared(groups)
    return [Stage(nn.Sequential(part).to(device), device) for part, device in groups]
