"""Model cards: what is read from a run's folder, and that a card is made of its facts alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.report.card import FACTS_FILE, command, facts_of, read_comparison, render, write_card
from hf_pipetransformer.report.events import EventLog
from hf_pipetransformer.schedules.layout import Layout


TRAINERS_CARD = "---\nlibrary_name: transformers\ntags:\n- some-tag\n---\n\n# out\n\nMore information needed\n"


def layout(num_frozen: int, num_stages: int, num_replicas: int, cache_level: int = 0) -> dict[str, Any]:
    boundaries = (0, 7, 14) if num_stages == 2 else (0, 14)
    return Layout(6, num_frozen, num_stages, num_replicas, boundaries, 4, "1f1b", cache_level).as_event()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished training of 12 steps that froze 2 of 6 layers at step 4, stored them, and left its files."""
    monkeypatch.setattr(sys, "argv", ["scripts/run.py", "--seed", "3"])
    folder = tmp_path / "out"
    log = EventLog(str(folder))
    log.write("run", 0, 0.0, layout=layout(0, 2, 1))
    log.write(
        "transition", 4, 1.0, **{"from": layout(0, 2, 1)}, to=layout(2, 1, 2, 2), reason="a | b",
        bytes_moved=3 * 2**20, seconds=1.5,
    )  # fmt: skip
    for epoch, (hits, misses) in enumerate(((0, 40), (30, 10)), start=2):
        log.write("cache", 4 * epoch, float(epoch), what="epoch", hits=hits, misses=misses, bytes_stored=2**21)
    (folder / "all_results.json").write_text(json.dumps({"perplexity": 7.5, "eval_accuracy": 0.1, "eval_runtime": 3}))
    (folder / "README.md").write_text(TRAINERS_CARD)
    history = [
        {"loss": 0.9, "epoch": 0.5, "step": 2},
        {"eval_loss": 0.8, "eval_accuracy": 0.5, "eval_runtime": 1.0, "epoch": 1.0, "step": 4},
        {"loss": 0.7, "epoch": 2.0, "step": 8},
        {"eval_loss": 0.6, "eval_accuracy": 0.75, "epoch": 3.0, "step": 12},
        {"train_loss": 0.8, "train_runtime": 9.0, "epoch": 3.0, "step": 12},
        {"eval_loss": 0.6, "eval_accuracy": 0.75, "epoch": 3.0, "step": 12},
    ]
    args = PipeTransformerArguments(
        output_dir=str(folder), freeze_policy="fixed", freeze_at="4:2", use_cpu=True, learning_rate=1e-3,
        activation_cache_dir=str(tmp_path), report_to="none",
    )  # fmt: skip
    return SimpleNamespace(
        args=args,
        model=SimpleNamespace(config=SimpleNamespace(name_or_path="some/base")),
        train_dataset=range(40),
        eval_dataset={"a": range(5), "b": range(6)},
        state=SimpleNamespace(log_history=history, global_step=12, epoch=3.0),
    )


def card_of(trainer: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """The card that is written, and its facts."""
    write_card(trainer, **{"data": "`some data`", "comparison": None} | options)
    folder = Path(trainer.args.output_dir)
    return (folder / "README.md").read_text(), json.loads((folder / FACTS_FILE).read_text())


def test_a_card_has_data_metrics_layouts_freezing_cache_options_versions_and_command(trainer: Any) -> None:
    card, _ = card_of(trainer)
    for line in (
        "`some/base` fine-tuned with",
        "Training: 40 samples; evaluation: 11 samples.",
        "`some data`",
        "| eval_accuracy | 0.75 |",  # of Trainer's log, not of the older file
        "| perplexity | 7.5 |",
        "| train_loss | 0.8 |",
        "| 1 | 4 | 0.9 | 0.8 | 0.5 |",
        "| 3 | 12 | 0.7 | 0.6 | 0.75 |",
        "12 optimizer steps (3 epochs) of 8 samples on 1 process, fp32.",
        "`freeze_policy=fixed`, `freeze_at=4:2`.",
        "| 0 | 0 | 2 x 1 | 4 | 0 of 6 layers |  | start |",
        "| 4 | 1 | 1 x 2 | 4 | 2 of 6 layers | 2 | a \\| b |",
        "Moved between ranks: 3.0 MiB.",
        "| 3 | 30 | 10 | 2.0 MiB |",
        "30 of 80 reads were hits (38%).",
        "python scripts/run.py --seed 3",
    ):
        assert line in card
    assert "torch 2." in card and "transformers 5." in card


def test_a_card_has_the_front_matter_of_the_trainer_but_none_of_its_gaps(trainer: Any) -> None:
    card, _ = card_of(trainer)
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- some-tag\n---\n\n# out\n")
    assert "More information needed" not in card


def test_the_citations_of_another_trainers_card_are_kept(trainer: Any) -> None:
    own = Path(trainer.args.output_dir, "README.md")
    own.write_text(
        "---\ntags: [trl]\n---\n\n# Model Card for None\n\n---\n\n## Citations\n\nCite them.\n\n### And us\n"
    )
    card, facts = card_of(trainer)
    assert card.startswith("---\ntags:\n- trl\n---\n\n# out\n\n`some/base` fine-tuned")
    assert "\n\n## Citations\n\nCite them.\n\n### And us\n\n" in card and "None" not in card
    assert render(facts, FACTS_FILE) == card


def test_a_card_without_front_matter_gets_none(trainer: Any) -> None:
    Path(trainer.args.output_dir, "README.md").write_text("# A card\n\n---\n\ntext\n\n---\n")
    assert card_of(trainer)[0].startswith("# out\n")


def test_a_card_is_made_of_its_facts_alone_and_names_no_folder_of_the_machine(trainer: Any, tmp_path: Path) -> None:
    card, facts = card_of(trainer)
    assert render(facts, FACTS_FILE) == card
    assert str(tmp_path) not in card + json.dumps(facts)
    assert "seconds" not in card and "runtime" not in card
    changed = render({**facts, "metrics": {"eval_accuracy": 0.25}}, FACTS_FILE)
    assert "| eval_accuracy | 0.25 |" in changed and "| eval_accuracy | 0.75 |" not in changed


def test_evaluations_at_one_step_with_equal_values_are_one(trainer: Any) -> None:
    assert [each["step"] for each in facts_of(trainer, None)["evaluations"]] == [4, 12]
    trainer.state.log_history.append({"eval_loss": 0.5, "epoch": 3.0, "step": 12})
    assert [each["eval_loss"] for each in facts_of(trainer, None)["evaluations"]] == [0.8, 0.6, 0.5]


def test_names_are_no_markup(trainer: Any) -> None:
    """Of runs, metrics, data sets and models, and words of the command."""
    name = "a|b<script>alert(1)</script>`x`[y](z)\u2028\udcff"
    write_card(trainer, None, None)
    facts = json.loads((Path(trainer.args.output_dir) / FACTS_FILE).read_text())
    facts |= {"name": name, "base_model": name, "data": f"[Set](https://a.b) <https://c.d> {name}", "command": [name]}
    facts["command"].append("```\n<script>")
    facts["metrics"] = {f"eval_{name}_loss": 0.5}
    facts["evaluations"] = [{"epoch": 1.0, "step": 2, f"eval_{name}_loss": 0.5}]
    facts["options"] = {"optim": name}
    facts["pipeline_options"] = {"freeze_policy": name}
    other = {"name": name, "metrics": facts["metrics"], "layouts": facts["layouts"], "command": ["```\n<script>"]}
    for comparison in (None, {**other, "processes": 1}):
        card = render({**facts, "comparison": comparison}, FACTS_FILE)
        card.encode()
        assert "[Set](https://a.b) <https://c.d>" in card and "\u2028" not in card
        # Code blocks and code, which show everything as it is.
        rest = re.sub(r"(?<!\\)(`+)(?!`).*?(?<![`\\])\1(?!`)", "", card, flags=re.DOTALL)
        assert "<script" in card and "<script" not in rest
        for table in re.findall(r"(?:^\|.*\n?)+", rest, flags=re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_a_run_that_was_left_to_trainer_has_a_card_too(trainer: Any) -> None:
    folder = Path(trainer.args.output_dir)
    (folder / "pipetransformer_events.jsonl").unlink()
    card, _ = card_of(trainer)
    assert "No pipeline: plain Trainer, no layer frozen." in card
    assert "| eval_accuracy | 0.75 |" in card


def test_a_cache_that_stayed_off_says_why(trainer: Any) -> None:
    log = EventLog(trainer.args.output_dir)
    events = Path(trainer.args.output_dir, "pipetransformer_events.jsonl")
    events.unlink()
    log.write("run", 0, 0.0, layout=layout(0, 2, 1))
    log.write("cache", 0, 0.0, what="off", reason="samples are random.")
    assert "Off: samples are random." in card_of(trainer)[0]


# --- beside another run


def test_another_run_is_shown_beside_with_what_differs(trainer: Any, tmp_path: Path) -> None:
    other = tmp_path / "plain"
    other.mkdir()
    plain = {**facts_of(trainer, None), "name": "plain", "layouts": [], "command": ["python", "a b.py"]}
    plain |= {"metrics": {"eval_accuracy": 0.8}, "train_samples": 41}
    (other / FACTS_FILE).write_text(json.dumps(plain))
    card, facts = card_of(trainer, comparison=str(other))
    assert render(facts, FACTS_FILE) == card
    for line in (
        "|  | this run | plain |",
        "| eval_accuracy | 0.75 | 0.8 |",
        "| eval_loss | 0.6 |  |",
        "| layout | 2 x 1 → 1 x 2 | plain Trainer, 1 process |",
        "| training samples | 40 | 41 |",
        "python 'a b.py'",
    ):
        assert line in card


def test_the_results_of_plain_trainer_can_be_compared_with(trainer: Any, tmp_path: Path) -> None:
    file = tmp_path / "theirs" / "all_results.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"eval_accuracy": 0.5, "eval_runtime": 9, "epoch": 3.0, "train_samples": 40}))
    for path in (file, file.parent):
        card, _ = card_of(trainer, comparison=str(path))
        assert "| eval_accuracy | 0.75 | 0.5 |" in card and "| epochs | 3 | 3 |" in card


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no results to compare with"),
        ("{", "has no results to compare with"),
        ("[1]", "holds a list; expected the JSON object of a run's results"),
    ],
)
def test_a_comparison_without_results_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "all_results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_comparison(tmp_path)


# --- the command


@pytest.mark.parametrize(
    ("parent", "own", "expected"),
    [
        (["bash"], ["run.py", "--a", "1"], "python run.py --a 1"),
        (
            ["/env/bin/python", "/env/bin/accelerate", "launch", "--num_processes", "2", "run.py", "--a", "1"],
            ["run.py", "--a", "1"],
            "accelerate launch --num_processes 2 run.py --a 1",
        ),
        (
            ["/env/bin/python3", "-m", "torch.distributed.run", "run.py"],
            ["run.py"],
            "python3 -m torch.distributed.run run.py",
        ),
        # of another script, though its name ends alike
        (["accelerate", "launch", "other.py"], ["run.py"], "python run.py"),
        (["bash"], ["run.py", "--token", "hf_1", "--hub_token=hf_2", "--lr", "1"], "python run.py --token ... "
         "--hub_token=... --lr 1"),
        (["bash"], ["/far/away/run.py", "--output_dir", "/far/out", "--data=/far/x"], "python run.py --output_dir "
         "out --data=x"),
    ],
)  # fmt: skip
def test_the_command_is_that_of_the_launcher_without_secrets_and_folders(
    monkeypatch: pytest.MonkeyPatch, parent: list[str], own: list[str], expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", own)
    launcher = SimpleNamespace(cmdline=lambda: parent)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: launcher))
    assert " ".join(command()) == expected


def test_a_long_command_is_cut_between_options(trainer: Any) -> None:
    facts = facts_of(trainer, None) | {"name": "x", "front_matter": {}, "citations": "", "comparison": None}
    facts["command"] = ["launch", "run.py", *(word for number in range(20) for word in (f"--option_{number}", "a b"))]
    block = render(facts, FACTS_FILE).split("```")[1].strip()
    lines = block.split(" \\\n    ")
    assert len(lines) > 2 and all(line.startswith(("launch", "--")) and len(line) < 110 for line in lines)
    assert shlex.split(block.replace("\\\n", "")) == facts["command"]


def test_paths_below_the_working_directory_become_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "run.py"), f"{tmp_path}{os.sep}outputs"])
    assert command()[1:] == ["scripts/run.py", "outputs"]
