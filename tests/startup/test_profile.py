"""What a run measures before it plans: its own micro-batch, within bounds of time and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments, report
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import SampleBatch, count_items
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.startup import costs as profile
from hf_pipetransformer.startup import start
from hf_pipetransformer.startup.costs import BlockProfile, affordable_samples
from hf_pipetransformer.startup.model import ProbeTarget
from hf_pipetransformer.startup.planner import StartUp, samples_per_microbatch
from hf_pipetransformer.startup.rows import NUM_PROBE_SAMPLES, FirstBatch, most_samples, probe_samples
from hf_pipetransformer.startup.start import inspect_model
from tests.support.models import build_model, collate, make_rows


def arguments(folder: Path, **options: Any) -> PipeTransformerArguments:
    return PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", **options)


def noting_calls(model: Any, note: Callable[[Any, Any, dict[str, Any]], None]) -> None:
    """Note calls of a model by its forward: hooks of a script's are not called while it is inspected."""
    own = model.forward

    @wraps(own)
    def forward(*args: Any, **inputs: Any) -> Any:
        note(model, args, inputs)
        return own(*args, **inputs)

    model.forward = forward


def started(folder: Path, model_name: str, with_batches: bool = True, **options: Any) -> tuple[StartUp, list[int]]:
    """A started run of one process, and the sizes of the batches that its model was called with."""
    model, rows = build_model(model_name), make_rows(model_name, 40)
    sizes: list[int] = []

    def note(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        sizes.append(next(value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor)))

    def compute(inputs: dict[str, Any], num_items: int) -> torch.Tensor:
        return model(**inputs).loss

    noting_calls(model, note)
    args = arguments(folder, **options)
    first = FirstBatch(SampleBatch(collate(rows[: args.per_device_train_batch_size])))
    read = first.read if with_batches else None
    samples = probe_samples(first, model.main_input_name, count_items, most_samples(args))
    target = ProbeTarget(model, find_splitter(model), samples, compute, count_items)
    return inspect_model(target, args, Topology(60, 1), True, read), sizes


@pytest.mark.parametrize("model", ["bert_masked", "vit"])
def test_blocks_are_measured_with_the_runs_own_micro_batch(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PROFILE_SECONDS", 1e6)  # A busy machine would take fewer samples.
    start_up, sizes = started(
        tmp_path, model, per_device_train_batch_size=26, pipeline_parallel_num_microbatches=2, activation_cache="off"
    )
    assert max(sizes) == 13
    layout = start_up.plans.layout()
    assert start_up.plans.describe(layout, "none", False)["measured_samples"] == 13


def test_a_small_micro_batch_is_measured_as_it_is(tmp_path: Path) -> None:
    start_up, _ = started(tmp_path, "vit", per_device_train_batch_size=2)
    assert start_up.plans.describe(start_up.plans.layout(), "none", False)["measured_samples"] == 2


@pytest.mark.parametrize(("most", "sums"), [(None, False), (0.0, False), (1.0, True)])
def test_norms_are_summed_in_each_step_where_they_are_clipped(tmp_path: Path, most: float | None, sums: bool) -> None:
    start_up, _ = started(tmp_path, "vit", per_device_train_batch_size=2, max_grad_norm=most)
    assert start_up.plans.costs.overheads.sums_norms == sums


@pytest.mark.parametrize(("freezes", "cache"), [(False, "off"), (True, "auto")])
def test_a_run_says_whether_activations_may_be_stored(tmp_path: Path, freezes: bool, cache: str) -> None:
    start_up, _ = started(tmp_path, "vit", per_device_train_batch_size=2)
    described = start_up.plans.describe(start_up.plans.layout(), "any", freezes)
    assert f"Activation cache: {cache}." in described["expectation"]


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 3), ({"bf16": True}, 1), ({"activation_checkpointing": True}, 1), ({"per_device_train_batch_size": 40}, 6)],
)
def test_the_probe_runs_no_more_samples_than_a_step_has_memory_for(
    tmp_path: Path, options: dict[str, Any], most: int
) -> None:
    args = arguments(tmp_path, **{"per_device_train_batch_size": 3, **options})
    assert most_samples(args) == most and most_samples(args, may_slice_head=True) == 1


@pytest.mark.parametrize("size", [1, 3, 5])
def test_gradients_are_taken_of_no_more_samples_than_a_device_has_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    with_gradient: list[int] = []

    def noting(model: Any) -> Any:
        def note(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                with_gradient.append(inputs["input_ids"].shape[0])

        noting_calls(model, note)
        return model

    build = build_model
    monkeypatch.setitem(globals(), "build_model", lambda name: noting(build(name)))
    _, sizes = started(tmp_path, "bert_sequence", per_device_train_batch_size=size)
    assert max(with_gradient) == size
    assert max(sizes) == size


def test_what_only_evaluates_measures_what_it_probed_with(tmp_path: Path) -> None:
    _, sizes = started(tmp_path, "vit", with_batches=False, per_device_train_batch_size=26)
    assert max(sizes) == NUM_PROBE_SAMPLES


def test_a_model_too_slow_for_its_micro_batch_is_measured_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PROFILE_SECONDS", 1e-6)
    start_up, sizes = started(tmp_path, "vit", per_device_train_batch_size=26)
    assert max(sizes) == NUM_PROBE_SAMPLES
    assert start_up.plans.describe(start_up.plans.layout(), "none", False)["measured_samples"] == NUM_PROBE_SAMPLES


def test_tied_weights_are_in_the_costs_with_the_blocks_that_use_them(tmp_path: Path) -> None:
    start_up, _ = started(tmp_path, "bert_masked", per_device_train_batch_size=2)
    word_embeddings = build_model("bert_masked").get_input_embeddings().weight
    assert start_up.plans.costs.blocks.shared == (
        ((0, start_up.probe.structure.num_blocks - 1), word_embeddings.numel()),
    )


def test_weights_that_will_be_held_in_float32_are_counted_so(tmp_path: Path) -> None:
    start_up, _ = started(tmp_path, "bert_sequence", per_device_train_batch_size=2)
    model, structure = build_model("bert_sequence").bfloat16(), start_up.probe.structure
    names = [name for name, _ in model.named_parameters()]
    measured = BlockProfile(*[[1.0] * structure.num_blocks for _ in range(4)])
    for masters, size in (((), 2), (names, 4)):
        costs = profile.block_costs(model, structure, measured, masters)
        assert costs.trained_bytes == tuple(size * count for count in costs.parameters)


@pytest.mark.parametrize(("unfit", "expected"), [(0, 1), (1, 2), (2, 4), (4, 4)])
def test_the_first_layout_is_longer_than_what_ran_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfit: int, expected: int
) -> None:
    """On four processes, where a device takes the whole model by its plan."""
    monkeypatch.setattr(start, "read_unfit", lambda *_: unfit)
    start_up, _ = started(tmp_path, "bert_sequence", per_device_train_batch_size=2)
    plans, topology = start_up.plans, start_up.plans.topology
    topology.world_size = topology.local_world_size = 4
    assert plans.layout().pipeline_size == expected
    assert plans.inputs(plans.layout()).unfit == unfit


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pipeline_parallel_size": 1}, 24),
        ({"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 5}, 5),
        ({"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 4}, 12),
        ({"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 48}, 1),
        ({}, 24),
    ],
)
def test_the_micro_batch_of_the_first_layout(tmp_path: Path, options: dict[str, Any], expected: int) -> None:
    assert samples_per_microbatch(arguments(tmp_path, per_device_train_batch_size=24, **options)) == expected


# Seconds of one sample: 2 blocks alone, each after the chain (3 s) and 13 times itself (2 s).
def test_the_bytes_of_a_loss_are_those_of_all_that_is_there_at_one_time() -> None:
    size = 4 * 10 * 1000
    with profile._LiveBytes() as live:
        logits = torch.zeros(10, 1000, requires_grad=True)
        loss = torch.nn.functional.cross_entropy(logits.view(10, 1000), torch.arange(10))
        # The logits, and the log-softmax that is kept.
        assert 2 * size <= live.now <= 2.02 * size
        torch.autograd.grad(loss, logits)
        # Besides, the gradient of the log-softmax and that of the logits.
        assert 4 * size <= live.most <= 4.02 * size
        del loss
    assert size <= live.now <= 1.02 * size


PILOT = BlockProfile(forward=[1, 1, 1], backward=[1, 1, 1], edge_backward=[0, 0, 0], activation_bytes=[10, 20, 30])
SECONDS = 2 * (3 + 13 * 2)


@pytest.mark.parametrize(
    ("limit_seconds", "free_bytes", "expected"),
    [
        (100 * SECONDS, 1e9, 32),
        (8.5 * SECONDS, 1e9, 8),
        (100 * SECONDS, 2 * 90 * 7, 7),
        (0, 0, 1),
    ],
)
def test_measuring_stays_within_its_time_and_memory(
    monkeypatch: pytest.MonkeyPatch, limit_seconds: float, free_bytes: float, expected: int
) -> None:
    monkeypatch.setattr(profile, "PROFILE_SECONDS", limit_seconds)
    assert affordable_samples(32, PILOT, num_blocks_run=2, free_bytes=free_bytes) == expected


def test_the_progress_bar_gets_every_step_of_an_inspection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And shows within a step, whose length nobody knows, that time passes."""
    bars: list[Any] = []

    def make(what: str, total: int, is_shown: bool) -> Any:
        bars.append(Bar(what, total, is_shown))
        return bars[0]

    monkeypatch.setattr(start, "progress_bar", make)
    started(tmp_path, "vit", disable_tqdm=False)
    (bar,) = bars
    assert (bar.total, sum(bar.steps), bar.is_shown) == (4, 4, True)
    assert bar.steps.count(0) > 10
    assert bar.is_closed


def test_the_progress_bar_follows_the_users_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[bool] = []
    make = start.progress_bar
    monkeypatch.setattr(start, "progress_bar", lambda *given: shown.append(given[2]) or make(*given))
    started(tmp_path, "vit", disable_tqdm=True)
    assert shown == [False]
    for level, is_off in ((logging.INFO, False), (logging.WARNING, True)):
        with caplog.at_level(level, report.logger.name), report.progress_bar("Inspecting", 3, is_shown=True) as bar:
            assert bool(bar.disable) == is_off
            assert is_off or bar.delay == 3


class Bar:
    """Keeps what a progress bar is fed."""

    def __init__(self, what: str, total: int, is_shown: bool) -> None:
        self.total, self.is_shown, self.is_closed = total, is_shown, False
        self.steps: list[int] = []

    def update(self, steps: int) -> None:
        self.steps.append(steps)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.is_closed = True


def test_parameters_that_the_checks_take_no_gradients_of_are_not_taken_for_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout would otherwise seem to be in layers that the script froze, and nothing would be stored."""
    monkeypatch.setattr("hf_pipetransformer.startup.model.MOST_GRADIENTS", 0)
    plans = started(tmp_path, "bert_sequence")[0].plans
    assert (plans.num_frozen_by_user, plans.dropout_from) == (0, plans.probe.structure.num_layers + 1)
