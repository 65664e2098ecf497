"""A loss that is called once, for a batch that is cut: how it may call the model; stages are in tests/distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_pipetransformer.splitters.base import UnsupportedModelError
from tests.support import loss_calls
from tests.support.loss_calls import LossOf, logged, made


CUT = {"pipeline_parallel_num_microbatches": 2}


@pytest.mark.parametrize(
    "loss",
    [loss_calls.mixed, loss_calls.counting, loss_calls.of_a_part, loss_calls.twice, loss_calls.doubled],
    ids=lambda each: each.__name__,
)
def test_a_loss_is_called_once_and_gives_trainers_numbers(loss: LossOf, tmp_path: Path) -> None:
    plain, ours = made(loss, tmp_path / "plain"), made(loss, tmp_path / "ours", **CUT)
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-5)
    assert ours.layout.num_microbatches == 2
    assert ours.calls == plain.calls == 4


REFUSED: dict[str, tuple[LossOf, str]] = {
    "hidden states": (loss_calls.with_layers, "reads hidden_states or attentions of the model's layers"),
    "no call": (loss_calls.without_model, "does not call BertForSequenceClassification, whose stages wait"),
    "a gradient": (
        loss_calls.with_gradient,
        "BertForSequenceClassification inputs_embeds with a gradient, which ends",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_parts_of_a_batch_cannot_follow_is_refused_before_the_first_update(name: str, tmp_path: Path) -> None:
    loss, said = REFUSED[name]
    trainer = made(loss, tmp_path, **CUT)
    with pytest.raises(ValueError, match=said):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_hook_inside_the_layers_that_a_loss_may_read_is_refused(tmp_path: Path) -> None:
    trainer = made(loss_calls.counting, tmp_path, **CUT)
    noted: list[Any] = []
    trainer.model.bert.encoder.layer[1].attention.register_forward_hook(lambda *given: noted.append(given))
    with pytest.raises(UnsupportedModelError, match="a hook on bert.encoder.layer.1.attention notes, which runs"):
        trainer.train()


class Unfreezing(TrainerCallback):
    """Freezes the lowest layer as the training begins, and lets it train from the second epoch on."""

    def on_train_begin(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
        self._set(model, False)

    def on_epoch_begin(self, _args: Any, state: Any, *_: Any, model: Any = None, **_kwargs: Any) -> None:
        self._set(model, (state.epoch or 0) >= 1)

    def _set(self, model: Any, flag: bool) -> None:
        for name, parameter in model.named_parameters():
            if "embeddings" in name or "layer.0." in name:
                parameter.requires_grad = flag


def test_layers_that_callbacks_freeze_and_unfreeze_train_as_with_trainer(tmp_path: Path) -> None:
    found = []
    for options in ({}, CUT):
        trainer = made(loss_calls.counting, tmp_path / str(len(found)), **options)
        trainer.args.max_steps = 8
        trainer.add_callback(Unfreezing())
        found.append(logged(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len(found[0]) == 16


@pytest.mark.parametrize("where", ["bert", "bert.embeddings"])
def test_a_hook_that_counts_where_micro_batches_pass_is_refused(where: str, tmp_path: Path) -> None:
    trainer = made(loss_calls.counting, tmp_path, **CUT)
    calls = [0]

    def change(_module: Any, _given: Any, output: Any) -> Any:
        calls[0] += 1
        if where == "bert":
            output.pooler_output = output.pooler_output * calls[0]
            return output
        return output * (1 + 0.1 * calls[0] * output.abs())

    trainer.model.get_submodule(where).register_forward_hook(change)
    with pytest.raises(UnsupportedModelError, match="something counts calls"):
        trainer.train()
