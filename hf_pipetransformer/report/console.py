"""Log entries on the console: one short line each, in place of Trainer's dicts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback

from hf_pipetransformer.report import duration, printable, styled


NORM_OF = "gradient_norm/"
"""Begin of the names of a layer's gradient norm in log entries."""

WIDTH = 100
"""Most characters of a line."""

_FIRST = {"loss": "loss", "grad_norm": "norm", "learning_rate": "lr"}
_SPEED = ("samples_per_second", "train_samples_per_second")
# What the lines on decisions say already, or only trackers and the events file have.
_LEFT_OUT = (
    *("epoch", "total_flos", "frozen_layers", "cached_layers", "memory_gb", "tokens_per_second", "bubble_share"),
    *("pipeline_stages", "pipeline_chunks", "pipeline_replicas", "pipeline_microbatches"),
)
# Of an evaluation, whose samples stay the same, the runtime says as much.
_LEFT_OUT_ENDS = ("_samples_per_second", "_steps_per_second")


def shorten_console(handler: CallbackHandler) -> None:
    """Let the callbacks of Trainer that print log entries print a short line of each."""
    for callback in handler.callbacks:
        # Exactly these: a subclass of the user's prints in a way that is wanted.
        if type(callback) in (PrinterCallback, ProgressCallback):
            # On the instance: the class also prints for trainers of other kinds in this process.
            callback.on_log = partial(_print_line, callback)


def _print_line(callback: Any, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
    if isinstance(callback, PrinterCallback):
        logs.pop("total_flos", None)  # As its own method does, for the callbacks behind it too.
        is_shown = state.is_local_process_zero
    else:
        # The condition of each callback's own method.
        is_shown = state.is_world_process_zero and callback.training_bar is not None
    if is_shown:
        style = "" if "loss" in logs else "bold"
        tqdm.write(styled(log_line(logs, state.global_step, state.max_steps), style, sys.stdout))


def log_line(logs: Mapping[str, Any], step: int, max_steps: int) -> str:
    """Return a log entry: loss, norm, learning rate, speed, and what else there is.

    It has at most `WIDTH` characters, of which what else there is may take more lines.
    """
    known = [f"{label} {_shown(logs[name])}" for name, label in _FIRST.items() if name in logs]
    known += [f"{_shown(logs[name])} samples/s" for name in _SPEED if name in logs]
    others = [
        f"{printable(name)} {_time_or_value(name, value)}"
        for name, value in logs.items()
        if name not in (*_FIRST, *_SPEED, *_LEFT_OUT)
        and not name.startswith(NORM_OF)
        and not name.endswith(_LEFT_OUT_ENDS)
    ]
    lines = [f"step {step}/{max_steps}" if max_steps else f"step {step}"]
    for part in [*known, *others]:
        # The name of a metric may be as long as its author likes.
        part = part if len(part) <= WIDTH - 4 else f"{part[: WIDTH - 8]} ..."
        if len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append("  ")
        lines[-1] += f"  {part}"
    return "\n".join(lines)


def _time_or_value(name: str, value: Any) -> str:
    return duration(value) if name.endswith("_runtime") and isinstance(value, float) else _shown(value)


def _shown(value: Any) -> str:
    return printable(f"{value:.4g}" if isinstance(value, float) else str(value))
