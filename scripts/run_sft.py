"""Supervised fine-tuning of a causal language model with TRL's SFTTrainer in a pipeline, whole or with adapters.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_sft.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --do_train \
        --pipeline_parallel_size 2 --output_dir outputs/sft

Needs `pip install trl`. Data sets have the columns that SFTTrainer takes: `text`, `messages`, or `prompt` and
`completion`. On a machine without GPUs add `--use_cpu true --bf16 false`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from datasets import DatasetDict, load_dataset
from script_utils import (
    DataArguments,
    finish,
    load_files,
    parse_arguments,
    report,
    require_split,
    select_samples,
    start_logging,
    train,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin


logger = logging.getLogger("run_sft")


@dataclass
class SFTArguments(SFTConfig, PipeTransformerArguments):
    """Options of SFTTrainer, with its defaults, and of the pipeline."""


class SFTPipelineTrainer(PipeTransformerMixin, SFTTrainer):
    """SFTTrainer in a pipeline."""


def load_data(data_args: DataArguments) -> DatasetDict:
    """Local files if any are named, else the named data set of the hub."""
    if data_args.files:
        return load_files(data_args.files, cache_dir=None)
    if data_args.dataset_name is None:
        raise ValueError("No data: pass --dataset_name, or --train_file and --validation_file.")
    return load_dataset(data_args.dataset_name, data_args.dataset_config_name)


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = parse_arguments(ModelConfig, DataArguments, SFTArguments, argv=argv)
    start_logging(args)
    with args.main_process_first(desc="loading data"):
        data = select_samples(load_data(data_args), data_args, args)
    options = {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}
    quantization = get_quantization_config(model_args)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, dtype=model_args.dtype, attn_implementation=model_args.attn_implementation,
        quantization_config=quantization, device_map=None if quantization is None else {"": "cpu"}, **options,
    )  # fmt: skip
    trainer = SFTPipelineTrainer(
        model,
        args,
        train_dataset=require_split(data, "train", "do_train"),
        eval_dataset=require_split(data, "validation", "do_eval") if args.do_eval else None,
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path, **options),
        peft_config=get_peft_config(model_args),
    )
    if args.do_train:
        train(trainer)
    if args.do_eval:
        report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(trainer.eval_dataset)})
    finish(trainer, data_args, tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
