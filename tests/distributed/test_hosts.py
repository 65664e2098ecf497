"""Law 7 between hosts: one that is lost at any moment ends the run on every rank, and a new launch resumes it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.distributed.hosts import ENVIRONMENT, two_hosts
from tests.distributed.hosts_worker import LOST, NUM_STEPS, train_with_loss_of
from tests.distributed.launcher import LaunchResult
from tests.distributed.scenarios import run, start


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

TIMEOUT = 6
GRACE = 10
MOMENTS = ("step", "saving", "evaluation", "transition")


def seconds_to_the_end(result: LaunchResult, begun: float, losing: int) -> dict[int, float]:
    """Return the seconds from the loss to the end of each rank that ended by itself."""
    lost = float(re.search(rf"{LOST} ([\d.]+)", result.outputs[losing])[1]) - begun
    return {rank: ended - lost for rank, ended in enumerate(result.ended) if ended is not None}


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS if each != "saving"] + ["saving"]
)
def test_a_cut_between_hosts_ends_all_ranks_and_the_newest_checkpoint_resumes(tmp_path: Path, moment: str):
    options = {"what": "host", "moment": moment, "timeout": TIMEOUT}
    with two_hosts() as hosts:
        begun = time.time()
        result = start(
            train_with_loss_of, tmp_path, 2, options | {"hosts": hosts}, timeout=120, grace=GRACE, check=False,
            env=ENVIRONMENT,
        )  # fmt: skip
    assert not result.timed_out, result.output
    ended = seconds_to_the_end(result, begun, losing=1)
    assert max(ended.values()) < TIMEOUT + GRACE, ended
    assert "rank 1 does not answer: killed, as when memory runs out, hanging, or cut off" in result.outputs[0]
    assert "rank 0, which hosts the ranks' store, does not answer" in result.outputs[1]
    records = run(train_with_loss_of, tmp_path, 2, options | {"resume": True}, timeout=90)
    assert [record["step"] for record in records] == [NUM_STEPS] * 2


@pytest.mark.parametrize(
    "moment",
    [pytest.param("saving", marks=pytest.mark.slow), "evaluation", pytest.param("transition", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_falls_silent_between_steps_is_given_up_after_the_timeout(tmp_path: Path, moment: str, rank: int):
    """Where those that are alive may take as long as `ddp_timeout`."""
    options = {"what": "rank", "moment": moment, "timeout": TIMEOUT, "rank": rank}
    begun = time.time()
    result = start(train_with_loss_of, tmp_path, 2, options, timeout=120, check=False, grace=1)
    assert result.ended[rank] is None
    (seconds,) = seconds_to_the_end(result, begun, rank).values()
    assert seconds < TIMEOUT + GRACE
    assert re.search(
        r"rank 1 does not answer|rank 0, which hosts the ranks' store, does not", result.outputs[1 - rank]
    )
