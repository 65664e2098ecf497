"""`scripts/bench/memory.py`: what its figures count, and a whole run of a tiny model."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from scripts.bench.measure import RETURNS_FREED, PeakMemory, launch_all
from scripts.bench.memory import PHASES, StageState, added_by_evaluation, measure, save_model


MEBIBYTE = 2**20


def test_a_phase_counts_its_peak_and_not_what_an_earlier_one_freed() -> None:
    memory = PeakMemory("loaded")
    held = bytearray(b"1" * 64 * MEBIBYTE)
    time.sleep(0.1)
    del held
    memory.begin("after")
    time.sleep(0.05)
    memory.end()
    assert memory.peaks["loaded"] >= 64 * MEBIBYTE
    assert memory.peaks["after"] < 8 * MEBIBYTE


def test_mapped_weights_count_for_a_stage_once_they_are_written_to(tmp_path: Path) -> None:
    save_model("tiny", tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.bfloat16)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    state = StageState()
    state.trainer = SimpleNamespace(model=model, optimizer=None)
    assert state.bytes() == 0
    model.model.layers[1:].to("meta")
    state.begin()
    assert state.bytes() < 0.01 * size
    written = [*model.model.layers[0].parameters(), model.lm_head.weight]
    with torch.no_grad():
        for parameter in written:
            parameter.add_(1)
    own = sum(p.numel() * p.element_size() for p in written)
    assert own <= state.bytes() <= 1.01 * own
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    assert state.bytes() >= own + model.lm_head.weight.numel() * 2


@pytest.mark.slow
@pytest.mark.distributed
def test_an_evaluation_adds_the_logits_of_a_micro_batch() -> None:
    """Float32 logits of 2 x 128 tokens and 32,000 words are 31 MiB."""
    added = launch_all(added_by_evaluation, 2, 8, 4, False, environment=RETURNS_FREED)
    assert 31 <= max(added) < 4 * 31


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_of_a_tiny_model_gives_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = measure("tiny", 2)
    assert list(found["most on a rank"]) == list(PHASES)
