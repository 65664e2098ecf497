"""What scripts change while they train, or let their models keep: Trainer's numbers, or a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.comm.errors import LossDoesNotDecomposeError
from hf_pipetransformer.options.refusals import warn_about_options
from hf_pipetransformer.splitters.base import UnsupportedModelError
from tests.support.tiny_bert import make_bert


WORDS, WIDTH, EPOCHS = 50, 16, 3
IN_PARTS = {"pipeline_parallel_num_microbatches": 2}
STORED = {"activation_cache": "on"}


class Sentences(Dataset[Any]):
    """Eight sentences of eight words, others in each epoch if a callback tells it."""

    def __init__(self) -> None:
        words = torch.Generator().manual_seed(0)
        self.rows = torch.randint(5, WORDS, (8, 8), generator=words)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = (self.rows[index] + self.epoch) % WORDS
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": index % 2}


class Averaged(nn.Linear):
    """Head that takes off a moving average of its inputs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2)
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.9).add_(0.1 * hidden.mean(0))
        return super().forward(hidden - self.center)


class Counting(nn.Linear):
    """Head whose scale depends on how often it was called, also in evaluations."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) / self.calls


class Following(nn.Linear):
    """Head with a teacher that follows its weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2)
        self.teacher = nn.Linear(WIDTH, 2).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.teacher.weight.lerp_(self.weight.detach(), 0.1)
        return super().forward(hidden) + self.teacher(hidden)


def normed() -> nn.Module:
    head = nn.Linear(WIDTH, 2)
    nn.init.orthogonal_(head.weight)
    head.weight.data[0] *= 1.5
    head = nn.utils.parametrizations.spectral_norm(head)
    # Vectors that power iterations have to change yet.
    norm: Any = head.parametrizations.weight[0]
    norm._u.copy_(torch.tensor([0.6, 0.8]))
    norm._v.copy_(nn.functional.normalize(norm._u @ head.parametrizations.weight.original.detach(), dim=0))
    return head


class AtEpochs(TrainerCallback):
    def __init__(self, act: Callable[[int], None]) -> None:
        self.act = act

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.act(round(state.epoch or 0))


def model_of(head: Callable[[], nn.Module] | None = None, num_frozen: int = 1) -> Any:
    model: Any = make_bert(BertForSequenceClassification, WORDS)
    if head is not None:
        model.classifier = head()
    frozen = [model.bert.embeddings, *model.bert.encoder.layer[:num_frozen]] if num_frozen else []
    for module in frozen:
        module.requires_grad_(False)
    return model


def trainer_of(
    kind: type, folder: Path, model: Any, data: Any = None, act: Any = None, optimizer: Any = None, **options: Any
) -> Any:
    make = TrainingArguments if kind is Trainer else PipeTransformerArguments
    args = make(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-3,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", **options,
    )  # fmt: skip
    schedule = None if optimizer is None else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return kind(
        model, args, train_dataset=data or Sentences(), callbacks=[AtEpochs(act)] if act else [],
        optimizers=(optimizer, schedule),
    )  # fmt: skip


def logged(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


# ---- layers that are unfrozen ----


def test_a_stored_layer_that_is_unfrozen_ends_a_run_in_parts(tmp_path: Path) -> None:
    model = model_of()

    def unfreeze(epoch: int) -> None:
        model.bert.encoder.layer[0].requires_grad_(epoch > 0)

    with pytest.raises(ValueError, match=r"layer\.0\..* requires_grad is True now.*Set activation_cache='off'"):
        trainer_of(PipeTransformerTrainer, tmp_path, model, act=unfreeze, **STORED, **IN_PARTS).train()


@pytest.mark.parametrize("options", [STORED, {"activation_cache": "off", **IN_PARTS}], ids=["whole", "in parts"])
def test_layers_may_be_unfrozen(options: dict[str, Any], tmp_path: Path) -> None:
    def losses(kind: type, **options: Any) -> list[tuple[float, float]]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def unfreeze(epoch: int) -> None:
            model.bert.encoder.layer[0].requires_grad_(epoch > 0)

        return logged(trainer_of(kind, tmp_path, model, act=unfreeze, optimizer=optimizer, **options))

    found = losses(PipeTransformerTrainer, **options)
    np.testing.assert_allclose(found, losses(Trainer), rtol=1e-5)


def test_a_layer_that_the_optimizer_has_lost_is_not_unfrozen(tmp_path: Path) -> None:
    model = model_of(num_frozen=0)
    top = model.bert.encoder.layer[-1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def unfreeze(epoch: int) -> None:
        top.requires_grad_(epoch > 0)

    trainer = trainer_of(PipeTransformerTrainer, tmp_path, model, act=unfreeze, optimizer=optimizer, freeze_layers=1)
    with pytest.raises(ValueError, match="the optimizer that the trainer was given has lost it"):
        trainer.train()


def test_adapters_that_come_while_micro_batches_train_end_the_run(tmp_path: Path) -> None:
    """Trainer clips their gradients with the others."""
    model = model_of(num_frozen=0)

    def add(epoch: int) -> None:
        if epoch == 1:
            model.bert.encoder.layer[0].output.dense.register_parameter("shift", nn.Parameter(torch.zeros(2)))

    with pytest.raises(ValueError, match=r"dense\.shift came into the model after training started"):
        trainer_of(PipeTransformerTrainer, tmp_path, model, act=add, **IN_PARTS).train()


# ---- what forwards leave to the next ones ----


@pytest.mark.parametrize("head", [Averaged, Following, normed])
def test_what_goes_on_from_forward_to_forward_is_not_cut(head: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = model_of(head, num_frozen=0)
    before = copy.deepcopy(dict(model.named_buffers()))
    with pytest.raises(LossDoesNotDecomposeError, match="keeps something that each forward changes"):
        trainer_of(PipeTransformerTrainer, tmp_path, model, **IN_PARTS).train()
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("head", [Averaged, Following, normed])
def test_above_stored_layers_it_is_trainers(head: Callable[[], nn.Module], tmp_path: Path) -> None:
    plain = logged(trainer_of(Trainer, tmp_path, model_of(head)))
    ours = logged(trainer_of(PipeTransformerTrainer, tmp_path, model_of(head), **STORED))
    np.testing.assert_allclose(ours, plain, rtol=1e-5)


def test_the_start_leaves_buffers_as_they_were(tmp_path: Path) -> None:
    model = model_of(Counting, num_frozen=0)
    # No two forwards give the same, so that nothing can freeze.
    with pytest.raises(UnsupportedModelError, match="freeze_layers=1 can freeze no layer"):
        trainer_of(PipeTransformerTrainer, tmp_path, model, freeze_layers=1).train()
    assert model.classifier.calls == 0


# ---- data and options ----


@pytest.mark.parametrize("more", [{}, IN_PARTS], ids=["whole", "in parts"])
def test_a_data_set_that_a_callback_changes_is_read_again(
    more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def losses(kind: type, **options: Any) -> list[tuple[float, float]]:
        data = Sentences()
        return logged(
            trainer_of(kind, tmp_path, model_of(), data, lambda epoch: setattr(data, "epoch", epoch), **options)
        )

    found = losses(PipeTransformerTrainer, **STORED, **more)
    np.testing.assert_allclose(found, losses(Trainer), rtol=1e-5)
    # One process knows records by what they were computed from, and needs no check of its samples.
    assert ("is not what it was when its activation was stored" in caplog.text) == bool(more)


def test_noise_that_frozen_embeddings_would_not_get_is_named(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "neftune_noise_alpha": 5.0}
    assert not any("NEFTune" in text for text in warn_about_options(PipeTransformerArguments(**options)))
    (text,) = warn_about_options(PipeTransformerArguments(**options, freeze_layers=2))
    assert "the embeddings freeze first" in text
