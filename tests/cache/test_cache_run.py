"""The activation cache of a training in one process, while layouts, weights and evaluation sets change."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache.cache import ActivationCache
from hf_pipetransformer.cache.chain import settings_of
from hf_pipetransformer.cache.opening import CacheStores
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import StorageSpeed
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.cache.training import TrainingCache
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.training import part_stores
from hf_pipetransformer.training import start as beginning
from tests.cache.test_cache_safety import FORM
from tests.cache.test_store import fill
from tests.support.models import build_model, collate, make_dataset, make_rows


CHANGED_AT = 6
"""The first step of the third epoch: all rows are stored."""


def trainer_of(folder: Path, kind: Any = PipeTransformerTrainer, **changes: Any) -> PipeTransformerTrainer:
    given = {"train_dataset": make_dataset("bert_sequence", 12), "data_collator": collate} | {
        name: changes.pop(name)
        for name in ("callbacks", "eval_dataset", "train_dataset", "data_collator")
        if name in changes
    }
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 12, "save_strategy": "no",
        "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3,
        "freeze_policy": "fixed", "freeze_at": "0:2", "activation_cache": "on",
        "activation_cache_dir": str(folder / "cache"),
    }  # fmt: skip
    found: PipeTransformerTrainer = kind(
        build_model("bert_sequence"), PipeTransformerArguments(**(options | changes)), **given
    )
    return found


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Records without an index."""

    def __iter__(self) -> Iterator[Any]:
        return iter(make_dataset("bert_sequence", 12))


def test_a_stream_is_not_stored_and_the_reason_is_told(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, train_dataset=Streamed(), max_steps=3)
    trainer.train()
    assert trainer.layout.num_frozen_layers == 2
    (event,) = cache_events(trainer, "off")
    assert "the data set is a stream (Streamed): without indices" in event["reason"]


def cache_events(trainer: PipeTransformerTrainer, what: str) -> list[dict[str, Any]]:
    lines = Path(str(trainer.events.path)).read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "cache" and event["what"] == what]


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[TrainingCache]:
    """Those of the trainings that begin."""
    made, begin = [], beginning.begin_cache

    def begin_and_note(*args: Any) -> TrainingCache | None:
        made.append(begin(*args))
        return made[-1]

    monkeypatch.setattr(beginning, "begin_cache", begin_and_note)
    return made


def test_records_of_a_batch_are_read_while_the_one_before_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits here until that computation has begun: if it waited for the records, neither would go on."""
    trainer = trainer_of(tmp_path)
    begun, asked, waited = threading.Condition(), [0], []
    num_forwards = [0]
    prefetch, read = ActivationCache.prefetch, ActivationStore.read

    def count(*_: Any) -> None:
        with begun:
            num_forwards[0] += 1
            begun.notify_all()

    def note_and_prefetch(cache: ActivationCache, samples: list[int]) -> None:
        asked[0] = num_forwards[0]
        prefetch(cache, samples)

    def wait_and_read(store: ActivationStore, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            with begun:
                waited.append(begun.wait_for(lambda: num_forwards[0] > asked[0], timeout=20))
        return read(store, *args)

    trainer.model.classifier.register_forward_pre_hook(count)
    monkeypatch.setattr(ActivationCache, "prefetch", note_and_prefetch)
    monkeypatch.setattr(ActivationStore, "read", wait_and_read)
    trainer.train()
    # Three epochs read what the first one stored, of three batches the second and the third ahead.
    assert waited == [True] * 6


class ChangesUnwatched(TrainerCallback):
    """Lowers the level to which layers are cached, changes a weight above it, and raises the level again."""

    def __init__(self, caches: list[TrainingCache], low: int, layer: int) -> None:
        self.caches, self.low, self.name = caches, low, f"bert.encoder.layer.{layer}.output.dense.weight"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != CHANGED_AT:
            return
        for level in self.levels():
            for cache in filter(None, self.caches):
                stage = cache.pipeline.stage
                stage.layout = replace(stage.layout, cache_level=level)
                cache.follow()
            if level == self.low:
                with torch.no_grad():
                    kwargs["model"].get_parameter(self.name).mul_(1.5)

    def levels(self) -> Iterator[int]:
        yield from (self.low, 2)


@pytest.mark.parametrize(("low", "layer"), [(0, 0), (1, 1)])
def test_weights_that_change_while_fewer_layers_are_cached_are_noticed_when_more_are_again(
    tmp_path: Path, caches: list[TrainingCache], low: int, layer: int
) -> None:
    losses = {}
    for mode in ("on", "off"):
        change = ChangesUnwatched(caches if mode == "on" else [None], low, layer)
        trainer = trainer_of(tmp_path / mode, callbacks=[change], activation_cache=mode)
        trainer.train()
        losses[mode] = losses_of(trainer)
        if mode == "on":
            assert [event["hits"] for event in cache_events(trainer, "epoch")][-1] == 12
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-5)


def one_element(model: torch.nn.Module) -> None:
    model.bert.encoder.layer[0].output.dense.weight.data[0, 0] += 1


def hook(model: torch.nn.Module) -> None:
    model.bert.encoder.layer[1].output.register_forward_hook(lambda _module, _given, output: output * 1.01)


def epsilon(model: torch.nn.Module) -> None:
    model.bert.encoder.layer[0].output.LayerNorm.eps = 0.1


class ChangesUnseen(TrainerCallback):
    """Changes frozen layers where no version counter shows it, before the epoch or the step of a number."""

    def __init__(self, change: Callable[[torch.nn.Module], None], epoch: int = -1, step: int = -1) -> None:
        self.change, self.epoch, self.step = change, epoch, step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if round(state.epoch) == self.epoch:
            self.change(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.change(kwargs["model"])


@pytest.mark.parametrize("change", [one_element, hook, epsilon])
def test_what_frozen_layers_compute_may_change_between_epochs(
    tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    losses = {}
    for mode in ("on", "off"):
        trainer = trainer_of(tmp_path / mode, callbacks=[ChangesUnseen(change, epoch=2)], activation_cache=mode)
        trainer.train()
        losses[mode] = losses_of(trainer)
        if mode == "on":
            # The first batch of the third epoch was looked up before the check, and then once more.
            assert [event["hits"] for event in cache_events(trainer, "epoch")] == [0, 12, 0, 12]
            assert caplog.text.count("their activations are computed again") == 1
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-5)


@pytest.mark.parametrize("change", [one_element, epsilon])
def test_a_run_that_may_have_used_stale_activations_ends_and_says_in_which_steps(tmp_path: Path, change: Any) -> None:
    trainer = trainer_of(tmp_path, callbacks=[ChangesUnseen(change, step=4)])
    with pytest.raises(ValueError, match=r"Steps 4 to 6 may have used stored activations that do not hold any more"):
        trainer.train()
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("is_same", [True, False])
def test_a_kept_store_is_served_only_if_the_layers_still_compute_what_it_has(
    tmp_path: Path, is_same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = Known(make_rows("bert_sequence", 12))
    options = {"train_dataset": data, "activation_cache_dir": str(tmp_path / "cache"), "max_steps": 6}
    trainer_of(tmp_path / "first", activation_cache_keep=True, **options).train()
    losses = {}
    for mode in ("on", "off"):
        trainer = trainer_of(tmp_path / mode, activation_cache=mode, **options)
        if not is_same:
            epsilon(trainer.model)
        trainer.train()
        losses[mode] = losses_of(trainer)
        if mode == "on":
            assert [event["hits"] for event in cache_events(trainer, "epoch")] == [12 if is_same else 0, 12]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-5)
    words = "activations that an earlier run has stored are computed again: the frozen layers have the same weights"
    assert caplog.text.count(words) == (0 if is_same else 1)


@pytest.mark.parametrize(("rate", "bf16"), [(0.1, False), (0.0, False), (0.0, True)])
def test_auto_stores_what_the_script_froze_only_where_that_has_no_dropout(
    tmp_path: Path, rate: float, bf16: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast records are not rounded; its products depend on a row's company, here always the same."""
    monkeypatch.setattr(part_stores, "measure_storage", lambda *_: StorageSpeed(1e-9, 1e-9))
    monkeypatch.setattr(part_stores, "WORTH_SECONDS", -1e9)
    losses, folder = {}, tmp_path / "auto"
    for kind in ("auto", "plain"):
        options: dict[str, Any] = {
            "output_dir": str(tmp_path / kind), "max_steps": 9, "per_device_train_batch_size": 4, "logging_steps": 1,
            "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3,
            "bf16": bf16, "train_sampling_strategy": "sequential" if bf16 else "random",
        }  # fmt: skip
        model = build_model("bert_sequence")
        model.requires_grad_(False)
        for part in (*model.bert.encoder.layer[2:], model.classifier):
            part.requires_grad_(True)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = rate
        data = {"train_dataset": make_dataset("bert_sequence", 12), "data_collator": collate}
        if kind == "plain":
            trainer: Any = Trainer(model, TrainingArguments(**options), **data)
            trainer.model_accepts_loss_kwargs = False
        else:
            arguments = PipeTransformerArguments(**options, activation_cache_dir=str(folder))
            trainer = PipeTransformerTrainer(model, arguments, **data)
        with caplog.at_level(logging.INFO):
            trainer.train()
        losses[kind] = losses_of(trainer)
    assert losses["auto"] == pytest.approx(losses["plain"], rel=1e-5)
    assert caplog.text.count("activation_cache='on' stores its outputs, computed in evaluation mode") == bool(rate)
    assert ("bert.embeddings to bert.encoder.layer.1: " in caplog.text) == (not rate)


NUM_KNOWN = 64
CHANGED = (1, 3, 31)
"""Samples that another collator changes."""


class Known(torch.utils.data.Dataset[Any]):
    """Records under a name that stays the same, as where only the collator differs, which counts what is read."""

    _fingerprint = "rows"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_read += 1
        return self.rows[index]


def test_a_kept_row_is_served_only_if_the_collator_still_gives_the_same_input(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_rows("bert_sequence", NUM_KNOWN)
    changed = [rows[sample]["input_ids"] for sample in CHANGED]

    def collate_others(samples: list[dict[str, Any]]) -> Any:
        """Other words, as many, in a few samples."""
        return collate(
            [
                {**row, "input_ids": [5 + (word + 7) % 50 for word in row["input_ids"]]}
                if row["input_ids"] in changed
                else row
                for row in samples
            ]
        )

    def train(name: str, collator: Any, **options: Any) -> PipeTransformerTrainer:
        data = Known(rows)
        usual = {
            "activation_cache_keep": True, "activation_cache_dir": str(tmp_path / "cache"), "max_steps": 8,
            "per_device_train_batch_size": 16,
        }  # fmt: skip
        trainer = trainer_of(
            tmp_path / name, train_dataset=data, data_collator=collator,
            **(usual | options),
        )  # fmt: skip
        trainer.train()
        return trainer

    train("first", collate)
    with caplog.at_level(logging.INFO):
        found = train("with", collate_others)
    expected = train("without", collate_others, activation_cache="off")
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
    epochs = cache_events(found, "epoch")
    assert [event["hits"] for event in epochs] == [NUM_KNOWN - len(CHANGED), NUM_KNOWN]
    # As Trainer reads them, and nothing for a trial.
    assert found.train_dataset.num_read == expected.train_dataset.num_read
    told = [record.getMessage() for record in caplog.records]
    assert sum(f"records of an earlier run for {NUM_KNOWN} of {NUM_KNOWN} samples" in text for text in told) == 1
    (warned,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "is not what it was when its activation was stored. Such samples are computed again." in warned


@dataclass
class Inputs:
    """What the stores of a training on one process ask for."""

    base: Path
    args: Any = field(
        default_factory=lambda: SimpleNamespace(
            activation_cache_max_gb=1e-3, activation_cache_keep=False, device=torch.device("cpu")
        )
    )
    topology: Topology = field(default_factory=lambda: Topology(timeout=5, local_world_size=None))
    context: Any = field(default_factory=lambda: SimpleNamespace(run=SimpleNamespace(model=torch.nn.Linear(1, 1))))


def test_the_stores_of_a_training_share_its_bound(tmp_path: Path) -> None:
    stores = CacheStores(Inputs(tmp_path))
    loader, form = SimpleNamespace(dataset=range(2000)), replace(FORM, record_format=RecordFormat(64, torch.float32))
    training = stores.open(loader, form)
    assert training is not None and fill(training.store, np.arange(100)) == 100
    evaluation = stores.open(loader, form, is_training=False)
    assert evaluation is not None
    for part in np.split(np.arange(2000), 20):
        fill(evaluation.store, part)
        fill(training.store, part)
    assert training.store.bytes_stored + evaluation.store.bytes_stored <= 1e6
    assert 0.99e6 < training.store.bytes_taken + evaluation.store.bytes_taken <= 1e6
    stores.close()


def test_ranks_that_see_different_file_systems_are_told_so(tmp_path: Path) -> None:
    """Containers on one machine with one host name."""
    told: list[str] = []
    path = str(tmp_path / "of-rank-0")
    topology: Any = SimpleNamespace(
        rank=1,
        is_first_here=False,
        ranks_here=[0, 1],
        gather=lambda told: [path, None] if told is None else [[None, [0, 1]], told],
    )
    inputs: Any = SimpleNamespace(args=None, topology=topology, say_off=lambda reason, _: told.append(reason))
    assert CacheStores(inputs).open(SimpleNamespace(), SimpleNamespace()) is None
    assert f"rank 1 does not see {path}, which rank 0 has made" in told[0]
    assert "a host name of its own" in told[0]


def test_rows_are_of_one_device_and_one_precision_of_products(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    model, args = trainer.model, trainer.args
    names = {settings_of(model, args)}
    for settings in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv):
        before = settings.fp32_precision
        settings.fp32_precision = "ieee" if before == "tf32" else "tf32"
        try:
            names.add(settings_of(model, args))
        finally:
            settings.fp32_precision = before
    elsewhere = SimpleNamespace(fp16=False, bf16=False, device=torch.device("cuda"))
    assert settings_of(model, SimpleNamespace(fp16=False, bf16=False, device=torch.device("cpu"))) in names
    assert len({*names, settings_of(model, elsewhere)}) == 5


class Wasteful(torch.utils.data.Dataset[Any]):
    """Draws a number for a sample that is the same each time."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.rand(1)
        return make_dataset("bert_sequence", 12)[index]


def test_what_one_process_reads_for_all_is_not_stored_and_the_reason_is_told(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, train_dataset=Wasteful(), max_steps=3)
    trainer.train()
    assert trainer.layout.num_frozen_layers == 2 and trainer.layout.cache_level == 0
    (event,) = cache_events(trainer, "off")
    assert "so that one process reads for all" in event["reason"]


class Louder(PipeTransformerTrainer):
    """Prepares batches in a way of its own."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


class Masks(PipeTransformerTrainer):
    """Changes words of a batch before its step: in a dict of its own, or in place."""

    in_place = False

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        words = inputs["input_ids"] if self.in_place else inputs["input_ids"].clone()
        words[:, 1] = 5 + self.state.global_step % 40
        return super().training_step(model, inputs if self.in_place else {**inputs, "input_ids": words}, *args)


class MasksInPlace(Masks):
    in_place = True


class Doubles(PipeTransformerTrainer):
    """Changes nothing before its step."""

    def training_step(self, *args: Any) -> Any:
        return 2 * super().training_step(*args)


@pytest.mark.parametrize(("kind", "hits"), [(Masks, 0), (MasksInPlace, 0), (Doubles, 12)])
def test_a_batch_that_was_changed_behind_the_loader_is_computed(tmp_path: Path, kind: Any, hits: int) -> None:
    losses = {}
    for mode in ("on", "off"):
        trainer = trainer_of(tmp_path / mode, kind=kind, activation_cache=mode)
        trainer.train()
        losses[mode] = losses_of(trainer)
        if mode == "on" and hits:
            assert [event["hits"] for event in cache_events(trainer, "epoch")] == [0, hits, hits, hits]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-5)


class Weighed(PipeTransformerTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **options)


PARTS = {"pipeline_loss": "parts", "pipeline_parallel_num_microbatches": 2}


@pytest.mark.parametrize(
    ("kind", "options", "who"), [(Louder, {}, "Louder._prepare_inputs"), (Weighed, PARTS, "the script's loss")]
)
def test_code_between_the_loader_and_the_model_keeps_the_store_off(
    tmp_path: Path, kind: Any, options: dict[str, Any], who: str
) -> None:
    trainer = trainer_of(tmp_path, kind=kind, max_steps=3, **options)
    trainer.train()
    assert trainer.layout.num_frozen_layers == 2 and trainer.layout.cache_level == 0
    (event,) = cache_events(trainer, "off")
    assert event["reason"].startswith(f"{who} gets batches between the loader and the model, and may change samples")


def test_an_evaluation_set_that_an_earlier_run_has_stored_is_computed_anew(tmp_path: Path) -> None:
    """What its layers compute now is compared in the training alone."""
    losses = {}
    for run, mode in (("first", "on"), ("with", "on"), ("without", "off")):
        evaluated = Known(make_rows("bert_sequence", 8, 1))
        trainer = trainer_of(
            tmp_path / run, activation_cache=mode, activation_cache_keep=True, eval_strategy="steps", eval_steps=3,
            activation_cache_dir=str(tmp_path / "cache"), eval_dataset=evaluated,
            train_dataset=Known(make_rows("bert_sequence", 12)),
        )  # fmt: skip
        if run != "first":
            # As a hook inside that is in no key: the first layer's output is another one.
            trainer.model.bert.encoder.layer[0].register_forward_hook(
                lambda module, given, output: output * 1.5 if isinstance(output, torch.Tensor) else output
            )
        trainer.train()
        losses[run] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses["with"] == pytest.approx(losses["without"], rel=1e-5)
    assert losses["first"] != pytest.approx(losses["without"], rel=1e-3)


class Noisy(torch.utils.data.Dataset[Any]):
    """Gives another sample each time."""

    def __init__(self) -> None:
        self.rows = make_dataset("bert_sequence", 8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[index])
        return row | {"input_ids": torch.randint(5, 50, (len(row["input_ids"]),)).tolist()}


def test_an_evaluation_set_that_cannot_be_stored_does_not_say_that_training_does_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": Noisy()}
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(tmp_path, **options)
        trainer.train()
    assert cache_events(trainer, "epoch")[-1]["hits"] == 12
    assert not cache_events(trainer, "off") and "cache stays off" not in caplog.text
    (event,) = cache_events(trainer, "evaluation off")
    assert f"The evaluation set is not stored: {event['reason']}" in caplog.text
