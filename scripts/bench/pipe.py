"""What `Pipe` costs on one device: time over the bare Sequential, and peak memory by way of checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_pipetransformer.pipe.pipe import Pipe

from .measure import RETURNS_FREED, PeakMemory, Settings, alternate, experiment, launch, ratios, report, seconds_of


BARE, MODES = "bare Sequential", ("never", "except_last", "always")


def transformer(num_layers: int) -> nn.Sequential:
    """Layers of width 256."""
    options = {"dropout": 0.0, "batch_first": True, "activation": "gelu"}
    return nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, **options) for _ in range(num_layers)))


def perceptron() -> nn.Sequential:
    """Eight layers of width 512."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))


MODELS = {
    "4 transformer layers x 256, 8 sequences of 64": (partial(transformer, 4), (8, 64, 256)),
    "8 linear layers x 512, 256 samples": (perceptron, (256, 512)),
}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, and the values that a tenth lies below and above."""
    found = np.quantile(values, (0.5, 0.1, 0.9)).round(4).tolist()
    return dict(zip(("median", "quantile_10", "quantile_90"), found, strict=True))


def overheads(rounds: int) -> list[dict[str, Any]]:
    """Time of forward and backward with one chunk over that of the bare Sequential, round by round."""
    rows = []
    for name, (build, shape) in MODELS.items():
        torch.manual_seed(0)
        bare, x = build(), torch.randn(shape)
        models: dict[str, nn.Module] = {
            BARE: bare, "Pipe, a stage each layer": Pipe(deepcopy(bare)),
            "Pipe, one stage": Pipe(nn.Sequential(deepcopy(bare))), "the bare Sequential again": deepcopy(bare),
        }  # fmt: skip

        def step(model: nn.Module, x: torch.Tensor = x) -> float:
            taken = seconds_of(lambda: model(x).sum().backward())
            model.zero_grad()
            return taken

        contenders = {label: partial(step, model) for label, model in models.items()}
        alternate(contenders, 5)
        found = alternate(contenders, rounds)
        for label, times in found.items():
            rows.append({"model": name, "contender": label, "ratio_to_bare": quantiles(ratios(times, found[BARE]))})
            report(label, rows[-1])
    return rows


def peak(contender: str) -> float:
    """MiB by which the process grows in its first forward and backward."""
    torch.manual_seed(0)
    module, x = transformer(8), torch.randn(32, 128, 256)
    model = module if contender == BARE else Pipe(module, 8, contender)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = PeakMemory("step")
    model(x).sum().backward()
    memory.end()
    return memory.peaks["step"] / 2**20


@experiment("pipe.json", minutes=5, quick_minutes=1, processes=1)
def pipe(settings: Settings) -> dict[str, Any]:
    """Time of `Pipe` with one chunk over the bare Sequential, and peak memory by way of checkpointing."""
    memory = []
    for name in (BARE, *MODES):
        found = [launch(peak, 1, name, environment=RETURNS_FREED) for _ in range(settings.of(5, 2))]
        memory.append({"contender": name, "peak_mebibytes": quantiles(found)})
    return {"overhead": launch(overheads, 1, settings.of(150, 4)), "memory": memory}
