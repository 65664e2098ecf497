"""Count the lines that a user sees when a run fails, with `accelerate launch` on two processes.

    python -m tests.distributed.count_lines --output benchmarks/failures.json

Four runs: a misspelt option; `kill -9` of rank 1; Ctrl-C in the launcher's terminal; a checkpoint that the disk cannot
take, on a file system of 3 MB (which only root may make). Counted is what comes after the failure, of the ranks and of
the launcher apart. Progress of the training before it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil


READY = "== the failure follows =="
CASES = ("wrong option", "kill -9 of rank 1", "Ctrl-C", "full disk")
MISSPELT = {"wrong option": ["--freeze_policy", "gradnorm"]}
TIMEOUT = 180
_OF_A_RANK = re.compile(r"\[default(\d)\]:")
_PROGRESS = re.compile("Writing model shards")


def train() -> None:
    """Train a tiny model as a user's script does, with a checkpoint every other step."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainerCallback

    from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

    class Ready(TrainerCallback):
        """Says when the failure may come, between two checkpoints."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                print(READY, file=sys.stderr, flush=True)

    if any(set(words) <= set(sys.argv) for words in MISSPELT.values()):
        print(READY, file=sys.stderr, flush=True)
    (args,) = HfArgumentParser(PipeTransformerArguments).parse_args_into_dataclasses()
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(5, 100, (64, 16), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "attention_mask": [1] * 16, "labels": index % 2} for index, row in enumerate(ids)]
    PipeTransformerTrainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=rows, callbacks=[Ready()]
    ).train()


def run_case(case: str, folder: Path) -> dict[str, Any]:
    """Launch the training, let it fail, and count the lines."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"),
        *("--main_process_port", "0", "--num_processes", "2", "--tee", "3", __file__, "--output_dir", str(folder)),
        *("--pipeline_parallel_size", "2", "--save_steps", "2", "--max_steps", "1000000", "--disable_tqdm", "True"),
        *("--report_to", "none", "--logging_strategy", "no", "--save_total_limit", "2"),
        *("--per_device_train_batch_size", "4", *MISSPELT.get(case, [])),
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "FAILURES_TRAIN": "1"}
    with tempfile.TemporaryFile("w+") as log:
        launcher = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + TIMEOUT
        is_sent = case not in ("kill -9 of rank 1", "Ctrl-C")
        while launcher.poll() is None and time.monotonic() < deadline:
            if not is_sent and _content(log).count(READY) == 2:
                is_sent = True
                if case == "Ctrl-C":
                    os.killpg(launcher.pid, signal.SIGINT)
                else:
                    _process_of_rank(launcher.pid, 1).kill()
            time.sleep(0.1)
        if launcher.poll() is None:
            for child in psutil.Process(launcher.pid).children(recursive=True):
                child.kill()
            launcher.kill()
            raise RuntimeError(f"{case}: no end within {TIMEOUT} s\n{_content(log)}")
        text = _content(log)
    ranks, launchers, ready = [], [], set()
    for line in text.splitlines():
        mark = _OF_A_RANK.match(line)
        if READY in line and mark:
            ready.add(mark[1])
        elif mark and mark[1] in ready and line[mark.end() :].strip() and not _PROGRESS.search(line):
            ranks.append(line)
        elif not mark and ready and line.strip():
            launchers.append(line)
    print(f"---- {case} (status {launcher.returncode})", *ranks, sep="\n", flush=True)
    return {"lines of the ranks": len(ranks), "lines of the launcher": len(launchers)}


def _content(log: Any) -> str:
    return os.pread(log.fileno(), 2**24, 0).decode(errors="replace")


def _process_of_rank(launcher: int, rank: int) -> psutil.Process:
    for child in psutil.Process(launcher).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise RuntimeError(f"rank {rank} has ended before it was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", default="now", help="under which the figures stand in the file")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    # The training that this file also is finds only the package.
    from scripts.bench.measure import machine, write_json

    found = {}
    for case in options.only:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent, "out")
            folder.mkdir()
            if case == "full disk":
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
            try:
                found[case] = run_case(case, folder)
            finally:
                if case == "full disk":
                    subprocess.run(["umount", "-l", str(folder)], check=True)
    print(found)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    write_json(options.output, {**results, options.name: {**found, "machine": machine(2)}})


if __name__ == "__main__":
    train() if os.environ.get("FAILURES_TRAIN") else main()
