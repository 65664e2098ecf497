"""Find the frozen parts of a model whose outputs can be stored, by watching a step of the run.

Nothing of the script's runs for it. A module of an installed package that left no trace in its call is called again by
itself, on a few rows of that call; what a script's own code computes is compared over two passes instead.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import set_seed

from hf_pipetransformer.cache.chain import OTHER_BATCH_TOLERANCE, SAME_BATCH_TOLERANCE, any_differs, differs
from hf_pipetransformer.cache.frozen_parts.call import (
    NUM_TRIED,
    Deferred,
    Modes,
    PartCall,
    Template,
    undeferred,
    version_of_given,
)
from hf_pipetransformer.cache.frozen_parts.contents import Pick, Reading
from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, PresentStep, memory_of, passed_on, standing
from hf_pipetransformer.cache.frozen_parts.served import Form, Plan
from hf_pipetransformer.cache.frozen_parts.state import collected, is_script_free
from hf_pipetransformer.cache.frozen_parts.values import NotStorableError, Rows, no_row_each, tensors_of
from hf_pipetransformer.data.effects import buffers_kept, effects_of, modes_kept
from hf_pipetransformer.data.rng import generators_kept, random_state, same_states


WORTH = 0.03
"""Share of a forward from which on a part is looked at."""

OTHERS = "depends on the other samples of its batch"
PADDING = "depends on how far its batch is padded"
DROPOUT = "draws random numbers (dropout)"
STATISTICS = "keeps statistics of its batches (batch normalization in training mode)"


@dataclass
class Watched:
    """First call of a part in a step that was watched.

    Args:
        call: a copy of a few of its rows; None if they cannot be told apart.
        seconds: of all calls of the part in the step.
        rows: of all its calls.
        why_not: why its outputs cannot be stored, as far as the call shows.
        draws: True if it drew random numbers.
        is_random: True if some inputs are neither of the batch nor of the model, and may be others next time.
        computes_from_stored: True if some inputs are views of outputs of another part.
        step: number of the step, of those that were watched.
    """

    part: FrozenPart
    call: PartCall | None
    seconds: float
    rows: int
    why_not: str | None = None
    draws: bool = False
    is_random: bool = False
    computes_from_stored: bool = False
    step: int = 0
    has_come_before: bool = False
    """True if it was called in an earlier step, too."""

    @property
    def is_timed(self) -> bool:
        """True if it was timed while nothing was done for the first time."""
        return self.call is None or self.has_come_before or not self.part.state.is_of_script


def _known_name(model: nn.Module, path: str) -> str:
    """Return the path of a module as people know it: of an `nn.Sequential` of parts by their classes, not numbers."""
    number, *rest = path.split(".")
    if not number.isdigit():
        return path
    kinds = [type(each).__name__ for each in model.children()]
    kind = type(model.get_submodule(number)).__name__
    return ".".join([kind if kinds.count(kind) == 1 else f"{number} ({kind})", *rest])


class Watch:
    """Watches the calls of the frozen parts of a model until something is known of each.

    Args:
        model: that has the parts.
        frozen: its frozen modules, by their path.
        root: what the loss calls, the model itself or its adapters around it.
        precision: `fp32`, `bf16` or `fp16`.
        may_evaluate: True if parts with dropout may be run in evaluation mode instead.
        is_hurried: True if there is one step to watch.
        reads_loss_alone: True if training reads nothing of the model's outputs but its loss.
    """

    def __init__(
        self, model: nn.Module, frozen: Mapping[str, nn.Module], root: nn.Module, step: PresentStep, precision: str,
        may_evaluate: bool, is_hurried: bool = False, reads_loss_alone: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.root, self.step, self.is_hurried = model, root, step, is_hurried
        self._precision, self._may_evaluate = precision, may_evaluate
        self._reads_loss_alone = reads_loss_alone
        self.parts = [
            FrozenPart(_known_name(model, name), module, step, self.watched) for name, module in frozen.items()
        ]
        self._seen: dict[str, Watched] = {}
        self._inputs: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
        self._outputs: set[int] = set()
        self._number = 0
        self._root: Rows | None = None
        """A few rows of what the model itself was called with."""
        self._root_seconds = self._warm_seconds = self._root_began = 0.0

    @property
    def is_over(self) -> bool:
        """True if something is known of all parts."""
        return not self.parts

    def begin_step(self) -> None:
        """Watch the calls of one more step."""
        self._outputs.clear()
        self._number += 1
        self._root_seconds = 0.0

    def enter_root(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that the model itself is called."""
        self._root_began = _now()
        with suppress(NotStorableError):
            self._note_root(args, kwargs)

    def leave_root(self) -> None:
        """Note that a call of the model itself is over."""
        self._root_seconds += _now() - self._root_began

    def end_step(self) -> None:
        """Look at what was done in the step to the tensors that parts were called with."""
        for name, known, version in self._inputs:
            tensor, seen = known(), self._seen.get(name)
            # What no record has could not be computed from inputs of before.
            if tensor is not None and version_of_given(tensor) != version and seen is not None:
                seen.why_not = seen.why_not or "is given tensors that are written into later in the step"
        self._inputs.clear()

    def _note_root(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._root is not None:
            return
        rows = self.step.rows(args, kwargs)
        # Those of its texts, whatever comes first.
        lengths = next((found for each in rows.tensors if (found := self.step.lengths_of(each)) is not None), None)
        if rows.number and lengths is not None and len(lengths) == rows.number:
            rows = replace(rows, lengths=lengths)
            self._root = rows.copied(rows.few(NUM_TRIED))

    def watched(self, part: FrozenPart, args: Any, kwargs: Any) -> Any:
        """Run a part's own forward, and note what it shows. Gives its outputs, whose use is noted in turn."""
        entered = _now()
        try:
            args, kwargs = passed_on(args), passed_on(kwargs)
            plain_args, plain_kwargs = undeferred(args), undeferred(kwargs)
            tensors = tensors_of([args, kwargs])
        except NotStorableError as error:
            self._seen.setdefault(part.name, Watched(part, None, 0.0, 0, str(error)))
            return part.compute(args, kwargs)
        if any(each.requires_grad for each in tensors if type(each) is not Deferred):
            # It computes from what is trained, or is asked for gradients of its inputs. Outputs of frozen parts alone
            # may ask for gradients that reach nothing (`enable_input_require_grads`).
            self._seen.setdefault(part.name, Watched(part, None, 0.0, 0))
            return part.compute(plain_args, plain_kwargs)
        state, device = part.state.digest, self.step.device
        versions = [version_of_given(each) for each in tensors]
        buffers = [(id(each), version_of_given(each)) for each in part.module.buffers()]
        drawn = random_state(device)
        is_own = all(map(self.step.is_known, tensors))
        before = collected()
        start = _now()
        with part.state.hooks_seen():
            output = part.compute(plain_args, plain_kwargs)
        seconds = _now() - start
        draws = not same_states(random_state(device), drawn)
        is_collected = part.note_collected(before)
        why_not = None
        if [version_of_given(each) for each in tensors] != versions:
            why_not = "writes into its inputs"
        elif [(id(each), version_of_given(each)) for each in part.module.buffers()] != buffers:
            why_not = STATISTICS
        elif part.state.digest != state:
            why_not = "changes its own attributes"
        elif is_collected:
            names = ", ".join(sorted(name for name, number in collected().items() if number != before[name]))
            why_not = f"has modules whose {names} the model returns, which no stored output has"
        elif (hook := part.state.hooked) is not None:
            why_not = f"has a hook on {hook} that stored outputs would pass by"
        seen = self._seen.get(part.name)
        if seen is not None and seen.call is None and seen.why_not is None:
            seen = None  # Until now it computed from what is trained, as with another call of the same step.
        if seen is not None:
            if seen.step != self._number:
                seen.step, seen.seconds, seen.rows, seen.has_come_before = self._number, 0.0, 0, True
            seen.seconds, seen.why_not = seen.seconds + seconds, seen.why_not or why_not
        call, given = None, output
        try:
            leaves = tensors_of(output)
            if any(map(_is_trained, leaves)):
                raise NotStorableError("computes with parameters that are trained elsewhere")
            call = PartCall(part, part.rows(args, kwargs), Modes.present(), leaves)
            if not call.rows.number:
                raise NotStorableError("gets an empty batch")
            call.template = Template(output, call.rows)
            part.asks_for_gradients |= {number for number, leaf in enumerate(leaves) if leaf.requires_grad}
            if seen is not None:
                seen.rows += call.rows.number
            if self.step.defers:
                given = call.template.output(call)
            else:
                call.notes = dict.fromkeys(range(len(leaves)), False)
        except NotStorableError as error:
            why_not, call = why_not or str(error), None
        if seen is None:
            from_stored = any(memory_of(each) in self._outputs for each in tensors if type(each) is not Deferred)
            # Without gradients, as in a recomputed layer, nothing shows what depends on training.
            is_random = not is_own and (self.step.has_drawn or not torch.is_grad_enabled())
            sample = None if call is None else call.sample()
            number = 0 if call is None else call.rows.number
            self._seen[part.name] = Watched(
                part, sample, seconds, number, why_not, draws, is_random, from_stored, self._number
            )
        if call is not None:
            # No tensor of the step is kept alive for it.
            self._inputs += [(part.name, weakref.ref(each), version_of_given(each)) for each in tensors]
            self._outputs |= set(map(memory_of, leaves))
        # The time of the notes is none of the model's.
        self._root_began += _now() - entered - seconds
        return given

    # ---- finding ----

    def find(self, agreed: set[str]) -> list[Plan]:
        """Return what is known of parts that were called, and watch those no longer; tries them on a few rows.

        Args:
            agreed: names of the parts to look at, which have been called on all processes.
        """
        seen = {name: each for name, each in self._seen.items() if name in agreed}
        self.parts = [each for each in self.parts if each.name not in seen]
        for each in seen.values():
            each.part.watch = None
        total = max(self._root_seconds, sum(each.seconds for each in seen.values()), 1e-9)
        taken, found, looked_at = set[str](), list[Plan](), list[tuple[Plan, PartCall]]()
        with ExitStack() as stack:
            for each in seen.values():
                stack.enter_context(each.part.standing_in())
            stack.enter_context(generators_kept())
            stack.enter_context(buffers_kept(self.model))
            for one, call in self._ends(seen):
                chain = [seen[each.part.name] for each in call.chain]
                new = [each for each in chain if each.part.name not in taken]
                share = sum(each.seconds for each in new) / total
                if share < WORTH:
                    continue
                found.append(self._looked_at(one, call, chain, (sum(each.seconds for each in new), share)))
                if found[-1].form is not None:
                    looked_at.append((found[-1], call))
                    taken |= {each.part.name for each in chain}
            self._agree_on_padding(looked_at)
            for plan, _ in looked_at:
                for part in plan.parts[:-1]:
                    part.feeds_parts = True
            for each in seen.values():
                # Of calls whose rows cannot be told apart there is no chain.
                if each.call is None and each.why_not is not None and each.seconds >= WORTH * total:
                    share = each.seconds / total
                    found.append(Plan([each.part], Reading(()), share=share, why_not=each.why_not))
        self._seen = {name: each for name, each in self._seen.items() if name not in seen}
        self._root = None
        return found

    @staticmethod
    def _agree_on_padding(plans: Sequence[tuple[Plan, PartCall]]) -> None:
        """Let parts of several plans keep padding in all of them if it counts in one."""
        is_settled = False
        while not is_settled:
            is_settled = True
            keeping = {id(part) for plan, _ in plans if not plan.part.cuts_padding for part in plan.parts}
            for plan, call in plans:
                if plan.part.cuts_padding and any(id(part) in keeping for part in plan.parts):
                    is_settled, plan.is_for_outputs = False, True
                    plan.reading = replace(plan.reading, is_by_token=False)
                    for part in plan.parts:
                        part.cuts_padding, part.of_tokens = False, frozenset()
                    assert plan.form is not None
                    plan.form = Form.of(plan.reading, call, plan.form.seconds, plan.form.num_rows)

    @property
    def called(self) -> list[str]:
        """Names of the parts of which calls were seen, once all of them were timed."""
        ready = [each.is_timed or self.is_hurried or each.step < self._number for each in self._seen.values()]
        # Together, for one may compute from the other.
        return list(self._seen) if all(ready) else []

    def _ends(self, seen: Mapping[str, Watched]) -> list[tuple[Watched, PartCall]]:
        """Return the calls whose outputs others than frozen parts use, each whose rows can be told apart."""
        found: list[tuple[Watched, PartCall]] = []
        for each in seen.values():
            if each.call is None or not each.call.notes or each.computes_from_stored:
                continue
            names = [call.part.name for call in each.call.chain]
            if all(name in seen and seen[name].call is not None for name in names):
                found.append((each, each.call))
        return found

    def _looked_at(self, one: Watched, call: PartCall, chain: Sequence[Watched], time: tuple[float, float]) -> Plan:
        (seconds, share), parts = time, [each.part for each in chain]
        is_of_script = any(part.state.is_of_script for part in parts)
        is_random = self.step.reads_at_random or any(each.is_random for each in chain)
        plan = Plan(parts, Reading(()), is_of_script, notes_first=is_random, share=share)
        try:
            plan.why_not, plan.has_dropout = self._why_not_called_again(chain, is_of_script)
            plan.why_not = plan.why_not or self._tried(plan, call)
        except NotStorableError as error:
            plan.why_not = str(error)
        # Code of others on a few rows: whatever it raises, Trainer's own step may go well.
        except Exception as error:
            plan.why_not = f"raises {type(error).__name__} on some of its rows: {error}"
        if plan.why_not is None:
            rows = max(1, one.rows)
            per_row = seconds / rows if is_of_script else min(seconds / rows, self._warm_seconds)
            plan.form = Form.of(plan.reading, call, per_row, rows)
        return plan

    def _why_not_called_again(self, chain: Sequence[Watched], is_of_script: bool) -> tuple[str | None, bool]:
        """Return why the calls of a chain may not be stored, and True if evaluation mode would change that."""
        for each in chain:
            if each.why_not is not None and each.why_not != STATISTICS:
                return each.why_not if each is chain[
                    -1
                ] else f"computes from {each.part.name}, which {each.why_not}", False
        random = [each for each in chain if each.draws or each.why_not == STATISTICS]
        if random and is_of_script:
            return random[0].why_not or "draws random numbers", False
        for each in random:
            reason = each.why_not or self._changes(each)
            if reason is not None and self._may_evaluate:
                each.part.in_evaluation = True
                # Once more, because not all randomness is dropout: some draw in evaluation mode, too.
                reason = self._changes(each)
            if reason is not None:
                each.part.in_evaluation = False
                return reason, True
            # Draws between two parts could not be made up for where the first is not looked up.
            if each.part.draws and len(chain) > 1:
                return "draws random numbers in the midst of what would be stored", False
        return None, False

    def _changes(self, watched: Watched) -> str | None:
        """Return why two calls with the same inputs are not the same."""
        call, part = watched.call, watched.part
        if call is None:
            return DROPOUT
        tolerance = SAME_BATCH_TOLERANCE[self._precision]
        args, kwargs = call.arguments(np.arange(call.rows.number))
        with call.modes.entered(has_gradients=False):
            found = effects_of(
                lambda: _tensors_in(part.compute(args, kwargs)),
                part.module,
                lambda found, expected: not any_differs(found, expected, tolerance),
            )
        part.draws = found.num_draws > 0
        return found.why_not_repeatable

    def _tried(self, plan: Plan, call: PartCall) -> str | None:
        """Find what a record has to hold; return why not, if a row's outputs are not the same in other company."""
        rows, everything = call.rows, np.arange(call.rows.number)
        picks = tuple(Pick(number, is_first) for number, is_first in sorted(call.notes.items()))
        if plan.is_of_script:
            # Not called again: rows are what they are in the batch, padding included.
            shares = {call.template.shares[pick.number] for pick in picks}
            plan.reading = Reading(picks, share=max(shares))
            return None if len(shares) == 1 else "gives outputs of other rows"
        tolerance = OTHER_BATCH_TOLERANCE[self._precision]

        def read(leaves: Sequence[torch.Tensor], length: int | None = None) -> list[torch.Tensor]:
            found = [pick.of(leaves[pick.number]) for pick in picks]
            return [
                each[:, :length] if length and has_tokens(pick) else each
                for each, pick in zip(found, picks, strict=True)
            ]

        whole, short = dict[int, list[torch.Tensor]](), dict[int, list[torch.Tensor]]()
        start = _now()
        expected = call.computed(everything, None, whole)
        # The first call in the step has done much for the first time.
        self._warm_seconds = (_now() - start) / rows.number

        def has_tokens(pick: Pick) -> bool:
            own = expected[pick.number]
            has_lengths = not pick.is_first and rows.lengths is not None and own.dim() > 1
            return has_lengths and rows.has_rows(own) and own.shape[1] == rows.length

        shares = {rows.share_of(expected[pick.number]) for pick in picks}
        if len(shares) > 1:
            return f"gives outputs of 1/{sorted(shares)} of its patches, expected one number for all that is read"
        if 0 in shares and any(expected[pick.number].shape[:1] != (rows.number,) for pick in picks):
            return no_row_each([expected[pick.number] for pick in picks], rows.number)
        # A single row cannot change places, so it comes twice.
        order = everything[::-1].copy() if rows.number > 1 else np.array([0, 0])
        # In another order, and alone.
        for chosen in (order, order[:1]):
            found = read(call.computed(chosen, None, {}))
            if any_differs(found, [rows.rows_of(each, chosen) for each in read(expected)], tolerance):
                return OTHERS
        plan.reading = Reading(picks, share=max(shares))
        plan.reading.records(expected, rows)
        if not rows.is_padded or rows.lengths is None:
            return None
        # With less padding: the shortest row alone, without any.
        shortest = np.array([int(np.argmin(rows.lengths))])
        length = int(rows.lengths.min())
        with_tokens = [has_tokens(pick) for pick in picks]
        try:
            found = read(call.computed(shortest, length, short), length)
        # A model of one length says so: rows are stored as they are padded.
        except Exception:
            return None
        others = [rows.rows_of(each, shortest) for each in read(expected, length)]
        if any(one.shape != other.shape for one, other in zip(found, others, strict=True)):
            return None
        if any_differs(found, others, tolerance):
            return PADDING
        if any(with_tokens):
            level = self._level_of_padding(plan, call, picks) if all(with_tokens) else None
            if level is None:
                return None
            plan.reading, plan.is_for_outputs = Reading(picks, is_by_token=True), level == "outputs"
        for each in call.chain:
            pairs = enumerate(zip(whole[id(each)], short[id(each)], strict=True))
            # Only what has the padded length in both calls follows it; a number may equal it by chance.
            each.part.of_tokens = frozenset(
                number
                for number, (one, other) in pairs
                if one.dim() > 1 and (one.shape[1], other.shape[1]) == (rows.length, length)
            )
            each.part.cuts_padding = True
        return None

    def _level_of_padding(self, plan: Plan, call: PartCall, picks: Sequence[Pick]) -> str | None:
        """Return what of the model is the same with zeros behind the last real token: `outputs`, `loss`, or nothing.

        The model itself is run on a few rows, if all of it is of installed packages.
        """
        root, lengths = self._root, call.rows.lengths
        if root is None or lengths is None or not is_script_free(self.root):
            return None
        part, levels = plan.part, list[str | None]()

        def run(fills: bool) -> tuple[torch.Tensor | None, list[torch.Tensor], bool]:
            def zeros_behind(*args: Any, **kwargs: Any) -> Any:
                output = part.compute(args, kwargs)
                for pick in picks if fills else ():
                    leaf = tensors_of(output)[pick.number]
                    for row, length in enumerate(lengths.tolist()):
                        leaf[row, length:] = 0
                return output

            set_seed(1)
            with torch.no_grad(), call.modes.entered(has_gradients=False), standing(part.module, zeros_behind):
                output = self.root(*root.given[0], **root.given[1])
            loss = output.get("loss") if isinstance(output, Mapping) else None
            leaves, is_all = list[torch.Tensor](), True
            for value in output.values() if isinstance(output, Mapping) else [output]:
                try:
                    leaves += tensors_of(value)
                except NotStorableError:
                    is_all = False
            return loss, leaves, is_all

        training = [module for module in self.model.modules() if module.training]
        # A model may be unable to compute a loss in evaluation mode, say.
        with modes_kept(training), suppress(Exception):
            for trains in (True, False):
                for module in training:
                    module.training = trains
                (loss, expected, is_all), (other, found, _) = run(False), run(True)
                tolerance = SAME_BATCH_TOLERANCE[self._precision]
                if is_all and len(found) == len(expected) and not any_differs(found, expected, tolerance):
                    levels.append("outputs")
                elif not self._reads_loss_alone:
                    return None  # A loss of the script's may read what differs.
                elif loss is not None and other is not None and not differs(other, loss, tolerance):
                    levels.append("loss")
                else:
                    return None
            return "outputs" if set(levels) == {"outputs"} else "loss"
        return None


def _is_trained(tensor: torch.Tensor) -> bool:
    """Return True if gradients of a tensor reach a parameter; one may be asked for them for no use."""
    seen, ahead = set[Any](), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        ahead += [each for each, _ in node.next_functions]
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _now() -> float:
    """Return the time in seconds, of the device's work too."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, none if it holds objects of another kind."""
    try:
        return tensors_of(value)
    except NotStorableError:
        return []
