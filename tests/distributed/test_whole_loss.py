"""Losses of the whole batch on two stages and on two replicas, beside plain Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.scenarios import run, scenario
from tests.support.whole_losses import INSIDE, LOSSES, train, wrong


pytestmark = pytest.mark.distributed

CASES = [*((name, False) for name in LOSSES), *((name, True) for name in INSIDE)]
IN_CI = [("weighted", False), ("contrastive", False), ("span", False), ("two_heads", True)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "two_stages": {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2},
    "two_stages_four": {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 4},
    "two_replicas": {"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 2},
}


@scenario
def all_losses(folder: Path, cases: list[tuple[str, bool]], layouts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Results of each loss on two processes, by layout."""
    return {
        layout: [
            train(name, inside, folder / f"{name}-{inside}-{layout}", 2, **LAYOUTS[layout]) for name, inside in cases
        ]
        for layout in layouts
    }


@pytest.mark.parametrize(
    ("layouts", "cases"),
    [
        (["two_stages", "two_replicas"], IN_CI),
        pytest.param(list(LAYOUTS), CASES, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["some", "all"],
)
def test_any_loss_is_that_of_one_process(layouts: list[str], cases: list[tuple[str, bool]], tmp_path: Path) -> None:
    options = {"cases": cases, "layouts": layouts}
    seconds = 60 + 25 * len(cases) * len(layouts)
    found = run(all_losses, tmp_path, 2, options, timeout=seconds, strict_nccl=True)
    expected = [train(name, inside, tmp_path / "plain") for name, inside in cases]
    for layout in layouts:
        named = zip(cases, expected, found[0][layout], strict=True)
        assert {case: different for case, one, two in named if (different := wrong(one, two))} == {}, layout
