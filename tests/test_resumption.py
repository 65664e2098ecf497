"""Which checkpoint a run goes on from, without one: how often its files are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pipetransformer import checkpoint
from hf_pipetransformer.run import resumption
from hf_pipetransformer.run.resumption import find_resumption


@pytest.mark.parametrize("where", [True, "checkpoint-4"])
def test_every_file_of_the_checkpoint_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: Any):
    """Reading hashes them, which takes as long as reading a large model."""
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    newest, read = str(tmp_path / "checkpoint-4"), []

    def read_state(folder: str) -> dict[str, Any]:
        read.append(folder)
        return {"layout": {}, "step": 4}

    monkeypatch.setattr(checkpoint, "read_state", read_state)
    monkeypatch.setattr(resumption, "is_plain", lambda folder: False)
    monkeypatch.setattr(resumption, "check_same_run", lambda *_: None)
    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)))
    description: Any = SimpleNamespace(trainer=trainer, fields={}, data=dict)
    topology: Any = SimpleNamespace(decide=lambda call: call())
    found = find_resumption(where if where is True else newest, topology, description)
    assert (found.folder, found.step) == (newest, 4)
    assert read == [newest]
