"""Model card of a training: its facts as JSON values, and the card that is made of them alone."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import TrainingArguments

from hf_pipetransformer.report import printable
from hf_pipetransformer.report.files import create
from hf_pipetransformer.report.origin import SECRETS, changed_options, length_of, plain, relative, versions
from hf_pipetransformer.report.recorded import NO_METRICS, RecordedRun, is_finite, pipeline_size, read_run


CARD_FILE = "README.md"
FACTS_FILE = "model_card.json"
COMPARED_FILES = (FACTS_FILE, "all_results.json")
_COMPARED_FACTS = (
    *("name", "metrics", "train_samples", "eval_samples", "epochs", "steps", "processes", "samples_per_step"),
    *("layouts", "command"),
)

_TRAINERS_OPTIONS = (
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim"),
    *("max_grad_norm", "gradient_accumulation_steps", "seed"),
)
_LONGEST_LINE = 108
# To the end of the card: TRL's templates have their citations last, with blocks of code below.
_CITATIONS = re.compile(r"^## Citations?\b.*", re.MULTILINE | re.DOTALL)

Facts = dict[str, Any]


def write_card(trainer: Any, data: str | None, comparison: str | None) -> None:
    """Replace the card that a trainer wrote into its output folder, and write the facts it is made of beside it.

    Front matter and citations, which TRL's cards have, are kept.

    Args:
        data: description of the data set.
        comparison: output folder or results file of another run; None for none.

    Raises:
        ValueError: the comparison is no run's.
    """
    folder = Path(trainer.args.output_dir)
    path = folder / CARD_FILE
    # Trainer has just written it: what its metadata lacks is no reason to fail after a training.
    card = ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else None
    citations = _CITATIONS.search(card.text) if card else None
    facts: Facts = {
        "name": folder.resolve().name,
        "front_matter": card.data.to_dict() if card else {},
        "citations": citations.group().strip() if citations else "",
        **facts_of(trainer, data),
        "comparison": None if comparison is None else read_comparison(Path(comparison)),
    }
    # Before the card, which is made of this file's facts alone.
    with create(folder / FACTS_FILE) as file:
        file.write(json.dumps(facts, indent=1) + "\n")
    path.write_text(render(facts, FACTS_FILE), encoding="utf-8")


# ---- the facts ----


def facts_of(trainer: Any, data: str | None) -> Facts:
    """Return what a trainer and the files in its output folder tell about its training, without any times."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    try:
        run = read_run(folder, folder.name)
    except ValueError:
        run = RecordedRun(folder.name)  # Left to Trainer, whose state was not saved
    base = getattr(trainer.model.config, "name_or_path", None)
    return {
        "base_model": relative(base) if base else None,
        "data": data,
        "train_samples": length_of(trainer.train_dataset),
        "eval_samples": length_of(trainer.eval_dataset),
        "metrics": _metrics(trainer.state.log_history, run.results),
        "evaluations": _evaluations(trainer.state.log_history),
        "steps": trainer.state.global_step,
        "epochs": round(trainer.state.epoch or 0.0, 2),
        "processes": args.world_size,
        "samples_per_step": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "options": {name: plain(getattr(args, name)) for name in _TRAINERS_OPTIONS},
        "pipeline_options": _pipeline_options(args),
        "layouts": _layouts(run),
        "bytes_moved": sum(event["bytes_moved"] for event in run.of_kind("transition")),
        "cache": _cache(run),
        "versions": versions(),
        "command": command(),
    }


def _pipeline_options(args: TrainingArguments) -> Facts:
    """Return the pipeline's options that differ from their defaults, without folders."""
    # By its name: the options import this part of the package, and a trainer's own options may derive from theirs.
    pipeline = next((kind for kind in type(args).__mro__ if kind.__name__ == "PipeTransformerArguments"), None)
    known = set() if pipeline is None else {each.name for each in fields(pipeline)}
    inherited = {each.name for each in fields(TrainingArguments)}
    return {name: value for name, value in changed_options(args).items() if name in known - inherited}


def _metrics(history: Sequence[Facts], results: Facts) -> Facts:
    """Return the last value of each loss and metric; of `results` only those that Trainer's log does not have."""
    logged = {name: value for entry in history for name, value in entry.items()}
    # Trainer's log is of this process; a results file may be left from an earlier run.
    found = {**results, **logged}
    return {name: value for name, value in found.items() if _is_result(name) and is_finite(value)}


def _is_result(name: str) -> bool:
    """Return True for a loss or a metric of evaluation or of the whole training."""
    return (name.startswith("eval_") or name in ("train_loss", "perplexity")) and not NO_METRICS.search(name)


def _evaluations(history: Sequence[Facts]) -> list[Facts]:
    """Return the evaluations during training, with the training loss logged last before each."""
    found: list[Facts] = []
    loss: float | None = None
    for entry in history:
        loss = entry.get("loss", loss)
        values = {name: value for name, value in entry.items() if _is_result(name) and name.startswith("eval_")}
        # load_best_model_at_end and scripts evaluate once more at the last step, with the same values.
        if values and (not found or values.items() - found[-1].items() or found[-1]["step"] != entry["step"]):
            found.append({"epoch": round(entry.get("epoch") or 0.0, 2), "step": entry["step"], "loss": loss, **values})
    return found


def _layouts(run: RecordedRun) -> list[Facts]:
    """Return each layout with the step it began at and why."""
    return [
        {
            "step": event["step"],
            "epoch": round(event.get("epoch") or 0.0, 2),
            "stages": pipeline_size(layout),
            "replicas": layout["num_replicas"],
            "microbatches": layout["num_microbatches"],
            "schedule": layout["schedule"],
            "frozen": layout["num_frozen_layers"],
            "layers": layout["num_layers"],
            "cached": layout.get("cache_level", 0),
            "reason": event.get("reason", "start") if event["event"] == "transition" else "start",
        }
        for event, layout in run.layouts()
    ]


def _cache(run: RecordedRun) -> Facts:
    """Return hits, misses and the bytes stored by epoch, and the reason where the cache stayed off."""
    epochs = [
        {"epoch": round(event.get("epoch") or 0.0, 2)} | {name: event[name] for name in _CACHE_COUNTS}
        for event in run.of_kind("cache", what="epoch")
    ]
    reasons = [str(event["reason"]) for event in run.of_kind("cache", what="off")]
    return {"epochs": epochs, "off": reasons[-1] if reasons and not epochs else None}


_CACHE_COUNTS = ("hits", "misses", "bytes_stored")


def command() -> list[str]:
    """Return the command that started this process: that of its launcher if it names the same script and arguments.

    Values of options for secrets are left out, and absolute paths become relative to the working directory, or lose
    their folders where they lie outside of it.
    """
    script = list(sys.argv)
    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        words = []
    # torchrun's command ends with this script's; a shell's or a notebook's does not.
    if script and len(words) > len(script) and words[-len(script) :] == script:
        launcher = words[: -len(script)]
        if len(launcher) > 1 and launcher[1].startswith(os.sep):
            launcher = launcher[1:]  # The interpreter in front of an installed command
        words = [os.path.basename(launcher[0]), *launcher[1:], *script]
    else:
        words = ["python", *script]
    return _without_secrets([relative(word) for word in words])


def _without_secrets(words: Iterable[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--") and value and any(secret in name for secret in SECRETS):
            word = f"{name}=..."
        elif found and found[-1].startswith("--") and any(secret in found[-1] for secret in SECRETS):
            # An option without a value is followed by the next one.
            word = word if word.startswith("--") else "..."
        found.append(word)
    return found


def read_comparison(path: Path) -> Facts:
    """Return the facts of another run that a card compares with its own, from its output folder or results file.

    Raises:
        ValueError: there is no results file.
    """
    file = next((path / name for name in COMPARED_FILES if (path / name).is_file()), path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} has no results to compare with ({error}): expected the output_dir of a run, or its "
            f"{' or '.join(COMPARED_FILES)}."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; expected the JSON object of a run's results.")
    if "metrics" in found:
        return {name: found.get(name) for name in _COMPARED_FACTS}
    metrics = {name: value for name, value in found.items() if _is_result(name) and is_finite(value)}
    # Trainer's results name the epochs of the whole training `epoch`.
    counts = {"train_samples": found.get("train_samples"), "epochs": found.get("epoch")}
    return {"name": file.resolve().parent.name, "metrics": metrics, **counts}


# ---- the card ----


def render(facts: Facts, facts_file: str) -> str:
    """Return the card of `facts`, which lie in `facts_file`."""
    # A template and no f-strings: the card reads as it will look.
    environment = Environment(
        loader=PackageLoader("hf_pipetransformer", "report"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_escaped,
    )  # fmt: skip
    environment.filters |= {
        "as_data": _data_in_markdown, "code": _code, "command": _block, "mib": _mib, "number": _number,
        "shapes": _shapes, "table": _table, "whole": _Markdown,
    }  # fmt: skip
    rows = {"results": _result_rows(facts), "evaluations": _evaluation_rows(facts["evaluations"])}
    text = environment.get_template("card.md.jinja").render(**facts, facts_file=facts_file, rows=rows)
    front = facts["front_matter"]
    # In the order that the trainer gave: the hub's class would put the fields that it knows first.
    metadata = ModelCardData(**front, ignore_metadata_errors=True).to_yaml(original_order=list(front))
    return (f"---\n{metadata}\n---\n\n" if front else "") + text + "\n"


class _Markdown(str):
    """Text of the card that is Markdown already; everything else that the template prints is escaped."""


_MARKUP = re.compile(r"[\\`*\[\]|]")


def _escaped(value: Any) -> str:
    """Return a value as text of Markdown, in which nothing is markup, and which stays in its cell of a table."""
    if isinstance(value, _Markdown):
        return value
    return _MARKUP.sub(r"\\\g<0>", html.escape(printable(str(value)), quote=False))


def _fence(text: str, least: int) -> str:
    """Return more backticks than follow each other in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _code(value: Any) -> _Markdown:
    """Return a name as code of Markdown."""
    text = printable(str(value))
    # A code span ends at the first run of as many backticks as it began with.
    fence = _fence(text, 1)
    # Markdown drops a space at each end; without it a backtick of the text would lengthen the fence.
    pad = " " if len(fence) > 1 else ""
    return _Markdown(f"{fence}{pad}{text}{pad}{fence}")


def _lines(text: str) -> str:
    # Line by line, because a line feed is not printable either.
    return "\n".join(map(printable, text.split("\n")))


def _data_in_markdown(text: str) -> _Markdown:
    """Return the user's description of the data, which is Markdown: links stay, tags do not."""
    return _Markdown(re.sub(r"<(?!https?://)", "&lt;", _lines(text)))


def _table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> _Markdown:
    body = [[_escaped(cell) for cell in row] for row in rows]
    return _Markdown(
        "\n".join(f"| {' | '.join(row)} |" for row in ([*map(_escaped, head)], ["---"] * len(head), *body))
    )


def _block(words: Sequence[str]) -> _Markdown:
    """Return a command as a shell takes it, in lines that keep an option and its values together."""
    options: list[str] = []
    for word in words:
        if options and not word.startswith("--"):
            options[-1] += f" {shlex.quote(word)}"
        else:
            options.append(shlex.quote(word))
    lines: list[str] = []
    for option in options:
        if lines and len(lines[-1]) + len(option) < _LONGEST_LINE:
            lines[-1] += f" {option}"
        else:
            lines.append(option if not lines else f"    {option}")
    text = _lines(" \\\n".join(lines))
    fence = _fence(text, 3)
    return _Markdown(f"{fence}\n{text}\n{fence}")


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _result_rows(facts: Facts) -> list[list[str]]:
    """Return the metrics, those of evaluation first, beside those of another run if there is one."""
    metrics, other = facts["metrics"], facts["comparison"]
    names = sorted(metrics, key=lambda name: not name.startswith("eval_"))
    if not other:
        return [[name, _number(metrics[name])] for name in names]
    rows = [[name, _number(metrics[name]), _number(other["metrics"].get(name))] for name in names]
    rows.append(["layout", _shapes(facts), _shapes(other)])
    counts = {"train_samples": "training samples", "epochs": "epochs", "samples_per_step": "samples per step"}
    return rows + [
        [text, _number(facts[n]), _number(other[n])] for n, text in counts.items() if other.get(n) is not None
    ]


def _shapes(facts: Facts) -> str:
    """Return the stages and replicas that a run went through."""
    if facts.get("layouts") is None:
        return ""
    processes = facts["processes"]
    shapes = [shape for shape, _ in groupby(f"{each['stages']} x {each['replicas']}" for each in facts["layouts"])]
    return " → ".join(shapes) or f"plain Trainer, {processes} process{'' if processes == 1 else 'es'}"


def _evaluation_rows(evaluations: Sequence[Facts]) -> list[list[str]]:
    """Return the values of each evaluation below their names; an evaluation may lack some."""
    names = list(dict.fromkeys(name for entry in evaluations for name in entry))
    head = ["training loss" if name == "loss" else name for name in names]
    return [head, *([_number(entry.get(name)) for name in names] for entry in evaluations)]
