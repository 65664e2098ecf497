"""What is said of GPUs is what `make gpu-check` has found on some: no more and no less."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer.options import refusals
from hf_pipetransformer.options.refusals import VERIFIED_ON_NCCL, warn_about_options


REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "gpu_check.json"


FP32 = (2, 1, "1f1b", "fp32")


def verified(results: dict[str, Any]) -> set[tuple[int, int, str, str]]:
    """The runs (K, R, schedule, precision) whose checks all passed over NCCL, in the results of the script."""
    return {(k, r, schedule, precision) for k, r, schedule, precision in results.get("nccl", {}).get("verified", [])}


def test_the_package_says_verified_of_what_the_results_file_shows() -> None:
    assert verified(json.loads(RESULTS.read_text()) if RESULTS.exists() else {}) == VERIFIED_ON_NCCL


def test_readme_restricts_gpus_until_they_are_verified() -> None:
    says = "K > 1 on GPUs has not been verified on NCCL yet" in (REPOSITORY / "README.md").read_text()
    assert says == (FP32 not in VERIFIED_ON_NCCL)


def arguments(**options: Any) -> Any:
    """Arguments of a process of two on a GPU, which is not there."""
    values = {
        "average_tokens_across_devices": True,
        "pipeline_checkpoint": "never",
        "pipeline_schedule": "1f1b",
        "bf16": False,
        "fp16": False,
        "ddp_backend": None,
        "ddp_bucket_cap_mb": None,
        "ddp_broadcast_buffers": None,
        "ddp_static_graph": None,
    }
    values |= {"accelerator_config": SimpleNamespace(even_batches=True), "device": torch.device("cuda", 0)}
    return SimpleNamespace(**{**values, "world_size": 2, "pipeline_size": 2, **options})


@pytest.mark.parametrize(
    ("options", "verified_runs", "is_said"),
    [
        ({}, set(), True),
        ({"pipeline_size": None}, set(), True),
        ({"bf16": True}, {FP32}, True),
        ({"fp16": True}, {FP32}, True),
        ({"fp16": True}, {(2, 1, "1f1b", "fp16")}, False),
        ({"pipeline_schedule": "gpipe"}, {FP32}, True),
        ({"world_size": 4}, {FP32}, True),
        ({"world_size": 4}, {FP32, (2, 2, "1f1b", "fp32")}, False),
        ({"pipeline_size": 1}, set(), False),
        ({"world_size": 1}, set(), False),
        ({"device": torch.device("cpu")}, set(), False),
        ({"ddp_backend": "gloo"}, set(), False),
        ({}, {FP32}, False),
    ],
)
def test_stages_on_gpus_are_warned_of_until_they_are_verified(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], verified_runs: set[Any], is_said: bool
) -> None:
    monkeypatch.setattr(refusals, "VERIFIED_ON_NCCL", frozenset(verified_runs))
    texts = warn_about_options(arguments(**options))
    assert [("not been verified on NCCL" in text) for text in texts] == [True] * is_said


def test_fp16_without_a_gpu_is_said_to_have_no_effect() -> None:
    """Accelerate computes in float32 there, without a word."""
    (text,) = warn_about_options(arguments(fp16=True, device=torch.device("cpu")))
    assert "fp16=True has no effect on a CPU" in text
