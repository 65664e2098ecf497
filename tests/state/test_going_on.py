"""A training that failed, or that another one goes on from, in one process: nothing of it may stay behind."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache import opening as cache_stores
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import measure_storage
from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.freeze.policy import FreezePolicy
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.startup import start
from hf_pipetransformer.state import resumption
from hf_pipetransformer.state.checkpoint import read_state
from hf_pipetransformer.state.weights import check_weights
from hf_pipetransformer.training import training as training_module
from tests.support.models import build_model, collate, make_dataset
from tests.support.settled_policy import Settled


class FailsOnce(TrainerCallback):
    """Fails after a step, as a full disk or Ctrl-C may."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = None
            raise RuntimeError("planted")


def trainer_of(
    model: PreTrainedModel, folder: Path, optimizer: Any = None, policy: FreezePolicy | None = None, **options: Any
) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=6, save_steps=2, logging_steps=1,
        use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    return PipeTransformerTrainer(
        model, args, train_dataset=data, data_collator=collate, optimizers=(optimizer, None),
        callbacks=[FailsOnce(5)] if optimizer is not None else None, policy=policy,
    )  # fmt: skip


@pytest.mark.parametrize("resumes", [True, False])
def test_a_training_that_failed_leaves_nothing_frozen(tmp_path: Path, resumes: bool) -> None:
    model = build_model("bert_sequence")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"freeze_policy": "fixed", "freeze_at": "3:2", "activation_cache": "off"}
    trainer = trainer_of(model, tmp_path, optimizer, **options)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert trainer.layout is not None and trainer.layout.num_frozen_layers == 2
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer.train(resume_from_checkpoint=resumes)
    assert trainer.state.global_step == 6
    lowest = "bert.encoder.layer.0.output.dense.weight"
    # A new run trains the layers until it freezes them again; one that goes on from step 4 has them frozen.
    saved = tmp_path / "checkpoint-4"
    assert saved.is_dir()
    assert torch.equal(before[lowest], model.get_parameter(lowest)) == resumes


def test_a_run_that_replays_a_plan_without_its_cache_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    freezing = {"freeze_policy": "fixed", "freeze_at": "1:2"}
    cached = {"activation_cache": "on", "activation_cache_dir": str(tmp_path / "cache")}
    trainer_of(build_model("bert_sequence"), tmp_path / "plan", **freezing, **cached).train()
    (plan,) = (tmp_path / "plan").glob("*events*.jsonl")
    replayed = {"layout_plan": str(plan), "activation_cache": "off", **freezing}
    whole = build_model("bert_sequence")
    trainer_of(whole, tmp_path / "replayed", **replayed).train()
    resumed = build_model("bert_sequence")
    folder = tmp_path / "replayed" / "checkpoint-4"
    trainer_of(resumed, tmp_path / "replayed", **replayed).train(resume_from_checkpoint=str(folder))
    for name, value in whole.named_parameters():
        assert torch.equal(value, resumed.get_parameter(name)), name


def freeze_by_hand(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    lowest = ("bert.embeddings.", *(f"bert.encoder.layer.{index}." for index in range(num_layers)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(lowest))
    return model


class Watch(TrainerCallback):
    """Notes in each step the layout, and whether the lowest layer is in training mode."""

    def __init__(self, trainer: PipeTransformerTrainer) -> None:
        self.trainer = trainer
        self.layouts: list[Layout | None] = []
        self.modes: list[bool] = []
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.layouts.append(self.trainer.layout)
        self.modes.append(model.bert.encoder.layer[0].training)


def no_room(*_args: Any, **_kwargs: Any) -> Any:
    raise OSError("planted")


@pytest.mark.parametrize("lost", ["switched off", "no room"])
def test_a_resumed_run_that_lost_its_cache_is_one_without(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user froze is in evaluation mode only while its activations are stored."""
    options: dict[str, Any] = {
        "activation_cache": "on", "activation_cache_dir": str(tmp_path / "cache"), "freeze_policy": "none",
        "pipeline_parallel_num_microbatches": 2,
    }  # fmt: skip
    trainer = trainer_of(freeze_by_hand(build_model("bert_sequence"), 2), tmp_path / "run", **options)
    trainer.train()
    assert trainer.layout is not None and trainer.layout.cache_level == 2
    if lost == "switched off":
        options["activation_cache"] = "off"
    else:
        monkeypatch.setattr(cache_stores, "take_store", no_room)
    resumed = trainer_of(freeze_by_hand(build_model("bert_sequence"), 2), tmp_path / "run", **options)
    watch = Watch(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert [(layout.num_frozen_layers, layout.cache_level) for layout in watch.layouts if layout] == [(2, 0)] * 2
    assert watch.modes == [True, True]
    logged = [entry["cached_layers"] for entry in resumed.state.log_history if "cached_layers" in entry]
    assert logged == [2, 0]


def test_a_run_whose_store_cannot_be_opened_is_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_stores, "take_store", no_room)
    options: dict[str, Any] = {
        "activation_cache": "on", "activation_cache_dir": str(tmp_path / "cache"), "freeze_policy": "none",
        "pipeline_parallel_num_microbatches": 2,
    }  # fmt: skip
    trainer = trainer_of(freeze_by_hand(build_model("bert_sequence"), 2), tmp_path / "run", **options)
    watch = Watch(trainer)
    trainer.train()
    assert [(layout.num_frozen_layers, layout.cache_level) for layout in watch.layouts if layout] == [(2, 0)] * 6
    assert watch.modes == [True] * 6


def test_a_replayed_run_stores_what_the_plan_does_if_it_can(tmp_path: Path) -> None:
    """Its checkpoint lies between two steps of the plan."""
    options = {"freeze_policy": "fixed", "freeze_at": "1:2,5:3", "activation_cache_dir": str(tmp_path / "cache")}
    trainer_of(build_model("bert_sequence"), tmp_path / "plan", **options, activation_cache="on").train()
    (plan,) = (tmp_path / "plan").glob("*events*.jsonl")
    for cache, level in (("off", 0), ("on", 2)):
        replayed = options | {"activation_cache": cache, "layout_plan": str(plan)}
        resumed = trainer_of(build_model("bert_sequence"), tmp_path / cache, **replayed)
        watch = Watch(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / "plan" / "checkpoint-2"))
        assert [layout.num_frozen_layers for layout in watch.layouts if layout] == [2, 2, 2, 3]
        assert [layout.cache_level for layout in watch.layouts if layout][:3] == [level] * 3


def test_another_policy_begins_anew_and_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One process that asks for nothing else is left to Trainer.
    own = {"freeze_policy": "none", "pipeline_parallel_num_microbatches": 2}
    trainer_of(build_model("bert_sequence"), tmp_path, **own).train()
    options = {"freeze_interval": "1", "freeze_warmup": 0, "activation_cache": "off"}
    options["pipeline_parallel_num_microbatches"] = 2
    said: list[str] = []
    monkeypatch.setattr(resumption.logger, "warning", said.append)
    policy = Settled()
    trainer = trainer_of(build_model("bert_sequence"), tmp_path, policy=policy, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "Settled as class of the freeze policy, which begins anew (was NoFreezing)" in said[0]
    assert len(policy.seen) == 3  # Before steps 3, 4 and 5; before step 2 there was nothing to compare with.
    # Of its own kind it takes up the memory.
    del said[:]
    again = Settled()
    trainer_of(build_model("bert_sequence"), tmp_path, policy=again, **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-4")
    )
    assert not any("begins anew" in text for text in said)
    assert again.seen == policy.seen


def test_a_policy_remembers_nothing_of_an_earlier_training(tmp_path: Path) -> None:
    policy = Settled()
    options = {"freeze_interval": "1", "freeze_warmup": 0, "activation_cache": "off"}
    trainer = trainer_of(build_model("bert_sequence"), tmp_path, policy=policy, **options)
    counts = []
    for _ in range(2):
        trainer.train()
        counts.append(len(policy.seen))
    assert counts == [5, 5]


class EvaluatesWithin(TrainerCallback):
    """Evaluates in a training, calls `evaluate` while that runs, then fails if it is to."""

    def __init__(self, fails: bool) -> None:
        self.trainer: Any = None
        self.fails = fails
        self.gathers: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.gathers:
            self.trainer.evaluate()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gathers.append(self.trainer.gather_function)
        if len(self.gathers) == 1:
            self.trainer.evaluate()
            self.gathers.append(self.trainer.gather_function)
            if self.fails:
                raise RuntimeError("planted")


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_within_another_leaves_it_as_it_was(tmp_path: Path, fails: bool) -> None:
    options = {"freeze_policy": "gradient_norm", "per_device_eval_batch_size": 4}
    trainer = trainer_of(build_model("bert_sequence"), tmp_path, **options)
    trainer.eval_dataset = make_dataset("bert_sequence", 8)
    own = trainer.gather_function
    callback = EvaluatesWithin(fails)
    callback.trainer = trainer
    trainer.add_callback(callback)
    with pytest.raises(RuntimeError, match="planted") if fails else nullcontext():
        trainer.train()
    outer, inner, inner_again, after, *later = callback.gathers
    assert inner == inner_again != outer == after and own not in callback.gathers
    assert later == ([] if fails else [outer])
    assert trainer.gather_function == own


def test_a_model_that_a_failure_left_in_parts_is_no_other_model(tmp_path: Path) -> None:
    trainer = trainer_of(build_model("bert_sequence"), tmp_path, freeze_policy="gradient_norm")
    trainer.train()
    ParameterStore(trainer.model).release(keep={"classifier.weight"})  # As on a stage of several.
    with pytest.raises(PipelineError, match="The model is not whole"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_measuring_the_storage_draws_no_random_numbers(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    measure_storage(tmp_path, RecordFormat(4, torch.float32), 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": 3}', '{"weight_map": null}', '{"weight_map": {"a": []}}'])
def test_an_index_that_names_no_files_of_weights_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is damaged: model.safetensors.index.json names no files of weights"):
        check_weights(str(tmp_path))


def test_a_resumed_run_adds_gradients_in_the_precision_of_the_saved_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def added_in_float32(num_bytes: float, resumes: bool = True, **options: Any) -> bool:
        """Train on a device of so many bytes, which have to hold the sums too if they are in float32."""
        monkeypatch.setattr(start, "smallest_device_bytes", lambda *_: num_bytes)
        freezing = {"freeze_policy": "fixed", "freeze_at": "3:2", "activation_cache": "off"}
        trainer = trainer_of(build_model("bert_sequence").bfloat16(), tmp_path, **freezing, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resumes else None)
        return trainer.pipeline_run.pipelined.pipeline.settings.sums_in_float32

    assert added_in_float32(1e12, resumes=False)
    assert read_state(str(tmp_path / "checkpoint-4")).sums_in_float32
    with caplog.at_level("WARNING", "hf_pipetransformer"):
        assert added_in_float32(1.0), "another device has room for less"
        assert "pipeline_gradient_dtype" not in caplog.text
        assert added_in_float32(1.0, pipeline_parallel_num_microbatches=2) is False
    assert "pipeline_gradient_dtype='auto': gradients are added in the precision of the weights from here on" in (
        caplog.text
    )
    assert not added_in_float32(1e12, pipeline_gradient_dtype="weights")


def test_an_optimizer_step_that_failed_leaves_nothing_for_the_next_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may catch what its optimizer raises; the other ranks send the values of shared weights once a step."""
    shares: list[Any] = []
    monkeypatch.setattr(training_module, "share_values", shares.append)
    meter = SimpleNamespace(part=lambda _: nullcontext(), tracing=lambda *_: nullcontext())
    present: Any = object.__new__(training_module.Training)
    present._update = ExitStack()
    present.pipeline = SimpleNamespace(settings=SimpleNamespace(meter=meter), stage=SimpleNamespace(shared=[]))
    present.steps = SimpleNamespace(updating=nullcontext)
    present._before_update()  # The step raises.
    present._before_update()
    present._after_update()
    assert len(shares) == 1


def test_a_resumed_run_saves_the_state_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """Nothing in it grows with each time that the run is resumed."""
    freezing = {"freeze_policy": "fixed", "freeze_at": "1:2", "activation_cache": "off"}
    trainer_of(build_model("bert_sequence"), tmp_path / "whole", **freezing).train()
    again = trainer_of(build_model("bert_sequence"), tmp_path / "resumed", **freezing)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    folders = [tmp_path / name / "checkpoint-6" for name in ("whole", "resumed")]
    assert read_state(str(folders[0])) == read_state(str(folders[1]))
    # Also the hash of the weights; the events and training arguments are other files.
    whole, resumed = (json.loads((folder / "pipetransformer" / "state.json").read_text()) for folder in folders)
    for state in (whole, resumed):
        del state["files"], state["checksum"]
    assert resumed == whole


# ---- what another training than the saved one is told ----


def resumed(folder: Path, frozen: str = "", **options: Any) -> None:
    """Go on from the first checkpoint of a plain training with `learning_rate=1e-3`, of which nothing was frozen."""
    trainer_of(build_model("bert_sequence"), folder).train()
    model = build_model("bert_sequence")
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    trainer = trainer_of(model, folder)
    for name, value in options.items():
        setattr(trainer.args, name, value)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "goes on with" in record.message]


@pytest.mark.parametrize("rate", [1e-3, 5e-3])
def test_another_learning_rate_is_told_of_where_trainer_resumes(
    rate: float, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption.logger, "propagate", True)
    resumed(tmp_path, learning_rate=rate)
    same = "learning_rate=0.005 (was 0.001). As with Trainer, learning_rate of the checkpoint stays in force."
    assert [same in each for each in told(caplog)] == [True] * (rate != 1e-3)


def test_a_run_that_freezes_other_parameters_than_the_saved_one(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="an optimizer of other parameters than this run trains.*Freeze the same ones"
    ):
        resumed(tmp_path, frozen="bert.embeddings")


def test_another_learning_rate_is_told_of_where_layers_freeze_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption.logger, "propagate", True)
    trainer_of(build_model("bert_sequence"), tmp_path).train()
    trainer = trainer_of(build_model("bert_sequence"), tmp_path, freeze_layers=1)
    trainer.args.learning_rate = 2e-3
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    [said] = told(caplog)
    assert "was saved by plain Trainer" in said and "learning_rate=0.002 (was 0.001)" in said
