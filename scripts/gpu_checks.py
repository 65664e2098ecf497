"""The checks behind `make gpu-check`, as one of its processes runs them. See gpu_check.py.

    gpu_checks.py GROUP FOLDER --device cuda|cpu [--precisions fp32 bf16]

`alone` runs in one process; `stages` in two, and reads what plain Trainer gave from where `alone` wrote it. Each check
gives figures, or says with an AssertionError what it found and what it expected; rank 0 adds a line to
`FOLDER/GROUP.jsonl` after each. On the CPU the same lines of code run, with other figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saved_bytes import SavedBytes
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.comm import transfers
from hf_pipetransformer.comm.topology import let_group_threads_finish
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.pipe.stages import WithDevice
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.schedules.layout import Layout


Figures = dict[str, Any]

NUM_LAYERS, NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 4, 48, 16, 4
NUM_STEPS = NUM_EPOCHS * NUM_SAMPLES // BATCH_SIZE
FREEZE_STEP, NUM_FROZEN = 3, 2
# Largest relative difference of a loss. A GPU sums float32 in another order; half precisions round every product.
TOLERANCES = {("cpu", "fp32"): 1e-5, ("cuda", "fp32"): 1e-4, ("any", "bf16"): 3e-2, ("any", "fp16"): 1e-2}


# ---- runs ----


def bert() -> tuple[nn.Module, list[dict[str, Any]]]:
    set_seed(0)
    config = BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    words = torch.randint(5, 500, (NUM_SAMPLES, 24))
    mask = (torch.arange(24) < torch.randint(8, 25, (NUM_SAMPLES, 1))).long()
    rows = [
        {"input_ids": words[i] * mask[i], "attention_mask": mask[i], "labels": int(words[i, 1]) % 2}
        for i in range(NUM_SAMPLES)
    ]
    return BertForSequenceClassification(config), rows


def vit() -> tuple[nn.Module, list[dict[str, Any]]]:
    set_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    images, classes = torch.randn(NUM_SAMPLES, 3, 16, 16), torch.randint(0, 4, (NUM_SAMPLES,)).tolist()
    return ViTForImageClassification(config), [
        {"pixel_values": images[i], "labels": classes[i]} for i in range(NUM_SAMPLES)
    ]


MODELS = {"bert": bert, "vit": vit}


class FreezeByHand(TrainerCallback):
    """What a user of Trainer writes to freeze the embeddings and the first layers before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == FREEZE_STEP:
            last = [f".{index}." for index in range(NUM_FROZEN, NUM_LAYERS)]
            for name, parameter in model.named_parameters():
                is_head = name.startswith(("classifier", "bert.pooler", "vit.layernorm"))
                if not is_head and not any(part in name for part in last):
                    parameter.requires_grad_(False)
                    parameter.grad = None


class FrozenBits(TrainerCallback):
    """Copies of the parameters at the step of the freeze."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == FREEZE_STEP + 1:
            named = model.named_parameters()
            self.before = {name: p.detach().clone() for name, p in named if not p.is_meta and not p.requires_grad}


def common(folder: Path, device: str, precision: str, world_size: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "num_train_epochs": NUM_EPOCHS, "learning_rate": 1e-3, "weight_decay": 0.1,
        "per_device_train_batch_size": BATCH_SIZE // world_size, "max_grad_norm": 0.5, "logging_steps": 1, "seed": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": device == "cpu",
        "bf16": precision == "bf16", "fp16": precision == "fp16",
    }  # fmt: skip


def plain_losses(model_name: str, folder: Path, device: str, precision: str, freezes: bool = False) -> list[float]:
    model, rows = MODELS[model_name]()
    args = TrainingArguments(**common(folder, device, precision, 1))
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[FreezeByHand()] if freezes else None)
    trainer.model_accepts_loss_kwargs = model_name == "vit"
    trainer.train()
    return losses_of(trainer)


def ours(model_name: str, folder: Path, device: str, precision: str, **options: Any) -> PipeTransformerTrainer:
    """A trainer that has not trained yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model, rows = MODELS[model_name]()
    options = {"freeze_policy": "none", "activation_cache": "off", "pipeline_timeout": 60, **options}
    args = PipeTransformerArguments(**common(folder, device, precision, world_size), **options)
    return PipeTransformerTrainer(model, args, train_dataset=rows, eval_dataset=rows[:10])


FREEZING = {"freeze_policy": "fixed", "freeze_at": f"{FREEZE_STEP}:{NUM_FROZEN}"}


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_close(found: Sequence[float], expected: Sequence[float], device: str, precision: str) -> Figures:
    """The largest relative difference of two runs' losses."""
    tolerance = TOLERANCES.get((device, precision)) or TOLERANCES["any", precision]
    assert len(found) == len(expected) == NUM_STEPS, f"{len(found)} and {len(expected)} losses of {NUM_STEPS} steps"
    largest = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert largest <= tolerance, f"losses differ by {largest:.3g} (relative), expected at most {tolerance:.0e}"
    return {"largest relative difference": float(f"{largest:.3g}"), "tolerance": tolerance}


# ---- one process ----


def check_exactness(model_name: str, precision: str, folder: Path, device: str) -> Figures:
    """K=1 gives the losses of Trainer."""
    expected = plain_losses(model_name, folder, device, precision)
    remember(folder, f"{model_name}-{precision}", expected)
    trainer = ours(model_name, folder, device, precision, pipeline_parallel_num_microbatches=2)
    trainer.train()
    return check_close(losses_of(trainer), expected, device, precision)


def check_freezing(model_name: str, folder: Path, device: str) -> Figures:
    """K=1 that freezes gives the losses of Trainer that freezes, and what is frozen keeps its bits."""
    expected = plain_losses(model_name, folder, device, "fp32", freezes=True)
    remember(folder, f"{model_name}-frozen", expected)
    trainer, bits = ours(model_name, folder, device, "fp32", **FREEZING), FrozenBits()
    trainer.add_callback(bits)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    changed = [name for name, value in bits.before.items() if not torch.equal(value, after[name].to(value.device))]
    assert bits.before and not changed, (
        f"{len(changed)} of {len(bits.before)} frozen parameters changed: {changed[:3]}"
    )
    return {"frozen parameters": len(bits.before), **check_close(losses_of(trainer), expected, device, "fp32")}


def check_cache(model_name: str, folder: Path, device: str) -> Figures:
    """Stored activations give the losses of computed ones, and come ahead from pinned memory on a GPU."""
    expected = recall(folder, f"{model_name}-frozen")
    store = {"activation_cache": "on", "activation_cache_dir": str(folder / "_activation_cache")}
    with counted_pins() as pinned:
        trainer = ours(model_name, folder / "cached", device, "fp32", **FREEZING, **store)
        trainer.train()
    epochs = [event for event in read_events(str(folder / "cached" / EVENTS_FILE)) if event["event"] == "cache"]
    hits = sum(event.get("hits", 0) for event in epochs)
    assert hits >= NUM_SAMPLES, f"{hits} samples came from the store, expected at least {NUM_SAMPLES}"
    if device == "cuda":
        assert pinned[0], "no row was pinned by the thread that reads ahead"
    else:
        assert not pinned[0], f"{pinned[0]} rows were pinned where no GPU reads them"
    figures = {"hits": hits, "pinned batches": pinned[0]}
    return {**figures, **check_close(losses_of(trainer), expected, device, "fp32")}


@contextmanager
def counted_pins() -> Any:
    """How often a thread beside the main one pins memory inside."""
    count, real = [0], torch.Tensor.pin_memory

    def pin_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        count[0] += threading.current_thread() is not threading.main_thread()
        return real(tensor, *args, **kwargs)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    try:
        yield count
    finally:
        torch.Tensor.pin_memory = real  # type: ignore[method-assign]


class ClassWeights(PipeTransformerTrainer):
    """A loss that does not decompose over samples."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        weights = torch.arange(1.0, logits.shape[-1] + 1, device=logits.device) ** 2
        return nn.functional.cross_entropy(logits.float(), labels, weight=weights)


def check_start(precision: str, folder: Path, device: str) -> Figures:
    """The start measures this device with the run's own micro-batch, and refuses a loss that does not decompose."""
    trainer = ours("vit", folder / f"start-{precision}", device, precision, pipeline_parallel_num_microbatches=2)
    trainer.train()
    run = next(e for e in read_events(str(folder / f"start-{precision}" / EVENTS_FILE)) if e["event"] == "run")
    assert run["measured_samples"] == BATCH_SIZE // 2, f"measured with {run['measured_samples']} samples"
    args = PipeTransformerArguments(
        **common(folder, device, precision, 1), freeze_policy="none", pipeline_parallel_num_microbatches=2
    )
    model, rows = vit()
    try:
        ClassWeights(model, args, train_dataset=rows).train()
    except ValueError as error:
        refusal = str(error)
    else:
        raise AssertionError("a class-weighted loss was trained in micro-batches, expected a refusal")
    return {"measured samples": run["measured_samples"], "refusal": refusal[:120]}


def check_memory(folder: Path, device: str) -> Figures:
    """Freezing takes activations, gradients and optimizer state off the device."""
    peaks: dict[str, dict[str, float]] = {}
    for name, options in (("all layers trained", {}), ("one layer trained", {"freeze_at": f"0:{NUM_LAYERS - 1}"})):
        policy = {"freeze_policy": "fixed", **options} if options else {}
        trainer = ours("vit", folder / name.replace(" ", "-"), device, "fp32", **policy)
        saved = SavedBytes(trainer)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with saved.hooks():
            trainer.train()
        peaks[name] = {"MiB kept for the backward": saved.most / 2**20}
        if device == "cuda":
            peaks[name]["MiB allocated at most"] = torch.cuda.max_memory_allocated() / 2**20
    whole, frozen = peaks["all layers trained"], peaks["one layer trained"]
    for what in whole:
        assert frozen[what] < whole[what], f"{what}: {frozen[what]:.1f} frozen, {whole[what]:.1f} whole"
    return peaks


def check_pipe(mode: str, device: str) -> Figures:
    """`Pipe` with stages on the device and on the CPU by turns, beside the bare Sequential on the CPU."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(30, 64)
    places = [device, "cpu", device, device]
    copies = (WithDevice(deepcopy(child), place) for child, place in zip(module, places, strict=True))
    pipe = Pipe(nn.Sequential(*copies), 4, mode)
    tolerance, largest = TOLERANCES[device, "fp32"], 0.0
    for _ in range(3):
        expected, output = module(x), pipe(x.to(device))
        assert output.device.type == device, f"the output is on {output.device}"
        for result in (expected, output):
            result.pow(2).mean().backward()
        pairs = [
            (expected, output),
            *((p.grad, q.grad) for p, q in zip(module.parameters(), pipe.parameters(), strict=True)),
        ]
        for one, other in pairs:
            largest = max(largest, float((one - other.cpu()).detach().abs().max() / one.detach().abs().max()))
        assert largest <= tolerance, f"results differ by {largest:.3g} (relative), expected at most {tolerance:.0e}"
    return {"largest relative difference": float(f"{largest:.3g}"), "tolerance": tolerance}


def alone(folder: Path, device: str, precisions: Sequence[str]) -> dict[str, Callable[[], Figures]]:
    """The checks of one process."""
    exactness = {
        f"exactness, {model_name}, {precision}": partial(check_exactness, model_name, precision, folder, device)
        for precision in precisions
        for model_name in MODELS
    }
    return {
        **exactness,
        "freezing, bert": partial(check_freezing, "bert", folder, device),
        "freezing, vit": partial(check_freezing, "vit", folder, device),
        "cache, bert": partial(check_cache, "bert", folder, device),
        "cache, vit": partial(check_cache, "vit", folder, device),
        **{f"start, {precision}": partial(check_start, precision, folder, device) for precision in precisions},
        "memory": partial(check_memory, folder, device),
        **{f"pipe, {mode}": partial(check_pipe, mode, device) for mode in ("always", "never")},
    }


# ---- two processes ----


class Staged(transfers._Staged):
    """Counts the transfers of this process that go through host memory."""

    num = 0

    def __init__(self, transfer: transfers.Transfer) -> None:
        super().__init__(transfer)
        Staged.num += 1


def check_stages(model_name: str, precision: str, schedule: str, folder: Path, device: str, backend: str) -> Figures:
    """K=2 gives the losses of Trainer."""
    expected = recall(folder, f"{model_name}-{precision}")
    options = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 4, "pipeline_schedule": schedule}
    trainer, before = (
        ours(model_name, folder / "stages", device, precision, ddp_backend=backend, **options),
        Staged.num,
    )
    trainer.train()
    staged = Staged.num - before
    assert bool(staged) == (backend == "gloo"), f"{staged} transfers went through host memory over {backend}"
    figures = {"run": [2, 1, schedule, precision], "through host memory": staged}
    return {**figures, **check_close(losses_of(trainer), expected, device, precision)}


def check_transition(model_name: str, folder: Path, device: str, backend: str) -> Figures:
    """From K=2 to K=1 x R=2 while layers freeze: the losses of Trainer that freezes; what is saved is whole."""
    expected = recall(folder, f"{model_name}-frozen")
    blocks = 2 * NUM_LAYERS + 2
    before = Layout(NUM_LAYERS, 0, 2, 1, (0, blocks // 2, blocks), 2, "1f1b")
    after = Layout(NUM_LAYERS, NUM_FROZEN, 1, 2, (0, blocks), 1, "1f1b")
    plan = folder / f"plan-{model_name}.jsonl"
    if os.environ["RANK"] == "0":
        events = [{"event": "run", "step": 0, "layout": before.as_event()}]
        events += [{"event": "transition", "step": FREEZE_STEP, "to": after.as_event()}]
        plan.write_text("".join(json.dumps(event) + "\n" for event in events))
    options = {"pipeline_parallel_size": 2, "layout_plan": str(plan), "ddp_backend": backend}
    run = folder / f"transition-{model_name}"
    trainer = ours(model_name, run, device, "fp32", **options)
    torch.distributed.barrier()
    trainer.train()
    assert trainer.layout == after, f"the layout is {trainer.layout}"
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    moved = [e for e in read_events(str(run / EVENTS_FILE)) if e["event"] == "transition"]
    torch.distributed.barrier()
    if model_name == "bert":
        loaded = AutoModelForSequenceClassification.from_pretrained(str(folder / "saved"))
        own = dict(trainer.model.named_parameters())
        differing = [name for name, value in loaded.named_parameters() if not torch.equal(value, own[name].cpu())]
        assert not differing, f"{len(differing)} parameters were saved with other values: {differing[:3]}"
    figures = {"eval_loss": evaluated, "bytes moved": moved[0]["bytes_moved"], "seconds": moved[0]["seconds"]}
    return {**figures, **check_close(losses_of(trainer), expected, device, "fp32")}


def stages(folder: Path, device: str, precisions: Sequence[str], backend: str) -> dict[str, Callable[[], Figures]]:
    """The checks of two processes."""
    on = (folder, device, backend)
    schedules = {
        f"stages, {model_name}, {precision}, {schedule}": partial(check_stages, model_name, precision, schedule, *on)
        for precision in precisions
        for model_name, schedule in (("bert", "1f1b"), ("vit", "gpipe"))
    }
    return {
        **schedules,
        "transition, bert": partial(check_transition, "bert", *on),
        "transition, vit": partial(check_transition, "vit", *on),
    }


# ---- running them ----


def remember(folder: Path, name: str, losses: Sequence[float]) -> None:
    (folder / f"{name}.losses.json").write_text(json.dumps(list(losses)))


def recall(folder: Path, name: str) -> list[float]:
    path = folder / f"{name}.losses.json"
    assert path.exists(), f"the run of plain Trainer ({name}) gave no losses"
    losses: list[float] = json.loads(path.read_text())
    return losses


def run_checks(checks: Mapping[str, Callable[[], Figures]], output: Path | None) -> None:
    """Run every check and write a line for each; in one process a failed one does not keep the others from running.

    Of two processes one that fails ends the launch, and so the other, which may be waiting for it.
    """
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            line = {"check": name, "passed": True, **check()}
        except Exception as error:
            traceback.print_exc()
            line = {"check": name, "passed": False, "error": f"{type(error).__name__}: {error}"}
        line["took_s"] = round(time.perf_counter() - start, 2)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if not line["passed"] and "RANK" in os.environ:
            sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=("alone", "stages"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", default="", help="a part of the names of the checks to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transfers._Staged = Staged  # type: ignore[misc]
    if options.device == "cpu":
        # What goes through host memory on a GPU does so here: the same code.
        transfers._goes_through_host = lambda transfer: True
    output = options.folder / f"{options.group}-{options.backend}.jsonl"
    if options.group == "alone":
        checks = alone(options.folder, options.device, options.precisions)
    else:
        checks = stages(options.folder, options.device, options.precisions, options.backend)
    checks = {name: check for name, check in checks.items() if options.only in name}
    run_checks(checks, output if os.environ.get("RANK", "0") == "0" else None)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        let_group_threads_finish()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
