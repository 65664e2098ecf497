"""Check whether layers that the script froze may run in evaluation mode, as stored ones do, with Trainer's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_pipetransformer.data.rng import random_state, same_states
from hf_pipetransformer.engine.effects import Alone, buffers_kept, effects_of
from hf_pipetransformer.schedules.placement import first_above
from hf_pipetransformer.startup.model import ProbeTarget, run_stage


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.structure import Structure


MODE_TOLERANCE = 1e-5
"""Largest difference between the outputs in training and evaluation mode that is rounding, of their largest value."""


def computes_otherwise_in_training(target: ProbeTarget, structure: Structure, num_layers: int) -> bool:
    """Return True if the embeddings and `num_layers` layers compute one thing in training, and another in evaluation.

    Whatever makes them: dropout, masks that are drawn, statistics of batches, a forward that reads `self.training`.
    Also if they draw numbers that change nothing, where the layers above draw as well and would get others.

    Call in full precision.
    """
    view, stop = target.view(structure), first_above(num_layers)

    def below() -> list[torch.Tensor]:
        return [run_stage(view, range(stop), None, lambda: target.loss(dict(target.inputs))).detach()]

    try:
        with torch.no_grad(), Alone():
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
    finally:
        view.remove()


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put all modules into training mode inside."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _are_alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= MODE_TOLERANCE * other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )
