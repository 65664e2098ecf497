"""Runs of golden cases: what of a training is recorded, and how it is compared."""

from __future__ import annotations

import json
import logging
import math
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from torch import nn
from transformers import IntervalStrategy, Trainer, set_seed

from hf_pipetransformer import ComputedOnce, PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache import training as cache_training
from hf_pipetransformer.cache.frozen_parts import watching
from hf_pipetransformer.cache.storage import StorageSpeed
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.startup import costs
from hf_pipetransformer.training import part_stores
from tests.distributed.scenarios import RANK, Lines, run, scenario
from tests.golden.cases import CASES, Golden
from tests.support import decoders, frozen_models, models
from tests.support.trainings import options_for


NUM_SAMPLES = 12
LIMIT_SECONDS = 120
APPROXIMATE = ("losses", "norms", "eval_losses")
"""What another machine gives in other last digits."""
# No step is wider where a gradient is zero but for rounding, as Adam's would be.
_OPTIMIZER: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant"}
_STORED = re.compile(r"(?:^|\n)(.+?): (\d+) of (\d+) outputs were read instead of computed")


def machine() -> dict[str, str]:
    """Return what decides the last bits of a result: where it is the same, results are equal bit by bit."""
    processor = platform.processor() or platform.machine()
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        processor = next(
            (line for line in listed.read_text().splitlines() if line.startswith("model name")), processor
        )
    ability = f"{processor} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "processor": xxhash.xxh3_64_hexdigest(ability.encode())}


def recorded(case: Golden, folder: Path, name: str) -> dict[str, Any]:
    """Run a case and return its values, of all processes."""
    if case.processes == 1:
        return on_rank(case, folder)
    ranks = run(record_on_rank, folder, case.processes, {"name": name}, timeout=LIMIT_SECONDS)
    # Each has its own of what is counted; the first knows the rest.
    for key in ("forwards", "parts", "store"):
        ranks[0][key] = {f"rank {rank}": found[key] for rank, found in enumerate(ranks)}
    return dict(ranks[0])


@scenario
def record_on_rank(folder: Path, name: str) -> dict[str, Any]:
    """Return what this rank has to record of a case."""
    return on_rank(CASES[name], folder)


def on_rank(case: Golden, folder: Path) -> dict[str, Any]:
    """Run a case in this process and return what it has seen of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with steady(), Tally().counting() as tally:
            for number in range(case.runs):
                trainer = make_trainer(case, folder)
                tally.begin(trainer.model)
                goes_on = case.resumes and number == case.runs - 1
                trainer.train(str(folder / "out" / "checkpoint-4") if goes_on else None)
        return values_of(trainer, tally)
    finally:
        torch.set_num_threads(before)


# ---- trainings ----


@contextmanager
def steady() -> Iterator[None]:
    """Have no measured time decide: layers take equal times, and a store takes next to none."""

    def speed(*_: Any, **__: Any) -> StorageSpeed:
        return StorageSpeed(1e-9, 1e-9)

    with ExitStack() as stack:
        for module in (part_stores, cache_training):
            stack.enter_context(mock.patch.object(module, "measure_storage", speed))
        stack.enter_context(mock.patch.object(part_stores, "_seconds_of_hashing", return_value=1e-9))
        stack.enter_context(mock.patch.object(part_stores, "WORTH_SECONDS", -1e9))
        stack.enter_context(mock.patch.object(watching, "WORTH", 0.0))
        stack.enter_context(mock.patch.object(costs._Runner, "time", return_value=(1.0, 2.0)))
        yield


def make_trainer(case: Golden, folder: Path) -> Trainer:
    """Return the trainer of a case, whose model, rows and order are the same each time."""
    options: dict[str, Any] = {**_OPTIMIZER, "seed": 7, "per_device_eval_batch_size": 3, **case.options}
    if case.resumes:
        options |= {"save_strategy": "steps", "save_steps": 4}
    return (_prefix if case.kind == "prefix" else _parts)(case, folder, options)


def _parts(case: Golden, folder: Path, options: dict[str, Any]) -> Trainer:
    called = case.kind == "callback"
    name = case.model
    known = {**{f"{each} probe": found for each, found in frozen_models.PROBES.items()}, **frozen_models.CASES}
    if not called:
        options["activation_cache_dir"] = str(folder / "stored")
    trainer = frozen_models.trainer_of(
        Trainer if called else PipeTransformerTrainer, known[name], folder / "out", **options
    )
    if case.evaluates:
        trainer.eval_dataset, trainer.args.eval_strategy = known[name].data()[:6], IntervalStrategy.EPOCH
    if called:
        asked = {key.removeprefix("activation_cache_"): value for key, value in case.options.items()}
        chosen = {key: asked[key] for key in ("max_gb", "dtype", "keep") if key in asked}
        trainer.add_callback(
            ComputedOnce(case.options.get("activation_cache", "on"), dir=str(folder / "stored"), **chosen)
        )
    return trainer


def _prefix(case: Golden, folder: Path, options: dict[str, Any]) -> Trainer:
    set_seed(1)
    if case.model in decoders.DECODERS:
        model, rows = decoders.make_decoder(case.model), decoders.make_rows(NUM_SAMPLES)
        models.enlarge_weights(model)
        collate: Callable[..., Any] = decoders.collate_tokens
    else:
        model, rows, collate = (
            models.build_model(case.model),
            models.make_rows(case.model, NUM_SAMPLES),
            models.collate,
        )
    usual: dict[str, Any] = {
        "batch": 4, "num_train_epochs": 4, "pipeline_parallel_size": 1, "pipeline_timeout": 60,
        "activation_cache": "on", "activation_cache_dir": str(folder / "stored"),
    }  # fmt: skip
    if case.evaluates:
        usual["eval_strategy"] = "epoch"
    args = PipeTransformerArguments(**options_for(folder / "out", **{**usual, **options}))
    evaluated = rows[:6] if case.evaluates else None
    return PipeTransformerTrainer(
        model, args, train_dataset=NamedRows(rows), eval_dataset=evaluated, data_collator=collate
    )


class NamedRows(torch.utils.data.Dataset[Any]):
    """Rows with a name, by which a later run finds what is stored of them."""

    _fingerprint = "rows"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


# ---- what is recorded ----


class Tally:
    """Counts of a training: calls of layers, records that were written, and what it has said.

    Calls are counted where `Module` is called, not by hooks, with which parts are not stored, and of modules that have
    weights and none inside: one that is skipped is called all the same.
    """

    def __init__(self) -> None:
        self.begin(nn.Module())
        self._said = Lines(logging.INFO)

    @contextmanager
    def counting(self) -> Iterator[Tally]:
        call, write, logger = nn.Module.__call__, ActivationStore.write, logging.getLogger("hf_pipetransformer")

        def count_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._leaves.get(id(module))
            if name is not None:
                self._calls[name] += 1
            return call(module, *args, **kwargs)

        def count_write(store: ActivationStore, samples: Any, weights: Any, activation: Any, lengths: Any, *rest: Any):
            written = write(store, samples, weights, activation, lengths, *rest)
            self.records += written
            self.bytes += sum(store.record_format.record_bytes(int(length)) for length in lengths[:written])
            return written

        level = logger.level
        logger.addHandler(self._said)
        logger.setLevel(logging.INFO)
        try:
            with (
                mock.patch.object(nn.Module, "__call__", count_call),
                mock.patch.object(ActivationStore, "write", count_write),
            ):
                yield self
        finally:
            logger.removeHandler(self._said)
            logger.setLevel(level)

    def begin(self, model: nn.Module) -> None:
        """Begin anew with a model."""
        named = [(name, each) for name, each in model.named_modules() if list(each.parameters(recurse=False))]
        self._leaves = {id(each): name for name, each in named}
        self._calls: Counter[str] = Counter()
        self.records = self.bytes = 0
        if hasattr(self, "_said"):
            self._said.lines.clear()

    @property
    def forwards(self) -> dict[str, int]:
        """Number of forwards of each layer: the most calls of a module inside."""
        found: dict[str, int] = {}
        for name in self._leaves.values():
            found[layer_of(name)] = max(found.get(layer_of(name), 0), self._calls[name])
        return found

    @property
    def parts(self) -> dict[str, list[int]]:
        """Of each frozen part its hits and misses."""
        told = _STORED.findall("\n".join(self._said.lines))
        return {name: [int(hits), int(looked_up) - int(hits)] for name, hits, looked_up in told}


def layer_of(path: str) -> str:
    """Return the path up to the number of a layer; without one, up to the module that holds it."""
    names = path.split(".")
    for place, name in enumerate(names):
        if name.isdigit():
            return ".".join(names[: place + 1])
    return ".".join(names[:-1]) or path


def values_of(trainer: Trainer, tally: Tally) -> dict[str, Any]:
    """Return everything that is recorded of a training."""
    history = trainer.state.log_history
    steps = [entry for entry in history if "grad_norm" in entry]
    events = events_of(trainer)
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [float(entry["grad_norm"]) for entry in steps],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "weights": weights_of(trainer.model),
        "hash": hash_of(trainer.model) if RANK == 0 else "",
        "layouts": layouts_in(events),
        "epochs": epochs_in(events),
        "parts": tally.parts,
        "forwards": tally.forwards,
        "store": {"records": tally.records, "bytes": tally.bytes},
    }


def events_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what is written down for the report, of all runs of a folder."""
    path = getattr(getattr(trainer, "events", None), "path", None)
    if path is None or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def epochs_in(events: list[dict[str, Any]]) -> list[list[int]]:
    """Return hits and misses of each epoch."""
    return [[each["hits"], each["misses"]] for each in events if each["event"] == "cache" and each["what"] == "epoch"]


def layouts_in(events: list[dict[str, Any]]) -> list[list[int]]:
    """Return of each layout its first step, its stages and replicas, and how many layers are frozen and stored."""
    told = [(each["step"], each.get("layout") or each.get("to")) for each in events]
    found = [(step, Layout.from_event(fields)) for step, fields in told if isinstance(fields, dict)]
    rows = [[step, of.pipeline_size, of.num_replicas, of.num_frozen_layers, of.cache_level] for step, of in found]
    # Every step tells its layout.
    return [row for row, before in zip(rows, [[], *rows], strict=False) if row[1:] != before[1:]]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in sorted(model.named_parameters()) if not each.is_meta}


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    """Return sum and norm of the weights of each layer."""
    layers: dict[str, list[torch.Tensor]] = {}
    for name, weight in parameters_of(model).items():
        layers.setdefault(layer_of(name), []).append(weight.double().flatten())
    return {
        name: [_rounded(torch.cat(parts).sum().item()), _rounded(torch.cat(parts).norm().item())]
        for name, parts in layers.items()
    }


def hash_of(model: nn.Module) -> str:
    """Return a hash of all bits of the weights."""
    hasher = xxhash.xxh3_64()
    for name, weight in parameters_of(model).items():
        hasher.update(name.encode())
        hasher.update(weight.flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _rounded(value: float) -> float:
    return float(f"{value:.8g}")


# ---- comparison ----


def differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], rtol: float, is_same_machine: bool
) -> list[str]:
    """Return a line for each value that is not as recorded.

    Args:
        rtol: of losses, norms and weights; counts have to be equal.
        is_same_machine: True to compare all bits of the weights.
    """
    wrong = []
    for key in sorted({*expected, *found}):
        old, new = expected.get(key), found.get(key)
        if key == "hash":
            is_same = old == new or not is_same_machine
        elif key in APPROXIMATE:
            is_same = old is not None and new is not None and _are_close(old, new, rtol)
        elif key == "weights":
            is_same = old is not None and new is not None and _are_weights_close(old, new, rtol)
        else:
            is_same = old == new
        if not is_same:
            wrong.append(f"{key}: recorded {json.dumps(old)}, found {json.dumps(new)}")
    return wrong


def _are_close(old: list[float], new: list[float], rtol: float) -> bool:
    pairs = zip(old, new, strict=False)
    return len(old) == len(new) and all(math.isclose(a, b, rel_tol=rtol, abs_tol=1e-7) for a, b in pairs)


def _are_weights_close(old: Mapping[str, list[float]], new: Mapping[str, list[float]], rtol: float) -> bool:
    # A sum is as exact as its terms, which may be much larger than itself.
    return old.keys() == new.keys() and all(
        abs(a - b) <= rtol * (norm + 1e-2) for name, (total, norm) in old.items()
        for a, b in zip((total, norm), new[name], strict=True)
    )  # fmt: skip
