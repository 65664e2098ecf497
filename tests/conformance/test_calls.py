"""Law: a script's own code is called as under Trainer; what is called otherwise is in a table, counted.

Not more often, nor earlier, nor with other arguments, nor on other rows; and what it holds changes as under Trainer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.conformance.calls_worker import note_calls
from tests.distributed.scenarios import run
from tests.support.calls import Call, Case, Departure, Script, calls_of, differences, from_json


# ---- one process ----


NOTHING: dict[str, Departure] = {}


def _read(own_module: int) -> dict[str, Departure]:
    """What comes out alike in two passes over its rows, and is read from then on, of 6 epochs."""
    why = "modules inside a stored part are not called where its record is read"
    return {"own module": Departure(why, missing=own_module)}


EPOCHS = 6
_COMPARED_TWICE = 10

EXCEPTIONS: dict[str, tuple[Case, dict[str, Departure]]] = {
    "nothing frozen": (Case("nothing frozen"), NOTHING),
    "nothing frozen, resumed": (Case("nothing frozen", resumes=True), NOTHING),
    "not stored": (Case("not stored"), NOTHING),
    "not stored, hooks inside": (Case("not stored", hooks_inside=True), NOTHING),
    "not stored, resumed": (Case("not stored", resumes=True), NOTHING),
    "not stored, stream": (Case("not stored", streams=True), NOTHING),
    # So small a model is not worth storing.
    "default": (Case("default"), NOTHING),
    "default, dropout": (Case("default", dropout=0.1), NOTHING),
    "default, the model's loss": (Case("default", has_own_loss=False), NOTHING),
    "default, whisper": (Case("default", "whisper"), NOTHING),
    "stored": (Case("stored", epochs=EPOCHS), _read(_COMPARED_TWICE)),
    "stored, dropout": (Case("stored", dropout=0.1, epochs=EPOCHS), _read(_COMPARED_TWICE)),
    "stored, the model's loss": (Case("stored", has_own_loss=False, epochs=EPOCHS), _read(_COMPARED_TWICE)),
    "stored, hooks inside": (Case("stored", hooks_inside=True, epochs=EPOCHS), _read(_COMPARED_TWICE)),
    "stored, lower layers": (Case("stored", "bert", epochs=EPOCHS), _read(5)),
    "stored, whisper": (Case("stored", "whisper", epochs=EPOCHS), _read(_COMPARED_TWICE)),
    "stored, resumed": (Case("stored", resumes=True, epochs=EPOCHS), _read(_COMPARED_TWICE)),
    # Stored from the second pass on.
    "stored, stream": (Case("stored", streams=True), _read(4)),
}
"""How calls in one process differ, by the script."""

# Of the same kind others stay.
SLOW = ("not stored, resumed", "default, the model's loss", "default, whisper", "stored, lower layers")


def _alone() -> list[Any]:
    """Return every script."""
    marks = {name: [pytest.mark.slow] if name in SLOW else [] for name in EXCEPTIONS}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in EXCEPTIONS.items()]


Plain = Callable[[Case, int], list[list[Call]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Calls of each rank under plain Trainer, with one process or with a process for each replica."""
    known: dict[tuple[str, int], list[list[Call]]] = {}

    def calls(case: Case, num_replicas: int = 1) -> list[list[Call]]:
        key = str(case.reference), num_replicas
        if key not in known:
            folder = tmp_path_factory.mktemp("plain")
            if num_replicas == 1:
                known[key] = [calls_of(case.reference, Trainer, folder)[0]]
            else:
                options = {"case": asdict(case.reference), "is_plain": True}
                known[key] = list(map(from_json, run(note_calls, folder, num_replicas, options)))
        return known[key]

    return calls


@pytest.mark.parametrize(("case", "departures"), _alone())
def test_one_process_calls_a_script_as_trainer_does(
    case: Case, departures: dict[str, Departure], plain: Plain, tmp_path: Path
) -> None:
    found, _ = calls_of(case, PipeTransformerTrainer, tmp_path)
    assert not (wrong := differences(found, plain(case)[0], departures)), "\n".join(wrong)


# ---- stages, replicas, micro-batches ----


SCRIPTS = {
    "nothing frozen": Case("nothing frozen"),
    "not stored": Case("not stored"),
    "stored": Case("stored"),
    "the model's loss": Case("stored", has_own_loss=False),
}

_M, _K = {"pipeline_parallel_num_microbatches": 2}, {"pipeline_parallel_size": 2, "elastic": False}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "M=2": (1, 1, _M),
    "K=2": (2, 1, {**_K, **_M}),
    "R=2": (1, 2, {"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 1}),
    "K=2, R=2": (2, 2, {**_K, **_M}),
}
"""K, R and the options of each layout."""

WHY = {
    "sampler": "set_epoch is called once an epoch, by Trainer twice",
    "data set": "a sample is read when its batch is due, by Trainer one batch ahead; rank 0 reads all of the "
    "first batch, and a pipeline's first rank reads for all of it",
    "transform": "it runs on what is read of the data set",
    "collator": "it puts together what is read of the data set",
    "compute_loss": "it is given the samples of all replicas",
    "held": "only on the last stage what comes behind the model's call moves it on",
    "gradients": "a rank has those of its stage, and those of a step that replicas share are noted before they add up",
    "loss function": "the last stage alone calls it, once for the samples of all replicas",
    "hook on root": "the last stage alone has outputs, of all replicas; by micro-batches for the model's own loss",
    "hook on head": "the last stage alone calls it, for all replicas, or by micro-batches for the model's own loss",
    "own module": "the start tries it with the model; then it is called as the head is",
    "logits": "the last stage alone has them if the loss is the model's",
    "metrics": "rank 0 alone computes them within the training",
    "on_log": "layout and hit rate are log entries of their own",
}
"""Why the calls of a piece differ on these layouts."""

COUNTS: dict[str, dict[str, tuple[str, str, str, str]]] = {
    "M=2": {
        "sampler": ("3/0", "3/0", "3/0", "3/0"),
        "data set": ("12/12", "12/12", "12/12", "12/12"),
        "transform": ("12/12", "12/12", "12/12", "12/12"),
        "collator": ("3/3", "3/3", "3/3", "3/3"),
        "hook on root": ("", "", "", "8/66"),
        "hook on head": ("", "", "", "8/56"),
        "own module": ("0/19", "0/19", "0/22", "6/54"),
        "on_log": ("", "", "0/4", "0/4"),
    },
    "K=2": {
        "sampler": ("3/0 3/0", "3/0 3/0", "3/0 3/0", "3/0 3/0"),
        "data set": ("12/12 68/0", "12/12 68/0", "12/12 68/0", "12/12 68/0"),
        "transform": ("12/12 68/0", "12/12 68/0", "12/12 68/0", "12/12 68/0"),
        "collator": ("3/3 17/0", "3/3 17/0", "3/3 17/0", "3/3 17/0"),
        "held": ("16/16 0/0", "16/16 0/0", "16/16 0/0", ""),
        "gradients": ("3/3 3/3", "3/3 0/0", "3/3 0/0", ""),
        "loss function": ("17/0 0/0", "17/0 0/0", "17/0 0/0", ""),
        "hook on root": ("17/0 0/0", "17/0 0/0", "17/0 0/0", "34/14 21/85"),
        "hook on head": ("34/0 0/0", "34/0 0/0", "34/0 0/0", "34/0 8/58"),
        "own module": ("17/19 0/5", "17/19 0/5", "17/22 0/5", "17/24 6/36"),
        "logits": ("", "", "", "8/0 0/0"),
        "metrics": ("0/0 3/0", "0/0 3/0", "0/0 3/0", "0/0 3/0"),
        "on_log": ("", "", "0/4 0/4", "0/4 0/4"),
    },
    "R=2": {
        "sampler": ("3/0 3/0", "3/0 3/0", "3/0 3/0", "3/0 3/0"),
        "data set": ("6/16 16/6", "6/16 16/6", "6/16 16/6", "6/16 16/6"),
        "transform": ("6/16 16/6", "6/16 16/6", "6/16 16/6", "6/16 16/6"),
        "collator": ("8/8 8/3", "8/8 8/3", "8/8 8/3", "8/8 8/3"),
        "compute_loss": ("17/17 17/17", "17/17 17/17", "17/17 17/17", ""),
        "gradients": ("3/3 3/3", "3/3 3/3", "3/3 3/3", ""),
        "loss function": ("17/17 17/17", "17/17 17/17", "17/17 17/17", ""),
        "hook on root": ("34/34 34/34", "34/34 34/34", "34/34 34/34", "8/33 8/33"),
        "hook on head": ("34/34 34/34", "34/34 34/34", "34/34 34/34", "0/20 0/20"),
        "own module": ("17/36 17/22", "17/36 17/22", "17/39 17/22", "6/40 6/21"),
        "metrics": ("0/0 3/0", "0/0 3/0", "0/0 3/0", "0/0 3/0"),
        "on_log": ("", "", "0/4 0/4", "0/4 0/4"),
    },
    "K=2, R=2": {
        "sampler": ("3/0 3/0 3/0 3/0", "3/0 3/0 3/0 3/0", "3/0 3/0 3/0 3/0", "3/0 3/0 3/0 3/0"),
        "data set": (
            "6/16 34/0 16/6 34/0",
            "6/16 34/0 16/6 34/0",
            "6/16 34/0 16/6 34/0",
            "6/16 34/0 16/6 34/0",
        ),
        "transform": (
            "6/16 34/0 16/6 34/0",
            "6/16 34/0 16/6 34/0",
            "6/16 34/0 16/6 34/0",
            "6/16 34/0 16/6 34/0",
        ),
        "collator": ("8/8 17/0 8/3 17/0", "8/8 17/0 8/3 17/0", "8/8 17/0 8/3 17/0", "8/8 17/0 8/3 17/0"),
        "compute_loss": ("17/17 17/17 17/17 17/17", "17/17 17/17 17/17 17/17", "17/17 17/17 17/17 17/17", ""),
        "held": ("16/16 0/0 16/16 0/0", "16/16 0/0 16/16 0/0", "16/16 0/0 16/16 0/0", ""),
        "gradients": ("3/3 3/3 3/3 3/3", "3/3 3/3 3/3 3/3", "3/3 3/3 3/3 3/3", ""),
        "loss function": ("17/0 17/17 17/0 17/17", "17/0 17/17 17/0 17/17", "17/0 17/17 17/0 17/17", ""),
        "hook on root": (
            "34/17 34/34 34/17 34/34",
            "34/17 34/34 34/17 34/34",
            "34/17 34/34 34/17 34/34",
            "34/14 26/90 34/14 26/90",
        ),
        "hook on head": (
            "34/0 34/34 34/0 34/34",
            "34/0 34/34 34/0 34/34",
            "34/0 34/34 34/0 34/34",
            "34/0 18/68 34/0 18/68",
        ),
        "own module": (
            "17/19 17/22 17/5 17/22",
            "17/19 17/22 17/5 17/22",
            "17/22 17/22 17/5 17/22",
            "17/24 9/39 17/5 9/39",
        ),
        "logits": ("", "", "", "8/0 0/0 8/0 0/0"),
        "metrics": ("0/0 3/0 3/0 3/0", "0/0 3/0 3/0 3/0", "0/0 3/0 3/0 3/0", "0/0 3/0 3/0 3/0"),
        "on_log": ("", "", "0/4 0/4 0/4 0/4", "0/4 0/4 0/4 0/4"),
    },
}
"""`missing/added` of each rank, in the order of `SCRIPTS`; empty where no rank calls it otherwise."""


def _departures(layout: str, script: str, rank: int) -> dict[str, Departure]:
    """Return what the table says of one rank; a piece without a count is called as under Trainer, in its order."""
    found = {}
    for name, cells in COUNTS[layout].items():
        if cell := cells[list(SCRIPTS).index(script)]:
            missing, added = map(int, cell.split()[rank].split("/"))
            if missing or added:
                found[name] = Departure(WHY[name], missing, added)
    return found


def _layouts() -> list[Any]:
    """Return every layout with every script; what starts several processes is slow."""
    marks = {
        name: [] if num_stages * num_replicas == 1 else [pytest.mark.slow, pytest.mark.distributed]
        for name, (num_stages, num_replicas, _) in LAYOUTS.items()
    }
    return [
        pytest.param(layout, script, id=f"{layout}, {script}", marks=marks[layout])
        for layout in LAYOUTS
        for script in SCRIPTS
    ]


@pytest.mark.parametrize(("layout", "script"), _layouts())
def test_what_a_layout_calls_otherwise_is_in_the_table(layout: str, script: str, plain: Plain, tmp_path: Path) -> None:
    num_stages, num_replicas, options = LAYOUTS[layout]
    case, num_ranks = replace(SCRIPTS[script], options=options), num_stages * num_replicas
    if num_ranks == 1:
        ranks = [calls_of(case, PipeTransformerTrainer, tmp_path)[0]]
    else:
        options = {"case": asdict(case), "is_plain": False}
        ranks = list(map(from_json, run(note_calls, tmp_path, num_ranks, options, strict_nccl=True)))
    for rank, found in enumerate(ranks):
        expected = plain(case, num_replicas)[rank // num_stages]
        # Each rank has generators of its own.
        wrong = differences(found, expected, _departures(layout, script, rank), with_generators=num_ranks == 1)
        assert not wrong, "\n".join([f"rank {rank}", *wrong])


# ---- the harness itself ----


PLANTS: dict[str, tuple[str, Callable[[Script, Any, dict[str, torch.Tensor]], Any]]] = {
    "compute_loss": ("compute_loss", lambda script, trainer, batch: trainer.compute_loss(trainer.model, dict(batch))),
    "loss function": ("loss function", lambda script, trainer, batch: script.loss(_logits(batch), batch["labels"])),
    "sampler": ("sampler", lambda script, trainer, batch: next(iter(script.sampler))),
    "data set": ("data set", lambda script, trainer, batch: script.trained[0]),
    "transform": ("transform", lambda script, trainer, batch: script.transform(script.rows[0])),
    "collator": ("collator", lambda script, trainer, batch: script.collate(script.rows[:2])),
    "callback": (
        "callback",
        lambda script, trainer, batch: trainer.callback_handler.on_step_begin(
            trainer.args, trainer.state, trainer.control
        ),
    ),
    "log entry": ("on_log", lambda script, trainer, batch: trainer.log({"loss": 1.0})),
    "metrics": ("metrics", lambda script, trainer, batch: script.metrics(EvalPrediction(np.ones(2), np.ones(2)))),
    "logits": (
        "logits",
        lambda script, trainer, batch: script.preprocess(_logits(batch)["logits"], batch["labels"]),
    ),
    "hook on the root": ("hook on root", lambda script, trainer, batch: trainer.model(**batch)),
    "hook on the head": ("hook on head", lambda script, trainer, batch: script.head(torch.zeros(1, 32))),
    "hook inside": ("hook on part", lambda script, trainer, batch: script.inside(batch["pixel_values"])),
    "own module": (
        "own module",
        lambda script, trainer, batch: script.model.vit.layernorm(torch.zeros(1, 1, 32)),
    ),
    "iterator": ("held item 1", lambda script, trainer, batch: next(script.iterator)),
    "list": ("list of 2", lambda script, trainer, batch: script.seen.append(0)),
    "generator of the script's": ("held", lambda script, trainer, batch: torch.rand((), generator=script.generator)),
    "attribute of a module": (
        "head called 1 times",
        lambda script, trainer, batch: setattr(script.head, "calls", script.head.calls + 1),
    ),
    "another optimizer": ("optimizer", lambda script, trainer, batch: script.temperature.data.add_(1)),
    "a gradient": (
        "gradients",
        lambda script, trainer, batch: setattr(script.head.bias, "grad", torch.zeros(3)),
    ),
    "a batch in place": ("compute_loss", lambda script, trainer, batch: batch["pixel_values"].mul_(2)),
    "Python's generator": ("state: python", lambda script, trainer, batch: random.random()),
    "NumPy's generator": ("state: numpy", lambda script, trainer, batch: np.random.rand()),
    "torch's generator": ("state: torch", lambda script, trainer, batch: torch.rand(())),
}
"""What a library might do before a step: the first difference must name it."""


def _logits(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"logits": torch.zeros(len(batch["labels"]), 3)}


def _planting(plant: Callable[[Script, Any, Any], Any]) -> Callable[[Script, Trainer], None]:
    def change(script: Script, trainer: Any) -> None:
        step = trainer.training_step

        def training_step(model: Any, batch: Any, *rest: Any) -> Any:
            trainer.training_step = step
            plant(script, trainer, batch)
            return step(model, batch, *rest)

        trainer.training_step = training_step

    return change


# One epoch shows it.
WATCHED = Case("not stored", hooks_inside=True, epochs=1)


@pytest.mark.parametrize("name", PLANTS)
def test_whatever_happens_beside_trainer_is_seen(name: str, plain: Plain, tmp_path: Path) -> None:
    said, plant = PLANTS[name]
    found, _ = calls_of(WATCHED, Trainer, tmp_path, _planting(plant))
    (wrong,) = differences(found, plain(WATCHED)[0], {})
    assert said in wrong.partition("found:")[2]


def test_two_runs_of_one_script_are_alike(plain: Plain, tmp_path: Path) -> None:
    found, _ = calls_of(WATCHED, Trainer, tmp_path)
    assert differences(found, plain(WATCHED)[0], {}) == []
    names = {"sampler", "data set", "transform", "collator", "compute_loss", "gradients", "held", "optimizer"}
    names |= {"loss function", "callback", "on_log", "logits", "metrics", "own module"}
    assert {call.name for call in found} == names | {"hook on root", "hook on head", "hook on part"}


def test_departures_are_counted_and_excuse_nothing_else(plain: Plain) -> None:
    calls = plain(WATCHED)[0]
    first = next(place for place, call in enumerate(calls) if call.name == "collator")
    fewer, more = [*calls[:first], *calls[first + 1 :]], [*calls, replace(calls[first], what="other rows")]
    one_missing, one_added = Departure("because", missing=1), Departure("because", added=1)
    assert differences(fewer, calls, {"collator": one_missing}) == []
    assert differences(more, calls, {"collator": one_added}) == []
    (wrong,) = differences(fewer, calls, {"collator": one_added})
    assert "1 calls are missing and 0 added, not 0 missing and 1 added (because)" in wrong
    # One that goes away has to leave the table.
    (wrong,) = differences(calls, calls, {"collator": one_missing})
    assert "0 calls are missing and 0 added" in wrong
    (wrong,) = differences(fewer, calls, {"sampler": Departure("because")})
    assert "Trainer: training, step 0: collator" in wrong
    assert "1 calls fewer" in differences(calls[:-1], calls, {})[0]
    swapped = [*calls[:first], calls[first + 1], calls[first], *calls[first + 2 :]]
    assert "differs" in differences(swapped, calls, {})[0]
