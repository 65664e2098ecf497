"""What is said of GPUs is what `make gpu-check` has found on some: no more and no less."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.options import refusals
from hf_pipetransformer.options.refusals import VERIFIED_ON_NCCL, check_arguments, warn_about_options


REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "gpu_check.json"


def verified(results: dict[str, Any]) -> set[str]:
    """The precisions whose tests all passed on two GPUs or more, in the results of `scripts/gpu_check.py`."""
    found = results.get("nccl", {})
    return {precision for precision, is_passed in found.get("precisions", {}).items() if is_passed is True}


def test_the_package_says_verified_of_what_the_results_file_shows() -> None:
    assert verified(json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) == VERIFIED_ON_NCCL


def test_readme_restricts_gpus_until_they_are_verified() -> None:
    says = "K > 1 on GPUs has not been verified on NCCL yet" in (REPOSITORY / "README.md").read_text()
    assert says == ("fp32" not in VERIFIED_ON_NCCL)


def arguments(**options: Any) -> Any:
    """Arguments of a process of two on a GPU, which is not there."""
    values = {
        "average_tokens_across_devices": True,
        "pipeline_checkpoint": "never",
        "bf16": False,
        "fp16": False,
        "ddp_backend": None,
    }
    values |= {"accelerator_config": SimpleNamespace(even_batches=True), "device": torch.device("cuda", 0)}
    return SimpleNamespace(**{**values, "world_size": 2, "pipeline_size": 2, **options})


@pytest.mark.parametrize(
    ("options", "verified_precisions", "is_said"),
    [
        ({}, set(), True),
        ({"pipeline_size": None}, set(), True),
        ({"bf16": True}, {"fp32"}, True),
        ({"pipeline_size": 1}, set(), False),
        ({"world_size": 1}, set(), False),
        ({"device": torch.device("cpu")}, set(), False),
        ({"ddp_backend": "gloo"}, set(), False),
        ({}, {"fp32"}, False),
    ],
)
def test_stages_on_gpus_are_warned_of_until_they_are_verified(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], verified_precisions: set[str], is_said: bool
) -> None:
    monkeypatch.setattr(refusals, "VERIFIED_ON_NCCL", frozenset(verified_precisions))
    texts = warn_about_options(arguments(**options))
    assert [("not been verified on NCCL" in text) for text in texts] == [True] * is_said


@pytest.mark.parametrize(("verified_precisions", "is_refused"), [(set(), True), ({"fp32"}, True), ({"fp16"}, False)])
def test_fp16_is_refused_until_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified_precisions: set[str], is_refused: bool
) -> None:
    monkeypatch.setattr(refusals, "VERIFIED_ON_NCCL", frozenset(verified_precisions))
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    args.fp16 = True  # Trainer's arguments want a GPU for it.
    if is_refused:
        with pytest.raises(ValueError, match="fp16=True.*make gpu-check"):
            check_arguments(args)
    else:
        check_arguments(args)
