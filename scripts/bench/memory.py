"""Host memory of every rank beyond the training state of its stage: by phase of a run.

A Llama with random bfloat16 weights is loaded from its file and trained on K processes: two steps of a few tokens,
each with an evaluation and a checkpoint. A phase's figure is the peak of anonymous memory, minus what was there
before the model was loaded, minus the stage's own weights (unless they are still the file's pages), gradients and
optimizer state, in multiples of the bfloat16 model. A tiny model goes through the same run first, so that what
libraries allocate once is in neither.
"""

from __future__ import annotations

import gc
import json
import subprocess
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    TrainerCallback,
)

from hf_pipetransformer import FreezePolicy, PipeTransformerTrainer

from .measure import REPOSITORY, RETURNS_FREED, PeakMemory, Settings, experiment, launch_all, report
from .training import make_trainer


NUM_WORDS = 32_000
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
TRAINING, EVALUATION, SAVING, END = "training", "evaluation", "saving", "end of train()"
PHASES = (LOADED, CHECKS, DISTRIBUTED, TRAINING, EVALUATION, SAVING, END)
BASES = PLAIN, QUANTIZED, SAVED = ("bfloat16", "4 bits", "4 bits, saved")
"""Bases of adapters: as they are; quantized by every rank while it loads them; quantized once, and saved."""


# ---- the state of a stage


class StageState:
    """Anonymous bytes of the weights, gradients and optimizer state of this rank's stage."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.names: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Take the parameters that the rank holds now for those of its stage."""
        self.names = frozenset(name for name, p in self.trainer.model.named_parameters() if not p.is_meta)

    def bytes(self) -> int:
        """Count them."""
        if not self.names:
            return 0
        named = self.trainer.model.named_parameters()
        own = [p for name, p in named if name in self.names and not p.is_meta]
        states = [] if self.trainer.optimizer is None else list(self.trainer.optimizer.state.values())
        tensors = [p.grad for p in own if p.grad is not None]
        tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return _anonymous_weights(own) + sum(tensor.nbytes for tensor in tensors)


def _anonymous_weights(weights: list[nn.Parameter]) -> int:
    """Bytes of weights, of those in a mapped file the part of it that this process has written to."""
    found, rest = 0, {weight.data_ptr(): weight.nbytes for weight in weights}
    for each in psutil.Process().memory_maps(grouped=False):
        if each.path.endswith(".safetensors"):
            first, last = (int(end, 16) for end in each.addr.split("-"))
            found += min(each.anonymous, sum(rest.pop(place) for place in list(rest) if first <= place < last))
    return found + sum(rest.values())


# ---- the phases of a run


class Marks(TrainerCallback):
    """Begin phases at Trainer's events."""

    def __init__(self) -> None:
        self.state = StageState()
        self.memory = PeakMemory(LOADED, self.state.bytes)
        self.started = time.perf_counter()
        self.seconds_to_first_step = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.seconds_to_first_step:
            self.seconds_to_first_step = time.perf_counter() - self.started
            self.state.begin()
        self.memory.begin(TRAINING)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.memory.begin(TRAINING)

    on_pre_optimizer_step = on_save = on_optimizer_step

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.memory.begin(SAVING)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.memory.begin(END)


class NoFreezing(FreezePolicy):
    """Freezes nothing; it is asked whether it unfreezes when the model has been checked and the layout chosen."""

    freezes = False

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    @property
    def may_unfreeze(self) -> bool:  # type: ignore[override]
        if not self._marks.seconds_to_first_step:
            self._marks.memory.begin(DISTRIBUTED)
        return False

    def target_num_frozen(self, signal: Any) -> float:
        return 0.0


class Measured(PipeTransformerTrainer):
    """Begins the phases that have no event."""

    memory: PeakMemory

    def set_initial_training_values(self, *args: Any) -> Any:
        self.memory.begin(CHECKS)
        return super().set_initial_training_values(*args)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.memory.begin(EVALUATION)
        return super().evaluate(*args, **kwargs)


def load(folder: Path, base: str) -> Any:
    """Load the model in bfloat16, or as a base of adapters."""
    if base == SAVED:
        folder = folder.with_name(f"{folder.name}-{SAVED}")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": four_bits} if base == QUANTIZED else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def save_model(name: str, folder: Path, base: str = "") -> None:
    """Write random weights to the file that all ranks map, and the same in 4 bits if these are saved."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=NUM_WORDS, **MODELS[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
    if base == SAVED:
        load(folder / name, QUANTIZED).save_pretrained(folder / f"{name}-{SAVED}")


def run(folder: Path, num_stages: int, base: str) -> Marks:
    """Train once, from the loading of the model to the end of `train()`."""
    rows = [{"input_ids": words, "labels": words} for words in torch.arange(32 * 16).view(32, -1)]
    gc.collect()
    marks = Marks()
    model = load(folder, base)
    if base:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    given = {
        "model": model, "train_dataset": rows, "eval_dataset": rows[: 2 * num_stages], "callbacks": [marks],
        "policy": NoFreezing(marks),
    }  # fmt: skip
    trainer = make_trainer(
        given, 2 * num_stages, Measured, max_steps=2, pipeline_parallel_size=num_stages, bf16=True,
        pipeline_parallel_num_microbatches=2, activation_cache="off", save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, pipeline_gradient_dtype="weights",
    )  # fmt: skip
    trainer.memory, marks.state.trainer, marks.started = marks.memory, trainer, time.perf_counter()
    trainer.train()
    marks.memory.end()
    return marks


def phases(model: str, folder: str, num_stages: int, base: str) -> tuple[dict[str, int], float]:
    """One rank's bytes by phase, and seconds to the first step: a tiny model's run, then the one that counts."""
    for name in ("tiny", model):
        marks = run(Path(folder, name), num_stages, base)
    return marks.memory.peaks, marks.seconds_to_first_step


def measure(model: str, num_stages: int, base: str = "") -> dict[str, Any]:
    """One model and number of stages; of adapters on it with a base."""
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for each in ("tiny", model):
            save_model(each, Path(folder), base)
        gc.collect()
        ranks = launch_all(phases, num_stages, model, folder, num_stages, base, environment=RETURNS_FREED)
        size = sum(file.stat().st_size for file in Path(folder, model).glob("*.safetensors"))
    return {
        "most on a rank": {phase: round(max(peaks[phase] for peaks, _ in ranks) / size, 3) for phase in PHASES},
        "seconds to the first step": round(max(seconds for _, seconds in ranks), 1),
        "revision": subprocess.getoutput(f"git -C {REPOSITORY} rev-parse --short HEAD"),
    }  # fmt: skip


def panels(settings: Settings, model: str, stages: tuple[int, ...], sides: dict[str, str]) -> dict[str, Any]:
    """Measure every side with every number of stages; other panels and sides of the file stay."""
    results = json.loads((REPOSITORY / "benchmarks" / "memory.json").read_text())
    results.pop("machine", None)
    for num_stages, (side, base) in product(settings.of(stages, stages[-1:]), sides.items()):
        name = f"{model},{' LoRA,' if base else ''} K={num_stages}"
        results.setdefault(name, {})[side] = measure(settings.of(model, "tiny"), num_stages, base)
        report(f"{name}, {side}", results[name][side])
    return results


@experiment("memory.json", minutes=5, quick_minutes=1, processes=4)
def memory(settings: Settings) -> dict[str, Any]:
    """Host memory by phase of a Llama of 134 M parameters, K=2 and 4."""
    return panels(settings, "120M", (4, 2), {"new": ""})


@experiment("memory.json", minutes=6, quick_minutes=1, processes=4)
def memory_large(settings: Settings) -> dict[str, Any]:
    """The same of a Llama of 1 B parameters: 25 GB of disk."""
    return panels(settings, "1B", (4, 2), {"new": ""})


@experiment("memory.json", minutes=20, quick_minutes=2)
def memory_adapters(settings: Settings) -> dict[str, Any]:
    """The same of adapters of rank 16 over bases in bfloat16 and in 4 bits, K=1 and 2."""
    return panels(settings, "120M", (1, 2), {base: base for base in BASES})
