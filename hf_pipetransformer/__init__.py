"""PipeTransformer for Hugging Face Trainer: a fine-tuning run split into pipeline stages and replicas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_pipetransformer.comm.errors import PipelineError
    from hf_pipetransformer.freeze.policy import FreezePolicy, FreezeSignal
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError
    from hf_pipetransformer.trainer.mixin import PipeTransformerMixin, PipeTransformerTrainer


__all__ = [
    "FreezePolicy",
    "FreezeSignal",
    "Layout",
    "PipeTransformerArguments",
    "PipeTransformerMixin",
    "PipeTransformerTrainer",
    "PipelineError",
    "Splitter",
    "UnsupportedModelError",
]
__version__ = "0.1.0"

_HOMES = {
    "PipeTransformerArguments": "options.arguments",
    "PipelineError": "comm.errors",
    "FreezePolicy": "freeze.policy",
    "FreezeSignal": "freeze.policy",
    "Layout": "schedules.layout",
    "Splitter": "splitters.base",
    "UnsupportedModelError": "splitters.base",
    "PipeTransformerMixin": "trainer.mixin",
    "PipeTransformerTrainer": "trainer.mixin",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import, which the command line does without.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
