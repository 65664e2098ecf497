"""Forward of a mini-batch through the stages, by clock cycles, and the order of its backward.

Extra edges in the autograd graph order backwards that are otherwise independent: each stage runs the backwards of its
micro-batches in the order of the schedule table. This bounds the activations that recomputation keeps at a time, keeps
the devices in step, and sums gradients in the same order in every run.
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
from hf_pipetransformer.pipe.skip import Key, SkipExchange, exchanging
from hf_pipetransformer.pipe.stages import Stage
from hf_pipetransformer.pipe.workers import Departed, Workers, arrive, depart
from hf_pipetransformer.schedules import GPIPE, Op, source_of


Clock = tuple[tuple[int, int], ...]
"""(micro-batch, stage) pairs that are computed in one clock cycle."""


@lru_cache(maxsize=64)
def clock_cycles(num_micro_batches: int, num_stages: int) -> tuple[Clock, ...]:
    """Group the forwards of GPipe's table into clock cycles, ordered by stage within a cycle.

    Three micro-batches, two stages (micro-batch, stage):

        (0, 0) | (1, 0) (0, 1) | (2, 0) (1, 1) | (2, 1)
    """
    times: dict[tuple[int, int], int] = {}
    for stage, actions in enumerate(GPIPE.table(num_stages, num_micro_batches)):
        now = -1
        for op, micro_batch, _ in actions:
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
    """Map each micro-batch to the one whose backward comes next on the stage; the last one is left out."""
    actions = GPIPE.table(num_stages, num_micro_batches)[stage]
    order = [micro_batch for op, micro_batch, _ in actions if op is Op.BACKWARD]
    return dict(pairwise(order))


class _Held(torch.autograd.Function):
    """Identity on tensors that also returns a token, and whose backward waits for the token's gradient."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return *(tensor.detach() for tensor in tensors), tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients[:-1]


class _Releasing(torch.autograd.Function):
    """Identity on tensors that takes tokens, and whose backward releases what waits for them."""

    @staticmethod
    def forward(ctx: Any, num_tokens: int, *tokens_and_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_tokens = num_tokens
        return tuple(tensor.detach() for tensor in tokens_and_tensors[num_tokens:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # None is enough for a token: autograd counts the edge as done, and no gradient is allocated for it.
        return None, *([None] * ctx.num_tokens), *gradients


def _needing_gradients(values: Sequence[Any]) -> dict[int, torch.Tensor]:
    # By id: a tensor that occurs twice must stay one object, because a module may change it in place.
    return {id(value): value for value in values if isinstance(value, torch.Tensor) and value.requires_grad}


def _replaced(
    values: Sequence[Any], found: dict[int, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    results = dict(zip(found, tensors, strict=True))
    return tuple(results.get(id(value), value) for value in values)


def hold(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Return `values`, whose backward waits until their token is released, and the token if any needs a gradient."""
    found = _needing_gradients(values)
    if not found:
        return tuple(values), ()
    *tensors, token = _Held.apply(*found.values())  # type: ignore[no-untyped-call]
    return _replaced(values, found, tensors), (token,)


def release(values: Sequence[Any], tokens: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Return `values`, whose backward precedes that of the values held by `tokens`, and the tokens not yet released.

    No token is released if no value needs a gradient: one would be computed only to keep the order.
    """
    found = _needing_gradients(values) if tokens else {}
    if not found:
        return tuple(values), tuple(tokens)
    tensors = _Releasing.apply(len(tokens), *tokens, *found.values())  # type: ignore[no-untyped-call]
    return _replaced(values, found, tensors), ()


def may_be_separated(values: Sequence[Any], others: Sequence[Any]) -> set[int]:
    """Return the positions of values that share memory with other values or with skip tensors (`others`).

    Between two stages each tensor gets a separate autograd node or copy: an in-place change of one would no longer
    reach the other.
    """
    # An object that occurs twice stays one object, so it is not counted as shared.
    once = {id(value): value for value in values}.values()
    users = Counter(place for place in map(_memory, (*once, *others)) if place is not None)
    shared = {place for place, count in users.items() if count > 1}
    return {i for i, value in enumerate(values) if _memory(value) in shared}


def _memory(value: Any) -> int | None:
    """Return the storage address of a tensor; None if it has no strided storage."""
    has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return value.untyped_storage().data_ptr() if has_memory and value.numel() else None


class InPlaceCheck:
    """Detect in-place changes of a stage's inputs during its forward, by tensor versions.

    Checks all inputs of a checkpointed forward, which will run again, else those that share memory (`shared`).
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
        """Raise a RuntimeError if the forward changed an input in place."""
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
    """Output of a stage's forward, skip tensors stashed for later stages, and tokens that trigger recomputation."""

    result: Any
    left: dict[Key, Any]
    tokens: Tokens


class Flow:
    """Forward of one mini-batch through all stages.

    Args:
        routes: (stage that stashes, stage that pops) of each skip tensor.
        num_checkpointed: number of leading micro-batches that keep only the stages' inputs and are recomputed.
        expands: True to pass a tuple to the next stage as several arguments, False as one.
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
        # The calling thread serves the CPU if a stage runs there; a single device needs no further thread.
        self._own = torch.device("cpu") if any(device.type == "cpu" for device in devices) else devices[0]

    def run(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the last stage's output of each micro-batch. An error is raised after all worker threads stopped."""
        self._batches = list(micro_batches)
        self._nexts = [next_backwards(len(micro_batches), len(self.stages), k) for k in range(len(self.stages))]
        # Worker threads set their device; the calling thread's current GPU may not be the one that it serves.
        own = torch.cuda.device(self._own) if self._own.type == "cuda" else nullcontext()
        with own, Workers([stage.device for stage in self.stages], self._own) as workers:
            for clock in clock_cycles(len(micro_batches), len(self.stages)):
                workers.run([(self.stages[k].device, partial(self._compute, i, k)) for i, k in clock])
        return self._batches

    def _compute(self, i: int, k: int) -> None:
        device = self.stages[k].device
        values = arrive(self._sent.pop(i), device) if k else self._batches[i].values
        keys = [key for key, (stashes, pops) in self.routes.items() if stashes < pops == k]
        popped = [arrive(self._skips.pop((i, key)), device)[0] for key in keys]
        # Keep this stage's backwards in the order of the table: the micro-batch after `i` waits for this one.
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
        # Inputs without gradients cannot release tokens: the outputs do it instead, before the stage's own backward.
        values, _ = release(values, waiting)
        if i in self._nexts[k].values():
            values, tokens = hold(values)
            self._tokens[i, k] = (*tokens, *called.tokens)
        num_values = len(batch.values)
        return MicroBatch(values[:num_values], batch.is_single), dict(
            zip(called.left, values[num_values:], strict=True)
        )

    def _leaves(self, k: int) -> bool:
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
    """Run a single micro-batch on a single device, with nothing to order, copy or recompute."""
    with exchanging(SkipExchange({})):
        for k, stage in enumerate(stages):
            batch = MicroBatch.of(stage.module(*batch.values) if expands else stage.module(batch.value))
            check_values(batch.values, f"What stage {k} returns", not expands)
    return batch


def _forward(
    module: Callable[..., Any], popped: Mapping[Key, Any], expands: bool, is_single: bool, wakes: bool
) -> Callable[..., Called]:
    # A plain function, without the Flow: the graph keeps it and the flow keeps outputs of the graph, a cycle.
    def call(*values: Any) -> Called:
        with exchanging(SkipExchange(popped)) as exchange:
            result = module(*values) if expands else module(MicroBatch(values, is_single).value)
        outgoing = (*MicroBatch.of(result).values, *exchange.left.values())
        return Called(result, exchange.left, waking(outgoing) if wakes else ())

    return call
