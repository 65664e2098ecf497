"""Token slices in a run: how batches are cut, what slices cost, what is planned from that, and what is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2ForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.data.batches import cut_tokens
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.planning.token_slices import (
    WORTH,
    SlicePlanner,
    SliceTime,
    TokenCosts,
    cut_layout,
    fit_token_costs,
)
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import slice_bounds
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.startup.planner import MeasuredCosts, RunPlanner
from tests.planning.test_planning import costs_of, layout_of
from tests.support.decoders import collate_tokens, make_decoder, make_rows
from tests.support.sft import make_tokenizer


COSTS = TokenCosts(launch=0.01, sequence=0.0, context=1e-6, token=5e-5, attention=1e-8, length=2048)


# ---- cutting ----


def test_slices_are_those_of_the_plan_for_the_next_longer_sequences_in_proportion() -> None:
    plans = ((8,), (10, 6), (16, 8, 8))
    assert slice_bounds(plans, 8) == (0, 8)
    assert slice_bounds(plans, 16) == (0, 10, 16)
    assert slice_bounds(plans, 12) == (0, 8, 12)
    assert slice_bounds(plans, 64) == (0, 32, 48, 64)
    assert slice_bounds(((1,) * 5,), 3) == (0, 1, 2, 3)
    assert slice_bounds((), 7) == (0, 7)


def test_a_slice_has_its_tokens_the_mask_up_to_its_end_and_the_labels_that_follow() -> None:
    ids = torch.arange(10).reshape(2, 5)
    inputs = {"input_ids": ids, "attention_mask": torch.ones(2, 5), "labels": ids, "scale": torch.tensor(2.0)}
    first, second = cut_tokens(inputs, (0, 3, 5))
    assert second["input_ids"].tolist() == [[3, 4], [8, 9]]
    assert (first["attention_mask"].shape, second["attention_mask"].shape) == ((2, 3), (2, 5))
    assert first["shift_labels"].tolist() == [[1, 2, 3], [6, 7, 8]]
    assert second["shift_labels"].tolist() == [[4, -100], [9, -100]]
    assert first["scale"] == second["scale"] == 2
    assert "shift_labels" not in inputs
    assert cut_tokens(inputs, ()) == []


def test_a_mask_by_pairs_of_tokens_is_refused() -> None:
    inputs = {"input_ids": torch.zeros(2, 4), "attention_mask": torch.ones(2, 1, 4, 4)}
    with pytest.raises(ValueError, match=r"attention_mask of shape \(batch, seq\), found \(2, 1, 4, 4\)"):
        cut_tokens(inputs, (0, 2, 4))


def test_rows_of_several_texts_are_refused() -> None:
    inputs = {"input_ids": torch.zeros(2, 4), "position_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])}
    with pytest.raises(ValueError, match=r"rows of one text each.*1f1b"):
        cut_tokens(inputs, (0, 2, 4))
    one_text = {**inputs, "position_ids": torch.arange(4).repeat(2, 1)}
    assert cut_tokens(one_text, (0, 2, 4))[1]["position_ids"].tolist() == [[2, 3], [2, 3]]
    # With a mask no model looks for several texts.
    assert len(cut_tokens({**inputs, "attention_mask": torch.ones(2, 4)}, (0, 2, 4))) == 2


def test_a_layout_with_slices_survives_json() -> None:
    layout = Layout(2, 0, 2, 1, (0, 3, 6), 2, "token", token_slices=((4,), (6, 2)))
    assert Layout.from_event(layout.as_event()) == layout
    assert "of S=2 token slices (6, 2)" in str(layout)
    assert "of S=3 equal token slices," in str(replace(layout, token_slices=((1, 1, 1),)))
    # Events of earlier runs know of none.
    fields = layout.as_event()
    del fields["token_slices"]
    assert Layout.from_event(fields).token_slices == ()


# ---- costs ----


def test_costs_are_found_again_from_what_they_give() -> None:
    times = [
        SliceTime(size, start, tokens, COSTS.seconds(size, start, tokens))
        for size in (1, 4)
        for tokens in (128, 256, 512, 1024)
        for start in range(0, 1024 + 1 - tokens, tokens)
    ]
    found = fit_token_costs(times)
    assert found.error < 1e-6
    assert found.length == 1024
    for name in ("launch", "context", "token", "attention"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-4)


def test_no_cost_is_below_zero_whatever_was_measured() -> None:
    generator = random.Random(0)
    times = [SliceTime(1, start, 8, generator.uniform(1e-3, 2e-3)) for start in range(0, 64, 8)]
    found = fit_token_costs(times)
    assert min(found.launch, found.sequence, found.context, found.token, found.attention) >= 0


# ---- plans ----


def test_micro_batches_may_take_different_times() -> None:
    table = find_schedule("token").table(2, 1, num_token_slices=2)
    found = simulate(table, Durations((1.0, 1.0), (2.0, 2.0), factors=(3.0, 1.0)))
    # F 3 then 1 on both, B 1 then 3 back.
    assert found.end == 3 + 3 + 1 + 2 + 6 + 6
    assert found.busy == (12.0, 12.0)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("samples", [1, 2, 8, 32])
def test_a_plan_is_never_slower_than_whole_sequences_or_equal_slices(size: int, samples: int) -> None:
    def seconds(count: int, lengths: tuple[int, ...]) -> float:
        own = -(-samples // count)
        whole = COSTS.seconds(own, 0, 2048) / size
        table = find_schedule("token").table(size, count, num_token_slices=len(lengths))
        factors = tuple(share * whole for share in COSTS.shares(own, lengths)) * count
        return simulate(table, Durations((1 / 3,) * size, (2 / 3,) * size, factors=factors)).end

    plan = SlicePlanner(find_schedule("token"), COSTS, samples, size).choose(2048)
    assert sum(plan.lengths) == 2048
    assert plan.seconds == pytest.approx(seconds(plan.num_microbatches, plan.lengths))
    # Sequences stay whole where slices gain next to nothing.
    is_cut = len(plan.lengths) > 1
    for count in {1, size, samples} & set(range(1, samples + 1)):
        assert plan.seconds <= seconds(count, (2048,)) * (WORTH if is_cut else 1.0) * (1 + 1e-9)
        for number in (2, 4, 8):
            least = seconds(count, (2048 // number,) * number)
            assert plan.seconds * (1.0 if is_cut else WORTH) <= least * 1.01
    if samples == 1:
        assert len(plan.lengths) > 1


def test_sequences_are_not_cut_where_that_gains_nothing() -> None:
    alone = SlicePlanner(find_schedule("token"), COSTS, samples=4, pipeline_size=1)
    assert alone.choose(2048).lengths == (2048,)
    assert alone.buckets(1) == ()
    plans = SlicePlanner(find_schedule("token"), COSTS, samples=1, pipeline_size=4).buckets(1)
    assert [sum(plan) for plan in plans] == [512, 1024, 2048, 4096]
    assert len(plans[0]) < len(plans[-1])


@pytest.mark.parametrize(
    ("size", "samples", "options", "expected"),
    [
        (1, 4, {}, "pipeline_token_slices='auto' keeps sequences of 128 tokens whole: one stage waits for no other"),
        (
            2,
            32,
            {},
            "keeps sequences of 128 tokens whole: slices of ([0-9]+, )*[0-9]+ and [0-9]+ tokens with M=[0-9]+ would "
            "take [0-9.]+ % (more|less) time than the [0-9.]+ s a batch of whole ones with M=[0-9]+",
        ),
        (4, 1, {}, "Sequences of 128 tokens run in slices of ([0-9]+, )+[0-9]+ and [0-9]+ tokens"),
        (4, 1, {"pipeline_token_slices": 4}, "Sequences of 128 tokens run in slices of 32, 32, 32 and 32 tokens"),
        (4, 1, {"pipeline_token_slices": "8,24"}, "Sequences of 128 tokens run in slices of 32 and 96 tokens"),
        (4, 1, {"pipeline_schedule": "1f1b"}, None),
    ],
)
def test_the_first_line_says_how_sequences_are_cut_and_why_not(
    size: int, samples: int, options: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=samples // size or 1, **options)
    short = replace(COSTS, length=128, context=16 * COSTS.context, token=16 * COSTS.token)
    costs = replace(short, attention=256 * COSTS.attention, launch=2.0 if samples > 1 else COSTS.launch)
    measured = MeasuredCosts(replace(costs_of(12), slices=costs), Overheads(), 1)
    structure = SimpleNamespace(num_layers=12, cut_positions=lambda: range(27), media=None)
    probe = SimpleNamespace(structure=structure, media_share=0.0, block_flops=())
    plans = RunPlanner(*(args, SimpleNamespace(), probe, measured, 1e9, 0), has_dropout=False, unfit=0)
    layout = replace(layout_of(12, size, size), schedule=args.pipeline_schedule, num_microbatches=1)
    layout = cut_layout(layout, args.token_slices, costs, samples, args.num_microbatches is None, 0.0)
    said = plans.describe(layout, "none", freezes=False)["expectation"]
    if expected is None:
        assert "token" not in said
    else:
        assert re.search(expected, said), said


# ---- options ----


def arguments(folder: Path, **options: Any) -> PipeTransformerArguments:
    common: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "seed": 3, "freeze_policy": "none", "pipeline_schedule": "token",
    }  # fmt: skip
    return PipeTransformerArguments(str(folder), **common | options)


@pytest.mark.parametrize(
    ("given", "expected"), [("4", ((1, 1, 1, 1),)), (3, ((1, 1, 1),)), ("512, 256", ((512, 256),)), ("auto", None)]
)
def test_slices_are_a_number_lengths_or_planned(given: Any, expected: Any, tmp_path: Path) -> None:
    assert arguments(tmp_path, pipeline_token_slices=given).token_slices == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_token_slices": "0"}, "pipeline_token_slices must be 'auto' or a number of slices"),
        ({"pipeline_token_slices": "4,x"}, "pipeline_token_slices"),
        ({"pipeline_token_slices": 4, "pipeline_schedule": "1f1b"}, "needs pipeline_schedule='token', found '1f1b'"),
        ({"torch_compile": True}, "torch_compile=True with pipeline_schedule='token'"),
        ({"activation_cache": "on"}, "activation_cache='on' with pipeline_schedule='token'"),
    ],
)
def test_what_cannot_go_with_slices_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, **{"pipeline_schedule": "token", **options})


def trained(model: Any, folder: Path, resume: str | None = None, **options: Any) -> PipeTransformerTrainer:
    trainer = PipeTransformerTrainer(
        model, arguments(folder, **options), train_dataset=make_rows(), data_collator=collate_tokens
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_model_whose_tokens_read_later_ones_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    words = r"(?s)'token': BertForMaskedLM gives the loss .* for slices of .*Set pipeline_schedule="
    with pytest.raises(ValueError, match=words):
        trained(BertForMaskedLM(config), tmp_path, pipeline_token_slices=2)


def test_a_loss_of_whole_sequences_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, pad_token_id=0)
    rows = [{**row, "labels": len(row["input_ids"]) % 2} for row in make_rows()]
    args = arguments(tmp_path, pipeline_token_slices=2)
    trainer = PipeTransformerTrainer(
        GPT2ForSequenceClassification(config), args, train_dataset=rows, data_collator=collate_tokens
    )
    with pytest.raises(ValueError, match="pipeline_schedule='token': GPT2ForSequenceClassification gives the loss"):
        trainer.train()


def test_layers_that_the_model_recomputes_itself_are_refused(tmp_path: Path) -> None:
    model = make_decoder("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="LlamaForCausalLM recomputes its layers itself: .*pipeline_checkpoint"):
        trained(model, tmp_path, pipeline_token_slices=2)


def test_whole_sequences_of_a_model_that_recomputes_its_layers_are_trained(tmp_path: Path) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = make_decoder("llama")
        if recomputes:
            model.gradient_checkpointing_enable()
        trainer = trained(model, tmp_path, pipeline_schedule="1f1b", pipeline_parallel_num_microbatches=2)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_layers_that_an_option_has_recomputed_are_by_the_pipeline(tmp_path: Path) -> None:
    assert arguments(tmp_path, activation_checkpointing=True).pipeline_checkpoint == "layers"


def test_labels_smoothed_over_whole_sequences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pipeline_schedule='token'"):
        trained(make_decoder("gpt2"), tmp_path, pipeline_token_slices=2, label_smoothing_factor=0.1)


@pytest.mark.parametrize("recompute", ["never", "always", "layers"])
def test_slices_of_a_run_on_one_process_give_the_losses_of_whole_sequences(tmp_path: Path, recompute: str) -> None:
    torch.manual_seed(0)
    model = make_decoder("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for slices in ("1", "5,20,9"):
        model.load_state_dict(state)
        trainer = trained(
            model, tmp_path / slices, pipeline_token_slices=slices, pipeline_parallel_num_microbatches=2,
            pipeline_checkpoint=recompute,
        )  # fmt: skip
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert len(trainer.layout.token_slices[0]) == slices.count(",") + 1
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_slices_are_planned_from_measured_times(tmp_path: Path) -> None:
    trainer = trained(make_decoder("gpt2"), tmp_path, freeze_policy="schedule")
    costs = trainer.pipeline_run.pipelined.pipeline.start_up.plans.costs.blocks.slices
    assert costs is not None and costs.length >= 8
    # Measured: how much they are, nobody can know.
    assert costs.seconds(1, 0, costs.length) > 0
    assert sum(costs.shares(1, [3, costs.length - 3])) >= 1 - 1e-9
    assert all(a <= b for a, b in pairwise(costs.seconds(1, 0, tokens) for tokens in (1, 8, 64)))


def test_a_run_with_slices_and_frozen_layers_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "pipeline_token_slices": "5,20,9", "pipeline_parallel_num_microbatches": 2, "freeze_policy": "fixed",
        "freeze_at": "1:1,4:2", "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    torch.manual_seed(0)
    model = make_decoder("qwen2")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole = trained(model, tmp_path, **options)
    model.load_state_dict(state)
    rest = trained(model, tmp_path, resume=str(tmp_path / "checkpoint-3"), **options)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (whole, rest)]
    assert losses[1][-3:] == losses[0][-3:]
    assert rest.layout.num_frozen_layers == whole.layout.num_frozen_layers == 2
    assert rest.layout.token_slices == whole.layout.token_slices


def test_the_collator_of_transformers_gives_the_losses_of_trainer(tmp_path: Path) -> None:
    collator = DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)
    rows = [{"input_ids": row["input_ids"]} for row in make_rows(24)]
    common: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 3,
    }  # fmt: skip
    found = []
    for kind in (Trainer, PipeTransformerTrainer):
        torch.manual_seed(0)
        args = TrainingArguments(str(tmp_path), **common)
        if kind is PipeTransformerTrainer:
            own = {"freeze_policy": "none", "pipeline_schedule": "token", "pipeline_token_slices": "3"}
            args = PipeTransformerArguments(str(tmp_path), **common, **own, pipeline_parallel_num_microbatches="2")
        trainer = kind(make_decoder("llama"), args, train_dataset=rows, data_collator=collator)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([entry[key] for entry in entries for key in ("loss", "grad_norm")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
