"""Subclasses of Trainer as scripts define them, run with either base class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.conformance.conformance_worker import arguments_of, named
from tests.conformance.features import Setup
from tests.conformance.pieces import Scores
from tests.distributed.cases import GLOBAL_EVAL_BATCH
from tests.distributed.equality_worker import EVAL_SEED, MODEL_SEED
from tests.distributed.launches import Layout, run_listed
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import End


MODEL = "bert_sequence"
CLASS_WEIGHTS = (0.5, 1.0, 2.0)
NUM_SAMPLES = 29
NUM_EVAL_SAMPLES = 13


def subclasses(base: type) -> dict[str, type]:
    """What a script defines; nothing but `base` differs between the two runs."""

    class WeightsClasses(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            losses = functional.cross_entropy(outputs.logits, labels, reduction="none")
            loss = (torch.tensor(CLASS_WEIGHTS)[labels] * losses).mean()
            return (loss, outputs) if return_outputs else loss

    class Distills(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = build_model(MODEL, MODEL_SEED + 1).eval()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            with torch.no_grad():
                wanted = self.teacher(**inputs).logits.softmax(-1)
            distance = functional.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean")
            loss = 0.5 * outputs.loss + 0.5 * distance
            return (loss, outputs) if return_outputs else loss

    class AddsAMetric(base):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            metrics[f"{metric_key_prefix}_perplexity"] = 2.0 ** metrics[f"{metric_key_prefix}_loss"]
            self.log({f"{metric_key_prefix}_perplexity": metrics[f"{metric_key_prefix}_perplexity"]})
            return metrics

    class EvaluatesByItself(base):
        """As the trainer of the question-answering example of transformers."""

        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(loader, description="Evaluation", ignore_keys=ignore_keys)
            finally:
                self.compute_metrics = compute_metrics
            right = (output.predictions.argmax(-1) == output.label_ids).mean()
            metrics = {**output.metrics, f"{metric_key_prefix}_right": float(right)}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    class LoadsByItself(base):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, self._train_batch_size, collate_fn=self.data_collator)

    class LoadsEvaluationByItself(base):
        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(self.eval_dataset, GLOBAL_EVAL_BATCH // WORLD_SIZE, collate_fn=self.data_collator)

    class WatchesSteps(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.num_microsteps = 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.num_microsteps += 1
            return super().training_step(model, inputs, num_items_in_batch)

        def log(self, logs, start_time=None):
            super().log({**logs, "microsteps": self.num_microsteps}, start_time)

    return {name: kind for name, kind in locals().items() if name != "base"}


def train(name: str, layout: Layout | None, output: Path) -> End:
    """Evaluate, train, evaluate, predict with one of the subclasses."""
    setup = Setup(options={"eval_strategy": "epoch", "gradient_accumulation_steps": 2})
    setup.pipeline_options = {"pipeline_parallel_num_microbatches": 2}
    trainer = subclasses(Trainer if layout is None else PipeTransformerTrainer)[name](
        model=build_model(MODEL, MODEL_SEED),
        args=arguments_of(setup, output, layout),
        train_dataset=make_dataset(MODEL, NUM_SAMPLES),
        eval_dataset=make_dataset(MODEL, NUM_EVAL_SAMPLES, EVAL_SEED),
        data_collator=collate,
        compute_metrics=Scores(),
    )
    if layout is None and type(trainer).compute_loss is Trainer.compute_loss:
        # Else Trainer takes BERT's loss for one that honours `num_items_in_batch`. One of a script's is followed.
        trainer.model_accepts_loss_kwargs = False
    before = trainer.evaluate()
    trained = trainer.train()
    values = {
        "log_history": trainer.state.log_history,
        "training_loss": trained.training_loss,
        "before": before,
        "metrics": trainer.evaluate(),
    }
    predicted = trainer.predict(trainer.eval_dataset)
    weights = named("weights", dict(trainer.model.named_parameters()))
    return values, weights | named("predictions", predicted.predictions)


@scenario
def swap_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train, ValueError)
