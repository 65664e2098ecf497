"""Plans beside what is measured: a step's time and the memory of each rank.

Three models with random weights are trained on two processes, as two replicas (K=1) and as two stages (K=2). Each is
planned twice: by `--plan_only`, which measures the blocks at its start, and by `hf-pipetransformer plan` from its
config, with the rates of this machine: products and copies that are timed here, and the all-reduce that `--plan_only`
measured. Plans and runs take turns. Memory is the peak of a process's anonymous memory while it trains, beyond what it
had before the model was made and after a smaller one was trained.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
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

from .measure import RETURNS_FREED, PeakMemory, Settings, experiment, launch, launch_all, report
from .models import NO_DROPOUT, training_options


CONFIGS: dict[str, PreTrainedConfig] = {
    "MiniLM": BertConfig(
        architectures=["BertForSequenceClassification"], hidden_size=384, num_hidden_layers=6,
        num_attention_heads=12, intermediate_size=1536, **NO_DROPOUT,
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


class Watch(TrainerCallback):
    """Notes when steps end, and marks the training for the reading of memory."""

    def __init__(self, memory: PeakMemory | None = None) -> None:
        self.ends: list[float] = []
        self._memory = memory

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())
        if self._memory is not None and len(self.ends) >= 2:
            # The first step makes the optimizer's state.
            self._memory.begin("training")


# ---- in the processes of a launch


def rows_of(name: str, number: int) -> list[dict[str, torch.Tensor]]:
    """Random samples."""
    torch.manual_seed(0)
    if name == "ViT":
        return [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(i % 2)} for i in range(number)]
    words = torch.randint(5, 8000, (number, LENGTH))
    labels = words if name == "Llama" else torch.arange(number) % 2
    return [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]


def train(name: str, num_stages: int, watch: Watch, **options: Any) -> None:
    """Train once, or print the plan of it."""
    arguments = training_options(
        per_device_train_batch_size=BATCH[name], pipeline_parallel_size=num_stages, activation_cache="off",
        pipeline_parallel_num_microbatches="auto" if num_stages == 1 else 4, pipeline_gather_at_end="never",
        **{"max_steps": NUM_STEPS, **options},
    )  # fmt: skip
    rows = rows_of(name, BATCH[name] * int(os.environ["WORLD_SIZE"]) * (NUM_STEPS + 1))
    args = PipeTransformerArguments(**arguments)
    trainer = PipeTransformerTrainer(KINDS[name](CONFIGS[name]), args, train_dataset=rows, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def planned(name: str, num_stages: int) -> dict[str, Any]:
    """Return the plan of `--plan_only`, after which a run exits, on rank 0, which writes it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        train(name, num_stages, Watch(), plan_only=True)
    found: dict[str, Any] = json.loads(Path("output", "plan.json").read_text()) if os.environ["RANK"] == "0" else {}
    return found


def step_seconds(name: str, num_stages: int) -> float:
    """Time steps, the loader's part included."""
    watch = Watch()
    train(name, num_stages, watch)
    return statistics.median([after - before for before, after in pairwise(watch.ends)][SKIPPED:])


def bytes_used(name: str, num_stages: int) -> int:
    """Measure memory, of a process that has trained a smaller model before: libraries allocate some things once."""
    config = CONFIGS[name]
    num_layers, config.num_hidden_layers = config.num_hidden_layers, max(2, num_stages)
    train(name, num_stages, Watch(), max_steps=2)
    config.num_hidden_layers = num_layers
    gc.collect()
    memory = PeakMemory("made")
    train(name, num_stages, Watch(memory), max_steps=MEMORY_STEPS)
    memory.end()
    return memory.peaks["training"]


# ---- in the driver


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


def measured(name: str, num_stages: int, rounds: int, found_rates: dict[str, float]) -> dict[str, Any]:
    """Plans and runs of a model by turns, then a run whose memory is watched."""
    plans, steps = [], []
    for _ in range(rounds):
        plans.append(launch(planned, 2, name, num_stages))
        steps.append(max(launch_all(step_seconds, 2, name, num_stages)))
    used = launch_all(bytes_used, 2, name, num_stages, environment=RETURNS_FREED)
    per_byte = statistics.median(each["overheads"]["reduction_per_byte"] for each in plans)
    from_config = plan_of(
        CONFIGS[name], "--processes", 2, "--device_memory", 8, "--sequence_length", LENGTH, "--communicator_gb", 0,
        "--device_tflops", found_rates["TFLOP/s"], "--memory_bandwidth", found_rates["GB/s of memory"],
        "--bandwidth", 1e-9 / per_byte, "--per_device_train_batch_size", BATCH[name],
        "--pipeline_parallel_size", num_stages,
        *(["--pipeline_parallel_num_microbatches", 4] if num_stages > 1 else []),
    )  # fmt: skip
    found: dict[str, Any] = {"rates": found_rates, "load average": list(os.getloadavg())}
    for way, chosen in (
        ("--plan_only", [each["chosen"] for each in plans]),
        ("from the config", [from_config["chosen"]]),
    ):
        found[f"seconds of a step, {way}"] = beside([each["step_seconds"] for each in chosen], steps)
        # Every replica has the memory of the one rank of its pipeline.
        totals = [rank["total"] for rank in chosen[0]["memory"]] * (3 - num_stages)
        found[f"bytes of each rank, {way}"] = [beside([a], [b]) for a, b in zip(totals, used, strict=True)]
    return found


@experiment("plan.json", minutes=25, quick_minutes=4)
def plan(settings: Settings) -> dict[str, Any]:
    """Plans beside measured steps and memory of three models at K=1 and 2."""
    results: dict[str, Any] = {}
    found_rates = launch(rates, 1)
    for name in settings.of(list(CONFIGS), ["ViT"]):
        for num_stages in (1, 2):
            key = f"{name}, K={num_stages}"
            results[key] = measured(name, num_stages, settings.of(3, 1), found_rates)
            report(key, results[key])
    return results
