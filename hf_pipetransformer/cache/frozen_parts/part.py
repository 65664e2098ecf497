"""A frozen part of a model: its forward looks up what it has computed before, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_pipetransformer.cache.frozen_parts.values import NotStorableError, Rows, no_row_each, rebuilt, tensors_of
from hf_pipetransformer.engine.effects import Draws, draw


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array
    from hf_pipetransformer.cache.frozen_parts.contents import ContentStore


@dataclass(frozen=True)
class Pick:
    """An output tensor of a part that the model reads: all of it, or of each row the first position alone."""

    number: int
    is_first: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, 0] if self.is_first else tensor


@dataclass(frozen=True)
class Reading:
    """Outputs of a part that the model reads, and so the content of a record.

    Args:
        picks: the output tensors that are read, in their order.
        cuts_padding: True if what lies beyond a row's last real token may be zero.
        of_tokens: output tensors whose second dimension is the padded length of the call, or that have the patches of
            one row behind those of the other.
        share: how many patches of such a call have one entry in outputs that are read; 1 otherwise.
        is_whole: True if the picks are all output tensors, as wholes, but for those that are handed on.
        does_for_evaluations: True if the model's outputs, too, are the same in evaluation mode.
        does_for_losses: True if at least the loss is the same in evaluation mode.
        handed_on: pairs of an output and the input that it is.
    """

    picks: tuple[Pick, ...]
    cuts_padding: bool = True
    of_tokens: frozenset[int] = frozenset()
    share: int = 1
    is_whole: bool = False
    does_for_evaluations: bool = False
    does_for_losses: bool = False
    handed_on: tuple[tuple[int, int], ...] = ()

    @property
    def is_by_token(self) -> bool:
        """True if records have one entry a token, up to the last real one."""
        has_tokens = [pick.number in self.of_tokens and not pick.is_first for pick in self.picks]
        return self.cuts_padding and bool(has_tokens) and all(has_tokens)

    @property
    def is_complete(self) -> bool:
        """True if records hold all of the outputs."""
        return self.is_whole and not self.is_by_token

    def lengths(self, rows: Rows) -> Array:
        """Return the tokens of each row's record `(rows,)`, if records have tokens."""
        assert rows.lengths is not None
        found: Array = rows.lengths // self.share
        return found

    def records(self, leaves: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
        """Return the records `(rows, tokens, values)` of output tensors; without tokens a row's values are in a line.

        Raises:
            NotStorableError: the tensors do not have a row for each row of the call, or differ in dtype.
        """
        read = [pick.of(leaves[pick.number]) for pick in self.picks]
        own = self.share if rows.is_flat else 0
        if any(rows.share_of(each) != own or not (own or each.shape[:1] == (rows.number,)) for each in read):
            raise NotStorableError(no_row_each(read, rows.number))
        kinds = {each.dtype for each in read if each.is_floating_point()}
        stored = [each.to(next(iter(kinds), torch.float32)) for each in read]
        # Masks and small whole numbers are stored among the others.
        if len(kinds) != 1 or any(
            not torch.equal(a.to(b.dtype), b) for a, b in zip(stored, read, strict=True) if not b.is_floating_point()
        ):
            names = ", ".join(sorted({str(each.dtype) for each in read}))
            raise NotStorableError(f"gives outputs of {names}, expected one kind of floating point numbers")
        if rows.is_flat:
            sizes = self.lengths(rows).tolist()
            whole = torch.cat([each.reshape(each.shape[0], -1) for each in stored], dim=1)
            # The store takes records padded to one length, and the length of each beside them.
            return nn.utils.rnn.pad_sequence(whole.split(sizes), batch_first=True)
        if self.is_by_token:
            return torch.cat([each.reshape(rows.number, rows.length, -1) for each in stored], dim=2)
        return torch.cat([each.reshape(rows.number, -1) for each in stored], dim=1)[:, :, None]


class Template:
    """Shape of a part's outputs for calls of one kind, from which those of any number of rows are put together."""

    def __init__(self, output: Any, reading: Reading, rows: Rows, num_draws: int = 0) -> None:
        self.num_draws = num_draws
        """Random numbers that the call took."""
        leaves = tensors_of(output)
        # The containers are kept, but no tensor of the call.
        self._output = rebuilt(output, lambda tensor: tensor.detach().new_empty(0))
        self._reading = reading
        # One row says shape, dtype and device of any number of rows.
        self._likes = [leaf.detach()[:1].clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        self._shares = [rows.share_of(leaf) for leaf in leaves]
        self._num_values = reading.records(leaves, rows).shape[1]

    def num_tokens(self, rows: Rows) -> int:
        """Return the tokens of a record for a call, or the values of one without tokens."""
        return rows.length // self._reading.share if self._reading.is_by_token else self._num_values

    def filled(self, records: torch.Tensor, rows: Rows) -> Any:
        """Return outputs for `records` `(rows, tokens, values)` of a call.

        What is not read is nan, so that whoever reads it shows.
        """
        given = {output: rows.tensors[source] for output, source in self._reading.handed_on}
        picks = {pick.number: pick for pick in self._reading.picks}
        if rows.is_flat:
            lengths = self._reading.lengths(rows).tolist()
            records = torch.cat([record[:length] for record, length in zip(records, lengths, strict=True)])
        elif not self._reading.is_by_token:
            records = records.reshape(len(records), -1)
        found, start = list[torch.Tensor](), 0
        for number, like in enumerate(self._likes):
            # This output is an input of the call, which the present call has.
            if number in given:
                found.append(given[number])
                continue
            shape, pick = self._shape(number, rows), picks.get(number)
            # One element, expanded: what nobody reads takes no memory.
            values = like.new_full((), math.nan).expand(shape)
            if pick is not None:
                own_shape = [shape[0], *shape[2:]] if pick.is_first else shape
                size = math.prod(own_shape[records.dim() - 1 :])
                own = records[..., start : start + size].to(like).reshape(own_shape)
                start += size
                if pick.is_first:
                    values = like.new_full(shape, math.nan)
                    values[:, 0] = own
                else:
                    values = own
            # As the part's own output did, in case that the code above asks.
            found.append(values.requires_grad_() if like.requires_grad else values)
        following = iter(found)
        return rebuilt(self._output, lambda _: next(following))

    def _shape(self, number: int, rows: Rows) -> list[int]:
        shape, share = [rows.number, *self._likes[number].shape[1:]], self._shares[number]
        if share:
            shape[0] = int(rows.tensors[0].shape[0]) // share
        elif number in self._reading.of_tokens and rows.length:
            shape[1] = rows.length
        return shape


@dataclass
class Counts:
    """Rows of the calls of a part, found or computed."""

    hits: int = 0
    misses: int = 0


class FrozenPart:
    """A module without trained parameters; while it replaces its forward, that is looked up row by row.

    Args:
        name: path of the module in the model.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.modules = nn.ModuleList([module])
        """All modules that the part consists of."""
        self.unread: list[torch.Tensor] = []
        """Outputs, all nan, that the model got last instead of ones that no record has."""
        self.in_evaluation = False
        """True to run it in evaluation mode, without dropout."""
        self.draws = False
        """True if it draws random numbers that change nothing."""
        self.is_read_as_tried: Callable[[], bool] = lambda: True
        """Says if what calls the model reads no more of its outputs than was seen; others get all of them."""
        self.forms: set[str] = set()
        """Of the calls that were tried."""
        self.num_outputs = 0
        self.shares: list[int] = []
        """How many patches of a call have one entry in each output, see `Rows.share_of`."""
        self.reading = Reading(())
        self.store: ContentStore | None = None
        self.counts = Counts()
        self._forward = module.forward
        self._templates: dict[bytes, Template] = {}

    @property
    def key(self) -> str:
        """Properties of the part that its records depend on besides weights and inputs, as text."""
        return f"{self.name} {self.reading} {self.in_evaluation}"

    @property
    def description(self) -> str:
        """Properties that processes have to agree on to share records, as text."""
        # Without `cuts_padding`, on which they agree by what each of them has seen.
        return f"{replace(self.reading, cuts_padding=True)} {self.in_evaluation} {self.draws}"

    def begin(self) -> None:
        """Look up in calls of the module from here on."""
        self.module.forward = self

    def end(self) -> None:
        """Let the module run its own forward again."""
        del self.module.forward

    def replaced(self, forward: Callable[..., Any]) -> AbstractContextManager[None]:
        """Let the model get inside what `forward` returns for calls of the part."""
        return forward_replaced(self.module, forward)

    def computed(self) -> AbstractContextManager[None]:
        """Let the model compute inside, in evaluation mode if the part is to be without dropout."""
        return self.replaced(lambda *args, **kwargs: self.compute(args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model its own forward: a callback may keep an average of the weights."""
        return own_forward(memo[id(self.module)])

    def compute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward, in evaluation mode if it is to be without dropout."""
        with self._in_mode():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _in_mode(self) -> Iterator[None]:
        # Flag by flag: `train()` would reach modules that the script has put into evaluation mode.
        training = [module for module in self.modules.modules() if module.training] if self.in_evaluation else []
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, those of rows that were stored from their records."""
        found = self.found(args, kwargs)
        return self.compute(args, kwargs) if found is None else found

    def found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call gives, with rows from their records; None if such calls are not looked up."""
        try:
            rows = Rows.of(args, kwargs, self.reading.cuts_padding)
            is_as_tried = self.is_read_as_tried() and rows.form in self.forms
            is_enough = self.reading.is_complete or is_as_tried
            if self.store is not None and not self.store.is_off and rows.number and is_enough:
                return self._looked_up(rows, self.store)
        # Another kind of call than those that were tried.
        except NotStorableError:
            pass
        return None

    def _looked_up(self, rows: Rows, store: ContentStore) -> Any:
        salt = _precision()
        digests = rows.digests(salt)
        # In training mode a module may return other outputs than in evaluation mode.
        places, kind = store.find(digests), salt + rows.kind + bytes([self.module.training])
        template, is_hit, records = self._templates.get(kind), places >= 0, None
        if template is not None and is_hit.any():
            records = store.read(places[is_hit], template.num_tokens(rows))
        if template is None or records is None:
            with Draws() if self.draws else nullcontext() as draws:
                output = self.compute(*rows.given)
            # Other outputs than those of the trial, for which there is no record.
            if len(tensors_of(output)) != self.num_outputs:
                return output
            try:
                self._templates[kind] = Template(output, self.reading, rows, draws.number if draws else 0)
                self._write(store, rows, output, digests)
            # Not computed a second time: it may have drawn random numbers.
            except NotStorableError:
                return output
            self.counts.misses += rows.number
            return output
        self.counts.hits += int(is_hit.sum())
        self.counts.misses += int((~is_hit).sum())
        if not is_hit.all():
            missing = np.flatnonzero(~is_hit)
            given = rows.take(missing)
            some = Rows.of(*given, self.reading.cuts_padding)
            new = self._write(store, some, self.compute(*given), digests[missing])
            # Computed by themselves, the missing rows may be shorter than the longest one found.
            whole = new.new_zeros(rows.number, records.shape[1], new.shape[2])
            whole[torch.from_numpy(is_hit)] = records.to(new)
            whole[torch.from_numpy(~is_hit), : new.shape[1]] = new
            records = whole
        else:
            # As many numbers as the part would have taken, so that what draws next draws as in Trainer.
            draw(template.num_draws)
        return template.filled(records, rows)

    def _write(self, store: ContentStore, rows: Rows, output: Any, digests: Array) -> torch.Tensor:
        """Store the records of computed outputs, and return them."""
        leaves = tensors_of(output)
        records = self.reading.records(leaves, rows).detach()
        by_token = self.reading.is_by_token
        lengths = self.reading.lengths(rows) if by_token else np.full(rows.number, records.shape[1])
        store.write(digests, records.cpu(), lengths)
        return records


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a module run `forward` inside."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def own_forward(module: nn.Module) -> Any:
    """Return the forward of a module's class."""
    return MethodType(type(module).forward, module)


def _precision() -> bytes:
    """Return the autocast setting of the present call, by whose change outputs change."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    is_on = torch.is_autocast_enabled(device)
    return f"{device} {torch.get_autocast_dtype(device)}".encode() if is_on else b""
