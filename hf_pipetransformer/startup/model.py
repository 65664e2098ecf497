"""Inspection of the model that a run starts with: errors agreed on by all ranks, frozen layers, effect of padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import pad_batch
from hf_pipetransformer.schedules.placement import block_of
from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, config_value, main_input_of
from hf_pipetransformer.splitters.structure import Probe, Structure
from hf_pipetransformer.splitters.view import StageExit, StageView
from hf_pipetransformer.startup.check import Compute, gradient_norms, gradients_discarded


T = TypeVar("T")

_NOT_OF_THE_MODEL = (PipelineError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that do not speak against the model (another rank failed, out of memory, lost device): raised unchanged."""
_OUT_OF_HOST_MEMORY = "DefaultCPUAllocator"


class Inspection:
    """Wrapper for calls that run the model: turns errors into `UnsupportedModelError`, the same on every rank."""

    def __init__(self, topology: Topology, name: str) -> None:
        self._topology = topology
        self._name = name
        self._of_data: Exception | None = None

    def reading(self, read: Callable[[int], T]) -> Callable[[int], T]:
        """Wrap `read` so that its errors are attributed to the data set and raised unchanged."""

        def noting_errors(num_samples: int) -> T:
            try:
                return read(num_samples)
            except Exception as error:
                self._of_data = error
                raise

        return noting_errors

    def on_every_rank(self, call: Callable[[], T]) -> T:
        """Call `call` on every rank and raise on all if it raises on one. Collective: call on every rank.

        Raises:
            UnsupportedModelError: the call raised on some rank; on that rank with the original error as the cause.
        """
        value, refusal = self._attempt(call)
        for text in self._topology.gather(None if refusal is None else str(refusal)):
            if text is not None:
                raise refusal or UnsupportedModelError(text)
        return cast(T, value)

    def on_first_rank(self, call: Callable[[], Any]) -> Any:
        """Call `call` on rank 0 and return its result on every rank. Collective: call on every rank.

        Raises:
            UnsupportedModelError: on every rank, if the call raised; on rank 0 with the original error as the cause.
        """
        refusals = []

        def attempt() -> list[Any]:
            value, refusal = self._attempt(call)
            refusals.append(refusal)
            return [value, None if refusal is None else str(refusal)]

        value, text = self._topology.decide(attempt)
        if text is not None:
            raise (refusals[0] if refusals else None) or UnsupportedModelError(text)
        return value

    def _attempt(self, call: Callable[[], T]) -> tuple[T | None, UnsupportedModelError | None]:
        try:
            return call(), None
        except UnsupportedModelError as error:
            return None, error
        except _NOT_OF_THE_MODEL:
            raise
        except Exception as error:
            if error is self._of_data or _OUT_OF_HOST_MEMORY in str(error):
                raise
            refusal = UnsupportedModelError(
                f"{self._name} raises {type(error).__name__} while it is tried on stages: {error}. This model cannot "
                "be pipelined as it is; pass `splitter=` with a Splitter that knows it, or use transformers.Trainer."
            )
            refusal.__cause__ = error
            return None, refusal


ProbeCompute = Callable[[dict[str, Any], int], torch.Tensor]


@dataclass(frozen=True)
class ProbeTarget:
    """Whole model, a tiny batch, and the computation of its loss.

    Args:
        compute: returns the whole model's loss for some inputs and the number of items to divide by.
        count: returns the number of items of a batch that the loss averages over.
    """

    model: nn.Module
    splitter: Splitter
    inputs: dict[str, Any]
    compute: ProbeCompute
    count: Callable[[Any], int]

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of `inputs`, divided by the number of items of the whole batch `self.inputs`."""
        return self.compute(inputs, self.count(self.inputs))

    @property
    def main_input(self) -> str:
        """Name of the input that the embeddings read."""
        return main_input_of(self.model)

    @property
    def pad_token_id(self) -> int:
        return config_value(self.model, "pad_token_id") or 0


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module or the config has a dropout or jitter rate above 0."""
    config = getattr(model, "config", None)
    holders: list[Any] = [*model.modules(), *([config] if hasattr(config, "__dict__") else [])]
    rates = [value for holder in holders for name, value in vars(holder).items() if "drop" in name or "jitter" in name]
    rates += [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def trained_blocks(model: nn.Module, structure: Structure) -> set[int]:
    return {
        block
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for block in structure.blocks_of_parameter[name]
    }


def num_frozen_by_user(model: nn.Module, structure: Structure) -> int:
    """Return the number of leading layers that the script froze; 0 if the embeddings are trained."""
    first = min(trained_blocks(model, structure), default=structure.num_blocks - 1)
    return max(0, block_of(first) - 1)


LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-4


def sees_padding(
    model: nn.Module, splitter: Splitter, structure: Structure, compute: Compute, inputs: dict[str, Any]
) -> bool:
    """Return True if noise on the hidden states at masked positions changes the loss or any gradient norm.

    A softmax over positions (question answering) depends on padding, a mean over labeled tokens does not. `inputs`
    must have an `attention_mask`, `(batch, seq)`, that masks some positions.
    """
    view = StageView(model, splitter, structure)
    masked = inputs["attention_mask"] == 0
    try:
        view.install(range(1))
        try:
            compute(dict(inputs))
            raise AssertionError("a view without the head leaves the model early")
        except StageExit as stage_exit:
            hidden = stage_exit.hidden.detach()
        view.install(range(1, structure.num_blocks))
        noise = torch.randn_like(hidden) * masked[..., None]
        (loss, norms), (noisy_loss, noisy_norms) = (
            _loss_and_norms(model, view, compute, inputs, entering) for entering in (hidden, hidden + noise)
        )
    finally:
        view.remove()
    same_loss = abs(loss - noisy_loss) <= LOSS_TOLERANCE * max(abs(loss), 1e-3)
    same_norms = float((norms - noisy_norms).norm()) <= GRADIENT_TOLERANCE * max(float(norms.norm()), 1e-3)
    return not (same_loss and same_norms)


def _loss_and_norms(
    model: nn.Module, view: StageView, compute: Compute, inputs: dict[str, Any], entering: torch.Tensor
) -> tuple[float, torch.Tensor]:
    view.received = entering
    with gradients_discarded(model):
        loss = compute(dict(inputs))
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach()), gradient_norms(model)


def hangs_on_length(subject: ProbeTarget) -> bool:
    """Return True if one more position of padding changes the loss, so that replicas must pad to a common length."""
    if not _is_text(subject):
        return False
    padded = _padded_more(subject)
    if padded is None:
        return True
    with torch.no_grad():
        expected = float(subject.loss(subject.inputs))
        found = _loss_if_taken(subject, padded)
    return found is None or abs(found - expected) > 1e-6 * abs(expected)


def hangs_on_padding(subject: ProbeTarget, probe: Probe) -> bool:
    """Return True if values at masked positions may change the loss, so that stored rows must keep them."""
    padded = _padded_more(subject) if _is_text(subject) and not probe.activation.changes_length else None
    if padded is None or _loss_if_taken(subject, padded) is None:
        return True
    return sees_padding(subject.model, subject.splitter, probe.structure, subject.loss, padded)


def _loss_if_taken(subject: ProbeTarget, inputs: dict[str, Any]) -> float | None:
    """Return the loss; None if the model does not accept this sequence length (Nystromformer accepts one only)."""
    try:
        with torch.no_grad():
            return float(subject.loss(inputs))
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError):
        return None


def _is_text(subject: ProbeTarget) -> bool:
    tokens = subject.inputs[subject.main_input]
    return tokens.dim() == 2 and not tokens.is_floating_point()


def _padded_more(subject: ProbeTarget) -> dict[str, Any] | None:
    """Return the batch with one more position of padding; None without an attention mask or room for it."""
    length = subject.inputs[subject.main_input].shape[1]
    longest = config_value(subject.model, "max_position_embeddings", length + 1)
    if "attention_mask" not in subject.inputs or length + 2 >= longest:
        return None
    return pad_batch(subject.inputs, subject.main_input, length + 1, subject.pad_token_id)
