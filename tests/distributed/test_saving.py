"""Law 8: what is saved loads in plain transformers with the same logits; and each rank holds its own blocks only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import saving_worker
from tests.distributed.saving_worker import GATHERED, MODELS, NUM_STEPS, NUM_VIT_LAYERS
from tests.distributed.scenarios import start


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
    start(saving_worker.train, folder, num_stages * num_replicas, stages, timeout=150, strict_nccl=True)
    start(saving_worker.load, folder, timeout=100)
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
    start(saving_worker.memory, folder, num_stages, {"num_stages": num_stages}, timeout=150)
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
    start(saving_worker.recomputation, folder, 2, {"num_stages": 2}, timeout=150)
    return folder
