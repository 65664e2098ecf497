"""Law 8: what is saved loads in plain transformers with the same logits; and each rank holds its own blocks only."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, ViTForImageClassification

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.options.arguments import RECOMPUTE_MODES
from hf_pipetransformer.runtime.ownership import is_whole
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario, start
from tests.gpu.runs import SavedBytes
from tests.support.models import NUM_LAYERS, build_model, collate, make_dataset, vit_config
from tests.support.trainings import losses_of, our_arguments


MODELS = ["bert_sequence", "bert_masked", "vit"]
GATHERED = "bert_sequence"
"""Model that is whole on rank 0 while it is saved, as its trainer has code of its own there."""
NUM_STEPS = 6
EVAL_BATCH = 4
NUM_EVAL_SAMPLES = 13
NUM_VIT_LAYERS = 12


def evaluation_set(name: str):
    return make_dataset(name, NUM_EVAL_SAMPLES, seed=1)


def arguments(output: Path, num_stages: int, **changes: Any) -> PipeTransformerArguments:
    options = {
        "per_device_eval_batch_size": EVAL_BATCH // WORLD_SIZE,
        "learning_rate": 1e-3,
        "max_steps": NUM_STEPS,
        "pipeline_parallel_num_microbatches": 2,
    }
    return our_arguments(output, num_stages, **options | changes)


def trainer_of(model: PreTrainedModel, name: str, args: TrainingArguments, **changes: Any) -> PipeTransformerTrainer:
    return PipeTransformerTrainer(
        model=model, args=args, train_dataset=make_dataset(name, 29), data_collator=collate, **changes
    )


@torch.no_grad()
def logits_of(model: PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    """The model called directly, in the batches of an evaluation on one process."""
    model.eval()
    rows = list(evaluation_set(name))
    batches = [collate(rows[start : start + EVAL_BATCH]) for start in range(0, len(rows), EVAL_BATCH)]
    return {f"batch{index}": model(**batch).logits.clone() for index, batch in enumerate(batches)}


def unpadded(name: str, predictions: Any) -> dict[str, torch.Tensor]:
    """Predictions of a trainer cut into its batches again, without the padding between batches."""
    rows = list(evaluation_set(name))
    parts = {}
    for index, first in enumerate(range(0, len(rows), EVAL_BATCH)):
        part = torch.from_numpy(predictions[first : first + EVAL_BATCH].copy())
        if part.ndim == 3:
            part = part[:, : collate(rows[first : first + EVAL_BATCH])["input_ids"].shape[1]]
        parts[f"batch{index}"] = part.contiguous()
    return parts


class ReadWhole(TrainerCallback):
    """Reads the model at each checkpoint: through what it was not given for that, and as the whole one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainer: PipeTransformerTrainer | None = None
        self.refusals: list[str] = []
        self.logits: dict[str, torch.Tensor] = {}

    def on_save(self, *_args: Any, **kwargs: Any) -> None:
        try:
            unseen = "model"  # Under a name, so that the code does not show it.
            kwargs[unseen].num_parameters()
        except ValueError as error:
            self.refusals.append(str(error))
        self.trainer.args.push_to_hub = True
        self.trainer.save_model(str(Path(self.trainer.args.output_dir) / "pushed"))
        self.trainer.args.push_to_hub = False
        with self.trainer.whole_model():
            self.logits = logits_of(self.trainer.model, self.name)


class Processing:
    """What is saved after the model, and notes whether all weights are on this rank then."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.was_whole: list[bool] = []

    def save_pretrained(self, _folder: str) -> None:
        self.was_whole.append(is_whole(self.model))


class Pushes(PipeTransformerTrainer):
    """Saves twice where Trainer pushes: a push saves the model again, inside of the call that saves it."""

    def push_to_hub(self, *_args: Any, **_kwargs: Any) -> None:
        self.save_model(_internal_call=True)


class SavesMore(Pushes):
    """With code of its own where weights are saved, on one rank alone."""

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:
            super()._save(*args, **kwargs)


@scenario
def train(folder: Path, num_stages: int) -> None:
    for name in MODELS:
        args = arguments(folder / name, num_stages, save_strategy="steps", save_steps=3)
        read, model = ReadWhole(name), build_model(name, seed=5)
        processing = Processing(model)
        kind = SavesMore if name == GATHERED else Pushes
        trainer = kind(
            model=model, args=args, train_dataset=make_dataset(name, 29), data_collator=collate, callbacks=[read],
            processing_class=processing,
        )  # fmt: skip
        read.trainer = trainer
        trainer.train()
        if RANK == 0:
            (folder / name / "was_whole.json").write_text(json.dumps(processing.was_whole))
        save_file(read.logits, folder / name / f"logits_in_training.rank{RANK}.safetensors")
        (folder / name / f"refusals.rank{RANK}.json").write_text(json.dumps(read.refusals))
        trainer.save_model(str(folder / name / "saved"))
        logits = logits_of(trainer.model, name)
        if RANK == 0:
            save_file(logits, folder / name / "logits_after_training.safetensors")


@scenario
def load(folder: Path) -> None:
    for name in MODELS:
        found = {}
        for source in ("saved", f"checkpoint-{NUM_STEPS}", "checkpoint-3"):
            model, information = type(build_model(name)).from_pretrained(
                folder / name / source, output_loading_info=True
            )
            found[source] = {key: sorted(map(str, value)) for key, value in information.items()}
            save_file(
                {key: value.detach().clone() for key, value in model.named_parameters()},
                folder / name / f"weights_{source}.safetensors",
            )
        (folder / name / "loading.json").write_text(json.dumps(found))

        fresh = type(model).from_pretrained(folder / name / "saved")
        save_file(logits_of(fresh, name), folder / name / "logits_loaded.safetensors")

        plain_args = TrainingArguments(
            str(folder / name / "plain"), per_device_eval_batch_size=EVAL_BATCH, report_to="none", use_cpu=True
        )
        plain = Trainer(model=fresh, args=plain_args, data_collator=collate).predict(evaluation_set(name))
        save_file(unpadded(name, plain.predictions), folder / name / "logits_plain_trainer.safetensors")

        args = arguments(folder / name / "ours", 1, pipeline_parallel_num_microbatches=1)
        ours = trainer_of(type(model).from_pretrained(folder / name / "saved"), name, args)
        predicted = ours.predict(evaluation_set(name)).predictions
        save_file(unpadded(name, predicted), folder / name / "logits_pipeline_trainer.safetensors")


class Weigh(TrainerCallback):
    """Weighs a rank between optimizer step and zero_grad, when parameters, gradients and state all exist."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self.trainer: Trainer | None = None

    def on_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        named = {
            name: parameter
            for name, parameter in self.trainer.model.named_parameters()
            if parameter.device.type != "meta" and parameter.numel()
        }
        gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        states = [
            value
            for state in self.trainer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        ]
        self.found = {
            "parameters": {name: num_bytes([parameter]) for name, parameter in named.items()},
            "totals": {
                # Every parameter that lives in this process, whoever holds it.
                "parameters": num_bytes(living_parameters()),
                "gradients": num_bytes(gradients),
                "optimizer": num_bytes(states),
            },
        }


def living_parameters() -> list[nn.Parameter]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is nn.Parameter and found.device.type != "meta"]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind some tensors, each storage counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def even_plan(folder: Path, num_layers: int, num_stages: int, num_microbatches: int, schedule: str) -> str:
    """A plan of one layout, its stages equally long: where they are cut must not hang on the clock."""
    num_blocks = 2 * num_layers + 2
    layout = {
        "num_layers": num_layers,
        "num_frozen_layers": 0,
        "num_stages": num_stages,
        "num_replicas": 1,
        "boundaries": [round(stage * num_blocks / num_stages) for stage in range(num_stages + 1)],
        "num_microbatches": num_microbatches,
        "schedule": schedule,
    }
    path = folder / f"plan-{num_layers}-{schedule}.jsonl"
    unfinished = path.with_suffix(f".rank{RANK}")
    unfinished.write_text(json.dumps({"event": "run", "step": 0, "layout": layout}) + "\n")
    return str(unfinished.rename(path))


@scenario
def memory(folder: Path, num_stages: int) -> None:
    # One after the other, so that no model is in memory while another is weighed.
    builders: dict[str, Callable[[], PreTrainedModel]] = {
        "vit": lambda: ViTForImageClassification(vit_config(NUM_VIT_LAYERS)),
        "bert_masked": lambda: build_model("bert_masked"),
    }
    for name, build in builders.items():
        model = build()
        whole = {key: num_bytes([value]) for key, value in model.named_parameters()}
        weigh = Weigh()
        plan = even_plan(folder, model.config.num_hidden_layers, num_stages, 2, "1f1b")
        args = arguments(folder / f"{name}-output", num_stages, max_steps=2, layout_plan=plan)
        trainer = trainer_of(model, name, args, callbacks=[weigh])
        weigh.trainer = trainer
        del model
        trainer.train()
        layout = trainer.layout
        record = {
            **weigh.found,
            "whole": whole,
            "blocks": [list(layout.blocks_of(stage)) for stage in range(layout.num_stages)],
            "whole_again": {key: num_bytes([value]) for key, value in trainer.model.named_parameters()},
        }
        (folder / f"{name}.rank{RANK}.json").write_text(json.dumps(record))
        del trainer, weigh


@scenario
def recomputation(folder: Path, num_stages: int) -> None:
    """What a stage keeps for the backward under each mode, with four micro-batches."""
    for schedule in ("gpipe", "1f1b"):
        for mode in RECOMPUTE_MODES:
            plan = even_plan(folder, NUM_LAYERS, num_stages, 4, schedule)
            args = arguments(
                folder / "output",
                num_stages,
                max_steps=2,
                layout_plan=plan,
                pipeline_schedule=schedule,
                pipeline_checkpoint=mode,
            )
            trainer = trainer_of(build_model("vit"), "vit", args)
            count = SavedBytes(trainer)
            with count.hooks():
                trainer.train()
            record = {"peak": count.most, "left": count.now, "losses": losses_of(trainer)}
            (folder / f"{schedule}-{mode}.rank{RANK}.json").write_text(json.dumps(record))


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

# AdamW keeps two moments beside a parameter and its gradient.
COPIES = 4


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, 1), id="2x1"), pytest.param((2, 2), id="2x2", marks=pytest.mark.slow)],
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what a pipeline saved and what one process made of it."""
    num_stages, num_replicas = request.param
    folder = tmp_path_factory.mktemp("saving")
    stages = {"num_stages": num_stages}
    start(train, folder, num_stages * num_replicas, stages, timeout=150, strict_nccl=True)
    start(load, folder, timeout=100)
    return folder


def assert_same_bits(found: Path, expected: Path) -> None:
    mine, theirs = load_file(found), load_file(expected)
    assert mine.keys() == theirs.keys()
    assert theirs
    for key, value in theirs.items():
        assert torch.equal(mine[key], value), key


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_gives_the_logits_of_the_trained_one_to_the_bit(saved: Path, name: str):
    assert_same_bits(saved / name / "logits_loaded.safetensors", saved / name / "logits_after_training.safetensors")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("evaluator", ["plain", "pipeline"])
def test_evaluation_on_one_process_gives_the_same_logits_to_the_bit(saved: Path, name: str, evaluator: str):
    assert_same_bits(
        saved / name / f"logits_{evaluator}_trainer.safetensors", saved / name / "logits_loaded.safetensors"
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_in_training_gives_the_logits_of_its_checkpoint_on_every_rank(saved: Path, name: str):
    found = sorted((saved / name).glob("logits_in_training.rank*.safetensors"))
    assert len(found) >= 2
    for path in found:
        assert_same_bits(path, saved / name / "logits_loaded.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_a_callback_that_did_not_ask_for_the_whole_model_is_refused_a_part(saved: Path, name: str):
    paths = list((saved / name).glob("refusals.rank*.json"))
    assert len(paths) >= 2
    for path in paths:
        refusals = json.loads(path.read_text())
        assert len(refusals) == 2 and all("trainer.whole_model()" in text for text in refusals), refusals


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_missing_or_left_over(saved: Path, name: str):
    loading = json.loads((saved / name / "loading.json").read_text())
    assert set(loading) == {"saved", f"checkpoint-{NUM_STEPS}", "checkpoint-3"}
    for source, information in loading.items():
        assert all(not found for found in information.values()), (source, information)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_hold_the_model_of_their_step_and_no_file_that_is_unpickled(saved: Path, name: str):
    last = f"checkpoint-{NUM_STEPS}"
    assert_same_bits(saved / name / f"weights_{last}.safetensors", saved / name / "weights_saved.safetensors")
    early = load_file(saved / name / "weights_checkpoint-3.safetensors")
    final = load_file(saved / name / "weights_saved.safetensors")
    assert any(not torch.equal(early[key], final[key]) for key in final)
    for folder in ("checkpoint-3", last):
        files = {path.name for path in (saved / name / folder).iterdir()}
        assert {"config.json", "model.safetensors", "trainer_state.json"} <= files
        assert not {found for found in files if found.startswith(("optimizer", "scheduler", "scaler"))}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_stages_is_saved_byte_for_byte_as_the_whole_one(saved: Path, name: str):
    """Without being whole on rank 0, unless code of a user may read it there."""
    assert json.loads((saved / name / "was_whole.json").read_text()) == [name == GATHERED] * 6
    for file in ("model.safetensors", "config.json"):
        for folder in (f"checkpoint-{NUM_STEPS}", "pushed", "."):
            assert (saved / name / folder / file).read_bytes() == (saved / name / "saved" / file).read_bytes()


@pytest.fixture(scope="module", params=[2, 4], ids=["K=2", "K=4"])
def weighed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of a pipeline of K stages held while training, by model."""
    num_stages = request.param
    folder = tmp_path_factory.mktemp("memory")
    start(memory, folder, num_stages, {"num_stages": num_stages}, timeout=150)
    return {
        name: [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(num_stages)]
        for name in ("vit", "bert_masked")
    }


def vit_block(parameter: str) -> int:
    """The block that owns a parameter of ViT: embeddings, attention and MLP of each layer, head."""
    if parameter.startswith("vit.embeddings."):
        return 0
    found = re.match(r"vit\.layers\.(\d+)\.(\w+)", parameter)
    if found is None:
        assert parameter.startswith(("vit.layernorm.", "classifier.")), parameter
        return 2 * NUM_VIT_LAYERS + 1
    layer, part = int(found[1]), found[2]
    half = {"layernorm_before": 0, "attention": 0, "layernorm_after": 1, "mlp": 1}[part]
    return 1 + 2 * layer + half


def test_a_rank_holds_what_its_layout_says(weighed: dict[str, list[Any]]):
    for rank, record in enumerate(weighed["vit"]):
        owned = {name: size for name, size in record["whole"].items() if vit_block(name) in record["blocks"][rank]}
        assert record["parameters"] == owned
        expected = sum(owned.values())
        assert record["totals"]["parameters"] == pytest.approx(expected, rel=0.02)
        # Stages whose embeddings hold something unused (a mask token) have no gradient for it.
        assert record["totals"]["gradients"] == pytest.approx(expected, rel=0.02)
        assert record["totals"]["optimizer"] == pytest.approx(2 * expected, rel=0.02)


def test_every_block_has_exactly_one_stage(weighed: dict[str, list[Any]]):
    for records in weighed.values():
        blocks = records[0]["blocks"]
        assert all(record["blocks"] == blocks for record in records)
        flat = [block for stage in blocks for block in stage]
        assert flat == list(range(len(flat)))
    names = [name for record in weighed["vit"] for name in record["parameters"]]
    assert sorted(names) == sorted(weighed["vit"][0]["whole"])


def test_no_rank_holds_more_than_its_share_and_one_sublayer(weighed: dict[str, list[Any]]):
    records = weighed["vit"]
    whole = records[0]["whole"]
    blocks: dict[int, int] = {}
    for name, size in whole.items():
        blocks[vit_block(name)] = blocks.get(vit_block(name), 0) + size
    sublayer = max(size for block, size in blocks.items() if 0 < block <= 2 * NUM_VIT_LAYERS)
    for record in records:
        assert sum(record["totals"].values()) <= COPIES * (sum(whole.values()) / len(records) + sublayer)


def test_a_shared_parameter_has_one_optimizer_state(weighed: dict[str, list[Any]]):
    records = weighed["bert_masked"]
    shared = "bert.embeddings.word_embeddings.weight"
    holders = [rank for rank, record in enumerate(records) if shared in record["parameters"]]
    assert holders == [0, len(records) - 1]
    whole = sum(records[0]["whole"].values())
    assert sum(record["totals"]["optimizer"] for record in records) == pytest.approx(2 * whole, rel=0.02)
    copies = records[0]["whole"][shared]
    assert sum(record["totals"]["parameters"] for record in records) == pytest.approx(whole + copies, rel=0.02)


def test_the_model_is_whole_again_after_training(weighed: dict[str, list[Any]]):
    for records in weighed.values():
        for record in records:
            assert record["whole_again"] == record["whole"]


# Micro-batches, of four, whose activations a stage keeps at most. The one that is recomputed
# counts; 1F1B has two in flight on its first stage, of which "except_last" keeps the last one of the batch.
IN_FLIGHT = {
    ("gpipe", "never"): [4, 4],
    ("gpipe", "except_last"): [1, 1],
    ("gpipe", "always"): [1, 1],
    ("1f1b", "never"): [2, 1],
    ("1f1b", "except_last"): [2, 1],
    ("1f1b", "always"): [1, 1],
}


@pytest.mark.parametrize(("schedule", "mode"), IN_FLIGHT)
def test_recomputation_keeps_less_and_changes_no_number(recomputed: Path, schedule: str, mode: str):
    for rank in range(2):
        found, one, never = (
            json.loads((recomputed / f"{name}.rank{rank}.json").read_text())
            for name in (f"{schedule}-{mode}", "1f1b-always", f"{schedule}-never")
        )
        assert found["peak"] == pytest.approx(IN_FLIGHT[schedule, mode][rank] * one["peak"], rel=1e-3)
        assert found["left"] == 0
        assert found["losses"] == pytest.approx(never["losses"], rel=1e-6)


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each stage of two keeps, by schedule and mode."""
    folder = tmp_path_factory.mktemp("recomputation")
    start(recomputation, folder, 2, {"num_stages": 2}, timeout=150)
    return folder
