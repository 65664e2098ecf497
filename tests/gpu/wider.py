"""Checks of what a run may need beside its schedule: adapters, 4 bits, generation, metrics, nodes, a killed rank.

The group `notes` writes what one process gives. Others compare with it, in two and four processes.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments

import hf_pipetransformer
from hf_pipetransformer.comm.groups import share_gpus
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from tests.distributed.scenarios import RANK, scenario, start
from tests.gpu.runs import (
    ClassWeightsInParts,
    Figures,
    check_close,
    common,
    llama,
    losses_of,
    ours,
    plain,
    recall,
    remember,
)
from tests.gpu.stages import HALF, TIMEOUT, Checks, On, check_resume, check_stages


GENERATED = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
FREEZES = {"freeze_policy": "gradient_norm", "elastic": True}
GRACE = 10
"""Seconds beyond `pipeline_timeout` in which all ranks have ended."""


def has_four_bits() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def adapted(folder: Path, device: str, four_bits: bool) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The tiny Llama with LoRA in its attention, and its samples."""
    model, rows = llama(tie_word_embeddings=False)
    if four_bits:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        own = folder / "whole"
        if not own.exists():  # The notes of one process come first.
            model.save_pretrained(own)
        model = AutoModelForCausalLM.from_pretrained(own, quantization_config=config, device_map={"": device})
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora), rows


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def evaluated(trainer: Trainer) -> list[float]:
    """Loss and accuracy of the samples, before any step."""
    trainer.compute_metrics = accuracy
    found = trainer.evaluate(trainer.train_dataset)
    return [found["eval_loss"], found["eval_accuracy"]]


def prompts() -> dict[str, torch.Tensor]:
    """Prompts of two lengths, padded on the left."""
    ids = torch.randint(5, 500, (4, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[:2, :4] = mask[:2, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


# ---- one process


def note_adapters(four_bits: bool, folder: Path, device: str) -> Figures:
    """Losses of LoRA under Trainer."""
    model, rows = adapted(folder, device, four_bits)
    args = TrainingArguments(**common(folder, device, "fp32", 1))
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    remember(folder, f"lora-{four_bits}", losses_of(trainer))
    return {"trained": trainer.get_num_trainable_parameters()}


def note_generated(folder: Path, device: str) -> Figures:
    model, _ = llama()
    model.to(device)
    tokens = model.generate(**{name: value.to(device) for name, value in prompts().items()}, **GENERATED)
    remember(folder, "generated", tokens.flatten().tolist())
    return {"tokens": tokens.numel()}


def note_evaluated(folder: Path, device: str) -> Figures:
    remember(folder, "evaluated", evaluated(plain("vit", folder, device, "fp32")))
    return {}


def note_freezing(folder: Path, device: str) -> Figures:
    """Losses of one process that freezes by gradient norms, and how many layers in the end."""
    trainer = ours("bert", folder / "norms", device, "fp32", **FREEZES)
    trainer.train()
    frozen = trainer.layout.num_frozen_layers
    assert frozen, "nothing froze"
    remember(folder, "norms", [*losses_of(trainer), frozen])
    return {"frozen layers": frozen}


@scenario
def train_asynchronously(folder: Path) -> None:
    trainer = in_stages("bert", "overlapping", On(folder, "cpu", "gloo"), pipeline_schedule="async_1f1b")
    trainer.train()
    if RANK == 0:
        remember(folder, "overlapping", losses_of(trainer))


def note_asynchronous(folder: Path) -> Figures:
    """Losses of four stages whose steps overlap, over gloo on the CPU: no other system gives them."""
    start(train_asynchronously, folder, 4, timeout=150, env={"ACCELERATE_USE_CPU": "true"})
    return {}


def notes(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """What one process gives."""
    return {
        "notes, LoRA": partial(note_adapters, False, folder, device),
        **({"notes, 4 bits": partial(note_adapters, True, folder, device)} if has_four_bits() else {}),
        "notes, generation": partial(note_generated, folder, device),
        "notes, metrics": partial(note_evaluated, folder, device),
        "notes, gradient_norm": partial(note_freezing, folder, device),
        "notes, asynchronous": partial(note_asynchronous, folder),
    }


# ---- several


def check_adapters(four_bits: bool, on: On) -> Figures:
    """LoRA on stages gives the losses of Trainer."""
    expected, size = recall(on.folder, f"lora-{four_bits}"), int(os.environ["WORLD_SIZE"])
    model, rows = adapted(on.folder, on.device, four_bits)
    args = PipeTransformerArguments(
        **common(on.folder / "lora", on.device, "fp32", size), pipeline_parallel_size=size, ddp_backend=on.backend,
        pipeline_parallel_num_microbatches=4, pipeline_timeout=TIMEOUT,
    )  # fmt: skip
    trainer = hf_pipetransformer.PipeTransformerTrainer(model, args, train_dataset=rows)
    trainer.train()
    return check_close(losses_of(trainer), expected, on.device, "fp32")


def in_stages(model_name: str, name: str, on: On, **options: Any) -> Any:
    options = {"pipeline_parallel_size": int(os.environ["WORLD_SIZE"]), "ddp_backend": on.backend, **options}
    return ours(model_name, on.folder / name, on.device, "fp32", **options)


def check_generation(on: On) -> Figures:
    """Tokens from stages are those of the whole model."""
    expected = recall(on.folder, "generated")
    found = in_stages("llama", "generation", on).generate(prompts(), **GENERATED).flatten().tolist()
    assert found == expected, f"{sum(a != b for a, b in zip(found, expected, strict=True))} other tokens"
    return {"tokens": len(found)}


def check_metrics(on: On) -> Figures:
    """Loss and metric of an evaluation are Trainer's."""
    found, expected = evaluated(in_stages("vit", "metrics", on)), recall(on.folder, "evaluated")
    assert abs(found[0] / expected[0] - 1) <= 1e-4 and found[1] == expected[1], f"{found}, expected {expected}"
    return {"eval_loss": found[0], "eval_accuracy": found[1]}


def check_whole_loss(on: On, pipeline_size: int) -> Figures:
    """A loss over the samples of all micro-batches and replicas is Trainer's."""
    options = {"pipeline_parallel_size": pipeline_size, "pipeline_parallel_num_microbatches": 4}
    trainer = in_stages("vit", "weighted", on, kind=ClassWeightsInParts, **options)
    trainer.train()
    return check_close(losses_of(trainer), recall(on.folder, "weighted-fp32"), on.device, "fp32")


def check_tokens(on: On) -> Figures:
    """Slices of tokens on every stage give the losses of Trainer."""
    size = int(os.environ["WORLD_SIZE"])
    return check_stages("llama", "fp32", "token", on, pipeline_size=size, pipeline_token_slices="12,12")


def check_asynchronous(on: On) -> Figures:
    """Steps that overlap give over any backend what they give over gloo on the CPU."""
    trainer = in_stages("bert", "overlapping", on, pipeline_schedule="async_1f1b")
    trainer.train()
    figures = {"run": [trainer.layout.num_stages, 1, "async_1f1b", "fp32"]}
    return {**figures, **check_close(losses_of(trainer), recall(on.folder, "overlapping"), on.device, "fp32")}


def check_freezing(on: On) -> Figures:
    """Freezing by gradient norms, from all stages to fewer, gives the losses of one process."""
    *expected, frozen = recall(on.folder, "norms")
    trainer = in_stages("bert", "norms", on, **FREEZES)
    trainer.train()
    layout = trainer.layout
    assert layout.num_frozen_layers == frozen, f"{layout.num_frozen_layers} layers froze, expected {frozen}"
    figures = {"frozen layers": frozen, "stages at the end": layout.num_stages, "replicas": layout.num_replicas}
    return {**figures, **check_close(losses_of(trainer), expected, on.device, "fp32")}


def check_nodes(schedule: str, on: On) -> Figures:
    """All ranks in one pipeline, half of them on another host by name."""
    size = int(os.environ["WORLD_SIZE"])
    host = f"host {RANK // (size // 2)}"
    with mock.patch.object(platform, "node", return_value=host):
        figures = check_stages("bert", "fp32", schedule, on, pipeline_size=size)
    figures.pop("run")
    return figures


class Killed(TrainerCallback):
    """Ends a rank as the kernel does that has no memory left."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 2 and state.global_step == HALF:
            os.kill(os.getpid(), signal.SIGKILL)


@scenario
def train_until_killed(folder: Path, device: str, backend: str) -> None:
    """Train on all stages until one rank is gone."""
    if backend == "nccl":
        share_gpus(torch.cuda.device_count())
    trainer = in_stages("bert", "killed", On(folder, device, backend), pipeline_timeout=20)
    trainer.add_callback(Killed())
    trainer.train()


def check_killed(on: On) -> Figures:
    """A killed rank ends all others by themselves, and each says which one is gone."""
    environment = {"ACCELERATE_USE_CPU": str(on.device == "cpu").lower()}
    options = {"device": on.device, "backend": on.backend}
    result = start(
        train_until_killed, on.folder, 4, options, timeout=180, check=False, grace=20 + GRACE, env=environment
    )
    codes = result.returncodes
    assert codes[2] == -signal.SIGKILL and None not in codes and 0 not in codes, f"{codes}\n{result.output}"
    for rank, text in enumerate(result.outputs):
        assert rank == 2 or "rank 2" in text.lower(), f"rank {rank} does not name rank 2:\n{text}"
    ended = [each for each in result.ended if each is not None]
    return {"seconds from the first end to the last": round(max(ended) - min(ended), 1)}


def pairs(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """The checks of two processes."""
    on = On(folder, device, backend)
    return {
        "two, LoRA": partial(check_adapters, False, on),
        **({"two, 4 bits": partial(check_adapters, True, on)} if has_four_bits() else {}),
        "two, generation": partial(check_generation, on),
        "two, metrics": partial(check_metrics, on),
        "two, whole loss": partial(check_whole_loss, on, 2),
    }


def wide(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """The checks of four processes."""
    on = On(folder, device, backend)
    checks: dict[str, Callable[[], Figures]] = {
        "four, interleaved, K=2 x R=2": partial(check_stages, "bert", "fp32", "interleaved_1f1b", on, pipeline_size=2),
        "four, tokens": partial(check_tokens, on),
        "four, gradient_norm": partial(check_freezing, on),
        "four, resume": partial(check_resume, on, pipeline_size=4),
        "four, generation": partial(check_generation, on),
        "four, metrics": partial(check_metrics, on),
        "four, LoRA": partial(check_adapters, False, on),
        "four, whole loss, K=2 x R=2": partial(check_whole_loss, on, 2),
    }
    return checks


def overlapping(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """Four processes that have not used a GPU before."""
    return {"four, asynchronous": partial(check_asynchronous, On(folder, device, backend))}


def nodes(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """The checks of two hosts, which are one."""
    on = On(folder, device, backend)
    return {f"two hosts, {schedule}": partial(check_nodes, schedule, on) for schedule in ("1f1b", "zb_h1")}


def killed(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """A rank that is killed in a step."""
    return {"killed": partial(check_killed, On(folder, device, backend))}
