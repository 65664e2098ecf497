"""Batch normalization on micro-batches with the running statistics of whole mini-batches."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from hf_pipetransformer.pipe.recomputation import is_recomputing


Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """Batch norm that normalizes each micro-batch separately and updates running statistics once per mini-batch.

    In evaluation mode and in its state dict it equals `nn.BatchNorm1d`, 2d or 3d. In training mode the running
    statistics equal those after one forward with the whole mini-batch. The output does not: each micro-batch is
    normalized with its own mean and variance. Recomputed forwards are not counted.

    Args:
        num_features: channels, the second dimension of the input `(batch, channels, ...)`.
        momentum: weight of a mini-batch in the running statistics; None for the mean over all mini-batches.
        chunks: forwards per mini-batch, after which the running statistics are updated, unless `begin` sets another
            number for the current mini-batch.

    Raises:
        ValueError: `chunks` is below 1.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        if chunks < 1:
            raise ValueError(f"Found chunks={chunks}: expected at least one micro-batch.")
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.chunks = chunks
        nn.Module.register_load_state_dict_pre_hook(self, _drop_sums)
        self.begin(chunks)

    def begin(self, num_micro_batches: int) -> None:
        """Start a mini-batch of `num_micro_batches`, and drop the partial sums of one that failed."""
        self._to_come = num_micro_batches
        # Per channel, over the values so far: count, mean, and sum of squared differences from the mean.
        self._count = 0
        self._mean = self._scatter = torch.zeros((), device="cpu")

    @property
    def sum(self) -> Tensor:
        """Sum of the values of the current mini-batch, `(channels,)`."""
        return torch.zeros_like(self.running_mean) + self._mean * self._count

    @property
    def sum_squares(self) -> Tensor:
        """Sum of the squares of the values of the current mini-batch, `(channels,)`."""
        return torch.zeros_like(self.running_mean) + self._scatter + self._mean**2 * self._count

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `(batch, channels, ...)`, and in training add it to the statistics of the mini-batch."""
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(input, mean, var, self.weight, self.bias, training=False, eps=self.eps)
        output = F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        # A recomputed forward sees the values of the first one again: they are counted.
        if not is_recomputing():
            with torch.no_grad():
                self._track(input.detach())
                if self._to_come == 0:
                    self._commit()
        return output

    def _track(self, values: Tensor) -> None:
        """Merge a micro-batch into the mini-batch's mean and variance (Chan et al., 1979, to avoid cancellation)."""
        count = values.numel() // values.size(1)
        # Half precision is too coarse for statistics over a mini-batch.
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        others = [dimension for dimension in range(values.dim()) if dimension != 1]
        var, mean = torch.var_mean(wide, dim=others, correction=0)
        # At least 1: a batch without samples is none to divide by.
        total, difference = max(1, self._count + count), mean - self._mean
        self._mean = self._mean + difference * (count / total)
        self._scatter = self._scatter + var * count + difference**2 * (self._count * count / total)
        self._count = total
        self._to_come -= 1

    def _commit(self) -> None:
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in (
            (self.running_mean, self._mean),
            # Unbiased, as in nn.BatchNorm.
            (self.running_var, self._scatter / (self._count - 1)),
        ):
            running.lerp_(new.to(running.dtype), factor)
        # Outside a pipeline nobody calls `begin` before the next mini-batch.
        self.begin(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module | DeferredBatchNorm:
        """Replace `nn.BatchNorm1d`, 2d and 3d modules by deferred ones.

        Left unchanged: batch norms without running statistics, which have nothing to defer; `nn.SyncBatchNorm`, which
        gathers its statistics over processes; subclasses that override `forward`. Hooks of replaced modules are lost.

        Args:
            module: changed in place at any depth, unless it is a batch norm itself.

        Returns:
            `module`, or its replacement. Parameters and buffers remain the same objects.

        Raises:
            ValueError: a lazy module has no shape yet.
        """
        replaced: dict[_BatchNorm, DeferredBatchNorm] = {}
        # A list, since the loop changes the tree. With duplicates: a module is replaced at each of its places.
        for name, child in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(child, _BatchNorm) or not _is_plain(child, chunks):
                continue
            # A batch norm at two places stays one module.
            if child not in replaced:
                replaced[child] = cls._in_place_of(child, name, chunks)
            if not name:
                return replaced[child]
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).add_module(last, replaced[child])
        return module

    @classmethod
    def _in_place_of(cls, module: _BatchNorm, name: str, chunks: int) -> DeferredBatchNorm:
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"{name or 'The module'} is a {type(module).__name__} that has not seen an input: run one forward "
                "before it is converted, or give its num_features."
            )
        with torch.device("meta"):  # Tensors are replaced below.
            new = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
        new.weight, new.bias = module.weight, module.bias
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(new, buffer, getattr(module, buffer))
        return new.train(module.training)


def _is_plain(module: _BatchNorm, chunks: int) -> bool:
    if isinstance(module, DeferredBatchNorm):
        return module.chunks != chunks
    # nn.SyncBatchNorm overrides forward.
    return module.track_running_stats and type(module).forward is _BatchNorm.forward


def _drop_sums(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Drop the sums of an unfinished mini-batch, which torchgpipe and `torch.distributed.pipeline` save."""
    for name in ("sum", "sum_squares"):
        state.pop(prefix + name, None)
