"""Replicas that freeze nothing: usages of a trainer, run with Trainer and with ours, compared on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.usages import USAGES, assert_same, outcome


OPTIONS = {"freeze_policy": "none", "pipeline_parallel_size": "1"}


def main() -> None:
    folder = Path(sys.argv[1]) / os.environ["RANK"]
    for name in sys.argv[2:]:
        plain = outcome(USAGES[name], Trainer, {}, folder / "plain")
        ours = outcome(USAGES[name], PipeTransformerTrainer, OPTIONS, folder / "ours")
        assert ours["is_left"], f"{name}: a pipeline ran"
        assert_same(ours, plain)
        print(f"same: {name}")


if __name__ == "__main__":
    main()
