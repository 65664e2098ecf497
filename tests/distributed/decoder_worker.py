"""Causal language models in pipelines, with whole sequences and with slices, beside plain Trainer on one process.

Rank 0 writes `FOLDER/<case>-<K>x<R>.json`: losses, gradient norms, the loss of an evaluation and the last layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.decoders import DECODERS, collate_tokens, make_decoder, make_packed_rows, make_rows, ties_embeddings


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
CASES = FAMILIES | EMBEDDINGS | CLASSIFIERS | PACKED | SLICED | HEADS | ELASTIC | STORED


def rows_of(case: DecoderCase, num: int) -> list[dict[str, Any]]:
    return make_packed_rows(num) if case.is_packed else make_rows(num, case.task)


def make_trainer(case: DecoderCase, folder: Path, layout: tuple[int, int]) -> Trainer:
    torch.manual_seed(0)
    model = make_decoder(case.model, case.task, **case.config)
    data = {
        "train_dataset": rows_of(case, case.num_rows),
        "data_collator": default_data_collator if case.is_packed else collate_tokens,
    }
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 8 // WORLD_SIZE, "seed": 3,
        "per_device_eval_batch_size": 8 // WORLD_SIZE, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "gradient_accumulation_steps": case.accumulation,
    }  # fmt: skip
    if layout == (1, 1) and not case.freezes:
        plain = Trainer(model, TrainingArguments(**common), **data)
        plain.model_accepts_loss_kwargs = case.task == "words"  # transformers#47688
        return plain
    options = case.options
    if layout == (1, 1):
        # Whole sequences on one process, which other tests compare with plain Trainer.
        options = {key: value for key, value in options.items() if key.startswith("freeze")}
    options = {"freeze_policy": "none", "activation_cache": "off", "activation_cache_dir": str(folder), **options}
    args = PipeTransformerArguments(**common, pipeline_parallel_size=layout[0], **options)
    return PipeTransformerTrainer(model, args, **data)


def run(name: str, case: DecoderCase, layout: tuple[int, int], folder: Path) -> None:
    where = f"{name}-{layout[0]}x{layout[1]}"
    trainer = make_trainer(case, folder / where, layout)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    found: dict[str, Any] = {key: [entry[key] for entry in history] for key in ("loss", "grad_norm")}
    if isinstance(trainer, PipeTransformerTrainer):
        found["layout"] = trainer.layout.as_event()
    found["evaluated"] = trainer.evaluate(rows_of(case, 12))["eval_loss"]
    if trainer.is_world_process_zero():
        (folder / f"{where}.json").write_text(json.dumps(found))


@scenario
def run_all(folder: Path, names: list[str]) -> None:
    for name in names:
        case = CASES[name]
        for layout in case.layouts if WORLD_SIZE > 1 else ((1, 1),):
            if layout[0] * layout[1] == WORLD_SIZE:
                run(name, case, layout, folder)
