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
from hf_pipetransformer.schedules.abilities import abilities_of


REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "gpu_check.json"


FP32, SOCKETS = (2, 1, "1f1b", "fp32", "direct"), (2, 1, "1f1b", "fp32", "sockets")


def test_the_package_says_verified_of_what_the_results_file_shows() -> None:
    found = [section for name, section in json.loads(RESULTS.read_text()).items() if name.startswith("nccl")]
    assert {tuple(run) for section in found for run in section["verified"]} == VERIFIED_ON_NCCL
    for section in found:
        passed = {(*c["run"], c["transport"]) for c in section["checks"] if "run" in c and c["passed"]}
        assert passed >= {tuple(run) for run in section["verified"]}
        assert len(section["machine"].get("gpus", [])) > 1 or not any(run[-1] == "direct" for run in passed)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "tested on CPUs and on one GPU that processes share, not yet on several GPUs"),
        ("docs/pipeline.md", "share one GPU and talk over NCCL's network sockets"),
        ("docs/restrictions.md", "share one GPU and talk over NCCL's network sockets"),
        ("docs/index.md", "Pipelines have not been tested on several GPUs yet"),
    ],
)
def test_pages_say_over_which_transport_gpus_are_verified(page: str, words: str) -> None:
    found = {"sockets": SOCKETS in VERIFIED_ON_NCCL, "direct": FP32 in VERIFIED_ON_NCCL}
    says = words in " ".join((REPOSITORY / page).read_text().split())
    assert found == {"sockets": says, "direct": not says}


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
        "neftune_noise_alpha": None,
    }
    values |= {"accelerator_config": SimpleNamespace(even_batches=True), "device": torch.device("cuda", 0)}
    values |= {"world_size": 2, "pipeline_size": 2, **options}
    return SimpleNamespace(**values, abilities=abilities_of(values["pipeline_schedule"]))


@pytest.mark.parametrize(
    ("options", "verified_runs", "is_said"),
    [
        ({}, set(), True),
        ({"pipeline_size": None}, set(), True),
        ({"bf16": True}, {FP32}, True),
        ({"fp16": True}, {FP32}, True),
        ({"fp16": True}, {(2, 1, "1f1b", "fp16", "direct")}, False),
        ({"pipeline_schedule": "gpipe"}, {FP32}, True),
        ({"world_size": 4}, {FP32}, True),
        ({"world_size": 4}, {FP32, (2, 2, "1f1b", "fp32", "direct")}, False),
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


@pytest.mark.parametrize(
    ("verified_runs", "over_sockets", "words"),
    [
        ({SOCKETS}, True, None),
        ({SOCKETS}, False, "has not been verified on NCCL over P2P or NVLink yet, only on NCCL over sockets"),
        ({FP32}, True, "has not been verified on NCCL yet, only on gloo and under NCCL's rules"),
    ],
)
def test_the_warning_speaks_of_the_transport_that_was_not_verified(
    monkeypatch: pytest.MonkeyPatch, verified_runs: set[Any], over_sockets: bool, words: str | None
) -> None:
    monkeypatch.setattr(refusals, "VERIFIED_ON_NCCL", frozenset(verified_runs))
    for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.setenv(name, str(int(over_sockets)))
    texts = warn_about_options(arguments())
    assert [words is not None and words in text for text in texts] == [True] * (words is not None)


def test_fp16_without_a_gpu_is_said_to_have_no_effect() -> None:
    """Accelerate computes in float32 there, without a word."""
    (text,) = warn_about_options(arguments(fp16=True, device=torch.device("cpu")))
    assert "fp16=True has no effect on a CPU" in text
