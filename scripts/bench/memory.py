"""Host memory of the two ranks of a pipeline by phase of a run, weights and gradients included.

A Llama in bfloat16 is loaded from its file, and trained by SGD with gradients in the weights' precision. A phase's
figure is its peak of anonymous memory in multiples of the model, beyond what there was before the model was loaded. A
tiny model goes through the same run first, so that code which is imported when a run needs it, and what libraries
allocate once, are in neither. Cuts are fixed: those that a run chooses by the clock move figures from rank to rank.
Products of matrices are torch's, as oneDNN's copies of weights differ from processor to processor.

Models with images stand beside what is planned for them: by `hf-pipetransformer plan` from the config, and by the
start of the run, as `--plan_only` prints it. Figures are bytes beyond what there was before the model was made, of the
first epoch, in which a frozen tower is computed and stored, and of the second one, which reads it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, set_seed

from hf_pipetransformer.cli import main as command

from .computed_once import captions, smolvlm
from .measure import RETURNS_FREED, PeakMemory, Settings, experiment, launch_all, report, summary
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


# ---- images beside text, and their plan ----

WITH_IMAGES = "stages, images beside text"
"""Section of memory.json."""
NUM_LAYERS_BEHIND_TOWER = 9
"""With the head as much for either stage as there is: no other cut is nearly as good."""
SAMPLES, BATCH, STEPS_OF_EPOCH, NUM_EPOCHS = 8, 4, 2, 2
FIRST_EPOCH, LATER_EPOCHS, KEPT = "first epoch", "later epochs", "kept"
OPTIONS: dict[str, Any] = {
    "pipeline_parallel_size": NUM_STAGES, "pipeline_parallel_num_microbatches": 2, "num_train_epochs": NUM_EPOCHS,
    "activation_cache": "on",
    # Operations are counted to place stages: measured times may place those of a run elsewhere than those of its plan.
    "full_determinism": True,
}  # fmt: skip


class Epochs(TrainerCallback):
    """Begins phases: the first epoch from its second step on, later ones, and what is kept after the last step."""

    def __init__(self) -> None:
        self.memory = PeakMemory(START)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        phases = {0: FIRST_STEP, 1: FIRST_EPOCH, STEPS_OF_EPOCH: LATER_EPOCHS}
        if state.global_step in phases:
            self.memory.begin(phases[state.global_step])

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            self.memory.begin(KEPT)


def train_images(is_frozen: bool, narrower: int = 1) -> dict[str, Any]:
    """Train once; bytes by phase, where the stages are, and what the start plans for each rank."""
    set_seed(0)
    rows = captions(SAMPLES)
    gc.collect()
    marks = Epochs()
    model = smolvlm(NUM_LAYERS_BEHIND_TOWER, narrower)
    if is_frozen:
        model.model.vision_model.requires_grad_(False)
        model.model.connector.requires_grad_(False)
    trainer = make_trainer(
        {"model": model, "train_dataset": rows, "callbacks": [marks]}, BATCH, remove_unused_columns=False,
        pipeline_gather_at_end="never", **OPTIONS,
    )  # fmt: skip
    del model
    trainer.train()
    marks.memory.end()
    planned = trainer.pipeline_run.in_force.start_up.plans.inputs(trainer.layout).memory(trainer.layout)
    return {
        "peaks": marks.memory.peaks,
        "boundaries": list(trainer.layout.boundaries),
        "planned": [asdict(rank) | {"total": rank.total} for rank in planned],
    }


def train_images_often(is_frozen: bool, rounds: int) -> list[dict[str, Any]]:
    """Train a narrow model first, whose figures do not count."""
    with torch.backends.mkldnn.flags(enabled=False):
        train_images(is_frozen, narrower=4)
        return [train_images(is_frozen) for _ in range(rounds)]


def planned_from_config(is_frozen: bool) -> Any:
    """The chosen row of the command."""
    model = smolvlm(NUM_LAYERS_BEHIND_TOWER)
    model.config.architectures = [type(model).__name__]
    options = {
        "processes": NUM_STAGES, "device_memory": 8, "sequence_length": 64, "images": 1, "communicator_gb": 0,
        "per_device_train_batch_size": BATCH // NUM_STAGES, **OPTIONS,
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        model.config.save_pretrained(folder)
        command(["plan", folder, *words, *(["--frozen_tower"] if is_frozen else []), "--json"])
    return json.loads(printed.getvalue())["chosen"]


def beside(planned: Mapping[str, float], peaks: list[dict[str, int]]) -> dict[str, Any]:
    """What a rank was measured to take, over what is planned: at the most, and after the last step."""
    most = [max(each[FIRST_EPOCH], each[LATER_EPOCHS]) for each in peaks]
    kept = sum(planned[part] for part in ("weights", "optimizer", "copies"))
    return {
        "planned": planned,
        "peak over planned": summary([each / planned["total"] for each in most], 3),
        "kept over planned": summary([each[KEPT] / kept for each in peaks], 3),
    }


@experiment("memory.json", section=WITH_IMAGES, minutes=3, quick_minutes=2)
def memory_with_images(settings: Settings) -> dict[str, Any]:
    """Memory of two stages of a model with images, its tower frozen and stored, or trained, beside its plan."""
    found: dict[str, Any] = {}
    for name, is_frozen in (("frozen", True), ("trained", False)):
        ranks = launch_all(train_images_often, NUM_STAGES, is_frozen, settings.of(3, 1), environment=RETURNS_FREED)
        of_config, of_start = planned_from_config(is_frozen), ranks[0][0]
        found[name] = {
            "boundaries": {"run": of_start["boundaries"], "from the config": of_config["layout"]["boundaries"]},
            "ranks": [
                {
                    "measured": (peaks := [each["peaks"] for each in ranks[rank]]),
                    "at the start": beside(of_start["planned"][rank], peaks),
                    "from the config": beside(of_config["memory"][rank], peaks),
                }
                for rank in range(NUM_STAGES)
            ],
        }
        report(name, found[name])
    return found
