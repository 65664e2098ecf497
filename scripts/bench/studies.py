"""Studies of accuracy: long, and resumable run by run, so each is a script of its own that the driver starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .measure import KEEPS_FREED, REPOSITORY, Settings, experiment


@experiment("front.json", minutes=1500, quick_minutes=2, processes=1)
def front(settings: Settings) -> dict[str, Any]:
    """Accuracy against time on nine tasks, all contenders; `scripts/study_front.py` takes tasks and seeds apart."""
    quick = ["--tasks", "cifar10", "--seeds", "0", "--contenders", "first 1/2 frozen, half of the epochs"]
    return _study("study_front.py", settings, "front", quick)


@experiment("views.json", minutes=180, quick_minutes=4, processes=1)
def views(settings: Settings) -> dict[str, Any]:
    """Stored views of augmented images beside fresh augmentation."""
    return _study("study_views.py", settings, "views", ["--seeds", "0", "--contenders", "views: 1"])


def _study(script: str, settings: Settings, name: str, quick: list[str]) -> dict[str, Any]:
    """Run a study and return its report; finished runs are kept in benchmarks/, those of a quick look elsewhere."""
    runs = settings.of(REPOSITORY / "benchmarks" / name, settings.folder)
    settings.folder.mkdir(parents=True, exist_ok=True)
    output = settings.folder / "report.json"
    path = str(REPOSITORY / "scripts" / script)
    command = [sys.executable, path, "--data", str(settings.data), "--models", str(settings.models)]
    command += ["--folder", str(runs), "--output", str(output), *settings.of([], quick)]
    if script == "study_front.py":
        pages = settings.of(REPOSITORY / "docs", Path(settings.folder))
        command += ["--picture", str(pages / "front.svg"), "--table", str(pages / "front.md")]
    subprocess.run(command, check=True, env={**os.environ, **KEEPS_FREED, "OMP_NUM_THREADS": "1"}, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(output.read_text())
    return found
