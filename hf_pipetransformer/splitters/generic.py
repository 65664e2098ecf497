"""Every other uniform encoder: found by its shape, cut between layers only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.adapters import base_parameters
from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, config_value


class GenericSplitter(Splitter):
    """Cuts between layers. The stack is the one `ModuleList` of `num_hidden_layers` equal modules that have parts.

    Where the config does not say how many, those inside it do (`vision_config`, `text_config`).
    """

    cuts_inside_layers = False

    def layers(self, model: Any) -> list[nn.Module]:
        name = type(model).__name__
        expected = _numbers_of_layers(model)
        stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
        uniform = [stack for stack in stacks if len(stack) in expected.values() and _is_uniform(stack)]
        if len(uniform) > 1:
            # Embeddings of several columns lie in lists, too (MarkupLM).
            uniform = [stack for stack in uniform if any(True for _ in stack[0].children())]
        if len(uniform) == 1:
            return list(uniform[0])
        num_groups = config_value(model, "num_hidden_groups")
        if num_groups is not None:
            raise UnsupportedModelError(
                f"{name} runs the same layer weights several times (num_hidden_groups="
                f"{num_groups}); shared layers cannot be put on different stages. "
                "Use transformers.Trainer for it."
            )
        found = [f"{len(stack)} x {type(stack[0]).__name__}{_unlike(stack)}" for stack in stacks]
        raise UnsupportedModelError(
            f"{name} has no single stack of {_in_words(expected)} uniform layers, found {found}. "
            "Only uniform stacks can be pipelined; pass `splitter=` with a Splitter of your own if it is one."
        )

    def mlp_parts(self, layer: nn.Module) -> Iterable[nn.Module | nn.Parameter]:
        return ()

    def run_attention(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the generic splitter never cuts inside a layer")

    def run_mlp(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the generic splitter never cuts inside a layer")


def _numbers_of_layers(model: nn.Module) -> dict[str, int]:
    """Entry of the config to a number of layers that it says: its own, else those of the configs inside it."""
    config = getattr(model, "config", None)
    own = getattr(config, "num_hidden_layers", None)
    if isinstance(own, int):
        return {"config.num_hidden_layers": own}
    inner = {name: getattr(value, "num_hidden_layers", None) for name, value in vars(config).items()} if config else {}
    return {f"config.{name}.num_hidden_layers": found for name, found in inner.items() if isinstance(found, int)}


def _in_words(expected: dict[str, int]) -> str:
    return " or ".join(f"{name}={number}" for name, number in expected.items()) or "config.num_hidden_layers=None"


def _is_uniform(stack: nn.ModuleList | nn.Sequential) -> bool:
    return not _unlike(stack)


def _unlike(stack: nn.ModuleList | nn.Sequential) -> str:
    """What tells a layer of a stack from the first; nothing if they are alike."""

    def shapes(layer: nn.Module) -> dict[str, Any]:
        return {"class": type(layer).__name__, **{name: tuple(p.shape) for name, p in base_parameters(layer)}}

    first = shapes(stack[0])
    for index, layer in enumerate(stack):
        other = shapes(layer)
        for key in {**first, **other}:
            if first.get(key) != other.get(key):
                return f", layer {index} with {key} {other.get(key)} instead of {first.get(key)}"
    return ""


class StackSplitter(GenericSplitter):
    """Models without a config: the one stack of equal modules, two or more, that is not inside another such stack."""

    def layers(self, model: Any) -> list[nn.Module]:
        stacks = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
        uniform = [stack for stack in stacks if _is_uniform(stack)]
        inside = {id(part) for stack in uniform for layer in stack for part in layer.modules()}
        outermost = [stack for stack in uniform if id(stack) not in inside]
        if len(outermost) == 1:
            return list(outermost[0])
        found = [f"{len(stack)} x {type(stack[0]).__name__}{_unlike(stack)}" for stack in stacks]
        raise UnsupportedModelError(
            f"{type(model).__name__} has no config.model_type: expected a Hugging Face `PreTrainedModel`, or a model "
            f"with one stack of uniform layers (nn.ModuleList or nn.Sequential), found {found}. Pass `splitter=` to "
            "say how another model falls into layers."
        )
