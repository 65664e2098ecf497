"""What a splitter knows about a model family, and the generic splitter's base."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class UnsupportedModelError(ValueError):
    """The model cannot be cut into pipeline stages; the text says why."""


def config_value(model: nn.Module, name: str, default: Any = None) -> Any:
    """An entry of the model's config; the default where it has none, or no config at all."""
    return getattr(getattr(model, "config", None), name, default)


def layers_of(splitter: Splitter, model: nn.Module) -> list[nn.Module]:
    """The layers that a splitter finds in a model, at least one.

    Raises:
        UnsupportedModelError: there is none, or what the splitter says.
    """
    layers = splitter.layers(model)
    if not layers:
        count = config_value(model, "num_hidden_layers")
        found = f", found num_hidden_layers={count}" if count is not None else ""
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layers{found}: expected 1 or more to freeze or to cut between. Use "
            "transformers.Trainer for it."
        )
    return layers


class Splitter(ABC):
    """How a model falls into embeddings | sublayers | head.

    A family's splitter says where its layers are and, if it can run half a layer, how. Everything else (what runs
    before the first layer, what after the last, which parameters belong where) is traced on a real batch.
    """

    model_types: tuple[str, ...] = ()
    """The `config.model_type` of the families that it cuts; none for a splitter that is always passed by hand."""

    cuts_inside_layers: bool
    """True if a stage boundary may fall between the attention and the MLP of one layer."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The encoder layers, bottom first.

        Raises:
            UnsupportedModelError: the model has no single stack of uniform layers.
        """

    @abstractmethod
    def mlp_parts(self, layer: nn.Module) -> Iterable[nn.Module | nn.Parameter]:
        """The children of `layer`, modules or bare parameters, of its MLP sublayer; the rest is the attention's."""

    @abstractmethod
    def run_attention(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The attention sublayer alone, residual included: `(batch, seq, hidden)` to the same shape."""

    @abstractmethod
    def run_mlp(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The MLP sublayer alone, residual included: `(batch, seq, hidden)` to the same shape."""
