"""Weights of a saved model: one or several safetensors files, with an index, or the files of adapters."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

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
    # An index may name anything, and what it names is opened: files of this folder alone.
    return names if all(isinstance(name, str) and not os.path.dirname(name) for name in names) else []


def hash_of_weights(folder: str) -> str | None:
    """Hash names, shapes, dtypes and bytes of all tensors, regardless of sharding; None if there are none to read."""
    pairs = (pair for name in names_of_weights(folder) for pair in _tensors_of(folder, name))
    try:
        hashes = {key: digest_of(tensor) for key, tensor in pairs}
    # Not readable as safetensors: the hashes of the files alone tell of a change.
    except ValueError:
        return None
    return checksum_of(hashes) if hashes else None


def has_weights(folder: str) -> bool:
    """Return True if a folder has a saved model or adapters."""
    is_whole = any(os.path.isfile(os.path.join(folder, name)) for name in (WEIGHTS_FILE, INDEX_FILE))
    return is_whole or bool(adapter_files(folder))


def is_of_adapters(folder: str) -> bool:
    """Return True if a saved model is PEFT adapters alone, without the base model."""
    return weight_files(folder) == adapter_files(folder)


Places = dict[str, tuple[str, str]]
"""File and key of each parameter and persistent buffer of a model, by its name."""


def find_weights(model: nn.Module, folder: str) -> Places | None:
    """Find the tensors of a saved model that belong to `model`, from the files' headers alone: no tensor is read.

    transformers saves some models (ViT) under other names than their parameters have; its own rules map them. Tensors
    under the model's names, such as those of a head that the user replaced, come first. None for PEFT adapters, and if
    transformers makes the model's tensors of several saved ones, which the headers do not show to fit.

    Raises:
        ValueError: the files do not fit this model.
    """
    if is_of_adapters(folder):
        return None
    state = model.state_dict(keep_vars=True)
    renamed, direct, converts = _candidates(model, folder, state)
    places = renamed | direct
    missing = _not_loaded(state, places)
    if missing and converts:
        return None
    _check_complete(missing, model, folder)
    return places


def load_weights(model: nn.Module, folder: str, names: Collection[str] | None = None) -> None:
    """Load a saved model into `model` in place; with `names`, read only these parameters and buffers.

    The others may be meta tensors. For PEFT adapters, the base model is not saved and stays as it is.

    Raises:
        ValueError: the files do not fit this model.
    """
    if is_of_adapters(folder):
        with warnings.catch_warnings():
            # Nothing is loaded into the meta tensors of other stages.
            warnings.filterwarnings("ignore", message=".*to a meta parameter")
            load_adapters(model, folder, {name: dict(_tensors_of(folder, name)) for name in adapter_files(folder)})
        return
    named = chain(model.named_parameters(), model.named_buffers())
    # By identity: a tied weight has several names in the state, and one among the parameters.
    own = {id(tensor) for name, tensor in named if names is None or name in names}
    wanted = {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) in own}
    places = find_weights(model, folder)
    if places is None:
        loaded = {name: tensor for name, tensor in _converted(model, folder).items() if name in wanted}
    else:
        loaded = _read(folder, {name: place for name, place in places.items() if name in wanted})
    # Not strict, as other stages' entries are left out on purpose; `find_weights` has seen that none is missing.
    model.load_state_dict(loaded, strict=False)


def _candidates(model: nn.Module, folder: str, state: Mapping[str, Any]) -> tuple[Places, Places, bool]:
    """Return what is saved under transformers' names and under the model's, and True if tensors must be converted."""
    saved: dict[str, tuple[str, list[int]]] = {}
    for file in weight_files(folder):
        with _opened_weights(folder, file) as opened:
            saved |= {key: (file, opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    names = {key: key for key in saved}
    if isinstance(model, PreTrainedModel):
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix, known = model.base_model_prefix, dict(state)
        found = {key: rename_source_key(key, renamings, converters, prefix, known) for key in sorted(saved)}
        names = {key: name for key, (name, converter) in found.items() if converter is None or name not in state}

    def places(pairs: Iterable[tuple[str, str]]) -> Places:
        fitting = ((key, name) for key, name in pairs if name in state and saved[key][1] == list(state[name].shape))
        return {name: (saved[key][0], key) for key, name in fitting}

    return places(names.items()), places((key, key) for key in names), len(names) < len(saved)


def _read(folder: str, places: Places) -> dict[str, torch.Tensor]:
    name_of = {place: name for name, place in places.items()}
    keys = {file: {key for where, key in name_of if where == file} for file in sorted({file for file, _ in name_of})}
    return {name_of[file, key]: each for file in keys for key, each in _tensors_of(folder, file, keys[file])}


def _converted(model: Any, folder: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved model as `from_pretrained` makes them, all at once."""
    # from_pretrained initializes missing weights at random; keep the run's RNG state.
    with torch.random.fork_rng(devices=[]):
        fresh, found = type(model).from_pretrained(
            folder,
            # A copy, as from_pretrained writes into the config that it is given.
            config=copy.deepcopy(model.config),
            dtype=model.dtype,
            # A head of another shape, which the user replaced, is read below under the model's names.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    absent = {*found["missing_keys"], *(str(entry[0]) for entry in found["mismatched_keys"])}
    state = model.state_dict(keep_vars=True)
    loaded = {key: value for key, value in fresh.state_dict().items() if key not in absent}
    loaded |= _read(folder, _candidates(model, folder, state)[1])
    _check_complete(_not_loaded(state, loaded), model, folder)
    return loaded


def check_weights(folder: str) -> None:
    """Raise ValueError for a truncated or missing weight file, in a checkpoint without a manifest."""
    for name in weight_files(folder):
        with _opened_weights(folder, name):
            pass


def weight_files(folder: str) -> list[str]:
    # In the order in which from_pretrained looks: a whole file comes before an index.
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


def _tensors_of(folder: str, name: str, keys: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of a file, or those under `keys`; they are mapped, so reading them takes no memory."""
    with _opened_weights(folder, name) as file:
        for key in file.keys():  # noqa: SIM118
            if keys is None or key in keys:
                yield key, file.get_tensor(key)


def _not_loaded(state: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the entries of a model's state that `names` leave unset; one name of tied weights is enough."""
    filled = {id(value) for key, value in state.items() if key in names}
    return [key for key, value in state.items() if id(value) not in filled]


def _check_complete(missing: list[str], model: nn.Module, folder: str) -> None:
    if missing:
        raise ValueError(
            f"{folder!r} holds no weights for {missing[0]} (one of {len(missing)}) of {type(model).__name__}: "
            "expected a checkpoint of the same model."
        )
