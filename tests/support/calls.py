"""A script whose every piece notes what it is called with, and the comparison of two runs of it.

A run of plain Trainer says what a script's own code may be told. A piece notes a call as it begins: its arguments, the
global step, and the states of the global generators. What the pieces hold (an iterator, a list, a generator, an
optimizer, gradients) is noted with each loss.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin
from tests.support.frozen_models import Collate, Rows, images, pad, sentences, sounds, stack, whisper
from tests.support.trainings import QUIET, WORLD_SIZE


BATCH = 4
"""Samples of a batch, over all processes; an optimizer step takes two."""
NUM_EVAL_ROWS = 8
# Amid the second epoch, which has a step of two batches and one of the batch that is left.
SAVED_STEP = 3
TOLERANCE = 1e-4


# ---- what is noted ----


@dataclass(frozen=True)
class Call:
    """One call of a piece of the script.

    Args:
        phase: `start`, `training`, `prediction` or `resumption`.
        name: of the piece.
        step: the global step.
        what: the arguments that no rounding changes.
        numbers: of the arguments that were computed.
        generators: the states of Python's, NumPy's and torch's global generators.
    """

    phase: str
    name: str
    step: int
    what: str
    numbers: tuple[float, ...] = ()
    generators: str = ""

    def __str__(self) -> str:
        numbers = "".join(f" {number:.5g}" for number in self.numbers[:3])
        return f"{self.phase}, step {self.step}: {self.name} {self.what}{numbers}"

    def is_like(self, other: Call, with_generators: bool) -> bool:
        same = (self.phase, self.name, self.step, self.what) == (other.phase, other.name, other.step, other.what)
        return (
            same
            and len(self.numbers) == len(other.numbers)
            and all(map(_is_close, self.numbers, other.numbers))
            and (self.generators == other.generators or not with_generators)
        )


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))


class Log:
    """The calls of a run, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.phase = "start"
        self.trainer: Any = None

    def note(self, name: str, what: str = "", *numbers: float) -> None:
        step = 0 if self.trainer is None else self.trainer.state.global_step
        self.calls.append(Call(self.phase, name, step, what, numbers, generators()))


_present: list[Log] = []
"""The log of the run that goes on; a module must not hold it, as what a module holds tells what it computes."""


def generators() -> str:
    _, keys, *rest = np.random.get_state()
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": keys.tobytes() + repr(rest).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return " ".join(f"{name}={zlib.crc32(state):08x}" for name, state in states.items())


def contents(value: Any) -> str:
    """Return names, types, shapes and a checksum of what a call was given."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {contents(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(contents, value)) + "]"
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        return str(value)
    # A number, which is an `int` on one process and a tensor on several.
    if not value.ndim and not value.is_floating_point():
        return str(value.item())
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{kind}#{zlib.crc32(value.detach().contiguous().numpy().tobytes()):08x}"


def shapes(value: Any) -> str:
    return str([list(tensor.shape) for tensor in _tensors(value)])


def numbers(value: Any) -> tuple[float, ...]:
    """Return a mean and a norm of each tensor."""
    found = [tensor.detach().double() for tensor in _tensors(value)]
    return tuple(float(each) for tensor in found for each in (tensor.mean(), tensor.norm()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield torch.as_tensor(value)


# ---- models ----


class CountingHead(nn.Linear):
    """Head that counts its calls and may have dropout."""

    def __init__(self, width: int, num_labels: int, rate: float) -> None:
        super().__init__(width, num_labels)
        self.calls, self.rate = 0, rate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(functional.dropout(hidden, self.rate, self.training))


class OwnNorm(nn.LayerNorm):
    """Module of the script's inside the part that it freezes."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for log in _present:
            log.note("own module", shapes(hidden), *numbers(hidden))
        return super().forward(hidden)


_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 3}


def _vit(rate: float) -> nn.Module:
    model = ViTForImageClassification(ViTConfig(num_labels=3, image_size=32, patch_size=8, **_LAYERS))
    model.classifier = CountingHead(32, 3, rate)
    return model


def _bert(rate: float) -> nn.Module:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=3, **_LAYERS, **rates))
    model.classifier = CountingHead(32, 3, rate)
    return model


@dataclass(frozen=True)
class Model:
    """A model, its rows, and paths in it.

    Args:
        frozen: what the script freezes.
        inside: a layer norm at the end of it.
        head: a module that is trained.
        needs_labels: whether it cannot run without labels, which Trainer keeps from it for a loss function.
    """

    build: Callable[[float], nn.Module]
    rows: Callable[[], Rows]
    frozen: tuple[str, ...]
    inside: str
    head: str = "classifier"
    collate: Collate = stack
    needs_labels: bool = False


MODELS = {
    "vit": Model(_vit, images, ("vit",), "vit.layernorm"),
    "bert": Model(
        _bert,
        sentences,
        ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"),
        "bert.encoder.layer.1.output.LayerNorm",
        collate=pad,
    ),
    "whisper": Model(
        lambda _: whisper(), sounds, ("model.encoder",), "model.encoder.layer_norm", "proj_out", needs_labels=True
    ),
}


# ---- the script ----


STATES: dict[str, dict[str, Any]] = {
    "nothing frozen": {},
    "not stored": {"activation_cache": "off"},
    "stored": {"activation_cache": "on"},
    "default": {},
}
"""What is said of the part that the script has frozen, to the pipeline alone."""


@dataclass(frozen=True)
class Case:
    """What differs between scripts.

    Args:
        state: a key of `STATES`.
        model: a key of `MODELS`.
        has_own_loss: `compute_loss` overridden, and a `compute_loss_func` where the model allows one; else neither.
        streams: train on an `IterableDataset`.
        dropout: of the head.
        hooks_inside: the script hooks what it freezes, too.
        resumes: go on from a checkpoint, in a trainer made anew.
        epochs: of the training.
        options: of `PipeTransformerArguments`.
    """

    state: str
    model: str = "vit"
    has_own_loss: bool = True
    streams: bool = False
    dropout: float = 0.0
    hooks_inside: bool = False
    resumes: bool = False
    epochs: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> Case:
        """The case as plain Trainer runs it, which knows of no store."""
        frozen = self.state if self.state == "nothing frozen" else "default"
        return replace(self, state=frozen, options={})


class Data(Dataset[Any]):
    """Rows that note which one is read."""

    def __init__(self, script: Script, rows: Rows, name: str) -> None:
        self.script, self.rows, self.name = script, rows, name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.script.log.note("data set", f"{self.name}, row {index}")
        return self.script.transform(self.rows[index])


class Stream(IterableDataset[Any]):
    """The same rows in an order that depends on the epoch, without a length."""

    def __init__(self, script: Script, rows: Rows) -> None:
        self.script, self.rows, self.epoch = script, rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.script.log.note("stream", f"set_epoch {epoch}")
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.script.log.note("stream", f"begins epoch {self.epoch}")
        for index in range(len(self.rows)):
            self.script.log.note("stream", f"row {(index + self.epoch) % len(self.rows)}")
            yield self.script.transform(self.rows[(index + self.epoch) % len(self.rows)])


class Order(Sampler[int]):
    """Sampler of the script's, with another order in each epoch."""

    def __init__(self, script: Script) -> None:
        self.script, self.epoch = script, 0

    def set_epoch(self, epoch: int) -> None:
        self.script.log.note("sampler", f"set_epoch {epoch}")
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.script.rows)

    def __iter__(self) -> Iterator[int]:
        self.script.log.note("sampler", f"begins epoch {self.epoch}")
        draw = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self), generator=draw).tolist():
            self.script.log.note("sampler", f"index {index}")
            yield index


_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_mean")


def _noting(event: str) -> Callable[..., None]:
    def told(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        flags = "".join(str(int(value)) for _, value in sorted(vars(control).items()))
        logs = others.get("logs") or others.get("metrics") or {}
        found = {name: float(logs[name]) for name in _LOGGED if name in logs}
        what = f"{event}, epoch {state.epoch or 0:.3f}, control {flags}, given {sorted(others)}, {list(found)}"
        self.script.log.note("on_log" if event == "on_log" else "callback", what, *found.values())
        if event == "on_step_begin":
            # What has drawn before shows in each later call.
            random.random()
            np.random.rand()
            torch.rand(())

    return told


_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
_Told = type("_Told", (TrainerCallback,), {event: _noting(event) for event in _EVENTS})


class Script:
    """The pieces of a script, and what it holds: made anew for each trainer."""

    def __init__(self, case: Case, log: Log) -> None:
        self.case, self.log = case, log
        known = self.known = MODELS[case.model]
        self.rows = known.rows()
        self.sampler = Order(self)
        self.evaluated = Data(self, [_turned(row) for row in self.rows[:NUM_EVAL_ROWS]], "evaluation")
        self.trained = Stream(self, self.rows) if case.streams else Data(self, self.rows, "training")
        self.model = known.build(case.dropout)
        self.model.get_submodule(known.inside).__class__ = OwnNorm
        self.head = self.model.get_submodule(known.head)
        self.inside = self.model.get_submodule(known.frozen[-1])
        if case.state != "nothing frozen":
            for path in known.frozen:
                self.model.get_submodule(path).requires_grad_(False)
        hooked = {"root": self.model, "head": self.head, **({"part": self.inside} if case.hooks_inside else {})}
        for name, module in hooked.items():
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name), with_kwargs=True)
        self.iterator = count()
        self.seen: list[int] = []
        self.generator = torch.Generator().manual_seed(5)
        self.temperature = nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.SGD([self.temperature], lr=0.1, momentum=0.9)

    def transform(self, row: Mapping[str, Any]) -> dict[str, Any]:
        self.log.note("transform", contents(row))
        return {name: value * 2 if _is_floating(value) else value for name, value in row.items()}

    def collate(self, rows: Rows) -> dict[str, Any]:
        self.log.note("collator", contents(rows))
        return self.known.collate(rows)

    def begin_loss(self, trainer: Any, model: nn.Module, inputs: Any, returns_outputs: bool, num_items: Any) -> None:
        """Note a call of `compute_loss`, and change what the script holds."""
        mode = "train" if model.training else "eval"
        self.log.note("compute_loss", f"{mode} {contents(inputs)} outputs={returns_outputs} of {contents(num_items)}")
        grads = {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}
        self.log.note("gradients", f"of {list(grads)}" if len(grads) < 4 else f"of {len(grads)}", *numbers(grads))
        self.seen.append(len(inputs))
        drawn = float(torch.rand((), generator=self.generator))
        calls = getattr(self.head, "calls", None)
        held = f"item {next(self.iterator)}, list of {len(self.seen)}, head called {calls} times"
        self.log.note("held", held, drawn)
        if model.training:
            self.optimizer.zero_grad()
            # Whoever tries the loss without gradients is to be seen, not to be stopped.
            with torch.enable_grad():
                (self.temperature**2).backward()
            self.optimizer.step()
        self.log.note("optimizer", "", self.temperature.item())

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        self.log.note(
            "loss function", f"{contents(labels)} of {contents(num_items_in_batch)}", *numbers(outputs["logits"])
        )
        logits = outputs["logits"].flatten(0, -2)
        total = functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    def preprocess(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = logits[0] if isinstance(logits, tuple) else logits
        self.log.note("logits", contents(labels), *numbers(logits))
        return logits

    def metrics(self, found: Any) -> dict[str, float]:
        self.log.note("metrics", contents(found.label_ids), *numbers(found.predictions))
        return {"mean": float(found.predictions.mean())}

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.log.note(f"hook on {name}", f"before {shapes((args, kwargs))}", *numbers((args, kwargs)))

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = {"logits": output["logits"]} if isinstance(output, dict) and "logits" in output else output
        self.log.note(f"hook on {name}", f"after {shapes(given)}", *numbers(given))

    def trainer(self, kind: type, folder: Path) -> Trainer:
        """Return a trainer, plain or of a pipeline, that is made of these pieces."""
        script, is_ours = self, issubclass(kind, PipeTransformerMixin)

        class WithSampler(kind):
            def _get_train_sampler(self, *args: Any) -> Any:
                return super()._get_train_sampler(*args) if script.case.streams else script.sampler

        class WithLoss(WithSampler):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                script.begin_loss(self, model, inputs, return_outputs, num_items_in_batch)
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        own = STATES[self.case.state] | self.case.options if is_ours else {}
        args = (PipeTransformerArguments if is_ours else TrainingArguments)(
            **{
                **QUIET, "output_dir": str(folder), "per_device_train_batch_size": BATCH // WORLD_SIZE,
                "per_device_eval_batch_size": BATCH // WORLD_SIZE, "gradient_accumulation_steps": 2,
                "learning_rate": 1e-3, "adam_epsilon": 1e-6, "eval_strategy": "epoch", "remove_unused_columns": False,
                "num_train_epochs": self.case.epochs,
                # A stream has no length.
                **({"max_steps": 2 * self.case.epochs} if self.case.streams else {}),
                **({"save_strategy": "steps", "save_steps": SAVED_STEP} if self.case.resumes else {}), **own,
            }
        )  # fmt: skip
        callback = _Told()
        callback.script = self
        self.log.trainer = None
        trainer = (WithLoss if self.case.has_own_loss else WithSampler)(
            self.model,
            args,
            train_dataset=self.trained,
            eval_dataset=self.evaluated,
            data_collator=self.collate,
            callbacks=[callback],
            compute_metrics=self.metrics,
            preprocess_logits_for_metrics=self.preprocess,
            **({"compute_loss_func": self.loss} if self.case.has_own_loss and not self.known.needs_labels else {}),
        )
        self.log.trainer = trainer
        return trainer


def _turned(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return another row: nothing of it is known from training."""
    first = next(iter(row))
    return {**row, first: row[first].flip(-1)}


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def calls_of(
    case: Case, kind: type, folder: Path, change: Callable[[Script, Trainer], None] = lambda script, trainer: None
) -> tuple[list[Call], Trainer]:
    """Train, predict, and resume if the case says so; return all calls and the last trainer.

    Args:
        kind: `Trainer` or `PipeTransformerTrainer`.
        change: is done before the training.
    """
    log = Log()
    _present[:] = [log]

    def made() -> tuple[Script, Trainer]:
        set_seed(1)
        script = Script(case, log)
        return script, script.trainer(kind, folder)

    try:
        script, trainer = made()
        change(script, trainer)
        log.phase = "training"
        trainer.train()
        log.phase = "prediction"
        trainer.predict(script.evaluated)
        if case.resumes:
            log.phase = "start"
            script, trainer = made()
            log.phase = "resumption"
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_STEP}"))
    finally:
        _present.clear()
    return log.calls, trainer


def as_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [asdict(call) for call in calls]


def from_json(values: Sequence[Mapping[str, Any]]) -> list[Call]:
    return [Call(**{**value, "numbers": tuple(value["numbers"])}) for value in values]


# ---- the comparison ----


@dataclass(frozen=True)
class Departure:
    """How the calls of one piece differ from those under Trainer.

    Args:
        why: one sentence.
        missing: calls under Trainer that are not made.
        added: calls that Trainer does not make.
    """

    why: str
    missing: int = 0
    added: int = 0


def differences(
    found: Sequence[Call],
    expected: Sequence[Call],
    departures: Mapping[str, Departure],
    with_generators: bool = True,
) -> list[str]:
    """Return in words how two runs differ beyond the departures, and which departures are not what they say.

    Args:
        departures: by the name of the piece, whose calls are counted whatever their order.
        with_generators: compare the states of the generators.
    """
    wrong, unlike = [], counts(found, expected)
    for name, departure in departures.items():
        missing, added = unlike.get(name, (0, 0))
        if (missing, added) != (departure.missing, departure.added):
            said = f"{departure.missing} missing and {departure.added} added"
            wrong.append(f"{name}: {missing} calls are missing and {added} added, not {said} ({departure.why})")
    mine, theirs = ([call for call in calls if call.name not in departures] for calls in (found, expected))
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if not one.is_like(other, with_generators):
            return [*wrong, _first(place, one, other, mine[max(place - 3, 0) : place])]
    if len(mine) != len(theirs):
        rest, whose = (mine, "more") if len(mine) > len(theirs) else (theirs, "fewer")
        wrong.append(f"{abs(len(mine) - len(theirs))} calls {whose}: {rest[min(len(mine), len(theirs))]}")
    return wrong


def counts(found: Sequence[Call], expected: Sequence[Call]) -> dict[str, tuple[int, int]]:
    """Return how many calls are missing and added, whatever their order, by the name of the piece."""
    added, missing = list(found), Counter[str]()
    for call in expected:
        like = next((place for place, other in enumerate(added) if call.is_like(other, False)), None)
        if like is None:
            missing[call.name] += 1
        else:
            del added[like]
    more = Counter(call.name for call in added)
    return {name: (missing[name], more[name]) for name in dict.fromkeys([*missing, *more])}


def _first(place: int, found: Call, expected: Call, before: Sequence[Call]) -> str:
    lines = [f"call {place} differs", *(f"    before: {call}" for call in before)]
    lines += [f"    Trainer: {expected}", f"    found:   {found}"]
    if str(found) == str(expected) and found.generators != expected.generators:
        theirs = expected.generators.split()
        drawn = [state.partition("=")[0] for state in found.generators.split() if state not in theirs]
        lines.append(f"    generators in another state: {', '.join(drawn)}")
    return "\n".join(lines)
