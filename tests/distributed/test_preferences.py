"""TRL's RewardTrainer and DPOTrainer keep their numbers in a pipeline, also all that they log beside the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.preference_worker import CASES, ON_EVERY_CHANGE, resume, train
from tests.distributed.scenarios import run
from tests.support.preferences import assert_logged_alike


TOLERANCE = 1e-5
LAYOUTS = {
    (2, 1): tuple(ON_EVERY_CHANGE),
    (1, 2): ("reward", "precomputed", "reward-frozen", "adapters-frozen"),
    (2, 2): tuple(CASES),
    (4, 1): tuple(CASES),
}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a launch on K stages and R replicas found of its cases, launched once."""
    known: dict[tuple[int, int], dict[str, Any]] = {}

    def of(layout: tuple[int, int], names: tuple[str, ...]) -> dict[str, Any]:
        new = [name for name in names if name not in known.setdefault(layout, {})]
        if new:
            options = {"names": new, "pipeline_size": layout[0]}
            folder: Path = tmp_path_factory.mktemp("preferences")
            known[layout] |= run(train, folder, layout[0] * layout[1], options, timeout=600, strict_nccl=True)[0]
        return known[layout]

    return of


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(
            layout, name, id=f"{layout[0]}x{layout[1]}-{name}", marks=() if layout == (2, 1) else pytest.mark.slow
        )
        for layout, names in LAYOUTS.items()
        for name in names
    ],
)
def test_all_that_is_logged_is_that_of_trl(layout: tuple[int, int], name: str, ends: Any) -> None:
    names = LAYOUTS[layout]
    found, expected = ends(layout, names)[name], ends((1, 1), names)[name]
    largest = assert_logged_alike(found["logged"], expected["logged"], TOLERANCE)
    print(f"{name}: largest relative difference {largest:.2g}")
    for metric in ("loss", "logps/chosen", "entropy") if name == "precomputed" else ():
        assert found["before"][f"eval_{metric}"] == pytest.approx(expected["before"][f"eval_{metric}"], rel=TOLERANCE)
    if name == "reward":
        # Of the last batch, 5 pairs, TRL keeps as many rows as pairs: its chosen texts.
        assert (len(found["predictions"]), len(expected["predictions"])) == (26, 21)
        largest = max(map(abs, expected["predictions"]))
        assert found["predictions"][:21] == pytest.approx(expected["predictions"], abs=TOLERANCE * largest)
    last = found["layout"]
    if name.endswith("elastic"):
        assert last["num_frozen_layers"] == 3 and last["num_replicas"] > layout[1]
    elif "freeze_policy" not in CASES[name]:
        assert (last["num_stages"] // last["num_chunks"], last["num_replicas"]) == layout


@pytest.mark.slow
def test_a_run_goes_on_from_the_middle_of_another(tmp_path: Path) -> None:
    names = ("reward", "adapters", "precomputed")
    plain, ours = (
        run(resume, tmp_path, count, {"names": names, "pipeline_size": 2}, timeout=300, strict_nccl=True)[0]
        for count in (1, 2)
    )
    for name in names:
        assert ours[name]["logged"][-1]["step"] == 16
        assert_logged_alike(ours[name]["logged"], plain[name]["logged"], TOLERANCE)
