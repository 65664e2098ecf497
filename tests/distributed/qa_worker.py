"""Train, evaluate and predict answers with `QuestionAnsweringMixin`, over the pipeline or over plain Trainer.

Needs the folder `scripts` on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from question_answering import PostProcess, QuestionAnsweringMixin
from run_qa import QuestionDataArguments, answers_of, make_windows, metric_function
from transformers import BertForQuestionAnswering, DataCollatorWithPadding, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario
from tests.support.tiny_bert import make_bert, make_tokenizer


GLOBAL_BATCH = 4
NUM_TRAINING, NUM_EVALUATION = 12, 9
WORDS = [f"w{number}" for number in range(60)]


class OwnEvaluate:
    """A user's `evaluate` that calls the parts of Trainer's itself; made like the mixin."""

    def __init__(self, *args: Any, eval_examples: Dataset, post_process_function: PostProcess, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        loader = self.get_eval_dataloader(eval_dataset)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(loader, "Evaluation", metric_key_prefix=metric_key_prefix)
        finally:
            self.compute_metrics = compute_metrics
        found = self.post_process_function(
            self.eval_examples, self.eval_dataset, output.predictions, metric_key_prefix
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in compute_metrics(found).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def make_questions(count: int, seed: int) -> Dataset:
    """Contexts of 10 to 39 words; asked for is the word after a given one."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        words = [WORDS[i] for i in torch.randperm(len(WORDS), generator=generator)[: 10 + 17 * index % 30]]
        place = int(torch.randint(0, len(words) - 1, (), generator=generator))
        context, before = " ".join(words), " ".join(words[: place + 1])
        answers = {"text": [words[place + 1]], "answer_start": [len(before) + 1]}
        rows.append({"id": f"q{index}", "context": context, "question": f"after {words[place]}", "answers": answers})
    return Dataset.from_list(rows)


@scenario
def answer(folder: Path, num_stages: int, own_evaluate: bool) -> dict[str, Any]:
    """Return the metrics before and after training, and answers; 0 stages: plain Trainer."""
    way = OwnEvaluate if own_evaluate else QuestionAnsweringMixin
    trainer, questions, windows = make_trainer(folder, num_stages, way)
    found: dict[str, Any] = {"before": trainer.evaluate()}
    trainer.train()
    found |= {"after": trainer.evaluate(), "log": trainer.state.log_history}
    if not own_evaluate:
        predicted = trainer.predict(windows, questions)
        found["predicted"] = predicted.metrics
        found["answers"] = {answer.name: [answer.text, answer.candidates] for answer in predicted.predictions}
    trainer.end()
    return found


def make_trainer(output: Path, num_stages: int, way: type) -> tuple[Trainer, Dataset, Dataset]:
    """The trainer, and questions to evaluate with their windows."""
    tokenizer = make_tokenizer(["after", *WORDS])
    data_args = QuestionDataArguments(train_file="unused", max_seq_length=24, doc_stride=8, pad_to_max_length=False)
    training, questions = make_questions(NUM_TRAINING, 0), make_questions(NUM_EVALUATION, 1)
    windows = make_windows(questions, tokenizer, data_args, is_training=False)
    arguments: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": GLOBAL_BATCH // WORLD_SIZE,
        "per_device_eval_batch_size": GLOBAL_BATCH // WORLD_SIZE,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    base: type[Trainer] = Trainer
    args: TrainingArguments
    if num_stages:
        base = PipeTransformerTrainer
        args = PipeTransformerArguments(
            **arguments, pipeline_parallel_size=num_stages, freeze_policy="none", pipeline_timeout=60
        )
    else:
        args = TrainingArguments(**arguments)
    trainer = type("QuestionAnsweringTrainer", (way, base), {})(
        model=make_bert(BertForQuestionAnswering, len(tokenizer)),
        args=args,
        train_dataset=make_windows(training, tokenizer, data_args, is_training=True),
        eval_dataset=windows,
        eval_examples=questions,
        data_collator=DataCollatorWithPadding(tokenizer),
        post_process_function=answers_of(data_args, None),
        compute_metrics=metric_function(False, None, RANK),
    )
    return trainer, questions, windows
