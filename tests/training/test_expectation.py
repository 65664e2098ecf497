"""What a run in which layers freeze is expected to take, said before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.forecast import Forecast
from hf_pipetransformer.report import duration
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.training import builder, expectation
from hf_pipetransformer.training import start as beginning
from hf_pipetransformer.training.expectation import in_words
from tests.planning.test_forecast import costs_of
from tests.support.models import build_model, collate, make_dataset


def trainer_of(folder: Path, **changes: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        **{"freeze_policy": "fixed", "freeze_at": "0:2", "activation_cache": "off", "num_train_epochs": 2,
           "per_device_train_batch_size": 4, "learning_rate": 1e-3, **changes},
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    return PipeTransformerTrainer(build_model("bert_sequence"), args, train_dataset=data, data_collator=collate)


def planted(_trainer: Any, pipeline: Any, _cache: Any) -> Forecast:
    costs = costs_of(2 * pipeline.layout.num_layers + 2)
    inputs = replace(pipeline.start_up.plans.inputs(pipeline.layout), blocks=costs, overheads=Overheads())
    return Forecast(pipeline.layout, inputs)


def expected(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The expectations of a run that was made anew, as events."""
    trainer = trainer_of(folder, save_strategy="no", **changes)
    trainer.train()
    events = read_events(str(folder / EVENTS_FILE))
    return [each for each in events if each["event"] == "profile" and each["what"] == "expectation"]


def seconds(num_layers: int, num_frozen: int) -> int:
    """Of a step of 4 samples: a second for a forward, two for a backward, one for the lowest block that has one."""
    blocks = 2 * num_layers + 2
    trained = blocks - (1 + 2 * num_frozen if num_frozen else 0)
    return 4 * (blocks + 1 + 2 * (trained - 1))


def test_a_run_says_what_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six steps, of which the last four have two layers frozen."""
    monkeypatch.setattr(beginning, "make_forecast", planted)
    (event,) = expected(tmp_path, freeze_at="2:2")
    num_layers = read_events(str(tmp_path / EVENTS_FILE))[0]["layout"]["num_layers"]
    full = 6 * seconds(num_layers, 0)
    frozen = 2 * seconds(num_layers, 0) + 4 * seconds(num_layers, 2)
    assert (event["step"], event["seconds"], event["full_seconds"]) == (0, frozen, full)
    said = f"Predicted training time: {duration(frozen)}, {frozen / full:.2f} of what it takes with nothing frozen."
    assert said in caplog.text
    assert f"training everything for {frozen / full:.2f} of the epochs, which takes as long." in caplog.text


def test_of_a_policy_that_is_not_certain_the_least_time_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beginning, "make_forecast", planted)
    (event,) = expected(tmp_path, freeze_policy="gradient_norm", freeze_at=None, freeze_warmup=0.0)
    assert event["seconds"] < event["full_seconds"]
    assert "Predicted training time: at least " in caplog.text
    assert "training everything for fewer epochs." in caplog.text


def test_a_plan_times_the_optimizer_on_what_a_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on small tensors alone, whose elements cost many times as much."""
    timed: list[int] = []

    def seconds(_optimizer: Any, copies: list[nn.Parameter], _max_norm: Any) -> float:
        timed.append(sum(copy.numel() for copy in copies))
        return 1e-9

    monkeypatch.setattr(expectation, "_seconds", seconds)
    trainer_of(tmp_path, freeze_at="1:2", save_strategy="no").train()
    planned = trainer_of(tmp_path, freeze_at="1:2", plan_only=True)
    with pytest.raises(SystemExit):
        planned.train()
    assert timed == [sum(parameter.numel() for parameter in planned.model.parameters())] * 2


def test_a_plan_knows_the_shares_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trainer_of(tmp_path, freeze_policy="none", freeze_at=None, freeze_layers="1/2", plan_only=True).train()
    assert "Frozen: 2 of 4 layers from step 0 on." in capsys.readouterr().out


def test_a_run_that_resumes_one_without_frozen_layers_freezes_them_at_once(tmp_path: Path) -> None:
    trainer_of(tmp_path, freeze_policy="none", freeze_at=None, save_steps=2, max_steps=2).train()
    trainer = trainer_of(tmp_path, freeze_policy="none", freeze_at=None, freeze_layers=2, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    moves = [e for e in read_events(str(tmp_path / EVENTS_FILE)) if e["event"] == "transition"]
    assert [(move["step"], move["to"]["num_frozen_layers"]) for move in moves] == [(2, 2)]


def test_where_nothing_can_freeze_or_layers_unfreeze_nothing_is_said(tmp_path: Path) -> None:
    assert expected(tmp_path / "late", freeze_at="100:2") == []
    assert expected(tmp_path / "unfreezes", freeze_at="1:2,3:0") == []


def test_a_run_measures_what_it_expects(tmp_path: Path) -> None:
    (event,) = expected(tmp_path, activation_cache="on")
    assert event["seconds"] > 0
    assert event["full_seconds"] > 0


def test_a_cache_without_frozen_layers_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = {"activation_cache": "on", "activation_cache_keep": True, "pipeline_parallel_num_microbatches": 2}
    assert expected(tmp_path, freeze_policy="none", freeze_at=None, **cache) == []
    for option in ("activation_cache='on'", "activation_cache_keep=True"):
        assert caplog.text.count(f"{option} has no effect: no layer of the stack is frozen or will be") == 1


def test_the_words_of_an_expectation() -> None:
    assert "0.80 of the epochs, which takes as long." in in_words(8, 10, True)
    assert "at least 8 s, 0.80 of what it takes with nothing more frozen. " in in_words(8, 10, False, 1)
    for certain in (True, False):
        assert in_words(10.3, 10, certain).endswith("with nothing frozen. Freezing saves no time in this run.")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0142, "14.2 ms"),
        (0.5, "500 ms"),
        (30.44, "30.4 s"),
        (119, "119 s"),
        (120, "2.0 minutes"),
        (9000, "2.5 hours"),
        (2.35e7, "272 days"),
    ],
)
def test_long_times_are_told_in_their_block(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_first_line_comes_before_the_inspection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def inspect(*_: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(builder, "inspect_model", inspect)
    with pytest.raises(ValueError, match="planted"):
        trainer_of(tmp_path).train()
    assert caplog.messages[0].startswith(
        "Inspecting the model (BertForSequenceClassification, 0.0385 million parameters)"
    )
