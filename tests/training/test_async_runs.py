"""Asynchronous 1F1B in a run: what is refused, when it drains, and what one process does with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.training.asynchronous import AsynchronousSteps, next_drain
from hf_pipetransformer.training.start import steps_under
from tests.support.models import build_model, collate, make_dataset


ASYNC = {"pipeline_schedule": "async_1f1b"}


def arguments(folder: Path, **options: Any) -> PipeTransformerArguments:
    return PipeTransformerArguments(output_dir=str(folder), report_to="none", use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"pipeline_weights": "vanilla"},
            "pipeline_weights='vanilla' needs pipeline_schedule='async_1f1b', found '1f1b'",
        ),
        ({"pipeline_clip": "last"}, "pipeline_clip='last' needs pipeline_schedule='async_1f1b'"),
        ({"pipeline_drain_interval": 5}, "pipeline_drain_interval=5 needs pipeline_schedule='async_1f1b'"),
        (ASYNC | {"pipeline_drain_interval": 0}, "pipeline_drain_interval must be a number of optimizer steps"),
        (ASYNC | {"pipeline_weights": "fresh"}, "pipeline_weights must be one of"),
        (
            ASYNC | {"pipeline_checkpoint": "except_last"},
            "has no last micro-batch, but knows 'layers'",
        ),
        (
            ASYNC | {"torch_compile": True},
            "torch_compile=True with .*, which has not been verified",
        ),
        (ASYNC | {"fp16": True}, "fp16=True with pipeline_schedule='async_1f1b'.*bf16 does not need"),
        (ASYNC | {"activation_cache": "on"}, "activation_cache='on' with pipeline_schedule='async_1f1b'"),
        (ASYNC | {"pipeline_chunks": 2}, "expected 1 stages a rank"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        arguments(tmp_path, **options)


def layout_of(num_stages: int, schedule: str = "async_1f1b", num_microbatches: int = 1) -> Layout:
    boundaries = tuple(round(10 * k / num_stages) for k in range(num_stages + 1))
    return Layout(4, 0, num_stages, 1, boundaries, num_microbatches, schedule)


def options(weights: str = "pipeoptim", accumulation: int = 1, samples: int = 8) -> Any:
    return SimpleNamespace(
        pipeline_weights=weights, gradient_accumulation_steps=accumulation, train_samples_per_device=samples
    )


def test_a_parameter_of_several_stages_is_refused_with_what_to_change() -> None:
    tied = {"embeddings.weight": (0, 9), "layer.weight": (3,)}
    with pytest.raises(ValueError, match=r"embeddings.weight is used on stages 0, 1.*tie_word_embeddings=False"):
        AsynchronousSteps.check(layout_of(2), tied, options())
    for other in (layout_of(1), layout_of(2, "1f1b")):
        steps_under(other).check(other, tied, options())


def test_two_versions_are_refused_where_more_updates_lie_between() -> None:
    with pytest.raises(ValueError, match="double_buffer.*expected at least 3"):
        AsynchronousSteps.check(layout_of(4), {}, options("double_buffer"))
    AsynchronousSteps.check(layout_of(4, num_microbatches=2), {}, options("double_buffer", 2))
    AsynchronousSteps.check(layout_of(2), {}, options("double_buffer"))


def test_one_stage_alone_is_not_asynchronous() -> None:
    assert layout_of(2).abilities.overlaps_steps
    assert not layout_of(1).abilities.overlaps_steps
    assert not layout_of(2, "1f1b").abilities.overlaps_steps


@pytest.mark.parametrize(
    ("options", "state", "decisions", "interval", "expected"),
    [
        ({}, {}, (), None, 100),
        ({}, {}, (40, 6), None, 40),
        ({}, {}, (), 5, 12),
        ({"save_strategy": "steps"}, {"save_steps": 8}, (), None, 8),
        ({"save_strategy": "steps"}, {"save_steps": 7}, (), None, 14),
        ({"save_strategy": "epoch"}, {"save_steps": 8}, (), None, 100),
        ({"eval_strategy": "steps"}, {"eval_steps": 3, "save_steps": 2}, (), None, 9),
        ({}, {"max_steps": 7}, (), None, 8),
    ],
)
def test_a_window_ends_where_all_stages_are_needed_at_one_step(
    options: dict[str, Any], state: dict[str, int], decisions: tuple[int, ...], interval: int | None, expected: int
) -> None:
    """Before the eighth step."""
    args = SimpleNamespace(**{"save_strategy": "no", "eval_strategy": "no"} | options)
    state = {"global_step": 7, "max_steps": 100, "save_steps": 500, "eval_steps": None} | state
    trainer: Any = SimpleNamespace(args=args, state=SimpleNamespace(**state))
    assert next_drain(trainer, decisions, interval) == expected


@pytest.mark.parametrize("weights", ["pipeoptim", "double_buffer"])
def test_one_process_gives_trainers_numbers(tmp_path: Path, weights: str) -> None:
    found = []
    for base, options in ((Trainer, {}), (PipeTransformerTrainer, ASYNC | {"pipeline_weights": weights})):
        kind: Any = TrainingArguments if base is Trainer else PipeTransformerArguments
        more = options if base is Trainer else options | {"freeze_policy": "fixed", "freeze_at": "100:1"}
        args = kind(
            output_dir=str(tmp_path / base.__name__), per_device_train_batch_size=4, max_steps=6, logging_steps=1,
            gradient_accumulation_steps=2, learning_rate=1e-3, save_strategy="no", report_to="none", use_cpu=True,
            **more,
        )  # fmt: skip
        model, data = build_model("bert_sequence"), make_dataset("bert_sequence", 22)
        trainer = base(model=model, args=args, train_dataset=data, data_collator=collate)
        trainer.model_accepts_loss_kwargs = False  # It swallows them.
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([[entry["loss"], entry["grad_norm"]] for entry in entries])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=0)
