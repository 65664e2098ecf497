"""Gradients of embedding tables, added to `.grad` once for all micro-batches of a batch.

Autograd makes a gradient as large as the table in the backward of each micro-batch, most of it zeros, and adds it to
the sum. Of a table of 128,256 x 4,096 in bfloat16 that is a second gigabyte beside `.grad`, written and read again for
every micro-batch. Here only the gradients of the rows that were looked up are kept until the last backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_pipetransformer.engine.linear_layers import replaced_forwards


class EmbeddingGradients:
    """Gradients of looked-up rows of some embeddings, kept until `add`.

    Only for stages that the engine alone runs backward through: a loss that calls autograd itself would miss them.
    As soon as kept rows are more than the table has, they are added: memory does not grow with the batch.
    """

    def __init__(self, modules: Iterable[nn.Embedding] = ()) -> None:
        self._modules = [module for module in modules if _is_plain(module)]
        self._kept: dict[nn.Embedding, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.anchor = torch.empty(0, requires_grad=True)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Return the tables whose gradient is complete only after `add`."""
        return {table for module in self._modules for table in module.parameters() if _is_kept(table)}

    def clear(self) -> None:
        """Drop all that is kept."""
        self._kept.clear()

    def keeping(self) -> AbstractContextManager[None]:
        """Make forwards inside keep the gradients of the rows that they look up."""
        return replaced_forwards([each for each in self._modules if _is_kept(each.weight)], self._forward)

    def add_if_many(self) -> None:
        """Add to `.grad` what is kept of tables with fewer rows than that; call it after a backward."""
        for module in [module for module, rows in self._kept.items() if _num_rows(rows) > module.num_embeddings]:
            self._add(module)

    def add(self) -> None:
        """Add all that is kept to `.grad`, which fires each table's hooks once."""
        for module in list(self._kept):
            self._add(module)

    def _add(self, module: nn.Embedding) -> None:
        ids, gradients = (torch.cat(parts) for parts in zip(*self._kept.pop(module), strict=True))
        with torch.enable_grad():
            # A lookup for the sake of its backward, in which autograd adds repeated ids and leaves out `padding_idx`.
            rows = functional.embedding(ids, module.weight, module.padding_idx)
        # Autograd itself makes the gradient of the table: it need not be copied into `.grad`.
        rows.backward(gradients)

    def _forward(self, module: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        # The gradients of so many rows take more memory than that of the table.
        if input.numel() >= module.num_embeddings:
            return type(module).forward(module, input)
        rows: torch.Tensor = _Lookup.apply(self.anchor, input, module, self)  # type: ignore[no-untyped-call]
        return rows

    def take(self, module: nn.Embedding, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the gradient of some rows, `(..., hidden)`, for the ids `(...)`."""
        kept = self._kept.setdefault(module, [])
        kept.append((ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])))


class _Lookup(torch.autograd.Function):
    """Lookup that passes the gradient of its rows to `EmbeddingGradients`; `_anchor` makes them require one."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, ids: torch.Tensor, module: nn.Embedding, owner: EmbeddingGradients
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.module, ctx.owner = module, owner
        # Not linked to the table, whose gradient comes from `EmbeddingGradients.add`.
        return functional.embedding(ids, module.weight.detach(), module.padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.owner.take(ctx.module, ids, *gradients)
        return None, None, None, None


def embeddings_of(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Embedding]:
    """Return the embeddings of a model that lie outside of its layers."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    # Exact types, because a subclass may compute something else in its forward.
    return [m for m in model.modules() if type(m) is nn.Embedding and id(m) not in inside]


def _is_plain(module: nn.Embedding) -> bool:
    # max_norm writes to the table in the forward, frequencies are those of one call, and sparse gradients are of
    # another kind.
    is_usual = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_usual and isinstance(module.weight, nn.Parameter)


def _is_kept(table: torch.Tensor) -> bool:
    # On a CPU rows of half precision are added in half precision: the fewer at a time, the less is lost.
    return table.requires_grad and not (table.is_cpu and table.dtype in (torch.float16, torch.bfloat16))


def _num_rows(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(len(ids) for ids, _ in kept)
