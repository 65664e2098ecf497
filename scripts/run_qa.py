"""Fine-tune a model to answer questions with a part of a text (SQuAD v1.1, v2 and the like), with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_qa.py \
        --model_name_or_path google-bert/bert-base-uncased --dataset_name rajpurkar/squad --do_train --do_eval \
        --pipeline_parallel_size 2 --output_dir outputs/squad

On a machine without GPUs add `--use_cpu true`. The options of transformers' `run_qa.py` mean the same here. Local
files (`--train_file`, ...) are parquet, json or csv with SQuAD's columns, or the official JSON files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from qa_answers import AnswerOptions, QuestionAnsweringMixin, find_answers, write_answers
from qa_metrics import squad_metrics, squad_v2_metrics
from qa_utils import WindowMaker, WindowOptions, answer_texts, check_questions, load_questions
from script_utils import (
    ModelArguments,
    TextDataArguments,
    TextModelArguments,
    finish,
    load_metric,
    parse_arguments,
    read_config,
    report,
    require_split,
    select_samples,
    start_logging,
    train,
)
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


logger = logging.getLogger("run_qa")

NUM_LOGITS = 2
"""Of a token: that the answer starts there, and that it ends there."""


@dataclass
class QuestionDataArguments(TextDataArguments):
    """Which questions, how contexts become windows, and which answer is given."""

    max_seq_length: int = field(
        default=384, metadata={"help": "Tokens of a window, the question and special tokens included."}
    )
    doc_stride: int = field(default=128, metadata={"help": "Tokens of the context that two windows share."})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad all windows to --max_seq_length, not each batch to its longest."}
    )
    version_2_with_negative: bool = field(
        default=False, metadata={"help": "Questions may have no answer, as in SQuAD v2."}
    )
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "No answer is given where its score exceeds the best answer's by more (v2 only)."},
    )
    n_best_size: int = field(default=20, metadata={"help": "Starts, ends and candidates that are looked at."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of the longest answer that is given."})

    def __post_init__(self) -> None:
        if self.dataset_name is None and not self.files:
            raise ValueError("No data: pass --dataset_name, or --train_file and --validation_file.")
        for name, least in (("max_seq_length", 1), ("doc_stride", 0), ("n_best_size", 1), ("max_answer_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"Found --{name} {getattr(self, name)}; expected at least {least}.")

    @property
    def answer_options(self) -> AnswerOptions:
        """Which of the possible answers is given."""
        return AnswerOptions(
            self.n_best_size, self.max_answer_length, self.version_2_with_negative, self.null_score_diff_threshold
        )


class QuestionAnsweringTrainer(QuestionAnsweringMixin, PipeTransformerTrainer):
    """A pipeline that is evaluated by its answers."""


def load_data(data_args: QuestionDataArguments, model_args: ModelArguments) -> DatasetDict:
    """Local files if any are named, else the hub's data set."""
    if data_args.files:
        return load_questions(data_args.files, model_args.cache_dir)
    return load_dataset(
        data_args.dataset_name,
        data_args.dataset_config_name,
        cache_dir=model_args.cache_dir,
        token=model_args.token,
    )


def make_windows(
    questions: Dataset, tokenizer: PreTrainedTokenizerBase, data_args: QuestionDataArguments, is_training: bool
) -> Dataset:
    """The windows of all questions, in their order."""
    length = min(data_args.max_seq_length, tokenizer.model_max_length)
    options = WindowOptions(length, data_args.doc_stride, data_args.pad_to_max_length)
    return questions.map(
        WindowMaker(tokenizer, options, is_training),
        batched=True,
        remove_columns=questions.column_names,
        num_proc=data_args.preprocessing_num_workers,
        load_from_cache_file=not data_args.overwrite_cache,
        desc="Cutting windows",
    )


def answers_of(data_args: QuestionDataArguments, folder: Path | None) -> Callable[..., EvalPrediction]:
    """From logits to answers, which are written to `folder` (None: nowhere), and what is true as far as it is known.

    What it returns holds `Answer`s and, as labels, `{"id", "answers"}` of each question.
    """

    def post_process(
        questions: Dataset, windows: Dataset, logits: tuple[np.ndarray, np.ndarray], prefix: str
    ) -> EvalPrediction:
        answers = find_answers(questions, windows, logits, data_args.answer_options)
        if folder is not None:
            write_answers(answers, folder, prefix)
        truths = None
        if "answers" in questions.column_names:
            truths = [{"id": row["id"], "answers": row["answers"]} for row in questions]
        # A test set hides its answers.
        if truths is not None and not data_args.version_2_with_negative:
            truths = truths if all(answer_texts(truth["answers"]) for truth in truths) else None
        return EvalPrediction(predictions=answers, label_ids=truths)

    return post_process


def metric_function(allows_no_answer: bool, metric_name: str | None, rank: int) -> Callable[..., dict[str, float]]:
    """SQuAD's exact match and F1; `metric_name` chooses a metric of `evaluate` that takes what those of SQuAD take."""
    loaded = load_metric(metric_name, rank)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        answers, truths = prediction.predictions, prediction.label_ids
        if loaded is not None:
            extra = {"no_answer_probability": 0.0} if allows_no_answer else {}
            given = [{"id": answer.name, "prediction_text": answer.text, **extra} for answer in answers]
            return dict(loaded.compute(predictions=given, references=truths))
        texts = {answer.name: answer.text for answer in answers}
        true = {truth["id"]: answer_texts(truth["answers"]) for truth in truths}
        if not allows_no_answer:
            return squad_metrics(texts, true)
        best_texts = {answer.name: answer.best_text for answer in answers}
        return squad_v2_metrics(texts, true, best_texts, {a.name: a.null_score_difference for a in answers})

    return compute_metrics


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = parse_arguments(
        TextModelArguments, QuestionDataArguments, PipeTransformerArguments, argv=argv
    )
    start_logging(args)
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(
        model_args.tokenizer_name or model_args.model_name_or_path, **model_args.hub_options
    )
    with args.main_process_first(desc="cutting windows"):
        questions = select_samples(load_data(data_args, model_args), data_args, args)
        for split, rows in questions.items():
            questions[split] = check_questions(rows, split != "test", data_args.version_2_with_negative)
        windows = {
            split: make_windows(rows, tokenizer, data_args, is_training=split == "train")
            for split, rows in questions.items()
        }
    config = read_config(model_args)
    config.num_labels = NUM_LOGITS
    model = AutoModelForQuestionAnswering.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **model_args.hub_options,
    )

    pads_each_batch = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.fp16 else None)
    trainer = QuestionAnsweringTrainer(
        model=model,
        args=args,
        train_dataset=require_split(windows, "train", "do_train") if args.do_train else None,
        eval_dataset=require_split(windows, "validation", "do_eval") if args.do_eval else None,
        eval_examples=questions["validation"] if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else pads_each_batch,
        post_process_function=answers_of(data_args, Path(args.output_dir) if args.process_index == 0 else None),
        compute_metrics=metric_function(data_args.version_2_with_negative, data_args.metric_name, args.process_index),
    )
    if args.do_train:
        train(trainer)
    if args.do_eval:
        counts = {"eval_samples": len(questions["validation"]), "eval_windows": len(windows["validation"])}
        report(trainer, "eval", trainer.evaluate() | counts)
    if args.do_predict:
        test = require_split(windows, "test", "do_predict")
        output = trainer.predict(test, questions["test"], metric_key_prefix="predict")
        report(trainer, "predict", output.metrics | {"predict_samples": len(questions["test"])})
    finish(trainer, data_args, tasks="question-answering", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
