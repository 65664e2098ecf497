"""Preference pairs, and TRL's trainers for them with ours over them: a reward model, and DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from hf_pipetransformer.trl import (
    DPOPipelineConfig,
    DPOPipelineTrainer,
    RewardPipelineConfig,
    RewardPipelineTrainer,
)
from tests.support.decoders import VOCABULARY, make_decoder
from tests.support.sft import SPECIAL, WORDS, make_tokenizer


CONFIGS: dict[type, Any] = {
    RewardTrainer: RewardConfig,
    RewardPipelineTrainer: RewardPipelineConfig,
    DPOTrainer: DPOConfig,
    DPOPipelineTrainer: DPOPipelineConfig,
}
OURS = {RewardTrainer: RewardPipelineTrainer, DPOTrainer: DPOPipelineTrainer}


def make_pairs(num: int, seed: int = 0, has_prompts: bool = True, has_margins: bool = False) -> Dataset:
    """Pairs of texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(shortest: int, longest: int) -> str:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        words = torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator).tolist()
        return " ".join(WORDS[number] for number in words)

    rows: list[dict[str, Any]] = []
    for index in range(num):
        prompt = {"prompt": text(1, 12)} if has_prompts else {}
        pair = {name: f" {text(2, 20)}" for name in ("chosen", "rejected")}
        rows.append(prompt | pair | ({"margin": index % 3 / 10} if has_margins else {}))
    return Dataset.from_list(rows)


def make_preference_trainer(kind: type, folder: Path, model: Any = "gpt2", **options: Any) -> Any:
    """Either kind; `options` may hold those of a pipeline for ours, and of the data and the constructor."""
    is_reward, num_rows = issubclass(kind, RewardTrainer), options.pop("num_rows", 57)
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 16, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
        "logging_steps": 4, "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 8, "save_strategy": "no",
    }  # fmt: skip
    names = ("peft_config", "ref_model", "compute_metrics", "callbacks")
    given = {name: options.pop(name) for name in names if name in options}
    has = {"has_prompts": not is_reward, "has_margins": options.pop("has_margins", False)}
    pairs: Any = make_pairs(num_rows, **has)
    if options.pop("is_stream", False):
        pairs = pairs.to_iterable_dataset()
    torch.manual_seed(0)
    if isinstance(model, str):
        task = {"task": "classes", "num_labels": 1} if is_reward else {}
        model = make_decoder(model, **task)
    return kind(
        model=model, args=CONFIGS[kind](**common | options), train_dataset=pairs,
        eval_dataset=make_pairs(13, seed=1, **has), processing_class=make_tokenizer(), **given,
    )  # fmt: skip


BETA, LOGIT = 0.1, 0.1
"""DPO's default, and the size of a logit of the tiny models."""
_OF_THE_MACHINE = ("runtime", "per_second", "flos", "memory_gb", "bubble_share", "preparation_time")


def logged(trainer: Any) -> list[dict[str, float]]:
    """All that does not hang on time or layout, without the entries that say nothing but a new layout."""
    return [
        {
            name: value
            for name, value in entry.items()
            if not name.endswith(_OF_THE_MACHINE) and not name.startswith("pipeline_")
        }
        for entry in trainer.state.log_history
        if any("loss" in name for name in entry)
    ]


def assert_logged_alike(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float) -> float:
    """Compare what the other trainer logs, entry by entry; return the largest relative difference.

    What is made of larger numbers is compared in the size of these.
    """
    largest = 0.0
    for entry, plain in zip(found, expected, strict=True):
        assert set(plain) <= set(entry), set(plain) - set(entry)
        for name, value in plain.items():
            difference = abs(entry[name] - value) / max(abs(value), _size_of_terms(name, plain), 1e-3)
            assert difference <= tolerance, (name, entry[name], value, plain["step"])
            largest = max(largest, difference)
    return largest


def _size_of_terms(name: str, plain: dict[str, float]) -> float:
    """The size of what is added up: DPO's rewards are log-probabilities times beta, logits have both signs."""
    mode = "eval_" if name.startswith("eval_") else ""
    if "rewards/" in name:
        return BETA * abs(plain[f"{mode}logps/chosen"])
    if name.endswith(("margin", "_reward")):
        return max(abs(plain[f"{mode}max_reward"]), abs(plain[f"{mode}min_reward"]))
    return LOGIT if "logits/" in name else 0.0
