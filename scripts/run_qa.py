"""Fine-tune a model to answer questions with a part of a text (SQuAD v1.1, v2 and the like), with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_qa.py \
        --model_name_or_path google-bert/bert-base-uncased --dataset_name rajpurkar/squad --do_train --do_eval \
        --pipeline_parallel_size 2 --output_dir outputs/squad

On a machine without GPUs add `--use_cpu true`. Options are named as in transformers' `run_qa.py`. Local
files (`--train_file`, ...) are parquet or json with SQuAD's columns, or the official JSON files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import script_utils
from datasets import Dataset
from question_answering import (
    AnswerOptions,
    QuestionAnsweringMixin,
    WindowMaker,
    answer_texts,
    check_questions,
    find_answers,
    load_questions,
    squad_metrics,
    squad_v2_metrics,
    write_answers,
)
from script_utils import ModelArguments, TextDataArguments
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    default_data_collator,
)
from transformers.hf_argparser import HfArg

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


@dataclass
class QuestionDataArguments(AnswerOptions, TextDataArguments):
    """Which questions, how contexts become windows, and which answer is given."""

    max_seq_length: int = HfArg(default=384, help="Tokens of a window, the question and special tokens included.")
    doc_stride: int = HfArg(default=128, help="Tokens of the context that two windows share.")
    pad_to_max_length: bool = HfArg(default=True, help="Pad to --max_seq_length, not each batch to its longest.")
    metric_name: str | None = HfArg(default=None, help="A metric for evaluate.load that takes what those of SQuAD do.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_seq_length", 1), ("doc_stride", 0), ("n_best_size", 1), ("max_answer_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"Found --{name} {getattr(self, name)}; expected at least {least}.")


class QuestionAnsweringTrainer(QuestionAnsweringMixin, PipeTransformerTrainer):
    """A pipeline that is evaluated by its answers."""


def make_windows(
    questions: Dataset, tokenizer: PreTrainedTokenizerBase, data_args: QuestionDataArguments, is_training: bool
) -> Dataset:
    """The windows of all questions, in their order."""
    length = min(data_args.max_seq_length, tokenizer.model_max_length)
    maker = WindowMaker(tokenizer, length, data_args.doc_stride, data_args.pad_to_max_length, is_training)
    return questions.map(maker, remove_columns=questions.column_names, desc="Cutting windows", **data_args.map_options)


def answers_of(data_args: QuestionDataArguments, folder: Path | None) -> Callable[..., EvalPrediction]:
    """From logits to answers, which are written to `folder` (None: nowhere), and what is true as far as it is known.

    What it returns holds `Answer`s and, as labels, `{"id", "answers"}` of each question.
    """

    def post_process(
        questions: Dataset, windows: Dataset, logits: tuple[np.ndarray, np.ndarray], prefix: str
    ) -> EvalPrediction:
        answers = find_answers(questions, windows, logits, data_args)
        if folder is not None:
            write_answers(answers, folder, prefix)
        if "answers" not in questions.column_names:
            return EvalPrediction(predictions=answers, label_ids=None)
        truths = questions.select_columns(["id", "answers"]).to_list()
        # A test set hides its answers.
        is_known = data_args.version_2_with_negative or all(answer_texts(truth["answers"]) for truth in truths)
        return EvalPrediction(predictions=answers, label_ids=truths if is_known else None)

    return post_process


def metric_function(allows_no_answer: bool, metric_name: str | None, rank: int) -> Callable[..., dict[str, float]]:
    """SQuAD's exact match and F1; `metric_name` chooses a metric of `evaluate` that takes what those of SQuAD take."""
    loaded = script_utils.load_metric(metric_name, rank)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        answers, truths = prediction.predictions, prediction.label_ids
        if loaded is not None:
            extra = {"no_answer_probability": 0.0} if allows_no_answer else {}
            given = [{"id": answer.name, "prediction_text": answer.text, **extra} for answer in answers]
            return dict(loaded.compute(predictions=given, references=truths))
        true = {truth["id"]: answer_texts(truth["answers"]) for truth in truths}
        if allows_no_answer:
            return squad_v2_metrics(answers, true)
        return squad_metrics({answer.name: answer.text for answer in answers}, true)

    return compute_metrics


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        ModelArguments, QuestionDataArguments, PipeTransformerArguments, argv=argv
    )
    tokenizer = script_utils.load_tokenizer(model_args)
    with args.main_process_first(desc="cutting windows"):
        if data_args.files:
            questions = load_questions(data_args.files, model_args.cache_dir)
        else:
            questions = script_utils.load_data(data_args, model_args.cache_dir)
        questions = script_utils.select_samples(questions, data_args, args)
        windows = {}
        for split, rows in questions.items():
            questions[split] = check_questions(rows, split != "test", data_args.version_2_with_negative)
            windows[split] = make_windows(questions[split], tokenizer, data_args, is_training=split == "train")

    pads_each_batch = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.fp16 else None)
    trainer = QuestionAnsweringTrainer(
        # Of a token: that the answer starts there, and that it ends there.
        model=script_utils.load_model(AutoModelForQuestionAnswering, model_args, num_labels=2),
        args=args,
        train_dataset=windows.get("train"),
        eval_dataset=windows.get("validation"),
        eval_examples=questions.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else pads_each_batch,
        post_process_function=answers_of(data_args, Path(args.output_dir) if args.process_index == 0 else None),
        compute_metrics=metric_function(data_args.version_2_with_negative, data_args.metric_name, args.process_index),
    )
    script_utils.train(trainer)
    if args.do_eval:
        counts = {"eval_samples": len(questions["validation"]), "eval_windows": len(windows["validation"])}
        script_utils.report(trainer, "eval", trainer.evaluate() | counts)
    if args.do_predict:
        output = trainer.predict(windows["test"], questions["test"], metric_key_prefix="predict")
        script_utils.report(trainer, "predict", output.metrics | {"predict_samples": len(questions["test"])})
    script_utils.finish(trainer, data_args, tasks="question-answering", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
