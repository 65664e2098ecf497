"""Loaders on two processes: alone they start nothing, and a script's own mean what they mean to Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.loader_worker import act_all
from tests.distributed.scenarios import run


pytestmark = pytest.mark.distributed


def test_loaders_alone_and_loaders_of_a_scripts_own(tmp_path: Path) -> None:
    assert run(act_all, tmp_path, 2, timeout=120) == [["read_alone", "refused", "train_with_own"]] * 2
