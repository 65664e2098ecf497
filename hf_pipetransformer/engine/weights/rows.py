"""Temporary replacement of the current weights by predicted ones, and of autocast's copies of them.

For embeddings only the looked-up rows are predicted, because the forward reads few rows and the backward none. All
other weights are predicted whole. Autograd saves a weight by reference, but autocast's low-precision copy of it by
value, so a backward that must use other weights than its forward has to cast again (`casting_again`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.engine.weights.directions import Buffers, Direction, Part, Tensors


# The nodes of autograd that a saved tensor came through tell which parameter it is a cast of.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Expand", "Permute", "Select", "Slice", "Squeeze", "T", "Transpose", "Unsqueeze"),
        *("UnsafeView", "View", "ReshapeAlias"),
    )
)
_CAST = "ToCopyBackward0"


def is_autocast_on(device_type: str) -> bool:
    return torch.is_autocast_enabled(device_type)


def casting_again(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Make forwards inside save a recipe for each autocast copy of `parameters`; the backward casts again."""
    by_identity = {id(parameter): parameter for parameter in parameters}

    def pack(saved: torch.Tensor) -> torch.Tensor | _Cast:
        parameter = cast_parameter(saved, by_identity)
        if parameter is not None:
            return _Cast(parameter, saved.dtype, saved.size(), saved.stride(), int(saved.storage_offset()))
        # Returning `saved` itself, with its graph, could create a reference cycle and leak memory.
        return saved.detach()

    def unpack(kept: torch.Tensor | _Cast) -> torch.Tensor:
        return kept.again() if isinstance(kept, _Cast) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def cast_parameter(tensor: torch.Tensor, parameters: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Return the one of `parameters` (keyed by `id`) that `tensor` is a cast of, or a view of a cast; else None."""
    node: Any = tensor.grad_fn
    num_casts = 0
    while node is not None and (name := node.name()) in _VIEWS | {_CAST}:
        if name == _CAST:
            num_casts += 1
        elif num_casts:
            return None  # The cast is of a view of the parameter, which `_Cast.again` could not repeat.
        node = node.next_functions[0][0]
    if num_casts != 1 or node is None or not node.name().endswith("AccumulateGrad"):
        return None
    return parameters.get(id(node.variable))


@dataclass(frozen=True)
class _Cast:
    parameter: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def again(self) -> torch.Tensor:
        # The saved tensor was a view of the cast, a transposed one for a linear layer.
        return self.parameter.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


class PredictedWeights:
    """Weights of a stage that can be moved to their predicted values and back.

    An embedding is moved by rows only after it has been called once. Until then it is moved whole, like other weights,
    because a model may read the weight without calling the module (DeBERTa's relative positions do).

    `values` must share the storage of `parameters`, which are in the order of the optimizer's parameter groups.
    """

    def __init__(self, values: Tensors, parameters: Sequence[torch.Tensor], modules: Iterable[nn.Module] = ()) -> None:
        self._values = values
        self.embeddings = find_embeddings(modules, parameters)
        """Embedding modules by parameter index, for the parameters that may be moved by rows."""
        self._called: set[int] = set()
        self._rows = frozenset[int]()
        self.buffers = Buffers(values)
        self._moved: list[tuple[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor]] = []

    @property
    def others(self) -> Tensors:
        """Weights that are never moved by rows."""
        return [value for index, value in enumerate(self._values) if index not in self.embeddings]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record which embeddings are called by forwards inside."""
        with ExitStack() as hooks:
            # Only until the first call, after which its rows are moved and its table is not.
            for index in self.embeddings.keys() - self._called:
                for module in self.embeddings[index]:
                    handle = module.register_forward_hook(partial(self._note, index))
                    hooks.callback(handle.remove)
            yield

    @contextmanager
    def showing(self, direction: Direction, rates: Sequence[float]) -> Iterator[None]:
        """Replace the weights inside by those predicted for the sum of coming learning rates of each group."""
        # Before the copy: new buffers are made if more embeddings are moved by rows now.
        parts = self._whole_parts()
        current = self.buffers.copy()
        with ExitStack() as hooks:
            try:
                direction.go(rates, parts)
                for index in self._rows:
                    for module in self.embeddings[index]:
                        move = partial(self._move_rows, direction, rates, index)
                        before = module.register_forward_pre_hook(move, with_kwargs=True)
                        hooks.callback(before.remove)
                        hooks.callback(module.register_forward_hook(self._move_back).remove)
                yield
            finally:
                self._move_back()  # In case a call raised, which skips its forward hook.
                # torch's multi-tensor operations take no empty lists.
                if parts:
                    torch._foreach_copy_([part.values for part in parts], current)
                self.buffers.give_back(current)

    def _whole_parts(self) -> list[Part]:
        if self._rows != self._called:
            self._rows = frozenset(self._called)
            self.buffers = Buffers([value for i, value in enumerate(self._values) if i not in self._rows])
        return [Part(i, value) for i, value in enumerate(self._values) if i not in self._rows]

    def _note(self, index: int, *_: Any) -> None:
        self._called.add(index)

    def _move_rows(
        self, direction: Direction, rates: Sequence[float], index: int, _: nn.Module, args: Any, kwargs: Any
    ) -> None:
        # Repeated ids are moved repeatedly: `unique` would synchronize with the device.
        value, ids = self._values[index], (args[0] if args else kwargs["input"]).reshape(-1)
        # For as many ids as rows, moving the table is less work.
        if ids.numel() < len(value):
            ids = ids.long()  # `index_copy_` accepts only int64.
            current = value.index_select(0, ids)
            part = Part(index, current.clone(), ids)
            direction.go(rates, [part])
            self._moved.append(((value, ids), current))
            # Ids that come twice write the same values twice.
            value.index_copy_(0, ids, part.values)
        else:
            self._moved.append(((value, None), value.clone()))
            direction.go(rates, [Part(index, value)])

    def _move_back(self, *_: Any) -> None:
        while self._moved:
            (value, ids), current = self._moved.pop()
            if ids is None:
                value.copy_(current)
            else:
                value.index_copy_(0, ids, current)


def find_embeddings(
    modules: Iterable[nn.Module], parameters: Sequence[torch.Tensor]
) -> dict[int, tuple[nn.Embedding, ...]]:
    """Return, by index, the trained parameters that only plain embeddings hold, with these embeddings.

    Plain excludes subclasses and instances with an overridden `forward`, which may read the weight in other ways;
    `max_norm`, which writes to the weight in the forward; and sparse gradients.
    """
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for module in modules:
        for name, own in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(own), []).append((name, module))
    found = {}
    for index, parameter in enumerate(parameters):
        held = holders.get(id(parameter), [])
        embeddings = tuple(m for name, m in held if name == "weight" and isinstance(m, nn.Embedding) and _is_plain(m))
        # A table that another module holds too, such as a tied head, is read whole there.
        if embeddings and len(embeddings) == len(held) and parameter.requires_grad and parameter.is_contiguous():
            found[index] = embeddings
    return found


def _is_plain(module: nn.Embedding) -> bool:
    is_own = type(module) is nn.Embedding and "forward" not in vars(module)
    return is_own and module.max_norm is None and not module.sparse
