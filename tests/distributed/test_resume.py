"""A run that goes on from a checkpoint ends as one that never stopped, to the bit; any other resume is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.state.checkpoint import newest_verified
from hf_pipetransformer.state.plain_checkpoint import export_checkpoint
from tests.distributed.launcher import LaunchResult
from tests.distributed.resume_worker import (
    ATTEMPTS,
    CASES,
    GLOBAL_BATCH,
    MOVED,
    NUM_SAMPLES,
    PLAIN,
    PRODUCT,
    SAVED,
    UNFREEZING,
    Case,
    run_all,
)
from tests.distributed.scenarios import start
from tests.support.comparison import far_tensors
from tests.support.models import has_zero_gradient


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

START_SECONDS = 90
CASE_SECONDS = 20

Outcomes = dict[str, list[dict[str, Any]]]


def _pairs(cases: dict[str, Case]) -> list[Any]:
    return [
        pytest.param(name, step, id=f"{name}-from-{step}") for name, case in cases.items() for step in case.resume_at
    ]


def _run(folder: Path, cases: dict[str, Case], num_processes: int, *acts: str, check: bool = True) -> LaunchResult:
    seconds = START_SECONDS + CASE_SECONDS * len(cases)
    options = {"names": list(cases), "acts": acts}
    return start(run_all, folder, num_processes, options, timeout=seconds, check=check, strict_nccl=True)


def _read(folder: Path, cases: dict[str, Case], num_processes: int) -> Outcomes:
    return {
        name: [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(num_processes)]
        for name in cases
    }


LOOKED_AT = "4-2-1-accumulation"
"""Case whose checkpoint a test looks at."""


@pytest.fixture(scope="module")
def cases_on(request: pytest.FixtureRequest) -> Callable[[int], dict[str, Case]]:
    """The cases of a number of processes that the selected tests ask for by their parameter `name`."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {LOOKED_AT, *(given["name"] for given in parameters if "name" in given)}

    def of(num_processes: int) -> dict[str, Case]:
        on = {name: case for name, case in CASES.items() if case.layout[0] * case.layout[1] == num_processes}
        return {name: case for name, case in on.items() if name in wanted}

    return of


@pytest.fixture(scope="module")
def acts(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Gives those of some acts of the worker that a selected test looks at: it asks for a fixture of that name."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    return lambda *names: [name for name in names if name in asked]


@pytest.fixture(scope="module")
def elsewhere() -> None:
    """Asked for by tests of runs that go on with other numbers of processes."""


@pytest.fixture(scope="module")
def refuse() -> None:
    """Asked for by tests of checkpoints that two processes must refuse, or pass over."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def on_one(folder: Path, cases_on: Callable[[int], dict[str, Case]], acts: Callable[..., list[str]]) -> Outcomes:
    """How the cases on one process ended; beside them lie checkpoints that two processes must refuse."""
    _run(folder, cases_on(1), 1, "strangers", *acts("elsewhere"))
    return _read(folder, cases_on(1), 1)


@pytest.fixture(scope="module")
def dying(
    folder: Path, on_one: Outcomes, cases_on: Callable[[int], dict[str, Case]], acts: Callable[..., list[str]]
) -> LaunchResult:
    """Two processes run their cases and what must be refused; at last they are killed in the middle of a run."""
    return _run(folder, cases_on(2), 2, *acts("refuse", "elsewhere"), "die", check=False)


@pytest.fixture(scope="module")
def outcomes(
    folder: Path,
    on_one: Outcomes,
    dying: LaunchResult,
    cases_on: Callable[[int], dict[str, Case]],
    acts: Callable[..., list[str]],
) -> Outcomes:
    """How every case ended on every rank."""
    if acts("elsewhere") or cases_on(4):
        _run(folder, cases_on(4), 4, *acts("elsewhere"))
    return on_one | _read(folder, cases_on(2), 2) | _read(folder, cases_on(4), 4)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int]], Outcomes]:
    """How the cases of a layout ended; each layout is launched once, by the first test that asks for it."""

    # A parametrized fixture would be set up anew for each set of parameters that the layout is a part of.
    @cache
    def of(layout: tuple[int, int]) -> Outcomes:
        where = tmp_path_factory.mktemp("product")
        _run(where, PRODUCT[layout], layout[0] * layout[1])
        return _read(where, PRODUCT[layout], layout[0] * layout[1])

    return of


EVENT_FIELDS = (
    "event",
    "step",
    "from",
    "to",
    "num_frozen",
    "num_wanted",
    "num_wanted_before",
    "gradient_norms",
    "content",
)


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
    ("layout", "name", "step"),
    [pytest.param(layout, *pair.values, id=pair.id) for layout in PRODUCT for pair in _pairs(PRODUCT[layout])],
)
def test_all_options_together(
    products: Callable[[tuple[int, int]], Outcomes], layout: tuple[int, int], name: str, step: int
):
    assert_resumed_to_the_bit(products(layout)[name], step)


@pytest.mark.slow
@pytest.mark.parametrize("layout", UNFREEZING)
def test_a_run_that_unfreezes_is_resumed_to_the_bit(tmp_path: Path, layout: tuple[int, int]):
    """What was frozen then has its parameter group, and a pipeline that had shrunk grows back."""
    cases = UNFREEZING[layout]
    _run(tmp_path, cases, layout[0] * layout[1])
    for name, ranks in _read(tmp_path, cases, layout[0] * layout[1]).items():
        for step in cases[name].resume_at:
            assert_resumed_to_the_bit(ranks, step)
        transitions = [event["to"] for event in _decisions(ranks[0]["whole"], 0) if "to" in event]
        assert [found["num_frozen_layers"] for found in transitions] == [3, 0, 1]
        assert [found["num_stages"] for found in transitions] == [1, layout[0], layout[0]]


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
    elif case.watches_weights or case.options.get("freeze_policy", "none") != "none":
        assert len(steps) >= 2
        assert all(any(step <= moment for moment in steps) for step in case.resume_at)
        assert whole["layout"]["num_frozen_layers"] > 0
    if "memory" in name:
        assert [event["to"]["num_stages"] for event in _decisions(whole, 0) if "to" in event] == [2, 1]
    if "plateau" in name:
        rates = {entry["learning_rate"] for entry in whole["history"]}
        assert len(rates) > 1


def test_a_checkpoint_holds_these_files(outcomes: Outcomes, folder: Path):
    found = folder / LOOKED_AT / "whole" / "checkpoint-5"
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
    "other_optim": r"optimizer_class=SGD \(expected AdamW\)",
    "other_optimizer_class": r"optimizer_class=Adamax \(expected AdamW\)",
    "other_head": (
        r"cannot be resumed by this run, which has parameter classifier\.weight: \(5, 32\).*expected \(3, 32\)"
    ),
    "other_freezing": r"parameter bert\.embeddings\.\S+: .* frozen \(expected",
    "other_number_of_samples": r"36 training samples \(expected 37\)",
    "other_data": r"other training data: as many samples, but not the same ones",
    "other_plan": r"layout_plan.* has before step 4: .*checkpoint-4.* was saved under",
    "cut_plain": r"checkpoint-4' is damaged: optimizer\.pt cannot be read",
    "plain_other_optim": r"another kind of optimizer.*betas.*expected",
    "plain_other_freezing": r"groups of \[\d+, \d+\] parameters, expected \[\d+, \d+\]",
    "model_only": r"model-only.checkpoint-2.*holds the model only \(save_only_model=True\)",
    "no_folder": r"resume_from_checkpoint=.*checkpoint-77.* is not a folder: expected a checkpoint-N of a run",
    "nothing_to_resume": r"no sound checkpoint in output_dir",
    "no_state": r"incomplete.*interrupted.*state\.json",
    "no_random_file": r"damaged.*random-rank-1\.safetensors is missing",
    "no_weights": r"damaged.*model\.safetensors is missing",
    "cut_trainer_state": r"damaged.*trainer_state\.json has \d+ bytes \(expected \d+\)",
    "cut_optimizer": r"damaged.*optimizer-stage-1\.safetensors has \d+ bytes",
    "other_version": r"version 99.*expected version 6",
    "differs_between_ranks": r"resume_from_checkpoint is \S+checkpoint-1 on rank 1 and \S+checkpoint-0 on rank 0",
    "unsavable_scheduler": r"StubbornScheduler.*'memory'.*object.*save_only_model=True",
}


@pytest.mark.usefixtures("refuse")
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


@pytest.mark.usefixtures("refuse")
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


@pytest.mark.usefixtures("refuse")
def test_a_newest_checkpoint_with_any_damaged_file_is_passed_over(folder: Path, dying: LaunchResult, tmp_path: Path):
    for step in (2, 4):
        shutil.copytree(folder / "saved" / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    older, newest = (str(tmp_path / f"checkpoint-{step}") for step in (2, 4))
    assert newest_verified(str(tmp_path)) == (newest, [])
    paths = sorted(path for path in Path(newest).rglob("*") if path.is_file())
    num_variants = 0
    for path in paths:
        whole = path.read_bytes()
        for what, content in damages(path, num_flips=18):
            path.unlink() if content is None else path.write_bytes(content)
            found, reasons = newest_verified(str(tmp_path))
            assert (found, len(reasons)) == (older, 1), (path.name, what)
            assert path.name in reasons[0] and newest in reasons[0], (what, reasons)
            num_variants += 1
        path.write_bytes(whole)
    assert len(paths) == 9 and num_variants >= 200
    assert newest_verified(str(tmp_path)) == (newest, [])


# ---- on other processes ----


def _moved(folder: Path, world_size: int, key: str = "end") -> list[dict[str, Any]]:
    return [
        json.loads((folder / f"elsewhere-{world_size}.rank{rank}.json").read_text())[key] for rank in range(world_size)
    ]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("world_size", "key", "step", "pipeline"),
    [
        (2, "end", 4, (2, 1, 1)),
        (4, "end", 8, (2, 2, 1)),
        (4, "interleaved", 8, (2, 2, 2)),
        (4, "in-a-v", 10, (4, 1, 2)),
    ],
)
def test_a_run_goes_on_with_other_numbers_of_processes_and_stages(
    folder: Path, outcomes: Outcomes, world_size: int, key: str, step: int, pipeline: tuple[int, int, int]
):
    whole = _moved(folder, 1)[0]
    weights = load_file(folder / "moved-1" / "weights.rank0.safetensors")
    logged = {entry["step"]: entry for entry in whole["history"]}
    output = folder / (f"moved-{world_size}" if key == "end" else key)
    for rank, end in enumerate(_moved(folder, world_size, key)):
        assert end["steps"] == 12 - step and end["step"] == 12
        layout = Layout.from_event(end["layout"])
        assert (layout.pipeline_size, layout.num_replicas, layout.num_chunks) == pipeline
        assert end["layout"]["num_frozen_layers"] == whole["layout"]["num_frozen_layers"] == 2
        assert end["history"]
        for entry in end["history"]:
            for what in ("loss", "grad_norm", "learning_rate"):
                assert entry[what] == pytest.approx(logged[entry["step"]][what], rel=1e-5), (rank, entry)
        found = load_file(output / f"weights.rank{rank}.safetensors")
        assert far_tensors(found, weights, 1e-5, partial(has_zero_gradient, MOVED.model)) == {}, rank


@pytest.mark.usefixtures("elsewhere")
def test_a_policy_that_remembers_decides_the_same_elsewhere(folder: Path, dying: LaunchResult):
    """What it saw before the checkpoint counts, on another number of stages."""
    whole, (on_two, _) = _moved(folder, 1, "watched")[0], _moved(folder, 2, "watched")
    ends = ((whole, 0), (on_two, 6))
    freezes = [[event for event in _decisions(*end) if event["event"] == "freeze"] for end in ends]
    (first, expected), (found,) = freezes
    assert [(event["step"], event["num_frozen"]) for event in (first, expected, found)] == [(4, 0), (8, 1), (8, 1)]
    assert found["gradient_norms"] == pytest.approx(expected["gradient_norms"], rel=1e-4)


@pytest.mark.usefixtures("elsewhere")
def test_what_is_left_of_an_epoch_is_dealt_anew(folder: Path, dying: LaunchResult):
    """From batches of 8 to batches of 4: nothing of the epoch is read twice, nothing is left out."""
    first_epoch = _moved(folder, 1)[0]["read"][:NUM_SAMPLES]
    done, left = first_epoch[: 4 * GLOBAL_BATCH], first_epoch[4 * GLOBAL_BATCH :]
    assert sorted(done + left) == list(range(NUM_SAMPLES))
    for rank, end in enumerate(_moved(folder, 2, "smaller")):
        assert end["step"] == 4 + 2 + 10
        epochs = [entry["epoch"] for entry in end["history"]]
        assert epochs == sorted(epochs) and end["epoch"] == 2.0
        if rank == 0:
            assert end["read"][: len(left)] == left
            assert sorted(end["read"][len(left) :]) == list(range(NUM_SAMPLES))
    # A run that is resumed once more, where two batch sizes lie behind it, goes on as if it had not stopped.
    for whole, resumed in zip(_moved(folder, 2, "smaller"), _moved(folder, 2, "again"), strict=True):
        for key in ("weights", "optimizer", "scheduler", "step"):
            assert resumed[key] == whole[key], key


# ---- plain Trainer ----


def assert_near(found: Path, expected: Path) -> None:
    ignored = partial(has_zero_gradient, PLAIN.model)
    assert far_tensors(load_file(found), load_file(expected), 1e-5, ignored) == {}


@pytest.mark.usefixtures("elsewhere")
def test_a_run_of_plain_trainer_is_gone_on_with(folder: Path, dying: LaunchResult):
    for name in ("from-plain", "plain-on-two"):
        assert_near(folder / f"{name}.safetensors", folder / "plain.safetensors")
        log = json.loads((folder / name / "pipetransformer_events.jsonl").read_text().splitlines()[0])
        assert log["step"] == 3


def test_plain_trainer_goes_on_with_an_exported_checkpoint(folder: Path, on_one: Outcomes):
    assert_near(folder / "to-plain.safetensors", folder / "plain.safetensors")


@pytest.mark.usefixtures("elsewhere")
def test_what_is_exported_from_two_stages_is_what_plain_trainer_saves(
    folder: Path, dying: LaunchResult, tmp_path: Path
):
    export_checkpoint(str(folder / "plain-on-two" / "checkpoint-4"), str(tmp_path / "exported"))
    mine, theirs = (
        {name: torch.load(where / f"{name}.pt", weights_only=True) for name in ("optimizer", "scheduler")}
        for where in (tmp_path / "exported", folder / "plain" / "checkpoint-4")
    )
    assert mine["scheduler"] == theirs["scheduler"]
    for own, other in zip(mine["optimizer"]["param_groups"], theirs["optimizer"]["param_groups"], strict=True):
        assert own == other
    assert mine["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for position, state in theirs["optimizer"]["state"].items():
        assert mine["optimizer"]["state"][position].keys() == state.keys()
        assert mine["optimizer"]["state"][position]["step"] == state["step"] == 4
        for key in ("exp_avg", "exp_avg_sq"):
            # Of biases whose gradient is zero by mathematics both have rounding noise.
            assert torch.allclose(mine["optimizer"]["state"][position][key], state[key], rtol=1e-3, atol=1e-8)


@pytest.mark.usefixtures("refuse")
def test_nothing_is_exported_from_a_damaged_checkpoint_or_into_a_full_folder(
    folder: Path, dying: LaunchResult, tmp_path: Path
):
    with pytest.raises(ValueError, match="is not empty"):
        export_checkpoint(str(folder / "saved" / "checkpoint-4"), str(folder))
    shutil.copytree(folder / "saved" / "checkpoint-4", tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"damaged: config\.json"):
        export_checkpoint(str(tmp_path / "cut"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("elsewhere")
def test_other_settings_are_said(dying: LaunchResult):
    said = re.search(r"goes on with other settings than it was saved with: (.*)", dying.output)
    assert said is not None
    for text in ("per_device_train_batch_size=2 (was 8)", "2 processes (was 1)", "max_steps=-1 (was 12)"):
        assert text in dying.output


def test_model_only_checkpoints_say_so(folder: Path, on_one: Outcomes):
    lines = (folder / "model-only" / "pipetransformer_events.jsonl").read_text().splitlines()
    assert [event["content"] for event in map(json.loads, lines) if event["event"] == "checkpoint"] == ["model"]
    assert not (folder / "model-only" / "checkpoint-2" / "pipetransformer").exists()


def test_a_run_that_was_killed_goes_on(folder: Path, dying: LaunchResult):
    """SIGKILL of every rank in the middle of an epoch; then new processes, the same script, and `True`."""
    assert set(dying.returncodes) == {-signal.SIGKILL}, dying.output
    left = {path.name for path in (folder / "killed").glob("checkpoint-*")}
    assert left == {"checkpoint-7"}, "save_total_limit=1: the older checkpoint goes when the newer one is whole"
    _run(folder, {}, 2, "go_on")
    for rank in range(2):
        whole = json.loads((folder / f"undisturbed.rank{rank}.json").read_text())["whole"]
        end = json.loads((folder / f"went-on.rank{rank}.json").read_text())
        assert_equal_ends(whole, end, 7)
