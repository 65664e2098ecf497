"""Which checkpoint a run goes on from and under which layout, without one: how often its files are read."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pipetransformer.elastic.transition import longest_pipeline
from hf_pipetransformer.freeze.policies import Fixed
from hf_pipetransformer.options.arguments import READERS
from hf_pipetransformer.planning.layouts import plan_layout
from hf_pipetransformer.schedules.json_values import number
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.state import checkpoint, resumption
from hf_pipetransformer.state.checkpoint import STATE_FILE, STATE_FOLDER, newest_by_sizes, read_state
from hf_pipetransformer.state.resumption import Resumption, find_resumption, read_plan
from hf_pipetransformer.state.run_state import TOLD_ARGUMENTS, RunState, check_same_run, checksum_of
from tests.state.test_going_on import trainer_of
from tests.support.models import build_model
from tests.support.mutations import DEEP, GONE, draw_mutations, mutated, refusal_of


L = 4
WHOLE, SHORT = Layout(L, 0, 2, 1, (0, 5, 10), 2, "1f1b"), Layout(L, 3, 1, 2, (0, 10), 1, "1f1b")
TWO_LAYERS = Layout(2, 0, 1, 1, (0, 6), 1, "1f1b")


NOT_COMPARED = {
    *("pipeline_checkpoint", "pipeline_timeout", "pipeline_gather_at_end", "pipeline_compute_metrics", "layout_plan"),
    "pipeline_trace_step",
    "plan_only",
    "freeze_layers",  # It shows in `freeze_at`.
    "pipeline_master_dtype",  # It shows in the dtypes of the parameters.
    *("activation_cache", "activation_cache_dir"),
    *("activation_cache_max_gb", "activation_cache_keep"),
}
"""Options that may differ in a resumed run without a message."""


def test_every_option_is_compared_on_resume_or_known_not_to_be() -> None:
    """A new option goes into `TOLD_ARGUMENTS` of state/run_state.py or into `NOT_COMPARED` above."""
    compared = {name for name in READERS if name in TOLD_ARGUMENTS}
    assert set(READERS) - compared == NOT_COMPARED, "see this test's docstring"


def state_of(layout: Layout, **changes: Any) -> RunState:
    """A state that a run may have written under a layout."""
    texts = dict.fromkeys(("policy", "policy_class", "model", "optimizer_class", "scheduler_class"), "")
    counts = dict.fromkeys(("unlogged_loss", "num_starts", "num_transitions"), 0)
    decided: Any = {"num_wanted": 0, "num_fruitless": 0, "policy": {}, "gradient_norms": None}
    values: dict[str, Any] = {
        **texts, **counts, "step": 1, "epoch": 1.0, "place": None, "is_counted": True, "has_plan": False,
        "arguments": {}, "decaying": [], "parameters": {}, "scheduler": {}, "scaler": None,
        "decisions": decided | {"known_microbatches": []}, "layout": layout, "first_layout": layout,
        "sums_in_float32": False,
        "world_size": layout.pipeline_size * layout.num_replicas,
        "data": dict.fromkeys(("num_samples", "fingerprint", "samples")),
    }  # fmt: skip
    return RunState(**values | changes)


@pytest.mark.parametrize("where", [True, "checkpoint-4"])
def test_every_file_of_the_checkpoint_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: Any):
    """Reading hashes them, which takes as long as reading a large model."""
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    newest, read = str(tmp_path / "checkpoint-4"), []

    def read_state(folder: str) -> RunState:
        read.append(folder)
        return state_of(WHOLE, step=4)

    monkeypatch.setattr(checkpoint, "read_state", read_state)
    monkeypatch.setattr(resumption, "is_plain", lambda folder: False)
    monkeypatch.setattr(resumption, "check_same_run", lambda *_: None)
    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)))
    description: Any = SimpleNamespace(run=trainer, identity=None, data={})
    topology: Any = SimpleNamespace(decide=lambda call: call())
    found = find_resumption(where if where is True else newest, topology, description)
    assert (found.folder, found.state.step) == (newest, 4)
    assert read == [newest]


def test_a_damaged_checkpoint_that_is_named_is_refused_with_what_to_take_instead(tmp_path: Path):
    topology: Any = SimpleNamespace(decide=lambda call: call())
    description: Any = SimpleNamespace(run=SimpleNamespace(args=None))
    (tmp_path / checkpoint.STATE_FOLDER).mkdir()
    (tmp_path / checkpoint.STATE_FOLDER / checkpoint.STATE_FILE).write_text("{")
    with pytest.raises(ValueError, match="is damaged: .* or take the newest whole one with True"):
        find_resumption(str(tmp_path), topology, description)


def gone_on_with(policy: Any, plan: dict[int, Layout] | None, saved_size: int) -> tuple[Resumption, Layout]:
    """A run of two processes, saved with three layers frozen; K=1 is enough then, K=2 with none."""
    asked = {"pipeline_parallel_size": None, "pipeline_parallel_num_microbatches": None}
    identity = SimpleNamespace(arguments=asked | {"pipeline_schedule": "1f1b", "pipeline_chunks": None})
    args = SimpleNamespace(train_samples_per_device=4, pipeline_size=None, layout_plan="plan")
    description: Any = SimpleNamespace(identity=identity, run=SimpleNamespace(args=args))
    saved = Layout(L, 3, saved_size, 1, (0, 10) if saved_size == 1 else (0, 8, 10), 1, "1f1b")
    saved = replace(saved, num_replicas=2) if saved_size == 1 else saved
    # What was asked for is another thing now if it was saved with two stages.
    before = asked | {"pipeline_schedule": "1f1b", "pipeline_chunks": None if saved_size == 1 else 2}
    state = state_of(saved, step=5, first_layout=WHOLE, arguments=before)
    structure = SimpleNamespace(num_layers=L, cut_positions=lambda: range(11))

    def planned(num_frozen: int = 0) -> Layout:
        return SHORT if num_frozen else WHOLE

    topology = SimpleNamespace(local_world_size=2, pipeline_sizes=[1, 2])
    plans: Any = SimpleNamespace(
        layout=planned, probe=SimpleNamespace(structure=structure), unfit=0, topology=topology
    )
    resumption = Resumption("checkpoint-5", description, state.step, state.epoch, state.place, state)
    return resumption, resumption.choose_layout(plans, plan, 2, policy)


def test_a_run_that_goes_on_elsewhere_may_grow_to_what_it_would_have_begun_under() -> None:
    falling, growing = Fixed({2: 3, 8: 0}), Fixed({2: 3})
    resumption, layout = gone_on_with(falling, None, saved_size=2)
    assert (resumption.is_elsewhere, layout, resumption.first_layout) == (True, SHORT, WHOLE)
    assert longest_pipeline(layout, resumption.first_layout, falling, None) == 2
    resumption, layout = gone_on_with(growing, None, saved_size=2)
    assert (resumption.is_elsewhere, layout, resumption.first_layout) == (True, SHORT, None)
    resumption, layout = gone_on_with(falling, None, saved_size=1)
    assert (resumption.is_elsewhere, layout, resumption.first_layout) == (False, SHORT, WHOLE)
    assert longest_pipeline(layout, resumption.first_layout, growing, None) == 1
    plan = {0: WHOLE, 2: SHORT, 8: WHOLE}
    resumption, layout = gone_on_with(growing, plan, saved_size=1)
    assert layout == SHORT
    assert longest_pipeline(layout, resumption.first_layout, growing, plan) == 2


@pytest.mark.parametrize(
    ("pipeline_size", "cache_level", "local", "allowed", "is_kept"),
    [
        (4, 3, 4, [1, 2, 4], True),
        (4, 0, 2, [1, 2, 4], True),
        # Nothing is stored over nodes, and nodes of 3 and 1 take one stage each.
        (4, 3, 2, [1, 2, 4], False),
        (2, 3, 2, [1, 2, 4], True),
        (2, 0, 1, [1], False),
    ],
)
def test_a_saved_layout_goes_on_where_the_nodes_allow_it(
    pipeline_size: int, cache_level: int, local: int, allowed: list[int], is_kept: bool
) -> None:
    resumption, _ = gone_on_with(Fixed({2: 3}), None, saved_size=1)
    layout = plan_layout([1.0] * 10, range(11), "1f1b", pipeline_size, 4 // pipeline_size, 1, num_frozen_layers=3)
    probe = SimpleNamespace(structure=SimpleNamespace(cut_positions=lambda: range(11)))
    topology = SimpleNamespace(local_world_size=local, pipeline_sizes=allowed)
    plans: Any = SimpleNamespace(probe=probe, unfit=0, topology=topology)
    assert resumption._is_still_asked_for(replace(layout, cache_level=cache_level), plans, 4) == is_kept


def planner_of(args: Any, structure: Any, topology: Any, replaced_by: str | None) -> Any:
    probe, runs = SimpleNamespace(structure=structure), replaced_by or "1f1b"
    return SimpleNamespace(args=args, probe=probe, topology=topology, schedule=runs, replaced_by=replaced_by)


def test_a_plan_is_replayed_where_the_nodes_allow_its_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what it stored under pipelines that span the present nodes."""
    shapes = {0: (4, 1), 5: (2, 2)}
    layouts = {step: plan_layout([1.0] * 10, range(11), "1f1b", *shape, 1, 1, 3, 2) for step, shape in shapes.items()}
    monkeypatch.setattr(resumption, "read_layouts", lambda _: dict(layouts))
    args: Any = SimpleNamespace(layout_plan="plan", pipeline_schedule="1f1b")
    structure = SimpleNamespace(num_layers=4, cut_positions=lambda: range(11))

    def replayed(local: int, allowed: list[int]) -> Any:
        nodes = {"local_world_size": local, "pipeline_sizes": allowed, "world_size": 4}
        topology: Any = SimpleNamespace(gather=lambda value: [value], **nodes)
        return read_plan(planner_of(args, structure, topology, None))

    assert replayed(4, [1, 2, 4]) == layouts
    assert replayed(2, [1, 2, 4]) == {0: replace(layouts[0], cache_level=0), 5: layouts[5]}
    with pytest.raises(ValueError, match="holds at step 0 pipelines of 4 ranks, and these nodes allow .1, 2."):
        replayed(2, [1, 2])


def test_a_plan_is_replayed_under_a_loss_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has replaced the schedule that the script asked for."""
    args: Any = SimpleNamespace(layout_plan="plan", pipeline_schedule="1f1b")
    nodes: Any = {"local_world_size": 2, "pipeline_sizes": [1, 2], "world_size": 2}
    topology: Any = SimpleNamespace(gather=lambda value: [value], **nodes)
    structure = SimpleNamespace(num_layers=4, cut_positions=lambda: range(11))
    planner = planner_of(args, structure, topology, "gpipe")

    def replayed(layout: Any) -> Any:
        monkeypatch.setattr(resumption, "read_layouts", lambda _: {0: layout})
        return read_plan(planner)

    layout = plan_layout([1.0] * 10, range(11), "1f1b", 2, 1, 2)
    assert replayed(layout) == {0: replace(layout, schedule="gpipe")}
    with pytest.raises(ValueError, match="holds at step 0 a layout under 'zb_h1'.* set pipeline_schedule='zb_h1'"):
        replayed(replace(layout, schedule="zb_h1"))
    args.pipeline_schedule = "interleaved_1f1b"
    layout = plan_layout([1.0] * 10, range(11), "interleaved_1f1b", 2, 1, 2, num_chunks=2)
    with pytest.raises(ValueError, match="all forwards of 2 stages a rank cannot come first.*pipeline_loss='parts'"):
        replayed(layout)


# ---- a state whose hash holds ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run that has frozen two layers."""
    folder = tmp_path_factory.mktemp("saved")
    freezing = {"freeze_policy": "fixed", "freeze_at": "1:2", "activation_cache": "off"}
    trainer_of(build_model("bert_sequence"), folder, **freezing).train()
    return folder / "checkpoint-4"


def test_the_newest_whole_checkpoint_is_found_by_the_sizes_of_its_files(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved.parent, tmp_path / "run")
    found = newest_by_sizes(str(run))
    assert found is not None and found[0] == str(run / "checkpoint-6")
    assert found[1] == sum(path.stat().st_size for path in (run / "checkpoint-6").rglob("*") if path.is_file())
    optimizer = run / "checkpoint-6" / STATE_FOLDER / "optimizer-stage-0.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    assert newest_by_sizes(str(run))[0] == str(run / "checkpoint-4")
    (run / "checkpoint-4" / "model.safetensors").unlink()
    assert newest_by_sizes(str(run))[0] == str(run / "checkpoint-2")
    (run / "checkpoint-2" / STATE_FOLDER / STATE_FILE).unlink()  # As of a save that was interrupted.
    assert newest_by_sizes(str(run)) is None


def write_state(folder: Path, state: Any) -> None:
    """Write `state` with a hash that holds."""
    content = {"checksum": checksum_of(state), **state} if isinstance(state, dict) else state
    (folder / STATE_FOLDER / STATE_FILE).write_text(json.dumps(content))


@pytest.fixture
def state(saved: Path) -> Any:
    """Its state, which is written again when a test has ended."""
    path = saved / STATE_FOLDER / STATE_FILE
    text = path.read_text()
    content = json.loads(text)
    del content["checksum"]
    yield content
    path.write_text(text)


@pytest.mark.parametrize(
    ("place", "new", "said"),
    [
        ("step", 1e30, r"found 1e\+30 as 'step', expected a whole number from 0"),
        ("step", -5, "found -5 as 'step'"),
        ("step", 3, "is damaged: .* found 3 as 'step', expected 4 as trainer_state.json has it"),
        ("step", None, "found None as 'step'"),
        ("step", DEEP, r"found \[+.*as 'step'"),
        ("epoch", 0.5, "found 0.5 as 'epoch', expected 1.33"),
        ("place samples", 10**12, "found 1000000000000 as 'samples', expected a whole number from 0 to 12"),
        ("place epoch", 5, "found 5 as 'epoch', expected a whole number from 0 to 4"),
        ("place global_batch", 0, "found 0 as 'global_batch'"),
        ("version", GONE, "has no version in state.json: expected version"),
        ("version", "6", "has .* in state.json: expected version 6"),
        ("files", {}, "found no .* in 'files', expected all files of the checkpoint"),
        ("files", None, "found None as 'files', expected an object"),
        ("files pipetransformer/optimizer-stage-0.safetensors", GONE, "found no 'pipetransformer/optimizer"),
        ("files model.safetensors", {"bytes": 3}, "found no 'xxh3_128'"),
        ("files ../../etc/passwd", {"bytes": 3, "xxh3_128": "0"}, "expected files of this folder"),
        ("world_size", 2, "found 2 as 'world_size', expected 1"),
        ("layout num_layers", 5, "do not cut 12 blocks"),
        ("layout", {}, "found no 'num_layers' of a layout"),
        ("first_layout", None, "found None as 'layout', expected an object"),
        ("first_layout", TWO_LAYERS.as_event(), "found a 'first_layout' of 2 layers, expected"),
        ("decisions known_microbatches", [[1, 1]], "expected a list of 3"),
        ("scheduler last_epoch", 1e30, "found 1e\\+30 as 'last_epoch'"),
    ],
)
def test_a_state_that_cannot_be_is_refused_although_its_hash_holds(
    saved: Path, state: Any, place: str, new: Any, said: str
) -> None:
    assert read_state(str(saved)).step == 4
    write_state(saved, mutated(state, tuple(place.split(" ")), new))
    with pytest.raises(ValueError, match=f"checkpoint-4'.*{said}") as caught:
        read_state(str(saved))
    assert len(str(caught.value)) < 500


def test_what_earlier_releases_say_of_stored_draws_is_not_read(saved: Path, state: Any) -> None:
    expected = read_state(str(saved))
    state["slots"] = {"num_slots": 2, "seed": 42, "first": 1, "shares": [[2, 0.1]]}
    state["layout"] |= {"refresh_fraction": 0.1}
    state["first_layout"] |= {"fresh_share": 0.0}
    write_state(saved, state)
    assert read_state(str(saved)) == expected


@pytest.mark.parametrize("content", [None, [], 3, "x", {}])
def test_what_is_no_state_is_refused(saved: Path, state: Any, content: Any) -> None:
    write_state(saved, content)
    with pytest.raises(ValueError, match="checkpoint-4'.*state.json"):
        read_state(str(saved))


def test_a_state_that_is_nested_too_deep_is_refused(saved: Path, state: Any) -> None:
    text = json.dumps({"checksum": "0", **state, "decisions": "@"}).replace('"@"', "[" * 900 + "]" * 900)
    (saved / STATE_FOLDER / STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match="checkpoint-4'.*state.json"):
        read_state(str(saved))


# What a layout, or a state, of an earlier release lacks.
OF_SCHEDULES = ("last_epoch", "_step_count", "base_lrs", "_last_lr")
MAY_BE_GONE = {
    *("cache_level", "num_chunks", "placement", "token_slices", "group_size", "nodes"),
    *("is_counted", "policy_class", "weights", "scaler", *OF_SCHEDULES),
}


def may_be(place: Any, new: Any) -> bool:
    """Values of which only who takes them up knows whether they can be, and those that may be missing."""
    kind, last = place[0], place[-1]
    if kind in ("arguments", "scaler", "checksum") or place[:2] == ("decisions", "policy"):
        return len(place) > 1 or new is GONE or isinstance(new, dict)
    if kind == "scheduler" and len(place) > 1 and place[1] not in OF_SCHEDULES:
        return True
    if new is GONE and (last in MAY_BE_GONE or (kind == "files" and not str(last).startswith("pipetransformer/"))):
        return True
    if last == "fingerprint" or (last in ("samples", "num_samples") and new is None):
        return True
    return last in ("place", "gradient_norms", "scaler") and new in (None, [])


def test_a_mutated_state_is_refused_in_one_sentence(saved: Path, state: Any) -> None:
    num_refused, whole = 0, read_state(str(saved))
    for place, new in draw_mutations(state, 700, seed=30):
        if may_be(place, new):
            continue
        changed = mutated(state, place, new)
        write_state(saved, changed)
        # As `find_resumption` reads it.
        text = refusal_of(lambda: check_same_run(str(saved), read_state(str(saved)), whole, whole.data))
        assert text is not None, f"{place} may be {new!r}"
        assert str(saved) in text and "\n" not in text and len(text) < 700, (place, new, text)
        num_refused += 1
    assert num_refused >= 300, num_refused


def test_numbers_of_a_file_are_floats_or_refused() -> None:
    """A gradient norm that was NaN stays NaN; a whole number beyond all floats is none."""
    assert math.isnan(number(math.nan, "norm"))
    assert number(3, "norm") == 3.0
    for value in (10**400, -(10**400)):
        with pytest.raises(ValueError, match="as 'norm', expected a number that fits a float"):
            number(value, "norm")
    with pytest.raises(ValueError, match="expected a number from 0 to 1"):
        number(math.nan, "norm", 0, 1)
