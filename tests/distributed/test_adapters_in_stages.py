"""Adapters on stages: the numbers and files of Trainer with PEFT, and no bytes for what is frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_pipetransformer.state.plain_checkpoint import export_checkpoint
from tests.distributed.adapter_worker import CASES, ON_EVERY_CHANGE, SAVED_AT, STEPS, make_trainer, run_all
from tests.distributed.launches import Outcome, Run, assert_trained_alike, launches_of, run_params, slow_unless
from tests.support.adapted import ADDS
from tests.support.trainings import losses_of


RESUMED_SLOWLY = ("qwen2-float32", "int8")
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "training_args.bin"}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all, strict=())


@pytest.mark.parametrize(
    "run",
    run_params(
        {name: case.layouts for name, case in CASES.items()},
        lambda run: run.case in ON_EVERY_CHANGE and run.num_ranks == 2,
        lambda run: [ADDS] if CASES[run.case].is_added else [],
    ),
)
def test_numbers_files_and_bytes(ours: Outcome, plain: Outcome) -> None:
    assert len(ours.logged("loss")) == STEPS
    assert_trained_alike(ours, plain)
    assert ours.ranks[0]["loads"], "PEFT loads other logits than those of the model that was trained"
    assert_same_files(ours.output, plain.output)
    assert_only_adapters_cost([rank["kept"] for rank in ours.ranks])


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


def assert_only_adapters_cost(ranks: list[dict[str, Any]]) -> None:
    """Gradients, buffers and moments are those of the adapters of a rank's layers, as the layout's plan says."""
    for kept in ranks:
        assert kept["adapters"] == kept["gradients"] == kept["planned"]
        assert kept["moments"] == 2 * kept["adapters"]
        assert kept["reduced"] == (kept["adapters"] if kept["has_replicas"] else 0)
        assert 0 < kept["adapters"] < kept["weights"] / 4


@pytest.mark.parametrize("run", [Run("bert-lora", (2, 1))], ids=str)
def test_only_what_is_saved_comes_to_the_first_rank(ours: Outcome) -> None:
    """In the middle of a run; at its end the model is whole."""
    *during, after = ours.ranks[0]["held_at_saves"]
    first, second = (rank["kept"] for rank in ours.ranks)
    saved = first["weights"] + second["adapters"]
    assert during and all(first["weights"] < held <= saved for held in during) and saved < after


@pytest.mark.parametrize(
    "run", [slow_unless(name not in RESUMED_SLOWLY, Run(name, (2, 1))) for name in ("bert-lora", *RESUMED_SLOWLY)]
)
def test_a_checkpoint_of_two_stages_goes_on_on_one_and_in_plain_trainer(
    ours: Outcome, plain: Outcome, run: Run, tmp_path: Path
) -> None:
    saved = str(ours.output / f"checkpoint-{SAVED_AT}")
    export_checkpoint(saved, str(tmp_path / "exported"))
    on_one = make_trainer(CASES[run.case], tmp_path / "ours", None)
    in_plain = make_trainer(CASES[run.case], tmp_path / "plain", None, is_plain=True)
    for trainer, where in ((on_one, saved), (in_plain, str(tmp_path / "exported"))):
        trainer.train(resume_from_checkpoint=where)
        assert losses_of(trainer)[-2:] == pytest.approx(plain.values("loss")[-2:], rel=1e-5)


@pytest.mark.parametrize("run", [Run("gpt2-frozen", (2, 1))], ids=str)
def test_layers_freeze_move_and_are_read_with_their_adapters(ours: Outcome) -> None:
    last = ours.ranks[0]["layout"]
    assert (last["num_frozen_layers"], last["num_replicas"]) == (3, 2)
    assert [event["shared"] for event in ours.events("freeze")] == [[], []]
    assert sum(event.get("hits", 0) for event in ours.events("cache")) > 0
    before, after = (
        load_file(path / "adapter_model.safetensors") for path in (ours.output / f"checkpoint-{SAVED_AT}", ours.output)
    )
    moved = {key.split(".h.")[1][0] for key in before if not torch.equal(before[key], after[key])}
    assert moved == {"3"}
