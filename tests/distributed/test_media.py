"""Language models that take images beside text follow plain Trainer on stages, in micro-batches and on replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launches import Outcome, Run, assert_trained_alike, launches_of, slow_unless
from tests.distributed.media_worker import CASES, PROCESSED, QUICK, STEPS, grid, run_all
from tests.support.models import is_key_bias


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    quick = [slow_unless(True, Run(case.name, (2, 1), case.plain.name)) for case in QUICK]
    rest = [(case, (2, 1)) for case in CASES.values() if case not in QUICK]
    # One stage and one micro-batch ask for nothing that Trainer does not do.
    rest += [(case, (1, 2)) for case in grid() if case.num_microbatches > 1]
    rest += [(case, (2, 2)) for case in grid()]
    rest += [(case, (1, 2)) for case in PROCESSED]
    return [*quick, *(slow_unless(False, Run(case.name, layout, case.plain.name)) for case, layout in rest)]


@pytest.mark.parametrize("run", runs())
def test_losses_norms_and_weights_are_those_of_trainer(ours: Outcome, plain: Outcome, run: Run) -> None:
    assert len(ours.logged("loss")) == STEPS
    # The tower of some computes queries, keys and values at once.
    assert_trained_alike(ours, plain, ignored=lambda name: is_key_bias(name) or name.endswith(".qkv.bias"))
    assert ours.ranks[0]["evaluated"] == pytest.approx(plain.ranks[0]["evaluated"], rel=1e-5)
    layout, case = ours.ranks[0]["layout"], CASES[run.case]
    chunks = 2 if case.ours.get("pipeline_schedule") == "interleaved_1f1b" else 1
    assert (layout["num_stages"] // chunks, layout["num_replicas"]) == run.layout
    assert layout["num_microbatches"] == case.num_microbatches
