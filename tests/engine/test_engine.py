"""The engine without a process group: fake programs, and links that are queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_pipetransformer.engine.engine import Engine, Local, StageLinks
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.schedules.abilities import SCHEDULE_NAMES
from hf_pipetransformer.schedules.actions import Action, ActionList, Op
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import FORWARD_ONLY, find_schedule
from tests.support.one_process import CPU, QueueLink, make_engines, run_table, together


F, B, INPUT, WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
SHAPE = (2, 3)


class Scaling:
    """Multiplies by `factor`, whose gradient it adds up; the last stage's loss is the sum."""

    def __init__(self, factor: float, is_first: bool, is_last: bool, sends_gradient: bool = True) -> None:
        self.factor = factor
        self.is_first, self.is_last, self.sends_gradient = is_first, is_last, sends_gradient
        self.gradient = 0.0
        self.held: dict[int, torch.Tensor] = {}
        self.put_off: dict[int, float] = {}
        self.most_held = 0
        self.done: list[str] = []

    def clear(self) -> None:
        self.held.clear()

    def extend(self, actions: ActionList) -> None:
        pass

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        self.done.append(f"F{micro_batch.index}")
        assert (received is None) == self.is_first
        entering = micro_batch.inputs["x"] if received is None else received
        if torch.is_grad_enabled():
            self.held[micro_batch.index] = entering
            self.most_held = max(self.most_held, len(self.held))
        output = entering * self.factor
        return output.sum() if self.is_last else output

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        sent = self.backward_input(micro_batch, gradient)
        self.backward_weight(micro_batch)
        return sent

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.done.append(f"B{micro_batch.index}")
        assert (gradient is None) == self.is_last
        gradient = torch.ones(SHAPE) if gradient is None else gradient
        self.put_off[micro_batch.index] = float((gradient * self.held.pop(micro_batch.index)).sum())
        return gradient * self.factor if self.sends_gradient and not self.is_first else None

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.gradient += self.put_off.pop(micro_batch.index)


def make_micro_batches(count: int, first: int = 0) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(first)
    return [
        MicroBatch(i, {"x": torch.rand(SHAPE, generator=generator)}, 1.0, SHAPE, lambda _: None)
        for i in range(first, first + count)
    ]


def make_programs(count: int, first_active: int = 0) -> list[Scaling]:
    return [Scaling(1.0 + stage, stage == 0, stage == count - 1, stage > first_active) for stage in range(count)]


def alone(program: Any, links: StageLinks | None = None) -> Engine:
    return Engine([program], [links or StageLinks()], StepMeter(CPU))


def chunks_of(name: str, pipeline_size: int) -> list[int]:
    schedule = find_schedule(name)
    if pipeline_size == 1:
        return [1]
    return sorted({schedule.abilities.default_chunks, min(schedule.abilities.max_chunks, 3)})


CASES = [
    (name, k, v, m, frozen)
    for name in SCHEDULE_NAMES
    for k in (1, 2, 3)
    for v in chunks_of(name, k)
    for m in (1, 2, 5)
    for frozen in range(min(k * v, 3))
]


@pytest.mark.parametrize(("name", "pipeline_size", "num_chunks", "num_microbatches", "first_active"), CASES)
def test_a_table_gives_the_sums_of_one_process(
    name: str, pipeline_size: int, num_chunks: int, num_microbatches: int, first_active: int
) -> None:
    schedule = find_schedule(name)
    placement = Placement(pipeline_size, num_chunks, schedule.abilities.placement)
    programs = make_programs(placement.num_stages, first_active)
    micro_batches = make_micro_batches(num_microbatches)
    table = schedule.table(pipeline_size, num_microbatches, num_chunks, first_active)
    engines = make_engines(placement, lambda stage: programs[stage])
    results = run_table(table, engines, [micro_batches] * pipeline_size)
    product = float(torch.tensor([program.factor for program in programs]).prod())
    sums = [float(batch.inputs["x"].sum()) for batch in micro_batches]
    assert [float(result) for result in results] == pytest.approx([product * total for total in sums])
    for stage, program in enumerate(programs):
        expected = product / program.factor * sum(sums) if stage >= first_active else 0.0
        assert program.gradient == pytest.approx(expected), f"stage {stage}"
        assert not program.held
        assert not program.put_off
        assert (program.most_held > 0) == (stage >= first_active)


@pytest.mark.parametrize("kind", ["loop", "v"])
def test_a_prediction_keeps_nothing_and_gives_results_in_order(kind: str) -> None:
    placement = Placement(2, 2, kind)
    programs, micro_batches = make_programs(4), make_micro_batches(3)
    engines = make_engines(placement, lambda stage: programs[stage])
    table = FORWARD_ONLY[kind].table(2, 3, 2)
    runs = [engine.begin(actions, micro_batches) for engine, actions in zip(engines, table, strict=True)]
    first, second = together([run.drain for run in runs])
    expected = [float(24 * batch.inputs["x"].sum()) for batch in micro_batches]
    assert [float(result) for result in first + second] == pytest.approx(expected)
    assert all(program.most_held == 0 for program in programs)
    assert bool(first) == (kind == "v")  # There the last stage lies on the first rank.


def test_a_row_runs_in_parts() -> None:
    program, micro_batches = Scaling(2.0, True, True), make_micro_batches(3)
    actions = find_schedule("gpipe").table(1, 3)[0]
    run = alone(program).begin(actions, micro_batches)
    assert program.done == []
    run.advance(before=Action(F, 2))
    assert program.done == ["F0", "F1"]
    run.advance(before=Action(B, 1))
    assert program.done == ["F0", "F1", "F2", "B2"]
    with pytest.raises(ValueError, match="F1 is not among the 2 actions that are left"):
        run.advance(before=Action(F, 1))
    assert [float(result) for result in run.drain()] == [float(2 * b.inputs["x"].sum()) for b in micro_batches]
    assert program.done[4:] == ["B1", "B0"]
    run.advance()
    assert len(program.done) == 6


def test_a_run_outlives_a_batch() -> None:
    """One long actions of which each batch runs a part: its later micro-batches need not be known at the start."""
    program = Scaling(2.0, True, True)
    micro_batches = make_micro_batches(2)
    order = [(F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (F, 3), (B, 2), (B, 3)]
    actions = tuple(Action(op, i) for op, i in order)
    run = alone(program).begin(actions, micro_batches)
    run.advance(before=Action(F, 2))
    assert program.held.keys() == {1}
    micro_batches += make_micro_batches(2, first=2)
    run.advance(before=Action(B, 3))
    assert program.held.keys() == {3}
    assert len(run.drain()) == 4
    assert program.gradient == pytest.approx(sum(float(b.inputs["x"].sum()) for b in micro_batches))


def test_two_stages_of_one_rank_hand_over_without_a_transfer() -> None:
    programs, (micro_batch,) = make_programs(2), make_micro_batches(1)
    links = [
        StageLinks(forward_out=Local(1), backward_in=Local(1)),
        StageLinks(forward_in=Local(0), backward_out=Local(0)),
    ]
    order = [(F, 0), (F, 1), (INPUT, 1), (INPUT, 0), (WEIGHT, 0), (WEIGHT, 1)]
    actions = tuple(Action(op, 0, chunk) for op, chunk in order)
    Engine(programs, links, StepMeter(CPU)).begin(actions, [micro_batch]).drain()
    total = float(micro_batch.inputs["x"].sum())
    assert [program.gradient for program in programs] == pytest.approx([2 * total, total])


def sends(actions: ActionList) -> Sequence[Action]:
    return [action for action in actions if action.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD)]


@pytest.mark.parametrize("first_active", [0, 1])
def test_what_was_sent_is_let_go_of_before_the_end(first_active: int) -> None:
    """Else a stage would hold every activation that it ever sent in the batch."""
    actions = find_schedule("1f1b").table(2, 6, 1, first_active)[0]
    activations, gradients = QueueLink(), QueueLink()
    for _ in range(6):
        gradients.send(torch.ones(SHAPE))
    run = alone(make_programs(2, first_active)[0], StageLinks(forward_out=activations, backward_in=gradients)).begin(
        actions, make_micro_batches(6)
    )
    left = actions[actions.index(sends(actions)[-1]) + 1 :]
    run.advance(before=next(iter(left), None))
    assert activations.num_sent == 6
    assert activations.num_waited_for >= 4
    run.drain()
    assert activations.num_waited_for == 6


@pytest.mark.parametrize("order", [[(F, 1)], [(F, 0), (F, 1), (B, 0)], [(F, 0), (F, 1), (INPUT, 0)]])
def test_a_computation_before_its_input_is_an_error(order: list[tuple[Op, int]]) -> None:
    links = [
        StageLinks(forward_out=Local(1), backward_in=Local(1)),
        StageLinks(forward_in=Local(0), backward_out=Local(0)),
    ]
    actions = tuple(Action(op, 0, chunk) for op, chunk in order)
    run = Engine(make_programs(2), links, StepMeter(CPU)).begin(actions, make_micro_batches(1))
    with pytest.raises(ValueError, match=f"The table has {actions[-1]} before what it takes"):
        run.drain()


def test_a_transfer_without_a_link_is_an_error() -> None:
    actions = find_schedule("1f1b").table(2, 1)[0]
    with pytest.raises(ValueError, match="where the layout has no link"):
        alone(Scaling(2.0, True, False), StageLinks(forward_out=Local(0))).begin(
            actions, make_micro_batches(1)
        ).drain()
