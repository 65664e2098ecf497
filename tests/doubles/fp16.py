"""fp16 on the CPU, where accelerate computes in float32 instead: autocast and the loss scaler that GPUs would have."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer


def use_fp16(trainer: Trainer, **scaling: Any) -> None:
    """Give a trainer of `fp16=True` what its accelerator has on a GPU; `scaling` are options of `GradScaler`."""
    accelerator = trainer.accelerator
    assert accelerator.mixed_precision == "fp16" and not accelerator.native_amp and accelerator.scaler is None
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **scaling)
