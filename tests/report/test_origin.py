"""What a run writes of its options: no secrets, and no folders, at any depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.report.origin import changed_options


if TYPE_CHECKING:
    from pathlib import Path


def test_secrets_inside_of_options_are_left_out(tmp_path: Path) -> None:
    inside = {"token": "hf_SECRET", "rate": 0.5, "more": [{"api_key": "SECRET", "cache_dir": "/somewhere/private"}]}
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), use_cpu=True, hub_token="SECRET", lr_scheduler_kwargs=inside, learning_rate=1e-3
    )
    found = changed_options(args)
    assert "SECRET" not in str(found) and "/somewhere/private" not in str(found)
    assert found["learning_rate"] == 1e-3 and '"rate": 0.5' in found["lr_scheduler_kwargs"]


def test_an_option_that_is_no_folder_is_written_whatever_its_name_ends_in(tmp_path: Path) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.touch()
    args = PipeTransformerArguments(
        str(tmp_path), use_cpu=True, pipeline_checkpoint="layers", layout_plan=str(plan),
        resume_from_checkpoint=str(tmp_path / "checkpoint-4"),
    )  # fmt: skip
    assert changed_options(args) == {"pipeline_checkpoint": "layers"}
