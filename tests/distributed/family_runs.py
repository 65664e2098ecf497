"""Train every class of transformers that `tests.support.every_family` knows on two stages, and compare with Trainer.

    python -m tests.distributed.family_runs --output benchmarks/families.json

What becomes of a class:

    equal    three steps on two stages give the losses, gradient norms and weights of Trainer in one process
    refused  one sentence says why it cannot be split, and with all defaults on two processes it is trained by Trainer,
             with the numbers of Trainer on two processes
    skipped  Trainer alone does not train it on these inputs, or it or an image for it cannot be made tiny
    crash    anything but a sentence was raised, or nothing happened for two minutes
    wrong    other numbers
    barred   refused with a sentence with all defaults, too, where Trainer trains it

"micro-batches" of a class are two in one process, "shared" are two replicas of a class that takes images beside text:
equal or refused.

The exit code is 1 if any class is one of the last three.
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

import torch
from safetensors.torch import load_file

from tests.distributed.family_worker import SECONDS_A_MODEL, train_all
from tests.distributed.scenarios import noted, start
from tests.support.every_family import LEFT_OUT, Subject, every_subject


BAD = ("crash", "wrong", "barred")

A_LAUNCH = 60
"""Models that one launch goes through: process groups and modules add up."""
TOLERANCE = 1e-5
"""Relative difference of losses and gradient norms, as in the tests of equality."""
WEIGHT_TOLERANCE = 1e-4
"""Difference of a weight after three steps, relative to the way that it went."""
NOISE = 1e-6
"""The same, relative to the way that all weights together went: for weights with next to no gradient."""


def run(subjects: Sequence[Subject], folder: Path, in_parts: bool = True) -> dict[str, dict[str, Any]]:
    """What becomes of each class, by its name.

    Args:
        in_parts: train each class in one process with two micro-batches, too.
    """
    outcomes = {s.name: {"outcome": "skipped", "reason": LEFT_OUT[s.name]} for s in subjects if s.name in LEFT_OUT}
    names = [subject.name for subject in subjects if subject.name not in outcomes]
    # Dealt out, so that no part has all classes of a slow family.
    num_parts = max(2, -(-len(names) // A_LAUNCH))
    with ThreadPoolExecutor(2) as pool:
        for part in pool.map(lambda i: _run_part(names[i::num_parts], folder, in_parts), range(num_parts)):
            outcomes |= part
    return dict(sorted(outcomes.items()))


def _run_part(names: Sequence[str], folder: Path, in_parts: bool) -> dict[str, dict[str, Any]]:
    outcomes: dict[str, dict[str, Any]] = {}
    plain = launch_all(names, folder, "parts" if in_parts else "plain", 1)
    trained = []
    for name in names:
        reason = _why_skipped(plain[name])
        if reason is None:
            trained.append(name)
        else:
            outcomes[name] = {"outcome": "skipped", "reason": reason}
    split = launch_all(trained, folder, "split", 2)
    # A crash is followed up, too: with all defaults, Trainer should have trained the model.
    refused = [name for name in trained if "error" in part_of(split[name], "split")]
    defaults = launch_all(refused, folder, "defaults", 2)
    replicas = launch_all(refused, folder, "replicas", 2)
    for name in trained:
        outcomes[name] = _outcome(name, folder, plain[name], split[name])
        if name in refused:
            found = _with_defaults(name, folder, defaults[name], replicas[name])
            if outcomes[name]["outcome"] == "crash":
                found.pop("outcome", None)
            outcomes[name] |= found
        if in_parts:
            outcomes[name] = _as_equal(name, folder, plain[name], plain[name], "micro-batches", outcomes[name])
    with_images = {subject.name for subject in every_subject() if subject.task == "images beside text"}
    shared = [name for name in trained if outcomes[name]["outcome"] == "equal" and name in with_images]
    for name, found in launch_all(shared, folder, "shared", 2).items():
        outcomes[name] = _as_equal(name, folder, found, plain[name], "shared", outcomes[name])
    counts = Counter(found["outcome"] for found in outcomes.values())
    print(f"{len(names)} classes: {dict(counts)}", file=sys.stderr, flush=True)
    return outcomes


# ---- launches ----

Found = list[dict[str, Any]]
"""What the ranks wrote down about one model."""


def launch_all(names: Sequence[str], folder: Path, mode: str, num_processes: int) -> dict[str, Found]:
    """All models, in one launch if it can be; one that ends its launch does not take those behind it along."""
    found: dict[str, Found] = {}
    left = list(names)
    for path in (noted(folder, f"{name}.{m}", r) for name in names for m in (mode, f"{mode}.begun") for r in (0, 1)):
        path.unlink(missing_ok=True)  # Of an earlier run in this folder.
    while left:
        listed = folder / f"{left[0]}.{mode}.list"
        listed.write_text(json.dumps(left))
        limit = SECONDS_A_MODEL * len(left) + 120
        result = start(
            train_all,
            folder,
            num_processes,
            {"listed": str(listed), "mode": mode},
            timeout=limit,
            check=False,
            grace=SECONDS_A_MODEL,
        )
        begun = [name for name in left if noted(folder, f"{name}.{mode}.begun", 0).exists()]
        for name in begun or left[:1]:
            paths = [noted(folder, f"{name}.{mode}", rank) for rank in range(num_processes)]
            ended = {"died": {"error": _died(result.output)}}
            found[name] = [json.loads(path.read_text()) if path.exists() else ended for path in paths]
        left = left[max(len(begun), 1) :]
    return found


def _died(output: str) -> dict[str, Any]:
    is_timeout = "Timeout (" in output
    text = f"no end within {SECONDS_A_MODEL} s" if is_timeout else "the process died"
    return {"type": "Hang" if is_timeout else "Death", "text": text, "is_sentence": False, "traceback": output[-6000:]}


# ---- judgement ----


def part_of(found: Found, part: str) -> dict[str, Any]:
    """What the rank with the most to say says: of several errors that which is no consequence of another one."""
    parts = [rank.get(part) or rank.get("died") or {} for rank in found]
    failed = [p for p in parts if "error" in p]
    failed.sort(key=lambda p: p["error"]["type"] in ("PeerLostError", "PipelineError", "Hang", "Death"))
    return (failed or parts)[0]


def _is_refused(found: Found, part: str) -> bool:
    errors = [rank.get(part, {}).get("error") for rank in found]
    return all(error is not None and error["is_sentence"] for error in errors)


def _why_skipped(found: Found) -> str | None:
    alone = part_of(found, "plain")
    if "error" in alone:
        error = alone["error"]
        return f"Trainer alone: {error['type']}: {one_line(error['text'])}"
    if not all(map(math.isfinite, alone["loss"])):
        return f"Trainer alone: losses {alone['loss']}"
    return None


def _outcome(name: str, folder: Path, plain: Found, split: Found) -> dict[str, Any]:
    found = part_of(split, "split")
    if "error" in found:
        if _is_refused(split, "split"):
            return {"outcome": "refused", "sentence": one_line(found["error"]["text"])}
        return {"outcome": "crash", "split": short(found["error"])}
    if split[0]["split"]["loss"] != split[1]["split"]["loss"]:
        return {"outcome": "wrong", "found": "the ranks logged different losses"}
    off = difference(found, part_of(plain, "plain"), folder, name, "split", "plain")
    return {"outcome": "equal"} if off is None else {"outcome": "wrong", "found": off}


def _with_defaults(name: str, folder: Path, defaults: Found, replicas: Found) -> dict[str, Any]:
    """What becomes of a class with all defaults; an outcome only if that is a worse one."""
    ours, theirs = part_of(defaults, "defaults"), part_of(replicas, "replicas")
    if "error" in theirs and "error" in ours and _cause(ours) == _cause(theirs):
        return {"defaults": f"fails as Trainer does: {short(theirs['error'])}"}
    if "error" in theirs:
        return {"outcome": "wrong", "defaults": f"Trainer alone fails: {short(theirs['error'])}"}
    if "error" in ours:
        is_refused = _is_refused(defaults, "defaults")
        return {"outcome": "barred" if is_refused else "crash", "defaults": short(ours["error"])}
    if not ours["is_left"]:
        # Refused on two stages only, in a step: with all defaults one stage on two replicas trains it. Its masks are
        # not those of DDP, nor is DDP's loss where the model ignores `num_items_in_batch` (transformers#47688).
        return {"defaults": "trained by one stage on two replicas"}
    found = difference(ours, theirs, folder, name, "defaults", "replicas", exact=True)
    if found is not None:
        return {"outcome": "wrong", "defaults": found}
    return {"defaults": "as Trainer"}


def _cause(found: dict[str, Any]) -> str:
    return found["error"]["type"] + found["error"]["text"][:60]


def _as_equal(
    name: str, folder: Path, found: Found, plain: Found, part: str, result: dict[str, Any]
) -> dict[str, Any]:
    """The result with what became of another layout, which is equal or refused as well."""
    ours = part_of(found, part)
    if "error" not in ours:
        off = difference(ours, part_of(plain, "plain"), folder, name, part, "plain")
        return {**result, part: "equal"} if off is None else {**result, "outcome": "wrong", part: f"wrong: {off}"}
    if ours["error"]["is_sentence"]:
        return {**result, part: f"refused: {one_line(ours['error']['text'])}"}
    return {**result, "outcome": "crash", part: short(ours["error"])}


def difference(
    ours: dict[str, Any], theirs: dict[str, Any], folder: Path, name: str, our: str, their: str, exact: bool = False
) -> str | None:
    """Where two trainings differ, in words; None if they do not."""
    tolerance = 0 if exact else TOLERANCE
    for what in ("loss", "grad_norm"):
        if len(ours[what]) != len(theirs[what]) or not all(
            a == b or abs(a - b) <= tolerance * abs(b) for a, b in zip(ours[what], theirs[what], strict=False)
        ):
            return f"{what} {ours[what]} instead of {theirs[what]}"
    found, expected = (load_file(folder / f"{name}.{part}.safetensors") for part in (our, their))
    if found.keys() != expected.keys():
        return f"other weights: {sorted(found.keys() ^ expected.keys())[:3]}"
    if exact:
        differing = [key for key, value in expected.items() if not torch.equal(found[key], value)]
        return f"{len(differing)} weights differ, {differing[0]} first" if differing else None
    before = load_file(folder / f"{name}.before.safetensors")
    ways = {key: distance(value, before[key]) for key, value in expected.items()}
    total = math.hypot(*ways.values())
    for key, value in expected.items():
        off = distance(found[key], value)
        rounding = 1e-6 * float(value.norm())
        if not off <= WEIGHT_TOLERANCE * ways[key] + NOISE * total + rounding:
            return f"{key} is off by {off:.2g} after a way of {ways[key]:.2g} (all weights: {total:.2g})"
    return None


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of a difference: all of a buffer that has grown, and nothing for equal infinities."""
    if one.shape != other.shape:
        return float(one.norm())
    return float(torch.where(one == other, 0.0, one - other).norm())


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:600]


def short(error: dict[str, Any]) -> str:
    where = f" ({' < '.join(reversed(error['where'][-3:]))})" if error.get("where") else ""
    return f"{error['type']}: {one_line(error['text'])[:300]}{where}"


# ---- the record ----


def record(outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "date": datetime.date.today().isoformat(),
        "what": "two stages on two processes, two micro-batches, three steps of eight samples, beside Trainer",
        "counts": dict(sorted(Counter(found["outcome"] for found in outcomes.values()).items())),
        "classes": outcomes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="where the runs leave their files; by default a temporary one")
    parser.add_argument("--only", default="", help="a regular expression that names of classes or tasks contain")
    parser.add_argument("--join", action="store_true", help="keep what the output has of other classes")
    parser.add_argument("--every", type=int, default=1, help="take each n-th class only")
    parser.add_argument("--no-parts", action="store_true", help="leave out one process with two micro-batches")
    options = parser.parse_args()
    known = [s for s in every_subject() if re.search(options.only, f"{s.name} {s.model_type} {s.task}")]
    with tempfile.TemporaryDirectory(prefix="families-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):  # What the ranks print; what matters is in the outcomes.
            outcomes = run(known[:: options.every], folder, in_parts=not options.no_parts)
    before = json.loads(options.output.read_text())["classes"] if options.join else {}
    written = record(dict(sorted({**before, **outcomes}.items())))
    if options.output:
        options.output.write_text(json.dumps(written, indent=1) + "\n")
    for name, found in outcomes.items():
        if found["outcome"] in BAD:
            print(name, json.dumps(found, indent=1))
    print(written["counts"])
    sys.exit(any(found["outcome"] in BAD for found in outcomes.values()))


if __name__ == "__main__":
    main()
