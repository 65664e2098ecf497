"""A tower and the frozen module that alone reads it, such as a connector: what the second makes of it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, forward_replaced, own_forward
from hf_pipetransformer.cache.frozen_parts.values import (
    NotStorableError,
    Rows,
    form_of,
    no_row_each,
    rebuilt,
    tensors_of,
)


class ChainedPart(FrozenPart):
    """Two modules without trained parameters, the second of which takes outputs of the first and nothing else.

    A call of the first looks up what the second gives. Then it returns nan, so that whoever else reads it shows, and
    the second gives what was found.

    Args:
        name: path of the second in the model.
        given: positional and keyword arguments of its call.
        numbers: which output of the first each tensor in them is.
    """

    def __init__(
        self, first: FrozenPart, name: str, second: nn.Module, given: Sequence[Any], numbers: Sequence[int]
    ) -> None:
        super().__init__(f"{first.name} with {name}", first.module)
        self.modules = nn.ModuleList([first.module, second])
        self.in_evaluation = first.in_evaluation
        self._second = second
        self._own_of_second = second.forward
        self._following = _Following(self)
        self._given, self._numbers = given, numbers
        self._asked = _form(given)
        self._likes: dict[bytes, tuple[Any, list[torch.Tensor]]] = {}
        """Outputs of the first module for calls of one kind: all but tensors, and a row of each tensor."""
        self._waiting: Any = None
        """What the second module gives when it gets `unread`; None if it has to compute."""

    @property
    def key(self) -> str:
        return f"{super().key} {self._asked}"

    def begin(self) -> None:
        super().begin()
        self._second.forward = self._following

    def end(self) -> None:
        super().end()
        del self._second.forward

    @contextmanager
    def replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Let the second module return inside what `forward` returns for a call of the first, which returns nan."""

        def first(*args: Any, **kwargs: Any) -> Any:
            return self._returned(Rows.of(args, kwargs), forward(*args, **kwargs))

        with forward_replaced(self.module, first), forward_replaced(self._second, self._following):
            yield

    @contextmanager
    def computed(self) -> Iterator[None]:
        def computing(own: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self._in_mode():
                    return own(*args, **kwargs)

            return run

        first, second = computing(self._forward), computing(self._own_of_second)
        with forward_replaced(self.module, first), forward_replaced(self._second, second):
            yield

    def compute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the second module makes of the first one's outputs."""
        rows = Rows.of(args, kwargs)
        with self._in_mode():
            output = self._forward(*args, **kwargs)
            leaves = tensors_of(output)
            # `_returned` makes the outputs for any number of rows from a single one.
            if any(leaf.shape[:1] != (rows.number,) for leaf in leaves):
                raise NotStorableError(no_row_each(leaves, rows.number))
            empty = rebuilt(output, lambda tensor: tensor.detach().new_empty(0))
            self._likes[rows.kind] = empty, [leaf.detach()[:1].clone() for leaf in leaves]
            numbers = iter(self._numbers)
            own_args, own_kwargs = rebuilt(self._given, lambda _: leaves[next(numbers)])
            return self._own_of_second(*own_args, **own_kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return outputs of the first module: nan, if what the second makes of them is known."""
        found = self.found(args, kwargs)
        if found is not None:
            return self._returned(Rows.of(args, kwargs), found)
        # What the second module gets now are real outputs, from which it has to compute.
        self._waiting = None
        with self._in_mode():
            return self._forward(*args, **kwargs)

    def follow(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the second module gives."""
        # For one call only: the next one of the second module may belong to other rows.
        waiting, self._waiting = self._waiting, None
        # Of other arguments than in the trial it makes something else: nan, where the first gave nan.
        if waiting is not None and _form([list(args), dict(kwargs)]) == self._asked:
            # Known by their memory, since all of them are nan.
            unread = {each.untyped_storage().data_ptr() for each in self.unread}
            if all(each.untyped_storage().data_ptr() in unread for each in tensors_of([args, kwargs])):
                return waiting
        with self._in_mode():
            return self._own_of_second(*args, **kwargs)

    def _returned(self, rows: Rows, found: Any) -> Any:
        empty, likes = self._likes[rows.kind]
        self.unread = [like.new_full((), math.nan).expand(rows.number, *like.shape[1:]) for like in likes]
        following, self._waiting = iter(self.unread), found
        return rebuilt(empty, lambda _: next(following))


class _Following:
    """Forward of the second module while the first one is looked up."""

    def __init__(self, part: ChainedPart) -> None:
        self._part = part

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._part.follow(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return own_forward(memo[id(self._part.modules[1])])


def _form(given: Any) -> str:
    """Return arguments as text, without what is in their tensors; of what cannot be stored, what it is."""
    try:
        return form_of(given)
    except NotStorableError as error:
        return str(error)


def numbers_of(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int] | None:
    """Return which of the outputs each tensor is; None if there are none, or others."""

    def place(value: torch.Tensor) -> tuple[Any, ...]:
        # By memory and layout, because the model's code may have made another view of the same values.
        return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride()

    places = [place(each) for each in outputs]
    if not tensors or any(place(each) not in places for each in tensors):
        return None
    return [places.index(place(each)) for each in tensors]
