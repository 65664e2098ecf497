"""TensorBoard and Weights & Biases get what the events file and the report have, under the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.charts import all_charts
from hf_pipetransformer.report.recorded import RecordedRun, read_run
from tests.support.models import build_model, collate, make_dataset


Figures = dict[tuple[str, int], float]
"""Values by name and optimizer step."""

NUM_STEPS = 12
DRAWN = {
    *("frozen_layers", "cached_layers", "pipeline_stages", "pipeline_replicas", "cache_hit_rate"),
    *("bubble_share", "memory_gb", "loss", "eval_loss"),
}
"""Names of what trackers get, which the axes of the report have too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that both trackers followed, without network."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MODE", "offline"), ("DIR", folder), ("SILENT", "true"), ("DATA_DIR", folder / "data")):
            patch.setenv(f"WANDB_{name}", str(value))
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        args = PipeTransformerArguments(
            output_dir=str(folder), use_cpu=True, report_to=["tensorboard", "wandb"], disable_tqdm=True,
            logging_steps=2, max_steps=NUM_STEPS, per_device_train_batch_size=4,
            freeze_policy="fixed", freeze_at="3:2", activation_cache="on",
            activation_cache_dir=str(folder / "cache"), save_strategy="no", eval_strategy="epoch",
        )  # fmt: skip
        data = make_dataset("bert_sequence", 12)
        model = build_model("bert_sequence")
        trainer = PipeTransformerTrainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collate)
        trainer.train()
        import wandb  # It starts a process on the first call only.

        wandb.finish()
    return folder


def recorded(run: RecordedRun) -> Figures:
    """The log entries of the events file, named as Trainer's integrations name them.

    Without the last one, Trainer's totals, which each tracker keeps in its own way.
    """
    return {
        (f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", entry.step): value
        for entry in run.entries
        if "train_runtime" not in entry.values
        for name, value in entry.values.items()
    }


def tensorboards(folder: Path) -> Figures:
    (file,) = (folder / "tensorboard").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(file)).Reload()
    totals = ("train/train_", "train/total_")
    names = [name for name in found.Tags()["scalars"] if not name.startswith(totals)]
    return {(name, each.step): each.value for name in names for each in found.Scalars(name)}


def entries_of(log: bytes) -> Iterator[bytes]:
    """The entries of an offline run's file: a log as LevelDB writes it, in blocks that an entry may span."""
    block, header, at, entry = 2**15, 7, 7, b""  # The file begins with seven bytes of its own.
    while at + header <= len(log):
        if block - at % block < header:
            at += block - at % block
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        entry += log[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # A whole entry, or its last part
            yield entry
            entry = b""


def weights_and_biases(folder: Path) -> Figures:
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: Figures = {}
    for data in entries_of(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
            step = items.pop("train/global_step")
            found |= {(name, step): value for name, value in items.items() if "/" in name}
    return found


@pytest.mark.parametrize("read", [tensorboards, weights_and_biases])
def test_a_tracker_gets_every_figure_of_the_events_file_under_its_name(read: object, folder: Path) -> None:
    expected, found = recorded(read_run(folder, "run")), read(folder)  # type: ignore[operator]
    for name, step in expected:
        assert found[name, step] == pytest.approx(expected[name, step], rel=1e-6), (name, step)
    assert {name for name, _ in found} == {name for name, _ in expected}


def test_the_axes_of_the_report_have_the_names_of_the_trackers(folder: Path) -> None:
    run = read_run(folder, "run")
    titles = json.dumps([chart.spec for chart in all_charts([run])])
    names = {name.replace("train/", "").replace("eval/", "eval_") for name, _ in recorded(run)}
    assert names >= DRAWN
    assert {name for name in DRAWN if f'"title": "{name}"' not in titles} == set()


def test_trackers_get_the_values_that_the_charts_draw(folder: Path) -> None:
    run = read_run(folder, "run")
    speeds = {event["step"]: event["samples_per_second"] for event in run.of_kind("progress")}
    tracked = {step: value for (name, step), value in recorded(run).items() if name == "train/samples_per_second"}
    assert tracked and tracked.items() <= speeds.items()
