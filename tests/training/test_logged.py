"""The values that a run gives to trackers and to `train_results.json`, beside ones worked out by hand."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.freeze.policy import GRADIENT_NORMS, FreezePolicy, FreezeSignal
from hf_pipetransformer.report.console import WIDTH
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.training.metrics import Summary
from hf_pipetransformer.training.progress import named_norms
from tests.support.models import build_model, collate, make_rows
from tests.training.test_summary import TWO_REPLICAS, TWO_STAGES, noted


NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 12, 4, 4
NUM_STEPS = NUM_EPOCHS * NUM_SAMPLES // BATCH_SIZE
FREEZES_AT = NUM_SAMPLES // BATCH_SIZE
LENGTH = 18
NORM = "gradient_norm/"


class First(FreezePolicy):
    """Freezes layers at the first decision; it wants gradient norms, as policies do that read them."""

    name = "first"
    needs = frozenset({GRADIENT_NORMS})

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return self.num_layers


class Norms(TrainerCallback):
    """The gradients' squared norms before each update, by the names under which they are logged."""

    def __init__(self, model: Any) -> None:
        self.parameters = dict(model.named_parameters())
        self.norms: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        squares: dict[str, float] = defaultdict(float)
        for name, parameter in self.parameters.items():
            place = name.split("encoder.layer.")[-1].partition(".")[0]
            place = f"layer_{int(place) + 1}" if place.isdigit() else "embeddings" if "embeddings" in name else "head"
            if parameter.grad is not None:
                squares[NORM + place] += float(parameter.grad.double().square().sum())
        self.norms.append({name: square**0.5 for name, square in squares.items()})


def padded_rows() -> Dataset:
    """Rows of one length, with their padding."""
    batch = collate(list(make_rows("bert_sequence", NUM_SAMPLES)))
    assert batch["input_ids"].shape == (NUM_SAMPLES, LENGTH)
    return Dataset.from_dict({name: value.tolist() for name, value in batch.items()})


def train(
    folder: Path, callbacks: Sequence[TrainerCallback] = (), **options: Any
) -> tuple[PipeTransformerTrainer, Norms, dict[str, Any]]:
    """Train in one process; return the trainer, the norms of each step and the saved results."""
    args = PipeTransformerArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        num_train_epochs=NUM_EPOCHS, per_device_train_batch_size=BATCH_SIZE, max_grad_norm=1e9, learning_rate=1e-3,
        activation_cache="on", activation_cache_dir=str(folder / "cache"), freeze_warmup=0.0,
        **{"logging_steps": 1, **options},
    )  # fmt: skip
    model = build_model("bert_sequence")
    norms = Norms(model)
    trainer = PipeTransformerTrainer(
        model, args, train_dataset=padded_rows(), data_collator=collate, callbacks=[norms, *callbacks], policy=First(2)
    )
    metrics = trainer.train().metrics
    trainer.save_metrics("train", metrics)
    results = json.loads((folder / "train_results.json").read_text())
    assert metrics.keys() < results.keys()
    return trainer, norms, results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[PipeTransformerTrainer, Norms, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("run"))


def test_gradient_norms_of_the_trained_layers_are_those_before_the_update(run: Any) -> None:
    trainer, by_hand, _ = run
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == len(by_hand.norms) == NUM_STEPS
    for entry, norms in zip(entries, by_hand.norms, strict=True):
        logged = {name: value for name, value in entry.items() if name.startswith(NORM)}
        if entry["step"] <= FREEZES_AT:
            assert logged == {}  # Nothing is frozen yet on one stage: the log is Trainer's.
            continue
        assert logged == pytest.approx(norms, rel=1e-6)
        assert {"layer_1", "layer_2", "embeddings"}.isdisjoint(name.removeprefix(NORM) for name in logged)
        assert {f"{NORM}layer_3", f"{NORM}head"} <= logged.keys()


def test_norms_are_named_by_layer_and_those_of_frozen_parts_left_out() -> None:
    assert named_norms([1.0, 2.0, 3.0, 4.0]) == {
        f"{NORM}embeddings": 4.0, f"{NORM}layer_1": 1.0, f"{NORM}layer_2": 2.0, f"{NORM}head": 3.0,
    }  # fmt: skip
    assert named_norms([0.0, 2.0, 0.0, 0.0]) == {f"{NORM}layer_2": 2.0}


def test_padding_counts_as_tokens_unless_trainer_is_told_otherwise(run: Any, tmp_path: Path) -> None:
    def tokens_per_sample(trainer: PipeTransformerTrainer) -> list[float]:
        entries = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
        return [entry["tokens_per_second"] / entry["samples_per_second"] for entry in entries]

    assert tokens_per_sample(run[0]) == pytest.approx([LENGTH] * (NUM_STEPS - FREEZES_AT))
    options = {"include_num_input_tokens_seen": "non_padding", "logging_steps": FREEZES_AT}
    trainer, *_ = train(tmp_path, **options)
    real = sum(map(sum, padded_rows()["attention_mask"]))
    assert real < NUM_SAMPLES * LENGTH
    assert trainer.state.num_input_tokens_seen == NUM_EPOCHS * real
    # One entry an epoch, from the one in which layers are frozen on.
    assert tokens_per_sample(trainer) == pytest.approx([real / NUM_SAMPLES] * (NUM_EPOCHS - 1))


def test_the_results_tell_layouts_reads_and_bytes(run: Any) -> None:
    trainer, _, results = run
    first, second = results["layouts"]
    for layout in (first, second):
        assert (layout["pipeline_stages"], layout["pipeline_replicas"]) == (1, 1)
    assert (first["step"], first["num_steps"], first["frozen_layers"], first["cached_layers"]) == (0, FREEZES_AT, 0, 0)
    assert (second["step"], second["num_steps"]) == (FREEZES_AT, NUM_STEPS - FREEZES_AT)
    assert (second["frozen_layers"], second["cached_layers"]) == (2, 2)
    assert results["frozen_layers"] == trainer.layout.num_frozen_layers == 2
    assert results["step_seconds"] == pytest.approx(first["seconds"] + second["seconds"])
    assert results["step_seconds"] < results["train_runtime"]
    # The first of three epochs with frozen layers writes what the others read.
    assert results["cache_hit_rate"] == pytest.approx(2 / 3)
    events = read_events(str(Path(trainer.args.output_dir) / EVENTS_FILE))
    assert results["cache_bytes"] == [e["bytes_stored"] for e in events if e.get("what") == "epoch"][-1] > 0


def test_a_resumed_run_counts_the_steps_from_where_it_began() -> None:
    summary = noted((TWO_STAGES, 0.5), (TWO_STAGES, 0.25), (TWO_REPLICAS, 0.125))
    summary.add_reads(3, 1, 1000)
    summary.add_reads(4, 0, 2000)
    assert summary.as_results(last_step=10, num_frozen=3) == {
        "step_seconds": 0.875, "saved_seconds": 0.375, "frozen_layers": 3, "cache_hit_rate": 0.875,
        "cache_bytes": 2000,
        "layouts": [
            {
                "step": 7, "num_steps": 2, "seconds": 0.75, "pipeline_stages": 2, "pipeline_replicas": 1,
                "frozen_layers": 0, "cached_layers": 0,
            },
            {
                "step": 9, "num_steps": 1, "seconds": 0.125, "pipeline_stages": 1, "pipeline_replicas": 2,
                "frozen_layers": 2, "cached_layers": 2,
            },
        ],
    }  # fmt: skip
    assert Summary().as_results(0, 0)["cache_hit_rate"] is None


def test_other_metrics_are_saved_as_they_are(run: Any) -> None:
    trainer, *_ = run
    trainer.save_metrics("eval", {"eval_loss": 0.5}, combined=False)
    assert json.loads((Path(trainer.args.output_dir) / "eval_results.json").read_text()) == {"eval_loss": 0.5}


def test_norms_of_layers_are_logged_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(TrainerCallback):
        """What another callback than the one that prints is given."""

        entries: list[dict[str, Any]] = []

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            self.entries.append(dict(logs))

    trainer, _, _ = train(tmp_path, callbacks=[Other()])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len([line for line in printed if "  loss " in line and "  norm " in line]) == NUM_STEPS
    assert not any(NORM in line for line in printed) and max(map(len, printed)) <= WIDTH
    for entries in (trainer.state.log_history, Other.entries):
        assert sum(f"{NORM}layer_3" in entry for entry in entries) == NUM_STEPS - FREEZES_AT
