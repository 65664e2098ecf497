"""Beside what a user would pick instead: step time and memory of ways to train one model on two devices.

    DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target /tmp/peers deepspeed torchgpipe \
        hjson py-cpuinfo msgpack einops ninja
    PEERS_PACKAGES=/tmp/peers python -m scripts.bench 'peers-*'

Three models are trained at equal batch by this package, by Trainer with DDP, by FSDP2, by the schedules of
`torch.distributed.pipelining`, by DeepSpeed's `PipelineModule` and by a naive split; `torchgpipe` and our `GPipe` cut
the model in one process. All begin with the same weights and see the same rows, with AdamW, clipping and a constant
learning rate; losses of all that claim the same updates are compared. DeepSpeed and torchgpipe are no dependencies:
without the folder above their rows say that they are missing.

Contenders take turns, each in new processes. A step is the mean of those after the first, of the slower process.
Memory is the peak of a process's anonymous memory after the first step, beyond what it had before it loaded the model.
The others' pipelines are cut by hand into stages of equal work. Rows have one length, because
`torch.distributed.pipelining` can have no other.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from functools import partial
from importlib.metadata import distributions
from typing import Any

from safetensors.torch import save_file

from .contenders import NAIVE, NUM_STEPS, SUBJECTS, Contender, Run, contenders
from .measure import (
    KEEPS_FREED,
    RETURNS_FREED,
    PeakMemory,
    Settings,
    alternate,
    experiment,
    largest_difference,
    launch_all,
    ratios,
    report,
    summary,
)


EXACT = 1e-5
"""Largest relative difference of losses between contenders with the same updates."""
MEMORY = "peak MiB of each process"
PRELOADED = ("hf_pipetransformer.trainer.mixin", "torch._dynamo", "torch.distributed.fsdp", "peft")
"""Modules that a process would import while it trains."""


def work(name: str, model: str, folder: str, is_memory: bool) -> dict[str, Any]:
    """One process of a contender."""
    contender = contenders()[name]
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.append(os.environ.get("PEERS_PACKAGES", ""))
    for module in (*PRELOADED, contender.library or "torch.distributed.pipelining"):
        importlib.import_module(module)
    memory = PeakMemory("start") if is_memory else None
    run = Run(contender, SUBJECTS[model], folder, memory)
    found: dict[str, Any] = {"losses": contender.train(run)}
    ends = run.ends[contender.num_skipped - 1 :]
    found["seconds"] = (ends[-1] - ends[0]) / (len(ends) - 1)
    if memory is not None:
        memory.end()
        found["bytes"] = memory.peaks["training"]
    return found


def turn(name: str, model: str, folder: str, is_memory: bool) -> list[dict[str, Any]]:
    """Run a contender once; what its processes found, or the first error."""
    environment = RETURNS_FREED if is_memory else KEEPS_FREED
    try:
        number = contenders()[name].processes
        found = launch_all(work, number, name, model, folder, is_memory, minutes=3, environment=environment)
    except Exception as error:
        found = [{"error": str(error).strip().splitlines()[-1]}]
    report(f"{model}, {name}", found)
    return found


def row_of(contender: Contender, ranks: list[dict[str, Any]], losses: list[float]) -> dict[str, Any]:
    """Memory of a contender, and how its losses differ; or why it does not run.

    Raises:
        RuntimeError: Trainer or this package fails, or computes other losses.
    """
    row: dict[str, Any] = {"processes": contender.processes, "updates": contender.updates}
    reason = ranks[0].get("error", "")
    if not reason:
        row[MEMORY] = [round(each["bytes"] / 2**20) for each in ranks]
        if contender.updates == "exact":
            difference = row["largest relative difference of losses"] = largest_difference(ranks[0]["losses"], losses)
            reason = "" if difference <= EXACT else f"other losses, by {difference:.1e}"
    if reason and contender.name.startswith(("ours", "Trainer", NAIVE)):
        raise RuntimeError(f"{contender.name}: {reason}")
    return {**row, "does not run": reason} if reason else row


def winners(rows: dict[str, Any]) -> dict[str, str]:
    """The exact contenders that are the fastest, have the smallest largest process, or the least product of both."""
    exact = [name for name, row in rows.items() if row["updates"] == "exact" and "does not run" not in row]
    seconds = {name: rows[name]["seconds of a step"]["median"] for name in exact}
    # A process that stands for two devices holds what both do.
    memory = {name: max(rows[name][MEMORY]) for name in exact if rows[name]["processes"] == 2}
    product = {name: size * seconds[name] for name, size in memory.items()}
    kinds = {"fastest": seconds, "least memory": memory, "least product": product}
    return {kind: min(values, key=values.__getitem__) for kind, values in kinds.items()}


def beside(model: str, settings: Settings) -> dict[str, Any]:
    """Memory and losses of every contender once, then the time of those that run; quick of six."""
    subject, known = SUBJECTS[model], contenders()
    known = settings.of(known, {name: known[name] for name in list(known)[:: len(known) // 5]})
    whole, inputs, labels = subject.make(settings)
    number = subject.batch * max(each.num_steps for each in known.values())
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        whole.float().save_pretrained(f"{folder}/model")
        save_file({"inputs": inputs[:number], "labels": labels[:number]}, f"{folder}/rows.safetensors")
        first = {name: turn(name, model, folder, True) for name in known}
        losses = first[NAIVE][0].get("losses", [])
        rows = {name: row_of(known[name], found, losses) for name, found in first.items()}
        running = [name for name, row in rows.items() if "does not run" not in row]
        timed = alternate({name: partial(turn, name, model, folder, False) for name in running}, settings.of(5, 1))
    for name, found in timed.items():
        if errors := [ranks[0]["error"] for ranks in found if "error" in ranks[0]]:
            raise RuntimeError(f"{name} ran once, then not: {errors[0]}")
    seconds = {name: [max(rank["seconds"] for rank in ranks) for ranks in found] for name, found in timed.items()}
    for name in running:
        rows[name]["seconds of a step"] = summary(seconds[name])
        rows[name]["of the naive split's"] = summary(ratios(seconds[name], seconds[NAIVE]))
    others = distributions(path=[os.environ.get("PEERS_PACKAGES", "")])
    return {
        "model": subject.title, "steps": NUM_STEPS - 1, "winners": winners(rows), "contenders": rows,
        "packages": {each.name: each.version for each in others if each.name in ("deepspeed", "torchgpipe")},
    }  # fmt: skip


for each_model, each_subject in SUBJECTS.items():
    measure = partial(beside, each_model)
    measure.__doc__ = f"Step time and memory beside what a user would pick instead: {each_subject.title}."
    experiment("peers.json", section=each_model, name=f"peers-{each_model}", minutes=25, quick_minutes=4)(measure)
