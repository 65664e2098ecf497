"""Train a list of tiny models for three steps each and write down what came out.

`plain`: Trainer in one process; `parts`: also our trainer there, with two micro-batches. `split`: two stages on two
processes; `shared`: two replicas of one. `defaults`: our trainer with all its defaults on two processes; `replicas`:
Trainer on two. `frozen`: both trainers in one process for two epochs, with a part of the model frozen.

Each rank notes `<name>.<mode>`, rank 0 also writes the weights. After a model the ranks look whether
both came to the same end in order: where they did not, the launch ends, and whoever started it goes on in another one
with the next model. A model that takes too long ends its launch with every thread's stack on stderr.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_pipetransformer.cache.frozen_parts import watching
from tests.distributed.scenarios import RANK, WORLD_SIZE, Lines, note, noted, scenario
from tests.support.every_family import Subject, build, collate, every_subject, rows
from tests.support.trainings import options_for


NUM_STEPS = 3
GLOBAL_BATCH = 8
SECONDS_A_MODEL = 120
"""Until a model counts as hanging; what one process takes is a second."""
SECONDS_FOR_THE_OTHER = 60
"""How long a rank waits for the other one to come to its end of a model."""


def options_of(folder: Path, world_size: int) -> dict[str, Any]:
    # With SGD a parameter whose gradient is zero by mathematics stays where it is: all weights can be compared.
    return options_for(
        folder, per_device_train_batch_size=GLOBAL_BATCH // world_size, max_steps=NUM_STEPS, optim="sgd",
        learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=1.0, logging_nan_inf_filter=False, seed=7,
    )  # fmt: skip


def freeze_largest(model: torch.nn.Module, share: float) -> str | None:
    """Freeze the module with most parameters that has less than a share of all; return its path."""
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
    bound = share * sizes.pop("")
    fitting = {name: size for name, size in sizes.items() if 0 < size < bound}
    if not fitting:
        return None
    chosen = max(fitting, key=lambda name: fitting[name])
    model.get_submodule(chosen).requires_grad_(False)
    return chosen


def trained(
    subject: Subject,
    folder: Path,
    pipeline_options: dict[str, Any] | None,
    as_released: bool,
    frozen_share: float | None = None,
) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """A trainer after three steps, or four in two epochs of a model with a frozen part, and its values before them."""
    model = build(subject, as_released)
    before = values_of(model)
    data = rows(subject, model, GLOBAL_BATCH * (NUM_STEPS if frozen_share is None else 2))
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    shared = {"train_dataset": data, "data_collator": partial(collate, pad=pad)}
    # Two launches run side by side, and no two runs may train in one folder.
    options = options_of(folder / "output" / subject.name, WORLD_SIZE)
    if frozen_share is not None:
        freeze_largest(model, frozen_share)
        options["max_steps"] = 4
    if pipeline_options is None:
        trainer = Trainer(model, TrainingArguments(**options), **shared)
    else:
        from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

        args = PipeTransformerArguments(**options, pipeline_timeout=30, **pipeline_options)
        trainer = PipeTransformerTrainer(model, args, **shared)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer, before


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and floating-point buffers."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {key: value.detach().clone() for key, value in state.items() if value.is_floating_point()}


def account(
    subject: Subject,
    folder: Path,
    name: str,
    pipeline_options: dict[str, Any] | None,
    as_released: bool = False,
    frozen_share: float | None = None,
) -> dict[str, Any]:
    """One training: what Trainer logged, or how it failed; the weights go into a file."""
    try:
        trainer, before = trained(subject, folder, pipeline_options, as_released, frozen_share)
    except Exception as error:
        return {"error": described(error)}
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found: dict[str, Any] = {"loss": [s["loss"] for s in steps], "grad_norm": [s["grad_norm"] for s in steps]}
    if pipeline_options is not None:
        found["is_left"] = trainer.pipeline_run.is_left_to_trainer
        layout = trainer.layout
        found["layout"] = None if layout is None else [layout.pipeline_size, layout.num_replicas]
    if RANK == 0:
        save_file(values_of(trainer.model), folder / f"{subject.name}.{name}.safetensors")
        if name.endswith("plain"):
            save_file(before, folder / f"{subject.name}.before.safetensors")
    return found


def described(error: BaseException) -> dict[str, Any]:
    """An error, and whether it was written for whoever reads it: raised on purpose, by the library."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    is_ours = "hf_pipetransformer" in Path(last.filename).parts and (last.line or "").startswith("raise")
    where = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}" for frame in frames]
    return {
        "type": type(error).__name__,
        "text": str(error),
        "is_sentence": isinstance(error, ValueError) and is_ours and len(str(error).split()) > 5,
        "where": where[-6:],
        "traceback": "".join(traceback.format_exception(error))[-6000:],
    }


def plain(subject: Subject, folder: Path) -> dict[str, Any]:
    return {"plain": account(subject, folder, "plain", None)}


def plain_and_in_parts(subject: Subject, folder: Path) -> dict[str, Any]:
    found = plain(subject, folder)
    if "error" not in found["plain"]:
        options = {"pipeline_parallel_num_microbatches": 2}
        found["micro-batches"] = account(subject, folder, "micro-batches", options)
    return found


def split(subject: Subject, folder: Path) -> dict[str, Any]:
    options = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}
    return {"split": account(subject, folder, "split", options)}


def shared(subject: Subject, folder: Path) -> dict[str, Any]:
    options = {"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 2}
    return {"shared": account(subject, folder, "shared", options)}


def defaults(subject: Subject, folder: Path) -> dict[str, Any]:
    return {"defaults": account(subject, folder, "defaults", {}, as_released=True)}


def replicas(subject: Subject, folder: Path) -> dict[str, Any]:
    return {"replicas": account(subject, folder, "replicas", None, as_released=True)}


FROZEN = {"most": 1.0, "half": 0.6}
"""Share of the parameters that the frozen module stays below."""


def frozen(subject: Subject, folder: Path) -> dict[str, Any]:
    """Trainings of both trainers with a part of the model frozen, and what ours said of it."""
    watching.WORTH = 0.0
    said = Lines()
    logging.getLogger("hf_pipetransformer").addHandler(said)
    found: dict[str, Any] = {}
    for what, share in FROZEN.items():
        found[f"{what} plain"] = account(subject, folder, f"{what} plain", None, frozen_share=share)
        if "error" in found[f"{what} plain"]:
            continue
        said.lines.clear()
        options = {"activation_cache": "on"}
        found[f"{what} stored"] = account(subject, folder, f"{what} stored", options, frozen_share=share)
        found[f"{what} said"] = {"lines": list(said.lines)}
    logging.getLogger("hf_pipetransformer").removeHandler(said)
    return found


MODES: dict[str, Callable[[Subject, Path], dict[str, Any]]] = {
    "plain": plain,
    "parts": plain_and_in_parts,
    "split": split,
    "shared": shared,
    "defaults": defaults,
    "replicas": replicas,
    "frozen": frozen,
}


@scenario
def train_all(folder: Path, listed: str, mode: str) -> None:
    """Train the listed models in one of `MODES`."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    known = {subject.name: subject for subject in every_subject()}
    for name in json.loads(Path(listed).read_text()):
        faulthandler.dump_traceback_later(SECONDS_A_MODEL, exit=True)
        start = time.monotonic()
        note(folder, f"{name}.{mode}.begun", {})
        found = MODES[mode](known[name], folder)
        found["seconds"] = round(time.monotonic() - start, 2)
        faulthandler.cancel_dump_traceback_later()
        note(folder, f"{name}.{mode}", found)
        if WORLD_SIZE > 1 and not both_in_order(noted(folder, f"{name}.{mode}", 1 - RANK), found):
            os._exit(3)  # The process groups may be in the middle of something.


def both_in_order(other: Path, found: dict[str, Any]) -> bool:
    """Whether both ranks trained, or were refused with the same words before they met."""
    deadline = time.monotonic() + SECONDS_FOR_THE_OTHER
    while not other.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return ends_of(found) == ends_of(json.loads(other.read_text())) and all(
        end is None or end[1] for end in ends_of(found).values()
    )


def ends_of(found: dict[str, Any]) -> dict[str, Any]:
    errors = {key: part.get("error") for key, part in found.items() if isinstance(part, dict)}
    return {key: error and [error["type"], error["is_sentence"], error["text"]] for key, error in errors.items()}
