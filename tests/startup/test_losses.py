"""How losses add up is decided right for every kind of loss, data and precision, before the first step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithFlattening,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.data.batches import count_items
from hf_pipetransformer.data.flattened import Sequences, sequences_of
from hf_pipetransformer.data.loader import request_of
from hf_pipetransformer.engine.losses import FoundRule, LossDoesNotDecomposeError, LossRule, find_loss_rule
from hf_pipetransformer.startup.first_samples import (
    NUM_PROBE_SAMPLES,
    NUM_SEARCHED_SAMPLES,
    OwnBatches,
    probe_samples,
)
from hf_pipetransformer.startup.model import with_two_labels


# ---- the rule alone ----

VALUES = torch.tensor([[1.0, 4.0, 0.0], [9.0, 0.0, 0.0], [16.0, 25.0, 36.0]])
LABELS = torch.tensor([[1, 2, -100], [3, -100, -100], [4, 5, 6]])


def found_for(
    loss: Callable[[torch.Tensor, int], torch.Tensor], labels: torch.Tensor = LABELS, is_split: bool = True
) -> FoundRule:
    """The rule of a loss of the labelled values of a batch, given them and the number of items to divide by."""

    def measure(parts: Any, total: int) -> torch.Tensor:
        terms = [loss(part["values"][part["labels"] != -100], total) * weight for part, weight in parts if weight]
        return torch.stack(terms).sum().double().reshape(1)

    return find_loss_rule(measure, {"labels": labels, "values": VALUES}, count_items, is_split)


def test_means_sums_and_losses_divided_by_items_are_told_apart() -> None:
    assert found_for(lambda kept, total: kept.mean()) == FoundRule(LossRule.MEAN, ignores_num_items=True)
    assert found_for(lambda kept, total: kept.sum()) == FoundRule(LossRule.SUM, ignores_num_items=True)
    assert found_for(lambda kept, total: kept.sum() / total) == FoundRule(LossRule.SUM, ignores_num_items=False)


def test_the_rule_does_not_hang_on_which_samples_have_labels() -> None:
    labels = LABELS.clone()
    labels[1:] = -100
    assert found_for(lambda kept, total: kept.sum() / total, labels).rule is LossRule.SUM
    assert found_for(lambda kept, total: kept.mean(), labels).rule is LossRule.MEAN


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda kept, total: kept.max(), "items in parts of"),
        (lambda kept, total: kept.square().sum().sqrt(), "items in parts of"),
        (lambda kept, total: kept.mean() + kept.sum() / total, "another is not"),
        (lambda kept, total: kept.mean() * float("nan"), "Expected a finite loss"),
    ],
)
def test_losses_that_are_not_made_of_their_parts_are_named(loss: Any, reason: str) -> None:
    refusal = found_for(loss).refusal
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("shifts", [False, True])
def test_a_mean_over_other_labels_than_are_counted_is_seen_in_samples_of_one_length(shifts: bool) -> None:
    """Trainer takes BartForCausalLM for a model that predicts the next token, and its loss runs over all labels."""
    labels = torch.tensor([[1, 2, 3, -100], [4, 5, 6, -100], [7, 8, 9, -100], [1, 4, 7, -100]])
    inputs = {"labels": labels, "values": torch.arange(16.0).reshape(4, 4).square()}

    def measure(parts: Any, total: int) -> torch.Tensor:
        terms = [part["values"][part["labels"] != -100].mean() * weight for part, weight in parts if weight]
        return torch.stack(terms).sum().double().reshape(1)

    found = find_loss_rule(measure, inputs, partial(count_items, shifts_labels=shifts))
    assert (found.refusal is not None) == shifts
    assert not shifts or "other labels than" in str(found.refusal)


def test_where_no_batch_is_split_no_split_is_tried() -> None:
    assert found_for(lambda kept, total: kept.max(), is_split=False).refusal is None
    assert found_for(lambda kept, total: kept.sum() / total, is_split=False) == found_for(
        lambda kept, total: kept.sum() / total
    )


# ---- the samples that it is decided on ----

Row = dict[str, Any]


def stacked(rows: list[Row]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def probed(rows: list[Row], size: int = 6, order: Any = None, most: int = NUM_PROBE_SAMPLES) -> dict[str, Any]:
    batches = OwnBatches(rows, stacked, size, (lambda: range(len(rows))) if order is None else order)
    return probe_samples(batches, "input_ids", count_items, most)


@pytest.mark.parametrize("size", [1, 2])
def test_that_a_collator_puts_samples_into_one_row_shows_in_two_of_them(size: int) -> None:
    """Also where a device has one sample and only its pipeline has several."""
    rows = [{"input_ids": list(range(1, 3 + index))} for index in range(4)]
    batches = OwnBatches(rows, DataCollatorWithFlattening(), size, lambda: range(4))
    found = probe_samples(batches, "input_ids", count_items, most=1)
    assert sequences_of(found) == Sequences((0, len(found["input_ids"][0])), 1)
    assert sequences_of(batches.read(3)) == Sequences((0, 2, 5, 9), 3)
    alone = replace(batches, collate=ragged, size=1)
    assert sequences_of(probe_samples(alone, "input_ids", count_items)) is None


def ragged(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Only one at a time."""
    (row,) = rows
    return {"input_ids": torch.tensor([row["input_ids"]])}


def test_labelled_samples_and_different_labels_are_looked_for() -> None:
    rows = [{"input_ids": [index], "labels": 1} for index in range(1000)]
    rows[NUM_SEARCHED_SAMPLES - 3]["labels"] = 4
    assert set(probed(rows)["labels"].tolist()) == {1, 4}
    rows = [{"input_ids": [index] * 2, "labels": [-100, -100]} for index in range(1000)]
    for found in range(NUM_SEARCHED_SAMPLES - 6, NUM_SEARCHED_SAMPLES):
        rows[found]["labels"] = [-100, found]
    assert probed(rows)["labels"][:, 1].min() > 0


def test_of_a_search_in_vain_the_best_batch_is_taken() -> None:
    rows = [{"input_ids": [index], "labels": -100} for index in range(1000)]
    rows[14]["labels"] = 3
    assert 14 in probed(rows)["input_ids"]
    assert probed(rows, order=lambda: iter(range(3)))["input_ids"].flatten().tolist() == [0, 1, 2]


def test_no_more_is_read_than_is_looked_at() -> None:
    read: list[int] = []

    class Noting(list[Row]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    rows = Noting({"input_ids": [index], "labels": index % 2} for index in range(1000))
    assert len(probed(rows, size=512)["input_ids"]) == NUM_PROBE_SAMPLES
    assert len(read) == NUM_SEARCHED_SAMPLES
    read.clear()
    assert len(probed(rows, size=4)["input_ids"]) == len(read) == 4
    read.clear()
    assert len(probed(rows, size=1)["input_ids"]) == 1
    assert read == [0, 1, 0]  # Two samples first, to see if the collator puts them into one row.


def test_no_more_samples_are_run_than_are_asked_for() -> None:
    rows = [{"input_ids": [index], "labels": index % 2} for index in range(100)]
    assert [len(probed(rows, size=8, most=most)["input_ids"]) for most in (1, 3, 6)] == [1, 3, 6]


def test_samples_that_no_sampler_would_put_together_are_probed_as_the_run_takes_them() -> None:
    rows = [{"input_ids": [1] * (3 if i < 8 else 5), "labels": i % 2} for i in range(16)]
    batch = probed(rows, size=4, order=lambda: range(8, 16))
    assert batch["input_ids"].shape == (4, 5)
    assert OwnBatches(rows, stacked, 4, lambda: range(16)).read(3)["input_ids"].shape == (3, 3)


def test_a_collator_that_fails_on_any_batch_says_why() -> None:
    def fails(rows: Any) -> Any:
        raise KeyError(f"no mask in {len(rows)} rows")

    with pytest.raises(KeyError, match="no mask in 6 rows"):
        probe_samples(OwnBatches([{"labels": 0}] * 9, fails, 6, lambda: range(9)), "input_ids", count_items)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="empty: expected at least one"):
        probed([])


def test_where_all_labels_are_the_same_some_are_changed() -> None:
    assert with_two_labels({"labels": torch.tensor([3, 3, -100, -100, 3, 3])})["labels"].unique().tolist() == [
        -100,
        2,
        3,
    ]
    assert with_two_labels({"labels": torch.tensor([0, 0])})["labels"].tolist() == [0, 1]
    assert with_two_labels({"labels": torch.full((2, 2), -100)})["labels"].tolist() == [[0, 0], [1, 1]]
    for labels in (torch.tensor([0, 5, 5]), torch.tensor([0.5, 0.5]), torch.tensor([True, True])):
        assert with_two_labels({"labels": labels})["labels"] is labels


# ---- random probes ----

VOCABULARY, PAD, MASK, NUM_LABELS, NUM_LAYERS = 48, 0, 3, 4, 2
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": PAD,
}  # fmt: skip


class Masker:
    """Pads, and masks 15 % of the words anew each time, as a collator for masked words does: often none of a text."""

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        words = torch.tensor([row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows])
        masked = (torch.rand(words.shape) < 0.15) & (words != PAD)
        labels = torch.where(masked, words, -100)
        return {"input_ids": words.where(~masked, MASK), "attention_mask": (words != PAD).long(), "labels": labels}


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, Any] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        missing = longest - len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [PAD] * missing)
        batch["attention_mask"].append([1] * (longest - missing) + [0] * missing)
        labels = row["labels"]
        batch["labels"].append(labels + [-100] * missing if isinstance(labels, list) else labels)
    return {key: torch.tensor(value) for key, value in batch.items()}


def masked_words(draw: random.Random) -> list[Row]:
    longest = draw.randint(5, 60)
    return [{"input_ids": words(draw, draw.randint(5, longest))} for _ in range(60)]


def tokens(draw: random.Random) -> list[Row]:
    share = draw.choice((0.1, 0.5, 1.0))
    rows = [{"input_ids": words(draw, draw.randint(3, 30))} for _ in range(60)]
    for row in rows:
        labels = [draw.randrange(NUM_LABELS) if draw.random() < share else -100 for _ in row["input_ids"]]
        row["labels"] = labels
    return rows


def sequences(draw: random.Random) -> list[Row]:
    """Balanced, sorted, with one rare class, or with one class only."""
    chances = draw.choice(([1, 1, 1, 1], [50, 1, 0, 0], [0, 0, 1, 0]))
    rows = [{"input_ids": words(draw, draw.randint(3, 30))} for _ in range(60)]
    labels = draw.choices(range(NUM_LABELS), chances, k=len(rows))
    for row, label in zip(rows, sorted(labels) if draw.random() < 0.5 else labels, strict=True):
        row["labels"] = label
    return rows


def words(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(5, VOCABULARY) for _ in range(length)]


def bert(model_class: type[PreTrainedModel], num_labels: int) -> PreTrainedModel:
    return model_class(BertConfig(**SIZES, num_labels=num_labels, initializer_range=0.3))


def modernbert() -> PreTrainedModel:
    ids = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(**SIZES, **ids, initializer_range=0.3, local_attention=8))


@dataclass(frozen=True)
class Task:
    rows: Callable[[random.Random], list[Row]]
    collate: Callable[[list[Row]], dict[str, torch.Tensor]]
    build: Callable[[], PreTrainedModel]
    num_classes: int
    divides: bool = False
    """Whether the model's own loss honours `num_items_in_batch`."""


TASKS = {
    "masked": Task(masked_words, Masker(), partial(bert, BertForMaskedLM, 2), VOCABULARY),
    "masked_modern": Task(masked_words, Masker(), modernbert, VOCABULARY, divides=True),
    "token": Task(tokens, padded, partial(bert, BertForTokenClassification, NUM_LABELS), NUM_LABELS),
    "sequence": Task(sequences, padded, partial(bert, BertForSequenceClassification, NUM_LABELS), NUM_LABELS),
}

MEAN, SUM = FoundRule(LossRule.MEAN, True), FoundRule(LossRule.SUM, True)
DIVIDED = FoundRule(LossRule.SUM, False)

# What a user's loss computes of logits `(n, classes)`, labels `(n,)`, the items of the whole batch and class weights;
# and what is right for it, None where it has to be refused.
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], FoundRule | None]] = {
    "mean": (lambda x, y, n, w: cross_entropy(x, y), MEAN),
    "sum": (lambda x, y, n, w: cross_entropy(x, y, reduction="sum"), SUM),
    "divided": (lambda x, y, n, w: cross_entropy(x, y, reduction="sum") / n, DIVIDED),
    "weighted": (lambda x, y, n, w: cross_entropy(x, y, w), None),
    "weighted_alike": (lambda x, y, n, w: cross_entropy(x, y, 0 * w + 2.5), MEAN),
    "weighted_divided": (lambda x, y, n, w: cross_entropy(x, y, w, reduction="sum") / n, DIVIDED),
    "weighted_sum": (lambda x, y, n, w: cross_entropy(x, y, w, reduction="sum"), SUM),
    "smoothed": (lambda x, y, n, w: cross_entropy(x, y, label_smoothing=0.1), MEAN),
    "partly": (lambda x, y, n, w: 0.1 * cross_entropy(x, y) + cross_entropy(x, y, reduction="sum") / n, None),
    "contrasting": (lambda x, y, n, w: cross_entropy(x @ x.T / 9, torch.arange(len(x))), None),
    # Nearly constant: a head that starts at zero gives every sample the same loss, with and without weights.
    "flat_weighted": (lambda x, y, n, w: cross_entropy(1e-4 * x, y, w), None),
    "flat": (lambda x, y, n, w: cross_entropy(1e-4 * x, y), MEAN),
}


@dataclass(frozen=True)
class Probe:
    seed: int
    task: str
    loss: str
    precision: str

    @property
    def expected(self) -> FoundRule | None:
        if self.loss == "label_smoothing":
            return DIVIDED
        if self.loss == "own":
            return DIVIDED if TASKS[self.task].divides else MEAN
        return LOSSES[self.loss][1]


def random_probe(seed: int) -> Probe:
    draw = random.Random(seed)
    loss, precision = draw.choice(["own", "label_smoothing", *LOSSES]), draw.choice(("fp32", "bf16", "bf16_weights"))
    return Probe(seed, draw.choice(list(TASKS)), loss, precision)


def loss_function(name: str, weights: torch.Tensor) -> Callable[..., torch.Tensor]:
    compute, _ = LOSSES[name]

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        kept = labels != -100
        logits = outputs["logits"].float()
        return compute(logits[kept], labels[kept], num_items_in_batch, weights)

    return loss


def decide(probe: Probe, folder: Path) -> FoundRule | None:
    """What a run with two micro-batches finds at its start; None if it is refused."""
    torch.manual_seed(probe.seed)
    draw, task = random.Random(probe.seed + 1), TASKS[probe.task]
    model = task.build()
    if probe.precision == "bf16_weights":
        model.bfloat16()
    args = PipeTransformerArguments(
        output_dir=str(folder), pipeline_parallel_num_microbatches=2, bf16=probe.precision == "bf16", use_cpu=True,
        report_to="none", label_smoothing_factor=0.1 if probe.loss == "label_smoothing" else 0.0,
        activation_cache="off", freeze_policy="none", pipeline_loss="parts",
    )  # fmt: skip
    weights = torch.tensor([draw.lognormvariate(0, 1) for _ in range(task.num_classes)])
    compute = loss_function(probe.loss, weights) if probe.loss in LOSSES else None
    trainer = PipeTransformerTrainer(
        model, args, train_dataset=task.rows(draw), data_collator=task.collate, compute_loss_func=compute
    )
    accepts = trainer.model_accepts_loss_kwargs
    try:
        found = trainer.pipeline_run.builder.inspect(request_of(trainer.get_train_dataloader()), is_training=True)
    except LossDoesNotDecomposeError:
        return None
    ignores = accepts and not trainer.model_accepts_loss_kwargs
    return FoundRule(found.start_up.loss_rule.rule, ignores)


def wrong_decisions(seeds: range, folder: Path) -> list[str]:
    wrong = []
    for probe in map(random_probe, seeds):
        found = decide(probe, folder)
        if found != probe.expected:
            wrong.append(f"{probe}: {found}, expected {probe.expected}")
    return wrong


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.slow)], ids=str)
def test_random_probes_are_decided_right(seeds: range, tmp_path: Path) -> None:
    assert wrong_decisions(seeds, tmp_path) == []
    assert not torch.is_autocast_enabled("cpu"), "a probe that stops a forward half way has left autocast on"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_probes_are_decided_right(tmp_path: Path) -> None:
    assert wrong_decisions(range(1000), tmp_path) == []


def losses_of(trainer_class: type[Trainer], rows: list[Row], folder: Path, **options: Any) -> list[float]:
    torch.manual_seed(0)
    args_class = TrainingArguments if trainer_class is Trainer else PipeTransformerArguments
    args = args_class(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
        logging_steps=1, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    compute = loss_function("divided", torch.ones(NUM_LABELS))
    model, data = TASKS["token"].build().eval(), {"train_dataset": rows, "data_collator": padded}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer = trainer_class(model, args, compute_loss_func=compute, **data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_divided_by_items_is_not_weighted_again_where_few_samples_have_labels(
    tmp_path: Path, bf16: bool
) -> None:
    rows = tokens(random.Random(0))[:12]
    for index, row in enumerate(rows):
        row["labels"] = [1 if index in (2, 5, 11) and place < 3 else -100 for place in range(len(row["labels"]))]
    plain = losses_of(Trainer, rows, tmp_path / "plain", bf16=bf16)
    options = {"pipeline_parallel_num_microbatches": 2, "freeze_policy": "none", "bf16": bf16}
    ours = losses_of(PipeTransformerTrainer, rows, tmp_path / "ours", **options)
    assert ours == pytest.approx(plain, rel=2e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_model_whose_weights_are_nan_trains_on_as_with_trainer(is_filtered: bool, tmp_path: Path) -> None:
    """As the one that another training has left behind; whole and split it gives the same."""
    rows, found = tokens(random.Random(0))[:12], []
    for kind, options in ((Trainer, {}), (PipeTransformerTrainer, {"pipeline_parallel_num_microbatches": 2})):
        model = TASKS["token"].build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        args_class = TrainingArguments if kind is Trainer else PipeTransformerArguments
        args = args_class(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, logging_steps=1, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_nan_inf_filter=is_filtered, **options,
        )  # fmt: skip
        trainer = kind(model, args, train_dataset=rows, data_collator=padded)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([(str(entry["loss"]), str(entry["grad_norm"])) for entry in entries])
    assert found[1] == found[0] == [("0.0" if is_filtered else "nan", "nan")] * 2


def test_a_loss_of_numbers_that_is_nan_is_refused_as_nothing_can_be_told_of_it(tmp_path: Path) -> None:
    def undefined(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs["logits"].sum() * float("nan")

    args = PipeTransformerArguments(
        output_dir=str(tmp_path), pipeline_parallel_num_microbatches=2, use_cpu=True, report_to="none"
    )
    data = {"train_dataset": tokens(random.Random(0))[:12], "data_collator": padded}
    trainer = PipeTransformerTrainer(TASKS["token"].build(), args, compute_loss_func=undefined, **data)
    with pytest.raises(LossDoesNotDecomposeError, match="Expected a finite loss"):
        trainer.train()
