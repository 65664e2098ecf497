"""Outputs of a model as messages between stages: their classes by name, their tensors as they are."""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from transformers.utils import ModelOutput

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.transfers import ObjectSender, broadcast_tree, recv_object


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups


def only_loss(output: Any, _inputs: dict[str, Any]) -> Any:
    """Return a model's output without anything but the loss."""
    return {"loss": output["loss"] if isinstance(output, dict) else output[0]}


def as_message(output: Any) -> dict[str, Any]:
    kind = type(output)
    if kind is tuple:  # A loss, and the output that it was computed from.
        return {"parts": [as_message(part) for part in output]}
    # By the name of its class, as nothing is pickled between ranks.
    if isinstance(output, ModelOutput) and is_dataclass(kind):
        return {"module": kind.__module__, "name": kind.__qualname__, "value": dict(output)}
    return {"module": None, "name": None, "value": output}


def from_message(message: dict[str, Any], device: torch.device) -> Any:
    if "parts" in message:
        return tuple(from_message(part, device) for part in message["parts"])
    value = recursively_apply(lambda tensor: tensor.to(device), message["value"])
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


def num_bytes(value: Any) -> int:
    """Return the bytes of all tensors of a tree."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(num_bytes, inner))


def spread(message: dict[str, Any] | None, groups: PipelineGroups, timeout: float, is_read_by_first: bool) -> Any:
    """Send the last stage's message to those who read it; if that is the first position, others get an outline.

    Collective: call on every rank of the pipeline, with a message on the last one.
    """
    source, first, control = groups.last_rank, groups.pipeline_ranks[0], groups.pipeline_control
    rank = groups.pipeline_ranks[groups.position]
    if not is_read_by_first:
        return broadcast_tree(message, source, control, rank)
    # One rank reads the values, so the broadcast to all carries shapes alone.
    outline = None if message is None else recursively_apply(without_rows, message)
    outline = broadcast_tree(outline, source, control, rank)
    if source == first:  # Some schedules have the first and the last stage on one rank.
        return outline if message is None else message
    if groups.is_last:
        sender = ObjectSender(timeout, "sending the predictions to the first position")
        sender.isend(message, [first], control)
        sender.flush()
    return recv_object(source, control, "receiving the predictions") if groups.is_first else outline
