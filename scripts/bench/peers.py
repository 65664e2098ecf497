"""Beside what a user would pick instead: step time and memory of ways to train one model on two devices.

    DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target /tmp/peers deepspeed torchgpipe \
        hjson py-cpuinfo msgpack einops ninja
    PEERS_PACKAGES=/tmp/peers python -m scripts.bench 'peers-*'

Three models are trained at equal batch by this package, by Trainer with DDP, by FSDP2, by the schedules of
`torch.distributed.pipelining`, by DeepSpeed's `PipelineModule` and by a naive split; `torchgpipe` and our `GPipe` cut
the model in one process. All begin with the same weights and see the same rows, with AdamW, clipping and a constant
learning rate; losses of all that claim the same updates are compared. DeepSpeed and torchgpipe are no dependencies:
without the folder above their rows say that they are missing.

A process of one thread forks two for each contender, so that nothing of one is left for the next; contenders take
turns. A step is the mean of those after the first, of the slower process. Memory is the peak of a process's anonymous
memory after the first step, beyond what it had before it loaded the model. The others' pipelines are cut by hand into
stages of equal work. Rows have one length, because `torch.distributed.pipelining` can have no other.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing import start_processes

from .contenders import (
    GIVEN,
    NAIVE,
    NUM_STEPS,
    SUBJECTS,
    Contender,
    Run,
    contenders,
)
from .measure import (
    RETURNS_FREED,
    Settings,
    alternate,
    experiment,
    largest_difference,
    launch,
    ratios,
    report,
    summary,
)


EXACT = 1e-5
"""Largest relative difference of losses between contenders with the same updates."""
SECONDS = 180
"""Time limit of a contender."""
MEMORY = "peak MiB of each process"
PRELOADED = (
    "hf_pipetransformer.trainer.mixin", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "peft",
)  # fmt: skip
"""Modules that a process would import while it trains."""


# ---- a launch ----


def rank(number: int, contender: Contender, make: Callable[[], Run]) -> None:
    """One process of a contender; its figures go to a file."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = (number, number, contender.processes, contender.processes)
    os.environ.update(zip(names, map(str, values), strict=True), DS_ACCELERATOR="cpu")
    if contender.library:
        sys.path.append(os.environ.get("PEERS_PACKAGES", ""))
        importlib.import_module(contender.library)
    run = make()
    memory = run.memory
    with open(f"{run.folder}/log-{number}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    found: dict[str, Any] = {"losses": contender.train(run)}
    ends = run.ends[contender.num_skipped - 1 :]
    found["seconds"] = (ends[-1] - ends[0]) / (len(ends) - 1)
    if memory is not None:
        memory.end()
        found["bytes"] = memory.peaks["training"]
    Path(f"{run.folder}/{number}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()


def fork(contender: Contender, make: Callable[[], Run], folder: str) -> list[dict[str, Any]]:
    """Run the processes of a contender; what each found, or the first error."""
    deadline = time.monotonic() + SECONDS
    # Its own: the launch has one store, where ranks would find the addresses of the contender before them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    ranks = start_processes(rank, (contender, make), contender.processes, join=False, start_method="fork")
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"has not ended after {SECONDS} s")
    except Exception as error:
        for process in ranks.processes:
            process.kill()
        return [{"error": str(error).strip().splitlines()[-1]}]
    return [json.loads(Path(f"{folder}/{number}.json").read_text()) for number in range(contender.processes)]


def work(model: str, folder: str, names: list[str], rounds: int, is_memory: bool) -> dict[str, Any]:
    """Contenders in turns, in a process that never trains itself; what their ranks found, by round."""
    for name in PRELOADED:
        importlib.import_module(name)
    GIVEN.update(load_file(f"{folder}/rows.safetensors"))
    # In no variable: a contender that keeps a part of the model frees the rest.
    GIVEN["model"] = SUBJECTS[model].kind.from_pretrained(f"{folder}/model")
    # They stay: what a contender freed of them would make up for what it takes.
    GIVEN["weights"] = [parameter.data for parameter in GIVEN["model"].parameters()]

    def turn(contender: Contender) -> list[dict[str, Any]]:
        found = fork(contender, lambda: Run(contender, SUBJECTS[model], folder, is_memory), folder)
        report(f"{model}, {contender.name}", found)
        return found

    return alternate({name: partial(turn, contenders()[name]) for name in names}, rounds)


# ---- experiments ----


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
    ours = {name: value for name, value in seconds.items() if "K=2" in name}
    kinds = {"fastest": seconds, "least memory": memory, "least product": product, "fastest of our pipelines": ours}
    return {kind: min(values, key=values.__getitem__) for kind, values in kinds.items()}


def beside(model: str, settings: Settings) -> dict[str, Any]:
    """Memory and losses of every contender once, then the time of those that run."""
    subject, known, rounds = SUBJECTS[model], contenders(), settings.of(5, 1)
    whole, inputs, labels = subject.make(settings)
    number = subject.batch * max(each.num_steps for each in known.values())
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        whole.float().save_pretrained(f"{folder}/model")
        save_file({"inputs": inputs[:number], "labels": labels[:number]}, f"{folder}/rows.safetensors")
        first = launch(work, 1, model, folder, list(known), 1, True, environment=RETURNS_FREED)
        losses = first[NAIVE][0][0].get("losses", [])
        rows = {name: row_of(known[name], found[0], losses) for name, found in first.items()}
        running = [name for name, row in rows.items() if "does not run" not in row]
        timed = launch(work, 1, model, folder, running, rounds, False)
    for name, found in timed.items():
        if errors := [ranks[0]["error"] for ranks in found if "error" in ranks[0]]:
            raise RuntimeError(f"{name} ran once, then not: {errors[0]}")
    seconds = {name: [max(rank["seconds"] for rank in ranks) for ranks in found] for name, found in timed.items()}
    for name in running:
        rows[name]["seconds of a step"] = summary(seconds[name])
        rows[name]["of the naive split's"] = summary(ratios(seconds[name], seconds[NAIVE]))
    others = distributions(path=[os.environ.get("PEERS_PACKAGES", "")])
    return {
        "model": subject.title, "samples of a step": subject.batch, "micro-batches": subject.num_microbatches,
        "rounds": rounds, "steps": NUM_STEPS - 1, "winners": winners(rows), "contenders": rows,
        "packages": {each.name: each.version for each in others if each.name in ("deepspeed", "torchgpipe")},
    }  # fmt: skip


def register(model: str) -> None:
    """Make an experiment of a model."""

    def measure(settings: Settings) -> dict[str, Any]:
        return beside(model, settings)

    measure.__doc__ = f"Step time and memory beside what a user would pick instead: {SUBJECTS[model].title}."
    experiment("peers.json", section=model, name=f"peers-{model}", minutes=6, quick_minutes=2)(measure)


for each_model in SUBJECTS:
    register(each_model)


# ---- the page ----


def markdown(results: dict[str, Any]) -> str:
    """A table of the contenders of each model, the fastest first, and one of the exact contenders that win."""
    parts, best = [], ["| | fastest | least memory | least product of both |", "|---|---|---|---|"]
    for found in (results[model] for model in SUBJECTS if model in results):
        lines, failed = ["| | step | over the naive split | peak memory | updates |", "|---|---|---|---|---|"], []
        seconds = {name: row.get("seconds of a step", {}).get("median") for name, row in found["contenders"].items()}
        for name, row in sorted(found["contenders"].items(), key=lambda item: seconds[item[0]] or 0.0):
            if "does not run" in row:
                failed.append(f"| {name} | does not run: {row['does not run']} | | | |")
                continue
            form = "{median:.2f} [{min:.2f}, {max:.2f}]"
            step, over = (form.format(**row[key]) for key in ("seconds of a step", "of the naive split's"))
            memory = " and ".join(map(str, row[MEMORY]))
            lines.append(f"| {name} | {step} s | {over} | {memory} MiB | {row['updates']} |")
        parts.append("\n".join([f"{found['model']}:", "", *lines, *failed]))
        won = [found["winners"][kind] for kind in ("fastest", "least memory", "least product")]
        best.append(f"| {found['model'].split(',')[0]} | {' | '.join(won)} |")
    return "\n\n".join([*parts, "\n".join(best)]) + "\n"
