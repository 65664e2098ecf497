"""Causal language models follow plain Trainer on one process: whole sequences, and slices of them (TeraPipe)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, default_data_collator

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.launches import (
    Layout,
    Outcome,
    Run,
    assert_trained_alike,
    launches_of,
    run_listed,
    run_params,
    slow_unless,
)
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.decoders import DECODERS, collate_tokens, make_decoder, make_packed_rows, make_rows, ties_embeddings
from tests.support.liger import install_kernels
from tests.support.models import is_key_bias
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


STEPS = 8


@dataclass(frozen=True)
class DecoderCase:
    """One training.

    Args:
        model: one of `DECODERS`.
        options: of the pipeline.
        task: what it learns, see `make_decoder`.
        config: changes of the model's config.
        is_packed: rows hold several texts.
        num_rows: of the data set.
        accumulation: batches of a step.
        layouts: K and R.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    task: str = "words"
    config: dict[str, Any] = field(default_factory=dict)
    is_packed: bool = False
    num_rows: int = 64
    accumulation: int = 1
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)

    @property
    def freezes(self) -> bool:
        """Whether layers freeze, which plain Trainer does not do."""
        return "freeze_policy" in self.options


TOKEN = {"pipeline_schedule": "token"}
RAGGED, EVEN = TOKEN | {"pipeline_token_slices": "5,20,9"}, TOKEN | {"pipeline_token_slices": "4"}
KEPT = {"freeze_policy": "fixed", "freeze_at": "2:1,4:2", "activation_cache": "on"}
FROZEN = {"freeze_policy": "fixed", "freeze_at": "3:1,5:2", "pipeline_compression": "throughput"}

FAMILIES = {
    f"family-{name}": DecoderCase(name, accumulation=1 + number % 2, layouts=((2, 1), (2, 2), (4, 1)))
    for number, name in enumerate(DECODERS)
}
EMBEDDINGS = {
    f"{'untied' if ties_embeddings(name) else 'tied'}-{name}": DecoderCase(
        name, config={"tie_word_embeddings": not ties_embeddings(name)}, accumulation=2 - number % 2
    )
    for number, name in enumerate(DECODERS)
}
CLASSIFIERS = {
    "classes-gpt2": DecoderCase("gpt2", {"pipeline_parallel_num_microbatches": 4}, "classes"),
    "tags-qwen2": DecoderCase("qwen2", {"pipeline_parallel_num_microbatches": 4}, "tags", accumulation=2),
    "classes-llama": DecoderCase("llama", task="classes", accumulation=2, layouts=((2, 1), (2, 2))),
    "classes-qwen2": DecoderCase("qwen2", task="classes", accumulation=2),
    "classes-qwen3": DecoderCase("qwen3", task="classes"),
    "classes-mixtral": DecoderCase("mixtral", task="classes"),
    "tags-gpt2": DecoderCase("gpt2", task="tags", layouts=((2, 1), (2, 2))),
}
PACKED = {
    "packed-llama": DecoderCase("llama", {"pipeline_parallel_num_microbatches": 3}, is_packed=True, accumulation=2),
    "packed-gpt2": DecoderCase("gpt2", is_packed=True, layouts=((2, 1), (2, 2))),
    "packed-gemma2": DecoderCase("gemma2", is_packed=True, layouts=((2, 1), (2, 2))),
}
SLICED = {
    "ragged": DecoderCase("llama", RAGGED, layouts=((2, 1), (4, 1))),
    "even": DecoderCase("gpt2", EVEN, accumulation=2, layouts=((2, 1), (4, 1))),
    "grouped-queries": DecoderCase("qwen2", RAGGED | {"pipeline_parallel_num_microbatches": 4}),
    "window": DecoderCase("mistral", EVEN | {"pipeline_parallel_num_microbatches": 1}),
    "replicas": DecoderCase("llama", RAGGED, layouts=((1, 2), (2, 2))),
    "recomputed": DecoderCase("qwen2", EVEN | {"pipeline_checkpoint": "except_last"}),
    "recomputed-layers": DecoderCase("llama", RAGGED | {"pipeline_checkpoint": "layers"}, layouts=((2, 1), (2, 2))),
    "planned": DecoderCase("gpt2", TOKEN),
}
HEAD = {"pipeline_head_slices": 3}
HEADS = {
    "head-llama": DecoderCase("llama", HEAD, layouts=((2, 1), (1, 2), (2, 2))),
    # Soft caps on its logits, and embeddings that are its head.
    "head-gemma2": DecoderCase("gemma2", HEAD | {"pipeline_checkpoint": "layers"}, accumulation=2),
    "head-packed": DecoderCase("gpt2", HEAD | {"pipeline_schedule": "gpipe"}, is_packed=True),
    "head-split-backward": DecoderCase("qwen2", HEAD | {"pipeline_schedule": "zb_h1"}, layouts=((2, 1), (2, 2))),
    "head-stored": DecoderCase("llama", HEAD | KEPT, num_rows=16),
}
ELASTIC = {
    "frozen-slices": DecoderCase("llama", RAGGED | FROZEN, layouts=((2, 1), (4, 1))),
    "frozen-whole": DecoderCase("gpt2", FROZEN),
}
# Four epochs of two steps: rows are written in the second, and read from then on.
STORED = {
    "stored-packed": DecoderCase("qwen2", KEPT, is_packed=True, num_rows=16, layouts=((2, 1), (2, 2))),
    "stored-llama": DecoderCase("llama", KEPT, num_rows=16),
    "stored-gpt2": DecoderCase("gpt2", KEPT | {"pipeline_compression": "throughput"}, num_rows=16),
}
# Plain Trainer runs without the kernels.
FUSED = {"use_liger_kernel": True}
LIGER = {
    "liger-llama": DecoderCase("llama", FUSED, layouts=((2, 1), (1, 2), (2, 2))),
    # Soft caps on its logits, which the kernels of the head have to know.
    "liger-gemma2": DecoderCase("gemma2", FUSED | {"pipeline_checkpoint": "layers"}, accumulation=2),
    "liger-packed": DecoderCase("llama", FUSED | {"pipeline_schedule": "gpipe"}, is_packed=True),
    "liger-split-backward": DecoderCase("qwen3", FUSED | {"pipeline_schedule": "zb_h1"}),
    "liger-head-slices": DecoderCase("qwen2", FUSED | HEAD),
    "liger-token-slices": DecoderCase("mistral", FUSED | EVEN),
    "liger-stored": DecoderCase("llama", FUSED | KEPT, num_rows=16),
}
CASES = FAMILIES | EMBEDDINGS | CLASSIFIERS | PACKED | SLICED | HEADS | ELASTIC | STORED | LIGER


def rows_of(case: DecoderCase, num: int) -> list[dict[str, Any]]:
    return make_packed_rows(num) if case.is_packed else make_rows(num, case.task)


def make_trainer(case: DecoderCase, layout: Layout | None, output: Path) -> Trainer:
    torch.manual_seed(0)
    model = make_decoder(case.model, case.task, **case.config)
    data = {
        "train_dataset": rows_of(case, case.num_rows),
        "data_collator": default_data_collator if case.is_packed else collate_tokens,
    }
    options = {
        "max_steps": STEPS, "per_device_eval_batch_size": 8 // WORLD_SIZE, "learning_rate": 1e-3, "seed": 3,
        "gradient_accumulation_steps": case.accumulation,
    }  # fmt: skip
    if layout is None and not case.freezes:
        plain = Trainer(model, plain_arguments(output, **options), **data)
        plain.model_accepts_loss_kwargs = case.task == "words"  # transformers#47688
        return plain
    own = case.options
    if "use_liger_kernel" in own:
        install_kernels()
    if layout is None:
        # Whole sequences on one process, which other tests compare with plain Trainer.
        own = {key: value for key, value in own.items() if key.startswith("freeze")}
    own = {"activation_cache": "off", "activation_cache_dir": str(output), **own}
    args = our_arguments(output, 1 if layout is None else layout[0], **options, **own)
    return PipeTransformerTrainer(model, args, **data)


def train(name: str, layout: Layout | None, output: Path) -> End:
    case = CASES[name]
    trainer = make_trainer(case, layout, output)
    trainer.train()
    return end_of(trainer, evaluated=trainer.evaluate(rows_of(case, 12))["eval_loss"])


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


# In every run of CI: positions that are learned, rotary ones, and layers of two kinds; on two processes only.
ON_EVERY_CHANGE = ("family-gpt2", "family-llama", "family-gemma2", "classes-gpt2", "packed-llama", "stored-packed")
QUICK = {*ON_EVERY_CHANGE, *SLICED, *HEADS, *ELASTIC, *LIGER}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all)


@pytest.mark.parametrize(
    "run",
    run_params(
        {name: case.layouts for name, case in CASES.items()}, lambda run: run.case in QUICK and run.num_ranks == 2
    ),
)
def test_losses_gradients_weights_and_evaluation_follow_plain_trainer(ours: Outcome, plain: Outcome, run: Run) -> None:
    assert len(ours.logged("loss")) == STEPS
    # AdamW makes steps of the rounding noise where a gradient is small.
    assert_trained_alike(ours, plain, ignored=is_key_bias, weight_tolerance=1e-4)
    assert ours.ranks[0]["evaluated"] == pytest.approx(plain.ranks[0]["evaluated"], rel=1e-5)
    last, case = ours.ranks[0]["layout"], CASES[run.case]
    if not case.freezes:
        assert (last["num_stages"], last["num_replicas"]) == run.layout
    if "pipeline_token_slices" in case.options:
        (lengths,) = last["token_slices"]
        assert len(lengths) > 2


@pytest.mark.parametrize("run", [Run(name, (2, 1)) for name in ELASTIC], ids=str)
def test_layers_freeze_as_the_table_says(ours: Outcome) -> None:
    assert ours.ranks[0]["layout"]["num_frozen_layers"] == 2
    assert [event["num_frozen"] for event in ours.events("freeze")][-2:] == [1, 2]


@pytest.mark.parametrize("run", [slow_unless(name in QUICK, Run(name, (2, 1))) for name in STORED])
def test_what_frozen_layers_give_is_read_in_the_last_epochs(ours: Outcome, run: Run) -> None:
    epochs = [event for event in ours.events("cache") if event["what"] == "epoch"]
    num_rows = CASES[run.case].num_rows
    assert [(epoch["hits"], epoch["misses"]) for epoch in epochs] == [(0, num_rows), (num_rows, 0), (num_rows, 0)]
