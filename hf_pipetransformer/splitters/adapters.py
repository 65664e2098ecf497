"""Models with adapters of PEFT: the model inside, what of them cannot be put on stages, their files.

PEFT is imported where a model has adapters only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


FILE = "adapter_model.safetensors"

METHODS = ("LORA", "IA3", "VERA", "LOHA", "LOKR", "OFT", "HRA")
"""What PEFT calls the adapters that the tests have split."""

_NOT_TRIED = (
    *("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config"),
    *("layer_replication", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora"),
    "velora_config",
)
"""Options of LoRA that change more than single linear layers."""

_NOT_SETTINGS = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
"""Entries of an adapter's configuration that no activation hangs on; saving changes some."""

_PREFIX = "base_model.model."


def has_adapters(model: Any) -> bool:
    """Whether a model carries adapters, around it or added to it."""
    return bool(getattr(model, "peft_config", None))


def bare_model(model: Any) -> Any:
    """The model of transformers inside one of PEFT; the adapters are among its modules."""
    if not has_adapters(model):
        return model
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def why_unsplittable(model: Any) -> str | None:
    """Why the adapters of a model cannot be put on stages; None if they can, or if it has none."""
    if not has_adapters(model):
        return None
    if getattr(model, "is_quantized", False):
        return "PEFT adapters on a quantized model are not split: nobody has tried to move quantized weights"
    if not (isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model")):
        return f"a {type(model).__name__}, which mixes kinds of PEFT adapters, has not been tried on stages"
    inside = {id(parameter) for parameter in bare_model(model).parameters()}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
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


def settings(model: Any) -> dict[str, Any]:
    """All but the weights of the adapters that activations hang on, as JSON values in a fixed order."""
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
        key: sorted(value) if isinstance(value, set) else str(value)
        for key, value in sorted(config.items())
        if key not in _NOT_SETTINGS
    }


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module as they would be named and lie without adapters."""
    children = dict(module.named_children())
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
    """The files of adapters in a saved model: beside the others, and in a folder each for all but the first."""
    inner = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [FILE, *(os.path.join(name, FILE) for name in inner)]
    return [name for name in names if os.path.isfile(os.path.join(folder, name))]


def saved_names(model: Any) -> list[str] | None:
    """Names of the parameters that PEFT saves of a model with adapters; None if that is not known."""
    from peft import get_peft_model_state_dict

    if model.save_pretrained.__module__.partition(".")[0] not in ("peft", "transformers"):
        return None  # Code of a user's saves what it likes.
    state = model.state_dict(keep_vars=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says the same when it saves.
        of_adapters = [get_peft_model_state_dict(model, dict(state), name) for name in model.peft_config]
    saved = {id(value) for found in of_adapters for value in found.values()}
    if not saved <= {id(value) for value in state.values()}:
        return None  # It makes other tensors of them.
    return [name for name, parameter in model.named_parameters() if id(parameter) in saved]


def load_adapters(model: Any, folder: str, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Load saved adapters into those of a model, in place.

    Args:
        model: with adapters of the same kind.
        folder: for error texts.
        saved: the tensors of each of `adapter_files`.

    Raises:
        ValueError: they are those of other adapters, or lack something that the model trains.
    """
    if not has_adapters(model):
        raise ValueError(f"{folder!r} holds adapters, and {type(model).__name__} has none: add them as in the run.")
    from peft import set_peft_model_state_dict

    missing: set[str] | None = None
    is_wrapped = any(name.startswith(_PREFIX) for name, _ in model.named_parameters())
    for file, tensors in saved.items():
        name = _adapter_of(model, os.path.dirname(file))
        own = tensors if is_wrapped else {key.removeprefix(_PREFIX): value for key, value in tensors.items()}
        try:
            found: Any = set_peft_model_state_dict(model, dict(own), adapter_name=name)
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{folder!r} holds adapters that are not those of this model ({error}): make them as in the run that "
                "was saved."
            ) from error
        missing = set(found.missing_keys) & (set(found.missing_keys) if missing is None else missing)
    lost = [name for name, p in model.named_parameters() if p.requires_grad and name in (missing or ())]
    if lost:
        raise ValueError(
            f"{folder!r} holds no weights for {lost[0]} (one of {len(lost)}), which is trained: PEFT saves adapters "
            "and `modules_to_save` only. Name it there, and train anew."
        )


def _adapter_of(model: Any, folder: str) -> str:
    """The adapter that a folder inside a saved model is of; PEFT saves `default`, or the only one, beside the rest."""
    if folder:
        return folder
    if not hasattr(model, "get_base_model"):
        return str(model.active_adapters()[0])  # transformers saves the active one alone.
    names = list(model.peft_config)
    return "default" if "default" in names else names[0]
