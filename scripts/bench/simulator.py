"""How near predicted times come to measured ones: what committed files hold, and an experiment of its own.

A pair is a predicted and a measured figure of the same thing. Predictions that a run made itself from times of its
blocks are apart from those that know rates or the shape of a schedule alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from hf_pipetransformer.planning.simulator import simulate_equal
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.schedules.placement import Placement

from .async_throughput import emulated
from .measure import Settings, alternate, experiment, launch, report
from .models import MODELS, RandomModel, rows_of
from .tables import content, matching
from .training import StepClock, train


MEDIAN, WORST = 0.10, 0.20
"""Targets of absolute relative errors."""


class Pair(NamedTuple):
    """Figures of one thing, in any unit."""

    kind: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


# ---- from files ----


def planned() -> Iterator[Pair]:
    """Plans before the first step, from measured blocks and from the config: seconds of steps, bytes of ranks."""
    kinds = {"--plan_only": "a plan with measured blocks", "from the config": "a plan from the config and rates"}
    for model, found in matching(content("plan.json")):
        for source, kind in kinds.items():
            step = found[f"seconds of a step, {source}"]
            yield Pair(f"step: {kind}", model, step["predicted"], step["measured"])
        for source, kind in kinds.items():
            for rank, each in enumerate(found[f"bytes of each rank, {source}"]):
                yield Pair(f"memory: {kind}", f"{model}, rank {rank}", each["predicted"], each["measured"])


def after_transitions() -> Iterator[Pair]:
    """A step after layers froze, predicted when the run decided; medians over rounds."""
    for model, found in content("freezing.json")["prediction"].items():
        for layout, ratio in found.get("predicted over measured", {}).items():
            yield Pair("step: after a transition", f"{model}, {layout}", ratio["median"], 1.0)


def weight_gradients() -> Iterator[Pair]:
    """Steps with all and with half of the weight gradients, from the times of a run's own stages."""
    for schedule, found in content("timely.json").items():
        for what in ("nothing skipped", "shares skipped"):
            each = found[what]
            measured = each["measured s, medians of turns"]["median"]
            yield Pair("step: weight gradients skipped", f"{schedule}, {what}", each["predicted s"], measured)


def caching(batches: int = 8, batch: int = 16) -> Iterator[Pair]:
    """The time of the epochs after a freeze with records, from that without and the saving that `auto` predicted."""
    for cell in content("cache.json")["profiler"]["table"]:
        off, on = (cell["seconds"][mode]["median"] for mode in ("off", "on"))
        predicted = off - 1e-6 * cell["microseconds a sample saved, predicted"] * batches * batch
        name = f"{cell['layers']} x {cell['hidden']}, F={cell['F']}, {cell['microseconds a row added']} us added"
        yield Pair("epochs: the cache's decision", name, predicted, on)


def computing(schedule: str, size: int, m: int) -> float:
    """Share of the time that equal stages compute."""
    kind = find_schedule(schedule)
    return 1 - simulate_equal(kind, Placement(size, kind.abilities.min_chunks, kind.placement), m).bubble


def of_schedules() -> Iterator[Pair]:
    """Tables with equal stages alone: share of the time that ranks compute, and speed-up over one process."""
    both = content("schedules.json")
    for shape, found in matching(both["measured"], "K=*"):
        for schedule in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
            predicted, measured = both["simulated"][shape][schedule]["hop 0.0"]["ours"], found[schedule]["ours"]
            yield Pair("schedule alone: sleeping stages, K=4", f"{schedule}, {shape}", predicted, measured["median"])
    for file in ("pipeline_core.json", "zb_h1.json"):
        for model, shapes in content(file)["schedules"].items():
            for key, found in matching(shapes, "M=*"):
                for name, rate in matching(found["speed-up over one process"], "ours *"):
                    schedule = name.removeprefix("ours ")
                    where, predicted = f"{file}, {model}, {schedule}, {key}", 2 * computing(schedule, 2, int(key[2:]))
                    yield Pair("schedule alone: computing stages, K=2", where, predicted, rate["median"])


def asynchronous() -> Iterator[Pair]:
    """The gain of overlapping steps over the best synchronous schedule, from the bubble of equal stages alone."""
    for case, found in matching(content("async.json")):
        schedule, _, m = found["best synchronous"].partition(", M=")
        predicted = 1 / computing(schedule, int(case.split("K=")[1].split(",")[0]), int(m))
        for weights, rate in found["faster than the best synchronous"].items():
            kind = "schedule alone: asynchronous over synchronous"
            yield Pair(kind, f"{case}, {weights}", predicted, rate["median"])


SOURCES = (planned, after_transitions, weight_gradients, caching, of_schedules, asynchronous)
IS_PREDICTED = ("step: a plan with measured blocks", "step: after a transition", "step: weight gradients skipped",
                "epochs: the cache's decision")  # fmt: skip
"""Kinds of times that a run predicted from what it had measured: the library's simulator as it is used."""


def errors(kind: str, pairs: list[Pair]) -> dict[str, Any]:
    """Return a row: the median and the worst absolute relative error, and where that is."""
    worst = max(pairs, key=lambda each: abs(each.error))
    median = statistics.median(abs(each.error) for each in pairs)
    return {
        "kind": kind, "pairs": len(pairs), "median error, %": round(100 * median, 1),
        "worst, %": round(100 * worst.error, 1), "where": worst.name,
        "within 10 and 20 %": "yes" if median <= MEDIAN and abs(worst.error) <= WORST else "no",
    }  # fmt: skip


def summarized(pairs: list[Pair]) -> dict[str, Any]:
    """Return the errors by kind, over what runs predicted, and over all."""
    groups = {kind: [each for each in pairs if each.kind == kind] for kind in dict.fromkeys(p.kind for p in pairs)}
    groups["all times that runs predicted"] = [each for each in pairs if each.kind in IS_PREDICTED]
    groups["all"] = pairs
    return {
        "errors": [errors(kind, each) for kind, each in groups.items() if each],
        "pairs": [[each.kind, each.name, round(each.predicted, 5), round(each.measured, 5)] for each in pairs],
    }


def of_files() -> list[dict[str, Any]]:
    """Every predicted and measured pair of the committed files: median and worst error by kind."""
    return summarized([pair for source in SOURCES for pair in source()])["errors"]  # type: ignore[no-any-return]


# ---- measured ----


SLEEPING = "sleeping layers, K=4"
TRAINED = {**MODELS, SLEEPING: RandomModel(emulated, 16, 8)}
CASES = [("gpipe", 4), ("1f1b", 4), ("1f1b", 8), ("zb_h1", 4), ("zb_v", 4), ("interleaved_1f1b", 4), ("async_1f1b", 2)]
OF_SLEEPING = [("gpipe", 8), ("1f1b", 4), ("1f1b", 8), ("1f1b", 16), ("interleaved_1f1b", 8), ("async_1f1b", 4)]
"""Without zero bubbles: the gradients of a layer's weights are no part of its sleep."""
NUM_STEPS, NUM_WARM = 8, 2


def train_one(model_name: str, schedule: str, m: int) -> tuple[float, float]:
    """Return the step that a run predicts at its start, and the median of its steps, in seconds; zeros off rank 0."""
    make, batch, _ = TRAINED[model_name]
    model, inputs = make(batch * NUM_STEPS)  # One epoch: an asynchronous schedule drains at its end.
    clock = StepClock()
    trainer = train(
        {"model": model, "train_dataset": rows_of(inputs), "callbacks": [clock]}, batch, max_steps=NUM_STEPS,
        freeze_policy="none",
        pipeline_parallel_size=os.environ["WORLD_SIZE"], pipeline_schedule=schedule,
        pipeline_parallel_num_microbatches=str(m), pipeline_gather_at_end="never",
    )  # fmt: skip
    measured = statistics.median(clock.seconds[NUM_WARM:])
    predicted = [event["predicted_step_s"] for event in trainer.events if "predicted_step_s" in event]
    return (predicted[0] if predicted else 0.0), measured


def measured_pairs(rounds: int, cases: list[tuple[str, str, int]]) -> list[list[Any]]:
    """Train every case in turn, and return the medians of both figures over the rounds."""
    calls = {f"{schedule}; {name}, M={m}": partial(train_one, name, schedule, m) for name, schedule, m in cases}
    found = alternate(calls, rounds)
    report("predicted and measured seconds of a step", found)
    return [
        ["step: " + case.split("; ")[0], case.split("; ")[1], *map(statistics.median, zip(*each, strict=True))]
        for case, each in found.items()
    ]


@experiment("simulator.json", section="measured", minutes=8, quick_minutes=1.5, processes=4)
def simulator(settings: Settings) -> dict[str, Any]:
    """Steps of two and four stages under each schedule beside what the run predicts at its start."""
    cases = {2: [(name, *case) for name in MODELS for case in CASES], 4: [(SLEEPING, *case) for case in OF_SLEEPING]}
    rows = [
        row
        for num_stages, of_size in cases.items()
        for row in launch(
            measured_pairs, num_stages, settings.of(2, 1), settings.of(of_size, of_size[1::5]), minutes=25
        )
    ]
    return summarized([Pair(*row) for row in rows])
