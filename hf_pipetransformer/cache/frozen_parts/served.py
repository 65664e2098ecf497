"""A frozen part that is looked up in a training, and the checks that it still computes what its records hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from hf_pipetransformer.cache.chain import SAME_BATCH_TOLERANCE, PrefixWatch, any_differs
from hf_pipetransformer.cache.frozen_parts.part import Counts, FrozenPart
from hf_pipetransformer.cache.frozen_parts.values import Rows, tensors_of
from hf_pipetransformer.comm.transfers import digest_of
from hf_pipetransformer.data.rng import generators_kept


if TYPE_CHECKING:
    from hf_pipetransformer.cache.folder import Use
    from hf_pipetransformer.cache.frozen_parts.contents import ContentStore


NUM_CHECKED = 1
"""Rows that a check computes again: twice an epoch, and of a large encoder each takes a second."""


@dataclass(frozen=True)
class Circumstances:
    """Settings that the outputs of a part depend on besides its weights.

    Args:
        settings: of the run and the model, as text.
        precision: `fp32`, `bf16` or `fp16`.
        autocast: enters the precision of the training.
        buffers_are_sent: True if buffers are written anew in every forward, as DistributedDataParallel does.
    """

    settings: str
    precision: str
    autocast: Callable[[], AbstractContextManager[object]]
    buffers_are_sent: bool = False

    def weights_key(self, part: FrozenPart) -> str:
        """Return a name for all that the part's outputs depend on besides its inputs."""
        hasher = xxhash.xxh3_128(self.settings.encode())
        for name, value in sorted(part.modules.state_dict().items()):
            digest = digest_of(value) if isinstance(value, torch.Tensor) else repr(value)
            hasher.update(f"{name} {digest}\n".encode())
        hasher.update(part.key.encode())
        return hasher.hexdigest()


@dataclass
class ServedPart:
    """A part whose forward is replaced from `begin` to `end`.

    Args:
        rows: a call, the first of whose rows checks compute again.
    """

    part: FrozenPart
    store: ContentStore
    rows: Rows
    around: Circumstances
    _watch: PrefixWatch = field(init=False)
    _buffers: list[str] = field(init=False)
    _expected: list[torch.Tensor] = field(init=False)
    _num_distrusted: int = field(default=0, init=False)
    _hits_checked: int = field(default=0, init=False)
    _reported: Counts = field(default_factory=Counts, init=False)

    def begin(self) -> None:
        """Look up from here on."""
        # Taken out of the batch, which could not be freed otherwise.
        self.rows = Rows.of(*self.rows.take(np.arange(min(NUM_CHECKED, self.rows.number))))
        self.part.store = self.store
        self.use_present_weights()
        self.part.begin()

    def end(self, use: Use) -> None:
        """Let the module run its own forward again, and give the store back; if it is kept, `use` is noted."""
        self.part.end()
        self.store.close(use)

    def use_present_weights(self) -> None:
        """Serve records of the part's present weights."""
        modules = self.part.modules
        # Version counters of buffers that every forward writes say nothing: their digests are compared instead.
        buffers = [] if self.around.buffers_are_sent else modules.buffers()
        self._watch = PrefixWatch([*modules.parameters(), *buffers])
        # Computed now, with the weights whose records are served from here on.
        self._buffers, self._expected = self._digests_of_buffers(), self._computed()
        self.store.use_weights(f"{self.around.weights_key(self.part)} {self._num_distrusted}")

    @property
    def is_trained(self) -> bool:
        """True if one of the part's parameters asks for gradients by now."""
        return any(parameter.requires_grad for parameter in self.part.modules.parameters())

    def have_weights_changed(self) -> bool:
        """Return True if a look at the weights shows a change; serve the new ones then."""
        if not self._watch.has_changed():
            return False
        self.use_present_weights()
        return True

    def is_what_it_was(self) -> bool:
        """Return False if bytes of the weights, or what the part makes of some rows, have changed; takes a while."""
        tolerance = SAME_BATCH_TOLERANCE[self.around.precision]
        is_other = any_differs(self._computed(), self._expected, tolerance)
        is_other |= self._watch.has_changed(thoroughly=True) or self._digests_of_buffers() != self._buffers
        return not is_other

    def distrust(self) -> None:
        """Use no record from before this call."""
        self._num_distrusted += 1
        self.use_present_weights()

    def has_served_since_check(self) -> bool:
        """Return True if records were read since the last call."""
        before, self._hits_checked = self._hits_checked, self.part.counts.hits
        return self._hits_checked > before

    def counts_since_report(self) -> Counts:
        """Return the rows found and computed since the last call."""
        before, now = self._reported, self.part.counts
        self._reported = replace(now)
        return Counts(now.hits - before.hits, now.misses - before.misses)

    def _digests_of_buffers(self) -> list[str]:
        return [str(digest_of(buffer)) for buffer in self.part.modules.buffers()]

    def _computed(self) -> list[torch.Tensor]:
        """Return what the part makes of the rows of checks, without a trace in the generators."""
        with generators_kept(), torch.no_grad(), self.around.autocast():
            return tensors_of(self.part.compute(*self.rows.given))
