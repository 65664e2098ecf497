"""One mini-batch through the stages, by clock cycles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_pipetransformer.pipe.clock import clock_cycles, next_backwards
from hf_pipetransformer.pipe.in_place import InPlaceCheck, may_be_separated
from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values
from hf_pipetransformer.pipe.ordering import hold, release
from hf_pipetransformer.pipe.recomputation import checkpointed, waking
from hf_pipetransformer.pipe.skip.exchange import SkipExchange, exchanging
from hf_pipetransformer.pipe.skip.namespace import Key
from hf_pipetransformer.pipe.stages import Stage
from hf_pipetransformer.pipe.streams import Departed, arrive, depart
from hf_pipetransformer.pipe.workers import Workers


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
