"""On one GPU: a step's time and memory beside plain `Trainer` and beside plans, and the memory of two stages.

    python -m scripts.bench 'gpu-*'

Four models with random weights are trained in bf16 by `Trainer`, by ours in one process, and by ours with half of the
layers frozen, computed again or read from the store. Contenders take turns in one process. A step is an epoch over
its steps, from one synchronization with the GPU to the next; the first epoch, which loads kernels and fills the
store, is left out. Memory is the peak of the allocator after the first step. Two stages share the GPU and exchange
activations through host memory: their memory is that of two GPUs, their time is not.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cli.main import main as command

from .measure import Settings, alternate, experiment, launch_all, ratios, report, seconds_of, summary
from .models import NO_DROPOUT, Tensors, rows_of
from .training import make_trainer, without_launch_variables


NUM_EPOCHS = 4
HALF = {"freeze_policy": "fixed", "freeze_at": "0:1/2"}
CONTENDERS: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "ours": {"freeze_policy": "none", "activation_cache": "off"},
    "half frozen": {**HALF, "activation_cache": "off"},
    "half frozen, stored": {**HALF, "activation_cache": "on"},
}


def sentences(num_tokens: int, num_samples: int) -> Tensors:
    """Words without padding, of two classes."""
    words = torch.randint(5, 30522, (num_samples, num_tokens))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.randint(2, (num_samples,))}


def images(num_samples: int) -> Tensors:
    """Pixels of ten classes."""
    return {"pixel_values": torch.randn(num_samples, 3, 224, 224), "labels": torch.randint(10, (num_samples,))}


def blocks(num_samples: int) -> Tensors:
    """Blocks of 512 tokens."""
    words = torch.randint(5, 32000, (num_samples, 512))
    return {"input_ids": words, "labels": words}


class Subject(NamedTuple):
    """A model's class and configuration, its inputs, batch and steps of an epoch, and the tokens of a sample."""

    kind: Any
    config: Any
    inputs: Callable[[int], Tensors]
    batch: int
    num_steps: int
    num_tokens: int

    def task(self) -> dict[str, Any]:
        """What a trainer is given: a model on the CPU, and random samples."""
        transformers.set_seed(0)
        key = self.config.to_json_string()
        if key not in _models:
            with torch.device(device()):  # A CPU takes long to draw weights.
                _models[key] = self.kind(self.config).cpu()
        return {
            "model": deepcopy(_models[key]),
            "train_dataset": rows_of(self.inputs(self.batch * self.num_steps)),
        }


_models: dict[str, Any] = {}


BERT, VIT, LLAMA = (
    transformers.BertForSequenceClassification, transformers.ViTForImageClassification, transformers.LlamaForCausalLM,
)  # fmt: skip
MINILM = transformers.BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536, **NO_DROPOUT)
TINY_LLAMA = transformers.LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=32,
)  # fmt: skip
SUBJECTS = {
    "minilm": Subject(BERT, MINILM, partial(sentences, 64), 32, 16, 64),
    "bert": Subject(BERT, transformers.BertConfig(**NO_DROPOUT), partial(sentences, 128), 32, 12, 128),
    "vit": Subject(VIT, transformers.ViTConfig(num_labels=10, **NO_DROPOUT), images, 32, 8, 197),
    "llama": Subject(LLAMA, TINY_LLAMA, blocks, 8, 5, 512),
}


def device() -> str:
    """The GPU, or the CPU of a quick look without one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Watch(TrainerCallback):
    """Seconds of each epoch and of what comes before the first step; the allocator's peak after the first step."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.created = self.begun = time.perf_counter()
        self.before = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.begun = time.perf_counter()
        self.before = self.before or self.begun - self.created

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.epochs.append(time.perf_counter() - self.begun)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


# ---- in the processes of a launch


def trainer_of(subject: Subject, contender: str, **options: Any) -> Any:
    """A trainer of one contender, which has not trained yet."""
    common = {
        "use_cpu": device() == "cpu", "bf16": True, "num_train_epochs": NUM_EPOCHS, "dataloader_pin_memory": True,
        "learning_rate": 1e-5,
    }  # fmt: skip
    kind = Trainer if contender == "Trainer" else PipeTransformerTrainer
    return make_trainer(subject.task(), subject.batch, kind, **{**common, **CONTENDERS[contender], **options})


def run(subject: Subject, contender: str, **options: Any) -> dict[str, Any]:
    """Train once: seconds of a step by epoch, those before the first one, and bytes of the allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trainer, watch = trainer_of(subject, contender, **options), Watch()
    trainer.add_callback(watch)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    steps = [each / subject.num_steps for each in watch.epochs[1:]]
    return {"steps": steps, "start": watch.before, "bytes": peak}


def plan_here(subject: Subject) -> dict[str, Any]:
    """What `--plan_only` writes for ours."""
    trainer = trainer_of(subject, "ours", plan_only=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        trainer.train()
    return json.loads(Path(trainer.args.output_dir, "plan.json").read_text())["chosen"]


def rates(subject: Subject) -> dict[str, float]:
    """TFLOP/s of a product as large as a layer's, in bf16, and GB/s of copies: medians of eleven."""
    width, inner = subject.config.hidden_size, subject.config.intermediate_size
    rows = subject.batch * subject.num_tokens
    left, right = (
        torch.randn(*size, device=device(), dtype=torch.bfloat16) for size in ((rows, width), (width, inner))
    )
    large = torch.randn(2**25, device=device())

    def seconds(call: Callable[[], Any]) -> float:
        def several() -> None:
            for _ in range(20):
                call()
            synchronize()

        return statistics.median(seconds_of(several) for _ in range(11)) / 20

    seconds(lambda: left @ right)
    return {
        "TFLOP/s": 2 * rows * width * inner / seconds(lambda: left @ right) / 1e12,
        "GB/s of memory": 2 * large.nbytes / seconds(large.clone) / 1e9,
    }


def compare(subject: Subject, rounds: int) -> dict[str, Any]:
    """All contenders by turns, and what plans said of ours."""
    without_launch_variables()
    run(subject, "Trainer", num_train_epochs=2)  # Libraries load kernels and allocate once.
    plans = [plan_here(subject)]
    runs = alternate({contender: partial(run, subject, contender) for contender in CONTENDERS}, rounds)
    seconds = {contender: [step for each in results for step in each["steps"]] for contender, results in runs.items()}
    found: dict[str, Any] = {}
    for contender, results in runs.items():
        steps = seconds[contender]
        found[contender] = {
            "ms of a step": summary([1e3 * step for step in steps], 2),
            "step over Trainer's": summary(ratios(steps, seconds["Trainer"]), 3),
            "seconds before the first step": summary([each["start"] for each in results], 2),
            "GiB at most": round(max(each["bytes"] for each in results) / 2**30, 3),
        }
    ours, of_device = runs["ours"], rates(subject)
    options = {
        "processes": 1, "device_memory": 80, "sequence_length": subject.num_tokens, "communicator_gb": 0, "bf16": True,
        "device_tflops": of_device["TFLOP/s"], "memory_bandwidth": of_device["GB/s of memory"],
        "per_device_train_batch_size": subject.batch, "pipeline_parallel_size": 1,
    }  # fmt: skip
    of_config = plan_of(subject.kind(subject.config), options)
    found["rates"] = of_device
    for way, chosen in (("--plan_only", plans), ("from the config", [of_config])):
        steps = [each["step_seconds"] for each in chosen]
        found[f"seconds of a step, {way}"] = beside(steps, seconds["ours"])
        if torch.cuda.is_available():
            found[f"bytes, {way}"] = beside([chosen[0]["memory"][0]["total"]], [each["bytes"] for each in ours])
    return found


def stage_bytes(subject: Subject) -> int:
    """Peak of the allocator, of a process with one of two stages."""
    options = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 4, "ddp_backend": "gloo"}
    trainer = trainer_of(subject, "ours", num_train_epochs=1, **options)
    trainer.add_callback(Watch())
    trainer.train()
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def plan_of(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The plan of a model's config by the command line."""
    model.config.architectures = [type(model).__name__]
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        model.config.save_pretrained(folder)
        with contextlib.suppress(SystemExit):  # It fits nowhere.
            command(["plan", folder, *words, "--json"])
    return json.loads(printed.getvalue())["chosen"]  # type: ignore[no-any-return]


def beside(predicted: list[float], measured: list[float]) -> dict[str, Any]:
    """Medians of both, their ratio, and the range of the measured ones."""
    both = statistics.median(predicted), statistics.median(measured)
    return {
        "predicted": both[0], "measured": both[1], "ratio": round(both[0] / both[1], 3),
        "measured, range": [min(measured), max(measured)],
    }  # fmt: skip


# ---- in the driver


def on_gpu(call: Callable[..., Any], processes: int, name: str, *args: Any) -> list[Any]:
    """What the processes return, on the GPU or, for a quick look, on the CPU with hardly any work."""
    subject = SUBJECTS[name]
    if not torch.cuda.is_available():
        narrow = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 12, "num_key_value_heads": 12}
        subject.config.update({"num_hidden_layers": 2, **narrow})
        subject = subject._replace(num_steps=1, batch=2)
    environment = {"ACCELERATE_USE_CPU": str(not torch.cuda.is_available()).lower()}
    return launch_all(call, processes, subject, *args, environment=environment)


def named_gpu() -> dict[str, Any]:
    """Its name and the version of CUDA, empty without one."""
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if torch.cuda.is_available() else {}


def measured(settings: Settings, name: str) -> dict[str, Any]:
    """One model, with the name of the GPU."""
    [found] = on_gpu(compare, 1, name, settings.of(2, 1))
    report(name, found)
    return named_gpu() | found


for each_model, each_title in {
    "minilm": "MiniLM (BERT 6 x 384), 32 sentences of 64 tokens",
    "bert": "BERT-base, 32 sentences of 128 tokens",
    "vit": "ViT-base, 32 images of 224 px",
    "llama": "Llama of 1.3e9 parameters, 8 blocks of 512 tokens",
}.items():
    measure = partial(measured, name=each_model)
    measure.__name__ = f"gpu_{each_model}"  # type: ignore[attr-defined]
    measure.__doc__ = f"{each_title}, on one GPU."
    experiment("gpu.json", section=each_model, minutes=1, quick_minutes=0.5, processes=1, needs_gpu=True)(measure)


@experiment("gpu.json", section="stages", minutes=1, quick_minutes=0.5, needs_gpu=True)
def gpu_stages(_settings: Settings) -> dict[str, Any]:
    """Memory of two stages of that Llama, which share the GPU."""
    found = on_gpu(stage_bytes, 2, "llama")
    return named_gpu() | {"GiB at most of each process": [round(each / 2**30, 3) for each in found]}
