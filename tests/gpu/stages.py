"""Checks of several processes: stages, groups, memory in flight, resume, transitions, an out-of-memory."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForSequenceClassification

from hf_pipetransformer.comm import transfers
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import Placement
from tests.gpu.runs import (
    FREEZE_STEP,
    NUM_FROZEN,
    NUM_LAYERS,
    NUM_STEPS,
    Figures,
    SavedBytes,
    check_close,
    losses_of,
    ours,
    recall,
)


Checks = dict[str, Callable[[], Figures]]
HALF, TIMEOUT = NUM_STEPS // 2, 60
"""The step that is saved, and `pipeline_timeout` of all runs in seconds."""
MOST_GROUP_BYTES = 4 * 2**30


@dataclass(frozen=True)
class On:
    """Folder with what plain Trainer gave, device and backend of the checks."""

    folder: Path
    device: str
    backend: str


class Staged(transfers._Staged):
    """Count of the transfers of this process that go through host memory."""

    num = 0

    def __init__(self, transfer: transfers.Transfer) -> None:
        super().__init__(transfer)
        Staged.num += 1


def check_stages(
    model_name: str, precision: str, schedule: str, on: On, pipeline_size: int = 2, **options: Any
) -> Figures:
    """K stages give the losses of Trainer."""
    expected = recall(on.folder, f"{model_name}-{precision}")
    num_replicas = int(os.environ["WORLD_SIZE"]) // pipeline_size
    options = {
        "pipeline_parallel_size": pipeline_size, "pipeline_parallel_num_microbatches": 4,
        "pipeline_schedule": schedule, "ddp_backend": on.backend, **options,
    }  # fmt: skip
    trainer, before = ours(model_name, on.folder / "stages", on.device, precision, **options), Staged.num
    trainer.train()
    staged = Staged.num - before
    assert bool(staged) == (on.backend == "gloo"), f"{staged} transfers went through host memory over {on.backend}"
    figures = {"run": [pipeline_size, num_replicas, schedule, precision], "through host memory": staged}
    return {**figures, **check_close(losses_of(trainer), expected, on.device, precision)}


def check_groups(on: On) -> Figures:
    """Memory that communicators take: of the device over NCCL, of the process in other cases."""
    trainer = ours("bert", on.folder / "groups", on.device, "fp32", pipeline_parallel_size=2, ddp_backend=on.backend)
    figures: Figures = {}
    for name, placement in (("K=2", Placement(2, 1, "loop")), ("K=2, V=2", Placement(2, 2, "loop"))):
        before = free_bytes(on.device)
        groups = trainer.topology.groups(placement)
        assert groups.links, f"{name} has no links"
        figures[f"MiB of the groups of {name}"] = round((before - free_bytes(on.device)) / 2**20, 1)
    taken = sum(figures.values())
    assert taken < MOST_GROUP_BYTES / 2**20, f"groups take {taken} MiB"
    return figures


def free_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]
    return -int(psutil.Process().memory_info().rss)


def check_in_flight(on: On) -> Figures:
    """Memory of this rank in bf16 with 1, 2 and 4 micro-batches in flight; the losses stay those of Trainer."""
    expected, figures = recall(on.folder, "bert-bf16"), {}
    for num_microbatches in (1, 2, 4):
        trainer = ours(
            "bert", on.folder / "flight", on.device, "bf16", pipeline_parallel_size=2, pipeline_schedule="gpipe",
            pipeline_parallel_num_microbatches=num_microbatches, ddp_backend=on.backend,
        )  # fmt: skip
        saved = SavedBytes(trainer)
        if on.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with saved.hooks():
            trainer.train()
        most = torch.cuda.max_memory_allocated() if on.device == "cuda" else saved.most
        figures[f"MiB at most, {num_microbatches} in flight"] = round(most / 2**20, 2)
        figures |= check_close(losses_of(trainer), expected, on.device, "bf16")
    return figures


def check_resume(on: On, pipeline_size: int = 2) -> Figures:
    """A run that goes on from its checkpoint gives the losses of one that was not interrupted."""
    expected, folder = recall(on.folder, "bert-fp32"), on.folder / "resumed"
    options = {
        "pipeline_parallel_size": pipeline_size, "pipeline_parallel_num_microbatches": 4, "ddp_backend": on.backend,
        "save_strategy": "steps", "save_steps": HALF,
    }  # fmt: skip
    ours("bert", folder, on.device, "fp32", **options).train()
    trainer = ours("bert", folder, on.device, "fp32", **options)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    return {"resumed at step": HALF, **check_close(losses_of(trainer), expected, on.device, "fp32")}


def check_logits(on: On) -> Figures:
    """Predictions through two stages, with logits, are those of one process."""
    expected = torch.tensor(recall(on.folder, "vit-logits"))
    trainer = ours("vit", on.folder / "logits", on.device, "fp32", pipeline_parallel_size=2, ddp_backend=on.backend)
    found = torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions).flatten()
    assert found.shape == expected.shape, f"{tuple(found.shape)} logits, expected {tuple(expected.shape)}"
    largest = float((found - expected).abs().max() / expected.abs().max())
    assert largest <= 1e-4, f"logits differ by {largest:.3g} (relative)"
    return {"largest relative difference": float(f"{largest:.3g}")}


def check_eight_bits(on: On) -> Figures:
    """bitsandbytes' AdamW, where it is installed, gives the losses of Trainer with it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"skipped": "bitsandbytes is not installed"}
    expected = recall(on.folder, "bert-8bit")
    options = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 4, "optim": "adamw_bnb_8bit"}
    trainer = ours("bert", on.folder / "8bit", on.device, "fp32", ddp_backend=on.backend, **options)
    trainer.train()
    return check_close(losses_of(trainer), expected, on.device, "fp32")


def check_transition(model_name: str, on: On) -> Figures:
    """From K=2 to K=1 x R=2 while layers freeze: the losses of Trainer that freezes; what is saved is whole."""
    folder = on.folder
    expected = recall(folder, f"{model_name}-frozen")
    blocks = 2 * NUM_LAYERS + 2
    before = Layout(NUM_LAYERS, 0, 2, 1, (0, blocks // 2, blocks), 2, "1f1b")
    after = Layout(NUM_LAYERS, NUM_FROZEN, 1, 2, (0, blocks), 1, "1f1b")
    plan = folder / f"plan-{model_name}.jsonl"
    events = [{"event": "run", "step": 0, "layout": before.as_event()}]
    events += [{"event": "transition", "step": FREEZE_STEP, "to": after.as_event()}]
    # Every rank puts the same whole file there: a rank that reads it does not wait for another to write it.
    own = plan.with_suffix(f".{os.environ['RANK']}")
    own.write_text("".join(json.dumps(event) + "\n" for event in events))
    own.replace(plan)
    options = {"pipeline_parallel_size": 2, "layout_plan": str(plan), "ddp_backend": on.backend}
    run = folder / f"transition-{model_name}"
    trainer = ours(model_name, run, on.device, "fp32", **options)
    torch.distributed.barrier()
    trainer.train()
    assert trainer.layout == after, f"the layout is {trainer.layout}"
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    moved = [e for e in read_events(str(run / EVENTS_FILE)) if e["event"] == "transition"]
    torch.distributed.barrier()
    if model_name == "bert":
        loaded = AutoModelForSequenceClassification.from_pretrained(str(folder / "saved"))
        trained = dict(trainer.model.named_parameters())
        differing = [name for name, value in loaded.named_parameters() if not torch.equal(value, trained[name].cpu())]
        assert not differing, f"{len(differing)} parameters were saved with other values: {differing[:3]}"
    figures = {"eval_loss": evaluated, "bytes moved": moved[0]["bytes_moved"], "seconds": moved[0]["seconds"]}
    return {**figures, **check_close(losses_of(trainer), expected, on.device, "fp32")}


def check_out_of_memory(on: On) -> Figures:
    """An out-of-memory on rank 1 ends both ranks, and rank 0 writes its cause to the events file."""
    folder = on.folder / "shortage"
    trainer = ours(
        "bert", folder, on.device, "fp32", pipeline_parallel_size=2, pipeline_parallel_num_microbatches=2,
        pipeline_timeout=TIMEOUT, ddp_backend=on.backend,
    )  # fmt: skip
    if os.environ["RANK"] == "1":
        trainer.model.classifier.register_forward_pre_hook(partial(_run_short, trainer))
    start = time.monotonic()
    try:
        trainer.train()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("the run went on after an out-of-memory on rank 1")
    seconds = time.monotonic() - start
    assert "planted shortage" in found, f"rank {os.environ['RANK']} ended with {found}"
    assert seconds < TIMEOUT + 5, f"ended after {seconds:.0f} s"
    faults = [event for event in read_events(str(folder / EVENTS_FILE)) if event["event"] == "fault"]
    if os.environ["RANK"] == "0":
        assert faults and faults[-1]["out_of_memory"] is True, f"the events file has {faults}"
    return {"seconds": round(seconds, 1)}


def _run_short(trainer: Any, *_: Any) -> None:
    if trainer.state.global_step == HALF:
        raise torch.OutOfMemoryError("planted shortage")


def stages(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """The checks of two processes. What communicators take is measured before any other run makes them."""
    on = On(folder, device, backend)
    named = [
        (model_name, precision, schedule)
        for precision in precisions
        for model_name, schedule in (("bert", "1f1b"), ("vit", "gpipe"), ("llama", "1f1b"))
    ]
    named += [("bert", "fp32", schedule) for schedule in ("interleaved_1f1b", "zb_h1", "zb_v")]
    return {
        "groups": partial(check_groups, on),
        **{f"stages, {', '.join(names)}": partial(check_stages, *names, on) for names in named},
        **({"in flight, bf16": partial(check_in_flight, on)} if "bf16" in precisions else {}),
        "resume, fp32": partial(check_resume, on),
        "logits, fp32": partial(check_logits, on),
        "8-bit optimizer, fp32": partial(check_eight_bits, on),
        "transition, bert": partial(check_transition, "bert", on),
        "transition, vit": partial(check_transition, "vit", on),
    }


def one_queue(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """Two processes under CUDA_DEVICE_MAX_CONNECTIONS=1."""
    on = On(folder, device, backend)
    return {
        f"one queue, fp32, {schedule}": partial(check_stages, "bert", "fp32", schedule, on)
        for schedule in ("gpipe", "1f1b", "zb_v")
    }


def shortage(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """Two processes whose groups are of no use afterwards."""
    return {"out of memory on rank 1": partial(check_out_of_memory, On(folder, device, backend))}


def four(folder: Path, device: str, precisions: Sequence[str], backend: str) -> Checks:
    """The checks of four processes."""
    on = On(folder, device, backend)
    return {
        f"four, K={size} x R={4 // size}, {precision}": partial(
            check_stages, "bert", precision, "1f1b", on, pipeline_size=size
        )
        for precision in precisions
        for size in (2, 4)
    }
