"""Host memory of a training step by micro-batches in flight, and of an evaluation by micro-batches and samples.

    python scripts/benchmark_batch_memory.py --output benchmarks/batch_memory.json
    python scripts/benchmark_batch_memory.py --output benchmarks/batch_memory.json --side old --checkout ../before

Llamas with 32,000 words and random weights, two processes of this machine, one stage each. What is read is anonymous
memory, the most of the two ranks where not said otherwise:

- `bfloat16 copies`: the Llama of 120 M parameters under bf16 autocast with GPipe, all of whose micro-batches (of 8
  tokens) are in flight before the first backward. Growth from the first matrix product of the second step to the last
  one before a backward, in multiples of one bfloat16 copy of the weights of the stage's matrix products.
- `evaluation, losses only` and `with metrics`: the most that an evaluation adds, in MiB, of a tiny Llama whose
  micro-batches of 2 x 128 tokens have float32 logits of 31 MiB; without `compute_metrics` by micro-batches of the
  one batch, and with it by samples, rank by rank, four samples a batch. A small evaluation comes first.

Results of other sides stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from benchmark_memory import LIBC, MALLOC, MODELS, REPOSITORY, Memory, anonymous_bytes
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


NUM_STAGES, NUM_WORDS, MEBIBYTE = 2, 32_000, 2**20
IN_FLIGHT, MICRO_BATCHES, SAMPLES = (1, 2, 4), (1, 4, 16), (8, 16, 32)
STEP_TOKENS, EVALUATION_TOKENS = 8, 128
COPIES, LOSSES, METRICS = "bfloat16 copies in flight", "evaluation, losses only, MiB", "evaluation with metrics, MiB"


def rows(num_samples: int, num_tokens: int) -> list[dict[str, torch.Tensor]]:
    words = torch.arange(num_samples * num_tokens).view(num_samples, num_tokens) % NUM_WORDS
    return [{"input_ids": row, "labels": row} for row in words]


def trainer_of(model: str, folder: str, num_microbatches: int, **given: Any) -> PipeTransformerTrainer:
    torch.manual_seed(0)
    args = PipeTransformerArguments(
        output_dir=folder, pipeline_parallel_size=NUM_STAGES, pipeline_schedule="gpipe", activation_cache="off",
        pipeline_parallel_num_microbatches=num_microbatches, use_cpu=True, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, logging_strategy="no", save_strategy="no", **given.pop("options"),
    )  # fmt: skip
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, **MODELS[model]))
    trainer = PipeTransformerTrainer(llama, args, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Products(TrainerCallback):
    """Memory at the matrix products of the second step, of which GPipe runs all forwards before the first backward."""

    def __init__(self) -> None:
        self.first = self.most = 0
        self.layers: list[nn.Linear] = []
        self._is_on = False
        self._forward = nn.Linear.forward
        nn.Linear.forward = lambda layer, hidden: self._read(layer, hidden)  # type: ignore[method-assign]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        LIBC.malloc_trim(0)
        self._is_on = state.global_step == 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_on = False

    def copies(self) -> float:
        nn.Linear.forward = self._forward  # type: ignore[method-assign]
        return (self.most - self.first) / (2 * sum(layer.weight.numel() for layer in set(self.layers)))

    def _read(self, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        if self._is_on and not self.first:
            self.first = anonymous_bytes()
        product = self._forward(layer, hidden)
        if self._is_on:
            self.layers.append(layer)
            self.most = max(self.most, anonymous_bytes())
        return product


def copies_in_flight(num_microbatches: int, folder: str) -> float:
    products = Products()
    # A batch has at least one sample of each process, and all micro-batches have the same number of tokens.
    num_samples = max(num_microbatches, NUM_STAGES)
    options = {"max_steps": 2, "bf16": True, "per_device_train_batch_size": num_samples // NUM_STAGES}
    data = rows(64, STEP_TOKENS * num_microbatches // num_samples)
    trainer = trainer_of("120M", folder, num_microbatches, options=options, train_dataset=data, callbacks=[products])
    trainer.train()
    return round(products.copies(), 3)


def added_by_evaluation(num_samples: int, num_microbatches: int, folder: str, metrics: Any) -> int:
    """MiB at the most of a second evaluation beyond what there was before it."""
    options = {"per_device_eval_batch_size": num_microbatches}  # Two processes: two samples in a micro-batch.
    data = rows(num_samples, EVALUATION_TOKENS)
    trainer = trainer_of("tiny", folder, num_microbatches, options=options, compute_metrics=metrics)
    trainer.evaluate(data[:2])
    state: Any = SimpleNamespace(bytes=lambda: 0)
    memory = Memory(state)
    trainer.evaluate(data)
    memory.end()
    return round(memory.peaks["loaded"] / MEBIBYTE)


def worker(name: str, number: int, folder: Path) -> None:
    """One rank: the figure goes to a file."""
    torch.set_num_threads(1)
    if name == COPIES:
        found: float = copies_in_flight(number, str(folder))
    elif name == LOSSES:
        found = added_by_evaluation(2 * number, number, str(folder), None)
    else:
        found = added_by_evaluation(number, 2, str(folder), lambda given: {"rows": len(given.label_ids)})
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(name: str, number: int, checkout: Path) -> Any:
    """One launch; of an evaluation with metrics the figures of both ranks."""
    with tempfile.TemporaryDirectory(prefix="benchmark-batch-memory-") as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(NUM_STAGES),
            str(Path(__file__).resolve()), "--worker", name, str(number), folder,
        ]  # fmt: skip
        environment = {"PYTHONPATH": str(checkout.resolve()), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env={**os.environ, **MALLOC, **environment}, check=True)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_STAGES)]
    return ranks if name == METRICS else max(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; what it has of other sides is kept")
    parser.add_argument("--side", default="new", help="name of the measured package in the file")
    parser.add_argument("--checkout", type=Path, default=REPOSITORY, help="folder with the measured package")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), Path(options.worker[2]))
        return
    # The workers find the package of another checkout, which need not have what this imports.
    from benchmark_pipeline import machine

    revision = ["git", "-C", str(options.checkout), "rev-parse", "--short", "HEAD"]
    asked = {COPIES: IN_FLIGHT, LOSSES: MICRO_BATCHES, METRICS: SAMPLES}
    found: dict[str, Any] = {
        name: {str(number): measure(name, number, options.checkout) for number in numbers}
        for name, numbers in asked.items()
    }
    found["revision"] = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()
    found["machine"] = {**machine(NUM_STAGES), "malloc": MALLOC}
    print(json.dumps({options.side: found}, indent=1), flush=True)
    path = options.output
    if path is not None:
        results = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**results, options.side: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
