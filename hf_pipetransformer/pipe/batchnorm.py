"""Batch normalisation whose running statistics are those of whole mini-batches, though it sees micro-batches."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from hf_pipetransformer.pipe.recomputation import is_recomputing


Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """Normalises each micro-batch by itself, and updates the running statistics once a mini-batch.

    In evaluation mode, and in its state dict, it is `nn.BatchNorm1d`, 2d or 3d. In training mode its running
    statistics become what those of one forward with the whole mini-batch would be; its output is not that one's, for
    a micro-batch is normalised with its own mean and variance. A forward run again for its backward is not counted.

    Args:
        num_features: channels, the second dimension of the input, `(batch, channels, ...)`.
        eps: added to the variance.
        momentum: weight of a mini-batch in the running statistics; None for the mean over all mini-batches.
        affine: whether there are a weight and a bias.
        chunks: micro-batches of a mini-batch. After so many forwards the running statistics are updated, unless
            `begin` has given another number for the mini-batch under way.

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
        """A mini-batch of so many micro-batches comes next; what is left of one that failed is dropped."""
        self._to_come = num_micro_batches
        # Of all values of a channel so far: number, mean, and sum of squared differences from it.
        self._count = 0
        self._mean: Tensor | None = None
        self._scatter: Tensor | None = None

    @property
    def sum(self) -> Tensor:
        """Sum of the values of the mini-batch under way, `(channels,)`."""
        return torch.zeros_like(self.running_mean) if self._mean is None else self._mean * self._count

    @property
    def sum_squares(self) -> Tensor:
        """Sum of the squares of the values of the mini-batch under way, `(channels,)`."""
        if self._mean is None or self._scatter is None:
            return torch.zeros_like(self.running_mean)
        return self._scatter + self._mean**2 * self._count

    def forward(self, input: Tensor) -> Tensor:
        """`(batch, channels, ...)` to the same shape."""
        if not self.training:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(input, mean, var, self.weight, self.bias, training=False, eps=self.eps)
        output = F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if not is_recomputing():
            with torch.no_grad():
                self._track(input.detach())
                if self._to_come == 0:
                    self._commit()
        return output

    def _track(self, values: Tensor) -> None:
        """Merge a micro-batch into what is known of the mini-batch (Chan et al., 1979: nothing large cancels)."""
        count = values.numel() // values.size(1)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        others = [dimension for dimension in range(values.dim()) if dimension != 1]
        var, mean = torch.var_mean(wide, dim=others, correction=0)
        scatter = var * count
        if self._mean is None or self._scatter is None:
            self._count, self._mean, self._scatter = count, mean, scatter
        else:
            total, difference = self._count + count, mean - self._mean
            self._mean = self._mean + difference * (count / total)
            self._scatter = self._scatter + scatter + difference**2 * (self._count * count / total)
            self._count = total
        self._to_come -= 1

    def _commit(self) -> None:
        """Move the running statistics to the mini-batch, as one forward with all of it would."""
        assert self._mean is not None and self._scatter is not None, "a mini-batch has a micro-batch"
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in (
            (self.running_mean, self._mean),
            (self.running_var, self._scatter / (self._count - 1)),
        ):
            running.lerp_(new.to(running.dtype), factor)
        self.begin(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module | DeferredBatchNorm:
        """Put deferred batch normalisation in the place of `nn.BatchNorm1d`, 2d and 3d.

        Others stay as they are: those without running statistics have nothing to defer, `nn.SyncBatchNorm` gathers its
        statistics over processes, and a subclass with a forward of its own would lose it. Hooks of a replaced module
        are left with it.

        Args:
            module: it is changed in place, at any depth, unless it is a batch normalisation itself.
            chunks: micro-batches of a mini-batch.

        Returns:
            `module`, or what replaces it. Parameters and buffers are the same objects as before.

        Raises:
            ValueError: a module is lazy and has no shape yet.
        """
        replaced: dict[_BatchNorm, DeferredBatchNorm] = {}
        for name, child in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(child, _BatchNorm) or not _is_plain(child, chunks):
                continue
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
        with torch.device("meta"):  # Its tensors are replaced at once.
            new = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
        new.weight, new.bias = module.weight, module.bias
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(new, buffer, getattr(module, buffer))
        return new.train(module.training)


def _is_plain(module: _BatchNorm, chunks: int) -> bool:
    """Whether it is to be replaced."""
    if isinstance(module, DeferredBatchNorm):
        return module.chunks != chunks
    # nn.SyncBatchNorm has a forward of its own.
    return module.track_running_stats and type(module).forward is _BatchNorm.forward


def _drop_sums(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """State dicts of torchgpipe and `torch.distributed.pipeline` have the sums of an unfinished mini-batch."""
    for name in ("sum", "sum_squares"):
        state.pop(prefix + name, None)
