"""Law 7: whatever goes wrong ends the run on every rank, with the first cause named, and nothing hangs.

What Trainer takes in its stride, the pipeline does too: a loss that is not a number and a data set shorter than one
batch are cases of test_equality.py.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pipetransformer.options.refusals import check_launch
from tests.distributed.fault_worker import PLANTED, READY, SILENT, SLOW_SECONDS, train_with
from tests.distributed.launcher import LaunchResult, accelerate_launch
from tests.distributed.refusal_worker import ATTEMPTS, attempt_all
from tests.distributed.scenarios import WORKER, arguments_of, run, start


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

PIPELINE_TIMEOUT = 15
# Law 7: within the timeout and five seconds.
GRACE = PIPELINE_TIMEOUT + 5
# Ctrl-C stops every rank sooner.
INTERRUPT_SECONDS = 10


def run_with_fault(
    fault: str, output: Path, num_processes: int = 2, num_stages: int = 2, rank: int = 1, **options: Any
) -> LaunchResult:
    faulty = {
        "fault": fault,
        "num_stages": num_stages,
        "rank": rank,
        "timeout": options.pop("pipeline_timeout", PIPELINE_TIMEOUT),
        "schedule": options.pop("schedule", "1f1b"),
        "ranks_a_node": options.pop("ranks_a_node", 0),
    }
    return start(train_with, output, num_processes, faulty, timeout=120, check=False, **{"grace": GRACE} | options)


def assert_all_ended_by_themselves(result: LaunchResult, seconds: float) -> None:
    assert not result.timed_out, f"ended: {result.ended}"
    assert max(result.ended) - min(result.ended) < seconds
    assert all(code != 0 for code in result.returncodes), result.returncodes


# Rank, number of processes, K.
PLACES = [
    pytest.param(0, 2, 2, id="first-stage"),
    pytest.param(1, 2, 2, id="last-stage"),
    pytest.param(1, 2, 1, id="replica", marks=pytest.mark.slow),
    pytest.param(2, 4, 2, id="two-by-two", marks=pytest.mark.slow),
    pytest.param(1, 4, 4, id="middle-stage", marks=pytest.mark.slow),
]


def test_a_sound_run_ends_well(tmp_path: Path):
    """Else the tests below would show nothing."""
    result = start(train_with, tmp_path, 2, {"fault": "none", "max_steps": 5}, timeout=100)
    for rank, text in enumerate(result.outputs):
        assert f"rank {rank} trained to the end" in text


@pytest.mark.slow
def test_what_takes_long_between_steps_ends_no_run(tmp_path: Path):
    """Preparing, logging, saving and what follows it, each on one rank and longer than `pipeline_timeout`."""
    options = {"fault": "slow", "max_steps": 5, "timeout": SLOW_SECONDS - 3}
    result = start(train_with, tmp_path, 2, options, timeout=100)
    for rank, text in enumerate(result.outputs):
        assert f"rank {rank} trained to the end" in text


def test_a_rank_killed_before_the_loss_is_gathered_is_named(tmp_path: Path):
    result = run_with_fault("killed_before_log", tmp_path)
    assert READY in result.outputs[1]
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    assert "First cause: rank 1 does not answer" in result.outputs[0]


@pytest.mark.parametrize(("rank", "num_processes", "num_stages"), PLACES)
def test_a_rank_killed_in_mid_step_ends_all(tmp_path: Path, rank: int, num_processes: int, num_stages: int):
    result = run_with_fault("killed", tmp_path, num_processes, num_stages, rank)
    assert READY in result.outputs[rank]
    assert result.returncodes[rank] == -signal.SIGKILL
    # A closed connection tells the others at once, long before their patience ends.
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    for survivor in set(range(num_processes)) - {rank}:
        assert re.search(rf"\brank {rank}\b", result.outputs[survivor]), f"rank {survivor} does not name rank {rank}"


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        pytest.param("killed", 3, id="last-stage"),
        # It passes on the batches of its node.
        pytest.param("killed", 2, id="first-of-its-node", marks=pytest.mark.slow),
        pytest.param("exception", 3, id="exception", marks=pytest.mark.slow),
    ],
)
def test_a_rank_lost_on_another_node_of_its_pipeline_ends_all(tmp_path: Path, fault: str, rank: int):
    result = run_with_fault(fault, tmp_path, 4, 4, rank, ranks_a_node=2, strict_nccl=True)
    assert READY in result.outputs[rank]
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    for survivor in set(range(4)) - {rank}:
        assert re.search(rf"\brank {rank}\b", last_error(result.outputs[survivor])), f"rank {survivor}"
    cause = f"rank {rank} does not answer" if fault == "killed" else f"rank {rank}: RuntimeError: {PLANTED}"
    assert f"First cause: {cause}" in result.outputs[0]


@pytest.mark.parametrize(("rank", "num_processes", "num_stages"), PLACES)
def test_an_exception_in_compute_loss_reaches_every_rank(
    tmp_path: Path, rank: int, num_processes: int, num_stages: int
):
    result = run_with_fault("exception", tmp_path, num_processes, num_stages, rank)
    assert READY in result.outputs[rank]
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    for text in result.outputs:
        assert f"RuntimeError: {PLANTED}" in text
    for other in set(range(num_processes)) - {rank}:
        assert re.search(rf"\brank {rank}\b.*{PLANTED}", result.outputs[other]), f"rank {other}"


# The first one's forward of the fault runs ahead of its step, the last one's does not.
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("fault", ["killed", pytest.param("exception", marks=pytest.mark.slow)])
def test_a_fault_amid_steps_without_a_flush_ends_all(tmp_path: Path, fault: str, rank: int):
    result = run_with_fault(fault, tmp_path, rank=rank, schedule="async_1f1b")
    assert READY in result.outputs[rank]
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    assert re.search(rf"\brank {rank}\b", result.outputs[1 - rank])


@pytest.mark.parametrize("fault", ["out_of_memory", "out_of_memory_unnoticed"])
def test_a_rank_out_of_memory_ends_all_with_the_options_to_set(tmp_path: Path, fault: str):
    """Also if rank 0, which writes the event, waits for its device meanwhile."""
    result = run_with_fault(fault, tmp_path)
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    cause = (
        rf"OutOfMemoryError: {PLANTED} .*pipeline_parallel_size.*pipeline_compression='memory'.*pipeline_checkpoint"
    )
    assert re.search(rf"First cause: rank 1: {cause}", result.outputs[0])
    events = map(json.loads, (tmp_path / "pipetransformer_events.jsonl").read_text().splitlines())
    (fault,) = [event for event in events if event["event"] == "fault"]
    assert re.search(cause, fault["cause"])


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        pytest.param("exception_in_collator", 0, id="collator"),
        pytest.param("exception_in_callback", 1, id="callback"),
        pytest.param("exception_in_callback", 0, id="callback-of-rank-0", marks=pytest.mark.slow),
        pytest.param("exception_in_log", 0, id="log-of-rank-0"),
        pytest.param("exception_in_save", 1, id="save"),
        pytest.param("exception_in_save", 0, id="save-of-rank-0", marks=pytest.mark.slow),
    ],
)
def test_an_exception_elsewhere_reaches_every_rank(tmp_path: Path, fault: str, rank: int):
    result = run_with_fault(fault, tmp_path, rank=rank)
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    for text in result.outputs:
        assert PLANTED in text
    assert re.search(rf"\brank {rank}\b.*{PLANTED}", result.outputs[1 - rank])


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("worker_killed", "DataLoader worker.*killed", marks=pytest.mark.slow),
        ("worker_hangs", "DataLoader timed out after 6.*A worker of the data loader hangs, or takes longer"),
    ],
)
def test_a_worker_of_a_loader_that_ends_or_hangs_ends_all(tmp_path: Path, fault: str, cause: str):
    result = run_with_fault(fault, tmp_path, num_stages=1, pipeline_timeout=6)
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    assert re.search(rf"rank 1: RuntimeError: {cause}", last_error(result.outputs[0])), result.outputs[0]


@pytest.mark.parametrize(
    ("rank", "named"),
    [
        pytest.param(1, r"\brank 1\b", id="rank-1"),
        # These processes were started as srun and mpirun do: the store lies in the process of rank 0.
        pytest.param(0, "First cause: rank 0, which hosts the ranks' store, does not answer", id="host-of-the-store"),
    ],
)
def test_a_rank_that_falls_silent_is_given_up_after_the_timeout(tmp_path: Path, rank: int, named: str):
    timeout = 6
    start = time.time()
    # The silent rank never ends: the launcher kills it a second after the other one has given up.
    result = run_with_fault("silent", tmp_path, rank=rank, pipeline_timeout=timeout, grace=1)
    other = 1 - rank
    silent_since = float(re.search(rf"{SILENT} ([\d.]+)", result.outputs[rank])[1]) - start
    assert result.ended[rank] is None
    assert result.ended[other] is not None
    assert result.returncodes[other] != 0
    assert timeout - 1 < result.ended[other] - silent_since < timeout + 5
    assert re.search(named, last_error(result.outputs[other]))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("batch_size", "per_device_train_batch_size"),
        ("pipeline_size", "pipeline_parallel_size"),
        ("data_length", "data"),
    ],
)
def test_a_rank_that_disagrees_ends_all_before_training(tmp_path: Path, fault: str, name: str):
    result = run_with_fault(fault, tmp_path)
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    for text in result.outputs:
        assert name in last_error(text)
        assert re.search(r"\brank 1\b", last_error(text))
        assert READY not in text


def test_missing_labels_end_all_ranks_with_trainers_error(tmp_path: Path):
    result = run_with_fault("labels", tmp_path)
    assert_all_ended_by_themselves(result, seconds=PIPELINE_TIMEOUT)
    for text in result.outputs:
        assert "ValueError" in text
        assert re.search(r"did not return a loss|labels", last_error(text))
        assert READY not in text


@pytest.mark.parametrize(
    ("num_processes", "num_stages"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)], ids=["2x1", "2x2"]
)
def test_interrupt_stops_every_rank_with_events_flushed(tmp_path: Path, num_processes: int, num_stages: int):
    result = run_with_fault(
        "none", tmp_path, num_processes, num_stages, signal_on=(READY, signal.SIGINT), grace=INTERRUPT_SECONDS
    )
    assert result.signalled is not None
    assert not result.timed_out
    assert all(code != 0 for code in result.returncodes)
    assert max(result.ended) - result.signalled < INTERRUPT_SECONDS
    for text in result.outputs:
        assert "KeyboardInterrupt" in text
    lines = (tmp_path / "pipetransformer_events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events[0] == "run"
    assert events[-1] in ("fault", "end")


def last_error(text: str) -> str:
    """The text of the error that ended a rank: what stands behind the last traceback."""
    return text.rpartition("Traceback (most recent call last)")[2]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """How each rank of two refused each attempt; an attempt that hung or crashed is missing."""
    folder = tmp_path_factory.mktemp("refusals")
    return run(attempt_all, folder, 2, timeout=150, check=False)


# What the text of the refusal must name.
NAMED = {
    "output_without_rows": r"outputs of shape \([0-9]+, [0-9]+\) of [0-9]+ samples over replicas",
    "lomo": "optim.*lomo",
    "adalomo": "optim.*adalomo",
    "galore": "optim.*galore",
    "transformers_pipeline": r"distributed_config \(pp_size=2, tp_size=1, .*load it without",
    "tensor_parallel": r"distributed_config \(pp_size=1, tp_size=2, .*load it without",
    "layerdrop_and_freezing": "layerdrop",
    "swin": "Swin",
    "albert": "Albert",
    "hyperparameter_search": "hyperparameter_search is not supported with a pipeline",
    "resume_from_last_checkpoint": "resume_from_checkpoint",
    "resume_from_a_checkpoint": "resume_from_checkpoint",
    "no_dataset": "without a length and indices",
    "empty_stream": "The data set is empty: expected at least one sample",
    "compiled_graphs": "torch_compile_mode='reduce-overhead'",
    "compiled_split_backward": "pipeline_schedule='zb_h1'",
    "packed_samples": "has labels of shape .*a label for each token",
    "empty_dataset": "empty|at least one sample|num_samples",
    "undivided_optimizer": "LBFGS",
    "foreign_optimizer": "optimizer trains 1 parameters that are not the model's, which no stage would own",
    "no_divisor": "pipeline_parallel_size=3 does not divide the 2 processes of a node",
    "no_stages": "pipeline_parallel_size",
    "stages_in_words": "pipeline_parallel_size.*two",
    "no_microbatches": "pipeline_parallel_num_microbatches",
    "unknown_schedule": "pipeline_schedule.*zigzag",
    "unknown_checkpoint": "pipeline_checkpoint.*sometimes",
    "checkpoint_twice": "activation_checkpointing.*pipeline_checkpoint|pipeline_checkpoint.*activation_checkpointing",
    "no_timeout": "pipeline_timeout",
    "unknown_policy": "freeze_policy.*unfreeze",
    "unknown_rule": "freeze_rule.*neither",
    "unknown_compression": "pipeline_compression.*zip",
    "no_alpha": "freeze_alpha",
    "alpha_of_one": r"freeze_alpha.*1\.0",
    "interval_in_words": "freeze_interval.*month",
    "no_interval": "freeze_interval.*0",
    "interval_of_more_than_the_run": r"freeze_interval.*1\.5",
    "warmup_of_the_whole_run": r"freeze_warmup.*1\.0",
    "negative_warmup": r"freeze_warmup.*-0\.1",
    "negative_min_active": "freeze_min_active_layers.*-1",
    "fixed_without_table": "freeze_at",
    "table_without_fixed": "freeze_at.*freeze_policy",
    "malformed_table": "freeze_at.*2=1",
    "missing_plan": "layout_plan.*no/such/events",
    "foreign_plan": "plan-.*not the events file",
    "plan_without_json": "plan-.*not the events file",
    "empty_plan": "plan-.*(no run|not the events file)",
    "plan_of_another_world": "layout_plan.* holds at step 0 a layout for .*4 processes.*expected.*2 processes",
    "plan_of_another_model": "layout_plan.*12 layers.*expected 4 layers",
    "plan_off_the_cuts": r"layout_plan.*boundaries \(0, 4, 10\)",
    "plan_with_a_gap": "boundaries",
    "plan_of_another_schedule": "layout_plan.*holds at step 0 a layout under .*'zb_h1'.*set pipeline_schedule='zb_h1'",
    "plan_from_the_middle": "layout_plan.* begins at step 5: expected a plan from step 0",
    "policy_that_refuses_to_foresee": "planted: nobody knows",
    "batch_norm": "batch normalization",
    "multiple_choice": "MultipleChoice.* gives its layers activations of shape",
    "no_train_dataset": "train_dataset",
    "unseeded_order": "use_seedable_sampler",
    "gather_object": "eval_use_gather_object",
    "debug": "debug=",
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_cannot_work_is_refused_on_every_rank_before_training(refusals: list[dict[str, Any]], name: str):
    for rank, found in enumerate(refusals):
        assert name in found, f"rank {rank} did not come back from {name}"
        refusal = found[name]
        assert "ValueError" in refusal["bases"], refusal
        assert re.search(NAMED.get(name, name), refusal["text"], re.IGNORECASE | re.DOTALL), refusal
        assert refusal["steps"] == 0


def test_an_exception_on_rank_0_is_the_first_cause_under_a_launcher_that_kills_the_others(tmp_path: Path):
    """The agent of `accelerate launch` and torchrun ends all processes as soon as one has failed."""
    arguments = arguments_of(train_with, tmp_path, {"fault": "exception", "rank": 0})
    result = accelerate_launch(WORKER, arguments, num_processes=2, timeout=100, check=False)
    assert not result.timed_out
    events = map(json.loads, (tmp_path / "pipetransformer_events.jsonl").read_text().splitlines())
    (fault,) = [event for event in events if event["event"] == "fault"]
    assert fault["cause"] == f"rank 0: RuntimeError: {PLANTED}"
    assert f"RuntimeError: {PLANTED}" in result.output


def test_processes_without_gpus_train_together_without_being_told_of_the_cpu(tmp_path: Path):
    """accelerate would make each of them a world of its own, and they would train twice."""
    untold = {"ACCELERATE_USE_CPU": None, "CUDA_VISIBLE_DEVICES": ""}
    result = start(train_with, tmp_path, 2, {"fault": "none", "max_steps": 2}, timeout=60, env=untold)
    assert "2 stages x" in result.outputs[0]


def test_processes_that_each_believe_to_be_alone_are_refused(monkeypatch: pytest.MonkeyPatch):
    """As plain arguments make them, which are not told of the CPU either."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"(?s)--multi_gpu --num_processes N\b.*ACCELERATE_USE_CPU=true"):
        check_launch(SimpleNamespace(world_size=1))


def test_accelerate_that_starts_one_process_instead_of_two_is_refused(tmp_path: Path):
    """`accelerate launch --cpu --num_processes 2` starts one, silently."""
    result = accelerate_launch(
        WORKER,
        arguments_of(train_with, tmp_path, {"fault": "none", "num_stages": 1, "max_steps": 2}),
        num_processes=2,
        timeout=60,
        check=False,
        mode="--cpu",
    )
    assert result.returncode != 0
    assert "ValueError" in result.output
    assert "processes started one process only, as it does with --cpu" in result.output
    assert re.search(r"accelerate launch --multi_gpu --num_processes (2|N)\b", result.output)
