"""Supervised fine-tuning with TRL's trainer and ours over it: a tokenizer made on the spot, and text for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_pipetransformer import PipeTransformerMixin
from hf_pipetransformer.trl import SFTPipelineConfig
from tests.support.decoders import VOCABULARY, make_decoder
from tests.support.media_models import MODELS, build
from tests.support.processors import PROCESSORS, make_conversations


SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_texts(num: int, seed: int = 0) -> Dataset:
    """Texts of 3 to 40 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 41, (num,), generator=generator).tolist()
    words = [torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"text": " ".join(WORDS[number] for number in numbers)} for numbers in words])


def make_pictures(num: int, seed: int = 1) -> Dataset:
    """Conversations about pictures, as TRL takes them: each turn is its words, the pictures stand beside them."""

    def turn(given: dict[str, Any]) -> dict[str, str]:
        return {"role": given["role"], "content": given["content"][-1]["text"]}

    rows = make_conversations(num, seed)
    return Dataset.from_list([{**row, "messages": [turn(each) for each in row["messages"]]} for row in rows])


def make_sft_trainer(
    kind: type[SFTTrainer], folder: Path, model: Any = "gpt2", pictures: str | None = None, **options: Any
) -> Any:
    """Either kind; `options` may hold those of a pipeline for ours, and `peft_config`.

    `pictures` names the family of a model that sees some, whose tower is frozen.
    """
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 20, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
        "logging_steps": 5, "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 10, "save_strategy": "no",
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("peft_config",) if name in options}
    given |= {"train_dataset": make_texts(64), "eval_dataset": make_texts(13, seed=1)}
    given["processing_class"] = make_tokenizer()
    torch.manual_seed(0)
    if pictures is not None:
        model, tower = build(pictures), MODELS[pictures].tower
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tower))
        given |= {"train_dataset": make_pictures(32), "eval_dataset": make_pictures(13, seed=2)}
        given["processing_class"] = PROCESSORS[pictures]()
        common["max_length"] = None
    args = (SFTPipelineConfig if issubclass(kind, PipeTransformerMixin) else SFTConfig)(**common | options)
    return kind(make_decoder(model) if isinstance(model, str) else model, args, **given)


def logged(trainer: SFTTrainer) -> list[dict[str, float]]:
    """What does not hang on time."""
    names = {"loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens"}
    names |= {f"eval_{name}" for name in names}
    return [
        {name: value for name, value in entry.items() if name in names}
        for entry in trainer.state.log_history
        if names & entry.keys()
    ]
