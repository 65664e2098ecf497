"""Checks of what frozen layers may leave out where their output is stored (padding, positions, the training mode).

And of what forwards in training leave to the next ones.

Functions of a `ProbeTarget` without communication, called in full precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pipetransformer.data.batches import pad_batch
from hf_pipetransformer.data.effects import Alone, buffers_kept, effects_of, modes_kept
from hf_pipetransformer.data.rng import random_state, same_states, set_random_state
from hf_pipetransformer.schedules.placement import first_above
from hf_pipetransformer.splitters.base import config_value
from hf_pipetransformer.startup.check import Result, run_loss
from hf_pipetransformer.startup.model import ProbeTarget, run_stage


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.structure import Probe, Structure


PADDING_LOSS_TOLERANCE = 1e-6
"""Largest relative difference between the losses of a batch with and without more padding that is rounding."""

MODE_TOLERANCE = 1e-5
"""Largest difference between the outputs in training and evaluation mode that is rounding, of their largest value."""

SAME_LOSS_TOLERANCE = 1e-6
"""Largest relative difference between the losses of two same forwards."""


def depends_on_length(target: ProbeTarget) -> bool:
    """Return True if one more position of padding changes the loss, so that replicas must pad to a common length."""
    if not target.has_padded_texts:
        return False
    padded = _with_more_padding(target)
    # Without a trial, the safe answer: padding to a common length only costs time.
    if padded is None:
        return True
    with torch.no_grad():
        expected = float(target.loss(target.inputs))
        found = _loss_if_taken(target, padded)
    return found is None or abs(found - expected) > PADDING_LOSS_TOLERANCE * abs(expected)


def depends_on_padding(target: ProbeTarget, probe: Probe) -> bool:
    """Return True if values at masked positions may change the loss, so that stored records must keep them.

    Adds noise to the hidden states there: a softmax over positions (question answering) depends on it, a mean over
    labeled tokens does not.
    """
    padded = _with_more_padding(target) if target.is_text and not probe.activation.changes_length else None
    if padded is None or _loss_if_taken(target, padded) is None:
        return True
    return not _is_unread(target, probe, padded, 1, lambda hidden: (padded["attention_mask"] == 0)[..., None])


def reads_first_alone(target: ProbeTarget, probe: Probe) -> bool:
    """Return True if the head reads of a sample without tokens the first position alone, as ViT's classifiers do."""
    if target.is_text or len(probe.activation.hidden_shape) != 2 or probe.activation.hidden_shape[0] < 2:
        return False

    def others(hidden: torch.Tensor) -> torch.Tensor:
        return (torch.arange(hidden.shape[1], device=hidden.device) > 0)[:, None]

    return _is_unread(target, probe, target.inputs, probe.structure.num_blocks - 1, others)


def _is_unread(
    target: ProbeTarget,
    probe: Probe,
    inputs: dict[str, Any],
    block: int,
    unread: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Return True if positions of what enters a block change neither the loss nor gradients: with noise, and as zeros.

    `unread` gives their mask for hidden states `(batch, seq, hidden)`.
    """
    with target.view(probe.structure) as view:

        def result_of(entering: torch.Tensor) -> Result:
            later = range(block, probe.structure.num_blocks)
            return run_loss(target, lambda: run_stage(view, later, entering, lambda: target.loss(dict(inputs))))

        hidden = run_stage(view, range(block), None, lambda: target.loss(dict(inputs))).detach()
        where = unread(hidden)
        plain = result_of(hidden)
        # Zeros alone could leave the result as it is although they are read.
        others = [result_of(hidden + torch.randn_like(hidden) * where), result_of(hidden * ~where)]
    is_finite = math.isfinite(plain.loss) and math.isfinite(plain.total_norm)
    return is_finite and all(other.agrees_with(plain, PADDING_LOSS_TOLERANCE) for other in others)


def _with_more_padding(target: ProbeTarget) -> dict[str, Any] | None:
    """Return the batch with one more position of padding; None without an attention mask or room for it."""
    length = target.inputs[target.main_input].shape[1]
    longest = config_value(target.model, "max_position_embeddings", length + 1)
    # Models like RoBERTa begin to count positions at 2, so that two of them are never a token's.
    if "attention_mask" not in target.inputs or length + 2 >= longest:
        return None
    return pad_batch(target.inputs, target.main_input, length + 1, target.pad_token_id)


def _loss_if_taken(target: ProbeTarget, inputs: dict[str, Any]) -> float | None:
    """Return the loss; None if the model does not accept this sequence length (Nystromformer accepts one only)."""
    try:
        with torch.no_grad():
            return float(target.loss(inputs))
    # It is a RuntimeError too, but says nothing of the length.
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError):
        return None


# ---- training mode ----


def computes_otherwise_in_training(target: ProbeTarget, structure: Structure, num_layers: int) -> bool:
    """Return True if the embeddings and `num_layers` layers compute one thing in training, and another in evaluation.

    Whatever makes them: dropout, masks that are drawn, statistics of batches, a forward that reads `self.training`.
    Also if they draw numbers that change nothing, where the layers above draw as well and would get others.

    Call in full precision.
    """
    stop = first_above(num_layers)
    try:
        with target.view(structure) as view, torch.no_grad(), Alone():

            def below() -> list[torch.Tensor]:
                return [run_stage(view, range(stop), None, lambda: target.loss(dict(target.inputs))).detach()]

            # The model is in evaluation mode here, as all checks have it.
            (evaluated,) = below()
            with _training(target.model), buffers_kept(target.model):
                effects = effects_of(below, target.model, _are_alike)
                if effects.why_not_repeatable is not None or not _are_alike(below(), [evaluated]):
                    return True
                if not effects.num_draws:
                    return False
                before, above = random_state(evaluated.device), range(stop, structure.num_blocks)
                run_stage(view, above, evaluated, lambda: target.loss(dict(target.inputs)))
                return not same_states(before, random_state(evaluated.device))
    except torch.OutOfMemoryError:
        raise
    # A few samples may be too little for what training does (masks longer than a short sound, for example), and what
    # communicates cannot be tried on one rank.
    except (IndexError, RuntimeError, ValueError):
        return True


def why_one_after_another(target: ProbeTarget) -> str | None:
    """Return why forwards in training depend on those before them, so that parts of a batch would; None if not.

    Such are moving averages, counters and power iterations that each forward goes on with, and a teacher that follows.

    Call in full precision.
    """

    tensors, values = random_state(target.device)

    def loss() -> float:
        set_random_state(tensors, values, target.device)
        return float(target.loss(dict(target.inputs)).detach())

    try:
        with Alone(), _training(target.model), buffers_kept(target.model):
            first, second = loss(), loss()
    except torch.OutOfMemoryError:
        raise
    # What a few samples are too little for, or what communicates, the run itself shows.
    except Exception:
        return None
    # The same kernels on the same values: what differs is no rounding.
    if math.isclose(first, second, rel_tol=SAME_LOSS_TOLERANCE) or not math.isfinite(first + second):
        return None
    return (
        f"In training, {type(target.model).__name__} gives the loss {first:.8g} for a few samples and {second:.8g} "
        "for the same ones in its next forward: it keeps something that each forward changes (a moving average, a "
        "counter, a power iteration), and here every micro-batch and replica is a forward. Use one process with "
        "pipeline_parallel_num_microbatches=1, or transformers.Trainer."
    )


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put all modules into training mode inside."""
    with modes_kept(model.modules()):
        model.train()
        yield


def _are_alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= MODE_TOLERANCE * other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )
