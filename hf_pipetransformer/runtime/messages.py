"""Outputs of a model as messages between stages: their classes by name, their tensors as they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from hf_pipetransformer.comm.errors import PipelineError


def only_loss(output: Any, _inputs: dict[str, Any]) -> Any:
    """Return a model's output without anything but the loss."""
    return {"loss": output["loss"] if isinstance(output, dict) else output[0]}


def as_message(output: Any) -> dict[str, Any]:
    kind = type(output)
    if kind is tuple:  # A loss, and the output that it was computed from.
        return {"parts": [as_message(part) for part in output]}
    if isinstance(output, ModelOutput) and is_dataclass(kind):
        return {"module": kind.__module__, "name": kind.__qualname__, "value": dict(output)}
    return {"module": None, "name": None, "value": output}


def from_message(message: dict[str, Any], device: torch.device) -> Any:
    if "parts" in message:
        return tuple(from_message(part, device) for part in message["parts"])
    value = mapped(lambda tensor: tensor.to(device), message["value"])
    if message["module"] is None:
        return value
    kind = getattr(importlib.import_module(message["module"]), message["name"], None)
    # The names come from another process: nothing but an output is to be constructed by them.
    if not (isinstance(kind, type) and issubclass(kind, ModelOutput) and is_dataclass(kind)):
        raise PipelineError(
            f"The last stage sent an output of class {message['module']}.{message['name']}: expected a dataclass of "
            "transformers' ModelOutput that every rank can import."
        )
    # Some models add entries to an output that its constructor does not take.
    known = {field.name for field in fields(kind)}
    return kind(**{key: item for key, item in value.items() if key in known})


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of no samples, `(0, ...)`, which does not keep the given one; scalars stay as they are."""
    return tensor.new_empty((0, *tensor.shape[1:])) if tensor.dim() else tensor


def mapped(call: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a tree with `call` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return call(value)
    if isinstance(value, dict):
        return type(value)(**{key: mapped(call, item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(call, item) for item in value)
    return value
