"""Splitter interface, and the generic splitters that cut between layers only."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_pipetransformer.splitters.adapters import bare_model, base_parameters


_CACHE_NAMES = {"cache", "past_key_values"}
(CACHE_NAME,) = _CACHE_NAMES.intersection(field.name for field in fields(BaseModelOutputWithPast))
"""What models call their KV cache: `past_key_values` up to transformers 5.23, then `cache`."""


class UnsupportedModelError(ValueError):
    """Error for a model that cannot be cut into pipeline stages; the message gives the reason."""


def config_value(model: nn.Module, name: str, default: Any = None) -> Any:
    return getattr(getattr(model, "config", None), name, default)


def is_causal_lm(model: nn.Module) -> bool:
    """Return True for a causal language model of transformers that takes text alone."""
    config = getattr(model, "config", None)
    is_of_text = isinstance(bare_model(model), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ()))
    return is_of_text and media_of(model) is None


def layers_of(splitter: Splitter, model: nn.Module) -> list[nn.Module]:
    """Return the layers that a splitter finds in a model.

    Raises:
        UnsupportedModelError: there are none, or the splitter refuses the model.
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


def maximal_frozen(model: nn.Module, without: nn.Module | None = None) -> dict[str, nn.Module]:
    """Return the modules that have parameters, none of them trained, and are in no larger such module, by their path.

    Lists of modules, which are never called, are none. Whether a parameter is trained tells its own `requires_grad`,
    never that of an activation. A module under several names has the first of them.

    Args:
        without: a module inside `model` that is left out, with all that it has inside.
    """
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        parameters = list(module.parameters())
        is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        is_apart = without is None or all(inside is not without for inside in module.modules())
        if parameters and is_called and is_apart and not any(parameter.requires_grad for parameter in parameters):
            if all(module is not other for other in found.values()):
                found[name] = module
        elif parameters and module is not without:
            for child, each in module.named_children():
                look(f"{name}.{child}" if name else child, each)

    look("", model)
    return {name: module for name, module in found.items() if name}


@dataclass(frozen=True)
class Media:
    """Images, videos or sounds that a model encodes and puts among the tokens of its language model.

    Args:
        module: innermost module that takes them beside tokens.
        names: what `forward` calls them: `pixel_values` and the like.
    """

    module: nn.Module
    names: frozenset[str]

    @property
    def decoder(self) -> nn.Module:
        """The language model inside."""
        found: nn.Module = self.module.get_decoder()  # type: ignore[operator]
        return found

    @property
    def frozen(self) -> dict[str, nn.Module]:
        """Encoders and projectors that nothing trains, by their path inside `module`."""
        return maximal_frozen(self.module, without=self.decoder)


_KINDS_OF_MEDIA = ("image", "video", "audio")


def media_of(model: nn.Module) -> Media | None:
    """Return the media that a model takes beside tokens; None if it takes none, or takes none encoded already.

    A family of transformers whose `forward` takes `mm_encoder_outputs` in place of pixels runs without either too.
    """
    modules = [module for module in bare_model(model).modules() if isinstance(module, PreTrainedModel)]
    found = [each for each in modules if "mm_encoder_outputs" in inspect.signature(type(each).forward).parameters]
    if not found or found[-1].get_decoder() is found[-1]:
        return None
    encoders = [getattr(type(found[-1]), f"get_{kind}_features", None) for kind in _KINDS_OF_MEDIA]
    # Each takes first what it encodes.
    return Media(found[-1], frozenset([*inspect.signature(each).parameters][1] for each in encoders if each))


class Splitter(ABC):
    """Rule that divides the models of a family into embeddings, sublayers and head.

    A splitter finds the layers and, if it can, runs half a layer. Everything else (modules before the first and after
    the last layer, the stages of each parameter) is traced on a real batch.
    """

    model_types: tuple[str, ...] = ()
    """Values of `config.model_type` that select this splitter; empty if it is only passed explicitly."""

    cuts_inside_layers: bool
    """True if a stage boundary may fall between the attention and the MLP of one layer."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the model's layers, bottom first.

        Raises:
            UnsupportedModelError: the model has no single stack of uniform layers.
        """

    def media(self, model: nn.Module) -> Media | None:
        """Return the media that the embeddings encode; None if the model takes none beside tokens."""
        return None

    @abstractmethod
    def mlp_parts(self, layer: nn.Module) -> Iterable[nn.Module | nn.Parameter]:
        """Return the children of `layer` in its MLP sublayer; the rest belongs to the attention sublayer."""

    @abstractmethod
    def run_attention(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the attention sublayer with its residual connection: `(batch, seq, hidden)` to the same shape."""

    @abstractmethod
    def run_mlp(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run the MLP sublayer with its residual connection: `(batch, seq, hidden)` to the same shape."""


def main_input_of(model: nn.Module) -> str:
    """Return `main_input_name`, the input that the embeddings read; without it `input_ids` or the first argument."""
    name: str | None = getattr(model, "main_input_name", None)
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    # A wrapper's forward may take *args and **kwargs only.
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    # A class of somebody's own around images inherits the name of a text's input.
    is_inherited = isinstance(model, PreTrainedModel) and bool(names) and name not in names
    if name is not None and not is_inherited:
        return name
    return names[0] if names and "input_ids" not in names else "input_ids"


class GenericSplitter(Splitter):
    """Splitter that cuts between layers: the model's only `ModuleList` of `num_hidden_layers` equal modules.

    If the config has no `num_hidden_layers`, those of nested configs count (`vision_config`, `text_config`).
    """

    cuts_inside_layers = False
    takes_kinds = False
    """True if layers of one class may have different weights."""

    def layers(self, model: Any) -> list[nn.Module]:
        name, expected = type(model).__name__, _numbers_of_layers(model)
        stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
        # A model may have other lists of that length, of unlike modules.
        of_length = [stack for stack in stacks if len(stack) in expected.values()]
        uniform = [stack for stack in of_length if not _unlike(stack, self.takes_kinds)]
        if len(uniform) > 1:
            # Embeddings may be in a ModuleList too (MarkupLM); unlike layers, they have no submodules.
            uniform = [stack for stack in uniform if any(True for _ in stack[0].children())]
        if len(uniform) == 1:
            return list(uniform[0])
        num_groups = config_value(model, "num_hidden_groups")
        if num_groups is not None:
            raise UnsupportedModelError(
                f"{name} runs the same layer weights several times (num_hidden_groups={num_groups}): shared layers "
                "can neither freeze one by one nor lie on different stages. Use transformers.Trainer for it."
            )
        wanted = " or ".join(f"{key}={number}" for key, number in expected.items()) or "config.num_hidden_layers=None"
        lacks_media = len(expected) > 1 and media_of(model) is None
        lacks = "; its forward takes no encoded media (mm_encoder_outputs) either" if lacks_media else ""
        raise UnsupportedModelError(
            f"{name} has no single stack of {wanted} uniform layers, found {_listed(stacks)}{lacks}. "
            "Only uniform stacks can be pipelined; pass `splitter=` with a Splitter of your own if it is one."
        )

    def mlp_parts(self, layer: nn.Module) -> Iterable[nn.Module | nn.Parameter]:
        return ()

    def run_attention(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the generic splitter never cuts inside a layer")

    def run_mlp(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the generic splitter never cuts inside a layer")


def _numbers_of_layers(model: nn.Module) -> dict[str, int]:
    """Map config entry to its number of layers: the config's own, else those of nested configs, else of modules."""
    config = getattr(model, "config", None)
    own = getattr(config, "num_hidden_layers", None)
    if isinstance(own, int):
        return {"config.num_hidden_layers": own}
    inner = {name: getattr(value, "num_hidden_layers", None) for name, value in vars(config).items()} if config else {}
    nested = {f"config.{name}.num_hidden_layers": found for name, found in inner.items() if isinstance(found, int)}
    if nested:
        return nested
    # A module of the user's own around models of transformers has no config itself.
    of_modules = {
        f"{name}.config.num_hidden_layers": config_value(module, "num_hidden_layers")
        for name, module in model.named_modules()
        if name and hasattr(module, "config")
    }
    return {name: found for name, found in of_modules.items() if isinstance(found, int)}


def _listed(stacks: Iterable[nn.ModuleList | nn.Sequential]) -> list[str]:
    return [f"{len(stack)} x {type(stack[0]).__name__}{_unlike(stack)}" for stack in stacks]


def shapes_of(layer: nn.Module) -> dict[str, Any]:
    """Return the class of a layer and the shapes of its weights, without adapters, which only some layers may have."""
    return {"class": type(layer).__name__, **{name: tuple(p.shape) for name, p in base_parameters(layer)}}


def _unlike(stack: nn.ModuleList | nn.Sequential, takes_kinds: bool = False) -> str:
    """Describe the first difference between the first layer of a stack and another; empty if there is none."""
    first = shapes_of(stack[0])
    for index, layer in enumerate(stack):
        other = shapes_of(layer)
        for key in ["class"] if takes_kinds else {**first, **other}:
            if first.get(key) != other.get(key):
                return f", layer {index} with {key} {other.get(key)} instead of {first.get(key)}"
    return ""


class MediaSplitter(GenericSplitter):
    """Splitter of a language model with encoders of images, videos or sounds, which belong to the embeddings.

    No layer moves or is stored in its runs, so that kinds of layers may alternate (Qwen3.5).
    """

    takes_kinds = True

    def media(self, model: nn.Module) -> Media | None:
        return media_of(model)

    def layers(self, model: Any) -> list[nn.Module]:
        media = media_of(model)
        assert media is not None, "the model was asked for its media before"
        return super().layers(media.decoder)


class StackSplitter(GenericSplitter):
    """Splitter for models without a config: takes the only outermost stack of two or more equal modules."""

    def layers(self, model: Any) -> list[nn.Module]:
        stacks = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
        uniform = [stack for stack in stacks if not _unlike(stack)]
        # The parts of a layer may be a stack of equal modules themselves, such as experts.
        inside = {id(part) for stack in uniform for layer in stack for part in layer.modules()}
        outermost = [stack for stack in uniform if id(stack) not in inside]
        if len(outermost) == 1:
            return list(outermost[0])
        raise UnsupportedModelError(
            f"{type(model).__name__} has no config.model_type: expected a Hugging Face `PreTrainedModel`, or a model "
            f"with one stack of uniform layers (nn.ModuleList or nn.Sequential), found {_listed(stacks)}. Pass "
            "`splitter=` to say how another model falls into layers."
        )
