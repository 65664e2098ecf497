"""The command line: what it draws is the schedule's timeline."""

from __future__ import annotations

import pytest

from hf_pipetransformer.cli import main


def test_simulate_draws_one_line_a_rank_and_says_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--schedule", "gpipe", "--stages", "3", "--microbatches", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in lines[:3]] == ["rank 0", "rank 1", "rank 2"]
    # (M + K - 1) x (forward 1 + backward 2), of which K - 1 of M + K - 1 are bubble.
    assert lines[3] == "18 units of time, 33% of it bubble"


def test_a_rank_may_hold_several_stages_of_a_share_of_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--schedule", "zb_v", "--stages", "2", "--microbatches", "3"])
    first, _, length = capsys.readouterr().out.splitlines()
    assert "W0" in first and "F0.1" in first
    assert length == "9.5 units of time, 5% of it bubble"


def test_a_frozen_stage_runs_no_backward(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--stages", "2", "--microbatches", "2", "--frozen_stages", "1"])
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "B" not in first
    assert "B0" in second and "B1" in second


def test_a_pipeline_of_frozen_stages_only_is_refused() -> None:
    with pytest.raises(ValueError, match="active"):
        main(["simulate", "--stages", "2", "--microbatches", "2", "--frozen_stages", "2"])
