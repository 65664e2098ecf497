"""The strict double of NCCL finds what gloo forgives, and names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_pipetransformer.comm.groups import let_group_threads_finish
from hf_pipetransformer.comm.topology import PipelineGroups, Topology
from hf_pipetransformer.comm.transfers import complete, post, receiving, sending
from hf_pipetransformer.schedules.placement import Placement
from tests.distributed.launcher import LaunchError, launch
from tests.distributed.scenarios import run, scenario
from tests.doubles import nccl
from tests.doubles.replay import ReplayError, check_notes


SECONDS = 4


def exchange(rank: int, forward, backward) -> None:
    """The beginning of 1F1B: the first stage posts the receive of the gradient before it sends the activation."""
    activation, gradient = torch.ones(4), torch.ones(4)
    if rank == 0:
        arriving = post([receiving(gradient, 1, backward)])
        leaving = post([sending(activation, 1, forward)])
    else:
        for work in post([receiving(activation, 0, forward)]):
            work.wait()
        arriving, leaving = [], post([sending(gradient, 0, backward)])
    for work in [*arriving, *leaving]:
        work.wait()


def unbatched(rank: int, forward, backward) -> None:
    works = []
    if rank == 0:
        works = [dist.irecv(torch.ones(4), 1, backward), dist.isend(torch.ones(4), 1, forward)]
    else:
        dist.irecv(torch.ones(4), 0, forward).wait()
        works = [dist.isend(torch.ones(4), 0, backward)]
    for work in works:
        work.wait()


def swapped(rank: int, group) -> None:
    reductions = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    for reduction in reductions if rank == 0 else reversed(reductions):
        dist.all_reduce(torch.ones(3), reduction, group)


def new_pair(is_warm: bool):
    group = dist.new_group([0, 1])
    if is_warm:
        dist.all_reduce(torch.ones(1), group=group)
    return group


def forgiven(rank: int, mistake: str, groups: PipelineGroups) -> None:
    """What ends on gloo."""
    forward, backward = groups.links[0, "forward"], groups.links[0, "backward"]
    if mistake == "none":
        exchange(rank, forward, backward)
    elif mistake == "unbatched":
        unbatched(rank, forward, backward)
    elif mistake == "one group for both directions":
        for sender in (0, 1):
            transfer = sending if rank == sender else receiving
            complete([transfer(torch.ones(4), 1 - rank, forward)], SECONDS, "rehearsing")
        exchange(rank, forward, forward)
    elif mistake == "no rehearsal":
        exchange(rank, new_pair(is_warm=True), new_pair(is_warm=True))
    elif mistake == "no collective before":
        exchange(rank, new_pair(is_warm=False), new_pair(is_warm=False))
    elif mistake == "swapped order":
        swapped(rank, groups.pipeline_group)
    elif mistake == "no receive" and rank == 0:
        post([sending(torch.ones(4), 1, forward)])


def refused(mistake: str, groups: PipelineGroups) -> None:
    """What the double does not let through, or gloo does not."""
    if mistake == "tag":
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 1 - dist.get_rank(), tag=3)])
    elif mistake == "tensor on the host":
        on_host = torch.ones(6)
        nccl.is_on_host = lambda tensor: tensor is on_host
        dist.all_reduce(torch.ones(6), group=groups.pipeline_group)
        dist.all_reduce(on_host, group=groups.pipeline_control)
        try:
            dist.all_reduce(on_host, group=groups.pipeline_group)
        finally:
            nccl.is_on_host = None
    elif mistake == "missing collective" and dist.get_rank() == 0:
        dist.all_reduce(torch.ones(5), group=groups.pipeline_group)


@scenario
def talk(folder: Path, mistakes: list[str]) -> None:
    """With each mistake in groups of its own, noted in `folder/MISTAKE`."""
    recorder = nccl.install(folder)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for mistake in mistakes:
        recorder.restart(folder / mistake)
        groups = Topology(SECONDS, 2).groups(Placement(2))
        forgiven(rank, mistake, groups)
        try:
            refused(mistake, groups)
        except (nccl.NcclRuleError, RuntimeError) as error:
            Path(folder, mistake, f"error{rank}.txt").write_text(str(error))
    let_group_threads_finish()
    dist.destroy_process_group()


HANGS = {
    "unbatched": [
        r"rank 0 waits at .*unbatched receive from rank 1.*first use.*until rank \[1\]",
        "rank 1 waits at .*unb",
    ],
    "one group for both directions": [r"rank 0 .*batch send to rank 1.*behind .*batch receive from rank 1"],
    "no rehearsal": [r"rank 0 waits at .*batch receive.*first use", r"rank 1 waits at .*batch receive.*first use"],
    "no collective before": [r"rank 0 waits at .*first use", r"rank 1 waits at .*first use"],
    "swapped order": [r"Collectives differ", r"rank 0: .*all_reduce", r"rank 1: .*all_reduce"],
    "no receive": [r"rank 0 has issued .*batch send to rank 1.*not answered"],
    "missing collective": [
        r"rank 0 waits at .*all_reduce of 5 float32",
        r"the last that rank 1 issued there.*of 1 float",
    ],
}
REFUSED = {
    "tag": [r"rank 0: tag 3 of a send.*NCCL has no tags"],
    "tensor on the host": [r"rank 0: all_reduce of a CPU tensor of 6 torch.float32 on device group"],
}

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notes of an exchange without and with each mistake, all from one launch."""
    folder = tmp_path_factory.mktemp("notes")
    # The one that hangs on gloo, too, comes last.
    mistakes = ["none", *REFUSED, *sorted(HANGS, key="missing collective".__eq__)]
    run(talk, folder, 2, {"mistakes": mistakes}, timeout=100)
    return folder


def test_a_lawful_exchange_passes(notes: Path) -> None:
    assert check_notes(notes / "none") > 20


@pytest.mark.parametrize("mistake", sorted(HANGS))
def test_what_would_hang_or_differ_on_nccl_is_found_and_named(notes: Path, mistake: str) -> None:
    with pytest.raises(ReplayError) as found:
        check_notes(notes / mistake)
    for complaint in HANGS[mistake]:
        assert found.match(complaint)


@pytest.mark.parametrize("mistake", sorted(REFUSED))
def test_what_nccl_refuses_is_refused_and_named(notes: Path, mistake: str) -> None:
    message = (notes / mistake / "error0.txt").read_text()
    for complaint in REFUSED[mistake]:
        assert re.search(complaint, message)


def test_a_launch_under_the_double_fails_although_gloo_forgives(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "first = dist.get_rank() == 0\n"
        "order = [dist.ReduceOp.SUM, dist.ReduceOp.MAX] if first else [dist.ReduceOp.MAX, dist.ReduceOp.SUM]\n"
        "for reduction in order:\n"
        "    dist.all_reduce(torch.ones(3), reduction)\n"
    )
    with pytest.raises(
        LaunchError, match=r"would fail on devices(?s:.*)under the rules of NCCL(?s:.*)Collectives differ"
    ):
        launch(script, num_processes=2, timeout=60, strict_nccl=True)
