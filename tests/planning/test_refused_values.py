"""Values that layouts, planner, freeze policies and messages between ranks refuse, one cheap case for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.comm.transfers import pack, plain
from hf_pipetransformer.freeze.policy import FreezeSignal, decide
from hf_pipetransformer.schedules.actions import Action, Op, add_transfers
from hf_pipetransformer.schedules.placement import Placement, pipeline_sizes, ranks_in_a_row, why_no_spanning
from tests.schedules.test_layout import layout
from tests.support.settled_policy import Settled


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_frozen_layers": 7}, "num_frozen_layers must be from 0 to the number of layers, 6, found 7"),
        ({"num_frozen_layers": 1, "cache_level": 2}, "cache_level must be from 0 to the number of frozen layers"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, found 0"),
    ],
)
def test_a_layout_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout(**changes)


def test_computations_that_wait_for_each_other() -> None:
    ranks = [[Action(Op.BACKWARD, 0), Action(Op.FORWARD, 0)], [Action(Op.FORWARD, 0), Action(Op.BACKWARD, 0)]]
    with pytest.raises(ValueError, match="Computations that wait for each other"):
        add_transfers(ranks, Placement(2))


def test_an_answer_of_a_policy_that_is_no_number() -> None:
    class Odd(Settled):
        def target_num_frozen(self, signal: FreezeSignal) -> float:
            return float("nan")

    with pytest.raises(ValueError, match=r"target_num_frozen returned .*: expected a number of layers"):
        decide(Odd(), cast(FreezeSignal, None), 1)


@pytest.mark.parametrize(
    ("size", "hosts", "words"),
    [
        (3, "aaaa", "pipeline_parallel_size=3 does not divide the 4 .* leave no rank idle. Choose one of .1, 2, 4"),
        (4, "aabbaabb", "The ranks of a node are not in a row: let the launcher fill"),
        (4, "aab", "A pipeline spans equal nodes only, found nodes of 2, 1 processes."),
    ],
)
def test_a_pipeline_that_fits_no_node(size: int, hosts: str, words: str) -> None:
    topology = nodes_of(hosts)
    with pytest.raises(ValueError, match=words):
        Topology.check_pipeline_size(topology, size)
    Topology.check_pipeline_size(topology, topology.pipeline_sizes[-1])


def nodes_of(hosts: str) -> Topology:
    told: list[int | None] = [None] * len(hosts)
    local, why = ranks_in_a_row(hosts, told), why_no_spanning(hosts, told)
    sizes = pipeline_sizes(local if why else len(hosts), local)
    return cast(
        Topology,
        SimpleNamespace(local_world_size=local, world_size=len(hosts), why_no_spanning=why, pipeline_sizes=sizes),
    )


def test_a_pipeline_in_one_process() -> None:
    alone = nodes_of("a")
    with pytest.raises(ValueError, match="takes 2 processes or a multiple, and one was started"):
        Topology.check_pipeline_size(alone, 2)


def test_ranks_with_other_arguments() -> None:
    def topology(*answers: dict[str, int]) -> Topology:
        return cast(Topology, SimpleNamespace(gather=lambda _: answers))

    check_agreement(topology({"seed": 1}, {"seed": 1}), "arguments", {"seed": 1})
    with pytest.raises(ValueError, match="The arguments differ between ranks: seed is 2 on rank 1 and 1 on rank 0"):
        check_agreement(topology({"seed": 1}, {"seed": 2}), "arguments", {"seed": 1})


def test_what_no_message_and_no_checkpoint_can_hold() -> None:
    with pytest.raises(TypeError, match="A batch or model output holds a set, which cannot be sent"):
        pack({"words": {1, 2}})
    with pytest.raises(ValueError, match=r"state\['odd'\] is a set, which a checkpoint cannot hold"):
        plain({"odd": {1, 2}}, "state")
