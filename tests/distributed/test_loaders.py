"""Loaders on two processes: alone they start nothing, and a script's own mean what they mean to Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.data.test_loaders import MODEL, close, logs_of, made
from tests.distributed.scenarios import RANK, run, scenario
from tests.support.comparison import untimed
from tests.support.models import collate, make_dataset


def with_own_loaders(base: type) -> type:
    class OwnLoaders(base):
        """Each rank reads every second sample of an order that all draw alike, and evaluates all samples."""

        def get_train_dataloader(self) -> Any:
            order = torch.randperm(24).tolist()
            return DataLoader(Subset(self.train_dataset, order[RANK::2]), 4, shuffle=True, collate_fn=collate)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, 3, collate_fn=collate)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return self.get_eval_dataloader()

    return OwnLoaders


def batches_of(trainer: Any) -> list[Any]:
    loaders = [trainer.get_eval_dataloader(), trainer.get_test_dataloader(trainer.eval_dataset)]
    loaders.append(trainer.get_train_dataloader())
    assert all(isinstance(loader, DataLoader) for loader in loaders)
    return [[dict(batch) for batch in loader] for loader in loaders]


def read_alone(folder: Path) -> None:
    """A loader is Trainer's, whatever K is, before and after the pipeline has evaluated."""
    given = {
        "train_dataset": make_dataset(MODEL, 22),
        "eval_dataset": make_dataset(MODEL, 7),
        "data_collator": collate,
    }
    expected = batches_of(made(Trainer, folder / "plain", given=given))
    trainer = made(PipeTransformerTrainer, folder / "ours", given=given, pipeline_parallel_size=2)
    found = batches_of(trainer)
    assert trainer.layout is None and trainer.pipeline_run.pipelined.in_force is None
    assert not Path(trainer.events.path or folder / "none").exists()
    assert close(found, expected)
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.layout.pipeline_size == 2
    assert close(batches_of(trainer), expected)
    assert close(trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").metrics["eval_loss"], loss)


def refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="OwnLoaders.get_train_dataloader makes a DataLoader, which knows nothing"):
        made(PipeTransformerTrainer, folder / "refused", with_own_loaders, pipeline_parallel_size=2)


def train_with_own(folder: Path) -> None:
    given = {"train_dataset": make_dataset(MODEL, 24), "eval_dataset": make_dataset(MODEL, 7)}
    shared = {"eval_strategy": "epoch", "gradient_accumulation_steps": 2}
    results = []
    for base, options in ((Trainer, shared), (PipeTransformerTrainer, {**shared, "pipeline_parallel_size": 1})):
        before = made(base, folder / "before", with_own_loaders, given, **options).evaluate()
        # Another one: after an evaluation Trainer trains each replica for itself.
        trainer = made(base, folder / base.__name__, with_own_loaders, given, **options)
        trainer.train()
        assert base is Trainer or (trainer.layout is not None and not trainer.pipeline_run.is_left_to_trainer)
        predicted = trainer.predict(None)
        after = [untimed(predicted.metrics), torch.as_tensor(predicted.predictions), untimed(trainer.evaluate())]
        results.append([untimed(before), *after, logs_of(trainer)])
    assert close(results[1], results[0]), results


ACTS = (read_alone, refused, train_with_own)


@scenario
def act_all(folder: Path) -> list[str]:
    """Return the names of the acts that ended well."""
    for act in ACTS:
        act(folder / act.__name__ / str(RANK))
    return [act.__name__ for act in ACTS]


pytestmark = pytest.mark.distributed


def test_loaders_alone_and_loaders_of_a_scripts_own(tmp_path: Path) -> None:
    assert run(act_all, tmp_path, 2, timeout=120) == [["read_alone", "refused", "train_with_own"]] * 2
