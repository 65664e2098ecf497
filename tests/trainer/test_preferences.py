"""TRL's RewardTrainer and DPOTrainer under the mixin on one process, and TRL's trainers that are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.compat.trl_compat import check_trainer, metric_weights
from hf_pipetransformer.data.batches import SampleBatch
from tests.support.adapted import adapted, lora
from tests.support.decoders import make_decoder
from tests.support.preferences import CONFIGS, OURS, assert_logged_alike, logged, make_preference_trainer


IN_FOUR: dict[str, Any] = {"freeze_policy": "none", "pipeline_parallel_num_microbatches": "4"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (RewardTrainer, {"model": "llama", "has_margins": True}),
        (DPOTrainer, {"peft_config": "gpt2"}),
        (DPOTrainer, {"peft_config": "gpt2", "loss_type": ["sigmoid", "sft", "aot"]}),
    ],
)
def test_micro_batches_are_of_whole_pairs(kind: type, options: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for each, own in ((kind, {}), (OURS[kind], IN_FOUR)):
        adapters = {"peft_config": lora("gpt2")} if "peft_config" in options else {}
        steps = {"max_steps": 8, "num_rows": 25}
        trainer = make_preference_trainer(each, tmp_path / each.__name__, **options | adapters | own | steps)
        trainer.train()
        runs.append(trainer)
    plain, ours = runs
    assert ours.layout.num_microbatches == 4
    assert_logged_alike(logged(ours), logged(plain), 1e-5)


def with_own_loader(kind: type) -> type:
    class OwnLoader(kind):
        """Reads pairs with a loader of its own."""

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, 8, collate_fn=self.data_collator)

    return OwnLoader


@pytest.mark.parametrize(
    ("kind", "options"),
    [(RewardTrainer, {"model": "llama", "has_margins": True}), (DPOTrainer, {"peft_config": "gpt2"})],
)
def test_pairs_of_an_own_loader_stay_together(
    kind: type, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for each, own in ((kind, {}), (OURS[kind], IN_FOUR)):
        monkeypatch.setitem(CONFIGS, own_kind := with_own_loader(each), CONFIGS[each])
        adapters = {"peft_config": lora("gpt2")} if "peft_config" in options else {}
        runs.append(
            make_preference_trainer(own_kind, tmp_path / each.__name__, max_steps=8, **options | adapters | own)
        )
        runs[-1].train()
    assert runs[1].layout.num_microbatches == 4
    assert_logged_alike(logged(runs[1]), logged(runs[0]), 1e-5)


def copying(kind: type) -> type:
    class Copying(kind):
        """Hands dicts of its own on."""

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(model, {**inputs}, *args, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().prediction_step(model, {**inputs}, *args, **kwargs)

    return Copying


def test_pairs_stay_together_in_a_dict_of_the_scripts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for each in (OURS[RewardTrainer], copying(OURS[RewardTrainer])):
        monkeypatch.setitem(CONFIGS, each, CONFIGS[OURS[RewardTrainer]])
        runs.append(make_preference_trainer(each, tmp_path / each.__name__, model="llama", max_steps=4, **IN_FOUR))
        runs[-1].train()
    assert_logged_alike(logged(runs[1]), logged(runs[0]), 1e-7)
    evaluated = [run.evaluate() for run in runs]
    assert evaluated[1]["eval_loss"] == pytest.approx(evaluated[0]["eval_loss"])


def test_metrics_of_pairs_count_the_tokens_that_they_average_over() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]])
    weight = metric_weights(SampleBatch({"input_ids": mask, "completion_mask": mask}, rows=2))
    names = ("entropy", "mean_token_accuracy", "logits/rejected", "rewards/margins")
    assert [weight(name) for name in names] == [9, 5, 4, 2]
    of_one = metric_weights(SampleBatch({"input_ids": mask, "labels": torch.where(mask == 0, -100, mask)}))
    assert (of_one("entropy"), of_one("mean_token_accuracy"), of_one("other")) == (9, 9, 4)


def test_the_page_names_what_a_trainer_may_not_override() -> None:
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    table = page.partition("What a trainer, its options or a subclass")[2].partition("\n## ")[0]
    names = [*trainer_compat._NOT_CALLED_BELOW, *trl_compat._REFUSED]
    names += trainer_compat._DOES_SOMETHING_UNDER.values()
    assert [name for name in names if f"`{name}`" not in table] == []


class OwnGRPO(GRPOTrainer):
    """A subclass of a script."""


@pytest.mark.parametrize("kind", [OwnGRPO, RLOOTrainer])
def test_trainers_that_generate_are_refused(kind: type, tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"does not run in a pipeline: it generates text with the model while"):
        check_trainer(type("Ours", (PipeTransformerMixin, kind), {}), args, {})


def test_a_loss_that_compares_with_its_batch_is_refused(tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="KTOTrainer does not run in a pipeline: its loss compares each sample with"):
        check_trainer(type("Ours", (PipeTransformerMixin, KTOTrainer), {}), args, {})


@pytest.mark.parametrize("options", [{}, {"ref_model": "gpt2", "peft_config": "gpt2"}])
def test_a_second_model_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    makers = {"ref_model": make_decoder, "peft_config": lora}
    given = {name: makers[name](value) for name, value in options.items()}
    with pytest.raises(
        ValueError, match=r"would hold a second model as its reference.* precompute_ref_log_probs=True"
    ):
        make_preference_trainer(OURS[DPOTrainer], tmp_path, **IN_FOUR, **given)


@pytest.mark.parametrize("is_precomputed", [False, True])
def test_a_plan_counts_the_pass_of_the_reference(is_precomputed: bool, tmp_path: Path) -> None:
    options = {"plan_only": True, "num_rows": 25, "precompute_ref_log_probs": is_precomputed}
    trainer = make_preference_trainer(OURS[DPOTrainer], tmp_path, peft_config=lora("gpt2"), **IN_FOUR, **options)
    with pytest.raises(SystemExit):
        trainer.train()
    plan = json.loads((tmp_path / "plan.json").read_text())
    costs, blocks, number = plan["overheads"], plan["blocks"], 1 if is_precomputed else 2
    samples = 8 * (number * sum(blocks["forward"]) + blocks["edge_backward"][0] + sum(blocks["backward"][1:]))
    fixed = costs["optimizer_per_parameter"] * plan["stages"][0]["trained"] + costs["per_step"]
    launches = 4 * (number * costs["per_forward"] + costs["per_backward"])
    assert plan["chosen"]["step_seconds"] == pytest.approx(samples + launches + fixed, rel=1e-6)


def test_a_reference_needs_pauses_between_steps(tmp_path: Path) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, pipeline_schedule="async_1f1b")
    args.precompute_ref_log_probs = False
    with pytest.raises(ValueError, match="has no pause between .*DPOPipelineTrainer has a reference: set"):
        check_trainer(OURS[DPOTrainer], args, {"model": adapted("gpt2", "lora")})


def test_pairs_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)
    stored = {"freeze_policy": "fixed", "freeze_at": "1:1", "activation_cache": "on", "max_steps": 2}
    make_preference_trainer(OURS[RewardTrainer], tmp_path, **stored, eval_strategy="no").train()
    assert "each sample has 2 rows, such as the two texts of a pair" in caplog.text


def test_activations_that_are_offloaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activation_offloading=True is not supported"):
        make_preference_trainer(OURS[RewardTrainer], tmp_path, "llama", **IN_FOUR, activation_offloading=True)
