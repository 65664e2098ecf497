"""What is said of typical mistakes: one sentence each, which begins with the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel, ViTConfig, ViTModel

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


CONFIG = BertConfig(
    vocab_size=20,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=8,
    hidden_dropout_prob=0.0,
)
FULL = ("input_ids", "attention_mask", "labels")


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter(rows())


class WithoutLoss(nn.Module):
    """A model of a script that takes labels and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(input_ids.float())}


def rows(*columns: str) -> list[dict[str, torch.Tensor]]:
    whole = [
        {"input_ids": torch.tensor([1, 2, 3, index]), "attention_mask": torch.ones(4, dtype=torch.long)}
        | {"labels": torch.tensor(index % 2), "pixel_values": torch.ones(3, 8, 8)}
        for index in range(8)
    ]
    return [{name: row[name] for name in columns or FULL} for row in whole]


def bert(trains: bool = True) -> nn.Module:
    return BertForSequenceClassification(CONFIG).requires_grad_(trains)


def vit() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes))


def lora() -> Any:
    return get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2))


def train(
    folder: Path, model: Any = None, data: Any = None, resume: str | bool | None = None, **options: Any
) -> PipeTransformerTrainer:
    given = {"output_dir": str(folder), "num_train_epochs": 1, "per_device_train_batch_size": 4, "report_to": "none"}
    args = PipeTransformerArguments(**{**given, "use_cpu": True, "save_strategy": "no", **options})
    trainer = PipeTransformerTrainer(model or bert(), args, train_dataset=data or rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


FROZEN = {"freeze_layers": 1}
MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an option's name": (
        lambda at: train(at, freez_layers=1),
        "has no option 'freez_layers'. Did you mean 'freeze_layers'",
    ),
    "an option's name in short": (
        lambda at: train(at, pipeline_size=2),
        "has no option 'pipeline_size'. Did you mean 'pipeline_parallel_size'",
    ),
    "an option of another class": (
        lambda at: train(at, predict_with_generate=True),
        "has no option 'predict_with_generate'. It is one of Seq2SeqPipelineArguments",
    ),
    "a policy's name": (lambda at: train(at, freeze_policy="gradient_nrom"), "Did you mean 'gradient_norm'"),
    "no labels": (
        lambda at: train(at, data=rows("input_ids", "attention_mask")),
        "The batches have no labels: BertForSequenceClassification computes its loss from",
    ),
    "no labels, and freezing": (
        lambda at: train(at, data=rows("input_ids", "attention_mask"), **FROZEN),
        "The batches have no labels: BertForSequenceClassification computes its loss from",
    ),
    "too many layers": (lambda at: train(at, freeze_layers=9), "freezes 9 layers: the model has 2"),
    "too many layers, and adapters": (
        lambda at: train(at, lora(), freeze_layers=9),
        "freezes 9 layers: the model has 2",
    ),
    "nothing is trained": (
        lambda at: train(at, bert(trains=False)),
        "No parameter of the model requires gradients, so that nothing would train",
    ),
    "nothing is trained, and freezing": (
        lambda at: train(at, bert(trains=False), **FROZEN),
        "No parameter of the model requires gradients, so that nothing would train",
    ),
    "more stages than processes": (lambda at: train(at, pipeline_parallel_size=2), "takes 2 processes or a multiple"),
    "a file in place of a folder": (
        lambda at: train(at / "file"),
        r"output_dir='.*file' cannot be used \(File exists\): name a folder of yours",
    ),
    "no input": (
        lambda at: train(at, data=rows("attention_mask", "labels")),
        "The batches lack 'input_ids', from which BertForSequenceClassification computes",
    ),
    "no input, and freezing": (
        lambda at: train(at, data=rows("attention_mask", "labels"), **FROZEN),
        "The batches lack 'input_ids', from which BertForSequenceClassification computes",
    ),
    "texts in place of tokens": (
        lambda at: train(at, data=Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})),
        "The batches lack 'input_ids'.* Trainer drops columns that no forward takes",
    ),
    "a stream without max_steps": (lambda at: train(at, data=Stream()), "max_steps has to be specified"),
    "a class without a head": (
        lambda at: train(at, BertModel(CONFIG)),
        "BertModel computes no loss, since its forward takes no labels",
    ),
    "a class without a head, and freezing": (
        lambda at: train(at, vit(), rows("pixel_values", "labels"), **FROZEN),
        "ViTModel computes no loss, since its forward takes no labels",
    ),
    "a script's model without a loss": (lambda at: train(at, WithoutLoss()), "did not return a loss"),
    "no such checkpoint": (lambda at: train(at, resume="none/checkpoint-3"), "valid checkpoint at none/checkpoint-3"),
    "no such checkpoint, and freezing": (
        lambda at: train(at, resume="none/checkpoint-3", **FROZEN),
        "resume_from_checkpoint='none/checkpoint-3' is not a folder",
    ),
    "an evaluation without data": (lambda at: train(at, eval_strategy="epoch"), "you didn't pass an `eval_dataset`"),
    "an empty batch": (
        lambda at: train(at, per_device_train_batch_size=0),
        "per_device_train_batch_size must be a positive whole number",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_cause_is_said_first(name: str, tmp_path: Path) -> None:
    mistake, said = MISTAKES[name]
    (tmp_path / "file").touch()
    with pytest.raises((ValueError, TypeError), match=said) as refused:
        mistake(tmp_path)
    assert "\n" not in str(refused.value).strip()


def test_batches_that_micro_batches_do_not_divide_are_no_mistake(tmp_path: Path) -> None:
    """Micro-batches of 2, 1 and 1 samples are weighted by these."""
    trainer = train(tmp_path, pipeline_parallel_num_microbatches=3, max_steps=1)
    assert trainer.layout is not None and trainer.layout.num_microbatches == 3


def test_what_a_script_raises_itself_stays_what_it_is(tmp_path: Path) -> None:
    class Own(PipeTransformerTrainer):
        def compute_loss(self, *_args: Any, **_named: Any) -> Any:
            raise ValueError("The model did not return a loss that this script takes")

    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="that this script takes"):
        Own(bert(), args, train_dataset=rows("attention_mask")).train()
