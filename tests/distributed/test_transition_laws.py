"""Laws 3 to 6: what a transition must not change, what is frozen and how often it runs, which samples are drawn; and
decisions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

from hf_pipetransformer.schedules.placement import Placement
from tests.distributed.launches import Outcome
from tests.distributed.test_transitions import selectable
from tests.distributed.transition_cases import CACHED_CASES, GLOBAL_BATCH, TransitionCase
from tests.distributed.transition_observer import encoder_parts, frozen_names
from tests.distributed.transition_runs import TransitionRuns
from tests.support.models import NUM_LAYERS, build_model


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2000)]

GRADIENT_TOLERANCE = 1e-5


def first_active_block(num_frozen: int) -> int:
    return 2 * num_frozen + 1 if num_frozen else 0


def stage_of(boundaries: list[int], block: int) -> int:
    return sum(block >= boundary for boundary in boundaries[1:-1])


# ---- Law 3


@pytest.mark.parametrize("case", selectable())
def test_a_transition_changes_no_bit(moved: Outcome, case: TransitionCase):
    """Weights, buffers and optimizer state by name, on all ranks that hold them, right before and right after."""
    for entries in zip(*(rank["transitions"] for rank in moved.ranks), strict=True):
        new = entries[0]["to"]
        assert all(entry["to"] == new and entry["step"] == entries[0]["step"] for entry in entries)
        model = build_model(case.model)
        frozen = frozen_names(model, new["num_frozen_layers"])
        before: dict[str, dict[str, set[str]]] = {}
        for kind in ("weights", "buffers", "state"):
            before[kind] = defaultdict(set)
            for entry in entries:
                for name, digest in entry["before"][kind].items():
                    before[kind][name].add(digest)
        # Buffers of replicas may differ: each counts its own forwards.
        assert [name for kind in ("weights", "state") for name, found in before[kind].items() if len(found) > 1] == []
        for entry in entries:
            for kind in ("weights", "buffers", "state"):
                changed = [n for n, digest in entry["after"][kind].items() if digest not in before[kind].get(n, ())]
                assert changed == [], f"{kind} changed at step {entry['step']}"
            for name in entry["before"]["buffers"].keys() & entry["after"]["buffers"].keys():
                assert entry["before"]["buffers"][name] == entry["after"]["buffers"][name]
        for kind in ("weights", "buffers"):
            after = [set(entry["after"][kind]) for entry in entries]
            assert set.union(*after) == set(before[kind])
        kept = {name for name in before["state"] if name.rpartition("/")[0] not in frozen}
        assert set.union(*(set(entry["after"]["state"]) for entry in entries)) == kept
    assert all(rank["transitions"] for rank in moved.ranks) == (case.name != "fruitless-policy")


@pytest.mark.parametrize("case", selectable("adamw-bert"))
def test_buffers_that_training_changes_travel_with_their_layer(moved: Outcome):
    """Else the law of the bits would look at constants: they change, until their layer is frozen, and travel."""
    seen = defaultdict(set)
    for rank, values in enumerate(moved.ranks):
        for entry in values["transitions"]:
            for name in entry["after"]["buffers"].keys() - entry["before"]["buffers"].keys():
                seen[name].add(rank)
    counting = list(moved.ranks[0]["buffers"])
    assert len(counting) == 6
    assert set(counting) <= set(seen)
    digests = [entry["before"]["buffers"] for rank in moved.ranks for entry in rank["transitions"]]
    for name in counting:
        changes = len({found[name] for found in digests if name in found})
        # Of the first layer: frozen at the first transition, so its buffers stand still from there on.
        assert changes == 1 if ".layer.0." in name else changes > 2, name


# ---- Law 4


@pytest.mark.parametrize("case", selectable())
def test_frozen_parameters_never_change_on_any_rank_until_they_are_unfrozen(moved: Outcome, case: TransitionCase):
    digests = defaultdict(set)
    for rank in moved.ranks:
        num_unfreezes, before = 0, 0
        for entry in rank["steps"]:
            num_unfreezes, before = num_unfreezes + (entry["num_frozen"] < before), entry["num_frozen"]
            for name, digest in entry["frozen"].items():
                digests[name, num_unfreezes].add(digest)
    assert {name: found for name, found in digests.items() if len(found) != 1} == {}
    most = max(entry["num_frozen"] for entry in moved.ranks[0]["steps"])
    assert {name for name, _ in digests} == frozen_names(build_model(case.model), most)


@pytest.mark.parametrize("case", selectable())
def test_the_optimizer_holds_nothing_of_what_is_frozen_and_all_of_what_is_not(moved: Outcome, case: TransitionCase):
    model = build_model(case.model)
    names = {name for name, _ in model.named_parameters()}
    fixed_by_user = {name for name, flag in moved.ranks[0]["flags"][0].items() if not flag}
    assert moved.ranks[0]["steps"]
    for entries in zip(*(rank["steps"] for rank in moved.ranks), strict=True):
        frozen = frozen_names(model, entries[0]["num_frozen"])
        held: Counter[str] = Counter()
        for entry in entries:
            assert entry["with_gradient_flag"] == []
            assert not frozen & {*entry["in_optimizer"], *entry["with_state"]}
            assert set(entry["with_state"]) <= set(entry["in_optimizer"])
            held.update(entry["in_optimizer"])
        # One rank of each replica steps each active parameter.
        num_replicas = len(entries) // entries[0]["places"][0]
        assert held == dict.fromkeys(names - frozen - fixed_by_user, num_replicas)


@pytest.mark.parametrize("case", selectable())
def test_no_gradient_enters_the_frozen_prefix(moved: Outcome):
    """Counted where the engine posts its messages; above the prefix gradients do flow."""
    num_silent = 0
    for rank in moved.ranks:
        for entry in rank["steps"]:
            first = stage_of(entry["boundaries"], first_active_block(entry["num_frozen"]))
            places, sent = Placement(*entry["places"]), entry["bytes"].get("sent gradient", 0)
            received = entry["bytes"].get("received gradient", 0)
            # The last batch of an epoch may leave a pipeline without samples.
            runs = entry["num_samples"] > 0
            stages = places.stages_of(entry["position"])
            below = [stage for stage in stages if places.is_crossed(stage - 1)]
            above = [stage for stage in stages if places.is_crossed(stage)]
            assert (sent > 0) == (runs and any(stage > first for stage in below)), entry
            assert (received > 0) == (runs and any(stage >= first for stage in above)), entry
            num_silent += any(0 < stage <= first for stage in stages)
            assert bool(entry["bytes"].get("sent activation")) == (runs and bool(above))
    plans_deep = any(
        stage_of(entry["boundaries"], first_active_block(entry["num_frozen"])) > 0 for entry in moved.ranks[0]["steps"]
    )
    assert bool(num_silent) == plans_deep


@pytest.mark.parametrize("case", selectable("dropout"))
def test_frozen_layers_have_no_dropout_and_the_others_have(moved: Outcome):
    """Two forwards of one input agree in the frozen prefix and nowhere else."""
    for rank in moved.ranks:
        assert {index for _, index, _, _ in rank["modes"]} == set(range(-1, NUM_LAYERS))
        for num_frozen, index, training, repeats in rank["modes"]:
            assert num_frozen == 2
            assert training == (index >= num_frozen), index
            assert repeats == (index < num_frozen), index


# ---- Law 5

CACHED = [case.name for case in CACHED_CASES]
# A row that was stored in a short batch does not serve a longer one whose padding the loss sees.
MISSES_LONGER = "cached-answers"


def expected_executions(outcome: Outcome, layer: int) -> int:
    """Samples that run through a frozen layer: each whenever it is drawn, but only once while it is stored."""
    count, stored = 0, set[int]()
    for entry, samples in zip(outcome.ranks[0]["steps"], samples_by_step(outcome).values(), strict=True):
        if entry["cache_level"] > layer:
            stored.update(samples)
        elif entry["num_frozen"] > layer:
            count += len(samples)
    return count + len(stored)


def drawn_while_frozen(outcome: Outcome, layer: int) -> list[int]:
    """Samples of all steps under which the layer was frozen; each as often as it was drawn."""
    steps = zip(outcome.ranks[0]["steps"], samples_by_step(outcome).values(), strict=True)
    return [sample for entry, samples in steps if entry["num_frozen"] > layer for sample in samples]


def executions(outcome: Outcome, layer: int) -> list[int]:
    """Samples that ran through the layer's attention and MLP while it was frozen, over all ranks."""
    return [sum(rank["executions"][layer][half] for rank in outcome.ranks) for half in (0, 1)]


@pytest.mark.parametrize("case", selectable("adamw-bert", "adamw-vit", *CACHED))
def test_a_sample_runs_through_a_frozen_layer_once_while_it_is_stored(moved: Outcome, case: TransitionCase):
    """Counted in the layers themselves; recomputation for the backward is no second time."""
    num_frozen = moved.ranks[0]["steps"][-1]["num_frozen"]
    assert num_frozen >= 3
    for layer in range(num_frozen):
        found, expected = executions(moved, layer), expected_executions(moved, layer)
        drawn = drawn_while_frozen(moved, layer)
        if case.name == MISSES_LONGER:
            assert len(set(drawn)) <= min(found) and (max(found) < len(drawn) or layer > 2), layer
        else:
            assert found == [expected, expected], layer
        if not case.cached:
            assert expected == len(drawn)
        elif case.name not in (MISSES_LONGER, "cached-below-frozen", "cached-own-plans", "cached-not-elastic"):
            assert expected == len(set(drawn))
    # Without stored activations the first layer would run much more often.
    drawn = drawn_while_frozen(moved, 0)
    assert len(drawn) > 1.8 * len(set(drawn))


@pytest.mark.parametrize("case", selectable(*CACHED))
def test_what_is_read_and_stored_is_reported(moved: Outcome, case: TransitionCase):
    epochs = [event for event in moved.events("cache") if event["what"] == "epoch"]
    assert len(epochs) == case.epochs - next(
        index for index in range(case.epochs) if index * per_epoch(case) + per_epoch(case) > first_cached_step(moved)
    )
    steps = list(samples_by_step(moved).values())
    drawn = sum(map(len, steps[first_cached_step(moved) :]))
    assert sum(event["hits"] + event["misses"] for event in epochs) == drawn
    assert all(event["bytes_stored"] > 0 for event in epochs)
    said = [text for rank in moved.ranks for text in rank["warnings"]]
    assert [text for text in said if "ignores it. With gradient_accumulation_steps" not in text] == []
    if case.name != MISSES_LONGER:
        assert sum(event["misses"] for event in epochs) == len(set().union(*steps[first_cached_step(moved) :]))


@pytest.mark.parametrize("case", selectable(*CACHED))
def test_nothing_is_left_of_a_cache(moved: Outcome, case: TransitionCase):
    folder = moved.output.with_name(f"{case.name}-cache") / "_activation_cache"
    assert folder.is_dir()
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []


def per_epoch(case: TransitionCase) -> int:
    return math.ceil(math.ceil(case.num_samples / GLOBAL_BATCH) / case.accumulation)


def first_cached_step(outcome: Outcome) -> int:
    return next(entry["step"] for entry in outcome.ranks[0]["steps"] if entry["cache_level"])


# ---- Law 6


def samples_by_step(outcome: Outcome) -> dict[int, list[int]]:
    steps = defaultdict(list)
    for rank in outcome.ranks:
        for step, samples in rank["samples"]:
            steps[step] += samples
    return {step: sorted(samples) for step, samples in sorted(steps.items())}


@pytest.mark.parametrize("case", selectable())
def test_each_sample_is_drawn_once_an_epoch(moved: Outcome, case: TransitionCase):
    steps = list(samples_by_step(moved).values())
    length = per_epoch(case)
    assert len(steps) == case.epochs * length
    for epoch in range(case.epochs):
        drawn = [sample for samples in steps[epoch * length : (epoch + 1) * length] for sample in samples]
        assert sorted(drawn) == list(range(case.num_samples)), f"epoch {epoch}"


@pytest.mark.parametrize("case", selectable(compared=True))
def test_the_samples_of_every_step_are_those_of_one_process(
    moved: Outcome, transition_runs: TransitionRuns, case: TransitionCase
):
    assert samples_by_step(moved) == samples_by_step(transition_runs.reference(case, "single"))


def reads(outcome: Outcome, case: TransitionCase, rank: int) -> dict[int, dict[int, list[int]]]:
    """Epoch to process to the samples that it read from the data set."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in outcome.output.parent.glob(f"{case.name}.drawn.rank{rank}.*"):
        for line in path.read_text().splitlines():
            epoch, index = map(int, line.split())
            found[epoch][int(path.suffix[1:])].append(index)
    return found


@pytest.mark.parametrize(
    "case", selectable("adamw-bert", *(name for name in CACHED if name != "cached-loader-workers"))
)
def test_without_workers_each_sample_is_read_once_an_epoch_stored_or_not(moved: Outcome, case: TransitionCase):
    for epoch in range(1, case.epochs):
        read = Counter[int]()
        for rank in range(len(moved.ranks)):
            for samples in reads(moved, case, rank)[epoch].values():
                read.update(samples)
        assert read == dict.fromkeys(range(case.num_samples), 1)


@pytest.mark.parametrize("case", selectable("loader-workers"))
def test_workers_of_a_rank_that_stays_first_are_not_respawned(moved: Outcome, case: TransitionCase):
    num_workers = case.options["dataloader_num_workers"]
    transitions = [entry["step"] for entry in moved.ranks[0]["transitions"]]
    assert any(step % 7 for step in transitions)
    by_epoch = reads(moved, case, 0)
    processes = [set(by_epoch[epoch]) for epoch in range(case.epochs)]
    # Epoch 0 is read by the main process too, before training: it probes the model.
    assert [len(found) for found in processes[1:]] == [num_workers] * (case.epochs - 1)
    for rank in range(1, len(moved.ranks)):
        for epoch, found in reads(moved, case, rank).items():
            assert len(found) <= num_workers + (epoch <= 0), (rank, epoch)


@pytest.mark.parametrize("case", selectable("persistent-workers"))
def test_persistent_workers_outlive_epochs_and_transitions(moved: Outcome, case: TransitionCase):
    """They see no epoch: the data set was copied into them once. The main process reads for the probe."""
    processes = {process for found in reads(moved, case, 0).values() for process in found}
    assert len(processes) == case.options["dataloader_num_workers"] + 1


@pytest.mark.parametrize("case", selectable("loader-workers"))
def test_no_worker_outlives_the_training(moved: Outcome, transition_runs: TransitionRuns, case: TransitionCase):
    """As with plain Trainer: what is left of them holds memory, and seconds when it is collected."""
    assert [rank["loader_workers"] for rank in transition_runs.reference(case, "plain").ranks] == [0]
    assert [rank["loader_workers"] for rank in moved.ranks] == [0] * len(moved.ranks)


# ---- decisions


@pytest.mark.parametrize("case", selectable("gradient-norms"))
def test_decisions_follow_the_gradient_norms_of_plain_trainer(
    moved: Outcome, transition_runs: TransitionRuns, case: TransitionCase
):
    """The norms in the events are means, over the interval, of what plain Trainer has before it clips."""
    interval, alpha = case.pipeline_options["freeze_interval"], case.pipeline_options["freeze_alpha"]
    plain = transition_runs.reference(case, "plain").ranks[0]["norms"]
    single = {entry["step"]: entry["grad_norm"] for entry in moved.logged("grad_norm")}
    assert max(single.values()) > 0.5, "nothing was clipped, so unclipped norms prove nothing"
    num_frozen, level = 0, 0.0
    decisions = moved.events("freeze")
    assert [event["step"] for event in decisions] == list(range(interval, len(plain), interval))
    for event in decisions:
        step = event["step"]
        means = [sum(column) / interval for column in zip(*plain[step - interval : step], strict=True)]
        assert event["gradient_norms"] == pytest.approx(means, rel=GRADIENT_TOLERANCE)
        assert (event["num_frozen_before"], event["num_wanted_before"]) == (num_frozen, pytest.approx(level))
        candidates = range(num_frozen, NUM_LAYERS + 1)
        smallest = min(candidates, key=lambda index: means[index])
        level = max(min(level + alpha * (NUM_LAYERS - level), smallest), num_frozen)
        num_frozen = max(num_frozen, math.ceil(level - 1e-9))
        assert (event["num_frozen"], event["num_wanted"]) == (num_frozen, pytest.approx(level))
    frozen = [event["num_frozen"] - event["num_frozen_before"] for event in decisions]
    assert any(frozen) and not all(frozen)


@pytest.mark.parametrize("case", selectable("gradient-norms", "custom-policy", "own-plans", "not-elastic", "schedule"))
def test_every_transition_is_an_event_with_its_reasons(moved: Outcome, case: TransitionCase):
    events, seen = moved.events("transition"), moved.ranks[0]["transitions"]
    assert [(e["step"], e["from"], e["to"]) for e in events] == [(s["step"], s["from"], s["to"]) for s in seen]
    changes = [event for event in moved.events("freeze") if event["num_frozen"] > event["num_frozen_before"]]
    assert [event["step"] for event in events] == [event["step"] for event in changes]
    for event, change in zip(events, changes, strict=True):
        assert event["to"]["num_frozen_layers"] == change["num_frozen"]
        assert 0 < event["seconds"] < 60
        assert event["predicted_step_s"] > 0
        # Three steps under a layout are enough for a measurement.
        assert event["step"] < 3 or event["measured_step_s"] > 0
        is_same_place = event["from"]["boundaries"] == event["to"]["boundaries"]
        assert (event["bytes_moved"] == 0) == is_same_place
    if case.name == "not-elastic":
        assert all(event["from"]["boundaries"] == event["to"]["boundaries"] for event in events)
    elif case.name != "schedule":
        assert events[-1]["to"]["num_stages"] < events[0]["from"]["num_stages"]


@pytest.mark.parametrize("case", selectable("unfreezing"))
def test_a_pipeline_that_shrank_grows_back_when_layers_unfreeze(moved: Outcome):
    sizes = [
        (event["step"], event["to"]["num_stages"], event["to"]["num_replicas"]) for event in moved.events("transition")
    ]
    assert sizes == [(2, 2, 2), (5, 4, 1), (8, 4, 1)]
    assert [event["unfreezes"] for event in moved.events("freeze")] == [False, True, False]


@pytest.mark.parametrize("case", selectable("custom-policy"))
def test_a_policy_of_the_user_is_asked(moved: Outcome):
    decisions = moved.events("freeze")
    assert [(event["step"], event["num_frozen"]) for event in decisions] == [
        *((4, 1), (8, 2), (12, 3), (16, 4), (20, 4)),
    ]
    assert all("one by one" in event["policy"] for event in decisions)
    assert [rank["warnings"] for rank in moved.ranks] == [[]] * len(moved.ranks)


@pytest.mark.parametrize("case", selectable("fruitless-policy"))
def test_two_decisions_in_a_row_that_freeze_nothing_warn_once(moved: Outcome):
    assert len(moved.events("freeze")) == 6
    assert moved.events("transition") == []
    warnings = [[text for text in rank["warnings"] if "froze nothing" in text] for rank in moved.ranks]
    assert [len(texts) for texts in warnings] == [1, 0, 0, 0]


@pytest.mark.parametrize("case", selectable("schedule-replayed", "search-cut-short-replayed"))
def test_a_replayed_run_is_the_run_to_the_bit(moved: Outcome, transition_runs: TransitionRuns, case: TransitionCase):
    """Also the numbers of micro-batches that were tried on the way."""
    original = transition_runs.pipeline(transition_runs.selected[case.follows])
    layouts = [[entry["layout"] for entry in outcome.ranks[0]["steps"]] for outcome in (original, moved)]
    assert layouts[1] == layouts[0]
    assert moved.logged("loss") and without_clock(moved) == without_clock(original)
    assert [rank["weights"] for rank in moved.ranks] == [rank["weights"] for rank in original.ranks]
    for kind in ("run", "transition"):
        found = [[layout_of(event) for event in outcome.events(kind)] for outcome in (original, moved)]
        assert found[1] == found[0]
    assert original.events("transition")
    assert len({entry["num_microbatches"] for entry in original.ranks[0]["steps"]}) > 1


def without_clock(outcome: Outcome) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in outcome.logged("loss")]


def layout_of(event: dict[str, Any]) -> tuple[Any, ...]:
    # The number of micro-batches may be on trial then; it is compared step by step above.
    layout = event.get("to") or event["layout"]
    return event["step"], {key: value for key, value in layout.items() if key != "num_microbatches"}


def test_the_parts_of_a_model_are_found():
    for name in ("bert_masked", "vit", "deit"):
        embeddings, layers = encoder_parts(build_model(name))
        assert len(layers) == NUM_LAYERS
        assert list(embeddings.parameters())
