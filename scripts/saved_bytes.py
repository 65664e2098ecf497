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
        self._trainer = trainer
        self._ignored: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._is_counting = False
        trainer.add_callback(self)

    def hooks(self) -> saved_tensors_hooks:
        """The run takes place inside this context."""
        return saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From the first step on it counts: what a start-up keeps to look at the model does not."""
        held = [parameter for parameter in self._trainer.model.parameters() if not parameter.is_meta]
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in held}
        self._is_counting = True

    def keep(self, tensor: torch.Tensor) -> int | None:
        """Count a tensor; what `release` needs, None if it does not count."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if not self._is_counting or key in self._ignored:
            return None
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        return key

    def release(self, key: int, num_bytes: int) -> None:
        """The tensor behind `key` has one use less."""
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= num_bytes


class _Saved:
    def __init__(self, tensor: torch.Tensor, count: SavedBytes) -> None:
        self.tensor, self.count = tensor, count
        self.key = count.keep(tensor)

    def __del__(self) -> None:
        if self.key is not None:
            self.count.release(self.key, self.tensor.untyped_storage().nbytes())
