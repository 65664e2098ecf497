"""One mini-batch through the stages, by clock cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch

from hf_pipetransformer.pipe.clock import clock_cycles, next_backwards
from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values
from hf_pipetransformer.pipe.ordering import hold, release
from hf_pipetransformer.pipe.recomputation import checkpointed, waking
from hf_pipetransformer.pipe.skip.exchange import SkipExchange, exchanging
from hf_pipetransformer.pipe.skip.namespace import Key
from hf_pipetransformer.pipe.stages import Stage
from hf_pipetransformer.pipe.streams import arrive, depart, is_same_place
from hf_pipetransformer.pipe.workers import Workers


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
        self._skips: dict[tuple[int, Key], Any] = {}
        self._tokens: dict[tuple[int | None, int], tuple[torch.Tensor, ...]] = {}
        devices = [stage.device for stage in stages]
        on_cpu = {device for device in devices if device.type == "cpu"}
        # The caller works for the CPU; with a single device nobody else is needed.
        self._own = torch.device("cpu") if on_cpu else devices[0]
        # What is drawn on the CPU comes from one generator: a forward that runs again must have drawn without a break.
        is_shared = len(on_cpu) > 1 and num_checkpointed > 0
        self._cpu_turn: AbstractContextManager[Any] = Lock() if is_shared else nullcontext()

    def run(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """What the last stage gives for each.

        Raises:
            BaseException: the first that a stage raised, when every device has stopped.
        """
        self._batches = list(micro_batches)
        self._nexts = [next_backwards(len(micro_batches), len(self.stages), k) for k in range(len(self.stages))]
        with Workers([stage.device for stage in self.stages], self._own) as workers:
            for clock in clock_cycles(len(micro_batches), len(self.stages)):
                workers.run([(self.stages[k].device, partial(self._compute, i, k)) for i, k in clock])
        return self._batches

    def _compute(self, i: int, k: int) -> None:
        """Micro-batch `i` on stage `k`, from its arrival to its departure."""
        stage, batch = self.stages[k], self._batches[i]
        values = batch.values
        if k:
            values = arrive(values, self.stages[k - 1].device, stage.device)
        popped = {
            key: self._popped(i, key, stage) for key, (stashes, pops) in self.routes.items() if stashes < pops == k
        }
        values, popped = self._tied(i, k, values, popped)
        with self._cpu_turn if stage.device.type == "cpu" else nullcontext():
            result, left, tokens = self._called(i, k, MicroBatch(values, batch.is_single), popped)
        batch, left = self._held(i, k, result, left, tokens)
        self._send(i, k, batch, left)

    def _popped(self, i: int, key: Key, stage: Stage) -> Any:
        source = self.stages[self.routes[key][0]].device
        return arrive((self._skips.pop((i, key)),), source, stage.device)[0]

    def _tied(
        self, i: int, k: int, values: tuple[Any, ...], popped: dict[Key, Any]
    ) -> tuple[tuple[Any, ...], dict[Key, Any]]:
        """With the backwards of this stage in the order of the table: the one after that of `i` waits for it."""
        tied = release((*values, *popped.values()), self._tokens.pop((self._nexts[k].get(i), k), ()))
        return tied[: len(values)], dict(zip(popped, tied[len(values) :], strict=True))

    def _called(
        self, i: int, k: int, batch: MicroBatch, popped: Mapping[Key, Any]
    ) -> tuple[Any, dict[Key, Any], tuple[torch.Tensor, ...]]:
        """What the stage returns and stashes for later ones, and a token to have it computed again."""
        module, wakes = self.stages[k].module, i < self.num_checkpointed and self._leaves(k)

        def call(*values: Any) -> tuple[Any, dict[Key, Any], tuple[torch.Tensor, ...]]:
            with exchanging(SkipExchange(popped)) as exchange:
                result = module(*values) if self.expands else module(MicroBatch(values, batch.is_single).value)
            outgoing = (*MicroBatch.of(result).values, *exchange.left.values())
            return result, exchange.left, waking(outgoing) if wakes else ()

        if i >= self.num_checkpointed:
            return call(*batch.values)
        kept = [value for value in (*batch.values, *popped.values()) if isinstance(value, torch.Tensor)]
        versions = [tensor._version for tensor in kept]
        result = checkpointed(call, *batch.values)
        if versions != [tensor._version for tensor in kept]:
            raise RuntimeError(
                "A stage changes its input in place, which checkpointing would compute again from what is left of it. "
                "Write the stage's first operation out of place (nn.ReLU() for nn.ReLU(inplace=True)), or use "
                "checkpoint='never'."
            )
        return result

    def _held(
        self, i: int, k: int, result: Any, left: dict[Key, Any], tokens: tuple[torch.Tensor, ...]
    ) -> tuple[MicroBatch, dict[Key, Any]]:
        batch = MicroBatch.of(result)
        check_values(batch.values, f"What stage {k} returns", not self.expands)
        if i not in self._nexts[k].values():
            return batch, left
        held, token = hold((*batch.values, *left.values()))
        self._tokens[i, k] = (*token, *tokens)
        num_values = len(batch.values)
        return MicroBatch(held[:num_values], batch.is_single), dict(zip(left, held[num_values:], strict=True))

    def _leaves(self, k: int) -> bool:
        """Whether the next stage is on another device."""
        return k + 1 < len(self.stages) and self.stages[k].device != self.stages[k + 1].device

    def _send(self, i: int, k: int, batch: MicroBatch, left: Mapping[Key, Any]) -> None:
        device, values = self.stages[k].device, batch.values
        if self._leaves(k):
            values = depart(values, device)
        self._batches[i] = MicroBatch(values, batch.is_single)
        for key, value in left.items():
            if key not in self.routes:
                raise RuntimeError(f"Stage {k} stashed {key[1]!r}, which no later stage pops.")
            target = self.stages[self.routes[key][1]].device
            is_near = value is None or is_same_place(device, target)
            self._skips[i, key] = value if is_near else depart((value,), device)[0]
