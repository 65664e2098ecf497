"""Two stages that become two replicas: what trackers and the results file are told, under the documented names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.scenarios import run, scenario
from tests.support.models import build_model, collate
from tests.training.test_logged import LENGTH, NORM, NUM_EPOCHS, NUM_SAMPLES, First, padded_rows


STEPS_PER_EPOCH = 3
NUM_FROZEN = 3
DOCS = Path(__file__).parents[2] / "docs" / "report.md"


class Layouts(TrainerCallback):
    """The layout in force at the end of each step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: list[tuple[int, int, int]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        layout = self.trainer.layout
        self.found.append((layout.pipeline_size, layout.num_replicas, layout.num_frozen_layers))


@scenario
def log(folder: Path) -> dict[str, Any]:
    """Train, and save everything; return the layouts by step and the metrics of `train()`."""
    args = PipeTransformerArguments(
        output_dir=str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        num_train_epochs=NUM_EPOCHS, per_device_train_batch_size=2, save_strategy="no", freeze_warmup=0.0,
        freeze_min_active_layers=1, activation_cache="on", activation_cache_dir=str(folder / "cache"),
        pipeline_parallel_size=2, pipeline_parallel_num_microbatches=2, pipeline_compression="memory",
    )  # fmt: skip
    seen = Layouts()
    trainer = PipeTransformerTrainer(
        build_model("bert_sequence"), args, train_dataset=padded_rows(), data_collator=collate, callbacks=[seen],
        policy=First(NUM_FROZEN),
    )  # fmt: skip
    seen.trainer = trainer
    metrics = trainer.train().metrics
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return {"layouts": seen.found, "metrics": metrics}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """What rank 0 returned, the log in `trainer_state.json`, and `train_results.json`."""
    folder = tmp_path_factory.mktemp("logged")
    first, second = run(log, folder, 2, timeout=150, strict_nccl=True)
    assert first["layouts"] == second["layouts"]
    read = {
        name: json.loads((folder / "run" / name).read_text()) for name in ("trainer_state.json", "train_results.json")
    }
    return first, read["trainer_state.json"]["log_history"], read["train_results.json"]


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_the_log_has_layout_frozen_layers_and_hit_rate(logged: Any) -> None:
    found, history, _ = logged
    before, after = (2, 1, 0), (1, 2, NUM_FROZEN)
    assert [tuple(layout) for layout in found["layouts"]] == [before] * STEPS_PER_EPOCH + [after] * STEPS_PER_EPOCH * 3
    shown = [entry for entry in history if "pipeline_stages" in entry]
    names = ("pipeline_stages", "pipeline_replicas", "frozen_layers", "cached_layers")
    assert [tuple(entry[name] for name in names) for entry in shown] == [(*before, 0), (*after, NUM_FROZEN)]
    assert [entry["step"] for entry in shown] == [1, STEPS_PER_EPOCH]
    assert [entry["cache_hit_rate"] for entry in history if "cache_hit_rate" in entry] == [0, 1, 1]


def test_each_entry_has_speed_memory_and_the_norms_of_what_is_trained(logged: Any) -> None:
    _, history, _ = logged
    steps = [entry for entry in history if "loss" in entry]
    assert len(steps) == STEPS_PER_EPOCH * NUM_EPOCHS
    for entry in steps:
        # Both for all ranks together.
        assert entry["tokens_per_second"] / entry["samples_per_second"] == pytest.approx(LENGTH)
        assert entry["memory_gb"] > 0
        norms = {name: value for name, value in entry.items() if name.startswith(NORM)}
        is_frozen = entry["step"] > STEPS_PER_EPOCH
        layers = {f"{NORM}layer_{at}" for at in range(1 + NUM_FROZEN * is_frozen, 5)}
        assert norms.keys() == layers | {f"{NORM}head"} | (set() if is_frozen else {f"{NORM}embeddings"})
        assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(entry["grad_norm"], rel=1e-5)
    assert steps[-1]["bubble_share"] == 0


def test_the_results_have_the_timeline(logged: Any) -> None:
    found, _, results = logged
    assert found["metrics"].items() <= results.items() and "layouts" not in found["metrics"]
    by_step = [
        [layout[name] for name in ("pipeline_stages", "pipeline_replicas", "frozen_layers")]
        for layout in results["layouts"]
        for _ in range(layout["num_steps"])
    ]
    assert by_step == found["layouts"]
    assert [layout["step"] for layout in results["layouts"]] == [0, STEPS_PER_EPOCH]
    assert 0 < results["step_seconds"] < results["train_runtime"]
    assert results["cache_hit_rate"] == pytest.approx(2 / 3) and results["frozen_layers"] == NUM_FROZEN
    # A record has at least the activation of its tokens, 16 wide and in float32.
    assert results["cache_bytes"] > NUM_SAMPLES * LENGTH * 16 * 4


def test_every_name_is_documented(logged: Any) -> None:
    found, history, results = logged
    trainers = {"loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss", "total_flos"}
    names = {name for entry in history for name in entry} - found["metrics"].keys() - trainers
    names = {re.sub(r"layer_\d+", "layer_1", name) for name in names} | results.keys() - found["metrics"].keys()
    documented = set(re.findall(r"`([\w/]+)`", DOCS.read_text().partition("## Names of what is logged")[2]))
    assert names - documented == set()
