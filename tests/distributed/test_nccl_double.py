"""The strict double of NCCL finds what gloo forgives, and names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launcher import LaunchError, launch
from tests.distributed.nccl_worker import talk
from tests.distributed.scenarios import run
from tests.doubles.replay import ReplayError, check_notes


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
