"""The command line: what it draws is the schedule's timeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hf_pipetransformer
from hf_pipetransformer.cli import main


REPOSITORY = Path(__file__).resolve().parents[1]


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
    with pytest.raises(SystemExit, match="active"):
        main(["simulate", "--stages", "2", "--microbatches", "2", "--frozen_stages", "2"])


def test_a_window_is_drawn_with_its_updates_and_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schedule", "async_1f1b", "--stages", "3", "--microbatches", "4", "--update", "1"]
    main(["simulate", *options, "--weights", "stashing"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0 |F0-F1-F2-") and "U0-" in lines[1].replace("~", "-")
    # The last rank waits for K - 1 forwards and goes on without a wait; K - 1 backwards and an update follow.
    assert lines[3] == "22 units of time, 27% of it bubble: the window fills and drains once"
    assert lines[4] == "4 units of time a step in a long window"
    assert lines[5:] == [
        f"rank {rank}: micro-batches in flight {3 - rank}, copies of its weights {3 - rank} (stashing)"
        for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("pipeoptim", "2221"), ("vanilla", "1111"), ("stashing", "2221"), ("double_buffer", "2222"), ("xpipe", "2222")],
)
def test_the_copies_of_every_kind_of_weights(weights: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schedule", "async_1f1b", "--stages", "4", "--microbatches", "9", "--step_microbatches", "3"]
    main(["simulate", *options, "--weights", weights])
    found = [line.split("weights ")[1] for line in capsys.readouterr().out.splitlines() if "copies" in line]
    assert "".join(each.split()[0] for each in found) == expected


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--schedule", "async_1f1b", "--weights", "stale"], "Unknown pipeline_weights 'stale'"),
        (["--schedule", "async_1f1b", "--weights", "double_buffer"], "double_buffer.*expected at least 3"),
        (["--schedule", "async_1f1b", "--step_microbatches", "0"], "must be 1 or more, found 0"),
        (["--weights", "vanilla"], "--weights is for async_1f1b, found 1f1b"),
    ],
)
def test_what_an_asynchronous_schedule_cannot_be_is_refused(options: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        main(["simulate", "--stages", "4", "--microbatches", "4", *options])


def test_help_and_version_take_no_torch() -> None:
    code = "import sys; from hf_pipetransformer.cli import main\n" + (
        "try: main([sys.argv[1]])\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    for option in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, option], check=True, timeout=60, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("option", "text"),
    [("--version", f"hf-pipetransformer {hf_pipetransformer.__version__}\n"), ("--help", "simulate")],
)
def test_the_package_is_a_command_that_takes_no_torch_to_say_what_it_is(option: str, text: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hf_pipetransformer", option]
    result = subprocess.run(command, check=True, timeout=60, cwd=REPOSITORY, capture_output=True, text=True)
    assert text in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "hf_pipetransformer.cli" in imported and not {"torch", "transformers", "datasets"} & imported


def test_public_names_are_where_the_package_shows_them() -> None:
    assert all(getattr(hf_pipetransformer, name).__name__ == name for name in hf_pipetransformer.__all__)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "text"),
    [
        ("zb_v", "2", "3", "zb_v takes 2 stages a rank on 2 ranks, found 3."),
        ("zb_v", "2", "0", "zb_v takes 2 stages a rank on 2 ranks, found 0."),
        ("interleaved_1f1b", "4", "1", "interleaved_1f1b takes 2 to 8 stages a rank on 4 ranks, found 1."),
        ("1f1b", "3", "2", "1f1b takes one stage a rank on 3 ranks, found 2."),
        ("zb_v", "1", "2", "zb_v takes one stage a rank on one rank, found 2."),
    ],
)
def test_stages_that_a_schedule_cannot_lay_are_refused_in_one_sentence(
    schedule: str, stages: str, chunks: str, text: str
) -> None:
    with pytest.raises(SystemExit) as found:
        main(["simulate", "--schedule", schedule, "--stages", stages, "--chunks", chunks, "--microbatches", "4"])
    assert str(found.value) == text
