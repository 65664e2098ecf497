"""Reading the same few samples of a data set again and again, each time under a seed of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_pipetransformer.autodp.seeding import plain_row


NUM_SAMPLES = 8

Batch = dict[str, torch.Tensor]


class UnfitError(Exception):
    """The cache must stay off: what was found, and what to do to use it all the same."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"found {found}; to use the cache {remedy}.")


class RandomInputError(UnfitError):
    """A sample is another one each time it is read, all by itself."""


class Probe:
    """Reads small batches of samples from all over a data set."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], main_input: str) -> None:
        self.dataset = dataset
        self.collate = collate
        self.main_input = main_input
        spread = np.linspace(0, len(dataset) - 1, min(len(dataset), NUM_SAMPLES))
        self.indices = [round(index) for index in spread.tolist()]
        self._times: list[float] = []

    @property
    def seconds_per_sample(self) -> float:
        """Median of reading and collating; 0 if nothing was read."""
        return float(np.median(self._times)) if self._times else 0.0

    def rows(self, indices: Sequence[int]) -> list[Any]:
        """Samples as a collator is given them."""
        return [plain_row(row) for row in self._fetched(indices)]

    def _fetched(self, indices: Sequence[int]) -> list[Any]:
        """Samples as a DataLoader would fetch them."""
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]

    def batch(self, indices: Sequence[int], draw: int = 0) -> Batch:
        """The collated batch of these samples, with the random number generators as `draw` says."""
        seed = 7919 * (draw + 1)
        random.seed(seed)
        np.random.seed(seed)
        # torch.manual_seed would seed the GPUs too, even those that are not in use yet.
        torch.default_generator.manual_seed(seed)
        start = time.perf_counter()
        batch = self.collate(self._fetched(indices))
        if len(indices) == len(self.indices):
            # As in training: collating one sample alone takes longer.
            self._times.append((time.perf_counter() - start) / len(indices))
        return self.checked(batch, len(indices))

    def checked(self, batch: Any, count: int) -> Batch:
        """The batch as a dict of tensors `(count, ...)`."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get(self.main_input), torch.Tensor):
            names = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise UnfitError(
                f"a batch without a tensor {self.main_input!r}, the model's main input ({names})",
                "let the collator return a dict with it",
            )
        for name, value in batch.items():
            remedy = "let the collator return tensors with one row a sample only"
            if not isinstance(value, torch.Tensor):
                raise UnfitError(f"{name!r} in the batch, a {type(value).__name__}", remedy)
            if value.dim() == 0 or value.shape[0] != count:
                raise UnfitError(f"{name!r} of shape {tuple(value.shape)} in a batch of {count} samples", remedy)
        return dict(batch)
