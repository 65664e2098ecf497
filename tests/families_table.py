"""The tables of docs/models.md: families, made from what the tests cover, and the outcome of `make families`.

    python -m tests.families_table

rewrites them in place.
"""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap
from typing import Any

from hf_pipetransformer.splitters.families import find_splitter
from scripts.bench.tables import with_table
from tests.support.decoders import DECODERS, make_decoder
from tests.support.every_family import every_subject
from tests.support.models import MODELS, attention_implementations, build_model


REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "models.md"
RECORD = REPOSITORY / "benchmarks" / "families.json"
FROZEN_RECORD = REPOSITORY / "benchmarks" / "frozen_families.json"
LINE = 119

_TASKS = {
    "sequence": "sequence classification",
    "question": "question answering",
    "token": "token classification",
    "masked": "masked words",
    "image": "image classification",
    "audio": "audio classification",
}

_DECODERS = {
    "gpt2": "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)", "phi3": "Phi-3", "olmo2": "OLMo 2", "smollm3": "SmolLM3", "gpt_neox": "GPT-NeoX",
    "opt": "OPT", "mixtral": "Mixtral", "qwen2_moe": "Qwen2-MoE", "qwen3_moe": "Qwen3-MoE",
}  # fmt: skip
_CLASSIFIERS = {
    "gpt2": "sequence classification, token classification",
    "llama": "sequence classification",
    "qwen2": "sequence classification, token classification",
    "qwen3": "sequence classification",
    "mixtral": "sequence classification",
}


def families_table(release: str) -> str:
    """Rows of family, cuts, tasks and attention implementations; `release` is the version of transformers."""
    names: dict[str, list[str]] = {}
    for name, tiny in MODELS.items():
        names.setdefault(tiny.family, []).append(name)
    lines = [
        f"| family | a stage boundary may fall | tested tasks | tested attention (transformers {release}) |",
        "|---|---|---|---|",
    ]
    for family, members in names.items():
        lines.append(_row(family, [_TASKS[MODELS[name].task] for name in members], build_model(members[0])))
    for name in DECODERS:
        tasks = ["next words", *([_CLASSIFIERS[name]] if name in _CLASSIFIERS else [])]
        lines.append(_row(_DECODERS[name], tasks, make_decoder(name)))
    return "".join(f"{line}\n" for line in lines)


def _row(family: str, tasks: list[str], model: Any) -> str:
    cuts = "between attention and MLP" if find_splitter(model).cuts_inside_layers else "between layers"
    return f"| {family} | {cuts} | {', '.join(tasks)} | {', '.join(attention_implementations(model))} |"


def record_table() -> str:
    """What became of every class by task, and the models that are split, from the record of `make families`."""
    record = json.loads(RECORD.read_text())
    by_task: dict[str, Counter[str]] = {}
    by_type: dict[str, set[str]] = {}
    of_images: dict[str, list[str]] = {}
    for subject in every_subject():
        outcome = record["classes"].get(subject.name, {}).get("outcome", "skipped")
        by_task.setdefault(subject.task, Counter())[outcome] += 1
        if subject.task == "images beside text":
            of_images.setdefault(outcome, []).append(subject.model_type)
        else:
            by_type.setdefault(subject.model_type, set()).add(outcome)
    columns = {"equal": "equal to `Trainer`", "refused": "left to `Trainer`", "skipped": "not tried"}
    columns |= {outcome: outcome for outcome in record["counts"] if outcome not in columns}
    rows = [(task, counts) for task, counts in sorted(by_task.items())]
    rows.append(("all", sum(by_task.values(), Counter())))
    release = record["versions"]["transformers"]
    lines = [f"| classes for (transformers {release}) | " + " | ".join(columns.values()) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for task, counts in rows:
        lines.append(f"| {task} | " + " | ".join(str(counts[outcome]) for outcome in columns) + " |")
    whole = sorted(name for name, found in by_type.items() if "equal" in found and "refused" not in found)
    partly = sorted(name for name, found in by_type.items() if {"equal", "refused"} <= found)
    lines += ["", *wrap(f"All classes are split of {', '.join(whole)}; some of {', '.join(partly)}.", LINE)]
    num_shared = sum(found.get("shared") == "equal" for found in record["classes"].values())
    for outcome, what in columns.items():
        if outcome in of_images:
            names = sorted(of_images[outcome])
            where = f" ({num_shared} of {len(names)} on two replicas, too)" if outcome == "equal" else ""
            lines += ["", *wrap(f"With images beside text, {what}{where}: {', '.join(names)}.", LINE)]
    return "".join(f"{line}\n" for line in lines)


def frozen_table() -> str:
    """What became of the frozen part of every class by task, from the second record of `make families`."""
    record = json.loads(FROZEN_RECORD.read_text())
    frozen = {"most": "everything below the head", "half": "the largest part of it"}
    by_task: dict[str, dict[str, Counter[str]]] = {}
    for subject in every_subject():
        for what, found in record["classes"].get(subject.name, {}).items():
            by_task.setdefault(subject.task, {name: Counter() for name in frozen})[what][found["outcome"]] += 1
    columns = {"stored": "stored", "computed": "computed, with a reason", "skipped": "`Trainer` alone cannot"}
    columns |= {name: name for counts in record["counts"].values() for name in counts if name not in columns}
    names = [f"{text}: {column}" for text in frozen.values() for column in columns.values()]
    lines = ["| classes for | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    total = {what: sum((by_what[what] for by_what in by_task.values()), Counter()) for what in frozen}
    for task, by_what in [*sorted(by_task.items()), ("all", total)]:
        lines.append(f"| {task} | " + " | ".join(str(by_what[w][column]) for w in frozen for column in columns) + " |")
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    page = with_table(PAGE.read_text(encoding="utf-8"), "families", families_table(version("transformers")))
    page = with_table(page, "families.json", record_table())
    PAGE.write_text(with_table(page, "frozen_families.json", frozen_table()), encoding="utf-8")


if __name__ == "__main__":
    main()
