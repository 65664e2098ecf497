"""Layers that were frozen are trained again: to the bit as in a plain loop, and no stored row outlives its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.elastic.transition import check_unfreezing
from hf_pipetransformer.freeze.policies import Fixed, describe_outlook, outlook
from hf_pipetransformer.freeze.policy import DecisionClock, FreezePolicy, FreezeSignal, decide
from hf_pipetransformer.schedules.layout import Layout
from tests.freeze.test_freeze import policy_of
from tests.planning.test_planning import layout_of, plan, rules_for
from tests.support.models import build_model, collate, make_dataset


L = 4
NUM_SAMPLES, BATCH_SIZE = 12, 4
RATE, DECAY = 1e-3, 0.1
Table = dict[int, int]


# ---- policies


class Says(FreezePolicy):
    may_unfreeze = True

    def __init__(self, answer: float) -> None:
        self.answer = answer

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return self.answer


def signal(num_frozen: int, **fields: Any) -> FreezeSignal:
    return FreezeSignal(5, 100, L, num_frozen, float(num_frozen), **fields)


@pytest.mark.parametrize(("answer", "expected"), [(0.5, 1), (0, 1), (-3, 1), (2, 2), (3, 3), (9, 4)])
def test_an_answer_of_fewer_layers_unfreezes_but_not_what_the_script_froze(answer: float, expected: int) -> None:
    decision = decide(Says(answer), signal(3, num_frozen_by_user=1), 0)
    assert decision.num_frozen == expected
    assert (decision.unfreezes, decision.freezes) == (expected < 3, expected > 3)
    assert decision.target_num_frozen == answer
    assert decision.as_event()["unfreezes"] == decision.unfreezes


def test_a_table_may_unfreeze_only_if_it_has_fewer_layers_later() -> None:
    growing, falling = Fixed({5: 2, 9: 3}), policy_of("fixed", "9:0,20:2,5:3")
    assert not growing.may_unfreeze
    assert decide(growing, FreezeSignal(5, 100, L, 3, 3.0), 0).num_frozen == 3
    assert falling.may_unfreeze
    assert [falling.frozen_until(step, 100) for step in (0, 5, 9, 20)] == [100, 9, 100, 100]
    assert growing.frozen_until(5, 100) == 100
    assert falling.frozen_until(5, 100, num_frozen_by_user=3) == 100


def test_shares_of_a_table_are_rounded_to_layers() -> None:
    falling = policy_of("fixed", "0:2/3,1/5:1/3,2/5:0")
    assert falling.may_unfreeze
    assert falling.table == {}
    assert falling.check(6, 100) == []
    assert falling.describe().startswith("fixed, 2/3 of the layers at step 0, 1/3 of the layers at 1/5 of the run")
    assert [decide(falling, FreezeSignal(step, 100, 6, 6, 0.0), 0).num_frozen for step in (0, 20, 40)] == [4, 2, 0]
    assert falling.frozen_until(20, 100) == 40
    falling.check(12, 100)
    assert falling.table == {0: 8, 20: 4, 40: 0}


def test_a_table_is_overdue_where_other_layers_are_frozen_than_it_says() -> None:
    table = Fixed({0: 3, 50: 0})
    assert [table.is_overdue(step, frozen) for step, frozen in ((0, 0), (30, 0), (30, 3), (60, 3), (60, 0))] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert not table.is_overdue(60, 2, num_frozen_by_user=2)
    assert not Fixed({10: 2}).is_overdue(5, 1)


def test_layers_stay_frozen_until_fewer_are_than_now() -> None:
    """What only later freezes unfreezes alone."""
    table = Fixed({0: 1, 10: 3, 15: 1, 20: 0})
    assert [table.frozen_until(step, 100) for step in (0, 9, 10, 14, 15, 20)] == [20, 20, 15, 15, 20, 100]
    assert table.frozen_until(0, 100, num_frozen_by_user=1) == 100
    assert table.frozen_until(12, 100, num_frozen_by_user=1) == 15
    assert Fixed({5: 2, 9: 0}).frozen_until(0, 100, num_frozen_by_user=1) == 100


def test_the_outlook_counts_on_rows_of_layers_that_a_later_unfreeze_leaves_frozen() -> None:
    coming = [(0, 1), (10, 3), (15, 1)]
    policy = Fixed(dict(coming))
    assert "gains nothing" not in describe_outlook(policy, coming, L, 0, 40, 20)
    assert "gains nothing" in describe_outlook(policy, [*coming, (18, 0)], L, 0, 40, 20)


def test_the_outlook_says_what_unfreezes_and_whether_rows_are_read_until_then() -> None:
    clock = DecisionClock(10, 0, 40)
    policy = Fixed({0: 3, 20: 0})
    coming = outlook(policy, clock, L, 0, 0)
    assert coming == [(0, 3), (20, 0)]
    text = describe_outlook(policy, coming, L, 0, 40, 10)
    assert "at most 3 from step 0 on, 0 from step 20 on (unfrozen) are frozen" in text
    assert "gains nothing" not in text
    assert "gains nothing" in describe_outlook(policy, coming, L, 0, 40, 20)
    assert outlook(policy, clock, L, 1, 0, num_frozen_by_user=1) == [(0, 3), (20, 1)]
    assert "may be unfrozen again" in describe_outlook(policy, [(10, 2)], L, 0, 40, 10)


# ---- planning


def test_a_pipeline_grows_back_when_layers_unfreeze_and_no_further() -> None:
    start = layout_of(L, 4, 4)
    rules = rules_for(L, compression="memory", initial_largest_size=1e-9)
    short = Layout(L, 3, 1, 4, (0, 10), 1, "1f1b")
    # Nothing fits but what is longest.
    assert plan(short, 0, rules).layout.pipeline_size == 1
    assert sorted(plan(short, 0, rules_for(L, initial_size=4)).alternatives) == [1, 2, 4]
    grown = plan(short, 0, rules_for(L, compression="memory", initial_largest_size=1e-9, initial_size=4)).layout
    assert (grown.pipeline_size, grown.num_replicas, grown.boundaries) == (4, 1, start.boundaries)
    assert sorted(plan(short, 3, rules_for(L, initial_size=4)).alternatives) == [1]


def test_unfreezing_is_refused_where_it_has_not_been_verified() -> None:
    options: dict[str, Any] = {"output_dir": "", "report_to": "none", "pipeline_schedule": "async_1f1b"}
    args, falling = PipeTransformerArguments(**options), Fixed({2: 3, 5: 0})
    layouts = {step: replace(layout_of(L, 2, 2), num_frozen_layers=frozen) for step, frozen in falling.table.items()}
    with pytest.raises(ValueError, match="'async_1f1b' while the freeze policy 'fixed' may unfreeze layers"):
        check_unfreezing(args, falling, None, 2)
    with pytest.raises(ValueError, match="'async_1f1b' while layout_plan may unfreeze layers"):
        check_unfreezing(args, Fixed({2: 3}), layouts, 2)
    check_unfreezing(args, Fixed({2: 3}), None, 2)
    check_unfreezing(args, falling, None, 1)
    check_unfreezing(args, falling, {2: layouts[2]}, 2)


# ---- runs of one process


class Watch(TrainerCallback):
    """Notes in each step which of the embeddings and layers are in training mode, and frozen."""

    def __init__(self) -> None:
        self.training: list[list[bool]] = []
        self.num_with_state: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.append([block.training for block in blocks_of(kwargs["model"])])
        self.num_with_state.append(len(kwargs["optimizer"].state))


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    return [model.bert.embeddings, *model.bert.encoder.layer]


def trainer_of(folder: Path, table: str | None, max_steps: int, **changes: Any) -> PipeTransformerTrainer:
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH_SIZE, "max_steps": max_steps,
        "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "learning_rate": RATE, "weight_decay": DECAY, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0,
        "freeze_policy": "fixed", "freeze_at": table, "activation_cache": "off",
        "activation_cache_dir": str(folder / "cache"),
    }  # fmt: skip
    model = changes.pop("model", None) or build_model("bert_sequence")
    parts = {name: changes.pop(name) for name in ("policy", "callbacks") if name in changes}
    if "policy" in parts:
        options["freeze_policy"] = "none"
    rows = make_dataset("bert_sequence", NUM_SAMPLES)
    data = {"train_dataset": rows, "eval_dataset": rows.select(range(5)), "data_collator": collate}
    return PipeTransformerTrainer(model, PipeTransformerArguments(**options | changes), **data, **parts)


def logged(trainer: PipeTransformerTrainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "pipetransformer_events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def by_hand(table: Table, max_steps: int, model: PreTrainedModel | None = None) -> tuple[PreTrainedModel, list[float]]:
    """The same in plain torch: what is frozen has no gradient, and no state when it is unfrozen."""
    model = model or build_model("bert_sequence")
    users = {name: p.requires_grad for name, p in model.named_parameters()}
    plain = [p for name, p in model.named_parameters() if users[name] and (name.endswith("bias") or "Norm" in name)]
    rest = [p for name, p in model.named_parameters() if users[name] and not any(p is other for other in plain)]
    groups = [{"params": rest, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (max_steps - step) / max_steps)
    data, losses = make_dataset("bert_sequence", NUM_SAMPLES), []
    model.train()
    for step in range(max_steps):
        if step in table:
            # The embeddings freeze with the first layer.
            num_blocks = table[step] + 1 if table[step] else 0
            frozen = {p for block in blocks_of(model)[:num_blocks] for p in block.parameters()}
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(users[name] and parameter not in frozen)
                if parameter in frozen:
                    optimizer.state.pop(parameter, None)
        first = step * BATCH_SIZE % NUM_SAMPLES
        loss = model(**collate([data[index] for index in range(first, first + BATCH_SIZE)])).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for name, value in model.named_parameters():
        assert torch.equal(value, expected.get_parameter(name)), name


def test_unfrozen_layers_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Among the first four steps all layers but one are frozen, then one is, then none."""
    watch, table, max_steps = Watch(), {1: 3, 4: 1, 6: 0}, 9
    trainer = trainer_of(tmp_path, "1:3,4:1,6:0", max_steps, callbacks=[watch])
    trainer.train()
    model, losses = by_hand(table, max_steps)
    assert logged(trainer) == pytest.approx(losses, rel=1e-7)
    assert_equal(trainer.model, model)
    num_frozen = [0, 3, 3, 3, 1, 1, 0, 0, 0]
    assert watch.training == [[not frozen or block > frozen for block in range(L + 1)] for frozen in num_frozen]
    states = dict(zip(num_frozen, watch.num_with_state, strict=True))
    assert states[0] == len(list(model.parameters())) > states[1] > states[3]
    assert [event["unfreezes"] for event in events_of(tmp_path, "freeze")] == [False, True, True]
    assert trainer.layout.num_frozen_layers == 0


def test_what_the_script_froze_is_not_unfrozen(tmp_path: Path) -> None:
    def model() -> PreTrainedModel:
        found = build_model("bert_sequence")
        for block in blocks_of(found)[:2]:
            block.requires_grad_(False)
        return found

    trainer = trainer_of(tmp_path, "1:3,3:0", 5, model=model())
    trainer.train()
    assert trainer.layout.num_frozen_layers == 1
    expected, losses = by_hand({1: 3, 3: 1}, 5, model())
    assert logged(trainer) == pytest.approx(losses, rel=1e-7)
    assert_equal(trainer.model, expected)


def test_rows_of_before_a_unfreeze_are_never_served(tmp_path: Path) -> None:
    """Layers freeze, unfreeze and freeze again, two passes over the data, one and two."""
    found = {}
    for mode in ("on", "off"):
        options = {"activation_cache": mode, "logging_steps": 3, "eval_strategy": "epoch"}
        trainer = trainer_of(tmp_path / mode, "0:2,6:0,9:2", 15, **options)
        trainer.train()
        found[mode] = trainer
    passes = [event for event in events_of(tmp_path / "on", "cache") if event["what"] == "epoch"]
    counts = [(event["hits"], event["misses"]) for event in passes]
    # What is stored while layers are frozen again is of other weights; while none is, nobody asks for any.
    assert counts == [(0, 12), (12, 0), (0, 0), (0, 12), (12, 0)]
    assert logged(found["on"], "cache_hit_rate") == [0, 1, 0, 1]
    decided = [event for event in events_of(tmp_path / "on", "cache") if event["what"] == "decision"]
    assert [(event["level"], event["epochs_left"]) for event in decided] == [(2, 2), (0, 3), (2, 2)]
    for key in ("loss", "eval_loss"):
        assert logged(found["on"], key) == pytest.approx(logged(found["off"], key), rel=1e-5)
    assert_equal(found["on"].model, found["off"].model)
    moves = events_of(tmp_path / "on", "transition")
    assert [(event["to"]["num_frozen_layers"], event["to"]["cache_level"]) for event in moves] == [
        *((2, 2), (0, 0), (2, 2)),
    ]
