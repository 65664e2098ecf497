"""A call of a frozen part: what it was called with, and its outputs, which are computed or read when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from hf_pipetransformer.cache.frozen_parts.state import nothing_collected
from hf_pipetransformer.cache.frozen_parts.values import (
    NotStorableError,
    Rows,
    no_row_each,
    rebuilt,
    tensors_of,
    version_of,
)
from hf_pipetransformer.data.rng import generators_kept


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array
    from hf_pipetransformer.cache.frozen_parts.part import FrozenPart


NUM_TRIED = 4
"""Rows of a call that a part is tried on."""


@dataclass(frozen=True)
class Modes:
    """Modes of torch in which a call computes."""

    has_gradients: bool
    is_inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def present(cls) -> Modes:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        autocast = tuple((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def entered(self, has_gradients: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            for device, is_on, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on))
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_gradients and has_gradients))
            yield

    @property
    def precision(self) -> bytes:
        """The autocast setting, by whose change outputs change."""
        return " ".join(f"{device} {dtype}" for device, is_on, dtype in self.autocast if is_on).encode()


class PartCall:
    """Call of a frozen part, of which nothing is computed yet."""

    def __init__(
        self, part: FrozenPart, rows: Rows, modes: Modes, values: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.part, self.rows, self.modes = part, rows, modes
        self.notes: dict[int, bool] = {}
        """Outputs that were used, each with True if that was the first position of each row alone."""
        self.keys: Array = np.empty((0, 2), np.uint64)
        self.template: Template
        """Form of the outputs, set before one is asked for."""
        self.state, self.marks = b"", list[tuple[int, int]]()
        """Of the part, and of its weights, when it was called."""
        self._values = None if values is None else list(values)
        self._found: dict[int, torch.Tensor] | None = None
        self.counted = 0, 0
        """Rows that were read and computed, as the records have counted them."""
        self._versions = [version_of_given(each) for each in rows.tensors]

    @property
    def inputs(self) -> list[Deferred]:
        """Arguments that are outputs of other calls."""
        return [each for each in self.rows.tensors if type(each) is Deferred]

    @property
    def is_given(self) -> bool:
        """False if it was called with a field of samples that are left unread."""
        return all(each.call.is_given for each in self.inputs)

    @property
    def has_written_inputs(self) -> bool:
        """True if an argument was written into since the call."""
        return [version_of_given(each) for each in self.rows.tensors] != self._versions

    @property
    def chain(self) -> list[PartCall]:
        """Calls that this one computes from, in their order, and itself."""
        found: dict[int, PartCall] = {}
        for each in self.inputs:
            found.update((id(call), call) for call in each.call.chain)
        return [*found.values(), self]

    def note(self, number: int, is_first: bool = False) -> None:
        self.notes[number] = self.notes.get(number, True) and is_first

    def value(self, number: int, first: bool = False) -> torch.Tensor:
        """Return an output, of each row the first position alone if asked: read, or else computed."""
        records = self.part.records
        if self._values is None and records is not None:
            pick = records.reading.pick(number)
            if pick is None or (pick.is_first and not first):
                self.part.step.reads_beyond.add(self.part.name)
            elif (found := self.found()) is not None:
                whole = found[number]
                return whole[:, 0] if first and not pick.is_first else whole
        whole = self.values()[number]
        return whole[:, 0] if first else whole

    def found(self) -> dict[int, torch.Tensor] | None:
        """Return the outputs that records have, by number; None if they are to be computed."""
        if self._found is None and self.part.records is not None:
            self._found = self.part.records.found(self)
        return self._found

    @property
    def is_read(self) -> bool:
        """True if records had what is read of the outputs, so that the call computed nothing by itself."""
        return self._found is not None and self._values is None

    def read(self) -> dict[int, torch.Tensor]:
        """Read what records have, or compute; return the whole outputs that others than frozen parts read."""
        found = self.found() if self._values is None else None
        records, values = self.part.records, self.values() if found is None else found
        if records is None or self.part.feeds_parts:
            return {}
        return {pick.number: values[pick.number] for pick in records.reading.picks if not pick.is_first}

    def values(self) -> list[torch.Tensor]:
        """Compute all outputs, in the modes of the call.

        Raises:
            RuntimeError: an argument or the part has changed since the call.
        """
        if self._values is None:
            if self.has_written_inputs or self.part.has_changed_since(self):
                raise RuntimeError(
                    f"{self.part.name} was changed, or a tensor that it was called with, before an output of the "
                    "call that no record has was read for the first time. Set activation_cache='off'."
                )
            with self.modes.entered():
                self.compute()
            self.keep()
        assert self._values is not None
        return self._values

    def compute(self) -> tuple[Any, list[torch.Tensor]]:
        """Compute the outputs, as the module gives them and in a list."""
        args, kwargs = undeferred(self.rows.given[0]), undeferred(self.rows.given[1])
        asking = self.part.asks_for_gradients
        # Gradients that reach nothing are asked of what comes out alone. A layer in which outputs are used first, and
        # which is computed again in the backward, then keeps as many tensors each time, read or computed.
        # Code of the script's may take gradients inside.
        with nullcontext() if self.part.state.is_of_script else torch.no_grad():
            output = self.part.compute(args, kwargs)
        self._values = values = [each.detach() if each.requires_grad else each for each in tensors_of(output)]
        for number in asking if torch.is_grad_enabled() else ():
            values[number].requires_grad_()
        return output, values

    def keep(self) -> None:
        """Store the outputs, once they are computed, if they are to be stored."""
        if self.part.records is not None:
            self.part.records.keep(self, self.values())

    def arguments(
        self, rows: Array, length: int | None = None, known: dict[int, list[torch.Tensor]] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for some rows, those that are outputs of other calls computed; see `computed`."""
        outputs = {} if known is None else known

        def replaced(tensor: torch.Tensor) -> torch.Tensor | None:
            if type(tensor) is not Deferred:
                return None
            output: torch.Tensor = tensor.call.output_of(tensor.number, rows, length, outputs)
            return output

        return self.rows.take(rows, length, replaced)

    def computed(
        self, rows: Array, length: int | None = None, known: dict[int, list[torch.Tensor]] | None = None
    ) -> list[torch.Tensor]:
        """Compute the outputs of some rows alone, cut to a length if one is given, without a trace in generators.

        `known` has those of other calls by the `id` of these, and gets what is computed.
        """
        outputs = {} if known is None else known
        if id(self) not in outputs:
            with generators_kept(), nothing_collected(), self.modes.entered(has_gradients=False):
                outputs[id(self)] = tensors_of(self.part.compute(*self.arguments(rows, length, outputs)))
        return outputs[id(self)]

    def output_of(
        self, number: int, rows: Array, length: int | None, known: dict[int, list[torch.Tensor]]
    ) -> torch.Tensor:
        """Return an output of some rows, see `computed`."""
        if self._values is not None and length is None:
            return self.rows.rows_of(self._values[number], rows)
        return self.computed(rows, length, known)[number]

    def moved(self, number: int, device: torch.device) -> Deferred | None:
        """Return an output, deferred, on another device; None, as it is computed to be moved."""
        return None

    def sample(self, most: int = NUM_TRIED) -> PartCall:
        """Return a call with copies of a few rows for later."""
        return self.some(self.rows.few(most))

    def some(self, chosen: Array) -> PartCall:
        """Return a call with copies of some rows."""

        def replaced(tensor: torch.Tensor) -> torch.Tensor | None:
            if type(tensor) is not Deferred:
                return None
            return Deferred(tensor.call.some(chosen), tensor.number, [len(chosen), *tensor.shape[1:]], tensor)

        found = PartCall(self.part, self.rows.copied(chosen, replaced), self.modes)
        found.notes, found.template = self.notes, self.template
        found.state, found.marks = self.state, self.marks
        found.keys = self.keys[chosen] if len(self.keys) else self.keys
        return found


class Template:
    """Form of a part's outputs in calls of one kind.

    Args:
        of_tokens: outputs whose second dimension is the padded length of the call.
    """

    def __init__(self, output: Any, rows: Rows, of_tokens: frozenset[int] = frozenset(), num_draws: int = 0) -> None:
        self.num_draws = num_draws
        """Random numbers that the call took."""
        self._of_tokens = of_tokens
        leaves = tensors_of(output)
        given = {id(tensor): number for number, tensor in enumerate(rows.tensors)}
        # By identity, because an output that is computed may equal an input by chance.
        self._given = [given.get(id(leaf)) for leaf in leaves]
        self._first = [next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves]
        """Of outputs that are one tensor under several names, the number of the first."""
        self.shares = [rows.share_of(leaf) for leaf in leaves]
        if any(
            not (share or of_call is not None or leaf.shape[:1] == (rows.number,))
            for leaf, share, of_call in zip(leaves, self.shares, self._given, strict=True)
        ):
            raise NotStorableError(no_row_each(leaves, rows.number))
        # The containers and what is no tensor are kept, but no tensor of the call.
        self._output = rebuilt(output, lambda tensor: tensor.detach().new_empty(0))
        self._frame = _frame_of(output)
        # As the part's own output did, an output may ask for gradients that nobody needs.
        self.likes = [leaf.detach()[:0].clone().requires_grad_(leaf.requires_grad) for leaf in leaves]

    def is_of(self, output: Any, rows: Rows) -> bool:
        """Return True if outputs that were computed are what this form promises."""
        leaves = tensors_of(output)
        if len(leaves) != len(self.likes) or _frame_of(output) != self._frame:
            return False
        given = [None if number is None else rows.tensors[number] for number in self._given]
        return all(
            (leaf is argument) if argument is not None else list(leaf.shape) == self.shape(number, rows)
            for number, (leaf, argument) in enumerate(zip(leaves, given, strict=True))
        )

    def shape(self, number: int, rows: Rows) -> list[int]:
        """Return the shape of an output."""
        share, first = self.shares[number], rows.number
        if share and rows.lengths is not None:
            first = int(rows.lengths.sum()) // share
        shape = [first, *self.likes[number].shape[1:]]
        if number in self._of_tokens:
            shape[1] = rows.length
        return shape

    def output(self, call: PartCall, known: Mapping[int, torch.Tensor] | None = None) -> Any:
        """Return the outputs of a call, deferred but for those that are its arguments or are `known`, by number."""
        numbers, made = iter(self._first), dict[int, torch.Tensor](known or {})

        def leaf(_: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            given = self._given[number]
            if given is not None:
                return call.rows.tensors[given]
            if number not in made:
                made[number] = Deferred(call, number, self.shape(number, call.rows), self.likes[number])
            return made[number]

        return rebuilt(self._output, leaf)


def _frame_of(output: Any) -> str:
    """Return the form of an output with what is no tensor, as text."""
    return repr(rebuilt(output, lambda _: torch.empty(0)))


def version_of_given(tensor: torch.Tensor) -> int:
    """Return the version of an argument, which a deferred one has not."""
    return 0 if type(tensor) is Deferred else version_of(tensor)


_ATTRIBUTES = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "itemsize", "names"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_nested", "is_quantized", "is_sparse", "nbytes"),
)
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "__hash__")
_OF_THE_FORM = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)}
_OF_THE_FORM |= {getattr(torch.Tensor, name) for name in _METHODS}
"""Functions of a tensor that need no value of it."""


class Deferred(torch.Tensor):
    """Output `number` of a call of a frozen part: a tensor without values until other code than frozen parts uses it.

    What then is used in its place, in this use and in all later ones, is one ordinary tensor. A field of a batch whose
    samples are left unread is one, too.
    """

    call: Any
    """A `PartCall`, or an `unread.FieldRead`."""
    number: int

    @staticmethod
    def __new__(cls, call: Any, number: int, shape: torch.Size | list[int], like: torch.Tensor) -> Deferred:
        found: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        found.call, found.number = call, number
        return found

    def value(self, first: bool = False) -> torch.Tensor:
        """Return the tensor, or of each row the first position alone."""
        found: torch.Tensor = self.call.value(self.number, first)
        return found

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and type(args[0]) is Deferred and _is_first(args[1], args[0].dim()):
            args[0].call.note(args[0].number, is_first=True)
            return args[0].value(first=True)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (torch.Tensor.to, torch.Tensor.type) and type(args[0]) is Deferred:
            converted = _converted(func is torch.Tensor.to, *args, **(kwargs or {}))
            if converted is not None:
                return converted
        return _used(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _used(func, args, kwargs)


def _used(func: Any, args: Any, kwargs: Any) -> Any:
    def value(given: Any) -> Any:
        if type(given) is not Deferred:
            return given
        given.call.note(given.number)
        return given.value()

    args, kwargs = tree_map(value, (args, kwargs or {}))
    return func(*args, **kwargs)


def _converted(is_to: bool, tensor: Deferred, *args: Any, **kwargs: Any) -> Deferred | None:
    """Return a tensor that is deferred as well for `to`, or else `type`; None if that takes values."""
    is_like = any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values()))
    copies = kwargs.pop("copy", False) or sum(isinstance(each, bool) for each in args) > 1
    if copies or is_like or not (is_to or [type(each) for each in args] == [torch.dtype]):
        return None
    device, dtype, _, form = torch._C._nn._parse_to(*args, **kwargs)
    if dtype not in (None, tensor.dtype) or form is not None:
        return None
    if device is None or device == tensor.device or (device.type, device.index) == (tensor.device.type, None):
        return tensor
    return tensor.call.moved(tensor.number, device)


def _is_first(index: Any, dims: int) -> bool:
    """Return True for `[:, 0]` of a tensor with more dimensions than two."""
    if dims < 3 or type(index) is not tuple or len(index) < 2 or type(index[1]) is not int or index[1] != 0:
        return False
    return all(type(each) is slice and each == slice(None) for place, each in enumerate(index) if place != 1)


def undeferred(value: Any) -> Any:
    """Return a value of tensors with ordinary ones in place of those that are deferred, whose use is not noted."""
    return rebuilt(value, lambda tensor: tensor.value() if type(tensor) is Deferred else tensor)
