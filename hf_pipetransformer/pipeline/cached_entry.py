"""The cached entry: a program whose stage begins amid its units where activations are stored (section 3.4)."""

from __future__ import annotations

from typing import Any

import torch

from hf_pipetransformer.batches import take_rows
from hf_pipetransformer.cache_tags import CacheTags
from hf_pipetransformer.pipeline.program import MicroBatch, StageProgram, as_sent
from hf_pipetransformer.pipeline.schedules import Row
from hf_pipetransformer.splitters.view import StageView
from hf_pipetransformer.units import first_above


class CachedEntryProgram:
    """Brings each sample to the entry unit, from where it is stored, and runs the units from there on.

    Args:
        view: of the model.
        below: the units of this stage that stored activations go past: frozen ones. Not empty.
        entry_unit: that stored activations enter, on this stage or a later one.
        above: the program of this stage's units from there on; None if it has none.
        whole: the program of all of this stage's units, for micro-batches of which nothing is stored.
        dtype_entry: of the activation that enters the entry unit.
        dtype_out: of the activation that leaves the stage.
        device: where the stage computes.
    """

    def __init__(
        self,
        view: StageView,
        below: range,
        entry_unit: int,
        above: StageProgram | None,
        whole: StageProgram,
        dtype_entry: torch.dtype,
        dtype_out: torch.dtype,
        device: torch.device,
    ) -> None:
        self.view = view
        self.below = below
        self.entry_unit = entry_unit
        self.above = above
        self.whole = whole
        self.dtype_entry = dtype_entry
        self.dtype_out = dtype_out
        self.device = device

    def begin(self, row: Row) -> None:
        self.whole.begin(row)
        if self.above is not None:
            self.above.begin(row)

    def extend(self, row: Row) -> None:
        self.whole.extend(row)
        if self.above is not None:
            self.above.extend(row)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        if micro_batch.tags is None:
            return self.whole.forward(micro_batch, received)
        entry = self._bring_to_entry(received, micro_batch, micro_batch.tags)
        if self.above is None:
            return as_sent(entry, micro_batch, self.dtype_out)
        return self.above.forward(micro_batch, entry)

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        if micro_batch.tags is None:
            return self.whole.predict(micro_batch, received)
        entry = self._bring_to_entry(received, micro_batch, micro_batch.tags)
        if self.above is None:
            return as_sent(entry, micro_batch, self.dtype_out)
        return self.above.predict(micro_batch, entry)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self._active(micro_batch).backward(micro_batch, gradient)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return self._active(micro_batch).backward_input(micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self._active(micro_batch).backward_weight(micro_batch)

    def _active(self, micro_batch: MicroBatch) -> StageProgram:
        return self.whole if micro_batch.tags is None or self.above is None else self.above

    @torch.no_grad()
    def _bring_to_entry(self, received: torch.Tensor | None, micro_batch: MicroBatch, tags: CacheTags) -> torch.Tensor:
        """The activation behind `below`, `(micro-batch, seq, hidden)`.

        Each sample runs through those of these units that its stored activation does not cover.
        """
        start, stop = self.below.start, self.below.stop
        hidden = received
        if hidden is None and tags.hidden is not None:
            # In its stored dtype, which may be half as long.
            hidden = tags.hidden.to(self.device, non_blocking=True).to(self.dtype_entry)
        enters_at = torch.tensor([max(first_above(count), start) for count in tags.num_layers.tolist()])
        for unit in enters_at[enters_at < stop].unique().tolist():
            rows = (enters_at == unit).nonzero().squeeze(1)
            inputs, given = micro_batch.inputs, hidden if unit else None
            is_part = len(rows) < len(enters_at)
            if is_part:
                inputs = take_rows(inputs, rows)
                given = None if given is None else given[rows.to(given.device, non_blocking=True)]
            reached = self._run(range(unit, stop), given, inputs, micro_batch)
            if is_part:
                if hidden is None:
                    hidden = reached.new_zeros(len(enters_at), *reached.shape[1:])
                hidden[rows.to(hidden.device, non_blocking=True)] = reached.to(hidden.dtype)
            else:
                hidden = reached
        assert hidden is not None
        if stop == self.entry_unit and micro_batch.write is not None:
            micro_batch.write(micro_batch, hidden)
        return hidden

    def _run(
        self, units: range, given: torch.Tensor | None, inputs: dict[str, Any], micro_batch: MicroBatch
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.view.run(units, given, lambda: micro_batch.forward(dict(inputs)))
        return hidden
