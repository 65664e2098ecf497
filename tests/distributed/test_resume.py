"""A run that goes on from a checkpoint ends as one that never stopped, to the bit; any other resume is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hf_pipetransformer.checkpoint import latest_sound
from tests.distributed.launcher import LaunchResult, launch
from tests.distributed.resume_worker import ATTEMPTS, CASES, PRODUCT, SAVED, Case


WORKER = Path(__file__).with_name("resume_worker.py")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

START_SECONDS = 90
CASE_SECONDS = 20

Outcomes = dict[str, list[dict[str, Any]]]


def _pairs(cases: dict[str, Case]) -> list[Any]:
    return [
        pytest.param(name, step, id=f"{name}-from-{step}") for name, case in cases.items() for step in case.resume_at
    ]


def _run(folder: Path, cases: dict[str, Case], num_processes: int, *more: str, check: bool = True) -> LaunchResult:
    seconds = START_SECONDS + CASE_SECONDS * len(cases)
    return launch(WORKER, [folder, "--cases", *cases, *more], num_processes, timeout=seconds, check=check)


def _read(folder: Path, cases: dict[str, Case], num_processes: int) -> Outcomes:
    return {
        name: [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(num_processes)]
        for name in cases
    }


def _cases_on(num_processes: int) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if case.layout[0] * case.layout[1] == num_processes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def on_one(folder: Path) -> Outcomes:
    """How the cases on one process ended; beside them lie checkpoints that two processes must refuse."""
    _run(folder, _cases_on(1), 1, "--strangers")
    return _read(folder, _cases_on(1), 1)


@pytest.fixture(scope="module")
def dying(folder: Path, on_one: Outcomes) -> LaunchResult:
    """Two processes run their cases and what must be refused; at last they are killed in the middle of a run."""
    return _run(folder, _cases_on(2), 2, "--refuse", "--die", check=False)


@pytest.fixture(scope="module")
def outcomes(folder: Path, on_one: Outcomes, dying: LaunchResult) -> Outcomes:
    """How every case ended on every rank."""
    _run(folder, _cases_on(4), 4)
    return on_one | _read(folder, _cases_on(2), 2) | _read(folder, _cases_on(4), 4)


@pytest.fixture(scope="module")
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    layout = request.param
    where = tmp_path_factory.mktemp("product")
    _run(where, PRODUCT[layout], layout[0] * layout[1])
    return _read(where, PRODUCT[layout], layout[0] * layout[1])


EVENT_FIELDS = ("event", "step", "from", "to", "num_frozen", "level", "level_before", "gradient_norms", "content")


def _decisions(end: dict[str, Any], after: int) -> list[dict[str, Any]]:
    return [
        {key: event[key] for key in EVENT_FIELDS if key in event}
        for event in end["events"]
        if event["event"] in ("freeze", "transition") and event["step"] >= after
    ]


def assert_equal_ends(whole: dict[str, Any], resumed: dict[str, Any], step: int) -> None:
    for key in ("weights", "optimizer", "groups", "scheduler", "random", "layout", "step", "num_transitions"):
        assert resumed[key] == whole[key], key
    assert whole["weights"]
    assert _decisions(resumed, step) == _decisions(whole, step)
    assert resumed["history"] == whole["history"]
    assert resumed["steps"] == whole["step"] - step


def assert_resumed_to_the_bit(ranks: list[dict[str, Any]], step: int) -> None:
    for found in ranks:
        whole, resumed = found["whole"], found["resumed"][str(step)]
        assert_equal_ends(whole, resumed, step)
        first = resumed["events"][0]
        assert (first["event"], first["step"]) == ("run", step)
        assert first["resumed_from"].endswith(f"checkpoint-{step}")
        assert {event["content"] for event in whole["events"] if event["event"] == "checkpoint"} == {"full"}
    assert any(found["whole"]["optimizer"] for found in ranks)


@pytest.mark.parametrize(("name", "step"), _pairs(CASES))
def test_a_resumed_run_ends_as_the_uninterrupted_one_to_the_bit(outcomes: Outcomes, name: str, step: int):
    assert_resumed_to_the_bit(outcomes[name], step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("product", "name", "step"),
    [pytest.param(layout, *pair.values, id=pair.id) for layout in PRODUCT for pair in _pairs(PRODUCT[layout])],
    indirect=["product"],
)
def test_all_options_together(product: Outcomes, name: str, step: int):
    assert_resumed_to_the_bit(product[name], step)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_test_something(outcomes: Outcomes, name: str):
    """Freezes and transitions happen before and after the checkpoints, and losses change from step to step."""
    case, whole = CASES[name], outcomes[name][0]["whole"]
    losses = [entry["loss"] for entry in whole["history"]]
    assert len(set(losses)) == len(losses) >= 5
    steps = {event["step"] for event in _decisions(whole, 0)}
    if case.plan is not None:
        assert steps == set(case.plan) - {0}
        assert whole["num_transitions"] == len(case.plan) - 1
    elif case.options.get("freeze_policy", "none") != "none":
        assert len(steps) >= 2
        assert all(any(step <= moment for moment in steps) for step in case.resume_at)
        assert whole["layout"]["num_frozen_layers"] > 0
    if "memory" in name:
        assert [event["to"]["num_stages"] for event in _decisions(whole, 0) if "to" in event] == [2, 1]
    if "plateau" in name:
        rates = {entry["learning_rate"] for entry in whole["history"]}
        assert len(rates) > 1


def test_a_checkpoint_holds_these_files(outcomes: Outcomes, folder: Path):
    found = folder / "4-2-1-accumulation" / "whole" / "checkpoint-5"
    names = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    # Trainer writes its arguments down for people; nobody reads them.
    assert names == {
        "config.json",
        "model.safetensors",
        "trainer_state.json",
        "training_args.bin",
        "pipetransformer/state.json",
        *(f"pipetransformer/optimizer-stage-{stage}.safetensors" for stage in range(2)),
        *(f"pipetransformer/random-rank-{rank}.safetensors" for rank in range(4)),
    }
    with safe_open(found / "pipetransformer" / "optimizer-stage-1.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert {"classifier.weight|exp_avg", "classifier.weight|exp_avg_sq", "classifier.weight|step"} <= keys
    assert not any("embeddings" in key or "layer.0." in key for key in keys)


# ---- refusals ----


# What the text of the refusal must say.
SAID = {
    "other_world_size": r"2 processes \(expected 1\)",
    "other_stages": r"pipeline_parallel_size=1 \(expected 2\)",
    "other_microbatches": r"pipeline_parallel_num_microbatches=4 \(expected 2\)",
    "other_pipeline_schedule": r"pipeline_schedule=gpipe \(expected 1f1b\)",
    "other_batch": r"per_device_train_batch_size=2 \(expected 4\)",
    "other_accumulation": r"gradient_accumulation_steps=2 \(expected 1\)",
    "other_seed": r" seed=8 \(expected 7\)",
    "other_data_seed": r"data_seed=8 \(expected None\)",
    "other_learning_rate": r"learning_rate=0\.0001 \(expected 0\.001\)",
    "other_lr_schedule": r"lr_scheduler_type=cosine \(expected linear\)",
    "other_length": r"max_steps=8 \(expected 6\)",
    "other_optim": r"optim=sgd \(expected adamw_torch\)",
    "other_optimizer_class": r"optimizer_class=Adamax \(expected AdamW\)",
    "other_policy": r"freeze_policy=schedule \(expected none\)",
    "other_head": r"parameter classifier\.weight: \(5, 32\).*expected \(3, 32\)",
    "other_freezing": r"parameter bert\.embeddings\.\S+: .* frozen \(expected",
    "other_data": r"36 training samples \(expected 37\)",
    "other_plan": r"layout_plan.*before step 4.*checkpoint-4",
    "plain_trainer": r"plain.checkpoint-2.*saved by plain Trainer.*expected a folder 'pipetransformer'",
    "model_only": r"model-only.checkpoint-2.*holds the model only \(save_only_model=True\)",
    "no_folder": r"checkpoint-77.*is not a folder",
    "nothing_to_resume": r"no sound checkpoint in output_dir",
    "no_state": r"incomplete.*interrupted.*state\.json",
    "no_random_file": r"damaged.*random-rank-1\.safetensors is missing",
    "no_weights": r"damaged.*model\.safetensors is missing",
    "cut_trainer_state": r"damaged.*trainer_state\.json has \d+ bytes \(expected \d+\)",
    "cut_optimizer": r"damaged.*optimizer-stage-1\.safetensors has \d+ bytes",
    "other_version": r"version 99.*expected version 3",
    "differs_between_ranks": r"resume_from_checkpoint is \S+checkpoint-1 on rank 1 and \S+checkpoint-0 on rank 0",
    "unsavable_scheduler": r"StubbornScheduler.*'memory'.*object.*save_only_model=True",
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_every_other_resume_is_refused_on_every_rank_before_the_first_step(
    folder: Path, dying: LaunchResult, name: str
):
    texts = []
    for rank in range(2):
        found = json.loads((folder / f"refusals.rank{rank}.json").read_text())[name]
        assert found["kind"] == "ValueError", found
        assert re.search(SAID[name], found["text"], re.DOTALL), found
        assert found["steps"] == 0
        texts.append(found["text"])
    assert texts[0] == texts[1]


def test_true_means_the_newest_sound_checkpoint(folder: Path, dying: LaunchResult):
    first, second, third = json.loads((folder / "skipped.rank0.json").read_text())
    runs = [event for event in third["events"] if event["event"] == "run"]
    saved, num_steps = folder / "saved", SAVED.options["max_steps"]
    expected = [None, *(str(saved / f"checkpoint-{step}") for step in (4, num_steps, 4))]
    assert [event.get("resumed_from") for event in runs] == expected
    assert [end["steps"] for end in (first, second, third)] == [num_steps - 4, 0, num_steps - 4]
    for step, reason in ((5, r"is damaged: model\.safetensors has other content"), (6, r"is incomplete.*state\.json")):
        assert re.search(rf"Passed over.*checkpoint-4.*checkpoint-{step}' {reason}", dying.output)
    for rank in range(2):
        whole = json.loads((folder / f"saved.rank{rank}.json").read_text())
        for end in json.loads((folder / f"skipped.rank{rank}.json").read_text()):
            for key in ("weights", "optimizer", "groups", "scheduler", "layout", "step"):
                assert end[key] == whole[key], key


def damages(path: Path, num_flips: int) -> Iterator[tuple[str, bytes | None]]:
    """Ways in which a file may be damaged, with what it holds then; None: it is gone."""
    whole, draw = path.read_bytes(), random.Random(path.name)
    yield "gone", None
    yield "emptied", b""
    for length in (1, len(whole) // 2, len(whole) - 1):
        yield f"cut to {length} bytes", whole[:length]
    for _ in range(num_flips):
        bit = draw.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)


def test_a_newest_checkpoint_with_any_damaged_file_is_passed_over(folder: Path, dying: LaunchResult, tmp_path: Path):
    for step in (2, 4):
        shutil.copytree(folder / "saved" / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    older, newest = (str(tmp_path / f"checkpoint-{step}") for step in (2, 4))
    assert latest_sound(str(tmp_path)) == (newest, [])
    paths = sorted(path for path in Path(newest).rglob("*") if path.is_file())
    num_variants = 0
    for path in paths:
        whole = path.read_bytes()
        for what, content in damages(path, num_flips=18):
            path.unlink() if content is None else path.write_bytes(content)
            found, reasons = latest_sound(str(tmp_path))
            assert (found, len(reasons)) == (older, 1), (path.name, what)
            assert path.name in reasons[0] and newest in reasons[0], (what, reasons)
            num_variants += 1
        path.write_bytes(whole)
    assert len(paths) == 9 and num_variants >= 200
    assert latest_sound(str(tmp_path)) == (newest, [])


def test_model_only_checkpoints_say_so(folder: Path, on_one: Outcomes):
    lines = (folder / "model-only" / "pipetransformer_events.jsonl").read_text().splitlines()
    assert [event["content"] for event in map(json.loads, lines) if event["event"] == "checkpoint"] == ["model"]
    assert not (folder / "model-only" / "checkpoint-2" / "pipetransformer").exists()


def test_a_run_that_was_killed_goes_on(folder: Path, dying: LaunchResult):
    """SIGKILL of every rank in the middle of an epoch; then new processes, the same script, and `True`."""
    assert set(dying.returncodes) == {-signal.SIGKILL}, dying.output
    left = {path.name for path in (folder / "killed").glob("checkpoint-*")}
    assert left == {"checkpoint-7"}, "save_total_limit=1: the older checkpoint goes when the newer one is whole"
    _run(folder, {}, 2, "--go-on")
    for rank in range(2):
        whole = json.loads((folder / f"undisturbed.rank{rank}.json").read_text())["whole"]
        end = json.loads((folder / f"went-on.rank{rank}.json").read_text())
        assert_equal_ends(whole, end, 7)
