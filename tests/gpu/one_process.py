"""Checks of one process: exactness, freezing, the cache, the start of a run, attention, memory, `Pipe`.

Each check gives figures, or says with an AssertionError what it found and what it expected. On the CPU the same lines
of code run, with other figures.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

import hf_pipetransformer
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.pipe.stages import WithDevice
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from tests.gpu.runs import (
    BATCH_SIZE,
    FREEZING,
    MODELS,
    NUM_LAYERS,
    NUM_SAMPLES,
    TOLERANCES,
    ClassWeights,
    ClassWeightsInParts,
    Figures,
    FrozenBits,
    SavedBytes,
    bert,
    check_close,
    common,
    llama,
    losses_of,
    ours,
    plain,
    plain_losses,
    recall,
    remember,
)


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
    """Count how often a thread beside the main one pins memory inside."""
    tensors: Any = torch.Tensor
    count, real = [0], tensors.pin_memory

    def pin_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        count[0] += threading.current_thread() is not threading.main_thread()
        return real(tensor, *args, **kwargs)

    tensors.pin_memory = pin_memory
    try:
        yield count
    finally:
        tensors.pin_memory = real


def check_start(precision: str, folder: Path, device: str) -> Figures:
    """The start measures this device with the run's own micro-batch."""
    trainer = ours("vit", folder / f"start-{precision}", device, precision, pipeline_parallel_num_microbatches=2)
    trainer.train()
    run = next(e for e in read_events(str(folder / f"start-{precision}" / EVENTS_FILE)) if e["event"] == "run")
    assert run["measured_samples"] == BATCH_SIZE // 2, f"measured with {run['measured_samples']} samples"
    return {"measured samples": run["measured_samples"]}


def check_whole_loss(precision: str, folder: Path, device: str) -> Figures:
    """A loss that does not decompose over samples is Trainer's with micro-batches too."""
    reference = plain("vit", folder, device, precision, ClassWeights)
    reference.train()
    expected = losses_of(reference)
    remember(folder, f"weighted-{precision}", expected)
    options = {"pipeline_parallel_num_microbatches": 2}
    trainer = ours("vit", folder / "weighted", device, precision, ClassWeightsInParts, **options)
    trainer.train()
    return check_close(losses_of(trainer), expected, device, precision)


class Skipping(BertForSequenceClassification):
    """Its last layer reads what its first one gave, which lies on another stage."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers, kept = self.bert.encoder.layer, []
        first, last = layers[0].forward, layers[-1].forward

        def keeping(*args: Any, **kwargs: Any) -> Any:
            output = first(*args, **kwargs)
            kept.append(_hidden(output))
            return output

        layers[0].forward = keeping
        layers[-1].forward = lambda hidden, *args, **kwargs: last(hidden + kept.pop(), *args, **kwargs)


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def check_refusal(folder: Path, device: str) -> Figures:
    """A model that computes other numbers in stages is refused before its first step, on this device."""
    model, rows = bert()
    options: dict[str, Any] = {
        "freeze_policy": "none", "activation_cache": "off", "pipeline_parallel_num_microbatches": 2,
    }  # fmt: skip
    args = PipeTransformerArguments(**common(folder / "refused", device, "fp32", 1), **options)
    trainer = hf_pipetransformer.PipeTransformerTrainer(Skipping(model.config), args, train_dataset=rows)
    try:
        trainer.train()
    except ValueError as error:
        assert trainer.state.global_step == 0, f"refused after {trainer.state.global_step} steps"
        return {"refusal": str(error)[:120]}
    raise AssertionError("a layer that reads another stage's activation was trained, expected a refusal")


def check_attention(folder: Path, device: str) -> Figures:
    """A bf16 model with FlashAttention-2, where it is installed, is checked and trained as by Trainer."""
    has_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if has_flash else "sdpa"
    found = []
    own_options: dict[str, Any] = {"pipeline_parallel_num_microbatches": 2}
    kinds: list[tuple[Any, Any, dict[str, Any]]] = [
        (Trainer, TrainingArguments, {}),
        (hf_pipetransformer.PipeTransformerTrainer, PipeTransformerArguments, own_options),
    ]
    for kind, arguments, options in kinds:
        model, rows = llama(attn_implementation=attention)
        args = arguments(**common(folder / "attention", device, "bf16", 1), **options)
        trainer = kind(model.to(torch.bfloat16), args, train_dataset=rows)
        trainer.train()
        found.append(losses_of(trainer))
    return {"attention": attention, **check_close(found[1], found[0], device, "bf16")}


def note_plain_runs(folder: Path, device: str) -> Figures:
    """Note what Trainer gives, for the checks of several processes: logits, and losses with an 8-bit optimizer."""
    trainer = plain("vit", folder, device, "fp32")
    logits = trainer.predict(trainer.train_dataset[:10]).predictions
    remember(folder, "vit-logits", logits.flatten().tolist())
    if importlib.util.find_spec("bitsandbytes") is not None:
        eight_bits = plain("bert", folder, device, "fp32", optim="adamw_bnb_8bit")
        eight_bits.train()
        remember(folder, "bert-8bit", losses_of(eight_bits))
    return {"logits": int(logits.size)}


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


def alone(
    folder: Path, device: str, precisions: Sequence[str], backend: str = "gloo"
) -> dict[str, Callable[[], Figures]]:
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
        **{f"whole loss, {each}": partial(check_whole_loss, each, folder, device) for each in precisions},
        "refusal": partial(check_refusal, folder, device),
        **({"attention, bf16": partial(check_attention, folder, device)} if "bf16" in precisions else {}),
        "plain runs": partial(note_plain_runs, folder, device),
        "memory": partial(check_memory, folder, device),
        **{f"pipe, {mode}": partial(check_pipe, mode, device) for mode in ("always", "never")},
    }
