"""Slices of the head that a run chooses by itself: only where nothing else fits, as few as do, and never unsaid."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.memory import MEMORY_RESERVE
from hf_pipetransformer.schedules.placement import pipeline_sizes
from hf_pipetransformer.startup.planner import MeasuredCosts, RunPlanner
from hf_pipetransformer.startup.slices import choose_head_slices, why_whole_by_options
from tests.support.costs import block_costs


WHOLE, REST = 6.4e9, 1e8
"""Bytes of the logits of a sample, and of what else it keeps."""
LINE = r"pipeline_head_slices='auto': the head runs "


def planner_of(
    folder: Path, device_bytes: float, num_devices: int = 1, unfit: int = 0, why: str | None = None, **options: Any
) -> RunPlanner:
    args = PipeTransformerArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=1, pipeline_head_slices="auto",
        pipeline_parallel_num_microbatches=1, **options,
    )  # fmt: skip
    topology: Any = SimpleNamespace(
        world_size=num_devices, local_world_size=num_devices, pipeline_sizes=pipeline_sizes(num_devices, num_devices)
    )
    structure = SimpleNamespace(num_layers=4, cut_positions=lambda: range(11), media=None)
    blocks = block_costs(
        forward=(1.0,) * 10, backward=(1.0,) * 10, edge_backward=(1.0,) * 10, parameters=(0,) * 10,
        activation_bytes=(0.0,) * 9 + (WHOLE,), boundary_bytes=(REST,) * 10,
    )  # fmt: skip
    probe: Any = SimpleNamespace(structure=structure, block_flops=(), media_share=0.0)
    costs = MeasuredCosts(blocks, Overheads(), 1)
    given = args, topology, probe, costs, device_bytes / (1 - MEMORY_RESERVE), 0
    return RunPlanner(*given, has_dropout=False, unfit=unfit, why_whole_head=why)


def chosen(planner: RunPlanner, **others: Any) -> tuple[int, str]:
    found, line = choose_head_slices(planner, lambda other: other.choose(0), **others)
    return found.num_head_slices, line


@pytest.mark.parametrize(
    ("device_bytes", "expected", "words"),
    [
        (WHOLE + 1, 1, "on whole sequences. The fullest device is expected to need 6.4 GB of 6.4 GB."),
        (6e9, 2, "in 2 slices. .* 6.4 GB of 6 GB with whole sequences, and 3.3 GB so, with K=1."),
        (WHOLE / 8 + REST + 1, 8, "in 8 slices"),
        (WHOLE / 8 + REST - 1, 16, "in 16 slices"),
        (1.0, 64, "in 64 slices. .* 6.4 GB of 1e-09 GB with whole sequences, and 0.2 GB so, with K=1."),
    ],
)
def test_as_few_as_fit(device_bytes: float, expected: int, words: str, tmp_path: Path) -> None:
    number, line = chosen(planner_of(tmp_path, device_bytes))
    assert number == expected
    assert re.fullmatch(LINE + words + ("" if words[-1] == "." else ".*"), line), line


def test_another_number_of_stages_is_taken_first(tmp_path: Path) -> None:
    """Two stages that fit with whole sequences are no reason to slice them; stages that were asked for are."""
    planner = planner_of(tmp_path, 1e12, 2, unfit=1)
    assert chosen(planner)[0] == 1
    assert planner.choose(0).pipeline_size == 2
    assert chosen(planner_of(tmp_path, 1e12, 2, unfit=1, pipeline_parallel_size=1))[0] == 2


def test_what_ran_out_of_memory_with_whole_sequences_is_tried_in_slices(tmp_path: Path) -> None:
    planner = planner_of(tmp_path, 1e12, unfit=1)
    assert chosen(planner)[0] == 2
    ran_out = {2: 1, 4: 1}
    assert chosen(planner, unfit=lambda other: ran_out.get(other.head_slices, 0))[0] == 8
    assert {"head_slices": 8}.items() <= choose_head_slices(
        planner, lambda other: other.choose(0), lambda other: ran_out.get(other.head_slices, 0)
    )[0].conditions.items()


def test_a_head_that_must_stay_whole_stays_so_with_the_reason(tmp_path: Path) -> None:
    why = "the loss of Mine may read the logits"
    number, line = chosen(planner_of(tmp_path, 1.0, why=why))
    assert number == 1
    assert line.endswith(f"on whole sequences. The fullest device is expected to need 6.4 GB of 1e-09 GB, but {why}.")
    assert why not in chosen(planner_of(tmp_path, 1e12, why=why))[1], "nothing is missing"


@pytest.mark.parametrize(
    ("options", "scope", "words"),
    [
        ({}, LossScope.PARTS, None),
        ({"pipeline_schedule": "token"}, LossScope.PARTS, "pipeline_schedule='token' runs its head in other ways"),
        ({}, LossScope.BATCH, "one call of the loss sees the samples of a whole batch"),
    ],
)
def test_options_may_keep_it_whole(
    options: dict[str, Any], scope: LossScope, words: str | None, tmp_path: Path
) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, pipeline_head_slices="auto", **options)
    assert why_whole_by_options(args, scope) == words
