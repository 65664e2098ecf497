"""Which layers run in training mode, and what user code sees of it: as with Trainer, in one process."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.engine.linear_layers import SharedCasts
from tests.support.adapted import lora
from tests.support.models import build_model, collate, make_dataset


NUM_STEPS = 4


def model_with_dropout() -> PreTrainedModel:
    model = build_model("bert_sequence")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return model


def freeze(model: PreTrainedModel, num_layers: int) -> None:
    """What a script does that trains the upper layers only."""
    for module in [model.bert.embeddings, *model.bert.encoder.layer[:num_layers]]:
        module.requires_grad_(False)


class Watch(TrainerCallback):
    """Notes which of the embeddings and layers trained in each step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = [model.bert.embeddings, *model.bert.encoder.layer]
        self.steps: list[list[bool]] = []

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        assert all(len({m.training for m in block.modules()}) == 1 for block in self.blocks)
        self.steps.append([block.training for block in self.blocks])


def train(
    trainer_class: type[Trainer], num_frozen: int, folder: Path, **options: Any
) -> tuple[list[float], list[list[bool]]]:
    """Losses, and what trained, by step."""
    set_seed(3)
    model = model_with_dropout()
    freeze(model, num_frozen)
    watch = Watch(model)
    args_class = TrainingArguments if trainer_class is Trainer else PipeTransformerArguments
    args = args_class(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=NUM_STEPS, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    data = {"train_dataset": make_dataset("bert_sequence", 10), "data_collator": collate, "callbacks": [watch]}
    trainer = trainer_class(model, args, **data)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], watch.steps


@pytest.mark.parametrize("recompute", ["never", "always", "layers"])
def test_layers_that_the_script_froze_keep_their_dropout(tmp_path: Path, recompute: str) -> None:
    plain, _ = train(Trainer, 2, tmp_path / "plain")
    options = {"pipeline_checkpoint": recompute, "freeze_policy": "none", "activation_cache": "off"}
    ours, modes = train(PipeTransformerTrainer, 2, tmp_path / "ours", **options)
    # Other masks would differ in the first digits; what is computed again may round otherwise, by processor.
    assert ours == pytest.approx(plain, rel=1e-6)
    assert modes == [[True] * 5] * NUM_STEPS


def test_layers_that_the_run_freezes_lose_theirs(tmp_path: Path) -> None:
    options = {"freeze_policy": "fixed", "freeze_at": "2:3", "activation_cache": "off"}
    _, modes = train(PipeTransformerTrainer, 1, tmp_path, **options)
    assert modes == [[True] * 5] * 2 + [[True, True, False, False, True]] * 2


def test_layers_whose_activations_stages_store_lose_theirs_and_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests may have told transformers' logging not to hand records on.
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)
    options = {"activation_cache": "on", "activation_cache_dir": str(tmp_path / "cache")}
    options["pipeline_parallel_num_microbatches"] = 2
    with caplog.at_level(logging.WARNING):
        _, modes = train(PipeTransformerTrainer, 2, tmp_path, freeze_policy="none", **options)
    assert modes[-1] == [False, False, False, True, True]
    said = [record.message for record in caplog.records if "without dropout" in record.message]
    assert len(said) == 1
    assert "the first 2 layers" in said[0]


def test_under_bf16_the_micro_batches_of_a_step_share_one_cast_of_each_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    of = SharedCasts.of

    def note(casts: SharedCasts, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        read[id(weight)].append(of(casts, weight, dtype))
        return read[id(weight)][-1]

    monkeypatch.setattr(SharedCasts, "of", note)
    options = {"bf16": True, "pipeline_parallel_num_microbatches": 2, "freeze_policy": "none"}
    train(PipeTransformerTrainer, 0, tmp_path, **options)
    assert len(read) >= 4 * 6, "the linear layers of four layers of BERT"
    for casts in read.values():
        assert len(casts) == 2 * NUM_STEPS
        assert len({id(cast) for cast in casts}) == NUM_STEPS
        assert not torch.equal(casts[0], casts[-1]), "the weights have changed since"


def test_gradients_of_half_precision_are_added_in_float32_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of such weights are too coarse to tell; the norms of the gradients are not."""
    build, log, norms = build_model, PipeTransformerTrainer.log, defaultdict(list)
    monkeypatch.setitem(globals(), "build_model", lambda name: build(name).bfloat16())

    def note(trainer: PipeTransformerTrainer, logs: dict[str, float], *args: Any) -> None:
        norms[trainer.args.pipeline_gradient_dtype].append(logs.get("grad_norm"))
        log(trainer, logs, *args)

    monkeypatch.setattr(PipeTransformerTrainer, "log", note)
    for kind in ("auto", "float32", "weights"):
        options = {"pipeline_parallel_num_microbatches": 4, "pipeline_gradient_dtype": kind, "freeze_policy": "none"}
        train(PipeTransformerTrainer, 0, tmp_path / kind, **options)
    assert norms["auto"] == norms["float32"] != norms["weights"]


def train_loaded_in(
    dtype: torch.dtype, folder: Path, resume: bool = False, **options: Any
) -> tuple[PipeTransformerTrainer, list[float]]:
    """Train a model that was saved in bfloat16; return the trainer and its losses."""
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=NUM_STEPS, logging_steps=1, use_cpu=True,
        save_steps=2, report_to="none", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    model, data = build_model("bert_sequence").bfloat16().to(dtype), make_dataset("bert_sequence", 10)
    trainer = PipeTransformerTrainer(model, args, train_dataset=data, data_collator=collate)
    trainer.model_accepts_loss_kwargs = False
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"pipeline_parallel_num_microbatches": 2}, {"freeze_at": "2:2"}], ids=str)
def test_weights_loaded_in_bfloat16_train_in_float32_as_if_loaded_so(tmp_path: Path, options: dict[str, Any]) -> None:
    freezing = {"freeze_policy": "fixed" if "freeze_at" in options else "none", "activation_cache": "off"}
    expected, losses = train_loaded_in(torch.float32, tmp_path / "expected", **options, **freezing)
    master = {"pipeline_master_dtype": "float32"}
    ours, found = train_loaded_in(torch.bfloat16, tmp_path / "ours", **options, **freezing, **master)
    assert (ours.layout is None) == (not options), "without options, Trainer trains"
    shutil.rmtree(tmp_path / "ours" / f"checkpoint-{NUM_STEPS}")
    resumed, again = train_loaded_in(torch.bfloat16, tmp_path / "ours", True, **options, **freezing, **master)
    assert found == again == losses
    for trainer in (ours, resumed):
        for one, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
            assert one.dtype is torch.float32 and torch.equal(one, other)
    if options:
        known = [each.pipeline_run.pipelined.pipeline.start_up for each in (ours, expected)]
        assert known[0].probe.boundary_dtypes == known[1].probe.boundary_dtypes
        assert known[0].plans.costs.blocks.trained_bytes == known[1].plans.costs.blocks.trained_bytes


def test_a_model_that_trainer_makes_after_train_begins_is_not_cast(tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, freeze_policy="none", pipeline_master_dtype="float32")
    data = make_dataset("bert_sequence", 10)
    trainer = PipeTransformerTrainer(
        args=args, model_init=lambda: build_model("bert_sequence").bfloat16(), train_dataset=data
    )
    with pytest.raises(ValueError, match="in float32 in model_init"):
        trainer.train()


@pytest.mark.parametrize("num_microbatches", ["auto", 2], ids=["trainer", "pipeline"])
def test_what_trains_beside_adapters_is_cast_under_autocast_alone(tmp_path: Path, num_microbatches: Any) -> None:
    """The classifier of the base model, which PEFT leaves in bfloat16."""
    options = {"pipeline_parallel_num_microbatches": num_microbatches, "pipeline_master_dtype": "float32"}
    for is_mixed in (False, True):
        args = PipeTransformerArguments(
            str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", report_to="none", bf16=is_mixed,
            freeze_policy="none", activation_cache="off", **options,
        )  # fmt: skip
        model = get_peft_model(build_model("bert_sequence").bfloat16(), lora("bert"))
        data = make_dataset("bert_sequence", 10)
        trainer = PipeTransformerTrainer(model, args, train_dataset=data, data_collator=collate)
        with nullcontext() if is_mixed else pytest.raises(ValueError, match="classifier.*Set bf16=True"):
            trainer.train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


class AsksWhetherItTrains(PipeTransformerTrainer):
    """A user's loss that adds something in training only."""

    asked: list[tuple[bool, bool]]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), (model.training, self.model.training)]
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_loss_that_asks_whether_the_model_trains_gets_the_answer_of_trainer(tmp_path: Path) -> None:
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, eval_strategy="steps", eval_steps=1,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, freeze_policy="gradient_norm",
    )  # fmt: skip
    data = make_dataset("bert_sequence", 8)
    trainer = AsksWhetherItTrains(
        build_model("bert_sequence"),
        args,
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        data_collator=collate,
    )
    trainer.train()
    assert trainer.asked == [(True, True), (False, False)] * 2, "the inspection leaves no trace"
    trainer.asked = []
    trainer.evaluate()
    assert set(trainer.asked) == {(False, False)}


class Switching(TrainerCallback):
    """A user's code that switches layers after each step, and counts how often the model is put into a mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.num_calls = model, 0
        own = model.train

        def train(mode: bool = True) -> nn.Module:
            self.num_calls += 1
            return own(mode)

        model.train = train  # type: ignore[method-assign]

    def on_step_end(self, args: Any, state: Any, *_args: Any, **_kwargs: Any) -> None:
        if state.global_step == 2:
            self.model.bert.encoder.layer[3].eval()
            self.model.bert.encoder.layer[0].train()


def test_modes_are_set_again_only_where_something_has_changed_them(tmp_path: Path) -> None:
    """Setting them at each step took two milliseconds, for which a GPU waits."""
    model = model_with_dropout()
    switching, watch = Switching(model), Watch(model)
    args = PipeTransformerArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=6, use_cpu=True, save_strategy="no", report_to="none",
        disable_tqdm=True, freeze_policy="fixed", freeze_at="0:1,4:2", activation_cache="off",
    )  # fmt: skip
    data = {"train_dataset": make_dataset("bert_sequence", 24), "data_collator": collate}
    PipeTransformerTrainer(model, args, callbacks=[watch, switching], **data).train()
    assert watch.steps == [[False, False, True, True, True]] * 4 + [[False, False, False, True, True]] * 2
    switched = switching.num_calls
    again = model_with_dropout()
    without = Switching(again)
    without.on_step_end = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
    args = PipeTransformerArguments(**{**args.to_dict(), "output_dir": str(tmp_path / "again")})
    PipeTransformerTrainer(again, args, callbacks=[without], **data).train()
    assert switched == without.num_calls + 1
