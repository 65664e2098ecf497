"""PipeTransformer for Hugging Face Trainer: a fine-tuning run split into pipeline stages and replicas."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_pipetransformer.comm.errors import PipelineError
    from hf_pipetransformer.freeze.policy import FreezePolicy, FreezeSignal
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError
    from hf_pipetransformer.trainer.mixin import (
        PipeTransformerMixin,
        PipeTransformerTrainer,
        Seq2SeqPipelineArguments,
        Seq2SeqPipelineTrainer,
    )
    from hf_pipetransformer.training.computed_once import ComputedOnce


__all__ = [
    "ComputedOnce",
    "FreezePolicy",
    "FreezeSignal",
    "Layout",
    "PipeTransformerArguments",
    "PipeTransformerMixin",
    "PipeTransformerTrainer",
    "PipelineError",
    "Seq2SeqPipelineArguments",
    "Seq2SeqPipelineTrainer",
    "Splitter",
    "UnsupportedModelError",
]
__version__ = "0.1.0"

TESTED = {"torch": ((2, 13), (2, 13)), "transformers": ((5, 23), (5, 24))}
"""First and last release of a package that the tests run with, those that pyproject.toml lets pip install."""

_HOMES = {
    "ComputedOnce": "training.computed_once",
    "PipeTransformerArguments": "options.arguments",
    "PipelineError": "comm.errors",
    "FreezePolicy": "freeze.policy",
    "FreezeSignal": "freeze.policy",
    "Layout": "schedules.layout",
    "Splitter": "splitters.base",
    "UnsupportedModelError": "splitters.base",
    "PipeTransformerMixin": "trainer.mixin",
    "PipeTransformerTrainer": "trainer.mixin",
    "Seq2SeqPipelineArguments": "trainer.mixin",
    "Seq2SeqPipelineTrainer": "trainer.mixin",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, which the command line does without.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def is_tested(package: str, found: str) -> bool:
    """Return True for a release of a package that the tests run with."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    first, last = TESTED[package]
    return numbers is None or first <= (int(numbers[1]), int(numbers[2])) <= last


def _warn_of_untested(package: str, found: str) -> None:
    """Warn if this release was installed by hand: what it has renamed may fail late, or not at all."""
    if is_tested(package, found):
        return
    first, last = TESTED[package]
    oldest, newest = f"{first[0]}.{first[1]}", f"{last[0]}.{last[1]}"
    tested = oldest if first == last else f"{oldest} to {newest}"
    warnings.warn(
        f"{package} {found} is installed, but this release of hf-pipetransformer was tested with {tested} "
        "only; others may fail, or give other numbers than Trainer. Install a tested one: "
        f"pip install '{package}>={oldest},<{last[0]}.{last[1] + 1}'.",
        stacklevel=2,
    )


for _package in TESTED:
    with suppress(PackageNotFoundError):  # Whoever imports it says so.
        _warn_of_untested(_package, version(_package))
