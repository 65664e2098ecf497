"""Host memory: beyond the training state of a stage by phase of a run, by micro-batches in flight, of evaluations.

A Llama with random bfloat16 weights is loaded from its file and trained on K processes: two steps of a few tokens,
each with an evaluation and a checkpoint, the best model loaded at the end. A phase's figure is the peak of anonymous
memory, minus what was there before the model was loaded, minus the stage's own weights (unless they are still the
file's pages), gradients and optimizer state, in multiples of the bfloat16 model. A tiny model goes through the same
run first, so that what libraries allocate once is in neither.

Under bf16 autocast with GPipe all micro-batches are in flight before the first backward: growth up to there is counted
in bfloat16 copies of the weights of the stage's matrix products. An evaluation of a tiny Llama has micro-batches of
2 x 128 tokens, whose float32 logits have 31 MiB; a small one comes first.
"""

from __future__ import annotations

import ctypes
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
    LlamaForCausalLM,
    TrainerCallback,
)

from hf_pipetransformer import FreezePolicy, PipeTransformerTrainer

from .measure import (
    REPOSITORY,
    RETURNS_FREED,
    PeakMemory,
    Settings,
    anonymous_bytes,
    experiment,
    launch_all,
    report,
)
from .training import Timed, make_trainer


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

    def num_wanted(self, signal: Any) -> float:
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
        eval_strategy="steps", eval_steps=1, logging_strategy="steps", logging_steps=1, load_best_model_at_end=True,
        pipeline_gradient_dtype="weights",
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
        "seconds to the first step": round(max(seconds for _, seconds in ranks), 1), "revision": revision(),
    }  # fmt: skip


def panels(settings: Settings, model: str, stages: tuple[int, ...], sides: dict[str, str]) -> dict[str, Any]:
    """Measure every side with every number of stages; other panels and sides of the file stay."""
    results = kept("memory.json")
    for num_stages, (side, base) in product(settings.of(stages, stages[-1:]), sides.items()):
        name = f"{model},{' LoRA,' if base else ''} K={num_stages}"
        results.setdefault(name, {})[side] = measure(settings.of(model, "tiny"), num_stages, base)
        report(f"{name}, {side}", results[name][side])
    return results


def revision() -> str:
    """Of this checkout."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def kept(file: str) -> dict[str, Any]:
    """Read a committed file, without its header."""
    found: dict[str, Any] = json.loads((REPOSITORY / "benchmarks" / file).read_text())
    return {key: value for key, value in found.items() if key != "machine"}


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


# ---- micro-batches and samples

ASKED = {
    "bfloat16 copies in flight": (1, 2, 4), "evaluation, losses only, MiB": (1, 4, 16),
    "evaluation with metrics, MiB": (8, 16, 32),
}  # fmt: skip
"""Numbers of micro-batches, with metrics of samples."""


def rows_of(num_samples: int, num_tokens: int) -> list[dict[str, torch.Tensor]]:
    """Samples of so many tokens."""
    words = torch.arange(num_samples * num_tokens).view(num_samples, num_tokens) % NUM_WORDS
    return [{"input_ids": row, "labels": row} for row in words]


def trainer_of(model: str, batch: int, num_microbatches: int, given: dict[str, Any], **options: Any) -> Any:
    """A trainer of two stages under GPipe."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, **MODELS[model]))
    return make_trainer(
        {"model": llama, **given}, batch, Timed, pipeline_parallel_size=2, pipeline_schedule="gpipe",
        activation_cache="off", pipeline_parallel_num_microbatches=num_microbatches, **options,
    )  # fmt: skip


class Products(TrainerCallback):
    """Memory at the matrix products of the second step, of which GPipe runs all forwards before the first backward."""

    def __init__(self) -> None:
        self.first = self.most = 0
        self.layers: set[nn.Linear] = set()
        self._is_on = False
        nn.modules.module.register_module_forward_pre_hook(self._before)
        nn.modules.module.register_module_forward_hook(self._after)

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self._is_on = state.global_step == 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._is_on = False

    def _before(self, layer: nn.Module, given: Any) -> None:
        if self._is_on and isinstance(layer, nn.Linear) and not self.first:
            self.first = anonymous_bytes()

    def _after(self, layer: nn.Module, given: Any, product: Any) -> None:
        if self._is_on and isinstance(layer, nn.Linear):
            self.layers.add(layer)
            self.most = max(self.most, anonymous_bytes())


def copies_in_flight(num_microbatches: int) -> float:
    """Growth up to the first backward with micro-batches of eight tokens, one rank's."""
    products = Products()
    # A batch has at least one sample of each process, and all micro-batches have the same number of tokens.
    batch = max(num_microbatches, 2)
    given = {"train_dataset": rows_of(64, 8 * num_microbatches // batch), "callbacks": [products]}
    trainer_of("120M", batch, num_microbatches, given, max_steps=2, bf16=True).train()
    copy = 2 * sum(layer.weight.numel() for layer in products.layers)
    return round((products.most - products.first) / copy, 3)


def added_by_evaluation(num_samples: int, num_microbatches: int, has_metrics: bool) -> int:
    """MiB at the most of a second evaluation beyond what there was before it, micro-batches of two samples."""
    metrics = (lambda given: {"rows": len(given.label_ids)}) if has_metrics else None
    data = rows_of(num_samples, 128)
    trainer = trainer_of("tiny", 2 * num_microbatches, num_microbatches, {"compute_metrics": metrics})
    trainer.evaluate(data[:2])
    memory = PeakMemory("evaluation")
    trainer.evaluate(data)
    memory.end()
    return round(memory.peaks["evaluation"] / 2**20)


@experiment("batch_memory.json", minutes=6, quick_minutes=2)
def batch_memory(settings: Settings) -> dict[str, Any]:
    """Host memory of a step by micro-batches in flight, and of an evaluation by micro-batches and samples, K=2."""
    found: dict[str, Any] = {name: {} for name in ASKED}
    for name, numbers in ASKED.items():
        for number in settings.of(numbers, numbers[-1:]):
            if name.startswith("bfloat16"):
                ranks = launch_all(copies_in_flight, 2, number, environment=RETURNS_FREED)
            else:
                sizes = (number, 2, True) if "metrics" in name else (2 * number, number, False)
                ranks = launch_all(added_by_evaluation, 2, *sizes, environment=RETURNS_FREED)
            found[name][str(number)] = ranks if "metrics" in name else max(ranks)
            report(name, found[name])
    return {**kept("batch_memory.json"), "new": {**found, "revision": revision()}}
