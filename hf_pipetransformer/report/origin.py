"""Origin and outcome of a training, for its events: model, data, options, revision, machine, versions; best value."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from transformers import TrainingArguments


SECRETS = ("token", "password", "secret", "api_key")
"""Parts of the names of options whose values are never written."""

_PACKAGES = ("transformers", "torch", "accelerate", "datasets", "peft", "trl")
_NOT_OF_A_TRAINING = (
    *("disable_tqdm", "report_to", "run_name", "use_cpu", "accelerator_config", "dataloader_pin_memory", "debug"),
    *("do_eval", "project", "trackio_space_id", "local_rank", "ddp_backend", "log_level", "log_level_replica"),
    *("resume_from_checkpoint", "restore_callback_states_from_checkpoint", "enable_jit_checkpoint"),
)
"""Options that tell of the machine and of what is written, not of what is trained."""
_LONGEST_VALUE = 200


def origin_of(trainer: Any) -> dict[str, Any]:
    """Return as JSON values what a training starts from: model, data, options, revision of the code, machine."""
    # A model of the user's own need not have one.
    config = getattr(trainer.model, "config", None)
    name = getattr(config, "name_or_path", None)
    return {
        "model": {"name": relative(str(name)) if name else None, "class": type(trainer.model).__name__},
        "data": {
            "name": _name_of(trainer.train_dataset),
            "train_samples": length_of(trainer.train_dataset),
            "eval_samples": length_of(trainer.eval_dataset),
        },
        "options": changed_options(trainer.args),
        "commit": _revision(),
        "machine": _machine(trainer.args),
        "versions": versions(),
    }


def outcome_of(trainer: Any, results: dict[str, Any]) -> dict[str, Any]:
    """Return as JSON values what came out of a training: the best value of its metric, and the seconds saved.

    Args:
        results: of the time per layout, see `Summary.as_results`.
    """
    state, args = trainer.state, trainer.args
    best = None
    if state.best_metric is not None and args.metric_for_best_model is not None:
        name = args.metric_for_best_model
        best = {
            "name": name if name.startswith("eval_") else f"eval_{name}",
            "value": float(state.best_metric),
            "step": state.best_global_step,
            "is_loaded": bool(args.load_best_model_at_end and state.best_model_checkpoint),
        }
    return {"best": best, **{name: results.get(name) for name in ("step_seconds", "saved_seconds")}}


def changed_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options of a training that differ from their defaults, without folders and secrets."""
    found = {}
    for each in fields(args):
        if not each.init or each.name in _NOT_OF_A_TRAINING or each.name.endswith(("_dir", "_plan")):
            continue
        # Where a model is uploaded to, and with what, is not what was trained.
        if each.name.startswith("hub_") or _is_secret(each.name):
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        value = getattr(args, each.name, default)
        # Trainer itself sets some that are None by default: to False, or to what it has found.
        if default is MISSING or plain(value) == plain(default) or (default is None and not value):
            continue
        found[each.name] = _shown(value)
    return found


def plain(value: Any) -> Any:
    """Return an option as a JSON value."""
    # Trainer turns options with fixed choices, such as `optim`, into members of an enum.
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _shown(value: Any) -> Any:
    """Return an option without secrets and folders outside of the working directory; of a long text its begin."""
    inside = _without_secrets(value)
    return _short(json.dumps(inside) if isinstance(inside, (dict, list)) else inside)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        named = {str(name): each for name, each in value.items()}
        return {name: _without_secrets(each) for name, each in named.items() if not _is_secret(name)}
    if isinstance(value, (list, tuple, set)):
        return [_without_secrets(each) for each in value]
    # Of other objects the text may name anything.
    text = plain(value)
    names_one = isinstance(text, str) and not isinstance(value, str) and _is_secret(text)
    return type(value).__name__ if names_one else _short(text)


def _is_secret(name: str) -> bool:
    return any(secret in name.lower() for secret in SECRETS)


def _short(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = relative(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def length_of(dataset: Any) -> int | None:
    """Return the number of samples; None if the set, or one of several to evaluate on, does not know."""
    if isinstance(dataset, dict):
        counts = [length_of(each) for each in dataset.values()]
        return None if None in counts else sum(count or 0 for count in counts)
    return len(dataset) if hasattr(dataset, "__len__") else None


def _name_of(dataset: Any) -> str | None:
    """Return the name that `datasets` knows a set by, with its configuration; None for others."""
    info = getattr(dataset, "info", None)
    names = [getattr(info, name, None) for name in ("dataset_name", "config_name")]
    # `datasets` calls a configuration that nobody named "default".
    words = [name for name in names if isinstance(name, str) and name != "default"]
    return relative(" ".join(words)) if words else None


def relative(word: str) -> str:
    """Return an absolute path relative to the working directory, or its last part if it lies outside."""
    name, equals, value = word.partition("=")
    if equals and os.path.isabs(value):
        return f"{name}={relative(value)}"
    if not os.path.isabs(word):
        return word
    path = os.path.relpath(word)
    return os.path.basename(word.rstrip(os.sep)) if path.startswith(os.pardir) else path


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries that are in use."""
    found = {"Python": platform.python_version()}
    for name in ("hf-pipetransformer", *_PACKAGES):
        try:
            # Only what this process imported can have had a part in the training.
            found |= {name: version(name)} if name == "hf-pipetransformer" or name in sys.modules else {}
        except PackageNotFoundError:
            continue  # A checkout that is not installed
    return found


def _revision() -> str | None:
    """Return the commit of the working directory, with "-dirty" if files differ from it; None where none is found."""
    # Of the working directory, where the user's script lies, not of this package.
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _machine(args: TrainingArguments) -> str:
    """Return the number of processes, and what rank 0 runs on."""
    memory = f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory"
    processes = f"{args.world_size} process{'' if args.world_size == 1 else 'es'}"
    if args.device.type == "cuda":
        processes += f" on {torch.cuda.get_device_name(args.device)}"
    return f"{processes}, {psutil.cpu_count()} CPU cores, {memory}, {platform.system()} {platform.machine()}"
