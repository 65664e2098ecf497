"""The package runs from an empty environment; the Dockerfile and the publishing workflow name what exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_pipetransformer
from tests.project.test_code_blocks import Commands


REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "Dockerfile"
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def instructions(kind: str) -> list[str]:
    """Return what follows `kind` on the lines of the Dockerfile, with continued lines joined."""
    lines = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [line.removeprefix(kind).strip() for line in lines if line.startswith(f"{kind} ")]


def test_every_file_of_the_package_is_published() -> None:
    package = REPOSITORY / "hf_pipetransformer"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["hf_pipetransformer"]
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == {path for pattern in patterns for path in package.glob(pattern)}
    assert all((folder / "__init__.py").is_file() for folder in {path.parent for path in package.rglob("*.py")})


def test_extras_hold_what_their_commands_import() -> None:
    names = {
        extra: {re.match(r"[\w-]+(\[\w+\])?", each)[0] for each in needed}  # type: ignore[index]
        for extra, needed in PROJECT["project"]["optional-dependencies"].items()
    }
    assert "vl-convert-python" in names["report"]
    assert names["demo"] == {"hf-pipetransformer[report]", "pillow", "scikit-learn"}
    assert names["scripts"] >= {"evaluate", "jiwer", "peft", "pillow", "scikit-learn", "soundfile", "trl"}


def test_the_table_of_versions_is_that_of_the_bounds() -> None:
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    rows = {
        cells[0].split(",")[0].lower(): cells[1:]
        for cells in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.M)
    }
    extras = PROJECT["project"]["optional-dependencies"]
    bounds = dict(re.findall(r"([\w-]+)>=([\d.]+)", "\n".join([*PROJECT["project"]["dependencies"], *extras["test"]])))
    bounds["python"] = PROJECT["project"]["requires-python"].removeprefix(">=")
    names = ("python", "torch", "transformers", "accelerate", "datasets", "peft", "trl", "bitsandbytes")
    assert {name: rows[name][0] for name in names} == {name: bounds[name] for name in names}
    for name, (first, last) in hf_pipetransformer.TESTED.items():
        assert rows[name][0].startswith("{}.{}.".format(*first))
        assert rows[name][1] == "{}.{}".format(*last)


def test_the_workflow_publishes_what_make_package_has_tried() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert [step["run"] for step in build["steps"] if "run" in step][0] == "make package"
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in text


def test_the_dockerfile_copies_and_runs_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-base-ubuntu[\d.]+", instructions("FROM")[0])
    copied = [name for line in instructions("COPY") for name in line.split()[:-1]]
    kept = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all((REPOSITORY / name).exists() and f"!{name}" in kept for name in copied)
    for line in instructions("RUN"):
        if found := re.search(r"pip install --no-cache-dir (\S+)", line):
            Commands(set(), monkeypatch).pip(["install", found[1]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_package_runs_from_an_empty_environment(tmp_path: Path) -> None:
    """What `make package` tries, and the last check of the Dockerfile in the same environment."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(["make", "package"], cwd=REPOSITORY, env=plain, check=True, timeout=1500)
    programs = REPOSITORY / "build" / "package" / "empty" / "bin"
    shown = subprocess.run([programs / "hf-pipetransformer", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"hf-pipetransformer {hf_pipetransformer.__version__}\n"
    shutil.copy(REPOSITORY / "scripts" / "quick_start.py", tmp_path)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", instructions("RUN")[-1]], cwd=tmp_path, env=plain | path, check=True, timeout=280)
