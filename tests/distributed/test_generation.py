"""Tokens that a model on several stages generates are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from tests.distributed import generation_worker
from tests.distributed.generation_worker import (
    GENERATING,
    NUM_NEW,
    OTHER_WAYS,
    GeneratingArguments,
    GeneratingTrainer,
)
from tests.distributed.scenarios import run
from tests.support.decoders import DECODERS


NAMES = ["llama", "gpt2", "qwen2", "gemma2", "lora-llama"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("generation")
    return run(generation_worker.all_on_two, folder, 2, {"names": NAMES}, timeout=240, strict_nccl=True)


def check_generated(ranks: list[dict[str, Any]], names: list[str]) -> None:
    for found in ranks:
        for name in names:
            tokens, expected = found[name]
            assert tokens == expected, name
    for name in names:
        tokens, _ = ranks[0][name]
        assert all(each[name] == ranks[0][name] for each in ranks)
        assert len({tuple(row[-8:]) for row in tokens}) > 1 or len(tokens) == 1


@pytest.mark.parametrize("name", [*NAMES, *OTHER_WAYS, "one row", "the mask by keyword", "long prompts", "sampled"])
def test_tokens_are_those_of_the_whole_model(name: str, on_two: list[Any]) -> None:
    check_generated([rank["generated"] for rank in on_two], [name])


def test_rows_end_at_different_tokens(on_two: list[Any]) -> None:
    tokens, _ = on_two[0]["generated"]["llama"]
    ends = {len(row) - next((place for place, token in enumerate(row[::-1]) if token), 0) for row in tokens}
    assert len(ends) > 2
    tokens, _ = on_two[0]["generated"]["to the end"]
    assert {len(row) for row in tokens} == {17 + NUM_NEW}


def test_each_rank_keeps_keys_and_values_of_its_own_layers(on_two: list[Any]) -> None:
    layers = [rank["generated"]["held"][0] for rank in on_two]
    assert [layer for own in layers for layer in own] == [0, 1, 2, 3]
    assert all(layers)


def test_nothing_is_kept_after_a_generation(on_two: list[Any]) -> None:
    assert [rank["generated"]["kept"] for rank in on_two] == [0, 0]


def test_sampling_draws_what_one_process_draws(on_two: list[Any]) -> None:
    first, second = (rank["generated"] for rank in on_two)
    assert first["random"][0] == first["random"][1]
    assert not first["keeps_own"] and second["keeps_own"]


def test_what_cannot_be_generated_is_refused_on_every_rank(on_two: list[Any]) -> None:
    for rank in on_two:
        found = rank["generated"]
        assert "Several stages cannot generate so: beam_search" in found["beams"]
        assert "The inputs of generate() differ between ranks: input_ids is" in found["inputs"]
        assert "was given another input_ids on some ranks of one pipeline" in found["own inputs"]
        assert "Several stages cannot generate so: beam_search" in rank["beams"]
        assert "have generated different tokens from the same logits" in rank["disagree"]


def check_training(ranks: list[dict[str, Any]], num_stages: tuple[int, int], num_frozen: int = 2) -> None:
    for found in ranks:
        for moment in ("step 2", "step 5", "after"):
            assert found[moment][0] == found[moment][1], moment
        layouts = [tuple(found[moment][2:]) for moment in ("step 2", "step 5")]
        assert layouts == [(0, num_stages[0]), (num_frozen, num_stages[1])]
    assert ranks[0]["step 2"][0] != ranks[0]["step 5"][0]


def test_generating_amid_a_training_and_after_it(on_two: list[Any]) -> None:
    check_training([rank["training"] for rank in on_two], (2, 2))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return generation_worker.evaluate_plainly(tmp_path_factory.mktemp("plain"))


def check_evaluated(ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for found in ranks:
        assert len(found["evaluated"]) == len(plain["evaluated"]) == 2
        for values, expected in zip(found["evaluated"], plain["evaluated"], strict=True):
            assert values == pytest.approx(expected, rel=1e-5)
        assert found["predicted"] == plain["predicted"]
        assert found["predicted loss"] == pytest.approx(plain["predicted loss"], rel=1e-5)

    assert ranks[0]["rows"] == plain["rows"]  # Rank 0 computes the metrics.


def test_evaluation_with_generation_follows_seq2seq_trainer(on_two: list[Any], plain: dict[str, Any]) -> None:
    assert plain["rows"][0] != plain["rows"][1]
    check_evaluated([rank["evaluated"] for rank in on_two], plain)


def test_a_loss_is_known_after_data_without_labels(on_two: list[Any], tmp_path: Path) -> None:
    args = TrainingArguments(**generation_worker.common(tmp_path))
    plain = Trainer(generation_worker.make_model("llama"), args, data_collator=generation_worker.collate_some)
    expected = generation_worker.evaluate_later(plain)
    assert [rank["later"] for rank in on_two] == pytest.approx([expected] * 2, rel=1e-5)


def test_one_process_generates_as_trainer_does(plain: dict[str, Any], tmp_path: Path) -> None:
    options = {"pipeline_parallel_num_microbatches": 2, "freeze_policy": "none"}
    args = generation_worker.arguments(tmp_path, 1, GeneratingArguments, **GENERATING, **options)
    check_evaluated([generation_worker.evaluate_generating(GeneratingTrainer, args)], plain)


# What takes other launches.


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(4, 1), (2, 2), (1, 2)], ids=lambda layout: f"{layout[0]}x{layout[1]}")
def test_other_layouts(layout: tuple[int, int], plain: dict[str, Any], tmp_path: Path) -> None:
    num_stages, num_processes = layout[0], layout[0] * layout[1]
    names = [name for name in DECODERS if layout[0] > 1 or name in NAMES]
    options = {"names": [*names, *(["lora-llama", "lora-llama-nf4"] if layout[0] > 1 else [])]}
    ranks = run(
        generation_worker.generate_all, tmp_path, num_processes, {**options, "num_stages": num_stages}, timeout=500,
        strict_nccl=True,
    )  # fmt: skip
    others = "one row", "the mask by keyword", "long prompts", "sampled"
    check_generated(ranks, [*options["names"], *OTHER_WAYS, *others])


OPTIONS: dict[str, dict[str, Any]] = {
    "4x1": {"pipeline_parallel_num_microbatches": 3},
    "2x2": {},
    "elastic": {"elastic": True, "pipeline_compression": "memory", "freeze_at": "3:4"},
    "interleaved": {"pipeline_schedule": "interleaved_1f1b"},
    "zb_v": {"pipeline_schedule": "zb_v"},
    "token": {"pipeline_schedule": "token", "pipeline_token_slices": "5,20,9"},
    "async": {"pipeline_schedule": "async_1f1b"},
    "recomputed": {"pipeline_checkpoint": "always"},
    "layers": {"pipeline_checkpoint": "layers"},
    "bf16": {"bf16": True, "pipeline_parallel_num_microbatches": 1},
    "stored": {"activation_cache": "on"},
}
"""Options of trainings; layouts stay as they are, with one exception."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIONS))
def test_other_runs(name: str, tmp_path: Path, plain: dict[str, Any]) -> None:
    num_processes, num_stages = (4, 4) if name == "4x1" else (4, 2) if name == "2x2" else (2, 2)
    of_case = {"elastic": False, **OPTIONS[name]}
    options = {"num_stages": num_stages, "options": of_case, "name": "qwen2"}  # Untied, as async needs.
    ranks = run(generation_worker.train_and_generate, tmp_path, num_processes, options, timeout=300, strict_nccl=True)
    shape = ranks[0]["step 2"][3], ranks[0]["step 5"][3]
    assert shape[0] == num_stages * (2 if name in ("interleaved", "zb_v") else 1)
    assert (shape[1] < shape[0]) == (name == "elastic")
    check_training(ranks, shape, 4 if name == "elastic" else 2)
    if not name[0].isdigit():
        return
    options["name"] = "llama"
    check_evaluated(
        run(generation_worker.evaluate, tmp_path / "evaluated", num_processes, options, timeout=300, strict_nccl=True),
        plain,
    )
