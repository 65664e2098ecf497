"""The inputs of micro-batches on their way to the device, and out of it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.staging import CopyStream
from hf_pipetransformer.engine.engine import Engine
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.runtime.execution import OnDevice
from hf_pipetransformer.runtime.messages import as_message, from_message
from hf_pipetransformer.schedules.actions import COMPUTATIONS, SENDS
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from tests.support.one_process import CPU, make_links, together


class Watching:
    """A stage that passes on what it gets, and notes which micro-batches' inputs are alive at each computation."""

    def __init__(self, alive: weakref.WeakValueDictionary[int, torch.Tensor], is_last: bool) -> None:
        self.alive, self.is_last = alive, is_last
        self.seen: list[set[int]] = []

    def clear(self) -> None:
        pass

    def extend(self, row: Any) -> None:
        pass

    def _look(self) -> None:
        self.seen.append(set(self.alive.keys()))

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        self._look()
        return torch.zeros(()) if self.is_last else torch.zeros(micro_batch.activation_shape)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor:
        self._look()
        return torch.zeros(micro_batch.activation_shape)

    backward_input = backward

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self._look()


@pytest.mark.parametrize(("name", "num_chunks"), [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_v", 2)])
def test_inputs_are_prepared_once_and_stay_until_the_last_use(name: str, num_chunks: int) -> None:
    schedule, count = find_schedule(name), 6
    placement = Placement(2, num_chunks, schedule.abilities.placement)
    table = schedule.table(2, count, num_chunks)
    prepared: list[list[int]] = [[], []]
    alive: list[weakref.WeakValueDictionary[int, torch.Tensor]] = [weakref.WeakValueDictionary() for _ in range(2)]
    programs = [
        [Watching(alive[rank], stage == placement.num_stages - 1) for stage in placement.stages_of(rank)]
        for rank in range(2)
    ]

    def micro_batches(rank: int) -> OnDevice:
        def prepare(inputs: dict[str, Any]) -> dict[str, Any]:
            index = int(inputs["x"])
            prepared[rank].append(index)
            alive[rank][index] = there = inputs["x"].clone()
            return {"x": there}

        parts = [MicroBatch(i, {"x": torch.tensor(i)}, 1.0, (1,), lambda _: None) for i in range(count)]
        uses = Counter(action.micro_batch for action in table[rank] if action.op not in SENDS)
        return OnDevice(parts, uses, prepare, CopyStream(CPU))

    links = make_links(placement)
    engines = [Engine(programs[rank], links[rank], StepMeter(CPU)) for rank in range(2)]
    given = [micro_batches(rank) for rank in range(2)]
    together([engines[rank].begin(table[rank], given[rank]).drain for rank in range(2)])
    for rank, row in enumerate(table):
        assert sorted(prepared[rank]) == list(range(count))
        assert not alive[rank]
        computations = [action for action in row if action.op in COMPUTATIONS]
        ends = {action.micro_batch: position for position, action in enumerate(computations)}
        seen = [iter(program.seen) for program in programs[rank]]
        for position, action in enumerate(computations):
            gone = {i for i, end in ends.items() if end < position}
            assert not gone & next(seen[action.chunk]), f"{action} of {row}"


def test_an_output_keeps_its_class_on_its_way_to_the_other_ranks() -> None:
    output = SequenceClassifierOutput(loss=torch.tensor(1.5), logits=torch.ones(2, 3))
    found = from_message(as_message(output), CPU)
    assert type(found) is SequenceClassifierOutput and found.keys() == output.keys()
    assert torch.equal(found.logits, output.logits)


@pytest.mark.parametrize("name", ["subprocess.CompletedProcess", "dataclasses.Field", "os.nothing_of_that_name"])
def test_a_message_makes_outputs_only(name: str) -> None:
    module, _, kind = name.rpartition(".")
    with pytest.raises(PipelineError, match=f"output of class {name}: expected"):
        from_message({"module": module, "name": kind, "value": {}}, CPU)
