"""Losses of the whole batch in one process that cuts it; `tests/distributed/test_whole_loss.py` has stages."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, Trainer

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.comm.errors import LossDoesNotDecomposeError
from hf_pipetransformer.compat.known_losses import KnownLoss
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.runtime import joining
from hf_pipetransformer.startup.planner import RunPlanner
from hf_pipetransformer.training import builder, gains, synchronous
from hf_pipetransformer.training.evaluation import Evaluation
from tests.support import whole_losses
from tests.support.whole_losses import INSIDE, LOSSES, train, wrong


IN_CI = ("weighted", "span", "contrastive", "hardest", "words_by_length", "dice")
CASES = [(name, False) for name in LOSSES] + [(name, True) for name in INSIDE]
CI_CASES = [(name, False) for name in IN_CI] + [("two_heads", True)]


@pytest.mark.parametrize(
    ("name", "is_inside"), [pytest.param(*case, marks=[] if case in CI_CASES else pytest.mark.slow) for case in CASES]
)
def test_any_loss_of_a_batch_cut_in_two_is_that_of_the_whole(name: str, is_inside: bool, tmp_path: Path) -> None:
    expected = train(name, is_inside, tmp_path)
    assert not wrong(expected, train(name, is_inside, tmp_path, pipeline_parallel_num_microbatches=2))


def test_parts_of_a_loss_that_is_not_known_are_added_at_the_word_of_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    options = {"pipeline_parallel_num_microbatches": 2, "pipeline_loss": "parts"}
    assert not wrong(train("mean", False, tmp_path), train("mean", False, tmp_path, **options))
    assert "nothing checks that it is a mean over samples" in caplog.text


def test_arguments_stay_as_the_script_gave_them(tmp_path: Path) -> None:
    """Also where another schedule runs than they name, as for a loss of whole batches; but for a trainer's mark."""
    options: dict[str, Any] = {
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1, "remove_unused_columns": False,
        "per_device_train_batch_size": 4, "pipeline_parallel_num_microbatches": 2,
    }  # fmt: skip
    args = PipeTransformerArguments(str(tmp_path), **options)
    before = dict(vars(args))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=60, **sizes)
    trainer = whole_losses.PipedOwn(
        whole_losses.Heads(config), args, train_dataset=whole_losses.rows(), data_collator=whole_losses.collate
    )
    trainer.loss = LOSSES["contrastive"]
    trainer.train()
    assert trainer.layout is not None and trainer.layout.schedule == "gpipe" != args.pipeline_schedule
    assert {name for name, value in vars(args).items() if name not in before or before[name] != value} == {"is_taken"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_whose_parts_do_not_add_up_runs_again_as_a_whole(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a loss that is taken for one of those whose rule is known."""
    # Of several batches, what Trainer has added up before stays.
    expected = train("weighted", False, tmp_path, accumulation=accumulation)
    for module in (builder, synchronous):
        monkeypatch.setattr(module, "known_loss", lambda *_: KnownLoss.MEAN)
    caplog.set_level(logging.WARNING)
    found = train("weighted", False, tmp_path, accumulation=accumulation, pipeline_parallel_num_microbatches=2)
    assert "This step is run again" in caplog.text
    assert not wrong({**expected, "evaluated": None}, found)


def test_a_known_loss_is_checked_in_the_first_steps_and_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[bool] = []
    own = synchronous.LossCheck._begin_step

    def noting(check: synchronous.LossCheck) -> None:
        own(check)
        due.append(check._is_due)

    monkeypatch.setattr(synchronous.LossCheck, "_begin_step", noting)
    for module in (builder, synchronous):
        monkeypatch.setattr(module, "known_loss", lambda *_: KnownLoss.MEAN)
    monkeypatch.setattr(synchronous, "NUM_FIRST", 2)
    monkeypatch.setattr(synchronous, "INTERVAL", 4)
    train("mean", False, tmp_path, pipeline_parallel_num_microbatches=2)
    assert due == [True, True, False, False, True]


def counted(folder: Path, **options: Any) -> tuple[Any, ...]:
    """What a loss has counted and drawn during a training, in a closure."""
    calls, generator = {"list": [], "count": 0}, torch.Generator().manual_seed(0)
    total, noise, number = torch.zeros(()), deque[float](), 0

    def loss(out: Any, batch: Any) -> torch.Tensor:
        nonlocal number
        calls["list"].append(len(batch["labels"]))
        calls["count"] += 1
        number += 1
        total.add_(1)
        noise.append(float(torch.rand((), generator=generator)))
        return cross_entropy(out["logits"], batch["labels"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, "counting", loss)
        losses = train("counting", False, folder, **options)["losses"]
    return calls, float(total), list(noise), number, [round(value, 4) for value in losses]


def test_the_inspection_leaves_no_trace_in_what_a_loss_counts_and_draws(tmp_path: Path) -> None:
    assert counted(tmp_path, pipeline_parallel_num_microbatches=2) == counted(tmp_path)


def test_where_the_loss_of_the_whole_batch_does_not_fit_a_warning_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RunPlanner, "fits", lambda _plans, layout: layout.schedule != "gpipe")
    caplog.set_level(logging.WARNING)
    expected = train("mean", False, tmp_path)
    assert not wrong(expected, train("mean", False, tmp_path, pipeline_parallel_num_microbatches=2))
    assert "which is not expected to fit in memory. Use more" in caplog.text
    caplog.clear()
    options = {"pipeline_parallel_num_microbatches": 2, "pipeline_loss": "parts"}
    assert not wrong(expected, train("mean", False, tmp_path, **options))
    assert "which is not expected to fit" not in caplog.text


def test_replicas_whose_batches_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: Any = SimpleNamespace(replica_control=None, num_replicas=2)
    found = [{"shape": [4, length, 8], "inputs": {}} for length in (5, 6)]
    monkeypatch.setattr(joining, "all_gather_trees", lambda *_: found)
    with pytest.raises(joining.BatchesDifferError, match="that enter the head have shapes"):
        joining.ReplicaJoin(groups, frozenset())._exchange([4, 5, 8], SampleBatch())
    batches = [SampleBatch({"input_ids": torch.zeros(2, 3), "spans": torch.zeros(2, each)}) for each in (3, 4)]
    with pytest.raises(joining.BatchesDifferError, match="needs equal ones behind the first dimension"):
        joining._concatenated(batches, joining.Axis())


def test_what_a_loss_changes_and_no_other_rank_can_get_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gains, "_LARGEST", 10)

    class Keeping(Trainer):
        def __init__(self) -> None:
            self.queue, self.parts, self.named = torch.zeros(20), [1.0], {"first": object()}
            self.state = self.control = self.model = cast(Any, None)

        def compute_loss(self, *_args: Any, **_options: Any) -> Any:
            self.queue.add_(1)
            self.parts.append(2.0)

    trainer, other = Keeping(), Keeping()
    sent: list[Any] = []
    source: Any = SimpleNamespace(rank=1, world_size=2, gather=lambda message: sent.append(message) or sent)
    kept = gains.LossGains(trainer, source)
    with kept.watching():
        trainer.compute_loss()
        trainer.named["second"] = SimpleNamespace(value=1.0)
    kept.share(cast(Any, SimpleNamespace(pipeline_size=2, is_last=True, replica=0)))
    caplog.set_level(logging.WARNING)
    receiver: Any = SimpleNamespace(rank=0, world_size=2, gather=lambda message: [message, *sent])
    gains.LossGains(other, receiver).share(cast(Any, SimpleNamespace(pipeline_size=2, is_last=False, replica=0)))
    assert other.parts == [1.0, 2.0]
    assert "compute_loss changes self.named.second.value and self.queue. With several stages only" in caplog.text


def test_an_empty_data_set_is_named(tmp_path: Path) -> None:
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1, pipeline_parallel_num_microbatches=2
    )
    trainer = PipeTransformerTrainer(whole_losses.Heads(BertConfig(num_hidden_layers=2)), args, train_dataset=[])
    with pytest.raises(ValueError, match="training data set has no samples"):
        trainer.pipeline_run.pipelined.inspect(Request([], "Training", 2, None, True), is_training=True)


def test_predictions_of_replicas_need_one_row_a_sample() -> None:
    groups: Any = SimpleNamespace(replica=0, num_replicas=2, is_first=True)
    loader: Any = SimpleNamespace(samples_of_replicas=lambda: [4, 4], progress=SimpleNamespace(size=8))
    evaluation: Any = SimpleNamespace(groups=groups, loader=loader, is_for_first_rank=False, is_flattened=False)
    Evaluation._check_rows(evaluation, torch.zeros(4, 2))
    with pytest.raises(ValueError, match="expected one row a sample, as each replica"):
        Evaluation._check_rows(evaluation, torch.zeros(12, 2))


@pytest.mark.parametrize("schedule", ["async_1f1b", "token"])
def test_schedules_that_have_no_whole_batch_refuse_a_loss_that_is_not_known(schedule: str, tmp_path: Path) -> None:
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", pipeline_schedule=schedule,
        pipeline_parallel_num_microbatches=2,
    )  # fmt: skip
    model = whole_losses.Heads(BertConfig(num_hidden_layers=2))
    trainer = whole_losses.PipedOwn(model, args, train_dataset=whole_losses.rows(8))
    with pytest.raises(LossDoesNotDecomposeError, match="is not known to be their mean or sum"):
        trainer.train()
