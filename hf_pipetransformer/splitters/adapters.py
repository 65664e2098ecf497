"""Support for PEFT adapters: unwrapping, checks for adapters that cannot be split, adapter files.

PEFT is imported only if a model has adapters.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_pipetransformer.splitters.quantized import why_not_moved


FILE = "adapter_model.safetensors"

METHODS = ("LORA", "IA3", "VERA", "LOHA", "LOKR", "OFT", "HRA")
"""PEFT types that the tests cover."""

_NOT_TRIED = (
    *("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config"),
    *("layer_replication", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora"),
    "velora_config",
)
"""LoRA options that affect more than single linear layers, and are not tested."""

_NOT_SETTINGS = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
"""Entries of an adapter's configuration that do not affect activations; saving changes some of them."""

_PREFIX = "base_model.model."


def has_adapters(model: Any) -> bool:
    """Return True if a model has PEFT adapters, wrapped around it or added to it."""
    return bool(getattr(model, "peft_config", None))


def bare_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT model; adapter modules remain part of it."""
    if not has_adapters(model):
        return model
    unwrap = getattr(model, "get_base_model", None)
    # Adapters added with `add_adapter` are inside the transformers model, which nothing wraps.
    return model if unwrap is None else unwrap()


def entries_taken(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that a model's forward takes; a loss may read others."""
    taken = inspect.signature(bare_model(model).forward).parameters
    takes_all = any(taken[name].kind is inspect.Parameter.VAR_KEYWORD for name in taken)
    return {name: value for name, value in inputs.items() if name in taken or takes_all}


def why_unsplittable(model: Any) -> str | None:
    """Return why a model's adapters cannot be split into stages; None if they can, or if it has none."""
    if not has_adapters(model):
        return None
    if (reason := why_not_moved(model)) is not None:
        return reason
    if not (isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model")):
        return f"a {type(model).__name__}, which mixes kinds of PEFT adapters, has not been tried on stages"
    inside = {id(parameter) for parameter in bare_model(model).parameters()}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # PEFT's wrapper may train tensors of its own, such as the embeddings of prompt tuning.
    outside = [name for name, parameter in trained if id(parameter) not in inside]
    for config in model.peft_config.values():
        method = str(getattr(getattr(config, "peft_type", None), "value", None))
        if outside or getattr(config, "is_prompt_learning", False):
            what = outside[0] if outside else "what they train"
            return f"{what} of the PEFT adapters ({method}) lies outside of the layers, so that no stage would own it"
        options = [name for name in _NOT_TRIED if getattr(config, name, None)]
        if method not in METHODS or options:
            named = method + (f" with {options[0]}" if options else "")
            return f"PEFT adapters of the kind {named} have not been tried on stages; {', '.join(METHODS)} have"
    return None


def adapted_tower(model: Any) -> tuple[str, str] | None:
    """Find an encoder of images or sound that nothing but adapters train.

    Returns:
        Its path in the transformers model, and `target_modules` that match the same layers but for those of the
        encoder; None if there is no such encoder.
    """
    inside = bare_model(model)
    if not has_adapters(model) or not isinstance(inside, PreTrainedModel):
        return None
    adapted = [module for module in inside.modules() if hasattr(module, "adapter_layer_names")]
    of_adapters = {
        id(parameter)
        for module in adapted
        for name in module.adapter_layer_names
        if isinstance(each := getattr(module, name, None), nn.Module)
        for parameter in each.parameters()
    }
    for modality in ("image", "audio"):
        tower = inside.get_encoder(modality=modality)
        # Without such an encoder transformers gives the model itself, or None (Gemma 4).
        parameters = [] if tower is inside or tower is None else tower.parameters()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained or any(id(parameter) not in of_adapters for parameter in trained):
            continue
        name = next(name for name, module in inside.named_modules() if module is tower)
        targets = next(iter(model.peft_config.values())).target_modules
        if not targets:
            return None
        # As PEFT matches a list of names: by the end of a module's path.
        matched = targets if isinstance(targets, str) else rf".*\.({'|'.join(map(re.escape, sorted(targets)))})"
        # PEFT matches a pattern with the whole path, so that a look ahead at its begin leaves out the tower.
        return name, rf"(?!{re.escape(name)}\.)({matched})"
    return None


def settings(model: Any) -> dict[str, Any]:
    """Return everything except weights in the adapters that activations depend on, as JSON values in a fixed order."""
    configs = getattr(model, "peft_config", None) or {}
    layers = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    return {
        "configs": {name: _plain(config.to_dict()) for name, config in configs.items()},
        "layers": [
            str((m.active_adapters, m.merged_adapters, m.disable_adapters, getattr(m, "scaling", None)))
            for m in layers
        ],
    }


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        # A set has another order in each process, and the text must not change.
        key: sorted(value) if isinstance(value, set) else str(value)
        for key, value in sorted(config.items())
        if key not in _NOT_SETTINGS
    }


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module under the names, and in the order, that they would have without adapters."""
    children = dict(module.named_children())
    # PEFT's names for the module inside an adapter layer, and inside a copy for `modules_to_save`.
    for original in ("base_layer", "original_module"):
        if original in children:
            yield from base_parameters(children[original])
            return
    yield from module.named_parameters(recurse=False)
    for name, child in children.items():
        for inner_name, own in base_parameters(child):
            yield f"{name}.{inner_name}", own


# ---- files ----


def adapter_files(folder: str) -> list[str]:
    """Return the adapter files of a saved model: the first adapter's at the top, others in a folder each."""
    inner = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [FILE, *(os.path.join(name, FILE) for name in inner)]
    return [name for name in names if os.path.isfile(os.path.join(folder, name))]


def saved_names(model: Any) -> list[str] | None:
    """Return the names of the parameters that PEFT saves for a model with adapters; None if unknown."""
    from peft import get_peft_model_state_dict

    if model.save_pretrained.__module__.partition(".")[0] not in ("peft", "transformers"):
        return None  # A user's own `save_pretrained` may save anything.
    # The parameters themselves rather than detached tensors, to know them again by identity.
    state = model.state_dict(keep_vars=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT repeats its warnings when it saves.
        of_adapters = [get_peft_model_state_dict(model, dict(state), name) for name in model.peft_config]
    saved = {id(value) for found in of_adapters for value in found.values()}
    if not saved <= {id(value) for value in state.values()}:
        return None  # PEFT saves tensors derived from the parameters.
    return [name for name, parameter in model.named_parameters() if id(parameter) in saved]


def load_adapters(model: Any, folder: str, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Load saved adapters into a model with the same adapters, in place.

    Args:
        saved: the tensors of each of `adapter_files`, by file name.

    Raises:
        ValueError: the files belong to other adapters, or lack a parameter that the model trains.
    """
    if not has_adapters(model):
        raise ValueError(f"{folder!r} holds adapters, and {type(model).__name__} has none: add them as in the run.")
    from peft import set_peft_model_state_dict

    missing: set[str] | None = None
    is_wrapped = any(name.startswith(_PREFIX) for name, _ in model.named_parameters())
    for file, tensors in saved.items():
        name = _adapter_of(model, os.path.dirname(file))
        # A model that nothing wraps has not the prefix of PEFT's wrapper in its names.
        own = tensors if is_wrapped else {key.removeprefix(_PREFIX): value for key, value in tensors.items()}
        try:
            found: Any = set_peft_model_state_dict(model, dict(own), adapter_name=name)
        # KeyError for an adapter of another name, RuntimeError for weights of other shapes.
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{folder!r} holds adapters that are not those of this model ({error}): make them as in the run that "
                "was saved."
            ) from error
        # Missing from all files: each of them has the weights of one adapter.
        missing = set(found.missing_keys) & (set(found.missing_keys) if missing is None else missing)
    lost = [name for name, p in model.named_parameters() if p.requires_grad and name in (missing or ())]
    if lost:
        raise ValueError(
            f"{folder!r} holds no weights for {lost[0]} (one of {len(lost)}), which is trained: PEFT saves adapters "
            "and `modules_to_save` only. Name it there, and train anew."
        )


def _adapter_of(model: Any, folder: str) -> str:
    """Return the adapter's name for a folder of a saved model: PEFT puts `default`, or else the first, at the top."""
    if folder:
        return folder
    if not hasattr(model, "get_base_model"):
        return str(model.active_adapters()[0])  # transformers saves the active adapter only.
    names = list(model.peft_config)
    return "default" if "default" in names else names[0]
