"""What the measurements on a GPU train, and what they measure in processes of their own; see `gpu.py`."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.utils import is_liger_kernel_available

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cli import main as command
from hf_pipetransformer.comm.groups import share_gpus

from .measure import PeakMemory, alternate, largest_difference, ratios, seconds_of, summary
from .models import NO_DROPOUT, Tensors, rows_of, with_adapters
from .training import losses_of, make_trainer, without_launch_variables


NUM_EPOCHS, MICRO_BATCHES, RANK = 5, 8, 16


# ---- what is trained ----


def sentences(num_tokens: int, num_samples: int) -> Tensors:
    """Words without padding, of two classes."""
    words = torch.randint(5, 256, (num_samples, num_tokens))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.randint(2, (num_samples,))}


def images(size: int, num_samples: int) -> Tensors:
    """Pixels of ten classes."""
    return {"pixel_values": torch.randn(num_samples, 3, size, size), "labels": torch.randint(10, (num_samples,))}


def blocks(num_tokens: int, num_samples: int) -> Tensors:
    """Blocks of tokens, each of which is to be predicted."""
    words = torch.randint(5, 256, (num_samples, num_tokens))
    return {"input_ids": words, "labels": words}


@dataclass(frozen=True)
class Subject:
    """A model's class and configuration, its samples, and the batch, steps and tokens of a sample.

    Args:
        inputs: from a number of samples to their tensors.
        adapted_from: share of the layers, from the first on, without adapters of LoRA; None for no adapters at all.
        is_bound: only the upper half of the layers is there, above embeddings that are not trained: what a stored half
            could reach if nothing had to be read.
    """

    kind: Any
    config: Any
    inputs: Callable[[int], Tensors]
    batch: int
    num_steps: int
    num_tokens: int
    adapted_from: float | None = None
    is_bound: bool = False

    def model(self) -> Any:
        """Draw the weights where they are needed: a CPU takes minutes for those of a large model."""
        transformers.set_seed(0)
        config = self.config.__class__.from_dict(self.config.to_dict())
        if self.is_bound:
            config.num_hidden_layers //= 2
        weights = torch.bfloat16 if device() == "cuda" else torch.float32
        with torch.device(device()):
            if self.adapted_from is None:
                model = self.kind(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=weights)
        if self.is_bound:
            model.base_model.embeddings.requires_grad_(False)
        if self.adapted_from is None:
            return model
        return with_adapters(model, RANK, int(model.config.num_hidden_layers * self.adapted_from))


BERT, VIT, LLAMA = (
    transformers.BertForSequenceClassification, transformers.ViTForImageClassification, transformers.LlamaForCausalLM,
)  # fmt: skip


def llama(width: int, layers: int, words: int) -> Any:
    """The shape of Llama-3-8B at 4,096 wide and 32 layers; narrower ones in proportion."""
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers, vocab_size=words,
        num_attention_heads=32 if width >= 1024 else 4, num_key_value_heads=8 if width >= 1024 else 2,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip


def subjects(is_tiny: bool) -> dict[str, Subject]:
    """Make the subjects by name, or as many with hardly any work."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    narrow = size if is_tiny else {}
    host = transformers.BertConfig(**size, **NO_DROPOUT)
    bert = transformers.BertConfig(**narrow, **NO_DROPOUT)
    pixels, tokens = (32, 64) if is_tiny else (224, 4096)
    short, long = (8, 16) if is_tiny else (128, 384)
    vit = transformers.ViTConfig(num_labels=10, image_size=pixels, **narrow, **NO_DROPOUT)
    large = llama(*((64, 2, 512) if is_tiny else (4096, 32, 128256)))
    found = {
        "bert 64 x 384": Subject(BERT, bert, partial(sentences, long), 64, 12, long),
        "vit 128": Subject(VIT, vit, partial(images, pixels), 128, 8, (pixels // 16) ** 2 + 1),
        "bert 32 x 128": Subject(BERT, bert, partial(sentences, short), 32, 24, short),
        "bert 64 x 128": Subject(BERT, bert, partial(sentences, short), 64, 8, short),
        # So little for the GPU to do that a step takes what the host takes.
        "host": Subject(BERT, host, partial(sentences, 8), MICRO_BATCHES, 24, 8),
        "llama": Subject(LLAMA, large, partial(blocks, tokens), 1, 6, tokens, adapted_from=0.0),
    }
    if is_tiny:
        found = {name: replace(each, batch=min(each.batch, 8), num_steps=2) for name, each in found.items()}
    return found


@dataclass(frozen=True)
class Contender:
    """A trainer with options, and what it changes about the subject."""

    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    kind: Any = PipeTransformerTrainer


NOTHING_FROZEN = {"freeze_policy": "none", "activation_cache": "off"}
HALF_STORED = {"freeze_policy": "fixed", "freeze_at": "0:1/2", "activation_cache": "on"}
GRAPHS = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}
PLAIN, OURS = Contender(kind=Trainer), Contender(NOTHING_FROZEN)
PREFIX = {"Trainer": PLAIN, "ours": OURS, "half stored": Contender(HALF_STORED),
          "half frozen": Contender({**HALF_STORED, "activation_cache": "off"}),
          "bound": Contender(changes={"is_bound": True}, kind=Trainer)}  # fmt: skip
COMPILED = {"torch_compile": True}
LAUNCH_BOUND = {
    "Trainer": PLAIN, "ours": OURS, "half stored": Contender(HALF_STORED),
    "Trainer, compiled": Contender(COMPILED, kind=Trainer), "ours, compiled": Contender(NOTHING_FROZEN | COMPILED),
    "half stored, compiled": Contender(HALF_STORED | COMPILED),
    "Trainer, CUDA graphs": Contender(GRAPHS, kind=Trainer), "ours, CUDA graphs": Contender(NOTHING_FROZEN | GRAPHS),
    "half stored, CUDA graphs": Contender(HALF_STORED | GRAPHS),
}  # fmt: skip
UPPER = {"adapted_from": 0.5}
ADAPTERS = {
    "Trainer": PLAIN, "ours": OURS, "Trainer, adapters in the upper half": Contender(changes=UPPER, kind=Trainer),
    "ours, adapters in the upper half, lower half stored": Contender(
        {"freeze_policy": "none", "activation_cache": "on"}, UPPER
    ),
}  # fmt: skip
ACCUMULATION = {
    "Trainer": Contender({"gradient_accumulation_steps": MICRO_BATCHES}, kind=Trainer),
    "ours": Contender({**NOTHING_FROZEN, "pipeline_parallel_num_microbatches": MICRO_BATCHES}),
}
CONTENDERS = {"prefix": PREFIX, "launches": LAUNCH_BOUND, "adapters": ADAPTERS, "accumulation": ACCUMULATION}
FEW = 256
HEADS = {
    "few words": {}, "whole sequences": {}, "8 slices": {"pipeline_head_slices": 8},
    "64 slices": {"pipeline_head_slices": 64}, "Liger": {"use_liger_kernel": True},
}  # fmt: skip
"""Options of stages whose head is measured; the first has a vocabulary that does not fill it with logits."""


# ---- in the processes of a launch ----


def device() -> str:
    """The GPU, or the CPU of a quick look, from whose processes GPUs are hidden."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Peak of the allocator; without a GPU that of the process, only to have a number."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watch(TrainerCallback):
    """Seconds of each epoch and of what comes before the first step; the peak of memory after the first step.

    On a GPU it is the allocator's; on a CPU the phase `training` of `memory`, if there is one.
    """

    def __init__(self, memory: PeakMemory | None = None) -> None:
        self.memory = memory
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
        elif state.global_step == 1 and self.memory is not None:
            self.memory.begin("training")


def trainer_of(subject: Subject, contender: Contender, **options: Any) -> Any:
    """A trainer of one contender, which has not trained yet."""
    gc.collect()
    torch.compiler.reset()  # What another contender compiled would be found again.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    subject = replace(subject, **contender.changes)
    given = {"model": subject.model(), "train_dataset": rows_of(subject.inputs(subject.batch * subject.num_steps))}
    own = contender.options | options
    # Batches count samples of an optimizer step.
    batch = subject.batch // own.get("gradient_accumulation_steps", 1)
    if own.get("torch_compile") and device() == "cpu":  # Compiling for a CPU takes minutes.
        own["torch_compile_backend"] = "eager"
    on_gpu = device() == "cuda"
    common = {
        "use_cpu": not on_gpu, "bf16": on_gpu, "dataloader_pin_memory": on_gpu, "num_train_epochs": NUM_EPOCHS,
        "learning_rate": 1e-5,
    }  # fmt: skip
    return make_trainer(given, batch, contender.kind, **common | own)


def run(subject: Subject, contender: Contender, **options: Any) -> dict[str, Any]:
    """Train once: seconds of a step by epoch, those before the first step, and peak bytes; or why it is refused."""
    try:
        trainer = trainer_of(subject, contender, **options)
    except (ValueError, ImportError) as error:
        return {"refused": str(error).strip().splitlines()[-1]}
    return trained(trainer, subject)


def trained(trainer: Any, subject: Subject) -> dict[str, Any]:
    """Train: seconds of a step by epoch, those before the first step, and peak bytes."""
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    return {"steps": [each / subject.num_steps for each in watch.epochs], "start": watch.before, "bytes": peak_bytes()}


def row_of(runs: Sequence[dict[str, Any]], trainers: Sequence[float], num_samples: int) -> dict[str, Any]:
    """Figures of one contender beside the seconds of Trainer's steps; the samples of a step make a rate."""
    if "refused" in runs[0]:
        return {"refused": runs[0]["refused"]}
    steps = later_steps(runs)
    return {
        "ms of a step": summary([1e3 * step for step in steps], 2),
        "ms of a step by epoch": [[round(1e3 * step, 2) for step in each["steps"]] for each in runs],
        "slowest epoch over the median": round(max(steps) / statistics.median(steps), 3),
        "step over Trainer's": summary(ratios(steps, trainers), 3),
        "tokens a second": summary([num_samples / step for step in steps], 0),
        "seconds before the first step": summary([each["start"] for each in runs], 2),
        "GiB at most": round(max(each["bytes"] for each in runs) / 2**30, 3),
    }


def later_steps(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of a step in every epoch after the first, of all rounds."""
    return [step for each in runs for step in each["steps"][1:]]


def compare(subject: Subject, group: str, rounds: int, num_epochs: int) -> dict[str, Any]:
    """All contenders of a group by turns, and what plans say of ours."""
    without_launch_variables()
    contenders = CONTENDERS[group]
    run(subject, contenders["Trainer"], num_train_epochs=1)  # Libraries load kernels and allocate once.
    calls = {name: partial(run, subject, each, num_train_epochs=num_epochs) for name, each in contenders.items()}
    runs = alternate(calls, rounds)
    trainers = later_steps(runs["Trainer"])
    table = {name: row_of(each, trainers, subject.batch * subject.num_tokens) for name, each in runs.items()}
    if "bound" in runs:
        reached = ratios(later_steps(runs["bound"]), later_steps(runs["half stored"]))
        table["half stored"]["speed over the bound"] = summary(reached, 3)
    if group == "accumulation":
        for name in runs:
            table[name]["us of a micro-batch"] = round(1e3 * table[name]["ms of a step"]["median"] / MICRO_BATCHES, 1)
    measured = statistics.median(later_steps(runs["ours"])), max(each["bytes"] for each in runs["ours"])
    return {"contenders": table, "predicted over measured": plans_beside(subject, contenders["ours"], *measured)}


def plans_beside(subject: Subject, contender: Contender, seconds: float, num_bytes: float) -> dict[str, Any]:
    """Predicted over measured step and memory: of `--plan_only`, and from the config with what this device reaches."""
    plans = {"--plan_only": plan_here(subject, contender)}
    found: dict[str, Any] = {"device": rates(subject)}
    if subject.adapted_from is None and "pipeline_parallel_num_microbatches" not in contender.options:
        plans["from the config"] = plan_of(subject, found["device"])
    for way, plan in plans.items():
        found[way] = {
            "step": round(plan["step_seconds"] / seconds, 3),
            "memory": round(plan["memory"][0]["total"] / num_bytes, 3),
        }
    return found


def plan_here(subject: Subject, contender: Contender, **options: Any) -> dict[str, Any]:
    """What `--plan_only` writes; every rank reads it."""
    trainer = trainer_of(subject, contender, plan_only=True, **options)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        trainer.train()
    return json.loads(Path(trainer.args.output_dir, "plan.json").read_text())["chosen"]  # type: ignore[no-any-return]


def plan_of(subject: Subject, of_device: Mapping[str, float]) -> dict[str, Any]:
    """The plan of a model's config by the command line."""
    options = {
        "processes": 1, "device_memory": 80, "sequence_length": subject.num_tokens, "communicator_gb": 0, "bf16": True,
        "device_tflops": of_device["TFLOP/s"], "memory_bandwidth": of_device["GB/s of memory"],
        "launch_us": of_device["us of a launch"], "per_device_train_batch_size": subject.batch,
        "pipeline_parallel_size": 1,
    }  # fmt: skip
    subject.config.architectures = [subject.kind.__name__]
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        subject.config.save_pretrained(folder)
        with contextlib.suppress(SystemExit):  # It fits nowhere.
            command(["plan", folder, *words, "--json"])
    return json.loads(printed.getvalue())["chosen"]  # type: ignore[no-any-return]


def rates(subject: Subject) -> dict[str, float]:
    """TFLOP/s of a product as large as a layer's in bf16, GB/s of copies, microseconds of a launch: medians."""
    width, inner = subject.config.hidden_size, subject.config.intermediate_size
    rows = subject.batch * subject.num_tokens
    left, right = (
        torch.randn(*size, device=device(), dtype=torch.bfloat16) for size in ((rows, width), (width, inner))
    )
    large = torch.randn(2**25 if device() == "cuda" else 2**20, device=device())
    small = large[:1]

    def seconds(call: Callable[[], Any], count: int = 20) -> float:
        def several() -> None:
            for _ in range(count):
                call()
            synchronize()

        return statistics.median(seconds_of(several) for _ in range(5)) / count

    seconds(lambda: left @ right)
    return {
        "TFLOP/s": 2 * rows * width * inner / seconds(lambda: left @ right) / 1e12,
        "GB/s of memory": 2 * large.nbytes / seconds(large.clone) / 1e9,
        "us of a launch": 1e6 * seconds(lambda: small.add_(1), 500),
    }


class StageState(TrainerCallback):
    """Bytes of the weights, gradients and optimizer state of this rank's stage; none before the first step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._parameters: list[torch.nn.Parameter] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._parameters = [p for p in self.trainer.model.parameters() if not p.is_meta]

    def bytes(self) -> int:
        """Count them, a gradient for each trained weight though the optimizer has let go of it."""
        states = list(self.trainer.optimizer.state.values()) if self._parameters else []
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        gradients = [parameter for parameter in self._parameters if parameter.requires_grad]
        return sum(tensor.nbytes for tensor in [*self._parameters, *gradients, *tensors])


def head_memory(name: str, width: int, num_tokens: int, num_words: int, adapted: bool) -> dict[str, Any]:
    """Peak of this rank's stage, one of two, beyond its state, and the losses; all is trained, or adapters are."""
    config = llama(width, 4, FEW if name == "few words" else num_words)
    subject = Subject(LLAMA, config, partial(blocks, num_tokens), 8, 3, num_tokens, 0.0 if adapted else None)
    if "use_liger_kernel" in HEADS[name] and not is_liger_kernel_available():
        return {"refused": "liger-kernel is not installed"}
    memory = PeakMemory("start", lambda: state.bytes()) if device() == "cpu" else None
    trainer = trainer_of(subject, OURS, **HEADS[name], **two_stages(4), num_train_epochs=1, logging_steps=1)
    state = StageState(trainer)
    trainer.add_callback(state)
    trainer.add_callback(Watch(memory))
    trainer.train()
    if memory is not None:
        memory.end()
    beyond = memory.peaks["training"] if memory is not None else peak_bytes() - state.bytes()
    return {"peak": beyond, "losses": losses_of(trainer)}


def two_stages(num_microbatches: int) -> dict[str, Any]:
    """Options of two ranks, which share the GPU where there is only one."""
    share_gpus(torch.cuda.device_count())
    return {
        "pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": num_microbatches,
        "ddp_backend": "nccl" if device() == "cuda" else "gloo", "pipeline_gather_at_end": "never",
        "logging_strategy": "steps",
    }  # fmt: skip


def head_memories(*size: Any) -> dict[str, Any]:
    """Return what each way to compute the head takes on this rank."""
    return {name: head_memory(name, *size) for name in HEADS}


def heads_beside(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the ways to compute the head by what each rank of two found."""
    # Logits are the last rank's, losses are logged by the first.
    few, whole = ranks[-1]["few words"]["peak"], ranks[0]["whole sequences"]["losses"]
    return {
        name: found if "refused" in found else {
            "GiB beyond the state": round(found["peak"] / 2**30, 3),
            "of the stage with few words": round(found["peak"] / few, 2),
            "largest relative difference of the losses":
                None if name == "few words" else largest_difference(ranks[0][name]["losses"], whole),
        }
        for name, found in ranks[-1].items()
    }  # fmt: skip


def stage_memory(subject: Subject) -> dict[str, Any]:
    """Peak bytes of this rank with one of two stages, and those that the plan has for every rank."""
    options = {**two_stages(4), "num_train_epochs": 1}
    found = trained(trainer_of(subject, OURS, **options), subject)
    # Last: a trainer that only plans leaves the process group.
    plan = plan_here(subject, OURS, **options)
    return found | {"planned": [each["total"] for each in plan["memory"]]}
