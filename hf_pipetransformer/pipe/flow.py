"""Forward of a mini-batch through the stages, by clock cycles, and the order of its backward: the schedule of GPipe.

Extra edges in the autograd graph order backwards that are otherwise independent: each stage runs the backwards of its
micro-batches from the last to the first. This bounds the activations that recomputation keeps at a time, keeps
the devices in step, and sums gradients in the same order in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values, replaced
from hf_pipetransformer.pipe.recomputation import checkpointed, waking
from hf_pipetransformer.pipe.skip import Key, SkipExchange, exchanging
from hf_pipetransformer.pipe.workers import Departed, arrive, depart, workers


if TYPE_CHECKING:
    from hf_pipetransformer.pipe.stages import Stage


def clock_cycles(num_micro_batches: int, num_stages: int) -> list[list[tuple[int, int]]]:
    """Return the (micro-batch, stage) pairs of each clock cycle of GPipe's forward, by stage within a cycle.

    Three micro-batches, two stages:

        (0, 0) | (1, 0) (0, 1) | (2, 0) (1, 1) | (2, 1)
    """
    return [
        [(now - k, k) for k in range(num_stages) if 0 <= now - k < num_micro_batches]
        for now in range(num_micro_batches + num_stages - 1)
    ]


class _Ordering(torch.autograd.Function):
    """Identity on tensors that also takes tokens and returns one.

    Its backward waits for the gradient of the token that it returns, and comes before the nodes of those it takes.
    """

    @staticmethod
    def forward(ctx: Any, num_tokens: int, *tokens_and_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Or autograd would fill the gradients that do not arrive, such as those of tokens, with zeros.
        ctx.set_materialize_grads(False)
        ctx.num_tokens = num_tokens
        tensors = tokens_and_tensors[num_tokens:]
        return *(tensor.detach() for tensor in tensors), tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # None is enough for a token: autograd counts the edge as done, and no gradient is allocated for it.
        return None, *([None] * ctx.num_tokens), *gradients[:-1]


Tokens = tuple[torch.Tensor, ...]


def _ordered(values: Sequence[Any], tokens: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], Tokens]:
    """Return `values`, whose backward precedes that of the `tokens`, and their token if any needs a gradient."""
    made: list[torch.Tensor] = []

    def step(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        *outputs, token = _Ordering.apply(len(tokens), *tokens, *tensors)  # type: ignore[no-untyped-call]
        made.append(token)
        return outputs

    values = replaced(values, lambda tensor: tensor.requires_grad, step)
    return values, tuple(made)


def hold(values: Sequence[Any]) -> tuple[tuple[Any, ...], Tokens]:
    """Return `values`, whose backward waits until their token is released, and the token if any needs a gradient."""
    return _ordered(values, ())


def release(values: Sequence[Any], tokens: Tokens) -> tuple[tuple[Any, ...], Tokens]:
    """Return `values`, whose backward precedes that of the values held by `tokens`, and the tokens not yet released.

    No token is released if no value needs a gradient: one would be computed only to keep the order.
    """
    if not tokens:
        return tuple(values), ()
    values, made = _ordered(values, tokens)
    return values, () if made else tokens


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
    # All empty tensors and those on `meta` have the address 0, and would count as shared.
    has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return value.untyped_storage().data_ptr() if has_memory and value.numel() else None


@contextmanager
def refusing_changes(values: Sequence[Any], is_checkpointed: bool, shared: set[int]) -> Iterator[None]:
    """Raise a RuntimeError if the forward inside changes one of the `values`, its inputs, in place.

    Looks at the versions of all inputs of a checkpointed forward, which will run again, else of those that share
    memory (`shared`).
    """
    before = [
        (value, value._version)
        for i, value in enumerate(values)
        # Tensors of inference mode have no version counter.
        if isinstance(value, torch.Tensor) and not value.is_inference() and (is_checkpointed or i in shared)
    ]
    yield
    if all(tensor._version == version for tensor, version in before):
        return
    remedy = "Write the stage's first operation out of place (nn.ReLU() for nn.ReLU(inplace=True))"
    if is_checkpointed:
        raise RuntimeError(
            "A stage changes its input in place, which checkpointing would compute again from what is left of it. "
            f"{remedy}, or use checkpoint='never'."
        )
    raise RuntimeError(
        "A stage changes its input in place, and another tensor of the micro-batch, one that is stashed or "
        f"returned twice, is the same memory. {remedy}."
    )


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
        self._tokens: dict[tuple[int, int], Tokens] = {}
        devices = [stage.device for stage in stages]
        # The calling thread serves the CPU if a stage runs there; a single device needs no further thread.
        self._own = torch.device("cpu") if any(device.type == "cpu" for device in devices) else devices[0]

    def run(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the last stage's output of each micro-batch. An error is raised after all worker threads stopped."""
        self._batches = list(micro_batches)
        # Worker threads set their device; the calling thread's current GPU may not be the one that it serves.
        own = torch.cuda.device(self._own) if self._own.type == "cuda" else nullcontext()
        with own, workers([stage.device for stage in self.stages], self._own) as run:
            # A cycle ends before the next one begins, so that no thread reads what another one writes to the
            # dictionaries here.
            for clock in clock_cycles(len(micro_batches), len(self.stages)):
                run([(self.stages[k].device, partial(self._compute, i, k)) for i, k in clock])
        return self._batches

    def _compute(self, i: int, k: int) -> None:
        device = self.stages[k].device
        values = arrive(self._sent.pop(i), device) if k else self._batches[i].values
        # A skip tensor that its own stage pops never leaves the SkipExchange of that forward.
        keys = [key for key, (stashes, pops) in self.routes.items() if stashes < pops == k]
        popped = [arrive(self._skips.pop((i, key)), device)[0] for key in keys]
        # A stage's backwards run from the last micro-batch to the first: the one before waits for this one.
        waiting = self._tokens.pop((i - 1, k), ())
        tied, waiting = release((*values, *popped), waiting)
        batch = MicroBatch(tied[: len(values)], self._batches[i].is_single)
        received = dict(zip(keys, tied[len(values) :], strict=True))
        with refusing_changes(tied, i < self.num_checkpointed, self._shared.pop(i, set())):
            called = self._called(i, k, batch, received)

        output = MicroBatch.of(called.result)
        check_values(output.values, f"What stage {k} returns", not self.expands)
        # Inputs without gradients cannot release tokens: the outputs do it instead, before the stage's own backward.
        values, _ = release((*output.values, *called.left.values()), waiting)
        if i + 1 < len(self._batches):
            values, tokens = hold(values)
            # The backward of the next micro-batch also releases the recomputation of this one, see `waking`.
            self._tokens[i, k] = (*tokens, *called.tokens)
        num_values = len(output.values)
        self._batches[i] = MicroBatch(values[:num_values], output.is_single)
        if k + 1 < len(self.stages):
            self._send(i, k, dict(zip(called.left, values[num_values:], strict=True)))

    def _called(self, i: int, k: int, batch: MicroBatch, popped: Mapping[Key, Any]) -> Called:
        stage, is_checkpointed = self.stages[k], i < self.num_checkpointed
        # Recomputing early pays only while a gradient travels from another device.
        leaves = k + 1 < len(self.stages) and stage.device != self.stages[k + 1].device
        call = _forward(stage.module, popped, self.expands, batch.is_single, is_checkpointed and leaves)
        if is_checkpointed:
            return checkpointed(call, *batch.values, drawing=stage.drawing)
        if not self.num_checkpointed:
            return call(*batch.values)
        # The last micro-batch is not recomputed. But its draws must not fall into a checkpointed forward of another
        # thread, which would then draw other numbers when it runs again.
        with stage.drawing.noted():
            return call(*batch.values)

    def _send(self, i: int, k: int, left: Mapping[Key, Any]) -> None:
        device, values = self.stages[k].device, self._batches[i].values
        for key, value in left.items():
            if key not in self.routes:
                raise RuntimeError(
                    f"Stage {k} stashed {key[1]!r}, which no later stage pops: expected a module in one that declares "
                    "it in @skippable(pop=[...]). verify_skippables() looks at a whole model."
                )
            self._skips[i, key] = depart((value,), device)
        # Tensors become separate nodes between micro-batches and copies between devices; otherwise they stay as they
        # are.
        if len(self._batches) > 1 or len({stage.device for stage in self.stages}) > 1:
            pending = [skip.values[0] for (other, _), skip in self._skips.items() if other == i]
            self._shared[i] = may_be_separated(values, pending)
        self._sent[i] = depart(values, device)


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
