"""Which share of its weight gradients each stage skips in a step: a linear programme over the schedule's table. Pure.

After TimelyFreeze (arXiv 2602.05754): what a stage saves counts only where the end of the step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_pipetransformer.pipeline.schedules import COMPUTATIONS, Op, Table, source_of
from hf_pipetransformer.placement import Placement
from hf_pipetransformer.simulator import Durations, simulate


SLACK = 1e-8
"""Of the shortest batch, by which one that skips less may be longer: what is left of rounding."""
PLACES = 6
"""Decimal places of a share."""


@dataclass(frozen=True)
class SkipGraph:
    """A batch as a graph: the computations of a table are its nodes; seconds by stage, of one micro-batch.

    Args:
        table: of the schedule.
        placement: where the stages lie.
        forward: seconds of the forward.
        backward: seconds of the whole backward, with nothing skipped.
        saved: by how much the backward is shorter if all weight gradients that may be skipped are; at most `backward`.
        hop: seconds from a send to its arrival on another rank.
    """

    table: Table
    placement: Placement
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: tuple[float, ...]
    hop: float = 0.0

    def durations(self, shares: Sequence[float]) -> Durations:
        """Of the computations, with these shares of the stages' weight gradients skipped."""
        weights = tuple(saved * (1 - share) for saved, share in zip(self.saved, shares, strict=True))
        inputs = tuple(whole - saved for whole, saved in zip(self.backward, self.saved, strict=True))
        backward = tuple(sum(both) for both in zip(inputs, weights, strict=True))
        return Durations(self.forward, backward, self.hop, inputs, weights)

    def seconds(self, shares: Sequence[float]) -> float:
        """Until the last computation ends, by simulation."""
        return simulate(self.table, self.durations(shares), self.placement).end


def choose_shares(graph: SkipGraph, most: float) -> tuple[float, ...]:
    """The shares with which a batch ends soonest; of several the ones with the smallest sum.

    With `s` the start of a computation, `d(r)` its duration, which falls linearly with the share `r` of its stage, and
    `T` the end of the batch, minimise `T` over all `s`, `r` and `T` such that

        s_j >= s_i + d_i(r)          j follows i on their rank
        s_j >= s_i + d_i(r) + hop    j takes what i gives, over a link
        T   >= s_i + d_i(r)          i is the last of its rank
        0 <= r_k <= most             stage k has a backward; else r_k = 0

    A second programme then minimises the sum of all `r`, with `T` as found: nothing is skipped off the critical path.

    Args:
        graph: of a batch.
        most: bound of a stage's share, from 0 to 1.

    Returns:
        One share a stage.

    Raises:
        ValueError: the solver gave up.
    """
    programme = _Programme(graph, most)
    end = programme.solve(programme.end_only())[programme.end]
    # Ends are counted in units of the whole batch: a slack is a share of it.
    found = programme.solve(programme.shares_only(), longest=end * (1 + SLACK))
    return tuple(min(max(round(found[at], PLACES), 0.0), most) for at in programme.shares)


class _Programme:
    """Variables in a row: starts of the computations, then the shares, then the end."""

    def __init__(self, graph: SkipGraph, most: float) -> None:
        nodes: dict[tuple[int, Op, int], int] = {}
        rows: list[list[int]] = []
        for rank, row in enumerate(graph.table):
            stages = graph.placement.stages_of(rank)
            computed = [action for action in row if action.op in COMPUTATIONS]
            rows.append([nodes.setdefault((stages[a.chunk], a.op, a.micro_batch), len(nodes)) for a in computed])
        num_stages = graph.placement.num_stages
        self.shares = range(len(nodes), len(nodes) + num_stages)
        self.end = len(nodes) + num_stages
        self._full, none = graph.durations([0.0] * num_stages), graph.durations([1.0] * num_stages)
        self._unit = graph.seconds([0.0] * num_stages) or 1.0
        self._least: list[tuple[dict[int, float], float]] = []
        where = {number: key for key, number in nodes.items()}

        def follows(later: int, earlier: int, hop: float = 0.0) -> None:
            """`later >= earlier + duration(earlier) + hop`, as what must be at most a number."""
            stage, op, i = where[earlier]
            whole = self._full.of(stage, op, i)
            falls = whole - none.of(stage, op, i)
            terms = {earlier: 1.0, later: -1.0, self.shares[stage]: -falls / self._unit}
            self._least.append((terms, -(whole + hop) / self._unit))

        for order in rows:
            for before, after in zip(order, [*order[1:], self.end], strict=True):
                follows(after, before)
        for (stage, op, i), later in nodes.items():
            source = source_of(op, stage, num_stages)
            if source is not None:
                given = next(nodes[source, kind, i] for kind in _givers(op) if (source, kind, i) in nodes)
                is_sent = graph.placement.rank_of(source) != graph.placement.rank_of(stage)
                follows(later, given, graph.hop if is_sent else 0.0)
        trained = {stage for stage, op, _ in nodes if op is not Op.FORWARD}
        bounds = [most if stage in trained else 0.0 for stage in range(num_stages)]
        self._bounds: list[tuple[float, float | None]] = [(0.0, None)] * len(nodes)
        self._bounds += [(0.0, bound) for bound in bounds] + [(0.0, None)]

    def end_only(self) -> list[float]:
        """What the end costs alone."""
        return [0.0] * self.end + [1.0]

    def shares_only(self) -> list[float]:
        """What the shares cost alone."""
        return [float(at in self.shares) for at in range(self.end + 1)]

    def solve(self, costs: Sequence[float], longest: float | None = None) -> list[float]:
        """The variables that cost least; the end at most `longest`."""
        optimize, sparse = _scipy()
        bounds = self._bounds if longest is None else [*self._bounds[:-1], (0.0, longest)]
        cells = [(row, at, value) for row, (terms, _) in enumerate(self._least) for at, value in terms.items()]
        places, columns, values = zip(*cells, strict=True)
        matrix = sparse.csr_array((values, (places, columns)), shape=(len(self._least), len(costs)))
        limits = [limit for _, limit in self._least]
        found = optimize.linprog(costs, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
        if found.x is None:
            raise ValueError(f"The linear programme of skipped weight gradients was not solved: {found.message}")
        return [float(value) for value in found.x]


def _givers(op: Op) -> tuple[Op, ...]:
    """The computations one of which gives the input of `op`, on another stage."""
    return (Op.FORWARD,) if op is Op.FORWARD else (Op.BACKWARD, Op.BACKWARD_INPUT)


def _scipy() -> tuple[Any, Any]:
    """Its two modules; an extra of this package brings it, see `freeze.policies.timely`."""
    from scipy import optimize, sparse

    return optimize, sparse
