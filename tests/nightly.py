"""Tests that `make test` leaves out, so that it ends in minutes: marked slow here, and run by `make test-nightly`.

What stays of each kind in the tests of every change is named beside it.
"""

from __future__ import annotations

import re


FILES = (
    # Whole programs, products over features, families and the self-test: of each kind tests/trainer and
    # tests/distributed/test_equality.py have some.
    "conformance/test_conformance.py",
    "conformance/test_swap.py",
    "distributed/test_every_family.py",
    "distributed/test_nodes.py",
    "distributed/test_own_models.py",
    "distributed/test_real_input.py",
    "distributed/test_selftest.py",
    "scripts/test_augmentation.py",
    "scripts/test_bench.py",
    "scripts/test_notebook.py",
    "scripts/test_qa.py",
    "scripts/test_scripts.py",
    # On one process tests/trainer, tests/splitters and tests/data have the same.
    "distributed/test_afterwards.py",
    "distributed/test_decoders.py",
    "distributed/test_draws.py",
    "distributed/test_flattened.py",
    "distributed/test_fp16.py",
    "distributed/test_hosts.py",
    "distributed/test_node_cache.py",
    "distributed/test_preferences.py",
    "distributed/test_sft.py",
    # Other models and checkpoints than those of test_families.py and test_going_on.py.
    "splitters/test_experts.py",
    "splitters/test_own_models.py",
    "splitters/test_quantized.py",
    "splitters/test_uncommon.py",
    "state/test_trainers_checkpoints.py",
    # The search over token slices, and whole plans: test_planning.py has their parts.
    "planning/test_token_runs.py",
    "startup/test_run_plan.py",
)

_EQUALITY_2X1 = "xlm_roberta|distilbert|electra|mpnet|deberta|modernbert|dinov2|beit|siglip|ast-|roberta|deit|SHORT"
_KEPT_USAGES = (
    "BERT|T5|several outputs|a random forward|nan shown|a frozen parameter|layers skipped at random|a stream|workers"
    "|accumulation|bfloat16|the best model at the end|metrics by batches|steps of its own class|a loss function"
    "|a device map|a callback that changes the model|trained twice|dispatched batches"
)

CASES = tuple(
    re.compile(pattern)
    for pattern in (
        # One family of each kind of head stays.
        rf"distributed/test_equality\.py::.*\[2x1-({_EQUALITY_2X1})",
        r"distributed/test_equality\.py::.*\[(1x2|2x2)-(mpnet|bert_token|best)",
        # Of each kind of transition one stays.
        r"distributed/test_transition_laws\.py::.*\[(adamw-vit|all-at-once|loader-workers|compiled-layers|not-elastic"
        r"|fruitless|custom-policy|search-cut-short|cached-adamw-vit|cached-tokens|cached-recomputed"
        r"|cached-loader-workers|cached-own-plans|best-model|user-froze|sgd-bert|schedule|users-optimizer"
        r"|cached-answers|tied-embedding-moves|own-plans)",
        # Of the ways in which Trainer is used those that differ most stay.
        rf"trainer/test_left_to_trainer\.py::test_one_process\S*\[(?!({_KEPT_USAGES})\])",
        r"trainer/test_left_to_trainer\.py::test_what_was_left_to_trainer_is_gone_on_with",
        r"splitters/test_adapters\.py::test_a_model_that_was_dequantized",
        # Larger layouts of what K=2 shows.
        r"distributed/test_behaviour\.py::test_rank_0_alone_keeps_logits\S*\[(4-2|2-2-zb_v|2-1)",
        r"distributed/test_faults\.py::test_a_rank_that_falls_silent\S*\[host",
    )
)


def is_nightly(name: str) -> bool:
    """Return True for the id of a test that `make test` leaves out."""
    inside = name.split("tests/", 1)[-1]
    return inside.startswith(FILES) or any(pattern.match(inside) for pattern in CASES)
