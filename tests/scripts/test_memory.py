"""`PeakMemory` of `scripts/bench/measure.py`: what a phase counts; and by it the memory of an evaluation."""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.runtime import execution
from scripts.bench.measure import REPOSITORY, RETURNS_FREED, PeakMemory, launch_all
from scripts.bench.memory import SECTION, measure
from scripts.bench.training import make_trainer


MEBIBYTE = 2**20
NUM_WORDS = 32_000


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


def added_by_evaluation(num_samples: int, num_microbatches: int, has_metrics: bool) -> float:
    """MiB at the most of a second evaluation beyond what there was before it, micro-batches of two samples.

    Batches of so few logits run through the head as a whole by default; here as larger ones do.
    """
    execution.JOINED_BYTES = MEBIBYTE
    words = torch.arange(num_samples * 128).view(num_samples, 128) % NUM_WORDS
    data = [{"input_ids": row, "labels": row} for row in words]
    metrics = (lambda given: {"rows": len(given.label_ids)}) if has_metrics else None
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    trainer = make_trainer(
        {"model": LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, **sizes)), "compute_metrics": metrics},
        2 * num_microbatches, pipeline_parallel_size=2, pipeline_schedule="gpipe", activation_cache="off",
        pipeline_parallel_num_microbatches=num_microbatches,
    )  # fmt: skip
    trainer.evaluate(data[:2])
    memory = PeakMemory("evaluation")
    trainer.evaluate(data)
    memory.end()
    return memory.peaks["evaluation"] / MEBIBYTE


@pytest.mark.slow
@pytest.mark.distributed
def test_an_evaluation_adds_the_logits_of_a_micro_batch_and_with_metrics_of_all_on_rank_0() -> None:
    """Float32 logits of 2 x 128 tokens and 32,000 words are 31 MiB."""
    added = launch_all(added_by_evaluation, 2, 8, 4, False, environment=RETURNS_FREED)
    assert 31 <= max(added) < 4 * 31
    first, second = launch_all(added_by_evaluation, 2, 32, 2, True, environment=RETURNS_FREED)
    assert second < 8 * 31 < 16 * 31 <= first


@pytest.mark.slow
@pytest.mark.distributed
def test_no_phase_of_a_pipeline_takes_more_than_measured() -> None:
    """Runs differ by 0.02 of the model; a layer has 0.08 of it, a stage and its gradients a half each."""
    measured = json.loads((REPOSITORY / "benchmarks" / "memory.json").read_text())[SECTION]["ranks"]
    for found, expected in zip(measure(), measured, strict=True):
        assert found.keys() == expected.keys()
        assert {phase: peak for phase, peak in found.items() if peak > expected[phase] + 0.03} == {}
