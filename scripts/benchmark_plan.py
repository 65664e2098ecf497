"""Plans beside what is measured: a step's time and the memory of each rank, and the paper's three settings.

    python scripts/benchmark_plan.py --output benchmarks/plan.json

Three models with random weights are trained on two processes of this machine, as two replicas (K=1) and as two
stages (K=2). Each is planned twice: by `--plan_only`, which measures the blocks at its start, and by
`hf-pipetransformer plan` from its config, with the rates of this machine: products and copies that this script times,
and the all-reduce that `--plan_only` measured. Plans and runs take turns; figures are medians, the range is that of
the rounds. A step's time is that between two ends of steps, with the loader's. Memory is the peak of a process's
anonymous memory while it trains, beyond what it had before the model was made and after a smaller one was trained, in
a launch that gives freed memory back at once. `--only paper` plans the settings of Table 1 of the PipeTransformer
paper, without a run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
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

import torch
from benchmark_memory import MALLOC, Memory, StageState
from benchmark_pipeline import machine
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PrinterCallback,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cli import main as command


CONFIGS: dict[str, PreTrainedConfig] = {
    "MiniLM": BertConfig(
        architectures=["BertForSequenceClassification"], hidden_size=384, num_hidden_layers=6,
        num_attention_heads=12, intermediate_size=1536, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "ViT": ViTConfig(
        architectures=["ViTForImageClassification"], hidden_size=192, num_hidden_layers=12, num_attention_heads=3,
        intermediate_size=768, image_size=32, patch_size=4,
    ),
    "Llama": LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=6, num_key_value_heads=6, vocab_size=8000, max_position_embeddings=512,
    ),
}  # fmt: skip
KINDS = {"MiniLM": BertForSequenceClassification, "ViT": ViTForImageClassification, "Llama": LlamaForCausalLM}
BATCH = {"MiniLM": 16, "ViT": 32, "Llama": 8}
"""Samples of a batch per process."""
LENGTH, NUM_STEPS, SKIPPED = 128, 12, 3
MEMORY_STEPS = 4
"""Optimizer steps where memory is watched."""

PEAK, REACHED = 11.2, 0.5
"""TFLOP/s of a Quadro RTX 5000 in float32, and the share assumed to be reached."""
PAPER: dict[str, dict[str, Any]] = {
    "ImageNet": {"model": "ViT-B/16", "samples": 1_281_167, "epochs": 10, "per pipeline": 400, "hours": (26.5, 9.35)},
    "CIFAR-100": {"model": "ViT-B/16", "samples": 50_000, "epochs": 10, "per pipeline": 320, "hours": (0.585, 0.206)},
    "SQuAD 1.1": {"model": "BERT-large", "samples": 88_524, "epochs": 3, "per pipeline": 64, "hours": (5.12, 2.43)},
}
"""Table 1 and Table 3 of the paper: hours of the baseline and of PipeTransformer."""
PAPERS_SPEEDUP = {"ImageNet": 2.83, "CIFAR-100": 2.44, "SQuAD 1.1": 2.10}
PAPERS_MODELS: dict[str, PreTrainedConfig] = {
    "ViT-B/16": ViTConfig(architectures=["ViTForImageClassification"]),
    "BERT-large": BertConfig(
        architectures=["BertForQuestionAnswering"], hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096,
    ),
}  # fmt: skip


def rows_of(name: str, number: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "ViT":
        return [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(i % 2)} for i in range(number)]
    words = torch.randint(5, 8000, (number, LENGTH))
    labels = words if name == "Llama" else torch.arange(number) % 2
    return [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]


class Watch(TrainerCallback):
    """Notes when steps end, and marks the training for the reading of memory."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.ends: list[float] = []
        self._memory = memory

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())
        if self._memory is not None and len(self.ends) >= 2:
            # The first step makes the optimizer's state.
            self._memory.begin("training")


def trainer_of(name: str, folder: Path, num_stages: int, rows: Any, watch: Watch, **options: Any) -> Any:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH[name],
        pipeline_parallel_size=num_stages, pipeline_parallel_num_microbatches="auto" if num_stages == 1 else 4,
        activation_cache="off", save_strategy="no", logging_steps=NUM_STEPS, report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, pipeline_gather_at_end="never",
        **{"max_steps": NUM_STEPS, **options},
    )  # fmt: skip
    trainer = PipeTransformerTrainer(KINDS[name](CONFIGS[name]), args, train_dataset=rows, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    return trainer


def worker(what: str, name: str, folder: Path, num_stages: int) -> None:
    """One rank of a launch: prints a plan, times steps, or watches memory; the figures go to a file."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    rows = rows_of(name, BATCH[name] * world * (NUM_STEPS + 1))
    watch = Watch()
    if what == "plan":
        with contextlib.redirect_stdout(io.StringIO()):
            trainer_of(name, folder, num_stages, rows, watch, plan_only=True).train()
    found: dict[str, Any] = {}
    if what == "memory":
        # What libraries allocate once is there before.
        small = CONFIGS[name].num_hidden_layers
        CONFIGS[name].num_hidden_layers = max(2, num_stages)
        trainer_of(name, folder, num_stages, rows, watch, max_steps=2).train()
        CONFIGS[name].num_hidden_layers = small
        gc.collect()
        memory = Memory(StageState())  # Of no stage: all memory counts.
        trainer = trainer_of(name, folder, num_stages, rows, Watch(memory), max_steps=MEMORY_STEPS)
        trainer.train()
        memory.end()
        found["bytes"] = memory.peaks["training"]
    else:
        trainer = trainer_of(name, folder, num_stages, rows, watch)
        trainer.train()
        steps = [after - before for before, after in zip(watch.ends, watch.ends[1:], strict=False)][SKIPPED:]
        found["step"] = statistics.median(steps)
    (folder / f"{what}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    trainer.end()


def launch(what: str, name: str, folder: Path, num_stages: int) -> list[dict[str, Any]]:
    command_line = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(Path(__file__).resolve()), "--worker", what, name, str(folder), str(num_stages),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(MALLOC if what == "memory" else {})}
    subprocess.run(command_line, env={**os.environ, **environment}, check=True)
    if what == "plan":
        found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        return [found]
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(2)]


def plan_of(config: PreTrainedConfig, *options: Any) -> dict[str, Any]:
    """The plan of a config by the command line."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        config.save_pretrained(folder)
        with contextlib.suppress(SystemExit):  # It fits nowhere.
            command(["plan", folder, *map(str, options), "--json"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def rates() -> dict[str, float]:
    """TFLOP/s of products as large as a layer's, and GB/s of copies, on one thread: medians of eleven."""
    torch.set_num_threads(1)
    left, right, large = torch.randn(2048, 384), torch.randn(384, 1536), torch.randn(2**25)
    products, copies = [], []
    for _ in range(11):
        start = time.perf_counter()
        for _ in range(10):
            left @ right
        products.append((time.perf_counter() - start) / 10)
        start = time.perf_counter()
        large.clone()
        copies.append(time.perf_counter() - start)
    flops, moved = 2 * 2048 * 384 * 1536, 2 * large.nbytes
    return {
        "TFLOP/s": flops / statistics.median(products) / 1e12,
        "GB/s of memory": moved / statistics.median(copies) / 1e9,
    }


def beside(predicted: list[float], measured: list[float]) -> dict[str, Any]:
    """Medians of both, their ratio, and the range of the measured ones."""
    both = statistics.median(predicted), statistics.median(measured)
    return {
        "predicted": both[0], "measured": both[1], "ratio": round(both[0] / both[1], 3),
        "measured, range": [min(measured), max(measured)],
    }  # fmt: skip


def measure(name: str, num_stages: int, rounds: int, found_rates: dict[str, float]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="benchmark-plan-") as made:
        folder = Path(made)
        plans, steps = [], []
        for _ in range(rounds):
            plans += launch("plan", name, folder, num_stages)
            steps.append(max(rank["step"] for rank in launch("step", name, folder, num_stages)))
        used = [rank["bytes"] for rank in launch("memory", name, folder, num_stages)]
    per_byte = statistics.median(each["overheads"]["reduction_per_byte"] for each in plans)
    from_config = plan_of(
        CONFIGS[name], "--processes", 2, "--device_memory", 8, "--sequence_length", LENGTH, "--communicator_gb", 0,
        "--device_tflops", found_rates["TFLOP/s"], "--memory_bandwidth", found_rates["GB/s of memory"],
        "--bandwidth", 1e-9 / per_byte, "--per_device_train_batch_size", BATCH[name],
        "--pipeline_parallel_size", num_stages,
        *(["--pipeline_parallel_num_microbatches", 4] if num_stages > 1 else []),
    )  # fmt: skip
    planned = [rank["total"] for rank in plans[0]["chosen"]["memory"]]
    # Every replica has the memory of the one rank of its pipeline.
    planned = planned * (2 // len(planned))
    return {
        "seconds of a step, --plan_only": beside([each["chosen"]["step_seconds"] for each in plans], steps),
        "seconds of a step, from the config": beside([from_config["chosen"]["step_seconds"]], steps),
        "bytes of each rank, --plan_only": [beside([a], [b]) for a, b in zip(planned, used, strict=True)],
        "bytes of each rank, from the config": [
            beside([rank["total"]], [b])
            for rank, b in zip(from_config["chosen"]["memory"] * (3 - num_stages), used, strict=True)
        ],
    }


def paper() -> dict[str, Any]:
    """Plans of the settings of Table 1, two nodes of eight devices, beside the paper's times."""
    return {name: paper_setting(name) for name in PAPER}


def paper_setting(name: str) -> dict[str, Any]:
    setting, plans = PAPER[name], {}
    for rule in ("throughput", "memory"):
        plans[rule] = plan_of(
            PAPERS_MODELS[setting["model"]], "--processes", 16, "--processes_per_node", 8, "--device_memory", 16,
            "--device_tflops", REACHED * PEAK, "--bandwidth", 5, "--memory_bandwidth", 448, "--samples",
            setting["samples"], "--num_train_epochs", setting["epochs"], "--sequence_length", 384,
            "--per_device_train_batch_size", setting["per pipeline"] // 8, "--pipeline_parallel_size", 8,
            "--pipeline_schedule", "gpipe", "--pipeline_compression", rule, "--freeze_policy", "schedule",
            "--freeze_interval", "epoch", "--freeze_warmup", 0, "--activation_cache_max_gb", 500,
        )  # fmt: skip
    plan, (full, frozen) = plans["throughput"], setting["hours"]
    hours = {rule: each["duration"]["seconds"] / 3600 for rule, each in plans.items()}
    whole = plan["duration"]["full_seconds"] / 3600
    return {
        "paper's hours": {"baseline": full, "PipeTransformer": frozen},
        "predicted hours": {"nothing frozen": round(whole, 3), **{k: round(v, 3) for k, v in hours.items()}},
        "paper's speedup": PAPERS_SPEEDUP[name],
        "predicted speedup": {rule: round(whole / each, 2) for rule, each in hours.items()},
        "frozen": [[span["num_steps"], span["num_frozen"]] for span in plan["course"]["freezing"]["spans"]],
        "cache": {key: plan["caching"][key] for key in ("needed_bytes", "share", "is_used", "reason")},
        "fullest rank, GB": round(plan["chosen"]["fullest"] / 1e9, 2),
        "verdicts": plan["verdicts"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required="--worker" not in sys.argv)
    parser.add_argument("--only", choices=("models", "paper"))
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        what, name, folder, num_stages = options.worker
        worker(what, name, Path(folder), int(num_stages))
        return
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.only != "models":
        results["paper, Table 1"] = paper()
    if options.only != "paper":
        found_rates = rates()
        for name in options.models:
            for num_stages in (1, 2):
                key = f"{name}, K={num_stages}"
                results[key] = {**measure(name, num_stages, options.rounds, found_rates), "rates": found_rates}
                results[key]["load average"] = list(os.getloadavg())
                print(key, json.dumps(results[key], indent=1), flush=True)
                options.output.write_text(json.dumps(results, indent=1) + "\n")
    results["machine"] = {**machine(2), "rounds": options.rounds}
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
