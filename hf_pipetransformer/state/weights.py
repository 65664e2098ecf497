"""Weights of a saved model: one or several safetensors files, with an index, or the files of adapters."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hf_pipetransformer.comm.transfers import digest_of
from hf_pipetransformer.splitters.adapters import adapter_files, load_adapters
from hf_pipetransformer.state.run_state import checksum_of, read_json_file


WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OF_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def names_of_weights(folder: str) -> list[str]:
    """Name the files that `load_weights` reads; empty if that cannot be determined."""
    try:
        names = weight_files(folder) if has_weights(folder) else []
    except ValueError:
        return []
    return names if all(isinstance(name, str) and not os.path.dirname(name) for name in names) else []


def hash_of_weights(folder: str) -> str | None:
    """Hash names, shapes, dtypes and bytes of all tensors, regardless of sharding; None if there are none to read."""
    names, hashes = names_of_weights(folder), {}
    try:
        for key, tensor in (pair for name in names for pair in _tensors_of(folder, name)):
            hashes[key] = digest_of(tensor)
    except ValueError:
        return None
    return checksum_of(hashes) if hashes else None


def has_weights(folder: str) -> bool:
    """Return True if a folder has a saved model or adapters."""
    is_whole = any(os.path.isfile(os.path.join(folder, name)) for name in (WEIGHTS_FILE, INDEX_FILE))
    return is_whole or bool(adapter_files(folder))


def load_weights(model: nn.Module, folder: str) -> None:
    """Load a saved model into `model` in place.

    transformers saves some models (ViT) under other names than their parameters have, which only `from_pretrained` can
    map. Tensors under the model's own names, such as those of a head that the user replaced, are loaded directly. For
    PEFT adapters, the base model is not saved and stays as it is.

    Raises:
        ValueError: the files do not fit this model.
    """
    names = weight_files(folder)
    if names == adapter_files(folder):
        load_adapters(model, folder, {name: dict(_tensors_of(folder, name)) for name in names})
        return
    saved = {key: value for name in names for key, value in _tensors_of(folder, name)}
    expected = model.state_dict()
    own = {key: value for key, value in saved.items() if key in expected and value.shape == expected[key].shape}
    missing = _not_loaded(model, own)
    kind: Any = type(model)
    if missing and hasattr(kind, "from_pretrained"):
        config: Any = copy.deepcopy(model.config)
        # from_pretrained initializes missing weights at random; keep the run's RNG state.
        with torch.random.fork_rng(devices=[]):
            fresh, found = kind.from_pretrained(
                folder, config=config, dtype=model.dtype, ignore_mismatched_sizes=True, output_loading_info=True
            )
        absent = {*found["missing_keys"], *(str(entry[0]) for entry in found["mismatched_keys"])}
        own = {key: value for key, value in fresh.state_dict().items() if key not in absent} | own
        missing = _not_loaded(model, own)
    if missing:
        raise ValueError(
            f"{folder!r} holds no weights for {missing[0]} (one of {len(missing)}) of {kind.__name__}: "
            "expected a checkpoint of the same model."
        )
    model.load_state_dict(own, strict=False)


def check_weights(folder: str) -> None:
    """Raise ValueError for a truncated or missing weight file, in a checkpoint without a manifest."""
    for name in weight_files(folder):
        with _opened_weights(folder, name):
            pass


def weight_files(folder: str) -> list[str]:
    if os.path.isfile(os.path.join(folder, WEIGHTS_FILE)):
        return [WEIGHTS_FILE]
    if not os.path.isfile(os.path.join(folder, INDEX_FILE)) and adapter_files(folder):
        return adapter_files(folder)
    try:
        return sorted(set(read_json_file(os.path.join(folder, INDEX_FILE), folder)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder!r} is damaged: {INDEX_FILE} names no files of weights ({error!r}).") from error


def _opened_weights(folder: str, name: str) -> Any:
    try:
        return safe_open(os.path.join(folder, name), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder!r} is damaged: {name} cannot be read ({error}).") from error


def _tensors_of(folder: str, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    with _opened_weights(folder, name) as file:
        for key in file.keys():  # noqa: SIM118
            yield key, file.get_tensor(key)


def _not_loaded(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the parameters and persistent buffers that `tensors` leave unset; one name of tied weights is enough."""
    state = model.state_dict(keep_vars=True)
    filled = {id(value) for key, value in state.items() if key in tensors}
    return [key for key, value in state.items() if id(value) not in filled]
