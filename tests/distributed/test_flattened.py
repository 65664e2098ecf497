"""Batches whose samples stand in one row give in any pipeline what they give as one row in plain Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.flattened_worker import ON_ONE, ON_TWO, OURS, STEPS, run_all
from tests.distributed.launches import Outcome, Run, assert_trained_alike, launches_of, slow_unless
from tests.support.comparison import far_tensors
from tests.support.models import is_key_bias


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    named = {name: Run(name, case.layout, case.plain.name) for name, case in OURS.items()}
    return [slow_unless(name in ON_ONE | ON_TWO, run) for name, run in named.items()]


@pytest.mark.parametrize("run", runs())
def test_a_row_cut_into_parts_gives_what_it_gives_whole(ours: Outcome, plain: Outcome, run: Run) -> None:
    case = OURS[run.case]
    assert len(ours.logged("loss")) == STEPS
    assert_trained_alike(ours, plain, TOLERANCE, ignored=is_key_bias)
    assert ours.ranks[0]["metrics"] == pytest.approx(plain.ranks[0]["metrics"], rel=TOLERANCE)
    if "freeze_policy" not in case.options:
        layout = ours.ranks[0]["layout"]
        assert (layout["num_stages"], layout["num_replicas"]) == case.layout
        assert layout["num_microbatches"] == case.options["pipeline_parallel_num_microbatches"]
    names = ("predictions", "labels", "next tokens")
    found, expected = ({name: outcome.tensors[name] for name in names} for outcome in (ours, plain))
    for name, value in expected.items():
        # What stands for padding is no number to compare.
        assert torch.equal(found[name] == -100, value == -100), name
    found, expected = ({n: v.where(v != -100, 0) for n, v in tensors.items()} for tensors in (found, expected))
    assert far_tensors(found, expected, TOLERANCE) == {}
