"""Note the calls of a script on each of several ranks, with the pipeline or with plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.startup import costs
from tests.distributed.scenarios import scenario
from tests.support.calls import Case, as_json, calls_of


measured_blocks = costs.profile_blocks


def even_blocks(*args: Any, **options: Any) -> costs.BlockProfile:
    """Measure as ever, and say that all blocks take equally long: where a clock cuts the model, calls differ."""
    profile = measured_blocks(*args, **options)
    for seconds in (profile.forward, profile.backward, profile.edge_backward):
        seconds[:] = [1e-3] * len(seconds)
    return profile


@scenario
def note_calls(folder: Path, case: dict[str, Any], is_plain: bool) -> list[dict[str, Any]]:
    kind = Trainer if is_plain else PipeTransformerTrainer
    with mock.patch.object(costs, "profile_blocks", even_blocks):
        calls, _ = calls_of(Case(**case), kind, folder / "output")
    return as_json(calls)
