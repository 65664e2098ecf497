"""Context of token slices: keeps keys and values for later slices, and sums their gradients in the backward.

Slices come from training, and from generation, where each new token of a sequence is one.

TeraPipe (Li et al., ICML 2021), section 3.2: the slices of a sequence run in order, and each attends to itself and to
earlier slices. The model reads the kept keys and values through its own KV cache interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_pipetransformer.engine.program import MicroBatch, ProgramWrapper, StageProgram
from hf_pipetransformer.splitters.base import CACHE_NAME


_SPARE_TOKENS = 64
"""Number of tokens for which memory is allocated at a time, at least, while tokens are generated."""


class KVBuffer:
    """Keys, or values, of one layer for the sequences (of `length` tokens, or more) of one batch slice.

    Forwards must run in slice order and backwards in reverse order: a slice's gradient is complete only after all
    later slices have added theirs.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._all: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None

    def extend(self, new: torch.Tensor, start: int) -> torch.Tensor:
        """Write the slice `new`, `(batch, heads, tokens, head size)`, at token `start`; return all up to its end."""
        extended: torch.Tensor = _Extend.apply(new, self, start)  # type: ignore[no-untyped-call]
        return extended

    def write(self, new: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + new.shape[-2]
        if self._all is None or self._all.shape[-2] < stop:
            # Only generation goes past the length, and there no backward reads what earlier slices saved.
            before, room = self._all, self.length if stop <= self.length else stop + max(stop // 4, _SPARE_TOKENS)
            self._all = new.new_empty(*new.shape[:-2], room, new.shape[-1])
            if before is not None:
                self._all[..., :start, :] = before[..., :start, :]
        # `.data` does not bump the version counter. That is safe: earlier slices saved only tokens before `start`.
        self._all.data[..., start:stop, :].copy_(new)
        return self._all.data[..., :stop, :]

    def gradient(self, of_all: torch.Tensor, start: int) -> torch.Tensor:
        """Return the total gradient of the slice at `start`, given that of what `extend` returned for it.

        Adds the gradients of the tokens before `start` to those that earlier slices will take.
        """
        own = of_all[..., start:, :]
        later = self.gradient_of_later(start, of_all.shape[-2])
        if start:
            if self._gradients is None:
                # float32, because sums over many slices lose bits in half precision.
                self._gradients = of_all.new_zeros(*of_all.shape[:-2], start, of_all.shape[-1], dtype=torch.float32)
            self._gradients[..., :start, :] += of_all[..., :start, :]
        return own if later is None else (own + later).to(of_all.dtype)

    def gradient_of_later(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the gradient from later slices for tokens `start` to `stop`; None if there are no later slices."""
        return None if self._gradients is None else self._gradients[..., start:stop, :]


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, kept: KVBuffer, start: int) -> torch.Tensor:
        ctx.kept, ctx.start = kept, start
        return kept.write(new, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_all: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kept.gradient(of_all, ctx.start), None, None


class KeptContext:
    """Keys and values of all layers of the model, for one batch slice. Layers of other stages stay empty."""

    def __init__(self, num_layers: int, length: int) -> None:
        self.length = length
        self.layers = [(KVBuffer(length), KVBuffer(length)) for _ in range(num_layers)]
        self._new: dict[int, list[tuple[KVBuffer, torch.Tensor]]] = {}
        """By the slices' starts, their keys and values in the highest layer that this stage runs."""

    def from_token(self, start: int) -> Cache:
        """Return the KV cache to pass to the model for the slice that begins at token `start`."""
        new = self._new[start] = []
        return _Context(layers=[_Layer(keys, values, start, new) for keys, values in self.layers])

    def backward_of_context(self, start: int) -> None:
        """Run the backward of a slice without a loss, from the gradients of its keys and values in later slices.

        Starting at the highest layer suffices: lower layers are reached through it, and `KVBuffer.gradient` adds
        their own gradients from later slices there.
        """
        roots, gradients = [], []
        for kept, new in self._new[start]:
            gradient = kept.gradient_of_later(start, start + new.shape[-2])
            if gradient is not None and new.requires_grad:
                roots.append(new)
                gradients.append(gradient.to(new.dtype))
        if roots:
            torch.autograd.backward(roots, gradients)

    def forget(self, start: int) -> None:
        """Drop a slice after its backward."""
        self._new.pop(start, None)


class _Context(Cache):
    """KV cache in which a layer that is recomputed writes the same keys and values in place."""

    takes_layers_again = True


class _Layer(CacheLayerMixin):
    """Cache layer for the model's code. It reports `start` tokens even for layers that this stage does not run."""

    is_sliding = False

    def __init__(self, keys: KVBuffer, values: KVBuffer, start: int, new: list[tuple[KVBuffer, torch.Tensor]]) -> None:
        super().__init__()
        self._keys, self._values, self._start, self._new = keys, values, start, new
        self._is_recomputed = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # `KVBuffer` allocates on the first write.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A backward may run the layer again: what it gives then would keep its whole graph alive.
        if not self._is_recomputed:
            self._new[:] = [(self._keys, key_states), (self._values, value_states)]
        self._is_recomputed = True
        return self._keys.extend(key_states, self._start), self._values.extend(value_states, self._start)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length, 0

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return self._keys.length or -1  # No maximum.


class TokenSliceProgram(ProgramWrapper):
    """Wrapper that gives token slices the keys and values of earlier ones, and puts their gradients together.

    Micro-batches without a place are whole sequences and pass through. `num_layers` is that of the whole model.
    """

    def __init__(self, program: StageProgram, num_layers: int) -> None:
        super().__init__(program)
        self.num_layers = num_layers
        self._contexts: dict[int, KeptContext] = {}

    def clear(self) -> None:
        super().clear()
        self._contexts.clear()

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        output, place = self.program.forward(self._with_context(micro_batch), received), micro_batch.place
        if micro_batch.is_predicted and place is not None and place.batch_slice in self._contexts:
            # Kept for a backward, which does not follow.
            self._contexts[place.batch_slice].forget(place.start)
        return output

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        place = micro_batch.place
        if place is None:
            return self.program.backward_input(micro_batch, gradient)
        context = self._contexts[place.batch_slice]
        if gradient is None and not micro_batch.weight:
            # On the last stage a slice without labels has no loss, which would start the backward.
            context.backward_of_context(place.start)
        entered = self.program.backward_input(micro_batch, gradient)
        context.forget(place.start)
        if place.start == 0:
            # The backward of the first slice is the last of the sequence.
            del self._contexts[place.batch_slice]
        return entered

    def _with_context(self, micro_batch: MicroBatch) -> MicroBatch:
        place = micro_batch.place
        if place is None:
            return micro_batch
        if place.batch_slice not in self._contexts:
            self._contexts[place.batch_slice] = KeptContext(self.num_layers, place.length or 0)
        cache = self._contexts[place.batch_slice].from_token(place.start)
        if place.stop == place.length and micro_batch.is_predicted:
            del self._contexts[place.batch_slice]
        # Without a place: generation wraps a program that may have one of these inside.
        return micro_batch.with_inputs(micro_batch.inputs | {CACHE_NAME: cache}, place=None)
