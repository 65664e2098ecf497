"""Clock cycles of a batch: who computes what and when, and the order of the backwards.

Edges in autograd's graph order backwards that have nothing else to do with each other: a stage takes the backwards of
its micro-batches in the order of the schedule's table. That bounds what recomputation keeps at a time, keeps devices
in step, and makes the sums of gradients the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values
from hf_pipetransformer.pipe.recomputation import checkpointed, waking
from hf_pipetransformer.pipe.skips import Key, SkipExchange, exchanging
from hf_pipetransformer.pipe.stages import Stage
from hf_pipetransformer.pipe.workers import Departed, Workers, arrive, depart
from hf_pipetransformer.schedules import Op, find_schedule, source_of


Clock = tuple[tuple[int, int], ...]
"""The (micro-batch, stage) pairs that are computed at one time."""


@lru_cache(maxsize=64)
def clock_cycles(num_micro_batches: int, num_stages: int) -> tuple[Clock, ...]:
    """The forwards of GPipe's table, those together that can run at one time, in the order of the stages.

    Three micro-batches, two stages (micro-batch, stage):

        (0, 0) | (1, 0) (0, 1) | (2, 0) (1, 1) | (2, 1)
    """
    times: dict[tuple[int, int], int] = {}
    for stage, row in enumerate(find_schedule("gpipe").table(num_stages, num_micro_batches)):
        now = -1
        for op, micro_batch, _ in row:
            if op is Op.FORWARD:
                source = source_of(op, stage, num_stages)
                arrived = -1 if source is None else times[micro_batch, source]
                now = 1 + max(now, arrived)
                times[micro_batch, stage] = now
    clocks: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(times.values()))]
    for entry in sorted(times, key=lambda entry: entry[1]):
        clocks[times[entry]].append(entry)
    return tuple(map(tuple, clocks))


@lru_cache(maxsize=64)
def next_backwards(num_micro_batches: int, num_stages: int, stage: int) -> dict[int, int]:
    """By micro-batch, the one whose backward comes right after its own on this stage; the last one has none."""
    row = find_schedule("gpipe").table(num_stages, num_micro_batches)[stage]
    order = [micro_batch for op, micro_batch, _ in row if op is Op.BACKWARD]
    return dict(pairwise(order))


class _Held(torch.autograd.Function):
    """Tensors whose backward waits for the gradient of a token."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return *(tensor.detach() for tensor in tensors), tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients[:-1]


class _Releasing(torch.autograd.Function):
    """Tensors whose backward, when it is through, releases what waits for the tokens."""

    @staticmethod
    def forward(ctx: Any, num_tokens: int, *tokens_and_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_tokens = num_tokens
        return tuple(tensor.detach() for tensor in tokens_and_tensors[num_tokens:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *([None] * ctx.num_tokens), *gradients


def _needing_gradients(values: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Each of them once: what is one tensor before must be one after, for whoever changes it in place."""
    return {id(value): value for value in values if isinstance(value, torch.Tensor) and value.requires_grad}


def _replaced(
    values: Sequence[Any], found: dict[int, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    results = dict(zip(found, tensors, strict=True))
    return tuple(results.get(id(value), value) for value in values)


def hold(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """`values`, and a token: the backward of these values comes after that of what the token is released by.

    No token if nothing of them needs a gradient.
    """
    found = _needing_gradients(values)
    if not found:
        return tuple(values), ()
    *tensors, token = _Held.apply(*found.values())  # type: ignore[no-untyped-call]
    return _replaced(values, found, tensors), (token,)


def release(values: Sequence[Any], tokens: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """`values`, whose backward goes before that of what the tokens hold, and the tokens that are still to be released.

    Those are all of them where no value needs a gradient: it would be computed for the order's sake alone.
    """
    found = _needing_gradients(values) if tokens else {}
    if not found:
        return tuple(values), tuple(tokens)
    tensors = _Releasing.apply(len(tokens), *tokens, *found.values())  # type: ignore[no-untyped-call]
    return _replaced(values, found, tensors), ()


def may_be_separated(values: Sequence[Any], others: Sequence[Any]) -> set[int]:
    """Which of the values share memory with another tensor of the micro-batch.

    Between two stages each is given a place in autograd's graph, or a copy, of its own: a change in place of the one
    would no longer be one of the other.

    Args:
        values: what goes to the next stage.
        others: skip tensors on their way.
    """
    # A tensor that is given twice stays one.
    once = {id(value): value for value in values}.values()
    users = Counter(place for place in map(_memory, (*once, *others)) if place is not None)
    shared = {place for place, count in users.items() if count > 1}
    return {i for i, value in enumerate(values) if _memory(value) in shared}


def _memory(value: Any) -> int | None:
    """What tensors of the same memory have in common; None where there is none."""
    has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return value.untyped_storage().data_ptr() if has_memory and value.numel() else None


class InPlaceCheck:
    """Compares the versions of a stage's inputs before and after its forward.

    Args:
        values: the stage's inputs.
        is_checkpointed: whether its forward will run again.
        shared: positions of those that others share.
    """

    def __init__(self, values: Sequence[Any], is_checkpointed: bool, shared: set[int]) -> None:
        self._is_checkpointed = is_checkpointed
        watched = [
            value
            for i, value in enumerate(values)
            if isinstance(value, torch.Tensor) and not value.is_inference() and (is_checkpointed or i in shared)
        ]
        self._before = [(tensor, tensor._version) for tensor in watched]

    def end(self) -> None:
        """The forward is over.

        Raises:
            RuntimeError: it changed one of them.
        """
        if all(tensor._version == version for tensor, version in self._before):
            return
        remedy = "Write the stage's first operation out of place (nn.ReLU() for nn.ReLU(inplace=True))"
        if self._is_checkpointed:
            raise RuntimeError(
                "A stage changes its input in place, which checkpointing would compute again from what is left of it. "
                f"{remedy}, or use checkpoint='never'."
            )
        raise RuntimeError(
            "A stage changes its input in place, and another tensor of the micro-batch, one that is stashed or "
            f"returned twice, is the same memory. {remedy}."
        )


Tokens = tuple[torch.Tensor, ...]


class Called(NamedTuple):
    """What the forward of a stage gave.

    Args:
        result: what it returned.
        left: what it stashed for later stages.
        tokens: to have it computed again.
    """

    result: Any
    left: dict[Key, Any]
    tokens: Tokens


class Flow:
    """The forward of a mini-batch.

    Args:
        stages: in order.
        routes: the stage that stashes and the one that pops, by skip tensor.
        num_checkpointed: how many of the first micro-batches keep their stages' inputs only.
        expands: whether the values of a tuple are several arguments of the next stage.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        routes: Mapping[Key, tuple[int, int]],
        num_checkpointed: int,
        expands: bool,
    ) -> None:
        self.stages = stages
        self.routes = routes
        self.num_checkpointed = num_checkpointed
        self.expands = expands
        self._batches: list[MicroBatch] = []
        self._sent: dict[int, Departed] = {}
        self._skips: dict[tuple[int, Key], Departed] = {}
        self._shared: dict[int, set[int]] = {}
        self._tokens: dict[tuple[int | None, int], Tokens] = {}
        devices = [stage.device for stage in stages]
        # The caller works for the CPU; with a single device nobody else is needed.
        self._own = torch.device("cpu") if any(device.type == "cpu" for device in devices) else devices[0]

    def run(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """What the last stage gives for each.

        Raises:
            BaseException: the first that a stage raised, when every device has stopped.
        """
        self._batches = list(micro_batches)
        self._nexts = [next_backwards(len(micro_batches), len(self.stages), k) for k in range(len(self.stages))]
        # Workers have their device; what the caller does is on its own, which may be another GPU than the current.
        own = torch.cuda.device(self._own) if self._own.type == "cuda" else nullcontext()
        with own, Workers([stage.device for stage in self.stages], self._own) as workers:
            for clock in clock_cycles(len(micro_batches), len(self.stages)):
                workers.run([(self.stages[k].device, partial(self._compute, i, k)) for i, k in clock])
        return self._batches

    def _compute(self, i: int, k: int) -> None:
        """Micro-batch `i` on stage `k`, from its arrival to its departure."""
        device = self.stages[k].device
        values = arrive(self._sent.pop(i), device) if k else self._batches[i].values
        keys = [key for key, (stashes, pops) in self.routes.items() if stashes < pops == k]
        popped = [arrive(self._skips.pop((i, key)), device)[0] for key in keys]
        # The backwards of this stage in the order of the table: the one after that of `i` waits for it.
        waiting = self._tokens.pop((self._nexts[k].get(i), k), ())
        tied, waiting = release((*values, *popped), waiting)
        values, popped = tied[: len(values)], list(tied[len(values) :])

        check = InPlaceCheck(tied, i < self.num_checkpointed, self._shared.pop(i, set()))
        batch = MicroBatch(values, self._batches[i].is_single)
        called = self._called(i, k, batch, dict(zip(keys, popped, strict=True)))
        check.end()
        self._send(i, k, *self._held(i, k, called, waiting))

    def _called(self, i: int, k: int, batch: MicroBatch, popped: Mapping[Key, Any]) -> Called:
        stage, is_checkpointed = self.stages[k], i < self.num_checkpointed
        wakes = is_checkpointed and self._leaves(k)
        call = _forward(stage.module, popped, self.expands, batch.is_single, wakes)
        if is_checkpointed:
            return checkpointed(call, *batch.values, drawing=stage.drawing)
        if not self.num_checkpointed:
            return call(*batch.values)
        with stage.drawing.noted():
            return call(*batch.values)

    def _held(self, i: int, k: int, called: Called, waiting: Tokens) -> tuple[MicroBatch, dict[Key, Any]]:
        batch = MicroBatch.of(called.result)
        check_values(batch.values, f"What stage {k} returns", not self.expands)
        values = (*batch.values, *called.left.values())
        # Where the stage's inputs need no gradient its outputs are tied: their gradients come before the backward.
        values, _ = release(values, waiting)
        if i in self._nexts[k].values():
            values, tokens = hold(values)
            self._tokens[i, k] = (*tokens, *called.tokens)
        num_values = len(batch.values)
        return MicroBatch(values[:num_values], batch.is_single), dict(
            zip(called.left, values[num_values:], strict=True)
        )

    def _leaves(self, k: int) -> bool:
        """Whether the next stage is on another device."""
        return k + 1 < len(self.stages) and self.stages[k].device != self.stages[k + 1].device

    def _send(self, i: int, k: int, batch: MicroBatch, left: Mapping[Key, Any]) -> None:
        device = self.stages[k].device
        self._batches[i] = batch
        if k + 1 == len(self.stages):
            return
        for key, value in left.items():
            if key not in self.routes:
                raise RuntimeError(f"Stage {k} stashed {key[1]!r}, which no later stage pops.")
            self._skips[i, key] = depart((value,), device)
        if len(self._batches) > 1 or len({stage.device for stage in self.stages}) > 1:
            pending = [skip.values[0] for (other, _), skip in self._skips.items() if other == i]
            self._shared[i] = may_be_separated(batch.values, pending)
        self._sent[i] = depart(batch.values, device)


def run_undivided(stages: Sequence[Stage], batch: MicroBatch, expands: bool) -> MicroBatch:
    """The forward of a single micro-batch on a single device: nothing to order, to copy or to compute again."""
    with exchanging(SkipExchange({})):
        for k, stage in enumerate(stages):
            batch = MicroBatch.of(stage.module(*batch.values) if expands else stage.module(batch.value))
            check_values(batch.values, f"What stage {k} returns", not expands)
    return batch


def _forward(
    module: Callable[..., Any], popped: Mapping[Key, Any], expands: bool, is_single: bool, wakes: bool
) -> Callable[..., Called]:
    """A stage's forward as a function of its values.

    It must not know the flow: a graph keeps it, and the flow keeps what the graph gives.
    """

    def call(*values: Any) -> Called:
        with exchanging(SkipExchange(popped)) as exchange:
            result = module(*values) if expands else module(MicroBatch(values, is_single).value)
        outgoing = (*MicroBatch.of(result).values, *exchange.left.values())
        return Called(result, exchange.left, waking(outgoing) if wakes else ())

    return call
