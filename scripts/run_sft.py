"""Supervised fine-tuning of a causal language model with TRL's SFTTrainer in a pipeline, whole or with adapters.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_sft.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --do_train \
        --pipeline_parallel_size 2 --output_dir outputs/sft

Needs `pip install trl`. Data sets have the columns that SFTTrainer takes: `text`, `messages`, or `prompt` and
`completion`. On a machine without GPUs add `--use_cpu true --bf16 false`.
"""

from __future__ import annotations

import script_utils
from script_utils import DataArguments
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

from hf_pipetransformer.trl import SFTPipelineConfig, SFTPipelineTrainer


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        ModelConfig, DataArguments, SFTPipelineConfig, argv=argv
    )
    with args.main_process_first(desc="loading data"):
        data = script_utils.select_samples(script_utils.load_data(data_args), data_args, args)
    options = {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}
    quantization = get_quantization_config(model_args)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, dtype=model_args.dtype, attn_implementation=model_args.attn_implementation,
        quantization_config=quantization, device_map=None if quantization is None else {"": "cpu"}, **options,
    )  # fmt: skip
    trainer = SFTPipelineTrainer(
        model,
        args,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path, **options),
        peft_config=get_peft_config(model_args),
    )
    if args.do_train:
        script_utils.train(trainer)
    if args.do_eval:
        script_utils.report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(data["validation"])})
    script_utils.finish(trainer, data_args, tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
