"""How much of the ideal each schedule gives, beside the schedules of `torch.distributed.pipelining`.

Simulated: the tables of both libraries under the same durations. What a rank holds takes 1 for a forward, 1 for the
gradients of inputs and 1 for those of weights; a message takes nothing, or a tenth of that. The share of the ideal is
what a rank computes over how long the batch takes.

Measured: four processes, our engine and torch's taking turns, on the same modules, whose computation is emulated: a
layer sleeps instead of multiplying matrices, so that four ranks need no four devices. What is measured is thus the
order of the tables, the engines' own time and that of the transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peers

from hf_pipetransformer.comm.topology import PipelineGroups, Topology
from hf_pipetransformer.engine.engine import Engine, Link, Local, StageLinks, Wire
from hf_pipetransformer.engine.program import MicroBatch
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.schedules import Action, ActionList, Op, find_schedule
from hf_pipetransformer.schedules.actions import add_transfers
from hf_pipetransformer.schedules.placement import Placement

from .measure import Settings, alternate, experiment, launch, ratios, report, seconds_of, summary


CPU = torch.device("cpu")
SHAPE = (8, 64)
FORWARD_MS = 20
"""Of what a rank holds, emulated."""


class Pair(NamedTuple):
    """A schedule of ours and what it is set beside."""

    ours: str
    peer: type
    num_chunks: int

    @property
    def placement(self) -> str:
        return "v" if self.peer is peers.ScheduleZBVZeroBubble else "loop"


PAIRS = {
    "1f1b": Pair("1f1b", peers.Schedule1F1B, 1),
    "interleaved_1f1b": Pair("interleaved_1f1b", peers.ScheduleInterleaved1F1B, 2),
    "zb_h1": Pair("zb_h1", peers.ScheduleInterleavedZeroBubble, 1),
    "zb_v": Pair("zb_v", peers.ScheduleZBVZeroBubble, 2),
    "zb_v over the interleaved one": Pair("zb_v", peers.ScheduleInterleavedZeroBubble, 2),
}


# ---- simulated ----


class _StandIn:
    """All that torch asks of a stage to lay its table."""

    def __init__(self, stage: int, size: int, num_stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = stage, 0, size, num_stages
        self.is_first, self.is_last, self.has_backward, self.submod = stage == 0, stage == num_stages - 1, True, None


def torch_rows(pair: Pair, size: int, m: int) -> list[list[Action]]:
    """The computations of a table of torch's."""
    kinds = {
        "FORWARD": Op.FORWARD, "FULL_BACKWARD": Op.BACKWARD,
        "BACKWARD_INPUT": Op.BACKWARD_INPUT, "BACKWARD_WEIGHT": Op.BACKWARD_WEIGHT,
    }  # fmt: skip
    laid = type("Laid", (pair.peer,), {"_prepare_schedule_with_comms": lambda self, actions, **kwargs: None})
    stages = [_StandIn(chunk, size, size * pair.num_chunks) for chunk in range(pair.num_chunks)]
    order = laid(stages, m, loss_fn=lambda output, target: output).pipeline_order
    return [
        [Action(kinds[each.computation_type.name], each.microbatch_index, each.stage_index // size)
         for each in order[rank] if each is not None]
        for rank in range(size)
    ]  # fmt: skip


def simulated(pair: Pair, size: int, m: int) -> dict[str, dict[str, float]]:
    """Share of the ideal by library, without and with time for messages."""
    schedule, v = find_schedule(pair.ours), pair.num_chunks
    tables = {"ours": (schedule.table(size, m, v), Placement(size, v, schedule.placement))}
    if pair.peer is not peers.Schedule1F1B:  # Its table exists only as the loop that runs it.
        where = Placement(size, v, pair.placement)
        tables["torch"] = (add_transfers(torch_rows(pair, size, m), where), where)
    one, two = (1 / v,) * (size * v), (2 / v,) * (size * v)
    found: dict[str, dict[str, float]] = {}
    for hop in (0.0, 0.1):
        durations = Durations(one, two, hop, one, one)
        ends = {name: simulate(table, durations, where).end for name, (table, where) in tables.items()}
        shares = {name: round(3 * m / end, 4) for name, end in ends.items()}
        if "torch" in ends:
            shares["ours over torch"] = round(ends["torch"] / ends["ours"], 4)
        found[f"hop {hop}"] = shares
    return found


@experiment("schedules.json", section="simulated", minutes=0.2, quick_minutes=0.2, processes=1)
def schedules_simulated(settings: Settings) -> dict[str, Any]:
    """Share of the time in which a rank works, by the tables of both libraries."""
    cells = [(size, m) for size in (2, 4, 8) for m in (4, 8, 16, 32)]
    return {f"K={size}, M={m}": {name: simulated(pair, size, m) for name, pair in PAIRS.items()} for size, m in cells}


# ---- measured ----


class _Slow(torch.autograd.Function):
    """Passes on what it gets, after a sleep in its forward and one in its backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, forward: float, backward: float) -> torch.Tensor:  # type: ignore[override]
        ctx.seconds = backward
        time.sleep(forward)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


class Emulated(nn.Module):
    """A layer `input + weight` that takes `seconds` for its forward and for either gradient, of input and weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE[-1]))
        self.seconds = seconds

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(given, self.seconds, self.seconds) + _Slow.apply(self.weight, 0.0, self.seconds)


def loss_of(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    """Its gradient is the same everywhere."""
    return output.mean()


class EmulatedProgram:
    """The stage program of an `Emulated` layer."""

    def __init__(self, module: Emulated, is_first: bool, is_last: bool) -> None:
        self.module, self.is_first, self.is_last = module, is_first, is_last
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    def begin(self, actions: ActionList) -> None:
        self.held.clear()

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        given = micro_batch.inputs["x"].detach() if received is None else received
        output = self.module(given.requires_grad_())
        output = loss_of(output) if self.is_last else output
        self.held[micro_batch.index] = given, output, None
        return output

    predict = forward

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        received = self.backward_input(micro_batch, gradient)
        self.backward_weight(micro_batch)
        return received

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        given, output, _ = self.held[micro_batch.index]
        self.held[micro_batch.index] = given, output, gradient
        (received,) = torch.autograd.grad(output, given, gradient, retain_graph=True)
        return None if self.is_first else received

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        _, output, gradient = self.held.pop(micro_batch.index)
        weight = self.module.weight
        (found,) = torch.autograd.grad(output, weight, gradient)
        weight.grad = found if weight.grad is None else weight.grad + found


def stage_links(groups: PipelineGroups, placement: Placement, stage: int) -> StageLinks:
    """Of one of this rank's stages."""

    def link(lower: int, direction: str) -> Link | Local | None:
        if not 0 <= lower < placement.num_stages - 1:
            return None
        peer = lower if lower < stage else lower + 1
        if not placement.is_crossed(lower):
            return Local(placement.chunk_of(peer))
        rank = groups.pipeline_ranks[placement.rank_of(peer)]
        return Wire(rank, groups.links[lower, direction], f"stage {peer}", torch.float32, CPU, 60.0)

    return StageLinks(
        link(stage - 1, "forward"), link(stage, "forward"), link(stage, "backward"), link(stage - 1, "backward")
    )


def our_step(topology: Topology, pair: Pair, m: int) -> Callable[[], Any]:
    """One batch through our engine."""
    schedule, size = find_schedule(pair.ours), dist.get_world_size()
    placement = Placement(size, pair.num_chunks, schedule.placement)
    groups, last = topology.groups(placement), placement.num_stages - 1
    stages, seconds = placement.stages_of(groups.position), FORWARD_MS / 1000 / pair.num_chunks
    programs = [EmulatedProgram(Emulated(seconds), stage == 0, stage == last) for stage in stages]
    engine = Engine(programs, [stage_links(groups, placement, stage) for stage in stages], StepMeter(CPU))
    row = schedule.table(size, m, pair.num_chunks)[groups.position]
    parts = [MicroBatch(i, {"x": torch.zeros(SHAPE)}, 1 / m, SHAPE, lambda inputs: inputs) for i in range(m)]
    return lambda: engine.begin(row, parts).drain()


def torch_step(pair: Pair, m: int) -> Callable[[], Any]:
    """One batch through `torch.distributed.pipelining`."""
    size, rank, seconds = dist.get_world_size(), dist.get_rank(), FORWARD_MS / 1000 / pair.num_chunks
    placement = Placement(size, pair.num_chunks, pair.placement)
    stages = [
        PipelineStage(Emulated(seconds), stage, placement.num_stages, CPU) for stage in placement.stages_of(rank)
    ]
    schedule = pair.peer(stages[0] if pair.peer is peers.Schedule1F1B else stages, m, loss_fn=loss_of)
    batch = torch.zeros(m * SHAPE[0], SHAPE[1], requires_grad=True)
    holds_last = placement.rank_of(placement.num_stages - 1) == rank
    return lambda: schedule.step(*([batch] if rank == 0 else []), target=batch if holds_last else None)


def measured(rounds: int) -> dict[str, dict[str, Any]]:
    """Share of the ideal by library, the two taking turns."""
    topology, table = Topology(timeout=300, local_world_size=dist.get_world_size()), {}
    for m in (8, 16):
        found: dict[str, Any] = {}
        for name, pair in PAIRS.items():
            steps = {"ours": our_step(topology, pair, m), "torch": torch_step(pair, m)}
            # The first round connects and learns shapes.
            taken = alternate({each: partial(seconds_of, step) for each, step in steps.items()}, rounds + 1)
            seconds = {each: values[1:] for each, values in taken.items()}
            ideal = 3 * m * FORWARD_MS / 1000
            found[name] = {each: summary([ideal / value for value in values]) for each, values in seconds.items()}
            found[name]["ours over torch"] = summary(ratios(seconds["torch"], seconds["ours"]))
        table[f"K={dist.get_world_size()}, M={m}"] = found
        report(f"M={m}", found)
    return table


@experiment("schedules.json", section="measured", minutes=8, quick_minutes=1.5, processes=4)
def schedules_emulated(settings: Settings) -> dict[str, Any]:
    """Our engine beside torch's on four processes that sleep instead of computing."""
    return {**launch(measured, 4, settings.of(15, 2)), "emulated forward ms": FORWARD_MS}
