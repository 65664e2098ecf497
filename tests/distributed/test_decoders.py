"""Causal language models follow plain Trainer on one process: whole sequences, and slices of them (TeraPipe)."""

from __future__ import annotations

import pytest

from tests.distributed.decoder_worker import CASES, ELASTIC, HEADS, LIGER, SLICED, STEPS, STORED, run_all
from tests.distributed.launches import Outcome, Run, assert_trained_alike, launches_of, run_params, slow_unless
from tests.support.models import is_key_bias


# In every run of CI: positions that are learned, rotary ones, and layers of two kinds; on two processes only.
FAMILIES = ("family-gpt2", "family-llama", "family-gemma2", "classes-gpt2", "packed-llama", "stored-packed")
QUICK = {*FAMILIES, *SLICED, *HEADS, *ELASTIC, *LIGER}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all)


@pytest.mark.parametrize(
    "run",
    run_params(
        {name: case.layouts for name, case in CASES.items()}, lambda run: run.case in QUICK and run.num_ranks == 2
    ),
)
def test_losses_gradients_weights_and_evaluation_follow_plain_trainer(ours: Outcome, plain: Outcome, run: Run) -> None:
    assert len(ours.logged("loss")) == STEPS
    # AdamW makes steps of the rounding noise where a gradient is small.
    assert_trained_alike(ours, plain, ignored=is_key_bias, weight_tolerance=1e-4)
    assert ours.ranks[0]["evaluated"] == pytest.approx(plain.ranks[0]["evaluated"], rel=1e-5)
    last, case = ours.ranks[0]["layout"], CASES[run.case]
    if not case.freezes:
        assert (last["num_stages"], last["num_replicas"]) == run.layout
    if "pipeline_token_slices" in case.options:
        (lengths,) = last["token_slices"]
        assert len(lengths) > 2


@pytest.mark.parametrize("run", [Run(name, (2, 1)) for name in ELASTIC], ids=str)
def test_layers_freeze_as_the_table_says(ours: Outcome) -> None:
    assert ours.ranks[0]["layout"]["num_frozen_layers"] == 2
    assert [event["num_frozen"] for event in ours.events("freeze")][-2:] == [1, 2]


@pytest.mark.parametrize("run", [slow_unless(name in QUICK, Run(name, (2, 1))) for name in STORED])
def test_what_frozen_layers_give_is_read_in_the_last_epochs(ours: Outcome, run: Run) -> None:
    epochs = [event for event in ours.events("cache") if event["what"] == "epoch"]
    num_rows = CASES[run.case].num_rows
    assert [(epoch["hits"], epoch["misses"]) for epoch in epochs] == [(0, num_rows), (num_rows, 0), (num_rows, 0)]
