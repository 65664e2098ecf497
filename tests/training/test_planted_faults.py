"""Faults planted in the store of frozen parts: the check that sees each, and the steps that have read wrong values.

The rate is 0, so that each step's loss shows what the step itself has read. No check sees what a step and its check
have in common: the modes in which a deferred call is computed, the position that is picked as the first, the dtype
that was asked for. What is wrong in few rows alone is seen at the rate of the checks.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import IntervalStrategy, Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache import records as files
from hf_pipetransformer.cache import store as stores
from hf_pipetransformer.cache.chain import PrefixWatch
from hf_pipetransformer.cache.frozen_parts import served, watching
from hf_pipetransformer.cache.frozen_parts.call import Modes, undeferred
from hf_pipetransformer.cache.frozen_parts.contents import ContentStore, Reading
from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, PresentStep
from hf_pipetransformer.cache.frozen_parts.served import Records
from hf_pipetransformer.cache.frozen_parts.state import ModuleState
from hf_pipetransformer.cache.frozen_parts.values import Rows, tensors_of
from hf_pipetransformer.cache.records import ENTRY
from hf_pipetransformer.data.rng import generators_kept
from hf_pipetransformer.training.part_stores import PartStores
from tests.support.frozen_models import CASES, NUM_SAMPLES, Case, convbert_probe, logged, pad, stack, trainer_of


STEPS = 3
"""Steps of an epoch, of which there are `EPOCHS`."""
EPOCHS = 4
Patch = pytest.MonkeyPatch


# ---- models ----


def rows(pairs: bool = False) -> list[dict[str, Any]]:
    """Rows of one input; with `pairs`, of two, the first of which two rows have in common."""
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(2, NUM_SAMPLES, 4, 4, generator=draw)
    first = given[0].repeat_interleave(2, 0) if pairs else given[0]
    return [{"x": first[i], **({"other": given[1, i]} if pairs else {}), "labels": i % 3} for i in range(NUM_SAMPLES)]


class Probe(nn.Module):
    """A trained head above frozen modules, `tower` by default; `reads` gives what the head reads of them."""

    def __init__(self, reads: Callable[..., torch.Tensor], **frozen: nn.Module) -> None:
        super().__init__()
        for name, each in frozen.items():
            self.add_module(name, each.requires_grad_(False))
        self.reads, self.head, self.steps = reads, nn.Linear(16, 3), 0

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        for each in self.modules():
            # Of a frozen layer, as scripts have it.
            each.training &= not isinstance(each, nn.BatchNorm1d)
        return self

    def forward(self, x: torch.Tensor, labels: torch.Tensor, other: Any = None) -> dict[str, torch.Tensor]:
        self.steps += self.training
        others = {} if other is None else {"other": other}
        logits = self.head(self.reads(self, x, **others).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def tower(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), *more, nn.Tanh(), nn.LayerNorm(16))


def probe(make: Callable[[], nn.Module] = tower, reads: Any = lambda self, x: self.tower(x)) -> Case:
    return Case(lambda: Probe(reads, tower=make()), rows, "tower", stack)


class OfScript(nn.Module):
    """Code of a script's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layers(x) * scale * (1.5 if self.training else 1.0)


class Company(OfScript):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found = super().forward(x)
        return found - found.mean(0)


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2, batch_first=True)


def of_both(self: Any, x: torch.Tensor) -> torch.Tensor:
    output, weights = self.tower(x, x, x)
    return output + 2 * weights


def of_a_chain(self: Any, x: torch.Tensor) -> torch.Tensor:
    output, weights = self.tower(x, x, x)
    return self.upper(output) + 2 * self.upper(weights)


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.tower(x).mul_(1.1)


def at_times_in_bf16(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16) if self.steps % STEPS == 0 else nullcontext():
        return self.tower(x).float()


PLAIN = probe()
NORMED = probe(lambda: tower(nn.BatchNorm1d(16)))
ATTENTION = probe(attention, of_both)
SWITCHED = probe(OfScript, lambda self, x: self.tower(x, scale=1.0 + self.steps % 2))
CHAIN = Case(lambda: Probe(of_a_chain, tower=attention(), upper=nn.Linear(4, 4)), rows, "upper", stack)
TWO = Case(lambda: Probe(lambda self, x: self.one(x) + 2 * self.two(x), one=tower(), two=tower()), rows, "one", stack)
PAIRS = Case(
    lambda: Probe(lambda self, x, other: self.tower(x.flatten(1), other.flatten(1)), tower=nn.Bilinear(16, 16, 16)),
    lambda: rows(pairs=True), "tower", stack,
)  # fmt: skip


def sentences_with_twins() -> list[dict[str, Any]]:
    """Two and two sentences that differ in their last word."""
    draw, found = torch.Generator().manual_seed(0), list[dict[str, Any]]()
    for i in range(NUM_SAMPLES // 2):
        ids = torch.randint(4, 90, (4 + 2 * i,), generator=draw)
        for last in (91, 92):
            own = torch.cat([ids[:-1], torch.tensor([last])])
            found.append({"input_ids": own, "attention_mask": torch.ones_like(own), "labels": torch.tensor(last % 3)})
    return found


TEXTS = replace(
    CASES["t5"], data=lambda: [{**row, "labels": row["labels"].repeat(6)} for row in sentences_with_twins()]
)


def of_tokens(given: list[dict[str, Any]]) -> dict[str, Any]:
    found = pad(given)
    return {**found, "labels": found["labels"][:, None].expand(-1, found["input_ids"].shape[1]).contiguous()}


CONVOLVED = Case(convbert_probe, sentences_with_twins, "convbert", of_tokens)


# ---- plants ----


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put a function around a method: it gets the method, and its arguments."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(own, *args, **kwargs))


def reads(change: Callable[[torch.Tensor], torch.Tensor], after: int = 0) -> Callable[[Patch], None]:
    """Records `(rows, values, 1)` are read as something else, from some read on."""

    def plant(patch: Patch) -> None:
        number = [0]

        def read(own: Any, self: Any, *args: Any) -> Any:
            found = own(self, *args)
            number[0] += 1
            return found if found is None or number[0] <= after else change(found.clone())

        around(patch, ContentStore, "read", read)

    return plant


def put(found: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    found[index] = value
    return found


def hands_out(change: Callable[[dict[int, torch.Tensor]], dict[int, torch.Tensor]]) -> Callable[[Patch], None]:
    return lambda patch: around(patch, Reading, "outputs", lambda own, *args: change(own(*args)))


def keys(change: Callable[[Rows, Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: around(patch, Rows, "digests", lambda own, self, *a, **k: change(self, own(self, *a, **k)))


def another_part(patch: Patch) -> None:
    opened = list[ContentStore]()
    around(patch, ContentStore, "__init__", lambda own, self, *a, **k: (own(self, *a, **k), opened.append(self))[0])
    around(
        patch, ContentStore, "read", lambda own, self, *a: own(next(each for each in opened if each is not self), *a)
    )


def places_twice(patch: Patch) -> None:
    def write(own: Any, self: Any, *args: Any) -> None:
        first = self._next
        own(self, *args)
        self._next = first

    around(patch, ContentStore, "write", write)


def places_exchanged(patch: Patch) -> None:
    def write(own: Any, self: Any, digests: Any, *args: Any) -> None:
        own(self, digests, *args)
        names = [row.tobytes() for row in digests if row.tobytes() in self._places]
        self._places.update(zip(names, [self._places[name] for name in names][::-1], strict=True))

    around(patch, ContentStore, "write", write)


def half_is_stored(patch: Patch) -> None:
    """No fault: there is no room for rows that have an odd key."""

    def write(own: Any, self: Any, digests: Any, activation: Any, lengths: Any) -> None:
        chosen = digests[:, 0] % 2 == 0
        own(self, digests[chosen], activation[torch.from_numpy(chosen)], lengths[chosen])

    around(patch, ContentStore, "write", write)


def put_together_in_another_order(patch: Patch) -> None:
    half_is_stored(patch)
    around(patch, Records, "_write", lambda own, *args: own(*args).flip(0))


def two_rows_one_key(given: Rows, found: Any) -> Any:
    firsts = given.tensors[0].flatten(1)[:, 0]
    found[np.isin(firsts.numpy(), [float(row["x"][0, 0]) for row in (rows()[0], rows()[3])])] = 7
    return found


def key_without_the_second_input(patch: Patch) -> None:
    around(patch, Rows, "_parts_of_rows",
           lambda own, self, tensor, *args: own(self, tensor, *args) if tensor is self.tensors[0]
           else iter([None] * self.number))  # fmt: skip


def key_without_options(patch: Patch) -> None:
    def kind(own: Any, self: Any, cuts: bool) -> bytes:
        return own(replace(self, given=(self.given[0], {})), cuts)

    around(patch, Rows, "kind", kind)


def key_ends_before_the_last_token(patch: Patch) -> None:
    def digests(own: Any, self: Any, *args: Any, **named: Any) -> Any:
        lengths = None if self.lengths is None else np.maximum(self.lengths - 1, 1)
        return own(replace(self, lengths=lengths), *args, **named)

    around(patch, Rows, "digests", digests)


def state_unseen(patch: Patch) -> None:
    patch.setattr(ModuleState, "digest", b"")
    patch.setattr(ModuleState, "hooked", None)


def classes_unseen(patch: Patch) -> None:
    patch.setattr("hf_pipetransformer.cache.frozen_parts.state._class_text", lambda _kind: "")


def weights_unseen(patch: Patch) -> None:
    patch.setattr(PrefixWatch, "has_changed", lambda *_, **__: False)
    patch.setattr(FrozenPart, "_present_marks", lambda _: [])


def buffers_unseen(patch: Patch) -> None:
    patch.setattr(FrozenPart, "weights", property(lambda self: [*self.module.parameters()]))


def one_name_for_all_weights(patch: Patch) -> None:
    patch.setattr(served, "weights_key", lambda *_: "")
    patch.setattr(PartStores, "_key_of_store", lambda self, *_: "part" if self.args.activation_cache_keep else None)


def places_of_all_weights(patch: Patch) -> None:
    """The index is not asked of which weights a record is."""

    def look_again(own: Any, self: Any) -> None:
        kept = dict(self._places)
        own(self)
        self._places |= kept

    around(patch, ContentStore, "look_again", look_again)


def stale_index(patch: Patch) -> None:
    def look_again(own: Any, self: Any) -> None:
        own(self)
        self._places = dict(zip(self._places, np.roll([*self._places.values()], 1).tolist(), strict=True))

    around(patch, ContentStore, "look_again", look_again)


def watch_sees_no_draws(patch: Patch) -> None:
    patch.setattr(watching.Watch, "_why_not_called_again", lambda *_: (None, False))
    watch_tells_no_difference(patch)


def watch_tells_no_difference(patch: Patch) -> None:
    patch.setattr(watching, "any_differs", lambda *_: False)


class Everything(set[int]):
    def __contains__(self, _: object) -> bool:
        return True


def read_before_it_came_out_alike_twice(patch: Patch) -> None:
    around(patch, Records, "begin", lambda own, self: (own(self), setattr(self, "_agreed", Everything()))[0])


def handed_out_twice(patch: Patch) -> None:
    """Tensors that the script has got and may have written into are handed out again."""
    known = dict[bytes, Any]()
    around(patch, Reading, "outputs",
           lambda own, self, found, call: known.setdefault(call.keys.tobytes(), own(self, found, call)))  # fmt: skip


def stored_before_evaluation_mode(patch: Patch) -> None:
    def keep(own: Any, self: Any, call: Any, _leaves: Any) -> None:
        with generators_kept():
            args, kwargs = (undeferred(each) for each in call.rows.given)
            own(self, call, tensors_of(self.plan.part.module(*args, **kwargs)))

    def standing(own: Any, self: Any, *args: Any) -> None:
        keep(own, self, *args)

    around(patch, Records, "keep", standing)


def picks_written_in_another_order(patch: Patch) -> None:
    around(patch, Reading, "records",
           lambda own, self, *args: own(replace(self, picks=self.picks[::-1]), *args))  # fmt: skip


def kept_of_another_module(patch: Patch) -> None:
    around(patch, Records, "keep", lambda own, self, call, leaves: own(self, call, [each * 1.1 for each in leaves]))


def late_check(patch: Patch) -> None:
    patch.setattr(served, "CHECK_EVERY", 2)
    reads(lambda found: found * 1.1, after=1)(patch)


def nothing(_: Any) -> None:
    pass


# ---- edits, before a step ----


def inside(model: nn.Module, kind: type[nn.Module] = nn.Linear) -> Any:
    return next(each for each in model.tower.modules() if type(each) is kind)  # type: ignore[union-attr]


@torch.no_grad()
def weight_written(model: nn.Module) -> None:
    inside(model).weight.mul_(1.5)


def module_replaced(model: Any) -> None:
    model.tower[1] = nn.Linear(16, 16).requires_grad_(False)
    nn.init.constant_(model.tower[1].weight, 0.1)
    nn.init.zeros_(model.tower[1].bias)


@torch.no_grad()
def buffer_written(model: nn.Module) -> None:
    inside(model, nn.BatchNorm1d).running_mean.add_(1.0)


def eps_edited(model: nn.Module) -> None:
    inside(model, nn.LayerNorm).eps = 0.5


def class_exchanged(model: nn.Module) -> None:
    inside(model, nn.Tanh).__class__ = nn.Sigmoid


def forward_exchanged(model: nn.Module) -> None:
    inside(model, nn.Tanh).forward = torch.sin


def hook_registered(model: nn.Module) -> None:
    inside(model, nn.Tanh).register_forward_hook(lambda _module, _args, output: output.abs())


def dropout_turned_on(model: nn.Module) -> None:
    inside(model, nn.Dropout).p = 0.5


def file_of(trainer: Any, name: str) -> Path:
    return trainer.pipeline_run.stored_parts.served[0].store._store.folder / name


def bytes_flipped(trainer: Any) -> None:
    path = file_of(trainer, "records-0.bin")
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[2::4] ^= 0x40
    path.write_bytes(content.tobytes())


def records_zeroed(trainer: Any) -> None:
    path = file_of(trainer, "records-0.bin")
    path.write_bytes(bytes(len(path.read_bytes())))


def entries_exchanged(trainer: Any) -> None:
    """Each place of the index gets the entry of the next one."""
    path = file_of(trainer, "index.bin")
    content = path.read_bytes()
    size, ends = ENTRY.itemsize, NUM_SAMPLES * ENTRY.itemsize
    path.write_bytes(content[size:ends] + content[:size] + content[ends:])


class Edits(TrainerCallback):
    """Edits the model, or the files of the trainer, before a step."""

    def __init__(self, trainer: Any, step: int, edit: Callable[[Any], None], of_files: bool) -> None:
        self.trainer, self.step, self.edit, self.of_files = trainer, step, edit, of_files

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step - 1:
            self.edit(self.trainer if self.of_files else model)


# ---- the table ----


FIRST, LATER, AGAIN = "first read", "later read", "second computing"
EPOCH, CHECKPOINT, FILE = "end of an epoch", "checkpoint", "hash of the file"
CHANGED, WRONG, OFF = (
    "was changed from outside",
    r"computes something else.*Steps {} to {} may",
    "computed from here on",
)
NOT_ALIKE = "gives something else for samples that come a second time"


@dataclass(frozen=True)
class Fault:
    """A fault, the check that sees it first and after which step, and the steps that have read wrong values by then.

    Args:
        edit: done before the step of this number, of the model or of the files.
        later: an edit that a second run begins with, which finds what the first one has kept.
        is_quick: False to leave it to the nightly tests.
    """

    plant: Callable[[Patch], None]
    seen_by: str = FIRST
    after: int = STEPS
    case: Case = PLAIN
    edit: tuple[int, Callable[[Any], None]] | None = None
    later: Callable[[Any], None] | None = None
    wrong: Sequence[int] = ()
    told: str = CHANGED
    options: dict[str, Any] = field(default_factory=dict)
    is_quick: bool = False

    @property
    def of_files(self) -> bool:
        return self.edit is not None and self.edit[1] in (bytes_flipped, records_zeroed, entries_exchanged)


SAVES = {"save_strategy": "steps", "save_steps": 8}
EVALUATES = {"per_device_eval_batch_size": 4}
UNSEEN_EDIT = {"seen_by": CHECKPOINT, "after": 8, "wrong": (8,), "told": WRONG.format(7, 8), "options": SAVES}
"""Of an edit before step 8 that no watch sees: the checkpoint after the step finds it."""

FAULTS = {
    # What is read.
    "record of another row": Fault(reads(lambda found: found.flip(0)), is_quick=True),
    "one row's record for all": Fault(reads(lambda found: found[:1].expand_as(found))),
    "records of the last two rows": Fault(reads(lambda found: torch.cat([found[:-2], found[-2:].flip(0)])),
                                          is_quick=True),
    "record of another part": Fault(another_part, case=TWO, is_quick=True),
    "one value of a record": Fault(reads(lambda found: put(found, (slice(None), 0), found[:, 0] + 0.01))),
    "one value of one row": Fault(reads(lambda found: put(found, (-1, 0), found[-1, 0] + 0.01))),
    "record scaled": Fault(reads(lambda found: found * 1.001)),
    "record of a coarser dtype": Fault(reads(lambda found: found.bfloat16().to(found))),
    "record cut short": Fault(reads(lambda found: put(found, (slice(None), slice(8, None)), 0))),
    "record of zeros": Fault(reads(torch.zeros_like)),
    "record with nan": Fault(reads(lambda found: put(found, (slice(None), 0), float("nan")))),
    "reads go wrong later": Fault(reads(lambda found: found * 1.1, after=1), EPOCH, 6, wrong=(5, 6),
                                  told=WRONG.format(4, 6), is_quick=True),
    "reads go wrong before a check": Fault(late_check, LATER, 5, wrong=(5,), told=WRONG.format(4, 5), is_quick=True),
    # What is written, and where.
    "places given out twice": Fault(places_twice),
    "places exchanged": Fault(places_exchanged),
    "places found for others": Fault(
        lambda patch: around(patch, ContentStore, "find", lambda own, *args: np.roll(own(*args), 1))
    ),
    "kept of another module": Fault(kept_of_another_module),
    "outputs written in another order": Fault(picks_written_in_another_order, case=ATTENTION),
    "bytes flipped on the disk": Fault(nothing, FILE, 4, edit=(5, bytes_flipped), told=OFF, is_quick=True),
    "zeros on the disk": Fault(nothing, FILE, 4, edit=(5, records_zeroed), told=OFF),
    "entries of the index exchanged": Fault(nothing, FILE, 4, edit=(5, entries_exchanged), told=OFF, is_quick=True),
    # What is handed out.
    "outputs exchanged": Fault(hands_out(lambda found: {0: found[1], 1: found[0]}), case=ATTENTION, is_quick=True),
    "outputs rounded": Fault(hands_out(lambda found: {n: each.bfloat16().to(each) for n, each in found.items()})),
    "rows of the outputs exchanged": Fault(hands_out(lambda found: {n: each.flip(0) for n, each in found.items()})),
    "rows put together in another order": Fault(put_together_in_another_order, after=4, is_quick=True),
    "handed out twice": Fault(handed_out_twice, EPOCH, 8, case=replace(probe(reads=in_place), data=lambda: rows()[:4]),
                              told=WRONG.format(5, 8), options={"per_device_train_batch_size": 1}, is_quick=True),
    "padding cut too early": Fault(
        lambda patch: around(patch, Reading, "lengths", lambda own, *args: np.maximum(own(*args) - 1, 1)),
        after=2, case=TEXTS, is_quick=True,
    ),
    # What a record is known by.
    "one key for all": Fault(keys(lambda _, found: np.zeros_like(found)), after=2, is_quick=True),
    "one key for two rows": Fault(keys(two_rows_one_key), AGAIN, 2, is_quick=True),
    "key without the second input": Fault(key_without_the_second_input, AGAIN, 2, case=PAIRS, is_quick=True),
    "key without options": Fault(key_without_options, AGAIN, case=SWITCHED, told=NOT_ALIKE),
    "key without modes": Fault(lambda patch: patch.setattr(Modes, "precision", b""),
                               case=probe(reads=at_times_in_bf16)),
    "key without the last token": Fault(key_ends_before_the_last_token, AGAIN, 2, case=TEXTS),
    "key without the number of an output": Fault(
        lambda patch: patch.setattr(
            PresentStep, "keys_of", lambda _, each, __: getattr(getattr(each, "call", None), "keys", None)
        ),
        case=CHAIN, after=1,
    ),
    # What changes in the run.
    "attribute unseen": Fault(state_unseen, edit=(8, eps_edited), is_quick=True, **UNSEEN_EDIT),
    "class unseen": Fault(classes_unseen, edit=(8, class_exchanged), **UNSEEN_EDIT),
    "forward unseen": Fault(state_unseen, edit=(8, forward_exchanged), **UNSEEN_EDIT),
    "hook unseen": Fault(state_unseen, edit=(8, hook_registered), **UNSEEN_EDIT),
    "weights unseen": Fault(weights_unseen, edit=(8, weight_written), is_quick=True, **UNSEEN_EDIT),
    "module unseen": Fault(weights_unseen, edit=(8, module_replaced), **UNSEEN_EDIT),
    "buffer unseen": Fault(buffers_unseen, edit=(8, buffer_written), case=NORMED, **UNSEEN_EDIT),
    "attribute unseen, no checkpoint": Fault(
        state_unseen, EPOCH, 9, edit=(8, eps_edited), wrong=(8, 9), told=WRONG.format(7, 9)
    ),
    "records of the weights before": Fault(one_name_for_all_weights, AGAIN, 7, edit=(8, weight_written),
                                            told=WRONG.format(7, 7), is_quick=True),
    "places of the weights before": Fault(places_of_all_weights, FILE, 7, edit=(8, weight_written), told=OFF),
    "dropout turned on": Fault(nothing, after=6, case=probe(lambda: tower(nn.Dropout(0.0))),
                               edit=(4, dropout_turned_on), is_quick=True),
    "records of evaluations": Fault(state_unseen, AGAIN, case=probe(OfScript), told=NOT_ALIKE, options=EVALUATES),
    # What the watch of the first step should have seen.
    "draws unseen": Fault(watch_sees_no_draws, case=probe(lambda: tower(nn.Dropout(0.5)))),
    "other rows of the batch unseen": Fault(
        watch_tells_no_difference, case=probe(lambda: tower(nn.Softmax(0)))
    ),
    "padding unseen": Fault(watch_tells_no_difference, case=CONVOLVED),
    "read before it came out alike twice": Fault(
        read_before_it_came_out_alike_twice, AGAIN, case=probe(Company), told=NOT_ALIKE
    ),
    # What an earlier run has kept.
    "kept of other weights": Fault(one_name_for_all_weights, AGAIN, 1, later=weight_written, is_quick=True),
    "kept with another attribute": Fault(state_unseen, AGAIN, 1, later=eps_edited),
    "kept, with a stale index": Fault(stale_index, AGAIN, 1, later=nothing),
}  # fmt: skip


# ---- the law ----


def trainer_for(kind: type, fault: Fault, folder: Path) -> Any:
    options = {"num_train_epochs": EPOCHS, "learning_rate": 0.0, **fault.options}
    if fault.later is not None:
        options |= {"activation_cache_keep": True, "activation_cache_dir": str(folder.parent / "kept")}
    trainer: Any = trainer_of(kind, fault.case, folder, **options)
    if fault.options == EVALUATES:
        trainer.eval_dataset, trainer.args.eval_strategy = trainer.train_dataset, IntervalStrategy.EPOCH
    if fault.edit is not None and not (fault.of_files and kind is Trainer):
        trainer.add_callback(Edits(trainer, *fault.edit, fault.of_files))
    return trainer


def run(kind: type, fault: Fault, folder: Path, started: Callable[[Any], None] = nothing) -> np.ndarray:
    if fault.later is not None and kind is not Trainer:
        trainer_for(kind, fault, folder / "earlier").train()
    trainer = trainer_for(kind, fault, folder / "own")
    if fault.later is not None:
        fault.later(trainer.model)
    started(trainer)
    return np.array(logged(trainer))


def wrong_steps(found: np.ndarray, expected: np.ndarray) -> list[int]:
    is_right = np.isclose(found, expected, rtol=2e-5, atol=2e-5).all(1)
    return (np.flatnonzero(~is_right) + 1).tolist()


@cache
def _expected(case: Case, edit: Any, later: Any, options: tuple[tuple[str, Any], ...], folder: Path) -> np.ndarray:
    return run(Trainer, Fault(nothing, case=case, edit=edit, later=later, options=dict(options)), folder)


def expected_of(fault: Fault, folder: Path) -> np.ndarray:
    """Return Trainer's losses and gradient norms with the same edits."""
    edit = None if fault.of_files else fault.edit
    options = tuple(each for each in fault.options.items() if "save" not in each[0])
    return _expected(fault.case, edit, fault.later, options, folder)


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: Patch) -> None:
    monkeypatch.setattr(watching, "WORTH", 0.0)


def without_checks(patch: Patch) -> None:
    patch.setattr(served, "differs", lambda *_: False)
    patch.setattr(served, "NUM_COMPARED", 0)
    patch.setattr(Records, "is_what_it_was", lambda _: True)
    patch.setattr(stores, "hash_of", lambda _: 0)
    patch.setattr(files.Index, "_hashes", lambda _self, entries, _samples: np.zeros(len(entries), np.uint64))
    patch.setattr(ContentStore, "read", lambda self, places, length: self._store.read(places, length).activation)


def name_of_the_check(frame: Any) -> str:
    """Return which check has found that records do not hold, by who calls."""
    name = frame.f_code.co_name
    if name == "found":
        return FIRST if frame.f_locals["number"] == 1 else LATER
    while name == "check_thoroughly":
        frame = frame.f_back
        name = frame.f_code.co_name
    return {"keep": AGAIN, "end_epoch": EPOCH, "_save_checkpoint": CHECKPOINT}.get(name, name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if each.is_quick else pytest.mark.slow) for name, each in FAULTS.items()]
)
def test_a_planted_fault_is_seen(
    name: str, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = FAULTS[name]
    expected = expected_of(fault, tmp_path / "plain")
    seen, told_before = list[tuple[str, int]](), list[bool]()

    def noting(trainer: Any) -> None:
        def note(own: Any, self: Any, *args: Any) -> None:
            step = trainer.state.global_step
            off = own.__name__ == "switch_off"
            seen.append((FILE if off else name_of_the_check(inspect.stack()[2].frame), step))
            told_before.append(not (tmp_path / "checks" / "own" / f"checkpoint-{step}").exists())
            own(self, *args)

        around(monkeypatch, Records, "distrust", note)
        around(monkeypatch, ContentStore, "switch_off", note)

    with monkeypatch.context() as patch:
        without_checks(patch)
        fault.plant(patch)
        assert wrong_steps(run(PipeTransformerTrainer, fault, tmp_path / "no checks"), expected), "no fault at all"
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        caplog.clear()
        fault.plant(monkeypatch)
        found = run(PipeTransformerTrainer, fault, tmp_path / "checks", noting)
    assert seen[:1] == [(fault.seen_by, fault.after)]
    assert wrong_steps(found, expected) == list(fault.wrong)
    assert all(told_before), "the checkpoint is written after the sentence"
    assert re.search(fault.told, "\n".join(record.getMessage() for record in caplog.records))
