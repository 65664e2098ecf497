"""Outputs of frozen parts whose form or company tells more than a record: as in plain Trainer, whatever is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, pad
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts import watching


WIDTH, LENGTH = 16, 12
TABLE = 3


class Encoder(nn.Module):
    """Mixes tokens, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        own = self.embedding(ids) * mask[..., None]
        return torch.tanh(self.mix(own + own.sum(1, keepdim=True) / mask.sum(1)[:, None, None]))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.hidden(input_ids, attention_mask)


class Cuts(Encoder):
    """Cuts its texts to the longest, so that its output is of another length from batch to batch."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        longest = int(attention_mask.sum(1).max())
        return self.hidden(input_ids[:, :longest], attention_mask[:, :longest])


class PassesOn(Encoder):
    """Gives the mask that it was given where that has no padding, and else another one."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        given = attention_mask if bool(attention_mask.all()) else attention_mask * 0.5
        return self.hidden(input_ids, attention_mask), given


class WithTable(Encoder):
    """Reads a table that has as many entries as the last batch has rows."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, table: Any = None) -> Any:
        hidden = self.hidden(input_ids, attention_mask)
        return hidden + torch.softmax(hidden @ table.T, -1) @ table


class OfCompany(Encoder):
    """Gives each row something of the others."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self.hidden(input_ids, attention_mask)
        return hidden + 0.3 * hidden.mean(0, keepdim=True)


class WithNumbers(Encoder):
    """Gives numbers of its batch beside a tensor."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.hidden(input_ids, attention_mask), [float(each) for each in attention_mask.sum(1)]


class Grows(Encoder):
    """Scales by the longest text that it has seen in small batches, of which the last of an epoch is one."""

    longest = 3.0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        if len(input_ids) < 4:
            self.longest = max(self.longest, float(attention_mask.sum(1).max()))
        return self.hidden(input_ids, attention_mask) * self.longest


class Forces(Encoder):
    """Gives a gradient that it takes itself."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        with torch.enable_grad():
            own = self.embedding(input_ids).requires_grad_()
        energy = torch.tanh(self.mix(own)).square().sum()
        return torch.autograd.grad(energy, own)[0] * attention_mask[..., None]


class TwoNames(Encoder):
    """Gives one tensor under two names."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self.hidden(input_ids, attention_mask)
        return {"last": hidden, "all": [hidden]}


class Perceptual(nn.Module):
    """Compares features of what is trained with those of what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.Tanh()).requires_grad_(False)
        self.trained = nn.Linear(LENGTH, LENGTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        given = input_ids / 50
        found = self.features(self.trained(given))
        return {"loss": (found - self.features(given)).square().mean(), "logits": found}


class WritesInto(nn.Module):
    """Adds what is trained to outputs in place, and writes into what the encoder was given, from the third call on."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.place, self.head = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        given = input_ids * attention_mask / 50
        hidden = self.mix(given)
        self.calls += 1
        if self.calls > 2:
            given.mul_(2)
        assert type(hidden) is torch.Tensor or self.calls < 3
        hidden += self.place
        logits = self.head(hidden)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Model(nn.Module):
    def __init__(self, kind: type[Encoder]) -> None:
        super().__init__()
        self.encoder, self.head = kind().requires_grad_(False), nn.Linear(WIDTH, 3)
        self.register_buffer("bank", torch.randn(TABLE, WIDTH))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        more = {"table": normalize(self.bank, dim=-1)} if isinstance(self.encoder, WithTable) else {}
        found = self.encoder(input_ids, attention_mask=attention_mask, **more)
        if isinstance(found, dict):
            found["last"][attention_mask == 0] = self.head.weight.mean()
            found = found["all"][0]
        hidden, share = found if isinstance(found, tuple) else (found, torch.ones(()))
        share = torch.tensor(share)[: len(share) // 2 + 1] if isinstance(share, list) else share
        logits = self.head(hidden).sum(1) / hidden.shape[1] * share.mean()
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def with_attentions() -> nn.Module:
    """Its loss reads the attentions of all layers, the lower of which are frozen."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3}
    config = BertConfig(
        vocab_size=50, num_labels=3, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, output_attentions=True, attn_implementation="eager", **sizes,
    )  # fmt: skip

    class Reading(BertForSequenceClassification):
        def forward(self, labels: Any = None, **inputs: Any) -> Any:
            found = super().forward(**inputs)
            shares = sum(each.square().mean() * (i + 1) for i, each in enumerate(found.attentions))
            return {"loss": cross_entropy(found.logits, labels) * (1 + shares), "logits": found.logits}

    model = Reading(config)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return model


def rows(number: int = 11) -> list[dict[str, torch.Tensor]]:
    draw, found = torch.Generator().manual_seed(2), []
    for index in range(number):
        # The first batch has no padding.
        length = LENGTH if index < 4 else int(torch.randint(3, LENGTH, (), generator=draw))
        ids = torch.randint(1, 50, (length,), generator=draw)
        more = (0, LENGTH - length)
        mask = pad(torch.ones(length), more)
        found.append({"input_ids": pad(ids, more), "attention_mask": mask, "labels": torch.tensor(index % 3)})
    return found


def logged(kind: type[Trainer], build: Callable[[], nn.Module], folder: Path, **options: Any) -> list[float]:
    set_seed(3)
    make, more = TrainingArguments, dict[str, Any]()
    if kind is PipeTransformerTrainer:
        make, more = PipeTransformerArguments, {"activation_cache": "on"}
    args = make(
        output_dir=str(folder), num_train_epochs=4, logging_steps=1, save_strategy="no", report_to="none",
        learning_rate=1e-2, use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        **{"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, **more, **options},
    )  # fmt: skip
    trainer = kind(build(), args, train_dataset=rows(), eval_dataset=rows()[:8])
    trainer.train()
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (partial(Model, Encoder), {}),
        (partial(Model, Cuts), {}),
        (partial(Model, PassesOn), {"train_sampling_strategy": "sequential"}),
        (partial(Model, WithTable), {}),
        (partial(Model, OfCompany), {"per_device_train_batch_size": 1, "eval_strategy": "epoch", "eval_delay": 3}),
        (partial(Model, WithNumbers), {}),
        (partial(Model, TwoNames), {}),
        (partial(Model, Grows), {"train_sampling_strategy": "sequential"}),
        (partial(Model, Forces), {}),
        (WritesInto, {}),
        (Perceptual, {}),
        (with_attentions, {}),
    ],
    ids=[
        *("stored", "another length", "an argument, or not", "a table", "company", "numbers", "two names", "grows"),
        *("forces", "in place", "perceptual", "attentions"),
    ],
)
def test_numbers_are_trainers(
    build: Any,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watching, "WORTH", 0.0)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = logged(PipeTransformerTrainer, build, tmp_path / "ours", **options)
    assert found == pytest.approx(logged(Trainer, build, tmp_path / "plain", **options), rel=1e-6)
    if build is with_attentions:
        assert "has modules whose attentions the model returns" in caplog.text
    elif isinstance(build, partial) and build.args[0] is Grows:
        assert "encoder changes its own attributes or weights as it computes" in caplog.text
    elif isinstance(build, partial) and build.args[0] in (Cuts, WithNumbers):
        assert "encoder gives outputs of another form from batch to batch" in caplog.text
    else:
        assert "Its outputs are stored" in caplog.text
