"""Counts what autograd keeps between forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Trainer, TrainerCallback


class SavedBytes(TrainerCallback):
    """Bytes kept for the backward: `now`, and the `most` at any moment of a training step.

    Each storage counts once, those of parameters not.

    Args:
        trainer: the run; this callback is added to it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.now = self.most = 0
        self._ignored: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._trainer = trainer
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was kept before, to look at the model, does not count."""
        held = [parameter for parameter in self._trainer.model.parameters() if not parameter.is_meta]
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in held}
        if state.global_step == 0:
            self.most = self.now

    def hooks(self) -> saved_tensors_hooks:
        """Inside this context it counts."""
        return saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def change(self, tensor: torch.Tensor, uses: int) -> None:
        """A tensor has more or fewer uses."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._ignored:
            return
        before = self._uses[key]
        self._uses[key] += uses
        self.now += storage.nbytes() * ((self._uses[key] > 0) - (before > 0))
        self.most = max(self.most, self.now)


class _Saved:
    def __init__(self, tensor: torch.Tensor, count: SavedBytes) -> None:
        self.tensor, self.count = tensor, count
        count.change(tensor, 1)

    def __del__(self) -> None:
        self.count.change(self.tensor, -1)
