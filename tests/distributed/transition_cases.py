"""Runs whose layout changes while they train: what freezes when, and which layouts they go through."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hf_pipetransformer.schedules.tables import find_schedule
from tests.support.models import NUM_LAYERS


__all__ = [
    "BROAD",
    "CACHED_CASES",
    "CASES",
    "NODES",
    "NUM_EVAL_SAMPLES",
    "SLOW_CASES",
    "WORLD_SIZE",
    "Phase",
    "TransitionCase",
]

WORLD_SIZE = 4
# Samples of one loader batch over all ranks: K=4 gives a pipeline all of them, K=1 gives each rank two.
GLOBAL_BATCH = 8
GLOBAL_EVAL_BATCH = 4
NUM_EVAL_SAMPLES = 13
NUM_BLOCKS = 2 * NUM_LAYERS + 2

Phase = tuple[int, int, list[int], int] | tuple[int, int, list[int], int, int]
"""From which optimizer step on: F, the stage boundaries, M, and in a case with the activation cache how many layers'
output is stored; all F without that entry."""

# 53 samples are seven steps an epoch, the last of five samples. Steps 14 and 28 begin an epoch, the others lie amid
# one. K goes 4, 2, 1 and grows again; stages of step 5 and later are frozen in part or wholly; nothing is newly
# frozen at 14 and 24; at 32 only the head is left.
CHAIN: list[Phase] = [
    (0, 0, [0, 2, 4, 6, 10], 4),
    (5, 1, [0, 2, 4, 6, 10], 4),
    (10, 2, [0, 5, 10], 3),
    (14, 2, [0, 6, 10], 3),
    (17, 3, [0, 10], 2),
    (24, 3, [0, 3, 10], 3),
    (28, 3, [0, 10], 1),
    (32, 4, [0, 10], 2),
]
# Cuts between layers only, with more micro-batches than samples once K is 1.
COARSE_CHAIN: list[Phase] = [
    (0, 0, [0, 3, 5, 7, 10], 6),
    (3, 1, [0, 5, 7, 9, 10], 8),
    (11, 1, [0, 7, 10], 2),
    (16, 2, [0, 10], 4),
    (23, 3, [0, 7, 10], 1),
]
# Nothing freezes: the layout alone changes.
MOVES_ONLY: list[Phase] = [
    (0, 0, [0, 5, 10], 2),
    (3, 0, [0, 10], 2),
    (5, 0, [0, 2, 4, 6, 10], 4),
    (9, 0, [0, 1, 4, 9, 10], 4),
    (12, 0, [0, 4, 10], 3),
]
# What is stored stays below what is frozen for more than an epoch, at places of every kind: nothing is stored yet,
# stored rows are lifted in part, then wholly. The entry lies in the first, a middle and the only stage.
LAGGING: list[Phase] = [
    (0, 0, [0, 2, 4, 6, 10], 4),
    (5, 2, [0, 2, 4, 6, 10], 4, 0),
    (9, 2, [0, 2, 4, 6, 10], 4, 1),
    (17, 3, [0, 5, 10], 3, 1),
    (23, 3, [0, 5, 10], 3, 2),
    (26, 4, [0, 10], 2, 2),
    (30, 4, [0, 10], 2, 4),
]
# The same with two stages a rank; at the end one rank has a stage of frozen blocks and the head.
CHUNKED_MOVES: list[Phase] = [
    (0, 0, [0, 2, 3, 4, 5, 6, 7, 8, 10], 4),
    (3, 0, [0, 2, 5, 7, 10], 3),
    (5, 0, [0, 10], 2),
    (9, 0, [0, 1, 2, 4, 5, 6, 7, 9, 10], 4),
    (12, 0, [0, 3, 5, 8, 10], 2),
]
CHUNKED_AT_ONCE: list[Phase] = [
    (0, 0, [0, 2, 3, 4, 5, 6, 7, 8, 10], 4),
    (2, 0, [0, 3, 5, 8, 10], 4),
    (4, 4, [0, 3, 6, 9, 10], 2),
    (6, 4, [0, 10], 2),
]
# As `CHAIN`, its stages halved.
CHUNKED_CHAIN: list[Phase] = [
    (0, 0, [0, 2, 3, 4, 5, 6, 7, 8, 10], 4),
    (5, 1, [0, 2, 3, 4, 5, 6, 7, 8, 10], 4),
    (10, 2, [0, 3, 6, 8, 10], 3),
    (14, 2, [0, 5, 7, 8, 10], 3),
    (17, 3, [0, 10], 2),
    (24, 3, [0, 4, 7, 8, 10], 3),
    (28, 3, [0, 10], 1),
    (32, 4, [0, 10], 2),
]
# Two passes and more over what is stored at F=3, one without, and again at F=2, with other weights; part of it
# unfreezes.
UNFROZEN: list[Phase] = [
    (0, 0, [0, 2, 4, 6, 10], 4),
    (2, 3, [0, 10], 2),
    (16, 0, [0, 3, 5, 7, 10], 4),
    (21, 2, [0, 5, 10], 3),
    (30, 1, [0, 4, 10], 3),
]
UNFROZEN_IN_A_V: list[Phase] = [
    (0, 0, [0, 2, 3, 4, 5, 6, 7, 8, 10], 4),
    (2, 3, [0, 10], 2),
    (4, 0, [0, 3, 5, 8, 10], 4),
    (6, 1, [0, 2, 3, 4, 5, 6, 7, 8, 10], 4),
]
# Freezing of wholes of the model at once, the head left.
AT_ONCE: list[Phase] = [(0, 0, [0, 3, 10], 2), (4, 4, [0, 10], 2)]


@dataclass(frozen=True)
class TransitionCase:
    """One training run on four processes, and its references on one.

    Args:
        name: names the case in test ids and files.
        model: a key of `tests.support.models.MODELS`.
        plan: the layouts, replayed; empty leaves them to the library's own decisions.
        freeze_at: option of the references, and of the run itself if there is no plan; None freezes nothing.
        schedule: its name.
        num_chunks: stages of each rank where a pipeline has several ranks.
        accumulation: gradient accumulation steps.
        num_samples: samples of the training set.
        epochs: of training.
        options: changes to `TrainingArguments`, of all runs.
        pipeline_options: changes to `PipeTransformerArguments` of the run on four processes.
        cached: whether the run on four processes has the activation cache.
        changes: what else is special, see `transition_worker`.
        policy: name of a custom freeze policy of `transition_worker`, of the run on four processes.
        follows: the name of the run that is replayed.
        compares: whether the references take the same steps: not if chance or a clock decides.
        tolerance: largest relative difference of losses, gradient norms and weights from the references.
    """

    name: str
    model: str = "bert_sequence"
    plan: list[Phase] = field(default_factory=list)
    freeze_at: str | None = None
    schedule: str = "1f1b"
    num_chunks: int = 1
    accumulation: int = 1
    num_samples: int = 53
    epochs: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    pipeline_options: dict[str, Any] = field(default_factory=dict)
    cached: bool = False
    changes: list[str] = field(default_factory=list)
    policy: str | None = None
    follows: str | None = None
    compares: bool = True
    tolerance: float = 1e-5

    @property
    def reference(self) -> TransitionCase:
        """The case on one process: layouts and schedule are nothing to it."""
        plain = replace(
            self,
            name="",
            plan=[],
            schedule="1f1b",
            num_chunks=1,
            pipeline_options={},
            cached=False,
            policy=None,
            follows=None,
            compares=True,
        )
        digest = hashlib.sha256(json.dumps(asdict(plain), sort_keys=True).encode()).hexdigest()[:12]
        return replace(plain, name=f"{self.model}-{digest}")

    @property
    def frozen_at(self) -> dict[int, int]:
        """Optimizer step to F from then on, as `freeze_at` says."""
        pairs = (part.split(":") for part in (self.freeze_at or "").split(",") if part)
        return {int(step): int(layers) for step, layers in pairs}

    def plan_lines(self, world_size: int = WORLD_SIZE) -> str:
        """The plan as the events file of a run."""
        events = []
        for phase in self.plan:
            step, num_frozen, boundaries, num_microbatches, *_ = phase
            num_stages = len(boundaries) - 1
            num_chunks = self.num_chunks if num_stages > 1 else 1
            layout = {
                "num_layers": NUM_LAYERS,
                "num_frozen_layers": num_frozen,
                "num_stages": num_stages,
                "num_replicas": world_size // (num_stages // num_chunks),
                "boundaries": boundaries,
                "num_microbatches": num_microbatches,
                "schedule": self.schedule,
                "cache_level": self.cache_level(phase),
                "num_chunks": num_chunks,
                "placement": find_schedule(self.schedule).abilities.placement,
            }
            key = "to" if events else "layout"
            events.append({"event": "transition" if events else "run", "step": step, key: layout})
        return "".join(f"{json.dumps(event)}\n" for event in events)

    def cache_level(self, phase: Phase) -> int:
        """How many layers' output is stored in a phase of the plan."""
        return (phase[4] if len(phase) > 4 else phase[1]) if self.cached else 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def planned(name: str, model: str, plan: list[Phase] | None = None, **changes: Any) -> TransitionCase:
    """A case that goes through `plan`, its references freezing at the same steps."""
    plan = CHAIN if plan is None else plan
    steps = [(step, now) for (_, before, *_), (step, now, *_) in zip(plan, plan[1:], strict=False) if now != before]
    freeze_at = ",".join(f"{step}:{layers}" for step, layers in steps) or None
    return TransitionCase(name, model, plan, freeze_at, **changes)


SGD = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 1e-2}
# With the default, adamw_torch_fused, every optimizer of Trainer that needs no further package.
OPTIMIZERS = {
    "adamw_torch": {"optim": "adamw_torch"},
    "adafactor": {"optim": "adafactor"},
    "adagrad": {"optim": "adagrad", "learning_rate": 1e-2},
    "rmsprop": {"optim": "rmsprop"},
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}
# The loss falls, so with "greater is better" the best weights are those of the first evaluation: they lie several
# transitions back.
BEST = {
    **EVALUATED,
    "save_strategy": "steps",
    "save_steps": 4,
    "save_only_model": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}
FOUR = {"pipeline_parallel_size": 4, "pipeline_compression": "memory"}
FOUR_BY_MEMORY = {**FOUR, "pipeline_parallel_num_microbatches": 4}
BY_STEPS = {"freeze_interval": 4, "freeze_warmup": 0, "freeze_min_active_layers": 0, "pipeline_parallel_size": 4}
BY_MEMORY = {**BY_STEPS, **FOUR_BY_MEMORY}

WORKERS = {"dataloader_num_workers": 2}
# A stream has no length: 35 steps are five times its 53 samples.
STREAMED = {"max_steps": 35, "dataloader_num_workers": 1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
NOT_ELASTIC = {**FOUR_BY_MEMORY, "elastic": False, "freeze_policy": "fixed", "freeze_at": "5:1,10:2,17:3"}
# All stages but one go at step 2, and come back.
UNFREEZING = {**FOUR_BY_MEMORY, "freeze_policy": "fixed", "freeze_at": "2:3,5:0,8:1"}
OWN_PLANS = {**FOUR_BY_MEMORY, "freeze_policy": "fixed", "freeze_at": "0:1,10:2,17:3"}

# Followed through every step: bits around transitions, what freezes, traffic, samples.
BROAD = planned("adamw-bert", "bert_sequence", changes=["buffers"])

CASES = [
    BROAD,
    planned("adamw-vit", "vit", options=EVALUATED),
    planned("sgd-bert", "bert_sequence", COARSE_CHAIN, options=SGD, accumulation=2, epochs=9),
    planned("tied-embedding-moves-only", "bert_masked", MOVES_ONLY, epochs=2),
    planned("all-at-once", "vit", AT_ONCE, epochs=1),
    planned("interleaved", "vit", CHUNKED_AT_ONCE, epochs=1, schedule="interleaved_1f1b", num_chunks=2),
    # In a V the embedding and the head that is tied to it lie on one rank.
    planned("tied-embedding-in-a-v", "bert_masked", CHUNKED_MOVES, epochs=2, schedule="zb_v", num_chunks=2),
    planned("best-model", "bert_masked", options=BEST),
    planned("loader-workers", "bert_sequence", options=WORKERS, epochs=4),
    # Each pass over the stream ends where a decision is due; Trainer, which does not know, asks on for batches.
    TransitionCase(
        "stream-own-decisions",
        freeze_at="7:2,14:3,28:4",
        options=STREAMED,
        pipeline_options={**BY_MEMORY, "freeze_interval": 7, "freeze_policy": "schedule"},
        changes=["stream"],
    ),
    planned("users-optimizer", "bert_masked", changes=["optimizer"]),
    planned("compiled-layers", "vit", AT_ONCE, epochs=1, pipeline_options=COMPILED),
    TransitionCase(
        "not-elastic",
        "bert_sequence",
        freeze_at="5:1,10:2,17:3",
        epochs=3,
        pipeline_options=NOT_ELASTIC,
    ),
    TransitionCase(
        "own-plans",
        "vit",
        freeze_at="0:1,10:2,17:3",
        epochs=3,
        pipeline_options=OWN_PLANS,
    ),
    TransitionCase(
        "user-froze-the-prefix",
        "bert_sequence",
        freeze_at="5:2",
        epochs=2,
        pipeline_options={**FOUR_BY_MEMORY, "freeze_policy": "fixed", "freeze_at": "5:2"},
        changes=["freeze_prefix"],
    ),
    planned("user-froze-a-middle-layer", "bert_sequence", changes=["freeze_middle"]),
    TransitionCase("fruitless-policy", epochs=3, pipeline_options={**BY_MEMORY, "freeze_interval": 3}, policy="never"),
    TransitionCase(
        "custom-policy",
        freeze_at="4:1,8:2,12:3,16:4",
        epochs=3,
        pipeline_options=BY_MEMORY,
        policy="one_by_one",
    ),
    planned(
        "dropout",
        "bert_sequence",
        [(0, 0, [0, 5, 10], 2), (2, 2, [0, 10], 2)],
        epochs=1,
        changes=["dropout"],
        compares=False,
    ),
    TransitionCase(
        "schedule",
        epochs=4,
        pipeline_options={**BY_STEPS, "freeze_interval": 10, "freeze_policy": "schedule"},
        compares=False,
    ),
    TransitionCase("schedule-replayed", epochs=4, follows="schedule", compares=False),
    # The search for M is cut short by a transition to a layout that needs none.
    TransitionCase(
        "search-cut-short",
        epochs=2,
        freeze_at="4:4",
        pipeline_options={**FOUR, "freeze_policy": "fixed", "freeze_at": "4:4"},
    ),
    TransitionCase("search-cut-short-replayed", epochs=2, freeze_at="4:4", follows="search-cut-short"),
    TransitionCase(
        "gradient-norms",
        # What the policy decides on these data; the test of its decisions works them out from the norms.
        freeze_at="4:2,12:3",
        epochs=3,
        pipeline_options={
            **BY_MEMORY,
            "freeze_policy": "gradient_norm",
            "freeze_alpha": 0.6,
            "freeze_rule": "exclusive",
        },
    ),
]

CASES.append(
    TransitionCase("unfreezing", "bert_masked", freeze_at="2:3,5:0,8:1", epochs=2, pipeline_options=UNFREEZING)
)

# The same with stored activations; most share their references with a case above.
CACHED_CASES = [
    planned("cached-adamw-bert", "bert_sequence", cached=True),
    planned("cached-adamw-vit", "vit", options=EVALUATED, cached=True),
    # The loss sees padding, and the padded length changes from batch to batch.
    planned("cached-answers", "bert_question", options=SGD, changes=["pad_to_longest"], cached=True),
    planned("cached-tokens-gpipe-accumulation", "bert_token", schedule="gpipe", accumulation=2, epochs=9, cached=True),
    planned("cached-recomputed", "bert_sequence", pipeline_options={"pipeline_checkpoint": "always"}, cached=True),
    planned("cached-loader-workers", "bert_sequence", options=WORKERS, epochs=4, cached=True),
    planned("cached-below-frozen", "bert_sequence", LAGGING, cached=True),
    TransitionCase(
        "cached-not-elastic",
        "bert_sequence",
        freeze_at="5:1,10:2,17:3",
        epochs=3,
        pipeline_options=NOT_ELASTIC,
        cached=True,
    ),
    TransitionCase(
        "cached-own-plans", "vit", freeze_at="0:1,10:2,17:3", epochs=3, pipeline_options=OWN_PLANS, cached=True
    ),
]
CASES += CACHED_CASES

# The larger products, for `make test-all`.
SLOW_CASES = [
    planned("unfrozen-cached", "bert_sequence", UNFROZEN, cached=True),
    planned("unfrozen-users-optimizer", "bert_masked", UNFROZEN, changes=["optimizer"]),
    planned("unfrozen-in-a-v", "vit", UNFROZEN_IN_A_V, epochs=2, schedule="zb_v", num_chunks=2),
    TransitionCase(
        "unfreezing-not-elastic",
        freeze_at="2:3,5:0,8:1",
        epochs=2,
        pipeline_options={**UNFREEZING, "elastic": False},
    ),
    TransitionCase("unfreezing-replayed", "bert_masked", freeze_at="2:3,5:0,8:1", epochs=2, follows="unfreezing"),
    planned("averaged-by-callback", "bert_sequence", changes=["average"], epochs=3),
    planned("stream", "bert_sequence", options=STREAMED, changes=["stream"]),
    planned("adafactor", "bert_sequence", COARSE_CHAIN, options=OPTIMIZERS["adafactor"]),
    planned("sgd-vit", "vit", options=SGD, schedule="gpipe", num_samples=49),
    planned("tokens-gpipe-accumulation", "bert_token", schedule="gpipe", accumulation=2, epochs=9),
    planned(
        "stream-accumulation", "vit", options={"max_steps": 20}, accumulation=2, num_samples=64, changes=["stream"]
    ),
    planned("compiled-layers-moving", "vit", MOVES_ONLY, epochs=2, pipeline_options=COMPILED),
    *(planned(f"{name}-bert", "bert_sequence", options=options) for name, options in OPTIMIZERS.items()),
    *(planned(f"{name}-vit", "vit", COARSE_CHAIN, options=options) for name, options in OPTIMIZERS.items()),
    planned("sgd-bert-chain", "bert_sequence", options=SGD),
    planned("sgd-vit-coarse", "vit", COARSE_CHAIN, options=SGD, accumulation=2, epochs=9),
    planned(
        "sgd-tied-embedding", "bert_masked", COARSE_CHAIN, options=SGD, schedule="gpipe", accumulation=2, epochs=9
    ),
    planned("answers", "bert_question"),
    planned("interleaved-chain", "bert_sequence", CHUNKED_CHAIN, schedule="interleaved_1f1b", num_chunks=2),
    planned("interleaved-tied", "bert_masked", CHUNKED_MOVES, epochs=2, schedule="interleaved_1f1b", num_chunks=2),
    planned("v-chain", "bert_sequence", CHUNKED_CHAIN, schedule="zb_v", num_chunks=2),
    planned("v-frozen", "vit", CHUNKED_AT_ONCE, epochs=1, schedule="zb_v", num_chunks=2),
    *(
        TransitionCase(
            f"own-plans-{schedule}",
            "vit",
            freeze_at="0:1,10:2,17:3",
            schedule=schedule,
            epochs=3,
            pipeline_options=OWN_PLANS,
        )
        for schedule in ("interleaved_1f1b", "zb_v")
    ),
    planned("split-backward-chain", "bert_sequence", schedule="zb_h1"),
    planned(
        "v-recomputed",
        "bert_sequence",
        CHUNKED_CHAIN,
        schedule="zb_v",
        num_chunks=2,
        pipeline_options={"pipeline_checkpoint": "always"},
    ),
    planned(
        "cached-interleaved", "bert_sequence", CHUNKED_CHAIN, schedule="interleaved_1f1b", num_chunks=2, cached=True
    ),
    planned("roberta", "roberta_sequence", COARSE_CHAIN),
    planned("deit", "deit", schedule="gpipe"),
    planned("lonely-sample-accumulation", "bert_token", num_samples=49, accumulation=2, epochs=9),
    planned("recomputed", "bert_sequence", pipeline_options={"pipeline_checkpoint": "always"}),
    planned(
        "persistent-workers",
        "bert_sequence",
        options={"dataloader_num_workers": 2, "dataloader_persistent_workers": True, **EVALUATED},
    ),
]

# Two nodes of two processes: K=2 on each node, then K=1.
NODES = TransitionCase(
    "two-nodes",
    "bert_sequence",
    freeze_at="5:2,10:4",
    epochs=2,
    pipeline_options={
        **FOUR_BY_MEMORY,
        "pipeline_parallel_size": 2,
        "freeze_policy": "fixed",
        "freeze_at": "5:2,10:4",
    },
)
