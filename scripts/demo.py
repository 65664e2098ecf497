"""Train a small ViT on scikit-learn's handwritten digits on two processes.

It starts as two pipeline stages; when its lower layers have converged they are frozen, and the two processes become
two replicas.

`make demo` starts it. By hand: `ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/demo.py`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score
from transformers import EvalPrediction, ViTConfig, ViTForImageClassification, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.page import write_report


EXPECTED_ACCURACY = 0.95


def digits() -> DatasetDict:
    """The 1,797 images as `pixel_values` `(1, 8, 8)` and `labels`; a stratified fifth of them is held out."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8)  # counts of 0 to 16 to -1..1
    data = Dataset.from_dict({"pixel_values": pixels, "labels": labels}).class_encode_column("labels")
    return data.train_test_split(test_size=0.2, stratify_by_column="labels", seed=0).with_format("torch")


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


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy of the held-out images."""
    return {"accuracy": accuracy_score(prediction.label_ids, prediction.predictions.argmax(axis=-1))}


def reloaded_accuracy(folder: str, data: Dataset) -> float:
    """Accuracy of the saved model in plain transformers, in one process."""
    columns = data[:]
    with torch.no_grad():
        logits = ViTForImageClassification.from_pretrained(folder).eval()(columns["pixel_values"]).logits
    return accuracy_score(columns["labels"], logits.argmax(dim=-1))


def main() -> None:
    """Train, evaluate, save, load again, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/demo")
    parser.add_argument("--num_train_epochs", type=float, default=25)
    options = parser.parse_args()
    args = arguments(options.output_dir, options.num_train_epochs)
    set_seed(args.seed)
    disable_progress_bar()
    data = digits()
    trainer = PipeTransformerTrainer(
        small_vit(), args, train_dataset=data["train"], eval_dataset=data["test"], compute_metrics=compute_metrics
    )
    result = trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        (report,) = write_report([args.output_dir], page=f"{args.output_dir}/report.html", pictures=None)
        reloaded = reloaded_accuracy(args.output_dir, data["test"])
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
