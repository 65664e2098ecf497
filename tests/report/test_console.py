"""A log entry is one short line; on a terminal decisions stand out, elsewhere the text is plain."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from hf_pipetransformer.report import announce, styled
from hf_pipetransformer.report.console import WIDTH, log_line


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


TRAINED = {
    "loss": 0.74061, "grad_norm": 1.1391, "learning_rate": 3.75e-4, "pipeline_stages": 1, "frozen_layers": 2,
    "samples_per_second": 231.04, "memory_gb": 0.6, "tokens_per_second": 3176.0, "bubble_share": 0.0,
    "gradient_norm/layer_3": 0.5, "gradient_norm/head": 1.0, "epoch": 6.5,
}  # fmt: skip
EVALUATED = {"eval_loss": 0.7215, "eval_accuracy": 0.875, "eval_runtime": 0.0849, "eval_samples_per_second": 376.8}
ENDED = {"train_runtime": 4.379, "train_samples_per_second": 73.08, "train_steps_per_second": 9.135, "train_loss": 0.8}


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (TRAINED, "step 26/40  loss 0.7406  norm 1.139  lr 0.000375  231 samples/s"),
        ({"loss": 2.0, "margin": "wide\n"}, "step 26/40  loss 2  margin wide\ufffd"),
        (EVALUATED, "step 26/40  eval_loss 0.7215  eval_accuracy 0.875  eval_runtime 84.9 ms"),
        (ENDED, "step 26/40  73.08 samples/s  train_runtime 4.38 s  train_loss 0.8"),
        ({"loss": float("nan"), "cache_hit_rate": 1.0}, "step 26/40  loss nan  cache_hit_rate 1"),
    ],
    ids=["trained", "with_another", "evaluated", "ended", "not_a_number"],
)  # fmt: skip
def test_an_entry_is_a_line_in_the_units_that_people_read(entry: dict[str, object], line: str) -> None:
    assert log_line(entry, 26, 40) == line


def test_what_does_not_fit_a_line_goes_to_the_next_one() -> None:
    own = {f"rewards/number_{number}": 0.25 for number in range(9)} | {"note": "x" * 200, "pipeline_depth_of_mine": 4}
    lines = log_line({**TRAINED, **own, "a\x1b[31mb": 1.0}, 26, 40).split("\n")
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH
    for name in own:
        assert any(f"  {name} " in f"{line} " for line in lines), name
    assert not any("\x1b" in line for line in lines)


def test_before_a_training_there_is_no_last_step() -> None:
    assert log_line({"eval_loss": 1.0}, 0, 0) == "step 0  eval_loss 1"


def test_a_style_is_for_terminals_and_changes_no_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "K=2 [bold]x[/bold] :smile: " + 200 * "long "
    assert styled(text, "bold cyan", io.StringIO()) == text
    assert styled(text, "", Terminal()) == text
    shown = styled(text, "bold cyan", Terminal())
    assert shown.startswith("\x1b[1;36m") and shown.replace("\x1b[1;36m", "").replace("\x1b[0m", "") == text
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert styled(text, "bold cyan", Terminal()) == text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_decisions_stand_out_on_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    # As in a script that has set up no logging.
    own = logging.getLogger("hf_pipetransformer")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(own, "handlers", [])
    monkeypatch.setattr(own, "level", logging.INFO)
    announce("read")
    announce("2 of 4 layers frozen", is_decision=True)
    first, second = stream.getvalue().splitlines()
    assert first == "read"
    assert second == ("\x1b[1;36m2 of 4 layers frozen\x1b[0m" if is_terminal else "2 of 4 layers frozen")
