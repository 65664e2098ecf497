"""Models that are none of transformers, with a splitter of their own, as the errors about them advise."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer, Splitter


L, WIDTH, LENGTH = 4, 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.line(hidden).tanh()


class Stack(nn.Module):
    """Layers without a config."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(L)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class ConfigIsNone(Stack):
    """As models have it that are only partly of transformers."""

    config = None


class OwnSplitter(Splitter):
    cuts_inside_layers = False

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)

    def mlp_parts(self, layer: nn.Module) -> Iterable[nn.Module | nn.Parameter]:
        return ()

    def run_attention(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("never cut inside")

    def run_mlp(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("never cut inside")


def rows(num: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(LENGTH, 2, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(num)
    ]


@pytest.mark.parametrize("kind", [Stack, ConfigIsNone])
@pytest.mark.parametrize("cache", ["off", "on"])
def test_a_model_without_config_freezes_with_a_splitter_of_its_own(
    kind: type[nn.Module], cache: str, tmp_path: Path
) -> None:
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=4, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", freeze_policy="fixed", freeze_at="3:2", activation_cache=cache,
        activation_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = PipeTransformerTrainer(kind(), args, train_dataset=rows(), splitter=OwnSplitter())
    trainer.train()
    assert trainer.layout.num_frozen_layers == 2
    assert trainer.layout.cache_level == (2 if cache == "on" else 0)
