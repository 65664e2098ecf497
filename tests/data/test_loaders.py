"""Loaders of scripts, and what is read before a run starts: in one process that may freeze layers, as with Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.training.metrics import MetricAccumulator
from hf_pipetransformer.training.synchronous import SynchronousSteps
from tests.support.comparison import untimed
from tests.support.models import build_model, collate, make_dataset, make_rows
from tests.support.usages import same


MODEL = "bert_sequence"
FREEZES = {"freeze_policy": "fixed", "freeze_at": "1000:1", "activation_cache": "off"}
"""A pipeline that nothing freezes in."""

OWN = ("pipeline_", "frozen_layers", "cache")
"""Names of what a pipeline adds to the log."""

Row = dict[str, Any]


def arguments(base: type, folder: Path, **options: Any) -> TrainingArguments:
    kind = TrainingArguments if issubclass(base, Trainer) and base is Trainer else PipeTransformerArguments
    return kind(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=3, num_train_epochs=2,
        learning_rate=1e-2, logging_steps=1, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
        **options,
    )  # fmt: skip


def made(base: type, folder: Path, subclass: Any = None, given: dict[str, Any] | None = None, **options: Any) -> Any:
    set_seed(3)
    args = arguments(base, folder, **({} if base is Trainer else FREEZES), **options)
    trainer = (base if subclass is None else subclass(base))(build_model(MODEL), args, **(given or {}))
    trainer.model_accepts_loss_kwargs = False  # Else Trainer takes BERT's loss for one that honours the items.
    return trainer


def close(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, torch.Tensor) and expected.is_floating_point():
        return float((found - expected).norm()) <= 1e-5 * float(expected.norm())
    return bool(found == pytest.approx(expected, rel=1e-5)) if isinstance(expected, float) else same(found, expected)


def logs_of(trainer: Any) -> list[Any]:
    entries = [untimed(entry) for entry in trainer.state.log_history]
    kept = ({name: value for name, value in entry.items() if not name.startswith(OWN)} for entry in entries)
    return [entry for entry in kept if entry.keys() - {"epoch", "step"}]


# ---- loaders of a script's own ----


def with_own_loaders(base: type) -> type:
    class OwnLoaders(base):
        """Brings its data along: the trainer gets no collator, and nothing to train on."""

        def get_train_dataloader(self) -> Any:
            return DataLoader(make_dataset(MODEL, 22), batch_size=5, shuffle=True, collate_fn=collate)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(make_dataset(MODEL, 7), batch_size=3, collate_fn=collate)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return self.get_eval_dataloader()

    return OwnLoaders


class Stream(IterableDataset):
    """Samples one after the other."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Row]:
        return iter(make_dataset(MODEL, self.num))


def use_all(trainer: Any) -> list[Any]:
    first = untimed(trainer.evaluate())
    trainer.train()
    predicted = trainer.predict(None)
    return [first, untimed(trainer.evaluate()), torch.as_tensor(predicted.predictions), untimed(predicted.metrics)]


def test_loaders_of_a_class_work_without_data_sets(tmp_path: Path) -> None:
    options = {"eval_strategy": "epoch", "gradient_accumulation_steps": 2}
    given = {"eval_dataset": [{}]}  # Trainer wants one where it evaluates by epochs.
    plain = made(Trainer, tmp_path / "plain", with_own_loaders, given, **options)
    expected = use_all(plain)
    ours = made(PipeTransformerTrainer, tmp_path / "ours", with_own_loaders, given, **options)
    found = use_all(ours)
    assert ours.layout is not None
    assert close(found, expected)
    assert close(logs_of(ours), logs_of(plain))


def test_a_loader_of_ones_own_trains_on_while_layers_freeze(tmp_path: Path) -> None:
    args = arguments(PipeTransformerTrainer, tmp_path, freeze_policy="fixed", freeze_at="3:2")
    trainer = with_own_loaders(PipeTransformerTrainer)(build_model(MODEL), args)
    assert trainer.train().global_step == 10
    assert trainer.layout.num_frozen_layers == 2


def test_a_loader_that_is_put_in_place_of_a_trainers_works(tmp_path: Path) -> None:
    given = {"train_dataset": make_dataset(MODEL, 22), "data_collator": collate}
    logs = []
    for base in (Trainer, PipeTransformerTrainer):
        trainer = made(base, tmp_path / base.__name__, given=given)
        loader = DataLoader(given["train_dataset"], batch_size=5, collate_fn=collate)
        trainer.get_train_dataloader = lambda loader=loader: loader
        trainer.train()
        logs.append(logs_of(trainer))
    assert close(logs[1], logs[0])


def test_a_loader_that_can_be_read_once_only_is_read_once(tmp_path: Path) -> None:
    logs = []
    for base in (Trainer, PipeTransformerTrainer):
        trainer = made(base, tmp_path / base.__name__, given={"data_collator": collate}, max_steps=4)
        rows = make_rows(MODEL, 16)
        batches = iter([collate(rows[start : start + 4]) for start in range(0, 16, 4)])
        trainer.get_train_dataloader = lambda batches=batches: batches
        trainer.train()
        logs.append(logs_of(trainer))
    assert close(logs[1], logs[0])


def steps_beside(counts_of_another: list[int]) -> SynchronousSteps:
    """Steps of one of two replicas with loaders of a script's own; what the other one counts in a step."""

    def over_replicas(counts: list[int]) -> list[int]:
        return [own + other for own, other in zip(counts, counts_of_another, strict=True)]

    trainer: Any = SimpleNamespace(_loss_shifts_labels=False, model_accepts_loss_kwargs=False, compute_loss_func=None)
    trainer.args = SimpleNamespace(device="cpu")
    pipeline: Any = SimpleNamespace(runner=SimpleNamespace(over_replicas=over_replicas), has_labels=True)
    pipeline.layout = SimpleNamespace(num_replicas=2)
    context: Any = SimpleNamespace(trainer=trainer, topology=SimpleNamespace(rank=0))
    no_controller: Any = None
    return SynchronousSteps(context, pipeline, None, MetricAccumulator(context), no_controller)


def test_replicas_whose_loaders_give_different_numbers_of_batches_are_refused() -> None:
    batches = [{"labels": torch.zeros(3, dtype=torch.long)}] * 2
    assert len(steps_beside([2, 4, 2]).begin(iter(batches), 2)[0]) == 2
    with pytest.raises(ValueError, match="gave 2 batches for a step on rank 0 and another number on others, 3"):
        steps_beside([2, 0, 1]).begin(iter(batches), 2)


def test_an_epoch_of_unknown_length_is_over_when_its_loader_is() -> None:
    steps, batches = steps_beside([2, 0, 1]), iter([{"labels": torch.zeros(3, dtype=torch.long)}])
    assert not steps.are_over(batches)
    steps.begin(batches, 2)
    assert steps.are_over(batches)
    assert not steps.are_over(iter([]))


class Look(TrainerCallback):
    """What a callback and a script find as training loader."""

    trainer: Any
    seen: list[Any]

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **kwargs: Any) -> None:
        self.seen = [kwargs["train_dataloader"], self.trainer.get_train_dataloader()]


def test_the_loader_of_a_training_is_a_data_loader_to_callbacks(tmp_path: Path) -> None:
    data, look = make_dataset(MODEL, 22), Look()
    given = {"train_dataset": data, "data_collator": collate, "callbacks": [look]}
    look.trainer = made(PipeTransformerTrainer, tmp_path, given=given, dataloader_drop_last=True)
    look.trainer.train()
    assert look.seen
    for loader in look.seen:
        assert isinstance(loader, DataLoader)
        assert (len(loader), len(loader.dataset)) == (5, 22)
        assert isinstance(loader.sampler, Sampler) and len(loader.sampler) == 22
        assert isinstance(loader.batch_sampler, Sampler)
        assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (4, True)
        assert sorted(loader.batch_sampler.sampler) == list(range(22))
        assert (loader.num_workers, loader.collate_fn is not None) == (0, True)


@pytest.mark.parametrize("config", ["split_batches", "dispatch_batches"])
@pytest.mark.parametrize("data", [lambda: make_dataset(MODEL, 22), lambda: Stream(22)], ids=["indexed", "stream"])
def test_who_reads_a_batch_changes_no_number(config: str, data: Any, tmp_path: Path) -> None:
    options = {"accelerator_config": {config: True}, "max_steps": 7, "eval_strategy": "steps", "eval_steps": 3}
    given = {"train_dataset": data(), "eval_dataset": data(), "data_collator": collate}
    plain = made(Trainer, tmp_path / "plain", given=given, **options)
    ours = made(
        PipeTransformerTrainer, tmp_path / "ours", given=given, pipeline_parallel_num_microbatches=2, **options
    )
    for trainer in (plain, ours):
        trainer.train()
    assert not ours.pipeline_run.is_left_to_trainer
    assert close(logs_of(ours), logs_of(plain))


# ---- what is read before the first step ----


def rows(num: int = 22) -> list[Row]:
    """Lengths in buckets of four, which no collator pads."""
    generator = torch.Generator().manual_seed(2)
    lengths = [4 + index // 4 for index in range(num)]
    return [
        {"input_ids": torch.randint(5, 60, (length,), generator=generator), "labels": torch.tensor(index % 3)}
        for index, length in enumerate(lengths)
    ]


class Drawing:
    """Samples with words that are drawn anew each time, from a generator of its own, numpy's and torch's."""

    def __init__(self) -> None:
        self.rows = make_dataset(MODEL, 22)
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        drawn = [np.random.randint(5, 60), int(torch.randint(5, 60, ())), self._own()]
        return {**row, "input_ids": [row["input_ids"][0], *drawn, *row["input_ids"][4:]][: len(row["input_ids"])]}

    def _own(self) -> int:
        return int(torch.randint(5, 60, (), generator=self.generator))


class DrawingStream(IterableDataset):
    def __init__(self) -> None:
        self.rows = Drawing()

    def __iter__(self) -> Iterator[Row]:
        return map(self.rows.__getitem__, range(22))


class LateGenerator:
    """A collator that makes its generator when it first needs it."""

    def __init__(self) -> None:
        self.generator: Any = None

    def __call__(self, samples: list[Row]) -> dict[str, torch.Tensor]:
        if self.generator is None:
            self.generator = np.random.default_rng(7)
        batch = collate(samples)
        batch["input_ids"][:, 1] = torch.from_numpy(self.generator.integers(5, 60, len(samples)))
        return batch


class OwnGenerator(Sampler[int]):
    def __init__(self, num: int) -> None:
        self.num = num
        self.generator = torch.Generator().manual_seed(6)

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num, generator=self.generator).tolist())


def with_own_sampler(base: type) -> type:
    class OwnSampler(base):
        def _get_train_sampler(self, *_: Any) -> Any:
            if not hasattr(self, "only"):
                self.only = OwnGenerator(len(self.train_dataset))
            return self.only

    return OwnSampler


def with_buckets(base: type) -> type:
    class Buckets(base):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return Buckets


CASES: dict[str, dict[str, Any]] = {
    "random": {},
    "drawn samples": {"data": Drawing},
    "a stream": {"data": DrawingStream, "max_steps": 5},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "a sampler with a generator": {"subclass": with_own_sampler},
    "a collator with a generator": {"collator": LateGenerator},
    "buckets without padding": {"data": rows, "collator": lambda: None, "subclass": with_buckets},
    "fewer samples than a batch": {"data": lambda: make_dataset(MODEL, 3)},
    "one sample": {"data": lambda: make_dataset(MODEL, 1)},
    "seeded by the script": {"script_seed": 8},
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_reads_and_draws_what_it_would_without_a_look_before(name: str, tmp_path: Path) -> None:
    case = dict(CASES[name])
    data, collator = case.pop("data", lambda: make_dataset(MODEL, 22)), case.pop("collator", lambda: collate)
    script_seed = case.pop("script_seed", None)
    logs = []
    for base in (Trainer, PipeTransformerTrainer):
        given = {"train_dataset": data(), "data_collator": collator()}
        trainer = made(base, tmp_path / base.__name__, given=given, **case)
        trainer.args.activation_cache = "auto"  # Reads samples too.
        if script_seed is not None:
            set_seed(script_seed)
        trainer.train()
        logs.append(logs_of(trainer))
    assert trainer.layout is not None
    assert close(logs[1], logs[0])


# ---- streams that do not begin anew ----


class Resuming(IterableDataset):
    """Goes on where it was left."""

    def __init__(self, num: int = 44) -> None:
        self.rows, self.at = make_rows(MODEL, num), 0

    def __iter__(self) -> Iterator[Row]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]


class InBlocks(Resuming):
    """Takes several samples from a shared source at once."""

    def __iter__(self) -> Iterator[Row]:
        while self.at < len(self.rows):
            self.at += 7
            yield from self.rows[self.at - 7 : self.at]


class Wrapping(IterableDataset):
    """Gives an iterator that lives on."""

    def __init__(self) -> None:
        self.rows = iter(make_dataset(MODEL, 44))

    def __iter__(self) -> Iterator[Row]:
        return self.rows


class Iterating(Wrapping):
    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        return next(self.rows)


class Piped(Wrapping):
    """Reads lines from a pipe, as from a socket."""

    def __init__(self) -> None:
        ends = os.pipe()
        with open(ends[1], "w") as file:
            file.writelines(f"{index}\n" for index in range(44))
        rows = make_rows(MODEL, 44)
        self.rows = (rows[int(line)] for line in os.fdopen(ends[0]))


class CountingEpochs(IterableDataset):
    """Shuffles by the number of times that it was iterated, with a generator that nobody sees."""

    def __init__(self) -> None:
        self.rows, self.epoch = make_dataset(MODEL, 22), 0

    def __iter__(self) -> Iterator[Row]:
        self.epoch += 1
        order = np.random.default_rng(self.epoch).permutation(len(self.rows))
        return (self.rows[index] for index in order)


class OwnRandomness(Resuming):
    """Draws from its own generator and is told the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(8)

    def set_epoch(self, epoch: int) -> None:
        self.at = epoch  # A run that begins sets the first epoch, once.

    def __iter__(self) -> Iterator[Row]:
        for row in super().__iter__():
            yield {**row, "labels": int(torch.randint(3, (), generator=self.generator))}

    def collate(self, samples: list[Row]) -> dict[str, torch.Tensor]:
        return collate(samples)


class Source:
    """Rows that all who ask take from."""

    rows: Iterator[Row]


def generate() -> Iterator[Row]:
    yield from Source.rows


def of_generator() -> Any:
    Source.rows = iter(make_rows(MODEL, 44))
    return datasets.IterableDataset.from_generator(generate)


def shuffled() -> Any:
    return datasets.Dataset.from_list(make_dataset(MODEL, 22)).to_iterable_dataset().shuffle(seed=5, buffer_size=9)


def emptying(samples: list[Row]) -> dict[str, torch.Tensor]:
    """Collate, and leave nothing of the samples."""
    batch = collate([{**sample} for sample in samples])
    for sample in samples:
        sample.clear()
    return batch


STREAMS: dict[str, Any] = {
    "resuming": Resuming, "in blocks": InBlocks, "wrapping": Wrapping, "iterating": Iterating, "piped": Piped,
    "counting epochs": CountingEpochs, "own randomness": OwnRandomness, "of a generator": of_generator,
    "shuffled": shuffled,
}  # fmt: skip


WAYS = [("stages", name) for name in STREAMS] + [("own loader", "resuming"), ("own loader", "iterating")]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_no_sample_of_a_stream_is_lost(way: str, name: str, tmp_path: Path) -> None:
    logs = []
    for base in (Trainer, PipeTransformerTrainer):
        stream = STREAMS[name]()
        collator = stream.collate if name == "own randomness" else emptying
        given = {"train_dataset": stream, "data_collator": collator}
        options = {"pipeline_parallel_num_microbatches": 2} if way == "stages" and base is not Trainer else {}
        trainer = made(base, tmp_path / base.__name__, given=given, max_steps=7, **options)
        if way == "own loader":
            loader = DataLoader(stream, batch_size=5, collate_fn=collator)
            trainer.get_train_dataloader = lambda loader=loader: loader
        trainer.train()
        logs.append(logs_of(trainer))
    assert len(logs[1]) > 2
    assert close(logs[1], logs[0])


def test_no_sample_of_an_evaluated_stream_is_lost(tmp_path: Path) -> None:
    found = []
    for base in (Trainer, PipeTransformerTrainer):
        options = {} if base is Trainer else {"pipeline_parallel_num_microbatches": 2}
        trainer = made(base, tmp_path / base.__name__, given={"data_collator": collate}, **options)
        found.append(untimed(trainer.evaluate(Resuming())))
    assert close(found[1], found[0])


class Unseeded(Resuming):
    """Draws from a global generator, and goes on where it was left."""

    def __iter__(self) -> Iterator[Row]:
        return ({**row, "labels": int(torch.randint(3, ()))} for row in super().__iter__())


@pytest.mark.parametrize(("stream", "workers"), [(Unseeded, 0), (Piped, 1)])
def test_a_stream_that_cannot_begin_anew_is_read_once(stream: Any, workers: int, tmp_path: Path) -> None:
    logs = []
    for base in (Trainer, PipeTransformerTrainer):
        given = {"train_dataset": stream(), "data_collator": collate}
        options = {"max_steps": 2, "dataloader_num_workers": workers}
        options |= {} if base is Trainer else {"pipeline_parallel_num_microbatches": 2}
        trainer = made(base, tmp_path / base.__name__, given=given, **options)
        trainer.train()
        logs.append(logs_of(trainer))
    assert close(logs[1], logs[0])


def test_workers_read_copies_of_a_stream(tmp_path: Path) -> None:
    logs = []
    for base in (Trainer, PipeTransformerTrainer):
        given = {"train_dataset": Resuming(), "data_collator": collate}
        trainer = made(base, tmp_path / base.__name__, given=given, max_steps=4, dataloader_num_workers=1)
        trainer.train()
        logs.append(logs_of(trainer))
    assert close(logs[1], logs[0])
