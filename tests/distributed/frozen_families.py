"""Freeze the largest module of every class of transformers in `tests.support.every_family`, and compare with Trainer.

    python -m tests.distributed.frozen_families --output benchmarks/frozen_families.json

Each class is trained twice for two epochs in one process: with the largest module of all frozen, mostly everything
below the head, and with the largest that has less than 0.6 of the parameters. What becomes of each:

    stored    losses, gradient norms and weights are Trainer's, and outputs were read instead of computed
    computed  they are Trainer's, and a line says why nothing was stored
    as asked  a part with dropout or batch normalization was stored in evaluation mode, as activation_cache='on' says
    skipped   Trainer alone does not train it on these inputs, or it cannot be made tiny
    crash     anything was raised, or nothing happened for two minutes
    wrong     other numbers, or nothing was stored and no line says why

The exit code is 1 if any class is one of the last two.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import math
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.distributed.family_runs import A_LAUNCH, difference, launch_all, one_line, short
from tests.distributed.family_worker import FROZEN
from tests.support.every_family import LEFT_OUT, Subject, every_subject


BAD = ("crash", "wrong")
READ = re.compile(r"(\S+): (\d+) of (\d+) (?:outputs were read instead of computed|reads were hits)")
"""Of a part, or of the cache of a stack of layers."""
WHY_NOT = re.compile(r"(is frozen and computed as in Trainer|stores nothing|activation cache stays off|are computed)")


def outcome(name: str, folder: Path, what: str, found: dict[str, Any]) -> dict[str, Any]:
    """Judge one of the two trainings of a class."""
    if "died" in found:
        return {"outcome": "crash", "found": short(found["died"]["error"])}
    plain, stored = found.get(f"{what} plain", {}), found.get(f"{what} stored", {})
    if "error" in plain:
        return {"outcome": "skipped", "reason": f"Trainer alone: {one_line(plain['error']['text'])[:200]}"}
    if not all(map(math.isfinite, plain["loss"])):
        return {"outcome": "skipped", "reason": f"Trainer alone: losses {plain['loss']}"}
    if "error" in stored:
        return {"outcome": "crash", "found": short(stored["error"])}
    lines = found[f"{what} said"]["lines"]
    if any("in evaluation mode" in line for line in lines):
        return {"outcome": "as asked"}
    try:
        differs = difference(stored, plain, folder, name, f"{what} stored", f"{what} plain")
    except RuntimeError as error:  # Weights of other shapes: one bad class ends no loop of an hour.
        differs = f"cannot be compared: {error}"
    if differs is not None:
        return {"outcome": "wrong", "found": differs}
    read = [match.groups() for match in map(READ.search, lines) if match]
    if any(int(hits) for _, hits, _ in read):
        return {"outcome": "stored", "parts": {part: f"{hits} of {rows}" for part, hits, rows in read}}
    reasons = [one_line(line)[:200] for line in lines if WHY_NOT.search(line)]
    if reasons:
        return {"outcome": "computed", "reason": reasons[0]}
    return {"outcome": "wrong", "found": f"nothing was stored, without a reason: {lines}"}


def run(subjects: Sequence[Subject], folder: Path) -> dict[str, dict[str, Any]]:
    """What becomes of each class, by its name and what is frozen."""
    names = [subject.name for subject in subjects if subject.name not in LEFT_OUT]
    num_parts = max(2, -(-len(names) // A_LAUNCH))
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda i: launch_all(names[i::num_parts], folder, "frozen", 1), range(num_parts))
        found = {name: ranks[0] for part in parts for name, ranks in part.items()}
    return {name: {what: outcome(name, folder, what, found[name]) for what in FROZEN} for name in sorted(found)}


def record(outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "date": datetime.date.today().isoformat(),
        "what": "one process, two epochs of two steps of eight samples with a frozen part, beside Trainer",
        "counts": {
            what: dict(sorted(Counter(found[what]["outcome"] for found in outcomes.values()).items()))
            for what in FROZEN
        },
        "classes": outcomes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="a regular expression that names of classes or tasks contain")
    parser.add_argument("--every", type=int, default=1, help="take each n-th class only")
    parser.add_argument("--first", type=int, default=0, help="number of the first class; outputs of parts are joined")
    options = parser.parse_args()
    known = [s for s in every_subject() if re.search(options.only, f"{s.name} {s.model_type} {s.task}")]
    with tempfile.TemporaryDirectory(prefix="families-") as temporary, contextlib.redirect_stdout(io.StringIO()):
        outcomes = run(known[options.first :: options.every], Path(temporary))
    before = json.loads(options.output.read_text()) if options.first and options.output else {"classes": {}}
    written = record(dict(sorted({**before["classes"], **outcomes}.items())))
    if options.output:
        options.output.write_text(json.dumps(written, indent=1) + "\n")
    bad = {name: found for name, found in outcomes.items() if any(each["outcome"] in BAD for each in found.values())}
    for name, found in bad.items():
        print(name, json.dumps(found, indent=1))
    print(written["counts"])
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
