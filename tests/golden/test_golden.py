"""Trainings give what is recorded of them: numbers, and what was stored, read and computed for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import CASES, Golden, read
from tests.golden.recording import differences, machine, recorded


def _marks(case: Golden) -> list[Any]:
    launched = [pytest.mark.distributed] if case.processes > 1 else []
    return [*launched, *([] if case.is_quick else [pytest.mark.slow])]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return read()


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(case)) for name, case in CASES.items()])
def test_a_training_gives_what_is_recorded(name: str, golden: dict[str, Any], tmp_path: Path) -> None:
    found = recorded(CASES[name], tmp_path, name)
    wrong = differences(golden["cases"][name], found, CASES[name].rtol, golden["machine"] == machine())
    assert not wrong, "\n".join(wrong)


def test_each_case_is_recorded(golden: dict[str, Any]) -> None:
    assert sorted(golden["cases"]) == sorted(CASES)
