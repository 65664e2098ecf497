"""Host memory of every rank beyond the training state of its stage: by phase of a run.

A Llama with random bfloat16 weights is loaded from its file and trained on K processes (two steps of a few tokens,
each with an evaluation and a checkpoint, the best model loaded at the end), then a second launch resumes from the
first checkpoint. A phase's figure is the peak of anonymous memory, minus what was there before the model was loaded,
minus the stage's own weights (unless they are still the file's pages), gradients and optimizer state, in multiples of
the bfloat16 model. A tiny model goes through the same run first, so that what libraries allocate once is in neither.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
)

from hf_pipetransformer import FreezePolicy, PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.charts import Row, Spec, save_chart

from .measure import (
    REPOSITORY,
    RETURNS_FREED,
    PeakMemory,
    Settings,
    experiment,
    launch_all,
    machine,
    report,
)
from .models import training_options


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
TRAINING, EVALUATION, SAVING = "training", "evaluation", "saving"
END, BEST, RESUME = "end of train()", "best model loaded", "resume"
PHASES = (LOADED, CHECKS, DISTRIBUTED, TRAINING, EVALUATION, SAVING, END, BEST, RESUME)
BASES = PLAIN, QUANTIZED, SAVED = ("bfloat16", "4 bits", "4 bits, saved")
"""Bases of adapters: as they are; quantized by every rank while it loads them; quantized once, and saved."""


# ---- the state of a stage


def mapped_weights() -> list[tuple[int, int, int]]:
    """First and last address of each mapped safetensors file, and its bytes that this process has written to."""
    found: list[tuple[int, int, int]] = []
    is_weights = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_weights = words[-1].endswith(".safetensors")
            if is_weights:
                first, last = (int(part, 16) for part in words[0].split("-"))
                found.append((first, last, 0))
        elif is_weights and words[0] == "Anonymous:":
            found[-1] = (*found[-1][:2], 1024 * int(words[1]))
    return found


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
    files = mapped_weights()
    in_files, found = [0] * len(files), 0
    for weight in weights:
        address = weight.data_ptr()
        place = next((i for i, (first, last, _) in enumerate(files) if first <= address < last), None)
        if place is None:
            found += weight.nbytes
        else:
            in_files[place] += weight.nbytes
    return found + sum(min(own, written) for own, (_, _, written) in zip(in_files, files, strict=True))


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

    def _load_best_model(self) -> None:
        self.memory.begin(BEST)
        super()._load_best_model()
        self.memory.begin(END)


def load(folder: Path, base: str) -> Any:
    """Load the model in bfloat16, or as a base of adapters."""
    if base == SAVED:
        folder = folder.with_name(f"{folder.name}-{SAVED}")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": four_bits} if base == QUANTIZED else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def save_model(name: str, folder: Path, base: str = "") -> None:
    """Write random weights to the file that all ranks map, and the same in 4 bits if these are saved."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, **MODELS[name])).save_pretrained(folder / name)
    finally:
        torch.set_default_dtype(before)
    if base == SAVED:
        load(folder / name, QUANTIZED).save_pretrained(folder / f"{name}-{SAVED}")


def run(folder: Path, output: Path, num_stages: int, resumes: bool, base: str) -> Marks:
    """Train once, from the loading of the model to the end of `train()`."""
    args = PipeTransformerArguments(
        **training_options(
            output_dir=str(output), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2,
            pipeline_parallel_size=num_stages, bf16=True, pipeline_parallel_num_microbatches=2, save_steps=1,
            activation_cache="off", logging_steps=1, save_strategy="steps", eval_strategy="steps", eval_steps=1,
            logging_strategy="steps", load_best_model_at_end=True, pipeline_gradient_dtype="weights",
        )
    )  # fmt: skip
    rows = [{"input_ids": words, "labels": words} for words in torch.arange(32 * 16).view(32, -1)]
    gc.collect()
    marks = Marks()
    model = load(folder, base)
    if base:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Measured(
        model, args, train_dataset=rows, eval_dataset=rows[: 2 * num_stages], callbacks=[marks],
        policy=NoFreezing(marks),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.memory, marks.state.trainer = marks.memory, trainer
    marks.memory.begin(RESUME)
    marks.started = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-1") if resumes else None)
    marks.memory.end()
    return marks


def phases(model: str, folder: str, num_stages: int, resumes: bool, base: str) -> dict[str, Any]:
    """One rank: a tiny model's run, then the run that counts."""
    size = 0
    for name in ("tiny", model):
        # The checkpoint that the second launch resumes from is that of the first one.
        for is_resumed in (False, True) if name == "tiny" and resumes else (resumes,):
            marks = run(Path(folder, name), Path(folder, f"{name}-run"), num_stages, is_resumed, base)
        size = sum(file.stat().st_size for file in Path(folder, name).glob("*.safetensors"))
        gc.collect()
    peaks = marks.memory.peaks
    if resumes:
        # The weights are read before the model is checked, the optimizer state when it is on its stages.
        peaks = {RESUME: max(peaks[RESUME], peaks.get(DISTRIBUTED, 0))}
    else:
        del peaks[RESUME]
    return {
        "multiples": {phase: round(peaks[phase] / size, 3) for phase in PHASES if phase in peaks},
        "seconds": round(marks.seconds_to_first_step, 1),
    }


def measure(model: str, num_stages: int, base: str = "") -> dict[str, Any]:
    """Both launches of one model and number of stages; of adapters on it with a base."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for each in ("tiny", model):
            save_model(each, Path(folder), base)
        gc.collect()
        trained, resumed = (
            launch_all(phases, num_stages, model, folder, num_stages, resumes, base, environment=RETURNS_FREED)
            for resumes in (False, True)
        )
        size = sum(file.stat().st_size for file in Path(folder, model).glob("*.safetensors"))
    peaks = [one["multiples"] | two["multiples"] for one, two in zip(trained, resumed, strict=True)]
    return {
        "model, GiB": round(size / 2**30, 3),
        "most on a rank": {phase: max(peak[phase] for peak in peaks) for phase in PHASES if phase in peaks[0]},
        "ranks": peaks,
        "seconds to the first step": max(rank["seconds"] for rank in trained),
        "seconds of both launches": round(time.monotonic() - start, 1),
        "revision": revision(),
        "machine": {**machine(num_stages), "malloc": RETURNS_FREED},
    }


def panels(settings: Settings, model: str, stages: tuple[int, ...], sides: Mapping[str, str]) -> dict[str, Any]:
    """Measure every side with every number of stages; other panels and sides of the file stay, and are drawn too."""
    results = kept("memory.json")
    for num_stages, (side, base) in product(settings.of(stages, stages[-1:]), sides.items()):
        name = f"{model},{' LoRA,' if base else ''} K={num_stages}"
        results.setdefault(name, {})[side] = measure(settings.of(model, "tiny"), num_stages, base)
        if base:
            packages = {name: version(name) for name in ("bitsandbytes", "peft")}
            results[name][side]["machine"] |= packages
        report(f"{name}, {side}", results[name][side]["most on a rank"])
    if not settings.quick:
        write_picture({name: found for name, found in results.items() if "LoRA" not in name})
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
    assert settings.quick or shutil.disk_usage(tempfile.gettempdir()).free > 30e9, "needs 30 GB of disk"
    return panels(settings, "1B", (4, 2), {"new": ""})


@experiment("memory.json", minutes=28, quick_minutes=2)
def memory_adapters(settings: Settings) -> dict[str, Any]:
    """The same of adapters of rank 16 over bases in bfloat16 and in 4 bits, K=1 and 2."""
    return panels(settings, "120M", (1, 2), dict(zip(BASES, BASES, strict=True)))


def write_picture(results: dict[str, Any], path: Path = REPOSITORY / "docs" / "memory.svg") -> None:
    """Draw a group of bars for each phase, the most of all ranks, one panel for a model and number of stages."""
    sides = list(dict.fromkeys(side for found in results.values() for side in found))
    drawn = [_panel(name, found, sides) for name, found in results.items()]
    save_chart({"concat": drawn, "columns": 2, "bounds": "flush", "spacing": {"row": 110, "column": 50}}, path)


def _panel(name: str, found: dict[str, Any], sides: list[str]) -> Spec:
    rows: list[Row] = [
        {"side": side, "phase": phase, "value": max(0.0, value), "words": f"{value:.2f}"}
        for side in sides
        for phase, value in found.get(side, {}).get("most on a rank", {}).items()
    ]
    place: Spec = {
        "x": {
            "field": "phase", "type": "nominal", "sort": list(PHASES), "title": None, "axis": {"labelAngle": -30},
        },
        "xOffset": {"field": "side", "type": "nominal", "sort": sides, "scale": {"domain": sides}},
        "y": {"field": "value", "type": "quantitative", "title": None},
    }  # fmt: skip
    color = {
        "field": "side", "type": "nominal", "legend": {"title": None, "orient": "top"},
        "scale": {"domain": sides, "range": ["#d55e00", "#0072b2", "#009e73", "#cc79a7"]},
    }  # fmt: skip
    limit = {
        # Half of the model.
        "data": {"values": [{"limit": 0.5}]}, "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#222222"},
        "encoding": {"y": {"field": "limit", "type": "quantitative"}},
    }  # fmt: skip
    figures = {"mark": {"type": "text", "dy": -5, "fontSize": 9}, "encoding": {**place, "text": {"field": "words"}}}
    return {
        "title": {"text": f"{name}: most of all ranks, multiples of the bf16 model", "anchor": "start", "offset": 14},
        "width": 580, "height": 180, "data": {"values": rows},
        "layer": [{"mark": "bar", "encoding": {**place, "color": color}}, limit, figures],
    }  # fmt: skip
