"""Wrappers of stage programs: activation recomputation, and starting from cached activations."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.data.batches import CacheTags, take_rows
from hf_pipetransformer.engine.program import MicroBatch, ProgramWrapper, StageProgram, as_sent
from hf_pipetransformer.schedules.actions import BEGINS_BACKWARD, COMPUTATIONS, ActionList, Op
from hf_pipetransformer.schedules.placement import first_above


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.view import StageView


_RUNS_AGAIN: ContextVar[bool] = ContextVar("runs_again", default=False)


def runs_again() -> bool:
    """Return True inside a forward that is being recomputed."""
    return _RUNS_AGAIN.get()


def recomputed_micro_batches(actions: ActionList, chunk: int, mode: str) -> frozenset[int]:
    """Return the micro-batches of an action list whose forward is recomputed before their backward.

    Micro-batches whose backward follows immediately are left out, because recomputing them would save no memory.
    `mode` is `never`, `always`, or `except_last` (all but the last micro-batch).
    """
    # Those of the whole list: a window may have forwards whose backward comes with the next list.
    forwards = {i for op, i, own in actions if (op, own) == (Op.FORWARD, chunk)}
    computations = [action for action in actions if action.op in COMPUTATIONS]
    at_once = {
        i
        for (op, i, own), following in pairwise(computations)
        if (op, own) == (Op.FORWARD, chunk) and following in [(begin, i, own) for begin in BEGINS_BACKWARD]
    }
    last = {max(forwards, default=0)} if mode == "except_last" else set()
    return frozenset() if mode == "never" else frozenset(forwards - at_once - last)


@dataclass(frozen=True)
class _Start:
    """Input of a forward, and the RNG states when it ran."""

    received: torch.Tensor | None
    cpu: torch.Tensor
    cuda: torch.Tensor | None


class RecomputingProgram(ProgramWrapper):
    """Wrapper that recomputes a stage program's forward before its backward, instead of saving activations.

    Recomputation restores the RNG state of the CPU and of `device`.
    """

    def __init__(self, program: StageProgram, mode: str, chunk: int, device: torch.device) -> None:
        super().__init__(program)
        self.mode = mode
        self.chunk = chunk
        self.device = device
        self._actions: ActionList = ()
        self._recomputed: frozenset[int] = frozenset()
        self._starts: dict[int, _Start] = {}

    def clear(self) -> None:
        super().clear()
        self._starts.clear()

    def extend(self, actions: ActionList) -> None:
        super().extend(actions)
        # All steps of a layout run the same list, so a look at its identity is enough.
        if actions is not self._actions:
            self._actions, self._recomputed = actions, recomputed_micro_batches(actions, self.chunk, self.mode)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        if not torch.is_grad_enabled() or micro_batch.index not in self._recomputed:
            return self.program.forward(micro_batch, received)
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        # Taken before the forward: it draws from these states, and the second run must draw the same.
        self._starts[micro_batch.index] = _Start(received, torch.get_rng_state(), cuda)
        with torch.no_grad():
            return self.program.forward(micro_batch, received)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        start = self._starts.pop(micro_batch.index, None)
        if start is not None:
            # While this is set, metrics of the loss record nothing: the first run has done so.
            token, devices = _RUNS_AGAIN.set(True), [] if start.cuda is None else [self.device]
            try:
                # Dropout draws the same masks again, and whatever draws next draws as if nothing had run twice.
                with torch.random.fork_rng(devices=devices), torch.enable_grad():
                    torch.set_rng_state(start.cpu)
                    if start.cuda is not None:
                        torch.cuda.set_rng_state(start.cuda, self.device)
                    # What it returns is of no use: the program itself holds what the backward starts from.
                    self.program.forward(micro_batch, start.received)
            finally:
                _RUNS_AGAIN.reset(token)
        return self.program.backward_input(micro_batch, gradient)


class CachedEntryProgram(ProgramWrapper):
    """Program for a stage with frozen blocks that the activation cache can skip.

    Each sample starts at the first block that its cached activation does not cover. From the entry block on, all
    samples run together.

    Args:
        below: this stage's blocks below the entry block, all frozen. Not empty.
        entry_block: first block above the cached layers; it may be on a later stage.
        above: program of this stage's blocks from the entry block on; None if there are none.
        program: that of all blocks of this stage, for micro-batches without `tags`.
    """

    def __init__(
        self,
        view: StageView,
        below: range,
        entry_block: int,
        above: StageProgram | None,
        program: StageProgram,
        dtype_entry: torch.dtype,
        dtype_out: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(program, above)
        self.view = view
        self.below = below
        self.entry_block = entry_block
        self.above = above
        self.dtype_entry = dtype_entry
        self.dtype_out = dtype_out
        self.device = device

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        if micro_batch.tags is None:
            return self.program.forward(micro_batch, received)
        entry = self._bring_to_entry(received, micro_batch, micro_batch.tags)
        if self.above is None:
            return as_sent(entry, micro_batch, self.dtype_out)
        return self.above.forward(micro_batch, entry)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self._active(micro_batch).backward_input(micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self._active(micro_batch).backward_weight(micro_batch)

    def _active(self, micro_batch: MicroBatch) -> StageProgram:
        return self.program if micro_batch.tags is None or self.above is None else self.above

    @torch.no_grad()
    def _bring_to_entry(self, received: torch.Tensor | None, micro_batch: MicroBatch, tags: CacheTags) -> torch.Tensor:
        """Return the activation after the blocks `below`, `(micro-batch, seq, hidden)`."""
        start, stop = self.below.start, self.below.stop
        hidden = received
        if hidden is None and tags.hidden is not None:
            # Copy in the stored dtype and cast on the device, because the stored dtype may be smaller.
            hidden = tags.hidden.to(self.device, non_blocking=True).to(self.dtype_entry)
        # A sample whose record ends below this stage comes from the stage before, and enters at the first block.
        enters_at = torch.tensor([max(first_above(count), start) for count in tags.num_layers.tolist()])
        for block in enters_at[enters_at < stop].unique().tolist():
            rows = (enters_at == block).nonzero().squeeze(1)
            # Block 0, the embeddings, reads the inputs rather than an activation.
            inputs, given = micro_batch.inputs, hidden if block else None
            is_part = len(rows) < len(enters_at)
            if is_part:
                inputs = take_rows(inputs, rows)
                given = None if given is None else given[rows.to(given.device, non_blocking=True)]
            reached = self.view.run(range(block, stop), given, partial(micro_batch.forward, dict(inputs)))
            if is_part:
                if hidden is None:
                    # Rows that enter at a later block are filled in by a later turn of the loop.
                    hidden = reached.new_zeros(len(enters_at), *reached.shape[1:])
                hidden[rows.to(hidden.device, non_blocking=True)] = reached.to(hidden.dtype)
            else:
                hidden = reached
        assert hidden is not None
        # Only the stage on which the cached layers end has the activation that is stored.
        if stop == self.entry_block and micro_batch.write is not None:
            micro_batch.write(micro_batch, hidden)
        return hidden
