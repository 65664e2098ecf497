"""Question answering: windows, answers from logits, SQuAD's metrics; and whole runs on two processes.

Needs the folder `scripts` on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import question_answering
import run_qa
import script_utils
import torch
from datasets import Dataset, load_dataset
from question_answering import (
    Answer,
    AnswerOptions,
    PostProcess,
    QuestionAnsweringMixin,
    WindowMaker,
    answer_scores,
    find_answers,
)
from run_qa import QuestionDataArguments, answers_of, make_windows, metric_function
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BertForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.launcher import REPOSITORY, launch
from tests.distributed.scenarios import RANK, WORLD_SIZE, run, scenario
from tests.support.tiny_bert import make_bert, make_tokenizer, save_tiny_bert


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


SCRIPTS = REPOSITORY / "scripts"
CONTEXT = " ".join(WORDS[:20])
# Two tokens of a question and three special ones leave eight words for the context; each next window is five further.
MAX_LENGTH, STRIDE, ROOM, STEP = 13, 3, 8, 5
WINDOW_STARTS = (0, 5, 10, 15)
DATA = run_qa.QuestionDataArguments(train_file="x")
FIRST = 4
"""Position of a window's first word: [CLS] after w1 [SEP] come before it."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["after", "1990s", *WORDS])


def question(context: str = CONTEXT, text: str | None = None, start: int | None = None, name: str = "q") -> Dataset:
    """One question; its answer is where `text` first stands in the context, or at `start`."""
    answers = {"text": [], "answer_start": []}
    if text is not None:
        answers = {"text": [text], "answer_start": [context.index(text) if start is None else start]}
    row = {"id": name, "title": "", "context": context, "question": "  after w1", "answers": answers}
    return Dataset.from_list([row], features=question_answering.SQUAD_COLUMNS)


def windows_of(
    questions: Dataset, tokenizer: Any, is_training: bool = False, pads: bool = False, max_length: int = MAX_LENGTH
) -> Dataset:
    maker = WindowMaker(tokenizer, max_length, STRIDE, pads, is_training)
    return questions.map(maker, batched=True, remove_columns=questions.column_names)


# --- windows


@pytest.mark.parametrize("pads", [False, True])
def test_windows_cover_the_context_and_overlap_by_the_stride(tokenizer: Any, pads: bool) -> None:
    windows = windows_of(question(), tokenizer, pads=pads)
    seen = []
    for window in windows:
        is_context = np.array(window["token_starts"]) >= 0
        spans = zip(
            np.array(window["token_starts"])[is_context], np.array(window["token_ends"])[is_context], strict=True
        )
        seen.append([CONTEXT[start:end] for start, end in spans])
        assert list(np.flatnonzero(is_context)) == list(range(FIRST, FIRST + len(seen[-1])))
    assert seen == [WORDS[start : min(start + ROOM, 20)] for start in WINDOW_STARTS]
    assert [len(ids) for ids in windows["input_ids"]] == [13, 13, 13, 13 if pads else 10]
    assert set(windows["example_id"]) == {"q"}
    assert set(windows["null_position"]) == {0}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (WORDS[0:1], {0: (0, 0)}),
        (WORDS[4:6], {0: (4, 5)}),  # begins before the second window
        (WORDS[7:8], {0: (7, 7), 1: (2, 2)}),  # last word of the first, inside the second
        (WORDS[7:9], {1: (2, 3)}),  # goes over the end of the first
        (WORDS[5:8], {0: (5, 7), 1: (0, 2)}),  # just what two windows share
        (WORDS[4:8], {0: (4, 7)}),
        (WORDS[19:20], {3: (4, 4)}),
        (WORDS[2:12], {}),  # longer than any window
        (WORDS[0:8], {0: (0, 7)}),  # as long as a window
    ],
)
def test_labels_are_the_answers_tokens_where_all_of_it_is_in_the_window_else_cls(
    tokenizer: Any, words: list[str], expected: dict[int, tuple[int, int]]
) -> None:
    windows = windows_of(question(text=" ".join(words)), tokenizer, is_training=True)
    found = list(zip(windows["start_positions"], windows["end_positions"], strict=True))
    assert found == [
        (FIRST + expected[i][0], FIRST + expected[i][1]) if i in expected else (0, 0)
        for i in range(len(WINDOW_STARTS))
    ]


@pytest.mark.parametrize(
    ("context", "text", "start", "covered"),
    [
        ("w1 in the 1990s .", "1990", 10, "1990s"),  # one token that is longer than the answer
        ("w1 (w3) w4", " (w3", 2, "(w3"),  # blanks around an answer are none of it
        ("w1 abc w4", "bc", 4, "bc"),  # begins inside a word, at a token of its own
        ("w3 w3 w3", "w3", 3, "w3"),  # the second of three
    ],
)
def test_labels_follow_characters_not_words(tokenizer: Any, context: str, text: str, start: int, covered: str) -> None:
    asked = question(context, text, start)
    training = windows_of(asked, tokenizer, is_training=True, max_length=40)[0]
    spans = windows_of(asked, tokenizer, max_length=40)[0]
    first, last = training["start_positions"], training["end_positions"]
    assert context[spans["token_starts"][first] : spans["token_ends"][last]] == covered
    assert abs(spans["token_starts"][first] - start) <= 1


@pytest.mark.parametrize("text", [None, " ", ""])
def test_a_question_without_answer_points_at_cls_in_every_window(tokenizer: Any, text: str | None) -> None:
    windows = windows_of(question(text=text), tokenizer, is_training=True)
    assert windows["start_positions"][:] == windows["end_positions"][:] == [0] * len(WINDOW_STARTS)


def test_a_question_that_leaves_no_room_is_named(tokenizer: Any) -> None:
    assert len(windows_of(question("w1 w2"), tokenizer, max_length=7)) == 1  # fits, however small the room
    with pytest.raises(ValueError, match="Question 'q' has 2 tokens, which leaves 3 of --max_seq_length 8"):
        windows_of(question(), tokenizer, max_length=8)


# --- answers from logits


def logits_of(windows: Dataset, *peaks: tuple[int, int, int, float], width: int | None = None) -> Any:
    """Zeros `(windows, positions)` but for `(window, start, end, height)`; positions are words of the window."""
    width = width or max(len(ids) for ids in windows["input_ids"])
    start_logits, end_logits = np.zeros((2, len(windows), width), dtype=np.float32)
    for window, start, end, height in peaks:
        start_logits[window, start] += height
        end_logits[window, end] += height
    return start_logits, end_logits


def test_the_best_answer_comes_from_any_window_and_each_question_gets_its_own(tokenizer: Any) -> None:
    rows = [question(name="b")[0], question("w9 w8 w7", name="a")[0]]
    asked = Dataset.from_list(rows, features=question_answering.SQUAD_COLUMNS)
    windows = windows_of(asked, tokenizer)
    peaks = (0, FIRST, FIRST, 3.0), (2, FIRST + 1, FIRST + 2, 5.0), (4, FIRST + 1, FIRST + 1, 1.0)
    first, second = find_answers(asked, windows, logits_of(windows, *peaks), AnswerOptions())
    assert (first.name, first.text, first.null_score_difference) == ("b", "w11 w12", None)
    assert (second.name, second.text) == ("a", "w8")
    scores = [candidate["score"] for candidate in first.candidates]
    assert scores[0] == 10.0 and scores == sorted(scores, reverse=True)
    assert sum(candidate["probability"] for candidate in first.candidates) == pytest.approx(1)
    assert len({candidate["text"] for candidate in first.candidates}) == len(scores) == AnswerOptions().n_best_size


@pytest.mark.parametrize(
    "peak",
    [
        (0, 1, 2, 9.0),  # in the question
        (0, FIRST + 5, FIRST + 2, 9.0),  # ends before it starts
        (0, FIRST, FIRST + 4, 9.0),  # five tokens
        (3, 10, 11, 9.0),  # padding
    ],
)
def test_what_can_be_no_answer_is_not_chosen(tokenizer: Any, peak: tuple[int, int, int, float]) -> None:
    asked = question()
    windows = windows_of(asked, tokenizer, pads=True)
    good = (1, FIRST + 3, FIRST + 4, 5.0)
    # The other half of a bad pair may still make a span with a good one, but less than the good pair's ten.
    start_logits, end_logits = logits_of(windows, good)
    bad_start, bad_end = logits_of(windows, peak)
    options = AnswerOptions(max_answer_length=4)
    (answer,) = find_answers(asked, windows, (start_logits + bad_start, end_logits + bad_end), options)
    assert answer.text == "w8 w9"


def test_of_equal_scores_the_first_in_the_text_is_chosen(tokenizer: Any) -> None:
    asked = question()
    windows = windows_of(asked, tokenizer)
    both = (3, FIRST, FIRST, 4.0), (1, FIRST, FIRST, 4.0)
    for peaks, text in (((), "w0"), (both, "w5")):
        assert find_answers(asked, windows, logits_of(windows, *peaks), AnswerOptions())[0].text == text


@pytest.mark.parametrize(("threshold", "text"), [(0.0, ""), (1.9, ""), (2.0, "w7"), (3.0, "w7")])
def test_no_answer_wins_by_more_than_the_threshold(tokenizer: Any, threshold: float, text: str) -> None:
    asked = question()
    windows = windows_of(asked, tokenizer)
    # The score of no answer is the least over the windows: 6, not 20. The answer's is 4.
    logits = logits_of(
        windows, *((row, 0, 0, 10.0) for row in (0, 1, 3)), (2, 0, 0, 3.0), (0, FIRST + 7, FIRST + 7, 2.0)
    )
    options = AnswerOptions(version_2_with_negative=True, null_score_diff_threshold=threshold)
    (answer,) = find_answers(asked, windows, logits, options)
    assert (answer.text, answer.best_text, answer.null_score_difference) == (text, "w7", 2.0)
    assert answer.candidates[0] == {"text": "", "score": 6.0, "probability": answer.candidates[0]["probability"]}
    (answer,) = find_answers(asked, windows, logits, AnswerOptions(null_score_diff_threshold=threshold))
    assert answer.text == "w7"  # v1 gives an answer always


def test_positions_beyond_a_windows_tokens_do_not_count(tokenizer: Any) -> None:
    asked = question("w1 w2 w3")
    windows = windows_of(asked, tokenizer)
    logits = logits_of(windows, (0, FIRST + 1, FIRST + 1, 1.0), (0, 12, 12, 50.0), width=16)
    assert find_answers(asked, windows, logits, AnswerOptions())[0].text == "w2"


@pytest.mark.parametrize("allows_no_answer", [False, True])
def test_a_context_without_words_has_no_answer(tokenizer: Any, allows_no_answer: bool) -> None:
    asked, options = question(" "), AnswerOptions(version_2_with_negative=allows_no_answer)
    windows = windows_of(asked, tokenizer)
    assert find_answers(asked, windows, logits_of(windows), options)[0].text == ""


def test_logits_of_other_windows_are_refused(tokenizer: Any) -> None:
    windows = windows_of(question(), tokenizer)
    with pytest.raises(ValueError, match="Found logits for 3 starts and 3 ends .* for each of 4 windows"):
        find_answers(question(), windows, logits_of(windows.select(range(3))), AnswerOptions())


def test_answers_are_written_as_json(tmp_path: Path, tokenizer: Any) -> None:
    asked = question()
    windows = windows_of(asked, tokenizer)
    for allows_no_answer, files in ((False, 2), (True, 3)):
        options = AnswerOptions(version_2_with_negative=allows_no_answer, null_score_diff_threshold=-1.0)
        answers = find_answers(asked, windows, logits_of(windows), options)
        folder = tmp_path / str(allows_no_answer)
        question_answering.write_answers(answers, folder, "eval")
        assert len(list(folder.iterdir())) == files
        read = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
        assert read["eval_predictions.json"] == {"q": "" if allows_no_answer else "w0"}
        assert read["eval_nbest_predictions.json"]["q"][0]["score"] == 0.0
        assert read.get("eval_null_odds.json", {"q": 0.0}) == {"q": 0.0}


# --- metrics


@pytest.mark.parametrize(
    ("prediction", "truth", "exact", "f1"),
    [
        ("the cat", "Cat.", 1, 1),
        ("  U.S.  dollars\n", "us dollars", 1, 1),
        ("another theory", "other theory", 0, 0.5),  # articles inside words stay
        ("the-end", "end", 0, 0),  # punctuation goes first
        ("“cat”", "cat", 0, 0),  # ASCII punctuation only
        ("black cat", "cat", 0, 2 / 3),
        ("cat cat dog", "cat dog dog", 0, 2 / 3),  # cat once, dog once; three words each
        ("", "cat", 0, 0),
        ("in 1990", "1990 in", 0, 1),
    ],
)
def test_scores_of_one_answer(prediction: str, truth: str, exact: float, f1: float) -> None:
    for allows_no_answer in (False, True):
        assert answer_scores(prediction, [truth], allows_no_answer) == pytest.approx((exact, f1))


def test_an_article_alone_is_no_answer_in_v2_and_shares_no_word_in_v1() -> None:
    assert answer_scores("the", [], allows_no_answer=True) == (1.0, 1.0)
    assert answer_scores("the", ["a"]) == (1.0, 0.0)
    # A truth without words is none beside one with words.
    assert answer_scores("", ["the", "cat"], allows_no_answer=True) == (0.0, 0.0)


def test_squad_takes_the_best_truth_and_a_missing_answer_scores_zero() -> None:
    truths = {"a": ["black cat", "the cat"], "b": ["dog"], "c": ["w"], "d": ["x y z"]}
    metrics = question_answering.squad_metrics({"a": "cat", "b": "big dog", "d": "x"}, truths)
    # F1: 1, 2/3, 0, 1/2.
    assert metrics == pytest.approx({"exact_match": 25.0, "f1": 100 * (1 + 2 / 3 + 0.5) / 4})


def v2_metrics(texts: dict[str, str], differences: dict[str, float]) -> dict[str, float]:
    """Of two questions with and two without an answer; a text is given where its difference is not above 0."""
    truths = {"a": ["cat"], "b": ["big dog"], "c": [], "d": []}
    answers = [Answer(name, "" if differences[name] > 0 else texts[name], texts[name], differences[name], [])
               for name in truths]  # fmt: skip
    return question_answering.squad_v2_metrics(answers, truths)


def test_squad_v2_counts_questions_without_answer_apart() -> None:
    metrics = v2_metrics({"a": "cat", "b": "", "c": "", "d": "bird"}, dict.fromkeys("abcd", 0.0))
    assert {name: value for name, value in metrics.items() if not name.startswith("best")} == pytest.approx(
        {
            **{"exact": 50.0, "f1": 50.0, "total": 4},
            **{"HasAns_exact": 50.0, "HasAns_f1": 50.0, "HasAns_total": 2},
            **{"NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2},
        }
    )


def test_the_best_threshold_of_v2() -> None:
    texts = {"a": "cat", "b": "dog", "c": "bird", "d": "fish"}
    differences = {"a": -5.0, "b": 1.0, "c": 0.5, "d": 7.0}
    metrics = v2_metrics(texts, differences)
    # No answer at all: 2 right. With a: 3. With c, which is wrong: 2. With b: 2 exact, 2 + 2/3 by F1. With d less.
    assert (metrics["exact"], metrics["f1"]) == (75.0, 75.0)
    assert (metrics["best_exact"], metrics["best_exact_thresh"]) == (75.0, -5.0)
    assert (metrics["best_f1"], metrics["best_f1_thresh"]) == (75.0, -5.0)
    better = v2_metrics(texts, {**differences, "c": 2.0})
    assert (better["best_f1"], better["best_f1_thresh"]) == (pytest.approx(100 * (3 + 2 / 3) / 4), 1.0)


# --- options and data


def qa_options(*options: str) -> tuple:
    return script_utils.parse_arguments(
        script_utils.ModelArguments, run_qa.QuestionDataArguments, PipeTransformerArguments, argv=list(options)
    )


def test_the_example_options_file_parses(tmp_path: Path) -> None:
    path = str(SCRIPTS / "configs" / "run_qa_squad.yaml")
    model_args, data_args, args = qa_options(path, "--output_dir", str(tmp_path), "--use_cpu", "true")
    assert model_args.model_name_or_path
    assert (data_args.max_seq_length, data_args.pad_to_max_length, args.do_train) == (384, True, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "No data: pass --dataset_name"),
        ({"train_file": "x", "n_best_size": 0}, "Found --n_best_size 0; expected at least 1"),
        ({"train_file": "x", "doc_stride": -1}, "Found --doc_stride -1; expected at least 0"),
    ],
)
def test_wrong_data_options_say_what_to_change(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_qa.QuestionDataArguments(**fields)


def official(questions: Dataset, unanswered: tuple[str, ...] = ()) -> str:
    """The questions as an official file of SQuAD v2; those `unanswered` have plausible answers only."""
    paragraphs = []
    for row in questions:
        names = ("text", "answer_start")
        columns = (row["answers"][name] for name in names)
        found = [dict(zip(names, answer, strict=True)) for answer in zip(*columns, strict=True)]
        is_impossible = row["id"] in unanswered
        asked = {"id": row["id"], "question": row["question"], "is_impossible": is_impossible}
        asked |= {"answers": [], "plausible_answers": found} if is_impossible else {"answers": found}
        paragraphs.append({"context": row["context"], "qas": [asked]})
    return json.dumps({"version": "v2.0", "data": [{"title": "w", "paragraphs": paragraphs}]})


def test_files_of_every_layout_hold_the_same_questions(tmp_path: Path) -> None:
    asked, columns = make_questions(5, 0), ["id", "context", "question", "answers"]
    (tmp_path / "official.json").write_text(official(asked))
    asked.to_json(str(tmp_path / "lines.json"))
    asked.to_parquet(str(tmp_path / "table.parquet"))
    for names in (("official.json", "table.parquet"), ("lines.json", "official.json")):
        files = {split: str(tmp_path / name) for split, name in zip(("train", "validation"), names, strict=True)}
        data = question_answering.load_questions(files, str(tmp_path / "cache"))
        assert sorted(data) == ["train", "validation"]
        for rows in data.values():
            found = question_answering.check_questions(rows, needs_answers=True, allows_no_answer=False)
            assert found.select_columns(columns).to_list() == asked.select_columns(columns).to_list(), names


def test_questions_without_an_answer_need_the_option_of_v2(tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text(official(make_questions(4, 0), unanswered=("q1",)))
    data = question_answering.load_questions({"validation": str(tmp_path / "dev.json")}, str(tmp_path / "cache"))
    rows = data["validation"]
    assert [len(answers["text"]) for answers in rows["answers"]] == [1, 0, 1, 1]
    with pytest.raises(ValueError, match="1 questions without an answer, 'q1' first.*--version_2_with_negative"):
        question_answering.check_questions(rows, needs_answers=True, allows_no_answer=False)
    for needs_answers in (True, False):
        question_answering.check_questions(rows, needs_answers, allows_no_answer=needs_answers)


def test_wrong_questions_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    asked = make_questions(3, 0)

    def check(questions: Dataset) -> None:
        question_answering.check_questions(questions, needs_answers=True, allows_no_answer=False)

    with pytest.raises(ValueError, match="expected `context`. Name the columns as SQuAD does"):
        check(asked.rename_column("context", "text"))
    with pytest.raises(ValueError, match="Found 3 questions with 1 ids"):
        check(asked.remove_columns("id").add_column("id", ["q"] * 3))
    with pytest.raises(ValueError, match="Found answers 'w1'; expected lists of `text` and `answer_start`"):
        check(asked.remove_columns("answers").add_column("answers", ["w1"] * 3))
    assert not caplog.records
    check(asked.map(lambda row: {"context": f"w {row['context']}"}))
    assert "The answers of 3 questions ('q0' first) do not stand at their answer_start" in caplog.text


def test_a_metric_of_evaluate_gets_what_squads_take(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    asked = question(text="w0")
    windows = windows_of(asked, tokenizer)
    found = run_qa.answers_of(DATA, None)(asked, windows, logits_of(windows), "eval")
    assert isinstance(found, EvalPrediction)
    assert run_qa.metric_function(False, None, rank=0)(found) == {"exact_match": 100.0, "f1": 100.0}
    monkeypatch.setattr(script_utils, "load_metric", lambda name, rank: SimpleNamespace(compute=dict))
    truths = [{"id": "q", "answers": {"text": ["w0"], "answer_start": [0]}}]
    for allows_no_answer, extra in ((False, {}), (True, {"no_answer_probability": 0.0})):
        given = run_qa.metric_function(allows_no_answer, "a metric", rank=0)(found)
        assert given == {"predictions": [{"id": "q", "prediction_text": "w0", **extra}], "references": truths}


def test_hidden_answers_are_not_scored(tokenizer: Any) -> None:
    windows = windows_of(question(), tokenizer)
    for version_2, is_scored in ((False, False), (True, True)):
        data_args = run_qa.QuestionDataArguments(train_file="x", version_2_with_negative=version_2)
        found = run_qa.answers_of(data_args, None)(question(), windows, logits_of(windows), "predict")
        assert (found.label_ids is not None) is is_scored


def test_the_mixin_refuses_what_it_cannot_evaluate(tmp_path: Path, tokenizer: Any) -> None:
    class AnsweringTrainer(question_answering.QuestionAnsweringMixin, Trainer):
        pass

    trainer = AnsweringTrainer(
        model=make_bert(BertForQuestionAnswering, len(tokenizer)),
        args=TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True),
        eval_dataset=windows_of(question(), tokenizer),
        post_process_function=run_qa.answers_of(DATA, None),
    )
    with pytest.raises(ValueError, match="Found NoneType as questions and Dataset as their windows"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="Found Dataset as questions and dict as their windows"):
        trainer.evaluate({"a": trainer.eval_dataset}, question())


# --- whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of plain Trainer in one process and of two stages found; `own` has an `evaluate` of its own."""
    found = {}
    for name, num_stages in (("plain", 0), ("pipeline", 2), ("own", 2)):
        found[name] = run(
            answer,
            tmp_path_factory.mktemp(name),
            max(1, num_stages),
            {"num_stages": num_stages, "own_evaluate": name == "own"},
            timeout=150,
            env={"PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(SCRIPTS)))},
        )
    return found


def logged(found: dict[str, Any], key: str) -> list[float]:
    return [entry[key] for entry in found["log"] if key in entry]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["pipeline", "own"])
def test_two_stages_give_the_metrics_and_losses_of_plain_trainer(
    runs: dict[str, list[dict[str, Any]]], way: str
) -> None:
    (plain,), first = runs["plain"], runs[way][0]
    for rank in runs[way]:
        for when in {"before", "after", "predicted"} & rank.keys():
            expected = {name: value for name, value in plain[when].items() if name.endswith(("_f1", "_exact_match"))}
            assert len(expected) == 2 and rank[when].items() >= expected.items()
    assert len(logged(plain, "loss")) > 2
    assert logged(first, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert len(logged(plain, "eval_f1")) >= 2
    assert logged(first, "eval_f1") == logged(plain, "eval_f1")


@pytest.mark.distributed
def test_two_stages_give_the_answers_of_plain_trainer(runs: dict[str, list[dict[str, Any]]]) -> None:
    (plain,) = runs["plain"]
    assert len(plain["answers"]) == NUM_EVALUATION
    for rank in runs["pipeline"]:
        assert rank["answers"].keys() == plain["answers"].keys()
        for name, (text, candidates) in plain["answers"].items():
            # Not the scores: the bias of the logits, whose gradient is zero but for rounding, moves all of them alike.
            expected = [candidate["probability"] for candidate in candidates]
            found = [candidate["probability"] for candidate in rank["answers"][name][1]]
            assert rank["answers"][name][0] == text and found == pytest.approx(expected, rel=1e-4)


@pytest.mark.distributed
def test_run_qa_trains_evaluates_and_predicts_with_two_stages(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    save_tiny_bert(model, BertForQuestionAnswering, ["after", *WORDS])
    make_questions(12, 0).to_parquet(str(tmp_path / "train.parquet"))
    asked = make_questions(7, 1)
    (tmp_path / "dev.json").write_text(official(asked, unanswered=("q2", "q3")))
    launch(
        SCRIPTS / "run_qa.py",
        [
            *("--model_name_or_path", str(model), "--version_2_with_negative", "true"),
            *("--train_file", str(tmp_path / "train.parquet"), "--validation_file", str(tmp_path / "dev.json")),
            *("--test_file", str(tmp_path / "dev.json"), "--max_predict_samples", "5"),
            *("--max_seq_length", "24", "--doc_stride", "8", "--n_best_size", "3"),
            *("--do_train", "--do_eval", "--do_predict", "--pipeline_parallel_size", "2", "--num_train_epochs", "1"),
            *("--learning_rate", "1e-3", "--save_strategy", "no", "--use_cpu", "true"),
            *("--output_dir", str(output), "--cache_dir", str(tmp_path / "cache")),
        ],
        num_processes=2,
        timeout=240,
    )
    results = json.loads((output / "all_results.json").read_text())
    assert (results["eval_samples"], results["eval_total"], results["eval_NoAns_total"]) == (7, 7, 2)
    assert results["train_samples"] > 12  # windows
    assert results["predict_samples"] == 5
    found = {path.stem: json.loads(path.read_text()) for path in output.glob("*_*.json")}
    assert list(found["eval_predictions"]) == list(found["eval_null_odds"]) == asked["id"][:]
    # Three spans at most, and no answer.
    assert {len(best) for best in found["eval_nbest_predictions"].values()} <= {2, 3, 4}

    saved = AutoModelForQuestionAnswering.from_pretrained(output).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    data_args = run_qa.QuestionDataArguments(
        train_file="x", max_seq_length=24, doc_stride=8, n_best_size=3, version_2_with_negative=True
    )
    tested = asked.select(range(5))
    windows = run_qa.make_windows(tested, tokenizer, data_args, is_training=False)
    inputs = windows.select_columns(["input_ids", "token_type_ids", "attention_mask"])
    outputs = saved(**DataCollatorWithPadding(tokenizer)(inputs.to_list()))
    logits = (outputs.start_logits.detach().numpy(), outputs.end_logits.detach().numpy())
    answers = find_answers(tested, windows, logits, data_args)
    assert found["predict_predictions"] == {answer.name: answer.text for answer in answers}


# --- real questions


@pytest.mark.shared_data
def test_gold_answers_survive_windows_and_answers_from_logits(shared_data: Path, minilm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    data = load_dataset("parquet", data_files=str(shared_data / "squad_v1_dev.parquet"), split="train")
    # From all over the file: of the first 200 questions eight have an answer like "8", found in "20–18", which no part
    # of a tokenized text is.
    asked = data.select(range(0, 53 * 200, 53))
    data_args = run_qa.QuestionDataArguments(validation_file="x", max_seq_length=128, doc_stride=48)
    windows = run_qa.make_windows(asked, tokenizer, data_args, is_training=False)
    labels = run_qa.make_windows(asked, tokenizer, data_args, is_training=True)
    assert len(labels) == len(windows) > 2 * len(asked)
    start_logits, end_logits = np.zeros((2, len(windows), data_args.max_seq_length), dtype=np.float32)
    start_logits[np.arange(len(windows)), labels["start_positions"][:]] = 1
    end_logits[np.arange(len(windows)), labels["end_positions"][:]] = 1
    answers = find_answers(asked, windows, (start_logits, end_logits), data_args)
    truths = {row["id"]: row["answers"]["text"][:1] for row in asked}
    texts = {answer.name: answer.text for answer in answers}
    lost = {name: (texts[name], *truths[name]) for name in truths if texts[name] != truths[name][0]}
    assert question_answering.squad_metrics(texts, truths)["exact_match"] >= 99, lost
