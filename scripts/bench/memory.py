"""Host memory of the two ranks of a pipeline by phase of a run, weights and gradients included.

A Llama in bfloat16 is loaded from its file, and trained by SGD with gradients in the weights' precision. A phase's
figure is its peak of anonymous memory in multiples of the model, beyond what there was before the model was loaded. A
tiny model goes through the same run first, so that code which is imported when a run needs it, and what libraries
allocate once, are in neither. Cuts are fixed: those that a run chooses by the clock move figures from rank to rank.
Products of matrices are torch's, as oneDNN's copies of weights differ from processor to processor.
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from .measure import RETURNS_FREED, PeakMemory, Settings, experiment, launch_all
from .training import make_trainer


NUM_STAGES, NUM_LAYERS, NUM_WORDS = 2, 12, 4000
WIDTHS = {"tiny": 64, "model": 512}
LOADED, START, FIRST_STEP, STEPS, END, AFTER = (
    "loaded", "start of train()", "first step", "later steps", "end of train()", "after train()",
)  # fmt: skip
SECTION = "stages, SGD"
"""Of memory.json; the same of an older revision stands beside it."""


class Marks(TrainerCallback):
    """Begins phases at Trainer's events."""

    def __init__(self) -> None:
        self.memory = PeakMemory(LOADED)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.memory.begin(STEPS if state.global_step else FIRST_STEP)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.memory.begin(END)


def save_model(name: str, folder: Path) -> None:
    """Write random weights to the file that all ranks map."""
    width = WIDTHS[name]
    config = LlamaConfig(
        vocab_size=NUM_WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=width // 64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)


def train(folder: Path, plan: str) -> dict[str, int]:
    """Train once, from the loading of the model; bytes by phase."""
    rows = [{"input_ids": words, "labels": words} for words in torch.arange(16 * 8).view(16, -1)]
    gc.collect()
    marks = Marks()
    given = {"model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)}
    trainer = make_trainer(
        given | {"train_dataset": rows, "callbacks": [marks]}, 2 * NUM_STAGES, max_steps=3, optim="sgd", bf16=True,
        pipeline_parallel_size=NUM_STAGES, pipeline_parallel_num_microbatches=2, pipeline_gradient_dtype="weights",
        activation_cache="off", layout_plan=plan,
    )  # fmt: skip
    marks.memory.begin(START)
    trainer.train()
    marks.memory.begin(AFTER)
    marks.memory.end()
    return marks.memory.peaks


def train_both(folder: str, plan: str) -> dict[str, int]:
    """Train the tiny model, then the one whose figures count."""
    with torch.backends.mkldnn.flags(enabled=False):
        return [train(Path(folder, name), plan) for name in WIDTHS][-1]


def measure() -> list[dict[str, float]]:
    """Peaks of each rank by phase, in models."""
    num_blocks = 2 * NUM_LAYERS + 2
    layout = {
        "num_layers": NUM_LAYERS, "num_frozen_layers": 0, "num_stages": NUM_STAGES, "num_replicas": 1,
        "boundaries": [0, num_blocks // 2, num_blocks], "num_microbatches": 2, "schedule": "1f1b",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for name in WIDTHS:
            save_model(name, Path(folder))
        plan = Path(folder, "plan.jsonl")
        plan.write_text(json.dumps({"event": "run", "step": 0, "layout": layout}) + "\n")
        ranks = launch_all(train_both, NUM_STAGES, folder, str(plan), minutes=5, environment=RETURNS_FREED)
        size = sum(file.stat().st_size for file in Path(folder, "model").glob("*.safetensors"))
    return [{phase: round(peak / size, 3) for phase, peak in peaks.items()} for peaks in ranks]


@experiment("memory.json", section=SECTION, minutes=1, quick_minutes=1)
def memory(_settings: Settings) -> dict[str, Any]:
    """Host memory by phase of a Llama on two stages in bfloat16, by SGD."""
    return {"ranks": measure()}
