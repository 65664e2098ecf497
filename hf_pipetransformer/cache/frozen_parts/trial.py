"""Find the frozen parts of a model whose outputs can be stored, by running it on a few samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import set_seed

from hf_pipetransformer.cache.chain import OTHER_BATCH_TOLERANCE, SAME_BATCH_TOLERANCE, any_differs, differs
from hf_pipetransformer.cache.frozen_parts.chained import ChainedPart, numbers_of
from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, Pick, Reading, Template
from hf_pipetransformer.cache.frozen_parts.values import NotStorableError, Rows, no_row_each, rebuilt, tensors_of
from hf_pipetransformer.engine.effects import effects_of


WORTH = 0.03
"""Share of a forward from which on a part is looked at."""

MORE_PADDING = 3
"""Tokens of padding that a part is tried with besides those of its batch."""


def maximal_frozen(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have parameters, none of them trained, and are in no larger such module, by their path.

    Lists of modules, which are never called, are none. Whether a parameter is trained tells its own `requires_grad`,
    never that of an activation.
    """
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        parameters = list(module.parameters())
        is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if parameters and is_called and not any(parameter.requires_grad for parameter in parameters):
            found[name] = module
        elif parameters:
            for child, each in module.named_children():
                look(f"{name}.{child}" if name else child, each)

    look("", model)
    return {name: module for name, module in found.items() if name}


@dataclass(frozen=True)
class Call:
    """A call of a module in a forward of the whole model; without what it got and gave if that depends on training."""

    name: str
    seconds: float
    depends_on_trained: bool
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return _tensors_in((self.args, self.kwargs))


@dataclass(frozen=True)
class Found:
    """A part, and what is known of it.

    Args:
        call: its first call in the forward.
        seconds: of a row of its forward.
        rows: in a forward of the samples.
        why_not: why its outputs cannot be stored; None if they can.
        has_dropout: True if random numbers or statistics of the batch alone keep them from being stored.
    """

    part: FrozenPart
    call: Call
    seconds: float
    rows: int
    why_not: str | None = None
    has_dropout: bool = False


@dataclass
class Trial:
    """Runs of a model on a few samples.

    Args:
        run: computes the loss and the outputs of the samples, each time with the same random numbers.
        given: the tensors of the samples.
        precision: `fp32`, `bf16` or `fp16`.
        may_evaluate: True if parts with dropout may be run in evaluation mode instead.
    """

    model: nn.Module
    run: Callable[[], tuple[torch.Tensor, Any]]
    given: Sequence[torch.Tensor]
    precision: str
    may_evaluate: bool
    seconds: float = 0.0
    """Of the forward that was watched."""

    def find(self) -> list[Found]:
        """Return the parts whose work is worth a look, in the order of their calls."""
        candidates = maximal_frozen(self.model)
        calls = self._watch(candidates)
        by_name: dict[str, list[Call]] = {}
        for call in calls:
            by_name.setdefault(call.name, []).append(call)
        found: list[Found] = []
        taken: set[int] = set()
        for name, own in by_name.items():
            if sum(call.seconds for call in own) < WORTH * self.seconds:
                continue
            # What computes from stored outputs, or from what is trained, is not looked up itself.
            if own[0].depends_on_trained or any(_memory(each) in taken for each in own[0].tensors):
                continue
            one = self._tried(FrozenPart(name, candidates[name]), own[0])
            found.append(self._followed(one, by_name, candidates))
            taken |= {_memory(each) for call in own for each in _tensors_in(call.output)}
        return found

    def _watch(self, candidates: dict[str, nn.Module]) -> list[Call]:
        calls: list[Call] = []
        given = {_memory(each) for each in self.given}
        with ExitStack() as stack:
            for name, module in candidates.items():
                stack.enter_context(_noting(name, module, given, calls))
            start = _now()
            self.run()
            self.seconds = _now() - start
        return calls

    def _followed(self, first: Found, calls: dict[str, list[Call]], candidates: dict[str, nn.Module]) -> Found:
        """Return a part with the frozen module that alone reads it, if what that gives is smaller; else the part."""
        # A chained part expects one call of its second module after each one of the first.
        if first.why_not is not None or len(calls[first.part.name]) > 1:
            return first
        outputs = tensors_of(first.call.output)
        for name, (call, *more) in calls.items():
            if (
                more
                or call.depends_on_trained
                or sum(map(torch.numel, _tensors_in(call.output))) >= _num_values(first)
            ):
                continue
            numbers = numbers_of(call.tensors, outputs)
            if numbers is None:
                continue
            part = ChainedPart(first.part, name, candidates[name], [list(call.args), call.kwargs], numbers)
            seconds = first.call.seconds + call.seconds
            # A trial takes the inputs of the first module, and compares what comes out of the second.
            both = self._tried(part, replace(first.call, seconds=seconds, output=call.output))
            if both.why_not is None and _num_values(both) < _num_values(first):
                return both
        return first

    def _tried(self, part: FrozenPart, call: Call) -> Found:
        try:
            rows = Rows.of(call.args, call.kwargs)
            if not rows.number:
                return Found(part, call, 0.0, 0, "gets an empty batch")
            if (hook := _hook_inside(part)) is not None:
                raise NotStorableError(f"has a hook on {hook} that stored outputs would pass by")
            seconds = call.seconds / rows.number
            reason = self._changes(part, call)
            if reason is not None and not self.may_evaluate:
                return Found(part, call, seconds, rows.number, reason, has_dropout=True)
            if reason is not None:
                part.in_evaluation = True
                # Once more, because not all randomness is dropout: some draw in evaluation mode, too.
                reason = self._changes(part, call)
            reason = reason or self._trains(part, call) or self._why_not_by_rows(part, rows) or self._read(part, rows)
            return Found(part, call, seconds, rows.number, reason)
        except NotStorableError as error:
            return Found(part, call, 0.0, 0, str(error))
        # Code of others on a few rows: whatever it raises, Trainer's own step may go well.
        except Exception as error:
            return Found(part, call, 0.0, 0, f"raises {type(error).__name__} on some of its rows: {error}")

    def _changes(self, part: FrozenPart, call: Call) -> str | None:
        """Return why two calls with the same inputs are not the same."""
        tolerance = SAME_BATCH_TOLERANCE[self.precision]
        found = effects_of(
            lambda: _tensors_in(part.compute(call.args, call.kwargs)),
            part.modules,
            lambda found, expected: not any_differs(found, expected, tolerance),
        )
        part.draws = found.num_draws > 0
        return found.why_not_repeatable

    def _trains(self, part: FrozenPart, call: Call) -> str | None:
        """Return why not, if gradients flow through the outputs into trained parameters of other modules."""
        with torch.enable_grad():
            outputs = [each for each in _tensors_in(part.compute(call.args, call.kwargs)) if each.requires_grad]
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not outputs:
            return None
        found = torch.autograd.grad([each.sum() for each in outputs], trained, allow_unused=True)
        return None if all(each is None for each in found) else "computes with parameters that are trained elsewhere"

    def _again(self, part: FrozenPart, args: Sequence[Any], kwargs: dict[str, Any], seed: int) -> Any:
        set_seed(seed)
        with torch.no_grad():
            return part.compute(args, kwargs)

    def _why_not_by_rows(self, part: FrozenPart, rows: Rows) -> str | None:
        """Return why a row's outputs are not the same in other company: in another order, alone, padded further."""
        everything, tolerance = np.arange(rows.number), OTHER_BATCH_TOLERANCE[self.precision]
        # A single row cannot change places, so it comes twice.
        order = everything[::-1].copy() if rows.number > 1 else np.array([0, 0])
        expected = tensors_of(self._again(part, *rows.given, 1))
        part.shares = [rows.share_of(each) for each in expected]
        is_known = [
            share or each.shape[:1] == (rows.number,) for each, share in zip(expected, part.shares, strict=True)
        ]
        if not expected or not all(is_known):
            return no_row_each(expected, rows.number)
        # In another order, and alone.
        for chosen in (order, order[:1]):
            found = tensors_of(self._again(part, *rows.take(chosen), 1))
            if any_differs(found, [rows.rows_of(each, chosen) for each in expected], tolerance):
                return "depends on the other samples of its batch"
        if rows.is_flat:
            part.reading = Reading(
                (), of_tokens=frozenset(number for number, share in enumerate(part.shares) if share)
            )
        elif rows.lengths is not None:
            length = rows.length + MORE_PADDING
            found = tensors_of(self._again(part, *rows.take(everything, length), 1))
            # Only an output that has the padded length in both calls follows it; a number may equal it by chance.
            grown = {n for n, each in enumerate(found) if each.dim() > 1 and each.shape[1] == length}
            grown &= {n for n, each in enumerate(expected) if each.dim() > 1 and each.shape[1] == rows.length}
            part.reading = Reading((), of_tokens=frozenset(grown))
            cut = [each[:, : rows.length] if number in grown else each for number, each in enumerate(found)]
            if any_differs(cut, expected, tolerance):
                return "depends on how far its batch is padded"
        return None

    def _read(self, part: FrozenPart, rows: Rows) -> str | None:
        """Find what of its outputs the model reads; return why not, if that is not all that the model uses of it."""
        with part.computed():
            loss, outputs = self.run()
            expected = [loss.detach(), *_tensors_in(outputs)]
        first, all_read, handed_on, part.num_outputs = self._picks(part)
        if not all_read:
            return "gives nothing that the loss depends on"
        # That zeros may stand for padding shows only where there is some.
        padded = rows.lengths is not None and bool((rows.lengths < rows.length).any())
        # From the smallest records to the largest: the first that is enough is taken.
        tries = [(first, True), (all_read, True), (all_read, False)] if padded else [(first, False), (all_read, False)]
        share = 1
        if rows.is_flat:
            shares = {part.shares[pick.number] for pick in all_read}
            if len(shares) > 1 or 0 in shares:
                return f"gives outputs of 1/{sorted(shares)} of its patches, expected one number for all that is read"
            tries, share = [(all_read, True)], shares.pop()
        for picks, cuts in tries:
            is_whole = len(picks) + len(handed_on) == part.num_outputs and not any(pick.is_first for pick in picks)
            is_whole = is_whole and not part.unread
            of_tokens = part.reading.of_tokens
            own = tuple(handed_on.items())
            part.reading = Reading(tuple(picks), cuts, of_tokens, share, is_whole, handed_on=own)
            # Of several outputs a record is one line, whose length is that of the batch if one of them has tokens.
            has_tokens = any(pick.number in of_tokens and not pick.is_first for pick in picks)
            if cuts and has_tokens and not part.reading.is_by_token:
                continue
            if self._is_enough(part, expected):
                does = self._does_for_evaluations(part, hands_on=False)
                does_for_losses = does or self._does_for_evaluations(part, hands_on=True)
                part.reading = replace(part.reading, does_for_evaluations=does, does_for_losses=does_for_losses)
                return None
        return "is used for more than what it returns (its layers are read by a hook, or for hidden states)"

    def _does_for_evaluations(self, part: FrozenPart, hands_on: bool) -> bool:
        """Return True if the records are enough in evaluation mode, too; `hands_on` as in `_is_enough`."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            loss, outputs = self.run()
            return self._is_enough(part, [loss.detach(), *_tensors_in(outputs)], hands_on)
        # A model may be unable to compute a loss in evaluation mode: its evaluations are computed then.
        except Exception:
            return False
        finally:
            for module in training:
                module.training = True

    def _picks(self, part: FrozenPart) -> tuple[list[Pick], list[Pick], dict[int, int], int]:
        """Return the outputs that the loss depends on, those of first positions told apart, and the same as wholes.

        And the outputs that are inputs, with these, and the number of all outputs.
        """
        noted: list[list[torch.Tensor]] = []
        handed_on: list[dict[int, int]] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            given = {id(tensor): number for number, tensor in enumerate(tensors_of([args, kwargs]))}
            output = part.compute(args, kwargs)
            leaves = tensors_of(output)
            # By identity, because an output that is computed may equal an input by chance.
            handed_on.append({n: given[id(each)] for n, each in enumerate(leaves) if id(each) in given})
            noted.append([])

            def leaf(tensor: torch.Tensor) -> torch.Tensor:
                own = tensor.detach()
                noted[-1].append(own.requires_grad_() if own.is_floating_point() else own)
                return own.view_as(own)

            return rebuilt(output, leaf)

        with part.replaced(watched), torch.enable_grad():
            loss, _ = self.run()
        first, whole = [], []
        # Of several calls, only what each of them hands on.
        common = dict(set.intersection(*(set(each.items()) for each in handed_on))) if handed_on else {}
        for call in noted:
            sources = [leaf for leaf in call if leaf.requires_grad]
            found = iter(torch.autograd.grad(loss, sources, allow_unused=True, retain_graph=True) if sources else ())
            for number, leaf in enumerate(call):
                gradient = next(found) if leaf.requires_grad else None
                if number in common or (leaf.requires_grad and gradient is None):
                    continue
                is_first = gradient is not None and gradient.dim() > 2 and not gradient[:, 1:].any()
                whole.append(Pick(number))
                first.append(Pick(number, bool(is_first)))
        return list(dict.fromkeys(first)), list(dict.fromkeys(whole)), common, max(map(len, noted), default=0)

    def _is_enough(self, part: FrozenPart, expected: Sequence[torch.Tensor], hands_on: bool = True) -> bool:
        """Return True if the model's loss and outputs are the same from the part's records alone.

        With `hands_on`, but for outputs of the part that the model hands on: no loss sees what is missing of them.
        """
        filled, forms, numbers = list[Any](), set[str](), {part.num_outputs}

        def recorded(*args: Any, **kwargs: Any) -> Any:
            rows, output = Rows.of(args, kwargs, part.reading.cuts_padding), part.compute(args, kwargs)
            leaves = tensors_of(output)
            numbers.add(len(leaves))  # In evaluation, some models give more.
            forms.add(rows.form)
            records = part.reading.records(leaves, rows).detach().clone()
            if rows.lengths is not None and part.reading.is_by_token:
                for row, length in enumerate(part.reading.lengths(rows).tolist()):
                    # As the store gives it: zeros behind the last token.
                    records[row, length:] = 0
            filled.append(Template(output, part.reading, rows).filled(records, rows))
            return output

        with part.replaced(recorded):
            self.run()
        following = iter(filled)
        # The second run gets nothing but what records hold; where it needs more, nan spreads to loss or outputs.
        with part.replaced(lambda *_args, **_kwargs: next(following)):
            loss, outputs = self.run()
        handed_on = {_memory(each) for value in (*filled, part.unread) for each in tensors_of(value) if hands_on}
        found, tolerance = [loss.detach(), *_tensors_in(outputs)], SAME_BATCH_TOLERANCE[self.precision]
        is_enough = (
            len(numbers) == 1
            and len(found) == len(expected)
            and not any(
                differs(one, other, tolerance)
                for one, other in zip(found, expected, strict=True)
                if _memory(one) not in handed_on
            )
        )
        part.forms |= forms if is_enough else set()
        return is_enough


@contextmanager
def _noting(name: str, module: nn.Module, given: set[int], calls: list[Call]) -> Iterator[None]:
    under_way: list[tuple[Any, Any, float]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Copies of their containers, into which modules may write, this one or a later one.
        under_way.append((_copied(args), _copied(kwargs), _now()))

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        args, kwargs, start = under_way.pop()
        seconds = _now() - start
        inputs = _tensors_in((args, kwargs))
        # Without gradients, as in a recomputed layer, only the samples themselves are known not to depend on training.
        is_free = torch.is_grad_enabled() and not any(each.requires_grad for each in inputs)
        if is_free or all(_memory(each) in given for each in inputs):
            # A copy: models of several modalities write into what their towers return.
            calls.append(Call(name, seconds, False, args, kwargs, _copied(output)))
        else:
            calls.append(Call(name, seconds, True))

    hooks = (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _now() -> float:
    """Return the time in seconds, of the device's work too."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _copied(output: Any) -> Any:
    try:
        return rebuilt(output, lambda tensor: tensor)
    except NotStorableError:
        return output


def _memory(tensor: torch.Tensor) -> int:
    # A tensor without elements has no memory to be known by.
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _num_values(found: Found) -> int:
    """Return the values of all records of the call."""
    rows = Rows.of(found.call.args, found.call.kwargs, found.part.reading.cuts_padding)
    return found.part.reading.records(tensors_of(found.call.output), rows).numel()


def _hook_inside(part: FrozenPart) -> str | None:
    """Return the path of a module inside a part that has a forward hook of other code than transformers'."""
    inside = (named for each in part.modules for named in each.named_modules() if named[0])
    for name, module in inside:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                return name
    return None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, none if it holds objects of another kind."""
    try:
        return tensors_of(list(value) if type(value) is tuple else value)
    except NotStorableError:
        return []
