"""On stages, a frozen tower of images is computed once, too: losses, norms, weights and evaluations are Trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.launches import Outcome, Run, assert_trained_alike, launches_of, slow_unless
from tests.distributed.media_store_worker import (
    DRAWN,
    FAMILIES,
    KILLED_AT,
    NUM_EPOCHS,
    OTHERS,
    QUICK,
    STEPS_OF_EPOCH,
    TRAINED,
    begin,
    go_on,
    run_all,
    whole,
)
from tests.distributed.scenarios import run, start
from tests.support.models import is_key_bias


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all)

NUM_IMAGES = 22
"""Images of the rows that are trained on."""


def runs() -> list[Any]:
    rest = [(case, (2, 1)) for case in [*FAMILIES, *OTHERS]]
    rest += [(case, (2, 2)) for case in FAMILIES] + [(case, (1, 2)) for case in FAMILIES[:3]]
    rest += [(QUICK, (1, 1)), (QUICK, (4, 1))]
    quick = slow_unless(True, Run(QUICK.name, (2, 1), QUICK.plain.name))
    return [quick, *(slow_unless(False, Run(case.name, layout, case.plain.name)) for case, layout in rest)]


@pytest.mark.parametrize("run", runs())
def test_a_frozen_tower_is_read_from_the_second_epoch_on(ours: Outcome, plain: Outcome, run: Run) -> None:
    assert len(ours.logged("loss")) == NUM_EPOCHS * STEPS_OF_EPOCH
    # The tower of some computes queries, keys and values at once.
    assert_trained_alike(ours, plain, ignored=lambda name: is_key_bias(name) or name.endswith(".qkv.bias"))
    assert ours.values("eval_loss") == pytest.approx(plain.values("eval_loss"), rel=1e-5)
    assert ours.ranks[0]["evaluated"] == pytest.approx(plain.ranks[0]["evaluated"], rel=1e-5)
    num_stages, _ = run.layout
    first, later = ours.ranks[::num_stages], [rank for place, rank in enumerate(ours.ranks) if place % num_stages]
    assert all(counts == [0, 0] for rank in later for counts in rank["counts"])
    of_epochs = np.diff(np.sum([rank["counts"] for rank in first], axis=0), axis=0)
    (_, computed), (read, new) = of_epochs.tolist()
    assert (read > 0, new) == (True, 0), f"{of_epochs.tolist()} {ours.ranks[0]['said']}"
    assert computed < read
    assert any("is frozen: it is computed once" in line for line in ours.ranks[0]["said"])


@pytest.mark.parametrize("run", [slow_unless(False, Run(DRAWN.name, (2, 1), DRAWN.plain.name))])
def test_images_that_are_drawn_anew_are_not_stored(ours: Outcome, plain: Outcome) -> None:
    assert_trained_alike(ours, plain, ignored=is_key_bias)
    assert ours.ranks[0]["num_stored"] == [0] * NUM_EPOCHS


@pytest.mark.parametrize("run", [slow_unless(False, Run(TRAINED.name, (2, 1), TRAINED.plain.name))])
def test_a_tower_that_is_trained_stays_computed(ours: Outcome, plain: Outcome) -> None:
    assert_trained_alike(ours, plain, ignored=is_key_bias)
    assert all(counts == [0, 0] for rank in ours.ranks for counts in rank["counts"])


@pytest.mark.slow
def test_a_run_killed_while_it_fills_the_store_goes_on_at_another_number_of_stages(tmp_path: Path) -> None:
    killed = start(begin, tmp_path, 2, {"num_stages": 2}, timeout=120, check=False)
    assert killed.returncodes == [9, 9], killed.output
    assert (tmp_path / "ours" / f"checkpoint-{KILLED_AT - 1}").is_dir()
    found, *_ = run(go_on, tmp_path, 1, {"num_stages": 1}, timeout=120)
    expected, *_ = run(whole, tmp_path, 1, {}, timeout=120)
    for key in ("loss", "grad_norm", "eval_loss"):
        told = [entry[key] for entry in found["log_history"] if key in entry]
        assert told == pytest.approx([entry[key] for entry in expected["log_history"] if key in entry], rel=1e-5)
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
    (said,) = [line for line in found["said"] if "outputs of an earlier run serve the same inputs" in line]
    num_found = int(said.split(": ")[1].split()[0])
    *_, (_, computed), (_, last) = found["counts"]
    assert 0 < num_found < NUM_IMAGES
    assert computed == last, "the last epoch reads all"
