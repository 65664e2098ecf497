"""Cache tags: what a batch says of the stored activations of its samples, and how that travels with the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


_SAMPLES, _NUM_LAYERS, _DIGESTS, _STAMP, _HIDDEN = (
    f"pipetransformer_{name}" for name in ("samples", "num_layers", "digests", "stamp", "hidden")
)


@dataclass(frozen=True)
class CacheTags:
    """The samples of a batch or micro-batch as the activation cache sees them.

    Args:
        samples: index of each sample in the data set, `(batch,)`, int64.
        num_layers: layers whose output is known for each sample, `(batch,)`, int64; 0: it starts from its input.
        digests: of each sample's input, `(batch,)`, int64; 0 where the sample was not read.
        stamp: number of the weights, as the cache counts them, that `num_layers` is about.
        hidden: the stored activations, `(batch, seq, hidden)`, on the stage that reads them; rows with 0 layers hold
            nothing. None on later stages, and if nothing is stored.
    """

    samples: torch.Tensor
    num_layers: torch.Tensor
    digests: torch.Tensor
    stamp: int
    hidden: torch.Tensor | None

    def attach(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with this in it, so that it is cut, padded and sent on with the batch."""
        stamps = torch.full_like(self.samples, self.stamp)
        own = {_SAMPLES: self.samples, _NUM_LAYERS: self.num_layers, _DIGESTS: self.digests, _STAMP: stamps}
        return {**batch, **own, **({} if self.hidden is None else {_HIDDEN: self.hidden})}


def detach_tags(batch: Mapping[str, Any]) -> tuple[dict[str, Any], CacheTags | None]:
    """A batch's inputs of the model, and its tags."""
    inputs = dict(batch)
    about = [inputs.pop(key, None) for key in (_SAMPLES, _NUM_LAYERS, _DIGESTS, _STAMP)]
    hidden = inputs.pop(_HIDDEN, None)
    if any(values is None for values in about):
        return inputs, None
    # Trainer puts whole batches on the device in evaluation; indices are for the files.
    samples, num_layers, digests, stamps = (values.cpu() for values in about)
    return inputs, CacheTags(samples, num_layers, digests, int(stamps[0]), hidden)


def without_hidden(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as the later stages need it: stored activations reach them through the pipeline."""
    return {key: value for key, value in batch.items() if key != _HIDDEN}
