"""Train a small ViT on scikit-learn's handwritten digits on two processes.

It starts as two pipeline stages; when its lower layers have converged they are frozen, and the two processes become
two replicas.

`make demo` starts it. By hand: `ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/demo.py`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from metrics import accuracy
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    PrinterCallback,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.page import write_report


EXPECTED_ACCURACY = 0.95
BRIGHTEST = 16  # the digits' pixels are counts, 0 to 16


def digits() -> tuple[Dataset, Dataset]:
    """The 1,797 images as `pixel_values` `(1, 8, 8)` and `labels`; a stratified fifth of them is held out."""
    data = load_digits()
    pixels = (data.images[:, None] / BRIGHTEST * 2 - 1).astype(np.float32)
    parts = train_test_split(range(len(pixels)), test_size=0.2, stratify=data.target, random_state=0)
    columns = ({"pixel_values": pixels[rows], "labels": data.target[rows]} for rows in parts)
    return tuple(Dataset.from_dict(rows).with_format("torch") for rows in columns)


def small_vit() -> ViTForImageClassification:
    """6 layers of width 64 over 16 patches of 2 x 2 pixels."""
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_hidden_layers=6,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        initializer_range=0.1,  # the default, 0.02, suits wide models and starts slowly here
        num_labels=10,
    )
    return ViTForImageClassification(config)


def arguments(output_dir: str, epochs: float) -> PipeTransformerArguments:
    """Two stages, and freezing after 60 % of the run; everything else is what one would give Trainer."""
    return PipeTransformerArguments(
        output_dir=output_dir,
        pipeline_parallel_size=2,
        pipeline_parallel_num_microbatches=2,
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=90,
        learning_rate=2e-3,
        warmup_steps=50,
        weight_decay=0.05,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        freeze_policy="gradient_norm",
        # This model starts from random weights, so nothing converges early: a pretrained one can do without warm-up.
        freeze_warmup=0.6,
        freeze_interval="0.1",
        freeze_min_active_layers=1,
        disable_tqdm=True,
        pipeline_trace_step=100,
    )


class EpochLine(TrainerCallback):
    """One printed line per epoch."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.loss = float("nan")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.loss = logs.get("loss", self.loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(
                f"epoch {state.epoch:4.0f} of {args.num_train_epochs:.0f}   training loss {self.loss:6.4f}   "
                f"held-out accuracy {metrics['eval_accuracy']:6.1%}   {time.perf_counter() - self.start:5.1f} s",
                flush=True,
            )


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy of the held-out images."""
    return {"accuracy": accuracy(prediction.predictions.argmax(axis=-1), prediction.label_ids)}


def reloaded_accuracy(folder: str, data: Dataset) -> float:
    """Accuracy of the saved model in plain transformers, in one process."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    columns = data[:]
    with torch.no_grad():
        logits = model(pixel_values=columns["pixel_values"]).logits
    return accuracy(logits.argmax(dim=-1).numpy(), columns["labels"].numpy())


def main() -> None:
    """Train, evaluate, save, load again, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/demo")
    parser.add_argument("--num_train_epochs", type=float, default=25)
    options = parser.parse_args()
    args = arguments(options.output_dir, options.num_train_epochs)
    set_seed(args.seed)
    disable_progress_bar()
    train_data, held_out = digits()
    model = small_vit()
    size = sum(parameter.numel() for parameter in model.parameters())
    trainer = PipeTransformerTrainer(
        model=model,
        args=args,
        train_dataset=train_data,
        eval_dataset=held_out,
        compute_metrics=compute_metrics,
        callbacks=[EpochLine()],
    )
    trainer.remove_callback(PrinterCallback)
    is_first = trainer.is_world_process_zero()
    if is_first:
        print(f"{len(train_data)} digits to train on, {len(held_out)} held out; a ViT of {size:,} parameters.")

    result = trainer.train()
    trainer.remove_callback(EpochLine)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", metrics)
    if is_first:
        (report,) = write_report([args.output_dir], page=f"{args.output_dir}/report.html", pictures=None)
        reloaded = reloaded_accuracy(args.output_dir, held_out)
        print(
            f"\nheld-out accuracy   {metrics['eval_accuracy']:.1%} "
            f"(the saved model, loaded in plain transformers: {reloaded:.1%})\n"
            f"layout at the end   {trainer.layout}\n"
            f"training            {result.metrics['train_runtime']:.1f} s, {trainer.state.global_step} steps\n"
            f"outputs             {Path(args.output_dir).resolve()}\n"
            f"report              {Path(report).resolve()}",
            flush=True,
        )
    trainer.end()
    if metrics["eval_accuracy"] < EXPECTED_ACCURACY:
        raise SystemExit(
            f"Found an accuracy of {metrics['eval_accuracy']:.1%}, expected at least {EXPECTED_ACCURACY:.0%}: train "
            "longer with --num_train_epochs, and report it if that does not help."
        )


if __name__ == "__main__":
    main()
