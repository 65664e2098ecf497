"""The cards in `model_cards/` are what the library makes of the results beside them, and name their runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from make_cards import RUNS, launches

from hf_pipetransformer.report.card import render


CARDS = Path(__file__).resolve().parents[2] / "model_cards"
NAMES = sorted(path.stem for path in CARDS.glob("*.md") if path.name != "README.md")


def facts_of(name: str) -> dict[str, Any]:
    return json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))


def test_there_is_a_card_for_each_run_and_no_other() -> None:
    assert sorted(RUNS) == NAMES
    assert sorted(path.stem for path in CARDS.glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_what_the_library_makes_of_its_results(name: str) -> None:
    card = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    assert card == render(facts_of(name), f"{name}.json")
    assert f"[`{name}.json`]({name}.json)" in card


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_of_a_run_that_froze_layers_and_read_the_cache_beside_plain_trainer(name: str) -> None:
    facts = facts_of(name)
    plain = facts["comparison"]
    assert max(each["frozen"] for each in facts["layouts"]) > 0
    assert sum(each["hits"] for each in facts["cache"]["epochs"]) > 0
    assert (facts["processes"], plain["processes"], plain["layouts"]) == (2, 1, [])
    for count in ("train_samples", "eval_samples", "epochs", "steps", "samples_per_step"):
        assert facts[count] == plain[count]
    assert facts["metrics"].keys() == plain["metrics"].keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_card_are_those_of_its_runs(name: str) -> None:
    facts = facts_of(name)
    commands = [command for _folder, command in launches(name, "../shared/data", "../shared/models")]
    assert [facts["comparison"]["command"], facts["command"]] == commands
    card = (CARDS / f"{name}.md").read_text(encoding="utf-8").replace(" \\\n    ", " ")
    assert all(shlex.join(command) in card for command in commands)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_no_path_of_a_machine_and_no_gap(name: str) -> None:
    text = "".join((CARDS / f"{name}.{suffix}").read_text(encoding="utf-8") for suffix in ("md", "json"))
    assert not re.search(r"""(?<![\w.)\]])/(home|root|tmp|work|opt|usr|var|mnt|Users)\b""", text)
    assert not re.search(r"\{[a-z _]+\}|More information needed|TODO", text)
    assert not re.search(r"runtime|per_second", text)
