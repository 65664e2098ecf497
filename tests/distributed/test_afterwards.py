"""After a training on several stages its trainer is as it was: a model, callbacks, and an error that says what is."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.comm.transfers import digest_of
from hf_pipetransformer.runtime import gathering
from hf_pipetransformer.state import weights
from tests.distributed.scenarios import RANK, run, scenario
from tests.state.test_trainers_checkpoints import Told
from tests.support.comparison import untimed
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
EVALUATED = 11


class ReadsWhatIsPushed(TrainerCallback):
    def on_push_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        raise AssertionError("refused")


class Late(TrainerCallback):
    """Added in the middle of a training."""


class Acts(TrainerCallback):
    """Adds a callback, evaluates within an evaluation, reads the model after one, or fails, as told."""

    trainer: PipeTransformerTrainer

    def __init__(self) -> None:
        self.adds = True
        self.nests = self.fails = False
        self.num_read = 0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        if self.adds:
            self.adds = False
            self.trainer.add_callback(Late())

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        if self.fails:
            raise RuntimeError("planted")

    def on_prediction_step(self, *_args: Any, **_kwargs: Any) -> None:
        if self.nests:
            self.nests = False
            self.trainer.evaluate(make_dataset(MODEL, 5))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.num_read = sum(not p.is_meta for p in model.parameters())


def error_of(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def look(trainer: PipeTransformerTrainer) -> dict[str, Any]:
    """The handler, and the losses of model, wrapped model and model again, called like any module."""
    batch = collate([make_dataset(MODEL, 4)[i] for i in range(4)])
    trainer.model.eval()
    parts = (trainer.model, trainer.model_wrapped, trainer.model)
    return {
        "handler": type(trainer.callback_handler).__name__,
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
        "losses": [part(**batch).loss.item() for part in parts],
    }


def losses_of(trainer: PipeTransformerTrainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def told_to_end(folder: Path, schedule: str) -> dict[str, Any]:
    """A signal comes to rank 1 alone, amid its third step; and the run that goes on from what is saved then."""
    output = folder / f"told-{schedule}"

    def make(**options: Any) -> PipeTransformerTrainer:
        options |= {"pipeline_timeout": 30, "pipeline_schedule": schedule, "pipeline_parallel_num_microbatches": 2}
        args = our_arguments(output, 2, max_steps=6, **options)
        return PipeTransformerTrainer(
            build_model(MODEL, 1), args, train_dataset=make_dataset(MODEL, 16), data_collator=collate
        )

    whole = make()
    whole.train()
    trainer = make(enable_jit_checkpoint=True)
    (own,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
    own.jit_manager.kill_wait = 0
    if RANK == 1:
        told = Told("on_pre_optimizer_step", 2)
        told.manager = own.jit_manager
        trainer.add_callback(told)
    trainer.train()
    stopped_at = trainer.state.global_step
    again = make()
    again.train(resume_from_checkpoint=True)
    return {
        "stopped_at": stopped_at,
        "checkpoints": sorted(path.name for path in output.glob("checkpoint-*")),
        "losses": [losses_of(each) for each in (whole, trainer, again)],
    }


@scenario
def look_afterwards(folder: Path) -> dict[str, Any]:
    """Return what this rank found, by name."""
    args = our_arguments(
        folder / "output", 2, per_device_eval_batch_size=2, max_steps=2, save_strategy="steps", save_steps=2,
        logging_steps=500, pipeline_timeout=30,
    )  # fmt: skip
    acts = Acts()
    trainer = PipeTransformerTrainer(
        build_model(MODEL), args, train_dataset=make_dataset(MODEL, 16), data_collator=collate,
        eval_dataset=make_dataset(MODEL, EVALUATED), callbacks=[acts, ReadsWhatIsPushed()],
    )  # fmt: skip
    acts.trainer = trainer
    found: dict[str, Any] = {"refusal": error_of(trainer.train)}
    trainer.remove_callback(ReadsWhatIsPushed)
    trainer.train()
    found["trained"] = look(trainer)
    acts.nests = True
    found["num_predicted"] = len(trainer.predict(trainer.eval_dataset).predictions)
    found["num_parameters_read"] = [acts.num_read, len(list(trainer.model.parameters()))]
    found["predicted"] = look(trainer)

    for schedule in ("1f1b", "async_1f1b"):
        found[schedule] = told_to_end(folder, schedule)

    acts.fails = True
    found["failure"] = error_of(trainer.train)
    found["handler_after_failure"] = type(trainer.callback_handler).__name__
    found["num_missing"] = sum(p.is_meta for p in trainer.model.parameters())
    with trainer.whole_model():
        found["num_missing_of_whole"] = sum(p.is_meta for p in trainer.model.parameters())
    resume = str(folder / "output" / "checkpoint-2")
    found["resumption"] = error_of(lambda: trainer.train(resume_from_checkpoint=resume))
    return found


@contextmanager
def noting_reads(keys: list[str]) -> Any:
    """Note the keys of the saved weights that this process loads inside; hashes are taken of all of them."""
    own = weights._tensors_of

    def reading(folder: str, file: str, wanted: Any = None) -> Any:
        for key, tensor in own(folder, file, wanted):
            if wanted is not None:
                keys.append(key)
            yield key, tensor

    weights._tensors_of = reading
    try:
        yield
    finally:
        weights._tensors_of = own


class Lifted(TrainerCallback):
    """Notes what is read from the end of the training's last step on."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self.reading = noting_reads(self.keys)
        self.reading.__enter__()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.reading.__exit__(None, None, None)


def num_held(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if not p.is_meta)


class LooksAtTheBest(PipeTransformerTrainer):
    """Looks at the best model in code of the user's, for which the model is put together first."""

    was_whole = False

    def _load_best_model(self) -> None:
        self.was_whole = num_held(self.model) == sum(p.numel() for p in self.model.parameters())
        super()._load_best_model()


@scenario
def end_in_own_method(folder: Path) -> dict[str, Any]:
    """Train, and load the best model through a method that the user overrides."""
    args = our_arguments(
        folder / "output", 2, per_device_eval_batch_size=4, seed=3, max_steps=4, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, learning_rate=1e-2,
        metric_for_best_model="eval_loss", greater_is_better=False, pipeline_gather_at_end="always",
    )  # fmt: skip
    trainer = LooksAtTheBest(
        build_model(MODEL, 3), args, train_dataset=make_dataset(MODEL, 16), data_collator=collate,
        eval_dataset=make_dataset(MODEL, EVALUATED),
    )  # fmt: skip
    trainer.train()
    saved = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    own = trainer.model.state_dict()
    return {
        "was_whole": trainer.was_whole,
        "best": trainer.state.best_global_step,
        "stale": [name for name, value in saved.items() if not torch.equal(own[name], value)],
    }


@scenario
def end(folder: Path, gather: str, free: int | None = None) -> dict[str, Any]:
    """Train ViT, whose files have other names than its parameters, load the best model, and use what is left behind.

    Args:
        free: bytes that the machine says are free; what it has if None.
    """
    if free is not None:
        gathering.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=free))

    def make(**options: Any) -> PipeTransformerTrainer:
        options |= {"pipeline_parallel_num_microbatches": 2, "pipeline_gather_at_end": gather}
        args = our_arguments(folder / "output", 2, per_device_eval_batch_size=4, seed=3, max_steps=4, **options)
        return PipeTransformerTrainer(
            build_model("vit", 3), args, train_dataset=make_dataset("vit", 16), data_collator=collate,
            eval_dataset=make_dataset("vit", EVALUATED, seed=1),
        )  # fmt: skip

    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    # The worst is taken, so it is not what the last step left.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer, lifted = make(**steps, **best), Lifted()
    trainer.add_callback(lifted)
    trainer.train()
    stage = trainer.pipeline_run.pipelined.pipeline.stage
    found: dict[str, Any] = {
        "best": trainer.state.best_global_step,
        "read": len(lifted.keys),
        "own": len(stage.own_names()),
        "held": num_held(trainer.model),
        "whole": sum(p.numel() for p in trainer.model.parameters()),
        "metrics": untimed(trainer.evaluate()),
        "predictions": digest_of(torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)),
        "held_after_evaluation": num_held(trainer.model),
    }
    batch = collate([trainer.eval_dataset[i] for i in range(4)])
    found["call"] = error_of(lambda: trainer.model(**batch))
    trainer.save_model(str(folder / "saved"))

    def read_whole() -> None:
        with trainer.whole_model():
            found["logits"] = digest_of(trainer.model.eval()(**batch).logits)

    found["whole_model"] = error_of(read_whole)
    # Another training in which nothing is the first one's but the weights.
    trainer.args.load_best_model_at_end = False
    trainer.args.save_strategy = trainer.args.eval_strategy = "no"
    found["again"] = error_of(trainer.train)
    found["losses_again"] = losses_of(trainer) if not found["again"] else None

    resumed, keys = make(), []
    with noting_reads(keys):
        resumed.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-2"))
    found["read_to_resume"] = len(keys)
    found["losses_resumed"] = losses_of(resumed)
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return run(look_afterwards, tmp_path_factory.mktemp("afterwards"), 2, timeout=120)


def test_a_callback_is_refused_while_the_model_is_whole(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refusal"].startswith("ValueError: ReadsWhatIsPushed.on_push_begin reads the model")


@pytest.mark.parametrize("after", ["trained", "predicted"])
def test_the_wrapped_model_is_the_whole_one_and_callbacks_are_trainers_own(
    ranks: list[dict[str, Any]], after: str
) -> None:
    for found in ranks:
        assert found[after]["handler"] == "CallbackHandler"
        assert "Acts" in found[after]["callbacks"] and found[after]["callbacks"][-1] == "Late"
        assert len(set(found[after]["losses"])) == 1
    assert ranks[0][after]["losses"] == ranks[1][after]["losses"] == ranks[0]["trained"]["losses"]


def test_an_evaluation_within_another_takes_no_sample_twice(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["num_predicted"] == EVALUATED
        num_read, num_parameters = found["num_parameters_read"]
        assert num_read == num_parameters


@pytest.mark.parametrize("schedule", ["1f1b", "async_1f1b"])
def test_a_signal_to_one_rank_has_all_ranks_save_after_the_same_step_and_stop(
    ranks: list[dict[str, Any]], schedule: str
) -> None:
    for found in ranks:
        told = found[schedule]
        assert (told["stopped_at"], told["checkpoints"]) == (3, ["checkpoint-3"])
        whole, stopped, again = told["losses"]
        assert whole.keys() == {"1", "2", "3", "4", "5", "6"}
        assert stopped == {step: whole[step] for step in ("1", "2", "3")}
        assert again.keys() == whole.keys()
        if schedule == "1f1b":  # Stages that drain at another step see other weights.
            assert again == whole


def test_a_model_that_a_failure_left_in_parts_is_put_together_or_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["failure"].startswith("RuntimeError: planted") and found["num_missing"] > 0
        assert found["handler_after_failure"] == "CallbackHandler"
        assert found["num_missing_of_whole"] == 0
        assert found["resumption"].startswith("PipelineError: The model is not whole")


Ends = dict[str, tuple[Path, list[dict[str, Any]]]]

TOO_FEW_BYTES = 10_000
"""Of free memory, in which the tiny model has no room."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Folder and what each rank found, by how the training ended."""
    found: Ends = {}
    for name, options in {
        "always": {"gather": "always"},
        "never": {"gather": "never"},
        "no room": {"gather": "auto", "free": TOO_FEW_BYTES},
    }.items():
        folder = tmp_path_factory.mktemp("ends")
        found[name] = folder, run(end, folder, 2, options, timeout=120, strict_nccl=True)
    return found


@pytest.mark.parametrize("split", ["never", "no room"])
def test_a_model_that_is_left_on_its_stages_evaluates_predicts_and_is_saved_as_a_whole_one(
    ends: Ends, split: str
) -> None:
    (folder, gathered), (other, ranks) = ends["always"], ends[split]
    assert all(rank["held"] == rank["whole"] and rank["call"] == "" for rank in gathered)
    for rank in ranks:
        assert 0 < rank["held"] == rank["held_after_evaluation"] < rank["whole"]
        assert rank["call"].startswith("PipelineError: The model is not whole") and "save_model" in rank["call"]
        for key in ("best", "metrics", "predictions"):
            assert rank[key] == gathered[0][key], key
    assert sum(rank["held"] for rank in ranks) == ranks[0]["whole"]
    mine, expected = (load_file(path / "saved" / "model.safetensors") for path in (other, folder))
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[key], value) for key, value in expected.items())


def test_what_is_left_on_its_stages_is_put_together_for_another_training_or_for_user_code(ends: Ends) -> None:
    gathered, ranks = ends["always"][1], ends["never"][1]
    for rank in ranks:
        assert rank["whole_model"] == rank["again"] == ""
        assert rank["logits"] == gathered[0]["logits"]
        assert rank["losses_again"] == gathered[0]["losses_again"]


def test_what_does_not_fit_is_refused_with_numbers_before_anything_is_sent(ends: Ends) -> None:
    for rank in ends["no room"][1]:
        for key in ("whole_model", "again"):
            assert rank[key].startswith("ValueError") and "0.0 MiB free" in rank[key], rank[key]


def test_each_rank_reads_the_weights_of_its_own_stages_to_resume_and_for_the_best_model(ends: Ends) -> None:
    for _, ranks in ends.values():
        whole = sum(rank["own"] for rank in ranks)
        for rank in ranks:
            assert rank["best"] == 2
            assert rank["read"] == rank["read_to_resume"] == rank["own"] < whole
            assert rank["losses_resumed"] == ranks[0]["losses_resumed"] != {}


def test_a_best_model_loaded_by_a_users_method_is_the_best_one_on_every_rank(tmp_path: Path) -> None:
    for found in run(end_in_own_method, tmp_path, 2, timeout=120):
        assert found == {"was_whole": True, "best": 2, "stale": []}
