"""The model that a run starts with, beside the tiny batch that it is probed with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter, config_value
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.units import block_of


ProbeCompute = Callable[[dict[str, Any], int], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A whole model, a tiny batch, and how its loss is computed.

    Args:
        model: the whole model.
        splitter: how it falls into layers.
        inputs: the batch.
        compute: the loss of the whole model for some inputs, given the number of items to divide by.
        count: items of a batch that the model's mean runs over.
    """

    model: nn.Module
    splitter: Splitter
    inputs: dict[str, Any]
    compute: ProbeCompute
    count: Callable[[Any], int]

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Of some inputs, divided by the items of the whole batch."""
        return self.compute(inputs, self.count(self.inputs))

    @property
    def main_input(self) -> str:
        """Name of the input that the embeddings read."""
        return main_input_of(self.model)

    @property
    def pad_token_id(self) -> int:
        """What text is padded with."""
        return config_value(self.model, "pad_token_id") or 0


def main_input_of(model: nn.Module) -> str:
    """Name of the input that the embeddings read; of a model that does not say, `input_ids` or the first one."""
    name: str | None = getattr(model, "main_input_name", None)
    if name is not None:
        return name
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    # A wrapper hands on whatever it is given.
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return names[0] if names and "input_ids" not in names else "input_ids"


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random masks, or noise, in training: a module or the config holds a rate above 0."""
    config = getattr(model, "config", None)
    holders: list[Any] = [*model.modules(), *([config] if hasattr(config, "__dict__") else [])]
    rates = [value for holder in holders for name, value in vars(holder).items() if "drop" in name or "jitter" in name]
    rates += [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def trained_units(model: nn.Module, structure: Structure) -> set[int]:
    """The units that use a parameter with a gradient."""
    return {
        unit
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for unit in structure.units_of_parameter[name]
    }


def num_frozen_by_user(model: nn.Module, structure: Structure) -> int:
    """F at the start: leading layers that the script froze, the embeddings included."""
    first = min(trained_units(model, structure), default=structure.num_units - 1)
    return max(0, block_of(first) - 1)
