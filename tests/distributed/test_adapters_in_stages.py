"""Adapters on stages: the numbers and files of Trainer with PEFT, and no bytes for what is frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from hf_pipetransformer.state.plain_checkpoint import export_checkpoint
from tests.distributed.adapter_worker import (
    CASES,
    ON_EVERY_CHANGE,
    OTHERS,
    SAVED_AT,
    STEPS,
    make_trainer,
    run,
    run_all,
)
from tests.distributed.scenarios import start
from tests.support.adapted import ADDS, WHY_NOT_ADDED


TOLERANCE = 1e-5
RESUMED_SLOWLY = ("qwen2-float32", "int8")
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "training_args.bin"}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def ends(folder: Path, num_processes: int, names: list[str]) -> Path:
    """Where the ends of runs on so many processes lie, beside those on one."""
    for name in names:
        if not (folder / f"{name}-1x1.json").exists():
            run(name, CASES[name], (1, 1), folder)
    start(run_all, folder, num_processes, {"names": names}, timeout=300)
    return folder


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ends(tmp_path_factory.mktemp("adapters"), 2, list(ON_EVERY_CHANGE))


@pytest.fixture(scope="module")
def on_four(on_two: Path) -> Path:
    return ends(on_two, 4, [name for name, case in CASES.items() if len(case.layouts) > 1])


@pytest.fixture(scope="module")
def others(on_two: Path) -> Path:
    return ends(on_two, 2, [name for name, case in OTHERS.items() if not (case.is_added and WHY_NOT_ADDED)])


def end(folder: Path, name: str, layout: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{layout[0]}x{layout[1]}.json").read_text())
    return found


def runs() -> list[Any]:
    found = []
    for name, case in CASES.items():
        for layout in case.layouts:
            fixture = "on_four" if layout[0] * layout[1] == 4 else "on_two" if name in ON_EVERY_CHANGE else "others"
            marks = [*([] if fixture == "on_two" else [pytest.mark.slow]), *([ADDS] if case.is_added else [])]
            found.append(pytest.param(name, layout, fixture, id=f"{name}-{layout[0]}x{layout[1]}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "layout", "fixture"), runs())
def test_numbers_files_and_bytes(
    name: str, layout: tuple[int, int], fixture: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    found, expected = end(folder, name, layout), end(folder, name)
    assert len(found["loss"]) == STEPS
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=TOLERANCE), key
    assert found["loads"], "PEFT loads other logits than those of the model that was trained"
    shape = f"{name}-{layout[0]}x{layout[1]}"
    assert_same_files(folder / shape, folder / f"{name}-1x1")
    assert_only_adapters_cost(folder, shape)


def assert_same_files(own: Path, expected: Path) -> None:
    for folder in ("", f"checkpoint-{SAVED_AT}"):
        names = {path.name for path in (own / folder).iterdir() if path.is_file()}
        assert names >= FILES - ({"README.md"} if not (expected / folder / "README.md").exists() else set())
        assert not any(name.startswith("model") for name in names)
        saved, plain = (load_file(path / folder / "adapter_model.safetensors") for path in (own, expected))
        assert saved.keys() == plain.keys()
        for key, value in plain.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-5)
        configs = [json.loads((path / folder / "adapter_config.json").read_text()) for path in (own, expected)]
        assert configs[0].keys() == configs[1].keys()
        assert [key for key in configs[0] if not same(configs[0][key], configs[1][key])] == []


def same(one: Any, other: Any) -> bool:
    """Sets are saved in any order."""
    return sorted(map(str, one)) == sorted(map(str, other)) if isinstance(one, list) else bool(one == other)


def assert_only_adapters_cost(folder: Path, shape: str) -> None:
    """Gradients, buffers and moments are those of the adapters of a rank's layers, as the layout's plan says."""
    total = 0
    for path in sorted(folder.glob(f"{shape}-?.json")):
        kept = json.loads(path.read_text())
        assert kept["adapters"] == kept["gradients"] == kept["planned"]
        assert kept["moments"] == 2 * kept["adapters"]
        assert kept["reduced"] == (kept["adapters"] if kept["has_replicas"] else 0)
        assert 0 < kept["adapters"] < kept["weights"] / 4
        total += kept["adapters"]
    assert total


def test_only_what_is_saved_comes_to_the_first_rank(on_two: Path) -> None:
    """In the middle of a run; at its end the model is whole."""
    *during, after = end(on_two, "bert-lora", (2, 1))["held_at_saves"]
    stages = [json.loads((on_two / f"bert-lora-2x1-{rank}.json").read_text()) for rank in (0, 1)]
    saved = stages[0]["weights"] + stages[1]["adapters"]
    assert during and all(stages[0]["weights"] < held <= saved for held in during) and saved < after


@pytest.mark.parametrize(
    ("name", "fixture"),
    [("bert-lora", "on_two"), *(pytest.param(name, "others", marks=pytest.mark.slow) for name in RESUMED_SLOWLY)],
)
def test_a_checkpoint_of_two_stages_goes_on_on_one_and_in_plain_trainer(
    name: str, fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(fixture)
    expected = end(folder, name)["loss"]
    saved = str(folder / f"{name}-2x1" / f"checkpoint-{SAVED_AT}")
    ours = make_trainer(CASES[name], tmp_path / "ours", (1, 1))
    ours.train(resume_from_checkpoint=saved)
    export_checkpoint(saved, str(tmp_path / "exported"))
    plain = make_trainer(CASES[name], tmp_path / "plain", (1, 1), is_plain=True)
    assert isinstance(plain, Trainer)
    plain.train(resume_from_checkpoint=str(tmp_path / "exported"))
    for trainer in (ours, plain):
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-2:] == pytest.approx(expected[-2:], rel=TOLERANCE)


def test_layers_freeze_move_and_are_read_with_their_adapters(on_two: Path) -> None:
    last = end(on_two, "gpt2-frozen", (2, 1))["layout"]
    assert (last["num_frozen_layers"], last["num_replicas"]) == (3, 2)
    folder = on_two / "gpt2-frozen-2x1"
    events = [json.loads(line) for line in (folder / "pipetransformer_events.jsonl").read_text().splitlines()]
    assert [event["shared"] for event in events if event["event"] == "freeze"] == [[], []]
    assert sum(event.get("hits", 0) for event in events if event["event"] == "cache") > 0
    before, after = (
        load_file(path / "adapter_model.safetensors") for path in (folder / f"checkpoint-{SAVED_AT}", folder)
    )
    moved = {key.split(".h.")[1][0] for key in before if not torch.equal(before[key], after[key])}
    assert moved == {"3"}
