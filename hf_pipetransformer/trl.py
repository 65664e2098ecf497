"""TRL's trainers in a pipeline: the mixin before each, with arguments that have the options of both.

    from hf_pipetransformer.trl import SFTPipelineConfig, SFTPipelineTrainer

Needs TRL (`pip install trl`). A plain `SFTConfig`, `RewardConfig` or `DPOConfig` gets the defaults of a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.trainer.mixin import PipeTransformerMixin


__all__ = [
    "DPOPipelineConfig",
    "DPOPipelineTrainer",
    "RewardPipelineConfig",
    "RewardPipelineTrainer",
    "SFTPipelineConfig",
    "SFTPipelineTrainer",
]


# TRL's configuration comes first: the defaults are its own.
@dataclass
class SFTPipelineConfig(SFTConfig, PipeTransformerArguments):
    """Options of `SFTConfig`, with its defaults, and of `PipeTransformerArguments`."""


class SFTPipelineTrainer(PipeTransformerMixin, SFTTrainer):
    """`SFTTrainer` with a pipeline, freezing and stored activations."""


@dataclass
class RewardPipelineConfig(RewardConfig, PipeTransformerArguments):
    """Options of `RewardConfig`, with its defaults, and of `PipeTransformerArguments`."""


class RewardPipelineTrainer(PipeTransformerMixin, RewardTrainer):
    """`RewardTrainer` with a pipeline, freezing and stored activations."""


@dataclass
class DPOPipelineConfig(DPOConfig, PipeTransformerArguments):
    """Options of `DPOConfig`, with its defaults, and of `PipeTransformerArguments`."""


class DPOPipelineTrainer(PipeTransformerMixin, DPOTrainer):
    """`DPOTrainer` with a pipeline, freezing and stored activations."""
