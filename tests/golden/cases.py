"""Golden runs: short trainings over models, layouts and what is frozen, with the values that they ended with.

`python -m tests.golden.cases --write` records all of them anew into `golden.json`, `--write NAME ...` those of these
names, and without `--write` they are compared with it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


GOLDEN = Path(__file__).with_name("golden.json")
ROUNDED = 1e-2
"""Relative tolerance where values are rounded to 8 bits, which on another machine may fall to the other side."""


@dataclass(frozen=True)
class Golden:
    """One run, or several in one folder, of which the last one counts.

    Args:
        kind: `parts`: a model of `frozen_models` under our trainer; `callback`: under plain Trainer with
            `ComputedOnce`; `prefix`: a model of `tests.support.models` or a decoder whose lower layers freeze.
        model: its name.
        options: changes to the arguments; those that begin with `activation_cache` go to the callback.
        runs: how often it is trained, with one folder for what is stored.
        resumes: True if the last run goes on from the checkpoint of step 4.
        evaluates: True to evaluate after each epoch.
        processes: that train it.
        is_quick: True for those that every change is tested with.
        rtol: of losses, norms and weights, on another machine.
    """

    kind: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    runs: int = 1
    resumes: bool = False
    evaluates: bool = False
    processes: int = 1
    is_quick: bool = False
    rtol: float = 1e-5


_ACCUMULATION: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
_RECOMPUTED: dict[str, Any] = {"gradient_checkpointing": True}
# Under autocast products depend on the company of a row: the same one in each epoch.
_BF16: dict[str, Any] = {"bf16": True, "train_sampling_strategy": "sequential"}
_HALVED: dict[str, Any] = {"activation_cache_dtype": "bfloat16"}
_AUTO: dict[str, Any] = {"activation_cache": "auto"}
_OFF: dict[str, Any] = {"activation_cache": "off"}
_KEPT: dict[str, Any] = {"activation_cache_keep": True}
_TWO: dict[str, Any] = {"pipeline_parallel_num_microbatches": 2}
_LOWER: dict[str, Any] = {"freeze_layers": "2", **_TWO}
_STEPWISE: dict[str, Any] = {"freeze_policy": "fixed", "freeze_at": "2:1,5:2", **_TWO}
_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "elastic": False}
_REPLICAS: dict[str, Any] = {"pipeline_parallel_size": 1, "elastic": False}
_ELASTIC: dict[str, Any] = {"pipeline_parallel_size": 2, "elastic": True}

_QUICK_PARTS = ("whisper", "t5", "smolvlm", "vit probe")
_PARTS = (
    "whisper", "t5", "llava", "paligemma", "smolvlm", "clip", "vision encoder and decoder", "detr", "wav2vec2",
    "qwen2-vl", "convnext probe", "wav2vec2 probe", "vit probe", "dinov2 probe", "bert probe",
)  # fmt: skip
_CALLED = ("whisper", "t5", "smolvlm", "clip", "qwen2-vl", "vit probe")
_PREFIXES = ("bert_sequence", "bert_masked", "deberta_sequence", "modernbert_masked", "vit", "dinov2", "gpt2", "llama")

CASES: dict[str, Golden] = {
    **{f"parts {name}": Golden("parts", name, is_quick=name in _QUICK_PARTS) for name in _PARTS},
    **{f"parts {name} auto": Golden("parts", name, _AUTO) for name in ("whisper", "t5", "llava", "vit probe")},
    "parts bert probe auto": Golden("parts", "bert probe", _AUTO, is_quick=True),
    "parts whisper off": Golden("parts", "whisper", _OFF),
    "parts whisper evaluated": Golden("parts", "whisper", evaluates=True, is_quick=True),
    "parts llava evaluated": Golden("parts", "llava", evaluates=True),
    "parts vit probe evaluated": Golden("parts", "vit probe", evaluates=True),
    "parts whisper kept": Golden("parts", "whisper", _KEPT, runs=2, is_quick=True),
    "parts t5 kept": Golden("parts", "t5", _KEPT, runs=2),
    "parts whisper accumulation": Golden("parts", "whisper", _ACCUMULATION),
    "parts whisper recomputed": Golden("parts", "whisper", _RECOMPUTED),
    "parts whisper bf16": Golden("parts", "whisper", _BF16, rtol=ROUNDED),
    "parts vit probe bf16": Golden("parts", "vit probe", _BF16, rtol=ROUNDED),
    "parts whisper halved": Golden("parts", "whisper", _HALVED, rtol=ROUNDED),
    "parts whisper resumed": Golden("parts", "whisper", runs=2, resumes=True),
    "parts convnext probe resumed": Golden("parts", "convnext probe", runs=2, resumes=True),
    **{f"callback {name}": Golden("callback", name, is_quick=name == "whisper") for name in _CALLED},
    "callback vit probe auto": Golden("callback", "vit probe", _AUTO),
    "callback whisper evaluated": Golden("callback", "whisper", evaluates=True),
    "callback whisper kept": Golden("callback", "whisper", _KEPT, runs=2),
    "callback whisper accumulation": Golden("callback", "whisper", _ACCUMULATION),
    "callback whisper bf16": Golden("callback", "whisper", _BF16, rtol=ROUNDED),
    **{f"prefix {name}": Golden("prefix", name, _LOWER, is_quick=name in ("vit", "llama")) for name in _PREFIXES},
    "prefix bert_sequence stepwise": Golden("prefix", "bert_sequence", _STEPWISE, is_quick=True),
    "prefix vit stepwise": Golden("prefix", "vit", _STEPWISE),
    "prefix gpt2 stepwise": Golden("prefix", "gpt2", _STEPWISE),
    "prefix bert_sequence half": Golden("prefix", "bert_sequence", {"freeze_layers": "50%", **_TWO}),
    "prefix bert_sequence all": Golden("prefix", "bert_sequence", {"freeze_layers": "4", **_TWO}),
    "prefix bert_sequence schedule": Golden("prefix", "bert_sequence", {"freeze_policy": "schedule", **_TWO}),
    "prefix bert_sequence auto": Golden("prefix", "bert_sequence", {**_LOWER, **_AUTO}),
    "prefix bert_sequence nothing frozen": Golden("prefix", "bert_sequence", {"freeze_policy": "none", **_TWO}),
    "prefix bert_sequence off": Golden("prefix", "bert_sequence", {**_LOWER, **_OFF}),
    "prefix bert_sequence evaluated": Golden("prefix", "bert_sequence", _LOWER, evaluates=True, is_quick=True),
    "prefix vit evaluated": Golden("prefix", "vit", _STEPWISE, evaluates=True),
    "prefix bert_sequence halved": Golden("prefix", "bert_sequence", {**_LOWER, **_HALVED}, rtol=ROUNDED),
    "prefix bert_sequence kept": Golden("prefix", "bert_sequence", {**_LOWER, **_KEPT}, runs=2, is_quick=True),
    "prefix bert_sequence accumulation": Golden("prefix", "bert_sequence", {**_LOWER, **_ACCUMULATION}),
    "prefix bert_sequence bf16": Golden("prefix", "bert_sequence", {**_LOWER, **_BF16}, rtol=ROUNDED),
    "prefix bert_sequence resumed": Golden("prefix", "bert_sequence", _STEPWISE, runs=2, resumes=True),
    "prefix bert_sequence one micro-batch": Golden("prefix", "bert_sequence", {"freeze_layers": "2"}),
    "stages bert_sequence": Golden("prefix", "bert_sequence", {**_LOWER, **_STAGES}, processes=2),
    "stages llama": Golden("prefix", "llama", {**_LOWER, **_STAGES}, processes=2),
    "stages vit stepwise evaluated": Golden("prefix", "vit", {**_STEPWISE, **_STAGES}, evaluates=True, processes=2),
    "replicas bert_sequence": Golden("prefix", "bert_sequence", {**_LOWER, **_REPLICAS}, processes=2),
    "replicas vit stepwise": Golden("prefix", "vit", {**_STEPWISE, **_REPLICAS}, processes=2),
    "replicas whisper": Golden("parts", "whisper", {"per_device_train_batch_size": 3}, processes=2),
    "replicas t5": Golden("parts", "t5", {"per_device_train_batch_size": 3}, processes=2),
    "elastic bert_sequence": Golden(
        "prefix", "bert_sequence", {"freeze_policy": "fixed", "freeze_at": "2:1,5:4", **_TWO, **_ELASTIC}, processes=2
    ),
}


def read() -> dict[str, Any]:
    """Return what `golden.json` has: `machine`, and of each case what it ended with."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def write(values: Mapping[str, Any]) -> None:
    """Write values with a line for each that a case has, so that a difference shows what it is of."""
    lines = ["{", ' "cases": {']
    for name, case in sorted(values["cases"].items()):
        lines.append(f"  {json.dumps(name)}: {{")
        lines += [f"   {json.dumps(key)}: {json.dumps(case[key], sort_keys=True)}," for key in sorted(case)]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("  },")
    lines[-1] = lines[-1].removesuffix(",")
    text = "\n".join([*lines, " },", f' "machine": {json.dumps(values["machine"], sort_keys=True)}', "}", ""])
    GOLDEN.write_text(text, encoding="utf-8")


def main() -> None:
    from tests.golden.recording import differences, machine, recorded

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of the cases; all if none is given")
    parser.add_argument("--write", action="store_true", help="record them instead of comparing them")
    options = parser.parse_args()
    known = read() if GOLDEN.exists() else {"cases": {}, "machine": machine()}
    if options.write and not options.names:
        known = {"cases": {}, "machine": machine()}
    if options.write and known["machine"] != machine():
        parser.error("golden.json is of another machine or another torch: record all cases")
    num_wrong = 0
    for name in options.names or CASES:
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            found = recorded(CASES[name], Path(folder), name)
        if options.write:
            known["cases"][name] = found
            write(known)
            continue
        wrong = differences(known["cases"][name], found, CASES[name].rtol, known["machine"] == machine())
        num_wrong += bool(wrong)
        print(name, "as recorded" if not wrong else "\n  ".join(["DIFFERS", *wrong]), flush=True)
    if num_wrong:
        raise SystemExit(f"{num_wrong} cases differ")


if __name__ == "__main__":
    main()
