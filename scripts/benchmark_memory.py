"""Host memory of every rank, phase by phase: how much of it is more than the training state of the rank's stage.

    python scripts/benchmark_memory.py --output benchmarks/memory.json --side new
    python scripts/benchmark_memory.py --output benchmarks/memory.json --side old --checkout ../before
    python scripts/benchmark_memory.py --output benchmarks/memory.json --lora --stages 1 2

A Llama with random bfloat16 weights is loaded from its file and trained on K processes of this machine (two steps of a
few tokens, each with an evaluation and a checkpoint, the best model loaded at the end), then a second launch resumes
from the first checkpoint. A thread reads the anonymous memory of the process every few milliseconds; file pages, such
as mapped weights, do not count, since all processes share them. A phase's figure is the peak, minus what the process
had before it loaded the model, minus the stage's own weights (unless they are still the file's pages), gradients and
optimizer state, in multiples of the bfloat16 model. A tiny model goes through the same run first, so that what
libraries allocate once is in neither.

`--lora` trains adapters instead, over a base in bfloat16, one that every process quantizes to 4 bits while it loads
it, and one that was quantized once and saved so; these three take the place of sides.

`--checkout` measures the package of another checkout; only its public interface is used. Results of other sides,
models and numbers of stages stay in the file. `--picture` draws the sides of the file beside each other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import fields
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
)

from hf_pipetransformer import FreezePolicy, PipeTransformerArguments, PipeTransformerTrainer


REPOSITORY = Path(__file__).resolve().parents[1]
MODELS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4},
    "120M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1B": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Shapes of Llamas with 32,000 words and a head of its own weights; 1B is that of TinyLlama."""
LOADED, CHECKS, DISTRIBUTED = "loaded", "checks at the start", "weights distributed"
TRAINING, EVALUATION, SAVING = "training", "evaluation", "saving"
END, BEST, RESUME = "end of train()", "best model loaded", "resume"
PHASES = (LOADED, CHECKS, DISTRIBUTED, TRAINING, EVALUATION, SAVING, END, BEST, RESUME)
BASES = PLAIN, QUANTIZED, SAVED = ("bfloat16", "4 bits", "4 bits, saved")
"""Bases of adapters: as they are; quantized by every rank while it loads them; quantized once, and saved."""
NUM_STEPS, NUM_TOKENS, NUM_MICROBATCHES = 2, 16, 2
SECONDS_BETWEEN_READINGS = 0.004
# What is freed goes back to the system at once: the figures are of what is held, not of what malloc keeps.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
LIBC = ctypes.CDLL(None)


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def mapped_weights() -> list[tuple[int, int, int]]:
    """First and last address of each mapped safetensors file, and its bytes that this process has written to."""
    found: list[tuple[int, int, int]] = []
    is_weights = False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                is_weights = words[-1].endswith(".safetensors")
                if is_weights:
                    first, last = (int(part, 16) for part in words[0].split("-"))
                    found.append((first, last, 0))
            elif is_weights and words[0] == "Anonymous:":
                found[-1] = (*found[-1][:2], 1024 * int(words[1]))
    return found


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class StageState:
    """Anonymous bytes of the weights, gradients and optimizer state of this rank's stage."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.names: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Take the parameters that the rank holds now for those of its stage."""
        self.names = frozenset(name for name, p in self.trainer.model.named_parameters() if not p.is_meta)

    def bytes(self) -> int:
        if not self.names:
            return 0
        named = self.trainer.model.named_parameters()
        own = [p for name, p in named if name in self.names and not p.is_meta]
        tensors = [p.grad for p in own if p.grad is not None]
        states = [] if self.trainer.optimizer is None else list(self.trainer.optimizer.state.values())
        tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return _anonymous_weights(own) + sum(map(bytes_of, tensors))


def _anonymous_weights(weights: list[torch.nn.Parameter]) -> int:
    files = mapped_weights()
    in_files, found = [0] * len(files), 0
    for weight in weights:
        address = weight.data_ptr()
        place = next((i for i, (first, last, _) in enumerate(files) if first <= address < last), None)
        if place is None:
            found += bytes_of(weight)
        else:
            in_files[place] += bytes_of(weight)
    return found + sum(min(own, written) for own, (_, _, written) in zip(in_files, files, strict=True))


class Memory:
    """Peak of anonymous memory by phase, read by a thread of its own."""

    def __init__(self, state: StageState) -> None:
        self.peaks: dict[str, int] = {}
        """Bytes beyond what there was at first and beyond the stage's state, by phase."""
        self.started = time.perf_counter()
        self.seconds_to_first_step = 0.0
        self._state = state
        self._phase, self._peak, self._held = LOADED, 0, 0
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._start = self._trimmed()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, phase: str) -> None:
        """End one phase, begin another; a phase may come again."""
        held = self._state.bytes()
        with self._lock:
            self._read()
            # The state grows or shrinks between two calls, and the peak is where it is largest.
            more = self._peak - self._start - max(held, self._held)
            self.peaks[self._phase] = max(0, more, self.peaks.get(self._phase, 0))
            self._phase, self._peak, self._held = phase, self._trimmed(), held

    def end(self) -> None:
        self.begin("")
        self._is_over.set()
        self._thread.join()

    def _trimmed(self) -> int:
        LIBC.malloc_trim(0)
        return anonymous_bytes()

    def _read(self) -> None:
        self._peak = max(self._peak, anonymous_bytes())

    def _watch(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_READINGS):
            with self._lock:
                self._read()


class NoFreezing(FreezePolicy):
    """Freezes nothing; it is asked whether it unfreezes when the model has been checked and the layout chosen."""

    freezes = False

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    @property
    def may_unfreeze(self) -> bool:  # type: ignore[override]
        if not self._memory.seconds_to_first_step:
            self._memory.begin(DISTRIBUTED)
        return False

    def num_wanted(self, signal: Any) -> float:
        return 0.0


class Marks(TrainerCallback):
    """Begins phases at Trainer's events."""

    def __init__(self, memory: Memory, state: StageState) -> None:
        self.memory, self.state = memory, state

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.memory.seconds_to_first_step:
            self.memory.seconds_to_first_step = time.perf_counter() - self.memory.started
            self.state.begin()
        self.memory.begin(TRAINING)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin(TRAINING)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin(TRAINING)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin(SAVING)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin(TRAINING)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.memory.begin(END)


class Measured(PipeTransformerTrainer):
    """Begins the phases that have no event."""

    memory: Memory

    def set_initial_training_values(self, *args: Any) -> Any:
        self.memory.begin(CHECKS)
        return super().set_initial_training_values(*args)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.memory.begin(EVALUATION)
        return super().evaluate(*args, **kwargs)

    def _load_best_model(self) -> None:
        self.memory.begin(BEST)
        super()._load_best_model()
        self.memory.begin(END)


def load(folder: Path, base: str) -> Any:
    """The model in bfloat16, or as a base of adapters."""
    if base == SAVED:
        folder = folder.with_name(f"{folder.name}-{SAVED}")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": four_bits} if base == QUANTIZED else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def run(model_folder: Path, output: Path, num_stages: int, resumes: bool, base: str) -> Memory:
    """One training, from the loading of the model to the end of `train()`."""
    # Every side adds gradients in the weights' own precision; earlier revisions know no other.
    known = {field.name for field in fields(PipeTransformerArguments)}
    same = {"pipeline_gradient_dtype": "weights"} if "pipeline_gradient_dtype" in known else {}
    args = PipeTransformerArguments(
        output_dir=str(output), max_steps=NUM_STEPS, per_device_train_batch_size=NUM_MICROBATCHES,
        per_device_eval_batch_size=NUM_MICROBATCHES, pipeline_parallel_size=num_stages, bf16=True,
        pipeline_parallel_num_microbatches=NUM_MICROBATCHES, activation_cache="off", logging_steps=1, save_steps=1,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, **same,
    )  # fmt: skip
    rows = [{"input_ids": words, "labels": words} for words in torch.arange(32 * NUM_TOKENS).view(32, -1)]
    gc.collect()
    state = StageState()
    memory = Memory(state)
    model = load(model_folder, base)
    if base:
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Measured(
        model, args, train_dataset=rows, eval_dataset=rows[: num_stages * NUM_MICROBATCHES],
        callbacks=[Marks(memory, state)], policy=NoFreezing(memory),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.memory = memory
    state.trainer = trainer
    memory.begin(RESUME)
    memory.started = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-1") if resumes else None)
    memory.end()
    return memory


def worker(model: str, folder: Path, num_stages: int, resumes: bool, base: str) -> None:
    """One rank: a tiny model's run, then the run that counts; its figures go to a file."""
    torch.set_num_threads(1)
    sizes = {}
    for name in ("tiny", model):
        # The checkpoint that the second launch resumes from is that of the first one.
        for is_resumed in (False, True) if name == "tiny" and resumes else (resumes,):
            memory = run(folder / name, folder / f"{name}-run", num_stages, is_resumed, base)
        sizes[name] = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
        gc.collect()
    peaks = memory.peaks
    if resumes:
        # The weights are read before the model is checked, the optimizer state when it is on its stages.
        peaks = {RESUME: max(peaks[RESUME], peaks.get(DISTRIBUTED, 0))}
    else:
        del peaks[RESUME]
    found = {
        "multiples of the model": {phase: round(peaks[phase] / sizes[model], 3) for phase in PHASES if phase in peaks},
        "seconds to the first step": round(memory.seconds_to_first_step, 1),
    }
    name = f"{'resume' if resumes else 'train'}-{os.environ['RANK']}.json"
    (folder / name).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save_model(name: str, folder: Path, base: str = "") -> None:
    """Random weights, in the file that all ranks map, and the same in 4 bits if these are saved."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **MODELS[name])).save_pretrained(folder / name)
    finally:
        torch.set_default_dtype(before)
    if base == SAVED:
        load(folder / name, QUANTIZED).save_pretrained(folder / f"{name}-{SAVED}")


def measure(model: str, num_stages: int, checkout: Path, base: str = "") -> dict[str, Any]:
    """Both launches of one model and number of stages; of adapters on it with a base."""
    start = time.monotonic()
    ranks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-memory-") as name:
        folder = Path(name)
        for each in ("tiny", model):
            save_model(each, folder, base)
        gc.collect()
        for launch in ("train", "resume"):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_stages),
                str(Path(__file__).resolve()), "--worker", launch, str(folder), "--models", model,
                "--stages", str(num_stages), "--base", base,
            ]  # fmt: skip
            environment = {"PYTHONPATH": str(checkout.resolve()), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env={**os.environ, **MALLOC, **environment}, check=True)
            for rank in range(num_stages):
                found = json.loads((folder / f"{launch}-{rank}.json").read_text())
                if launch == "train":
                    ranks.append(found)
                else:
                    ranks[rank]["multiples of the model"] |= found["multiples of the model"]
        gibibytes = sum(file.stat().st_size for file in (folder / model).glob("*.safetensors")) / 2**30
    peaks = [rank["multiples of the model"] for rank in ranks]
    return {
        "model, GiB": round(gibibytes, 3),
        "most on a rank": {phase: max(peak[phase] for peak in peaks) for phase in PHASES if phase in peaks[0]},
        "ranks": peaks,
        "seconds to the first step": max(rank["seconds to the first step"] for rank in ranks),
        "seconds of both launches": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; what it has of other sides and models is kept")
    parser.add_argument("--side", default="new", help="name of the measured package in the file")
    parser.add_argument("--checkout", type=Path, default=REPOSITORY, help="folder with the measured package")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["120M"])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--picture", type=Path, help="SVG file, drawn from the output file")
    parser.add_argument("--lora", action="store_true", help="adapters over bases in bfloat16 and in 4 bits")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--base", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        launch, folder = options.worker
        worker(options.models[0], Path(folder), options.stages[0], launch == "resume", options.base)
        return
    # The workers find the package of another checkout, which need not have what these import.
    from benchmark_pipeline import machine
    from memory_picture import write_picture

    path = options.output
    results = json.loads(path.read_text()) if path is not None and path.exists() else {}
    revision = ["git", "-C", str(options.checkout), "rev-parse", "--short", "HEAD"]
    sides = dict(zip(BASES, BASES, strict=True)) if options.lora else {options.side: ""}
    for model, num_stages, side in product(options.models, options.stages, sides):
        found = measure(model, num_stages, options.checkout, sides[side])
        found["revision"] = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()
        found["machine"] = {**machine(num_stages), "malloc": MALLOC}
        if options.lora:
            found["machine"] |= {name: version(name) for name in ("bitsandbytes", "peft")}
        panel = f"{model},{' LoRA,' if options.lora else ''} K={num_stages}"
        results.setdefault(panel, {})[side] = found
        print(json.dumps({f"{panel}, {side}": found}, indent=1), flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    if options.picture is not None:
        write_picture({name: found for name, found in results.items() if "LoRA" not in name}, options.picture)


if __name__ == "__main__":
    main()
