"""Skipping weight gradients: the programme, what is skipped, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.autopipe.skip_plan import SKIPPED, SkipPlan, is_enough, plan_skips
from hf_pipetransformer.autopipe.skip_programme import SkipGraph, choose_shares
from hf_pipetransformer.freeze.policies import Timely, make_policy
from hf_pipetransformer.freeze.skipping import draw_skipped, skippable_layers
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.schedules import find_schedule
from hf_pipetransformer.placement import Placement
from hf_pipetransformer.report.events import SkipPhase, read_skips
from hf_pipetransformer.run import skipping as run_skipping
from hf_pipetransformer.run.skipping import TRIAL_STEPS, shares_at
from tests.models import build_model, collate, make_dataset
from tests.skipped import (
    GLOBAL_BATCH,
    MODEL,
    SHARES,
    largest_difference,
    norms_and_losses,
    plain,
    skipping,
    write_plan,
)


def graph(schedule: str, forward: tuple[float, ...], saved: tuple[float, ...], **more: Any) -> SkipGraph:
    """Two micro-batches; a backward takes as long as two forwards."""
    size, first = len(forward), more.pop("first", 0)
    table = find_schedule(schedule).table(size, 2, 1, first)
    return SkipGraph(table, Placement(size), forward, tuple(2 * each for each in forward), saved, **more)


# ---- the programme


@pytest.mark.parametrize(
    ("case", "most", "shares", "seconds"),
    [
        # F0 F1 .  B1 . B0 and so on: everything lies on the critical path. 9, of which half of 3 go.
        (graph("gpipe", (1.0, 1.0), (1.0, 1.0)), 0.5, (0.5, 0.5), 7.5),
        # Rank 1 has 2 * 3 = 6 to do, between the first forward and the last backward of rank 0: 1 + 6 + 2.
        (graph("1f1b", (1.0, 1.0), (1.0, 1.0)), 0.5, (0.5, 0.5), 7.5),
        (graph("1f1b", (1.0, 1.0), (1.0, 1.0)), 0.25, (0.25, 0.25), 8.25),
        # A slow rank 0, F0 F1 B0 B1 of 2 2 4 4, that waits for nobody but for 0.1 + 0.1 + 0.2 in the middle: rank 1
        # is ready with its second backward long before.
        (graph("1f1b", (2.0, 0.1), (2.0, 0.1)), 0.5, (0.5, 0.0), 10.0),
        # Rank 0: F0 F1 . I0 W0 I1 W1, rank 1: . F0 I0 F1 I1 W0 W1. The last weights of rank 1 are off the path as soon
        # as those of rank 0, which begin when rank 1 has done a quarter of its own, take longer.
        (graph("zb_h1", (1.0, 1.0), (1.0, 1.0)), 0.5, (0.5, 0.25), 6.5),
        (graph("zb_h1", (2.0, 1.0), (2.0, 1.0)), 0.5, (0.5, 0.0), 10.0),
        # Nothing to gain.
        (graph("1f1b", (1.0, 1.0), (0.0, 0.0)), 0.5, (0.0, 0.0), 9.0),
        # Messages: two forward and two back on the critical path of 1F1B with one batch behind the other.
        (graph("gpipe", (1.0, 1.0), (1.0, 1.0), hop=0.5), 0.5, (0.5, 0.5), 8.5),
        # The first stage is frozen.
        (graph("1f1b", (1.0, 1.0), (1.0, 1.0), first=1), 0.5, (0.0, 0.5), 6.0),
        # One stage: two forwards and two backwards.
        (graph("1f1b", (1.0,), (1.0,)), 0.5, (0.5,), 5.0),
    ],
)  # fmt: skip
def test_shares_are_those_found_by_hand(
    case: SkipGraph, most: float, shares: tuple[float, ...], seconds: float
) -> None:
    assert choose_shares(case, most) == pytest.approx(shares, abs=1e-5)
    assert case.seconds(shares) == pytest.approx(seconds)


lengths = st.tuples(*[st.floats(0.1, 4)] * 3)


@settings(max_examples=25)
@given(st.sampled_from(("gpipe", "1f1b", "zb_h1")), lengths, lengths, st.floats(0, 1), st.floats(0.1, 0.9))
def test_no_other_shares_end_sooner_and_less_skipping_ends_later(
    schedule: str, forward: tuple[float, ...], parts: tuple[float, ...], hop: float, most: float
) -> None:
    case = graph(schedule, forward, tuple(min(p, 2 * f) for p, f in zip(parts, forward, strict=True)), hop=hop)
    shares = choose_shares(case, most)
    assert all(0 <= share <= most for share in shares)
    # All that may be skipped ends soonest: the bound is the same for all stages.
    end = case.seconds(shares)
    assert end == pytest.approx(case.seconds((most,) * 3), rel=1e-5)
    for stage, share in enumerate(shares):
        if share > 0.01:
            less = [each - 0.01 * (at == stage) for at, each in enumerate(shares)]
            assert case.seconds(less) > end * (1 + 1e-6) or case.saved[stage] < 1e-3


# ---- from measurements


def reports(backward: tuple[float, ...], total: float, shares: tuple[float, ...]) -> list[dict[str, float]]:
    return [
        {"forward": 2.0, "backward": each, "total": total, SKIPPED: share}
        for each, share in zip(backward, shares, strict=True)
    ]


def test_a_plan_says_how_long_a_step_takes() -> None:
    """M=2 of 1F1B, forwards of 1, backwards of 2, whose weight gradients take 0.8 and 0.4; a step takes 3 beside."""
    layout = Layout(2, 0, 2, 1, (0, 3, 6), 2, "1f1b")
    measured = [reports((4.0, 4.0), 12.0, (0.0, 0.0)), reports((3.2, 3.6), 12.0 - 1.8 - 0.5, (0.5, 0.5)), [{}, {}]]
    assert is_enough(measured, 1) and not is_enough(measured, 2)
    plan = plan_skips(layout, measured, 0.5, hop=0.0, num_microbatches=2)
    assert plan.graph.saved == pytest.approx((0.8, 0.4))
    assert plan.unskipped_seconds == pytest.approx(12)
    assert plan.pipeline_seconds == pytest.approx(9 - 0.5 * (0.8 + 2 * 0.4))
    saves_beside = (12 - 9) - (12 - 1.8 - 0.5 - plan.pipeline_seconds)
    assert plan.seconds == pytest.approx(12 - (9 - plan.pipeline_seconds) - saves_beside)
    assert json.loads(json.dumps(plan.as_event()))["shares"] == pytest.approx([0.5, 0.5])


def test_nothing_is_skipped_where_that_gains_nothing() -> None:
    layout = Layout(2, 0, 2, 1, (0, 3, 6), 2, "1f1b")
    measured = [reports((4.0, 4.0), 12.0, (0.0, 0.0)), reports((3.2, 3.6), 14.0, (0.5, 0.5))]
    assert plan_skips(layout, measured, 0.5, 0.0, 2).shares == (0.0, 0.0)


# ---- what is skipped


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 5))
def test_a_draw_holds_its_share_but_for_one_layer(sizes: list[int], share: float, seed: int) -> None:
    drawn = draw_skipped(sizes, share, str(seed))
    assert drawn == draw_skipped(sizes, share, str(seed)) == sorted(set(drawn))
    assert abs(sum(sizes[at] for at in drawn) - share * sum(sizes)) <= max(sizes)


def test_a_share_is_kept_on_average_and_all_layers_take_turns() -> None:
    sizes = [1, 1, 1, 1, 4, 4]
    draws = [draw_skipped(sizes, 0.3, str(seed)) for seed in range(4000)]
    assert sum(sizes[at] for drawn in draws for at in drawn) / 4000 == pytest.approx(0.3 * 12, rel=0.03)
    counts = [sum(at in drawn for drawn in draws) / 4000 for at in range(6)]
    assert min(counts) > 0.2 and max(counts) < 0.4


def test_layers_that_multiply_by_a_matrix_of_their_own_may_be_skipped() -> None:
    model = build_model("bert_masked")
    layers = skippable_layers(model, dict(model.named_parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)] for layer in layers for parameter in layer.parameters}
    # Six linear layers in each of four, and that of the head; its last matrix is that of the embeddings.
    assert len(layers) == 6 * 4 + 1
    assert all(name.endswith((".weight", ".bias")) for name in found)
    assert not any("embeddings" in name or "LayerNorm" in name or "decoder" in name for name in found)
    assert skippable_layers(model, {}) == []


def test_the_shares_of_a_step_follow_from_the_phases(tmp_path: Path) -> None:
    phases = read_skips(str(write_plan(tmp_path / "plan.jsonl", 2, 1)))
    assert phases == [SkipPhase(0, False, ()), SkipPhase(0, True, (0.5, 0.5)), SkipPhase(2, False, SHARES[2])]
    assert [shares_at(phases, step) for step in range(4)] == [(), (0.5, 0.5), SHARES[2], SHARES[2]]


def test_what_does_not_go_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def args(**options: Any) -> PipeTransformerArguments:
        return PipeTransformerArguments(str(tmp_path), use_cpu=True, freeze_policy="timely", **options)

    assert make_policy("timely", 1 / 3, "inclusive", None, max_ratio=0.3).most_skipped == 0.3
    assert args(freeze_max_ratio="0.25").freeze_max_ratio == 0.25
    for options, text in (
        ({"pipeline_schedule": "async_1f1b"}, "expected one of"),
        ({"pipeline_schedule": "zb_v"}, "expected one of"),
        ({"activation_cache": "on"}, "there is nothing to store"),
        ({"torch_compile": True}, "compiled anew"),
        ({"full_determinism": True}, "decides by measured times"),
        ({"freeze_max_ratio": 1.0}, "between 0 and 1, both excluded"),
    ):
        with pytest.raises(ValueError, match=text):
            args(**options)
    with pytest.raises(ValueError, match="freeze_max_ratio=0.3 needs freeze_policy='timely'"):
        PipeTransformerArguments(str(tmp_path), use_cpu=True, freeze_max_ratio=0.3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"scipy, which is not installed: pip install"):
        Timely()


# ---- runs


def test_a_step_is_that_of_trainer_without_the_gradients_that_are_skipped(tmp_path: Path) -> None:
    """Also for the norm that clips, and for the optimizer: no decay, no moments of what is skipped."""
    plan = write_plan(tmp_path / "plan.jsonl", 1, 1)
    ours, note = skipping(tmp_path / "ours", plan, per_device_train_batch_size=GLOBAL_BATCH)
    ours.train()
    sizes = [sum(ours.model.get_parameter(name).numel() for name in names) for names in note.without]
    assert sizes[0] == 0 and min(sizes[1:]) > 0 and note.without[2] != note.without[3]
    reference = plain(tmp_path / "plain", note.without)
    assert norms_and_losses(ours) == [pytest.approx(each, rel=1e-5) for each in norms_and_losses(reference)]
    assert largest_difference(ours.model.state_dict(), reference.model.state_dict()) < 1e-5
    assert all(parameter.requires_grad for parameter in ours.model.parameters())


def trainer_of(folder: Path, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=TRIAL_STEPS + 6, save_steps=1,
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-3,
        freeze_policy="timely", freeze_warmup=0.1, **options,
    )  # fmt: skip
    data = make_dataset(MODEL, 12)
    return PipeTransformerTrainer(build_model(MODEL), args, train_dataset=data, data_collator=collate)


def skips(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "pipetransformer_events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "profile" and event["what"].startswith("skip")]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 7, TRIAL_STEPS + 4])
def test_a_resumed_run_skips_as_one_that_was_never_interrupted(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in and after the trial; what is chosen comes from a clock, here it does not. And replayed."""
    seen: list[int] = []

    def choose(layout: Layout, measured: Any, *args: Any) -> SkipPlan:
        seen.append(len(measured))
        return SkipPlan((0.4,), 1.0, 1.0, 2.0, SkipGraph((), Placement(1), (1.0,), (1.0,), (1.0,)))

    monkeypatch.setattr(run_skipping, "plan_skips", choose)
    whole = trainer_of(tmp_path / "whole")
    whole.train()
    saved = tmp_path / "resumed" / f"checkpoint-{step}"
    shutil.copytree(tmp_path / "whole" / saved.name, saved)
    resumed = trainer_of(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(saved))
    for name, value in whole.model.named_parameters():
        assert torch.equal(value, resumed.model.get_parameter(name)), name
    assert [event["shares"] for event in skips(tmp_path / "whole")] == [[0.5], [0.4]]
    assert seen == [TRIAL_STEPS] * (2 if step < TRIAL_STEPS else 1)
    replayed = trainer_of(tmp_path / "replayed", layout_plan=str(tmp_path / "whole" / "pipetransformer_events.jsonl"))
    replayed.train()
    for name, value in whole.model.named_parameters():
        assert torch.equal(value, replayed.model.get_parameter(name)), name
