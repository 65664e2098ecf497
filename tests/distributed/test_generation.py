"""Tokens that a model on several stages generates are those of the whole model."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin, PipeTransformerTrainer
from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.engine.token_program import TokenSliceProgram
from hf_pipetransformer.splitters.quantized import prepare_quantized
from tests.distributed.scenarios import RANK, WORLD_SIZE, run, scenario
from tests.support.adapted import adapted
from tests.support.decoders import DECODERS, VOCABULARY, collate_tokens, make_decoder, make_rows
from tests.support.trainings import losses_of, options_for


NUM_NEW = 64
ENDS = [3, 17, 29, 41]
"""So many tokens end a sequence that rows end at different ones."""

GREEDY: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos_token_id": ENDS, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 1.5, "top_k": 20}
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "without a cache": {"use_cache": False, "max_new_tokens": 12},
    "in chunks": {"prefill_chunk_size": 5},
    "processed": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 9},
    "to the end": {"min_new_tokens": NUM_NEW},
}


def kept_contexts() -> list[Any]:
    """Keys and values that programs of this rank's stages keep, whoever made the programs."""
    programs = [each for each in gc.get_objects() if isinstance(each, TokenSliceProgram)]
    return [context for program in programs for context in program._contexts.values()]


@dataclass
class GeneratingArguments(PipeTransformerArguments, Seq2SeqTrainingArguments):
    """Options of both."""


class GeneratingTrainer(PipeTransformerMixin, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with a pipeline."""


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    # Large weights, so that tokens differ.
    options = {"initializer_range": 0.3, "max_position_embeddings": 256}
    if not name.startswith("lora-"):
        return make_decoder(name, **options)
    model = adapted(name.removeprefix("lora-"), "ranks", **options)
    prepare_quantized(model)  # Stages compute with the kernels that do not pack the bytes of weights anew.
    return model


def make_prompts(num: int = 8, longest: int = 17) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(7)
    lengths = [longest - (longest // 3 * row) % (longest - 2) for row in range(num)]
    ids = torch.zeros(num, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def common(folder: Path) -> dict[str, Any]:
    return options_for(
        folder, max_steps=6, seed=3, per_device_eval_batch_size=8 // WORLD_SIZE, learning_rate=1e-2, logging_steps=500
    )


def arguments(folder: Path, num_stages: int, kind: Any = PipeTransformerArguments, **options: Any) -> Any:
    own = {"pipeline_parallel_size": num_stages, "activation_cache": "off"}
    return kind(**{**common(folder), **own, **options})


def whole(model: Any, prompts: dict[str, torch.Tensor], **options: Any) -> Any:
    return model.eval().generate(**prompts, **options).tolist()


class Held(LogitsProcessor):
    """Notes of which layers this rank keeps keys and values, and changes nothing."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for context in kept_contexts():
            self.layers |= {layer for layer, (keys, _) in enumerate(context.layers) if keys._all is not None}
        return scores


@scenario
def generate_all(folder: Path, names: list[str], num_stages: int) -> dict[str, Any]:
    """Generate with each model before any training, greedily; with the first one also in other ways."""
    found: dict[str, Any] = {}
    for name in names:
        model = make_model(name)
        expected = whole(model, make_prompts(), **GREEDY)
        trainer = PipeTransformerTrainer(model, arguments(folder / name, num_stages))
        found[name] = trainer.generate(make_prompts(), **GREEDY).tolist(), expected
        if name != names[0]:
            continue
        for way, options in OTHER_WAYS.items():
            expected = whole(model, make_prompts(), **GREEDY | options)
            found[way] = trainer.generate(make_prompts(), **GREEDY | options).tolist(), expected
        expected = whole(model, make_prompts(1), **GREEDY)
        found["one row"] = trainer.generate(make_prompts(1)["input_ids"], **GREEDY).tolist(), expected
        ids, mask = make_prompts().values()
        tokens = trainer.generate(ids, attention_mask=mask, **GREEDY).tolist()
        found["the mask by keyword"] = tokens, whole(model, make_prompts(), **GREEDY)
        # As many tokens as the stages take in slices.
        prompts = make_prompts(longest=120)
        found["long prompts"] = trainer.generate(prompts, **GREEDY).tolist(), whole(model, prompts, **GREEDY)
        held = Held()
        trainer.generate(make_prompts(), **GREEDY, logits_processor=[held])
        found["held"] = sorted(held.layers), trainer.layout.as_event()
        found["kept"] = len(kept_contexts())
        found |= sample(trainer, model) | (refused(trainer) if num_stages > 1 else {})
    return found


def sample(trainer: Any, model: Any) -> dict[str, Any]:
    """Sample after the seed of rank 0, which the others do not have."""
    torch.manual_seed(5)
    expected = whole(model, make_prompts(), **SAMPLED), torch.rand(1).item()
    torch.manual_seed(5 + RANK)
    own = torch.get_rng_state()
    tokens = trainer.generate(make_prompts(), **SAMPLED).tolist()
    keeps_own = torch.equal(torch.get_rng_state(), own)
    return {"sampled": (tokens, expected[0]), "random": (torch.rand(1).item(), expected[1]), "keeps_own": keeps_own}


def refused(trainer: Any) -> dict[str, str]:
    """What cannot be done, and that it can go on afterward."""
    texts = {}
    other = make_prompts()["input_ids"] + RANK
    for name, prompts, options in (
        ("beams", make_prompts(), {"num_beams": 2}),
        ("inputs", other, {}),
        ("own inputs", other, {}),
    ):
        call = trainer.generate if name != "own inputs" else in_evaluation(trainer)
        try:
            call(prompts, **GREEDY | options)
        except ValueError as error:
            texts[name] = str(error)
    return texts


def collate_some(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows that may have no labels."""
    batch = collate_tokens([{"labels": [], **row} for row in rows])
    return batch if "labels" in rows[0] else {name: value for name, value in batch.items() if name != "labels"}


def evaluate_later(trainer: Any) -> float:
    """The loss of labeled data, after prompts and data without labels."""
    trainer.predict([{"input_ids": row["input_ids"]} for row in make_rows(4)])
    loss: float = trainer.evaluate(make_rows(12))["eval_loss"]
    return loss


class Differs(LogitsProcessor):
    """Prefers another token on each rank."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 5 + RANK] += 1e4
        return scores


def disagree(trainer: Any) -> str:
    try:
        trainer.generate(make_prompts(), max_new_tokens=3, logits_processor=[Differs()])
    except PipelineError as error:
        return str(error)
    return "no error"


def in_evaluation(trainer: Any) -> Any:
    """The model's own method, as a script's `prediction_step` calls it."""

    def call(prompts: torch.Tensor, **options: Any) -> Any:
        with trainer.pipeline_run.pipelined.evaluations._up(None):
            return trainer.model.generate(prompts, **options)

    return call


class GeneratesAmid(TrainerCallback):
    """Generates after a step, with the stages and with the whole model."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step not in (2, 5):
            return
        tokens = self.trainer.generate(make_prompts(), **GREEDY).tolist()
        with self.trainer.whole_model(), self.trainer.accelerator.autocast():
            expected = whole(self.trainer.model, make_prompts(), **GREEDY)
        layout = self.trainer.layout
        self.found[f"step {state.global_step}"] = tokens, expected, layout.num_frozen_layers, layout.num_stages


@scenario
def train_and_generate(folder: Path, num_stages: int, options: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    """Generate in a training in which layers freeze, and after it; the losses show that it changes none."""
    callback = GeneratesAmid()
    freezing = {"logging_steps": 1, "freeze_policy": "fixed", "freeze_at": "3:2"}
    args = arguments(folder, num_stages, **{**freezing, **options})
    trainer = PipeTransformerTrainer(
        make_model(name), args, train_dataset=make_rows(16), data_collator=collate_tokens, callbacks=[callback]
    )
    callback.trainer = trainer
    trainer.train()
    tokens = trainer.generate(make_prompts(), **GREEDY).tolist()
    with trainer.whole_model(), trainer.accelerator.autocast():
        expected = whole(trainer.model, make_prompts(), **GREEDY)
    losses = losses_of(trainer)
    return {**callback.found, "after": (tokens, expected), "losses": losses}


def collate_prompts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the left, as a tokenizer for generation does."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return [filler] * (longest - len(values)) + values

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        # The first token is predicted from padding.
        "labels": torch.tensor([padded([-100, *row["labels"][1:]], -100) for row in rows]),
    }


def without_padding(row: Any) -> list[int]:
    """The tokens of a row: padding on either side depends on the rows beside it."""
    return [token for token in row.tolist() if token > 0]


def evaluate_generating(kind: Any, args: Any, name: str = "llama") -> dict[str, Any]:
    """Train, evaluating with generated tokens, and predict."""
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        rows = [without_padding(row) for row in prediction.predictions]
        seen.append(rows)
        return {"tokens": float(sum(map(len, rows))), "sum": float(sum(map(sum, rows)))}

    model = make_model(name)
    # A length with prompts would depend on the padding of a replica's rows.
    model.generation_config.update(eos_token_id=ENDS, pad_token_id=0, max_new_tokens=24)
    rows = make_rows(22)
    trainer = kind(
        model, args, train_dataset=rows[:8], eval_dataset=rows[8:], data_collator=collate_prompts,
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.model.config.pad_token_id = 0
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_tokens" in entry]
    names = ("eval_loss", "eval_tokens", "eval_sum")
    predicted = trainer.predict(rows[8:13], max_new_tokens=7)
    return {
        "evaluated": [[entry[name] for name in names] for entry in evaluated],
        "rows": seen[:-1],
        "predicted": [without_padding(row) for row in predicted.predictions],
        "predicted loss": predicted.metrics["test_loss"],
    }


GENERATING: dict[str, Any] = {
    "predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip


@scenario
def evaluate(folder: Path, num_stages: int, options: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    args = arguments(folder, num_stages, GeneratingArguments, **GENERATING, **options)
    return evaluate_generating(GeneratingTrainer, args, name)


def evaluate_with_beams(folder: Path) -> str:
    """What a training says at once whose evaluations would search with beams."""
    args = arguments(folder, 2, GeneratingArguments, **GENERATING, generation_num_beams=2)
    try:
        evaluate_generating(GeneratingTrainer, args)
    except ValueError as error:
        return str(error)
    return "no error"


def evaluate_plainly(folder: Path) -> dict[str, Any]:
    """The same with `Seq2SeqTrainer` on this process."""
    return evaluate_generating(Seq2SeqTrainer, Seq2SeqTrainingArguments(**common(folder), **GENERATING))


@scenario
def all_on_two(folder: Path, names: list[str]) -> dict[str, Any]:
    """Everything of one launch on two stages."""
    trainer = PipeTransformerTrainer(make_model("llama"), arguments(folder / "later", 2), data_collator=collate_some)
    return {
        "generated": generate_all(folder, names, 2),
        "training": train_and_generate(folder / "training", 2, {"elastic": False}),
        "evaluated": evaluate(folder / "evaluated", 2, {}),
        "beams": evaluate_with_beams(folder / "beams"),
        "later": evaluate_later(trainer),
        "disagree": disagree(trainer),
    }


NAMES = ["llama", "gpt2", "qwen2", "gemma2", "lora-llama"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("generation")
    return run(all_on_two, folder, 2, {"names": NAMES}, timeout=240, strict_nccl=True)


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
    return evaluate_plainly(tmp_path_factory.mktemp("plain"))


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
    args = TrainingArguments(**common(tmp_path))
    plain = Trainer(make_model("llama"), args, data_collator=collate_some)
    expected = evaluate_later(plain)
    assert [rank["later"] for rank in on_two] == pytest.approx([expected] * 2, rel=1e-5)


def test_one_process_generates_as_trainer_does(plain: dict[str, Any], tmp_path: Path) -> None:
    options = {"pipeline_parallel_num_microbatches": 2, "freeze_policy": "none"}
    args = arguments(tmp_path, 1, GeneratingArguments, **GENERATING, **options)
    check_evaluated([evaluate_generating(GeneratingTrainer, args)], plain)


# What takes other launches.


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(4, 1), (2, 2), (1, 2)], ids=lambda layout: f"{layout[0]}x{layout[1]}")
def test_other_layouts(layout: tuple[int, int], plain: dict[str, Any], tmp_path: Path) -> None:
    num_stages, num_processes = layout[0], layout[0] * layout[1]
    names = [name for name in DECODERS if layout[0] > 1 or name in NAMES]
    options = {"names": [*names, *(["lora-llama", "lora-llama-nf4"] if layout[0] > 1 else [])]}
    ranks = run(
        generate_all, tmp_path, num_processes, {**options, "num_stages": num_stages}, timeout=500,
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
    ranks = run(train_and_generate, tmp_path, num_processes, options, timeout=300, strict_nccl=True)
    shape = ranks[0]["step 2"][3], ranks[0]["step 5"][3]
    assert shape[0] == num_stages * (2 if name in ("interleaved", "zb_v") else 1)
    assert (shape[1] < shape[0]) == (name == "elastic")
    check_training(ranks, shape, 4 if name == "elastic" else 2)
    if not name[0].isdigit():
        return
    options["name"] = "llama"
    check_evaluated(
        run(evaluate, tmp_path / "evaluated", num_processes, options, timeout=300, strict_nccl=True),
        plain,
    )
