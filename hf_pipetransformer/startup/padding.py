"""Whether the loss sees padding, as a softmax over positions does."""

from __future__ import annotations

from typing import Any

import torch

from hf_pipetransformer.autodp.padding import pad_batch
from hf_pipetransformer.splitters.base import config_value
from hf_pipetransformer.splitters.check import Probe
from hf_pipetransformer.splitters.padding_check import sees_padding
from hf_pipetransformer.startup.model import Subject


def hangs_on_length(subject: Subject) -> bool:
    """Whether one more position of padding changes the loss: then replicas must pad alike."""
    if not _is_text(subject):
        return False
    padded = _padded_more(subject)
    if padded is None:
        return True
    with torch.no_grad():
        expected = float(subject.loss(subject.inputs))
        found = _loss_if_taken(subject, padded)
    return found is None or abs(found - expected) > 1e-6 * abs(expected)


def hangs_on_padding(subject: Subject, probe: Probe) -> bool:
    """Whether what stands at masked positions changes the loss: then stored rows keep it."""
    padded = _padded_more(subject) if _is_text(subject) and not probe.activation.changes_length else None
    if padded is None or _loss_if_taken(subject, padded) is None:
        return True
    return sees_padding(subject.model, subject.splitter, probe.structure, subject.loss, padded)


def _loss_if_taken(subject: Subject, inputs: dict[str, Any]) -> float | None:
    """The loss; None where the model does not take sequences of this length (Nystromformer takes one length)."""
    try:
        with torch.no_grad():
            return float(subject.loss(inputs))
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError):
        return None


def _is_text(subject: Subject) -> bool:
    tokens = subject.inputs[subject.main_input]
    return tokens.dim() == 2 and not tokens.is_floating_point()


def _padded_more(subject: Subject) -> dict[str, Any] | None:
    """The batch with one more position of padding; None where that is not possible."""
    length = subject.inputs[subject.main_input].shape[1]
    longest = config_value(subject.model, "max_position_embeddings", length + 1)
    if "attention_mask" not in subject.inputs or length + 2 >= longest:
        return None
    return pad_batch(subject.inputs, subject.main_input, length + 1, subject.pad_token_id)
