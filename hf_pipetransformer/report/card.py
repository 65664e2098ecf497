"""Model card of a training: its facts as JSON values, and the card that is made of them alone."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainingArguments

from hf_pipetransformer.report import printable
from hf_pipetransformer.report.files import create
from hf_pipetransformer.report.origin import SECRETS, length_of, plain, relative, versions
from hf_pipetransformer.report.recorded import NO_METRICS, RecordedRun, is_finite, pipeline_size, read_run


CARD_FILE = "README.md"
FACTS_FILE = "model_card.json"
COMPARED_FILES = (FACTS_FILE, "all_results.json")

_TRAINERS_OPTIONS = (
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim"),
    *("max_grad_norm", "gradient_accumulation_steps", "seed"),
)
_LONGEST_LINE = 108
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
    card = folder / CARD_FILE
    front, citations = _kept(card.read_text(encoding="utf-8") if card.is_file() else "")
    facts: Facts = {"name": folder.resolve().name, "front_matter": front, "citations": citations}
    facts |= facts_of(trainer, data)
    facts["comparison"] = None if comparison is None else read_comparison(Path(comparison))
    with create(folder / FACTS_FILE) as file:
        file.write(json.dumps(facts, indent=1) + "\n")
    card.write_text(render(facts, FACTS_FILE), encoding="utf-8")


def _kept(card: str) -> tuple[str, str]:
    """Return the front matter of a trainer's card, without the lines around it, and the section of citations."""
    opening, _, rest = card.partition("---\n")
    front, closing, text = rest.partition("\n---\n")
    is_front = closing and not opening.strip()
    citations = _CITATIONS.search(text if is_front else card)
    return front if is_front else "", citations.group().strip() if citations else ""


# ---- the facts ----


def facts_of(trainer: Any, data: str | None) -> Facts:
    """Return what a trainer and the files in its output folder tell about its training, without any times."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    try:
        run = read_run(folder, folder.name)
    except ValueError:
        run = RecordedRun(folder.name, folder)  # Left to Trainer, whose state was not saved
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
        "pipeline_options": _changed_options(args),
        "layouts": _layouts(run),
        "bytes_moved": sum(event["bytes_moved"] for event in run.of_kind("transition")),
        "cache": _cache(run),
        "versions": versions(),
        "command": command(),
    }


def _changed_options(args: TrainingArguments) -> Facts:
    """Return the pipeline's options that differ from their defaults, without folders."""
    inherited = {each.name for each in fields(TrainingArguments)}
    pipeline = next((kind for kind in type(args).__mro__ if kind.__name__ == "PipeTransformerArguments"), None)
    known = [] if pipeline is None else [each for each in fields(pipeline) if each.name not in inherited]
    return {
        each.name: plain(getattr(args, each.name))
        for each in known
        if each.init
        and each.default is not MISSING
        and getattr(args, each.name) != each.default
        and not each.name.endswith(("_dir", "_plan"))
    }


def _metrics(history: Sequence[Facts], results: Facts) -> Facts:
    """Return the last value of each loss and metric; of `results` only those that Trainer's log does not have."""
    logged = {name: value for entry in history for name, value in entry.items()}
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
        if values and (not found or values.items() - found[-1].items() or found[-1]["step"] != entry["step"]):
            found.append({"epoch": round(entry.get("epoch") or 0.0, 2), "step": entry["step"], "loss": loss, **values})
    return found


def _layouts(run: RecordedRun) -> list[Facts]:
    """Return each layout with the step it began at and why."""
    found = []
    for event in run.events:
        if event["event"] in ("run", "transition"):
            layout = event["layout"] if event["event"] == "run" else event["to"]
            found.append(
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
            )
    return found


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
    own = list(sys.argv)
    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        words = []
    if own and len(words) > len(own) and words[-len(own) :] == own:
        launcher = words[: -len(own)]
        if len(launcher) > 1 and launcher[1].startswith(os.sep):
            launcher = launcher[1:]  # The interpreter in front of an installed command
        words = [os.path.basename(launcher[0]), *launcher[1:], *own]
    else:
        words = ["python", *own]
    return _without_secrets([relative(word) for word in words])


def _without_secrets(words: Iterable[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--") and value and any(secret in name for secret in SECRETS):
            word = f"{name}=..."
        elif found and found[-1].startswith("--") and any(secret in found[-1] for secret in SECRETS):
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
        names = (
            "name",
            "metrics",
            "train_samples",
            "eval_samples",
            "epochs",
            "steps",
            "processes",
            "samples_per_step",
        )
        return {name: found.get(name) for name in (*names, "layouts", "command")}
    metrics = {name: value for name, value in found.items() if _is_result(name) and is_finite(value)}
    counts = {"train_samples": found.get("train_samples"), "epochs": found.get("epoch")}
    return {"name": file.resolve().parent.name, "metrics": metrics, **counts}


# ---- the card ----


def render(facts: Facts, facts_file: str) -> str:
    """Return the card of `facts`, which lie in `facts_file`."""
    sections = [_results(facts), _data(facts), _training(facts), _timeline(facts), _stored(facts), _made_with(facts)]
    front = f"---\n{facts['front_matter']}\n---\n\n" if facts["front_matter"] else ""
    end = f"All figures of these sections are in [`{facts_file}`]({facts_file}), written by the run itself."
    return front + "\n\n".join([_introduction(facts), *sections, *filter(None, [facts["citations"]]), end]) + "\n"


_MARKUP = re.compile(r"[\\`*\[\]|]")


def _text(value: Any) -> str:
    """Return a name as text of Markdown, in which nothing is markup, and which stays in its cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(printable(str(value)), quote=False))


def _code(value: Any) -> str:
    """Return a name as code of Markdown."""
    text = printable(str(value))
    fence = _fence(text, 1)
    pad = " " if len(fence) > 1 else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _fence(text: str, least: int) -> str:
    """Return more backticks than follow each other in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _introduction(facts: Facts) -> str:
    start = "Trained from new weights" if facts["base_model"] is None else f"{_code(facts['base_model'])} fine-tuned"
    return f"# {_text(facts['name'])}\n\n{start} with hf-pipetransformer, a pipeline-parallel `transformers.Trainer`."


def _table(rows: Sequence[Sequence[Any]]) -> str:
    head, *body = [[_text(cell) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(words: Sequence[str]) -> str:
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
    return f"{fence}\n{text}\n{fence}"


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _results(facts: Facts) -> str:
    """Return the metrics, beside those of another run if there is one."""
    other = facts["comparison"]
    names = [name for name in facts["metrics"] if name.startswith("eval_")]
    names += [name for name in facts["metrics"] if name not in names]
    if not other:
        return f"## Results\n\n{_table([['metric', 'value'], *([n, _number(facts['metrics'][n])] for n in names)])}"
    rows: list[list[str]] = [["", "this run", other["name"]]]
    rows += [[name, _number(facts["metrics"][name]), _number(other["metrics"].get(name))] for name in names]
    rows.append(["layout", _shapes(facts), _shapes(other)])
    counts = {"train_samples": "training samples", "epochs": "epochs", "samples_per_step": "samples per step"}
    rows += [[words, _number(facts[n]), _number(other[n])] for n, words in counts.items() if other.get(n) is not None]
    said = f"\n\nCommand of {_code(other['name'])}:\n\n{_block(other['command'])}" if other.get("command") else ""
    return f"## Results\n\n{_table(rows)}{said}"


def _shapes(facts: Facts) -> str:
    if facts.get("layouts") is None:
        return ""
    shapes = [f"{each['stages']} x {each['replicas']}" for each in facts["layouts"]]
    processes = facts["processes"]
    plain = f"plain Trainer, {processes} process{'' if processes == 1 else 'es'}"
    return " → ".join(shape for at, shape in enumerate(shapes) if at == 0 or shape != shapes[at - 1]) or plain


def _data(facts: Facts) -> str:
    # Written by the user, in Markdown: links stay, tags do not.
    said = re.sub(r"<(?!https?://)", "&lt;", _lines(facts["data"])) + "\n\n" if facts["data"] else ""
    counts = [
        f"{words}: {facts[name]:,} samples"
        for name, words in (("train_samples", "Training"), ("eval_samples", "evaluation"))
        if facts[name] is not None
    ]
    return f"## Data\n\n{said}{'; '.join(counts) or 'The number of samples is not known'}."


def _training(facts: Facts) -> str:
    options = ", ".join(
        f"{name} {_text(value)}" for name, value in facts["options"].items() if value not in (None, -1)
    )
    lines = [
        f"{facts['steps']:,} optimizer steps ({facts['epochs']:g} epochs) of {facts['samples_per_step']} samples on "
        f"{facts['processes']} process{'' if facts['processes'] == 1 else 'es'}, {facts['precision']}.",
        f"Options of Trainer: {options}.",
    ]
    pipeline = ", ".join(_code(f"{name}={value}") for name, value in facts["pipeline_options"].items())
    lines.append(f"Options of the pipeline: {pipeline or 'the defaults'}.")
    parts = ["## Training\n\n" + "\n\n".join(lines), _block(facts["command"])]
    if facts["evaluations"]:
        names = list(dict.fromkeys(name for entry in facts["evaluations"] for name in entry))
        rows = [["training loss" if name == "loss" else name for name in names]]
        rows += [[_number(entry.get(name)) for name in names] for entry in facts["evaluations"]]
        parts.append(_table(rows))
    return "\n\n".join(parts)


def _timeline(facts: Facts) -> str:
    """Return the layouts, K stages x R replicas, and the layers frozen under each."""
    if not facts["layouts"]:
        return "## Layouts and freezing\n\nNo pipeline: plain Trainer, no layer frozen."
    rows: list[list[Any]] = [["from step", "epoch", "stages x replicas", "micro-batches", "frozen", "cached", "why"]]
    for each in facts["layouts"]:
        shape = f"{each['stages']} x {each['replicas']}"
        frozen = f"{each['frozen']} of {each['layers']} layers"
        why = each["reason"]
        rows.append(
            [each["step"], f"{each['epoch']:g}", shape, each["microbatches"], frozen, each["cached"] or "", why]
        )
    moved = f"\n\nMoved between ranks: {_mib(facts['bytes_moved'])}." if facts["bytes_moved"] else ""
    schedules = ", ".join(dict.fromkeys(each["schedule"] for each in facts["layouts"]))
    return f"## Layouts and freezing\n\nSchedule: {schedules}.\n\n{_table(rows)}{moved}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _stored(facts: Facts) -> str:
    cache = facts["cache"]
    if cache["off"]:
        return f"## Activation cache\n\nOff: {_text(cache['off'])}"
    if not cache["epochs"]:
        return "## Activation cache\n\nNothing was stored."
    rows = [["after epoch", "hits", "misses", "stored"]]
    for each in cache["epochs"]:
        rows.append([f"{each['epoch']:g}", f"{each['hits']:,}", f"{each['misses']:,}", _mib(each["bytes_stored"])])
    hits, misses = (sum(each[name] for each in cache["epochs"]) for name in ("hits", "misses"))
    rate = (
        f"\n\n{hits:,} of {hits + misses:,} reads were hits ({hits / (hits + misses):.0%})." if hits + misses else ""
    )
    return f"## Activation cache\n\n{_table(rows)}{rate}"


def _made_with(facts: Facts) -> str:
    return "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
