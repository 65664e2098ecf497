"""What is compared with plain Trainer: every case is one short training run, then evaluation and prediction."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.support.models import MODELS


__all__ = ["CI_CASES", "GLOBAL_BATCH", "GLOBAL_EVAL_BATCH", "LAYOUTS", "SLOW_CASES", "Case"]

# K stages x R replicas.
LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]

# Samples of one loader batch over all ranks, the same for every layout: one reference serves them all.
GLOBAL_BATCH = 8
GLOBAL_EVAL_BATCH = 4

# Neither is a multiple of its batch: the last batch of training has 5 samples, the last of evaluation 1, which
# leaves a second replica without any.
NUM_SAMPLES = 53
NUM_EVAL_SAMPLES = 13


@dataclass(frozen=True)
class Case:
    """One training run.

    Args:
        name: names the case in test ids and files.
        model: a key of `tests.support.models.MODELS`.
        schedule: what `pipeline_schedule` takes.
        num_microbatches: M, or "auto".
        accumulation: gradient accumulation steps.
        num_samples: samples of the training set.
        epochs: long enough for 20 optimizer steps, unless the case is about something short.
        options: changes to `TrainingArguments`, of both runs.
        pipeline_options: changes to `PipeTransformerArguments`, which plain Trainer does not get.
        loss: `override` (a subclass overrides `compute_loss`), `function` (`compute_loss_func` that divides by
            `num_items_in_batch`), `mean_function` (one that ignores it), or None.
        metrics: `logits` or `classes` (through `preprocess_logits_for_metrics`), or None.
        stop_early: use `EarlyStoppingCallback`.
        evaluate_first: predict before training too.
        change: `nan` (one sample whose pixels are not a number), `ignored_labels` (some samples with label -100),
            `ignored_answers` (some questions whose answer lies outside), `seeded` (by the script, after it made the
            trainer), or None.
        attention: the attention implementation, `sdpa` or `eager`; None leaves the choice to transformers.
        num_frozen_layers: layers frozen from the start on, and the embeddings with them; 0 freezes nothing.
        tolerance: largest relative difference of losses, gradient norms, weights and predictions.
    """

    name: str
    model: str
    schedule: str = "1f1b"
    num_microbatches: int | str = 4
    accumulation: int = 1
    num_samples: int = NUM_SAMPLES
    epochs: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    pipeline_options: dict[str, Any] = field(default_factory=dict)
    loss: str | None = None
    metrics: str | None = None
    stop_early: bool = False
    evaluate_first: bool = False
    change: str | None = None
    attention: str | None = None
    num_frozen_layers: int = 0
    tolerance: float = 1e-5

    @property
    def reference(self) -> Case:
        """The case as plain Trainer runs it: schedule and micro-batches are unknown to it."""
        plain = replace(self, name="", schedule="", num_microbatches=1, pipeline_options={}, tolerance=0.0)
        digest = hashlib.sha256(json.dumps(asdict(plain), sort_keys=True).encode()).hexdigest()[:12]
        return replace(plain, name=f"{self.model}-{digest}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# One model of each family, in the order of the table in docs/models.md.
FAMILY_MODELS = list({tiny.family: name for name, tiny in reversed(MODELS.items())}.values())[::-1]
# The two shapes of layers, with every task of theirs: both schedules with both accumulations. The other families share
# what is not in their splitter, and get each schedule and each accumulation once.
THOROUGH_FAMILIES = ("BERT", "RoBERTa", "ViT", "DeiT")

# Law 1 for `make test-all`, on every layout.
PRODUCT = [
    Case(f"{model}-{schedule}-accumulation{accumulation}", model, schedule, 4, accumulation, epochs=epochs)
    for model, tiny in MODELS.items()
    for schedule in ("gpipe", "1f1b")
    for accumulation, epochs in ((1, 3), (2, 5))
    if tiny.family in THOROUGH_FAMILIES or (schedule == "gpipe") == (accumulation == 2)
]
# Elsewhere transformers chooses: sdpa, but for the families that have eager attention only.
WITHOUT_SDPA = ("mpnet_question", "deberta_sequence")
EAGER = {
    model: Case(f"{model}-eager", model, attention="eager") for model in FAMILY_MODELS if model not in WITHOUT_SDPA
}
# Else the two stages would become two replicas.
FIXED_STAGES = {"activation_cache": "off", "elastic": False}
FROZEN = {
    model: Case(f"{model}-frozen", model, num_frozen_layers=2, pipeline_options=FIXED_STAGES)
    for model in FAMILY_MODELS
}


# Several stages on a rank, and backwards in two halves. `masked` ties the head to the embeddings: of other ranks, and
# of the same one under `zb_v`.
CHUNKED = {
    (model, schedule): Case(f"{model}-{schedule}", model, schedule, 4)
    for model in ("bert_sequence", "bert_masked", "vit")
    for schedule in ("interleaved_1f1b", "zb_h1", "zb_v")
}
_THREE = {"pipeline_chunks": 3}
CHUNKED_CHANGES = [
    Case("interleaved-V-of-3", "bert_masked", "interleaved_1f1b", 3, 2, epochs=5, pipeline_options=_THREE),
    *(Case(f"{name}-M-of-1", "bert_masked", name, 1) for name in ("interleaved_1f1b", "zb_h1", "zb_v")),
    *(Case(f"{name}-M-of-5", "bert_sequence", name, 5, 2, epochs=5) for name in ("interleaved_1f1b", "zb_h1", "zb_v")),
    *(
        Case(f"{name}-frozen", "bert_masked", name, num_frozen_layers=2, pipeline_options=FIXED_STAGES)
        for name in ("interleaved_1f1b", "zb_h1", "zb_v")
    ),
    *(
        Case(f"{name}-recomputed", "vit", name, pipeline_options={"pipeline_checkpoint": "always"})
        for name in ("interleaved_1f1b", "zb_h1", "zb_v")
    ),
    Case("zb_v-last-batch-of-one-sample", "vit", "zb_v", 2, num_samples=49),
    Case("zb_h1-bf16", "bert_sequence", "zb_h1", 2, options={"bf16": True}, tolerance=2e-2),
    Case("zb_v-loss-not-a-number", "vit", "zb_v", 2, change="nan"),
]


def _product(model: str, schedule: str, accumulation: int) -> Case:
    return next(
        case for case in PRODUCT if (case.model, case.schedule, case.accumulation) == (model, schedule, accumulation)
    )


# No metric of a tiny model is sure to get worse, so "best" is turned round: the loss falls, every evaluation after the
# first is "worse", training stops in the middle and the best weights are those of the first evaluation.
_EVERY_TWO_STEPS = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}
_SAVE_EVERY_TWO_STEPS = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
_BEST = {**_EVERY_TWO_STEPS, **_SAVE_EVERY_TWO_STEPS, "load_best_model_at_end": True}

UNEVEN_MICROBATCHES = Case("M-not-dividing-the-batch", "bert_sequence", "gpipe", 3, 2, epochs=5)
MANY_MICROBATCHES = Case("M-larger-than-the-batch", "bert_masked", "1f1b", 16)
FEW_MICROBATCHES = Case("M-smaller-than-K", "bert_question", "1f1b", 1)
AUTO_MICROBATCHES = Case("M-auto", "vit", "1f1b", "auto")
# 49 samples leave one for the last batch of an epoch: all replicas but one get none.
LONELY_SAMPLE = Case("last-batch-of-one-sample", "vit", "1f1b", 2, num_samples=49)
# ... and in the third epoch that one has no label, so that the mean of its loss is not a number and its gradient zero.
UNLABELLED_BATCH = Case("last-batch-without-labels", "bert_token", "1f1b", 2, num_samples=49)
SHORT_DATA = Case("data-shorter-than-a-batch", "bert_sequence", "1f1b", 2, num_samples=3, epochs=20)
ONE_SAMPLE = Case("data-of-one-sample", "vit", "gpipe", 2, 2, num_samples=1, epochs=20)
SMOOTHED = Case("label-smoothing", "bert_sequence", options={"label_smoothing_factor": 0.1})
SMOOTHED_TOKENS = Case(
    "label-smoothing-of-tokens", "bert_token", "gpipe", 3, 2, epochs=5, options={"label_smoothing_factor": 0.1}
)
SMOOTHED_IMAGES = Case(
    "label-smoothing-of-images", "vit", "gpipe", 3, 2, epochs=5, options={"label_smoothing_factor": 0.1}
)
OVERRIDDEN_LOSS = Case("compute_loss-overridden", "bert_sequence", "1f1b", 3, 2, epochs=5, loss="override")
LOSS_FUNCTION = Case("compute_loss_func", "bert_sequence", "1f1b", 3, 2, epochs=5, loss="function")
TOKEN_LOSS_FUNCTION = Case("compute_loss_func-of-tokens", "bert_token", "1f1b", 3, 2, epochs=5, loss="function")
MEAN_LOSS_FUNCTION = Case("compute_loss_func-that-takes-a-mean", "bert_sequence", "1f1b", 3, loss="mean_function")
METRICS = Case("compute_metrics", "bert_token", "1f1b", 2, metrics="logits")
CLASS_METRICS = Case("preprocess_logits_for_metrics", "bert_token", "gpipe", 2, metrics="classes")
MAX_STEPS = Case("max_steps", "bert_sequence", "1f1b", 2, 2, options={"max_steps": 10})
EARLY_STOP = Case("early-stopping", "vit", "1f1b", 2, options=_EVERY_TWO_STEPS, stop_early=True)
BEST_MODEL = Case("load_best_model_at_end", "bert_masked", "1f1b", 2, epochs=1, options=_BEST)
EVALUATE_FIRST = Case("predict-before-training", "bert_sequence", "1f1b", 2, epochs=1, evaluate_first=True)
LONG_LOGS = Case("logging-every-four-steps", "vit", "1f1b", 2, options={"logging_steps": 4}, change="seeded")
NO_CLIPPING = Case("no-clipping", "bert_sequence", "1f1b", 2, options={"max_grad_norm": 0.0})
RECOMPUTED = Case(
    "pipeline_checkpoint-always", "bert_sequence", "1f1b", 2, pipeline_options={"pipeline_checkpoint": "always"}
)
RECOMPUTED_BUT_LAST = Case(
    "pipeline_checkpoint-except_last", "vit", "gpipe", 4, pipeline_options={"pipeline_checkpoint": "except_last"}
)
ACTIVATION_CHECKPOINTING = Case(
    "activation_checkpointing", "bert_token", "1f1b", 2, options={"activation_checkpointing": True}
)
IGNORED_LABELS = Case("labels-of-minus-100", "bert_sequence", "1f1b", 4, change="ignored_labels")
IGNORED_ANSWERS = Case("answers-outside-the-text", "bert_question", "1f1b", 4, change="ignored_answers")
# Trainer goes on after a loss that is not a number, and so does the pipeline.
NAN_FILTERED = Case("loss-not-a-number", "vit", "1f1b", 2, change="nan")
NAN_LOGGED = Case(
    "loss-not-a-number-logged", "vit", "gpipe", 2, change="nan", options={"logging_nan_inf_filter": False}
)
# bfloat16 keeps 8 bits of a number, a relative step of 4e-3. Micro-batches change the order of sums; a changed last
# bit of an fp32 sum flips a rounding now and then, and 20 optimizer steps carry it on: a few such steps, no more.
BF16 = Case("bf16", "bert_sequence", "1f1b", 2, options={"bf16": True}, tolerance=2e-2)
BF16_IMAGES = Case("bf16-images", "vit", "1f1b", 2, options={"bf16": True}, tolerance=2e-2)

# A pruned product for every change: each model, schedule, accumulation and special case at least once, and on the
# layout where it can fail.
CI_CASES: dict[tuple[int, int], list[Case]] = {
    (1, 1): [
        _product("bert_sequence", "1f1b", 2),
        _product("vit", "gpipe", 1),
        MANY_MICROBATCHES,
        MEAN_LOSS_FUNCTION,
    ],
    (1, 2): [
        _product("bert_token", "1f1b", 2),
        _product("vit", "gpipe", 2),
        LONELY_SAMPLE,
        UNLABELLED_BATCH,
        ONE_SAMPLE,
        SMOOTHED_TOKENS,
        LOSS_FUNCTION,
        MEAN_LOSS_FUNCTION,
        BEST_MODEL,
    ],
    (2, 1): [
        _product("bert_sequence", "1f1b", 1),
        _product("bert_token", "gpipe", 1),
        _product("bert_masked", "1f1b", 2),
        _product("roberta_sequence", "1f1b", 1),
        _product("vit", "1f1b", 2),
        _product("deit", "gpipe", 1),
        _product("xlm_roberta_token", "1f1b", 1),
        _product("distilbert_masked", "gpipe", 2),
        _product("electra_token", "1f1b", 1),
        _product("mpnet_question", "1f1b", 1),
        _product("deberta_sequence", "gpipe", 2),
        _product("modernbert_masked", "gpipe", 2),
        _product("dinov2", "1f1b", 1),
        _product("dinov2_with_registers", "1f1b", 1),
        _product("beit", "gpipe", 2),
        _product("siglip", "1f1b", 1),
        _product("ast", "gpipe", 2),
        EAGER["bert_sequence"],
        UNEVEN_MICROBATCHES,
        FEW_MICROBATCHES,
        AUTO_MICROBATCHES,
        SHORT_DATA,
        EVALUATE_FIRST,
        RECOMPUTED,
        RECOMPUTED_BUT_LAST,
        IGNORED_LABELS,
        IGNORED_ANSWERS,
        NAN_FILTERED,
        NAN_LOGGED,
        BF16,
        CHUNKED["vit", "zb_h1"],
        CHUNKED["bert_masked", "zb_v"],
    ],
    (2, 2): [
        _product("bert_masked", "1f1b", 2),
        _product("vit", "1f1b", 1),
        _product("mpnet_question", "1f1b", 1),
        LONELY_SAMPLE,
        UNLABELLED_BATCH,
        SMOOTHED_TOKENS,
        TOKEN_LOSS_FUNCTION,
        METRICS,
        BEST_MODEL,
        CHUNKED["bert_masked", "interleaved_1f1b"],
        CHUNKED["vit", "zb_v"],
    ],
    (4, 1): [
        _product("bert_masked", "1f1b", 1),
        _product("deberta_sequence", "gpipe", 2),
        FEW_MICROBATCHES,
        RECOMPUTED,
        CHUNKED["bert_masked", "zb_v"],
    ],
}

# Each of these features by itself; tests/conformance has them with others in every run of CI.
BY_ITSELF = [
    *(SMOOTHED, SMOOTHED_IMAGES, OVERRIDDEN_LOSS, LOSS_FUNCTION, METRICS, CLASS_METRICS, MAX_STEPS, EARLY_STOP),
    *(BEST_MODEL, LONG_LOGS, NO_CLIPPING, ACTIVATION_CHECKPOINTING, MANY_MICROBATCHES, BF16_IMAGES),
]

# What `make test-all` adds on a layout.
SLOW_CASES: dict[tuple[int, int], list[Case]] = {
    layout: [
        case
        for case in [
            *PRODUCT,
            *([*EAGER.values(), *FROZEN.values(), *BY_ITSELF, *CHUNKED_CHANGES] if layout == (2, 1) else []),
            *(CHUNKED.values() if layout[0] > 1 else []),
        ]
        if case not in CI_CASES[layout]
    ]
    for layout in LAYOUTS
}
