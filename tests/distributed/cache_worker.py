"""Try to make the activation cache give something old or wrong, and note what each run did.

Each scenario trains with the cache and, where numbers are compared, without it. Each rank notes what
its runs did, rank 0 also writes `FOLDER/<act>.<run>.safetensors`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache.folder import StoreFolder
from hf_pipetransformer.startup import costs
from tests.distributed.scenarios import RANK, WORLD_SIZE, Lines, note, scenario
from tests.distributed.transition_observer import encoder_parts
from tests.support.models import build_model, collate, make_rows
from tests.support.trainings import our_arguments


# 37 samples are five steps an epoch.
NUM_SAMPLES = 37
GLOBAL_BATCH = 8
STEPS_PER_EPOCH = 5
EPOCHS = 4
FREEZE_AT = "3:1,7:2"
FROM_THE_START = "0:2"
# Everything that goes wrong does so in the third epoch: all samples are stored then.
DISTURBED_AT = 12
SAVED_AT = 6

OFF: dict[str, Any] = {"activation_cache": "off"}
REPLICAS: dict[str, Any] = {"num_stages": 1}


class CountedRows(Dataset):
    """Rows that count how often they are read. `change` makes other ones of them.

    Their name is the same whatever they are, as where only the collator differs; None for a data set without one.
    """

    def __init__(self, rows: list[dict[str, Any]], name: str | None = "rows") -> None:
        self.rows = rows
        self._fingerprint = name
        self.num_read = 0
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_read += 1
        return self.change(self.rows[index])


class At(TrainerCallback):
    """Does something once, after optimizer step `step`, or before the step that follows `step` of them.

    It is given the model as its rank has it, which is a stage: `Scenario.run` says which model.
    """

    model: nn.Module

    def __init__(self, step: int, act: Callable[..., None], before: bool = False) -> None:
        self.step = step
        self.act = act
        self.before = before

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if self.before and state.global_step == self.step:
            self.act(control=control, model=self.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if not self.before and state.global_step == self.step:
            self.act(control=control, model=self.model)


class RunsWithoutReads(TrainerCallback):
    """Forgets what was read before a run that resumes."""

    def __init__(self, rows: CountedRows) -> None:
        self.rows = rows

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.rows.num_read = 0


@dataclass
class Setting:
    """One run.

    Args:
        options: changes to the arguments.
        model: a key of `tests.support.models.MODELS`.
        callbacks: of the run.
        prepare: changes the model.
        rows: the data set; None for the usual one.
        resume_from: a checkpoint.
        times: how often the same trainer trains.
        folder: a name for the folder of its cache, shared by runs with the same one.
    """

    options: dict[str, Any] = field(default_factory=dict)
    model: str = "bert_sequence"
    callbacks: list[TrainerCallback] = field(default_factory=list)
    prepare: Callable[[nn.Module], None] = lambda model: None
    rows: CountedRows | None = None
    resume_from: Path | None = None
    times: int = 1
    folder: str = "cache"


class Scenario:
    """Runs and what came out of them.

    Args:
        folder: for everything that is written.
        name: of the scenario.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.runs: dict[str, Any] = {}

    def cache_folder(self, setting: Setting) -> Path:
        return self.path / setting.folder

    def stored(self, setting: Setting, pattern: str) -> list[Path]:
        return sorted(self.cache_folder(setting).glob(f"_activation_cache/*/{pattern}"))

    def run(self, name: str, setting: Setting) -> PipeTransformerTrainer:
        output = self.path / f"{name}-output"
        set_seed(0)
        model = build_model(setting.model, 11)
        setting.prepare(model)
        for callback in setting.callbacks:
            callback.model = model
        rows = setting.rows or CountedRows(make_rows(setting.model, NUM_SAMPLES))
        options: dict[str, Any] = {
            "batch": GLOBAL_BATCH,
            "per_device_eval_batch_size": 2,
            "num_train_epochs": EPOCHS,
            "learning_rate": 1e-3,
            "seed": 7,
            "num_stages": WORLD_SIZE,
            "pipeline_parallel_num_microbatches": 2,
            "elastic": False,
            "freeze_policy": "fixed",
            "freeze_at": FREEZE_AT,
            "freeze_min_active_layers": 0,
            "activation_cache": "on",
            "activation_cache_dir": str(self.cache_folder(setting)),
        }
        self.cache_folder(setting).mkdir(parents=True, exist_ok=True)
        warnings = Lines(logging.WARNING)
        logger = logging.getLogger("hf_pipetransformer")
        logger.addHandler(warnings)
        trainer = PipeTransformerTrainer(
            model=model,
            args=our_arguments(output, **options | setting.options),
            train_dataset=rows,
            eval_dataset=make_rows(setting.model, 8, 1),
            data_collator=collate,
            callbacks=[RunsWithoutReads(rows), *setting.callbacks],
        )
        history = []
        try:
            for _ in range(setting.times):
                trainer.train(None if setting.resume_from is None else str(setting.resume_from))
                history += trainer.state.log_history
        finally:
            logger.removeHandler(warnings)
            self.runs[name] = {
                "losses": [entry["loss"] for entry in history if "loss" in entry],
                "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
                "warnings": warnings.lines,
                "num_read": rows.num_read,
                "left": [path.name for path in self.stored(setting, "") if path.is_dir()],
                "best_step": trainer.state.best_global_step,
                "cached_levels": [entry["cached_layers"] for entry in history if "cached_layers" in entry],
            }
        trainer.topology.barrier()
        if RANK == 0:
            weights = {key: value.detach().contiguous().clone() for key, value in model.named_parameters()}
            save_file(weights, f"{self.path}.{name}.safetensors")
            lines = (output / "pipetransformer_events.jsonl").read_text().splitlines()
            events = [event for event in map(json.loads, lines) if event["event"] == "cache"]
            self.runs[name]["events"] = events
        return trainer

    def both(self, make: Callable[[], Setting]) -> None:
        """The same run with the cache and without."""
        self.run("with", make())
        setting = make()
        setting.options = setting.options | OFF
        self.run("without", setting)


# ---- weights that change


def frozen_here(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.is_meta and not p.requires_grad]


def scale_in_place(model: Any, **_kwargs: Any) -> None:
    with torch.no_grad():
        for parameter in frozen_here(model):
            parameter.mul_(1.01)


def scale_behind_autograd(model: Any, **_kwargs: Any) -> None:
    for parameter in frozen_here(model):
        parameter.data.copy_(parameter.data * 1.01)


def weights_change_in_place(scenario: Scenario) -> None:
    scenario.both(lambda: Setting(callbacks=[At(DISTURBED_AT, scale_in_place)]))


def weights_change_behind_autograd(scenario: Scenario) -> None:
    scenario.both(lambda: Setting(REPLICAS, callbacks=[At(DISTURBED_AT, scale_behind_autograd)]))


def weights_change_after_the_fetch(scenario: Scenario) -> None:
    """Between the reading of a batch and its step; later stages have heard of its hits already."""
    scenario.both(lambda: Setting(callbacks=[At(DISTURBED_AT, scale_in_place, before=True)]))


def weights_change_after_the_fetch_of_images(scenario: Scenario) -> None:
    scenario.both(lambda: Setting(REPLICAS, "vit", callbacks=[At(DISTURBED_AT, scale_in_place, before=True)]))


def weights_change_on_the_later_stage(scenario: Scenario) -> None:
    """Blocks of both stages lie below the cached entry; the first one reads, and did not see the change.

    Measured times would decide where the second stage begins, and so what it changes: both runs are given equal ones.
    """
    changed: list[list[str]] = []

    def scale(model: Any, **_kwargs: Any) -> None:
        if RANK == 1:
            here = {id(parameter) for parameter in frozen_here(model)}
            changed.append([name for name, parameter in model.named_parameters() if id(parameter) in here])
            scale_in_place(model)

    options = {"freeze_at": "2:4"}
    with mock.patch.object(costs._Runner, "time", return_value=(1.0, 2.0)):
        scenario.both(lambda: Setting(options, callbacks=[At(DISTURBED_AT, scale, before=True)]))
    scenario.runs["with"]["changed"], scenario.runs["without"]["changed"] = changed or [[], []]


def weights_change_within_an_accumulation(scenario: Scenario) -> None:
    """Both batches of the step are read by then."""
    options = {"gradient_accumulation_steps": 2, "freeze_at": "1:1,2:2"}
    scenario.both(lambda: Setting(options, callbacks=[At(3, scale_in_place, before=True)]))


def evaluated_with_other_weights(scenario: Scenario) -> None:
    """Weights of a moving average, say, are put in for an evaluation, and taken out again."""

    def swap(control: Any, **_kwargs: Any) -> None:
        control.should_evaluate = True
        scale_in_place(_kwargs["model"])

    def swap_back(model: Any, **_kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in frozen_here(model):
                parameter.div_(1.01)

    options = {"eval_strategy": "epoch"}
    callbacks = [At(DISTURBED_AT, swap), At(DISTURBED_AT, swap_back, before=True)]
    scenario.both(lambda: Setting(options, callbacks=list(callbacks)))


def resumed_with_other_weights(scenario: Scenario) -> None:
    """The first run goes to its end and keeps its rows; the resumed one comes to other weights before it freezes."""

    def save(control: Any, **_kwargs: Any) -> None:
        control.should_save = True

    def disturb(model: Any, **_kwargs: Any) -> None:
        _, layers = encoder_parts(model)
        with torch.no_grad():
            for parameter in layers[1].parameters():
                if not parameter.is_meta:
                    parameter.mul_(1.02)

    keeping = {"activation_cache_keep": True, "save_strategy": "steps", "save_steps": 1000}
    first = Setting(keeping, callbacks=[At(SAVED_AT, save)])
    scenario.run("first", first)
    checkpoint = scenario.path / "first-output" / f"checkpoint-{SAVED_AT}"
    scenario.run("undisturbed", Setting(keeping, resume_from=checkpoint))
    scenario.both(lambda: Setting(keeping, callbacks=[At(SAVED_AT, disturb, before=True)], resume_from=checkpoint))


def best_model(scenario: Scenario) -> None:
    """The loss on other samples rises, so the best weights are those of the first epoch."""
    best = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    }
    scenario.both(lambda: Setting(best))


def trained_twice(scenario: Scenario) -> None:
    scenario.both(lambda: Setting(times=2))


# ---- stores that are there already


def kept_for_another_head(scenario: Scenario) -> None:
    keeping = {"activation_cache_keep": True, "freeze_at": FROM_THE_START}
    scenario.run("first", Setting(keeping))
    scenario.both(lambda: Setting(keeping | {"learning_rate": 5e-3}))


def kept_for_other_samples(scenario: Scenario) -> None:
    """As many samples, but other ones."""
    keeping = {"activation_cache_keep": True, "freeze_at": FROM_THE_START}
    scenario.run("first", Setting(keeping))
    scenario.both(lambda: Setting(keeping, rows=CountedRows(make_rows("bert_sequence", NUM_SAMPLES, 5))))


def kept_without_a_name(scenario: Scenario) -> None:
    """Nothing tells a later run that the samples are the same."""
    keeping = {"activation_cache_keep": True, "freeze_at": FROM_THE_START}
    for run in ("first", "with"):
        rows = CountedRows(make_rows("bert_sequence", NUM_SAMPLES), name=None)
        scenario.run(run, Setting(keeping, rows=rows))


# ---- data sets that are no function of the index


def other_words(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "input_ids": [5 + (word + 7) % 50 for word in row["input_ids"]]}


def samples_change(scenario: Scenario) -> None:
    def make() -> Setting:
        rows = CountedRows(make_rows("bert_sequence", NUM_SAMPLES))

        def change(**_kwargs: Any) -> None:
            rows.change = other_words

        return Setting(callbacks=[At(DISTURBED_AT, change)], rows=rows)

    scenario.both(make)


def random_augmentation(scenario: Scenario) -> None:
    rows = CountedRows(make_rows("vit", NUM_SAMPLES))
    rows.change = lambda row: {
        **row,
        "pixel_values": (torch.tensor(row["pixel_values"]) + 0.1 * torch.randn(1)).tolist(),
    }
    scenario.run("with", Setting(model="vit", rows=rows))


# ---- a disk that fails


def shards_are_deleted(scenario: Scenario) -> None:
    def make() -> Setting:
        setting = Setting(REPLICAS)

        def delete(**_kwargs: Any) -> None:
            for path in scenario.stored(setting, "records-*") if RANK == 0 else []:
                path.unlink()

        setting.callbacks = [At(DISTURBED_AT, delete)]
        return setting

    scenario.both(make)


def a_byte_is_flipped(scenario: Scenario) -> None:
    def make() -> Setting:
        setting = Setting()

        def flip(**_kwargs: Any) -> None:
            written = [path for path in scenario.stored(setting, "records-*") if path.stat().st_size]
            for path in written if RANK == 0 else []:
                content = np.memmap(path, np.uint8, "r+")
                # Zeros are no records.
                used = np.flatnonzero(content)
                content[used[len(used) // 3]] ^= 1
                content.flush()

        setting.callbacks = [At(DISTURBED_AT, flip)]
        return setting

    scenario.both(make)


def little_room(scenario: Scenario) -> None:
    scenario.both(lambda: Setting({"activation_cache_max_gb": 40e-6}))


# ---- folders that are not the run's own


def cleaned_before_the_end(scenario: Scenario) -> None:
    """As cleaners of temporary folders do."""

    def make() -> Setting:
        setting = Setting()

        def clean(**_kwargs: Any) -> None:
            if RANK == 0 and setting.options.get("activation_cache") != "off":
                shutil.rmtree(scenario.cache_folder(setting))

        setting.callbacks = [At(EPOCHS * STEPS_PER_EPOCH, clean)]
        return setting

    scenario.both(make)


def the_default_folder_is_a_link(scenario: Scenario) -> None:
    place, home = scenario.path / "tmp", scenario.path / "home"
    for folder in (place, home):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "thesis.txt").write_text("years of work")
    with suppress(FileExistsError):
        (place / f"hf_pipetransformer_{os.geteuid()}").symlink_to(home)
    tempfile.tempdir = str(place)
    try:
        scenario.both(lambda: Setting({"activation_cache": "auto", "activation_cache_dir": None}))
    finally:
        tempfile.tempdir = None
    scenario.runs["with"]["home"] = [path.name for path in home.iterdir()]


def left_by_a_killed_run(scenario: Scenario) -> None:
    """The next run deletes it, whether it freezes anything or not."""
    setting = Setting(OFF | {"freeze_policy": "none", "freeze_at": ""})
    if RANK == 0:
        StoreFolder.take(scenario.cache_folder(setting), "left").release()
    scenario.run("with", setting)


# ---- when there is one


def freeze_first_layer(model: Any) -> None:
    embeddings, layers = encoder_parts(model)
    for module in (embeddings, layers[0]):
        module.requires_grad_(False)


def frozen_by_the_user(scenario: Scenario) -> None:
    scenario.both(lambda: Setting({"freeze_policy": "none", "freeze_at": ""}, prepare=freeze_first_layer))


def frozen_by_the_user_and_cut_anew(scenario: Scenario) -> None:
    """A stored prefix costs nothing, so that the first step finds better cuts, or a shorter pipeline."""
    options = {"freeze_policy": "none", "freeze_at": "", "elastic": True}
    scenario.both(lambda: Setting(options, prepare=freeze_first_layer))


def one_epoch_left(scenario: Scenario) -> None:
    last = f"{(EPOCHS - 1) * STEPS_PER_EPOCH}:2"
    scenario.run("with", Setting({"activation_cache": "auto", "freeze_at": last}))


# ---- on one process: runs that end early, and two at a time


def interrupted(scenario: Scenario) -> None:
    """A training that ends in an exception, and one that ends with Ctrl-C."""
    for name, error in {"exception": RuntimeError("planted"), "interrupt": KeyboardInterrupt()}.items():
        setting, held = Setting(), list[Path]()

        def stop(setting: Setting = setting, held: list[Path] = held, error: Any = error, **_kwargs: Any) -> None:
            held += scenario.stored(setting, "records-*")
            raise error

        setting.callbacks = [At(DISTURBED_AT, stop)]
        try:
            scenario.run(name, setting)
        except (RuntimeError, KeyboardInterrupt) as found:
            scenario.runs[name]["ended_by"] = type(found).__name__
        scenario.runs[name]["held"] = len(held)


def meets(scenario: Scenario, number: int) -> None:
    """One of two runs that share a folder and meet when both have stored everything."""
    meeting = scenario.path.parent / "meeting"
    places: list[str] = []

    def make() -> Setting:
        setting = Setting({"freeze_at": FROM_THE_START}, folder="../shared-cache")
        setting.prepare = lambda model: scale_all(model, 1 + 0.1 * number)
        return setting

    def meet(**_kwargs: Any) -> None:
        wait_for_the_other(0)
        places.extend(path.name for path in scenario.stored(setting, "") if path.is_dir())
        wait_for_the_other(1)

    def wait_for_the_other(turn: int) -> None:
        # Opening a pipe waits for its other end.
        with open(meeting / str(turn), "w" if turn == number else "r"):
            pass

    setting = make()
    setting.callbacks = [At(DISTURBED_AT, meet)]
    scenario.run("with", setting)
    scenario.runs["with"]["places"] = places
    alone = make()
    alone.options |= OFF
    scenario.run("without", alone)


def scale_all(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def meets_first(scenario: Scenario) -> None:
    meets(scenario, 0)


def meets_second(scenario: Scenario) -> None:
    meets(scenario, 1)


# ---- on two processes, at last: no run can follow


def a_rank_fails(scenario: Scenario) -> None:
    setting, held = Setting(), list[Path]()

    def fail(**_kwargs: Any) -> None:
        held.extend(scenario.stored(setting, "records-*"))
        if RANK == 1:
            raise RuntimeError("planted")

    setting.callbacks = [At(DISTURBED_AT, fail)]
    try:
        scenario.run("with", setting)
    except Exception as error:
        scenario.runs["with"]["ended_by"] = f"{type(error).__name__}: {error}"
    scenario.runs["with"]["held"] = len(held)


PAIRED = [
    weights_change_in_place,
    weights_change_behind_autograd,
    weights_change_after_the_fetch,
    weights_change_after_the_fetch_of_images,
    weights_change_on_the_later_stage,
    weights_change_within_an_accumulation,
    evaluated_with_other_weights,
    resumed_with_other_weights,
    best_model,
    trained_twice,
    kept_for_another_head,
    kept_for_other_samples,
    kept_without_a_name,
    samples_change,
    random_augmentation,
    shards_are_deleted,
    a_byte_is_flipped,
    little_room,
    cleaned_before_the_end,
    the_default_folder_is_a_link,
    left_by_a_killed_run,
    frozen_by_the_user,
    frozen_by_the_user_and_cut_anew,
    one_epoch_left,
    a_rank_fails,
]
ALONE = [interrupted]
MEETING = [meets_first, meets_second]


@scenario
def act_all(folder: Path, listed: str) -> None:
    known = {act.__name__: act for act in [*PAIRED, *ALONE, *MEETING]}
    names = json.loads(Path(listed).read_text())
    for name in names:
        print(f"scenario {name}", flush=True)
        here = Scenario(folder, name)
        result: dict[str, Any] = {"runs": here.runs}
        try:
            known[name](here)
        except BaseException:
            result["error"] = traceback.format_exc()
            raise
        finally:
            note(folder, name, result)
    if a_rank_fails.__name__ in names:
        sys.exit()  # The ranks can no longer meet at the end.
