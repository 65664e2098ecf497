"""Fine-tune a causal language model on a data set of the hub or local files, with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_clm.py \
        --model_name_or_path openai-community/gpt2 --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval \
        --pipeline_parallel_size 2 --output_dir outputs/wikitext

On a machine without GPUs add `--use_cpu true`. Options are named as in transformers' `run_clm.py`, but a
`--block_size` that the model does not take is refused. With one or two long sequences a batch
`--pipeline_schedule token` fills the stages with slices of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import script_utils
from datasets import DatasetDict
from script_utils import ModelArguments, TextDataArguments
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, default_data_collator
from transformers.hf_argparser import HfArg

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


LONGEST_BLOCK = 1024


@dataclass
class CausalDataArguments(TextDataArguments):
    """Which texts, and how they become blocks of tokens."""

    text_column_name: str | None = HfArg(default=None, help="The column of texts; by default `text`, else the first.")
    block_size: int | None = HfArg(
        default=None, help=f"Tokens of a sample; by default what the model takes, {LONGEST_BLOCK} at most."
    )


def block_size_of(data_args: CausalDataArguments, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """As asked for, within what model and tokenizer take."""
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", tokenizer.model_max_length))
    if data_args.block_size is None:
        # A tokenizer that knows no limit names a huge one.
        return min(longest, LONGEST_BLOCK)
    if data_args.block_size > longest:
        raise ValueError(
            f"--block_size {data_args.block_size} is more than the {longest} tokens that the model takes."
        )
    return data_args.block_size


def in_blocks(texts: dict[str, list[list[int]]], size: int) -> dict[str, list[list[int]]]:
    """Texts one after another, cut into samples of `size` tokens that are their own labels; a rest is dropped."""
    tokens = list(chain.from_iterable(texts["input_ids"]))
    blocks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
    return {"input_ids": blocks, "labels": [list(block) for block in blocks]}


def tokenize(
    data: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: CausalDataArguments, size: int
) -> DatasetDict:
    """Texts to blocks of token ids, each text ended by the tokenizer's end of sequence if it has one."""
    columns = next(iter(data.values())).column_names
    column = data_args.text_column_name or ("text" if "text" in columns else columns[0])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # Not verbose: it would warn of texts longer than the model takes, and these are cut into blocks.
        ids = tokenizer(batch[column], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [own + end for own in ids if own]}

    blocks = DatasetDict()
    for name, split in data.items():
        script_utils.require_column(split, column, "--text_column_name")
        ids = split.map(encode, remove_columns=split.column_names, desc="Tokenizing", **data_args.map_options)
        blocks[name] = ids.map(
            in_blocks,
            fn_kwargs={"size": size},
            remove_columns=["input_ids"],
            desc=f"Blocks of {size}",
            **data_args.map_options,
        )
        if not len(blocks[name]):
            raise ValueError(f"The {name} texts hold fewer than {size} tokens: pass a smaller --block_size.")
    return blocks


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        ModelArguments, CausalDataArguments, PipeTransformerArguments, argv=argv
    )
    with args.main_process_first(desc="loading data"):
        texts = script_utils.load_data(data_args, model_args.cache_dir)
    tokenizer = script_utils.load_tokenizer(model_args)
    model = script_utils.load_model(AutoModelForCausalLM, model_args)
    # Never to fewer rows: some models have more than there are words, padded for speed.
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    size = block_size_of(data_args, tokenizer, model.config)
    with args.main_process_first(desc="tokenizing"):
        data = tokenize(script_utils.wanted_splits(texts, args), tokenizer, data_args, size)
        # Only now: samples are the blocks, not the texts.
        data = script_utils.select_samples(data, data_args, args)

    trainer = PipeTransformerTrainer(
        model=model,
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    script_utils.train(trainer)
    if args.do_eval:
        metrics = trainer.evaluate() | {"eval_samples": len(data["validation"])}
        loss = metrics["eval_loss"]
        # `math.exp` raises an error where a float cannot hold the result.
        metrics["perplexity"] = math.exp(loss) if loss < math.log(1e300) else math.inf
        script_utils.report(trainer, "eval", metrics)
    script_utils.finish(trainer, data_args, tasks="text-generation", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
