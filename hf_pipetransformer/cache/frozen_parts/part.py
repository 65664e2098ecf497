"""A frozen part of a model: a module without trained parameters, whose calls are watched, deferred or read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pipetransformer.cache.frozen_parts.call import Deferred, Modes, PartCall, Template, undeferred
from hf_pipetransformer.cache.frozen_parts.state import ModuleState, collected
from hf_pipetransformer.cache.frozen_parts.values import (
    MASKS,
    NotStorableError,
    Rows,
    lengths_of_mask,
    rebuilt,
    version_of,
)
from hf_pipetransformer.data.effects import Draws, draw, modes_kept
from hf_pipetransformer.data.rng import random_state, same_states
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array
    from hf_pipetransformer.cache.frozen_parts.served import Records


class PresentStep:
    """Facts of the step in progress that the parts of a model share: its batch, and how it is used.

    Args:
        model: whose parameters and buffers belong to no row of a batch.
        sends_buffers: True if buffers are written anew in every forward, as DistributedDataParallel does.
        defers: False if outputs are read or computed at once, as compiled code needs them.
        reads_at_random: True if random numbers were drawn while samples were read.
        keys_of_read: gives the keys of the rows of a tensor that were taken when it was read.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sends_buffers: bool = False,
        defers: bool = True,
        reads_at_random: bool = False,
        keys_of_read: Callable[[torch.Tensor], Array | None] = lambda _: None,
    ) -> None:
        self._model, self.device, self.sends_buffers, self.defers = model, device, sends_buffers, defers
        self.reads_at_random, self.keys_of_read = reads_at_random, keys_of_read
        self._memory_of_model: frozenset[int] | None = None
        self._of_batch = set[int]()
        self._shapes: dict[str, set[torch.Size]] = {}
        self._lengths: dict[int, Array] = {}
        self.reads_beyond = set[str]()
        """Names of parts of which the step used outputs that no record has."""
        self.evaluates = self.generates = self.reads_loss_alone = False
        self.fills = False
        """True while no record is read: outputs are computed where a part is called, so that their form shows."""

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Note the tensors of a batch."""
        self._shapes, self._of_batch, self._lengths = {}, set(), {}
        self._memory_of_model = None
        self.add(batch)
        self._state = random_state(self.device)
        self.reads_beyond.clear()

    def add(self, batch: Mapping[str, Any]) -> None:
        """Note more tensors of the batch in progress."""
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                self._shapes.setdefault(name, set()).add(value.shape)
        self.note(batch)

    def note(self, given: Mapping[str, Any]) -> None:
        """Note what the model is called with: the batch, copies of it (DistributedDataParallel), or more."""
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        own = (value for name, value in tensors.items() if value.shape in self._shapes.get(name, ()))
        self._of_batch.update(map(memory_of, own))
        for name, of_mask in MASKS.items():
            tokens, mask = tensors.get(name), tensors.get(of_mask)
            if tokens is not None and mask is not None and mask.dim() == 2 and tokens.shape[:2] == mask.shape:
                self._lengths[memory_of(tokens)] = lengths_of_mask(mask)

    @property
    def has_drawn(self) -> bool:
        """True if random numbers were drawn since the step began."""
        return not same_states(random_state(self.device), self._state)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor that is of the batch or of the model, not made on the way."""
        return type(tensor) is Deferred or memory_of(tensor) in self._of_batch or self._is_of_model(tensor)

    def _is_of_model(self, tensor: torch.Tensor) -> bool:
        if self._memory_of_model is None:
            # Once a step, if at all: walking through a model takes a millisecond.
            weights = (*self._model.parameters(), *self._model.buffers())
            self._memory_of_model = frozenset(map(memory_of, weights))
        return memory_of(tensor) in self._memory_of_model

    def rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows:
        """Return a call's arguments row by row; raises like `Rows.of`."""

        def is_whole(tensor: torch.Tensor) -> bool:
            is_given = type(tensor) is Deferred or memory_of(tensor) in self._of_batch
            return not is_given and self._is_of_model(tensor)

        rows = Rows.of(args, kwargs, self.lengths_of, is_whole)
        if any(type(each) is Deferred and each.call.rows.number != rows.number for each in rows.tensors):
            raise NotStorableError("takes outputs of other frozen parts that have other rows")
        return rows

    def keys_of(self, tensor: torch.Tensor, is_whole: bool) -> Array | None:
        """Return the keys of the rows of a tensor where they are known; `is_whole` if rows are hashed as a whole."""
        if type(tensor) is Deferred and isinstance(tensor.call, PartCall):
            keys: Array = tensor.call.keys.copy()
            # Keys are 128 random bits: another number makes other bits.
            keys[:, 0] += tensor.number
            return keys
        if not is_whole:
            return None
        return tensor.call.keys_as_read() if type(tensor) is Deferred else self.keys_of_read(tensor)

    def lengths_of(self, tensor: torch.Tensor) -> Array | None:
        if type(tensor) is Deferred:
            return None if tensor.call.rows.is_flat else tensor.call.rows.lengths
        return self._lengths.get(memory_of(tensor))


class FrozenPart:
    """A module without trained parameters; inside `standing_in`, calls of it come here.

    Args:
        name: path of the module in the model.
        watch: gets the calls of a part that nothing is known of yet, and returns their outputs.
    """

    def __init__(
        self, name: str, module: nn.Module, step: PresentStep, watch: Callable[[FrozenPart, Any, Any], Any]
    ) -> None:
        self.name, self.module, self.step = name, module, step
        self.watch: Callable[[FrozenPart, Any, Any], Any] | None = watch
        self.in_evaluation = False
        """True to run it in evaluation mode, without dropout."""
        self.asks_for_gradients = frozenset[int]()
        """Outputs that ask for gradients, which reach no parameter."""
        self.draws = False
        """True if it draws random numbers that change nothing."""
        self.records: Records | None = None
        """Of a part whose outputs are stored; others are computed when they are used."""
        self.feeds_parts = False
        """True if outputs are read by other parts that are looked up."""
        self.cuts_padding = False
        """True if a row's outputs depend on nothing behind its last real token."""
        self.of_tokens = frozenset[int]()
        """Outputs whose second dimension is the padded length of a call."""
        self.weights_changed: Callable[[], None] = lambda: None
        self._own = module.forward
        self.state = ModuleState(module, self._own)
        self._templates: dict[bytes, Template] = {}
        self._of_all = set[tuple[int, int, torch.Size]]()
        """Arguments that belong to all rows: how many there are, the number of this one, and its shape."""
        self._is_irregular = False
        """True once outputs of one kind of calls were of several forms."""
        self._is_collected: dict[frozenset[str], bool] = {}
        """Whether transformers collects outputs of modules inside, by the names of what it is asked for."""
        self._marks = self._present_marks()

    def standing_in(self) -> AbstractContextManager[None]:
        """Get the calls of the module inside."""
        self._own = self.state.own_forward = self.module.forward
        return standing(self.module, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model, which a loss may make, the forward of its own."""
        module = copy.deepcopy(self.module, memo)
        if isinstance(self._own, MethodType) and self._own.__self__ is self.module:
            return MethodType(self._own.__func__, module)
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> Any:
        """Give a model that is saved the forward of its own."""
        return _itself, (self._own,)

    def compute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward, in evaluation mode if it is to be without dropout."""
        if not self.in_evaluation:
            return self._own(*args, **kwargs)
        with modes_kept(self.module.modules()):
            # Flag by flag: `train()` would reach modules that the script has put into evaluation mode.
            for module in self.module.modules():
                module.training = False
            return self._own(*args, **kwargs)

    # Compiled code goes on behind it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, which are not computed yet where they are deferred."""
        if self.watch is not None:
            return self.watch(self, args, kwargs)
        try:
            return self._deferred(args, kwargs)
        # A call that no record can be known by.
        except NotStorableError:
            return self.compute(_plain(args), _plain(kwargs))

    def _deferred(self, args: Any, kwargs: Any) -> Any:
        if (wanted := collected()) and self._is_collected.get(frozenset(wanted), True):
            output = self.compute(_plain(args), _plain(kwargs))
            self.note_collected(wanted)
            return output
        args, kwargs = passed_on(args), passed_on(kwargs)
        if self._is_irregular:
            return self.compute(_plain(args), _plain(kwargs))
        rows = self.rows(args, kwargs)
        given = (each for each in rows.tensors if type(each) is not Deferred)
        is_free = not (torch.is_grad_enabled() and any(each.requires_grad for each in given))
        serves = self.records is None or self.records.serves(self.step)
        if rows.lengths is None:  # Of calls without a mask nothing tells where a row ends.
            serves &= not self.of_tokens and (self.records is None or not self.records.reading.is_by_token)
        if not rows.number or not is_free or not serves:
            return self.compute(_plain(args), _plain(kwargs))
        if (marks := self._present_marks()) != self._marks:
            self._marks = marks
            self.weights_changed()
        call = PartCall(self, rows, Modes.present())
        call.state, call.marks = self.state.digest, marks
        salt = call.state + call.modes.precision + b" evaluation" * self.in_evaluation
        if not self.state.is_watchable:
            return self.compute(_plain(args), _plain(kwargs))
        call.keys = rows.digests(salt, self.cuts_padding, self.step.keys_of)
        kind = salt + rows.kind(self.cuts_padding)
        known = self._templates.get(kind)
        # Computed as a whole in any case, so that its form is seen first.
        is_whole = self.step.fills if self.records is None else self.records.computes_whole(call)
        if known is not None and not is_whole:
            call.template = known
        else:
            with Draws() if self.draws else nullcontext() as draws:
                output, _ = call.compute()
            of_tokens = self.of_tokens if self.cuts_padding else frozenset()
            call.template = Template(output, rows, of_tokens, draws.number if draws else 0)
            why = None
            if self.has_changed_since(call):
                why = "changes its own attributes or weights as it computes"
            elif known is not None and not known.is_of(output, rows):
                why = "gives outputs of another form from batch to batch, which no record shows"
            if why is not None:
                self._is_irregular, self._marks = True, self._present_marks()
                logger.warning(f"{self.name} {why}: it is computed in every epoch.")
                return output
            self._templates[kind] = call.template
            call.keep()
        # At once: what a part is given may be written into before its outputs are read.
        read = None if self.records is None else call.read()
        if self.draws and call.is_read:
            draw(call.template.num_draws)  # What draws next draws as in Trainer.
        output = call.template.output(call, read)
        return output if self.step.defers else undeferred(output)

    def note_collected(self, before: dict[str, int]) -> bool:
        """Note if transformers has collected outputs of modules inside since `before`, and return it."""
        found = collected() != before
        self._is_collected[frozenset(before)] = found
        return found

    def rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows:
        """Return a call's arguments row by row; raises like `Rows.of`.

        An argument that once had other entries than rows belongs to all rows, also where it has as many by chance.
        """
        rows = self.step.rows(args, kwargs)
        places = [(len(rows.tensors), number, each.shape) for number, each in enumerate(rows.tensors)]
        pairs = list(zip(places, rows.tensors, strict=True))
        self._of_all |= {place for place, each in pairs if not rows.is_by_row(each)}
        return replace(rows, whole=rows.whole | {id(each) for place, each in pairs if place in self._of_all})

    def has_changed_since(self, call: PartCall) -> bool:
        """Return True if a call would compute something else by now."""
        return call.marks != self._present_marks() or call.state != self.state.digest

    # ---- weights ----

    @property
    def weights(self) -> list[torch.Tensor]:
        # Version counters of buffers that every forward writes say nothing.
        return self.state.weights(has_buffers=not self.step.sends_buffers)

    def _present_marks(self) -> list[tuple[int, int]]:
        return [(version_of(each), id(each)) for each in self.weights]

    @property
    def is_trained(self) -> bool:
        """True if one of the part's parameters asks for gradients by now."""
        return any(parameter.requires_grad for parameter in self.state.weights(has_buffers=False))


@contextmanager
def standing(module: nn.Module, forward: Any) -> Iterator[None]:
    """Let `forward` get the calls of a module inside. Outside, it is as the script has made it."""
    own = vars(module)
    before, had = own.get("forward"), "forward" in own
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        if had:
            own["forward"] = before


def _itself(value: Any) -> Any:
    return value


def passed_on(value: Any) -> Any:
    """Return arguments with ordinary tensors in place of those that are deferred and have no row for each of a call's.

    Raises:
        NotStorableError: the arguments hold something else than tensors.
    """

    def passed(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not Deferred or tensor.shape[:1] == (tensor.call.rows.number,):
            return tensor
        tensor.call.note(tensor.number)
        return tensor.value()

    return rebuilt(value, passed)


def _plain(value: Any) -> Any:
    """Return arguments without deferred tensors, if they are of a kind that can be looked into."""
    try:
        return undeferred(value)
    except NotStorableError:
        # Deferred tensors are as good as ordinary ones, but for noting their use.
        return value


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, by which views of it are known."""
    # A tensor without elements has no memory to be known by, nor has one of a class without storage.
    if tensor.layout is not torch.strided or type(tensor) is Deferred:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)
