"""Fine-tune a causal language model on a data set of the hub or local files, with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_clm.py \
        --model_name_or_path openai-community/gpt2 --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-2-raw-v1 --do_train --do_eval \
        --pipeline_parallel_size 2 --output_dir outputs/wikitext

On a machine without GPUs add `--use_cpu true`. The options of transformers' `run_clm.py` mean the same here, but a
`--block_size` that the model does not take is refused. With one or two long sequences a batch
`--pipeline_schedule token` fills the stages with slices of them.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import DatasetDict, load_dataset
from script_utils import (
    TextDataArguments,
    TextModelArguments,
    finish,
    load_files,
    parse_arguments,
    read_config,
    report,
    require_column,
    require_split,
    select_samples,
    start_logging,
    train,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


logger = logging.getLogger("run_clm")

LONGEST_BLOCK = 1024


@dataclass
class CausalModelArguments(TextModelArguments):
    """Which model and tokenizer, or which family of models to begin one of."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model of the hub, or a folder written by save_pretrained."}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "Train a new model of this family instead, as gpt2; see --config_overrides."}
    )

    def __post_init__(self) -> None:
        if (self.model_name_or_path is None) == (self.model_type is None):
            raise ValueError("Pass one of --model_name_or_path and --model_type.")


@dataclass
class CausalDataArguments(TextDataArguments):
    """Which texts, and how they become blocks of tokens."""

    text_column_name: str | None = field(
        default=None, metadata={"help": "The column of texts; by default `text`, else the first."}
    )
    block_size: int | None = field(
        default=None,
        metadata={"help": f"Tokens of a sample; by default what the model takes, {LONGEST_BLOCK} at most."},
    )

    def __post_init__(self) -> None:
        if self.dataset_name is None and not self.files:
            raise ValueError("No data: pass --dataset_name, or --train_file and --validation_file.")


def load_data(data_args: CausalDataArguments, model_args: CausalModelArguments) -> DatasetDict:
    """Local files if any are named, else the named data set of the hub."""
    if data_args.files:
        return load_files(data_args.files, model_args.cache_dir)
    return load_dataset(
        data_args.dataset_name, data_args.dataset_config_name, cache_dir=model_args.cache_dir, token=model_args.token
    )


def load_model(model_args: CausalModelArguments) -> PreTrainedModel:
    """A trained model, or a new one of a family."""
    if model_args.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=read_config(model_args), **model_args.hub_options
        )
    if model_args.config_name is not None:
        return AutoModelForCausalLM.from_config(read_config(model_args))
    config = CONFIG_MAPPING[model_args.model_type]()
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    return AutoModelForCausalLM.from_config(config)


def block_size_of(data_args: CausalDataArguments, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """As asked for, within what model and tokenizer take."""
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", tokenizer.model_max_length))
    if data_args.block_size is None:
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
        ids = tokenizer(batch[column], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [own + end for own in ids if own]}

    blocks = {}
    for name, split in data.items():
        require_column(split, column, "--text_column_name")
        options = {
            "batched": True,
            "num_proc": data_args.preprocessing_num_workers,
            "load_from_cache_file": not data_args.overwrite_cache,
        }
        ids = split.map(encode, remove_columns=split.column_names, desc="Tokenizing", **options)
        blocks[name] = ids.map(
            in_blocks, fn_kwargs={"size": size}, remove_columns=["input_ids"], desc=f"Blocks of {size}", **options
        )
        if not len(blocks[name]):
            raise ValueError(f"The {name} texts hold fewer than {size} tokens: pass a smaller --block_size.")
    return DatasetDict(blocks)


def evaluate(trainer: PipeTransformerTrainer) -> None:
    """The loss, and the perplexity, which is its exponential."""
    metrics = trainer.evaluate() | {"eval_samples": len(trainer.eval_dataset)}
    loss = metrics["eval_loss"]
    metrics["perplexity"] = math.exp(loss) if loss < math.log(1e300) else math.inf
    report(trainer, "eval", metrics)


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = parse_arguments(
        CausalModelArguments, CausalDataArguments, PipeTransformerArguments, argv=argv
    )
    start_logging(args)
    set_seed(args.seed)
    with args.main_process_first(desc="loading data"):
        data = load_data(data_args, model_args)
    tokenizer_name = model_args.tokenizer_name or model_args.model_name_or_path
    if tokenizer_name is None:
        raise ValueError("A new model needs --tokenizer_name.")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, **model_args.hub_options)
    model = load_model(model_args)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    size = block_size_of(data_args, tokenizer, model.config)
    with args.main_process_first(desc="tokenizing"):
        wanted = {"train": args.do_train, "validation": args.do_eval}
        texts = DatasetDict({name: split for name, split in data.items() if wanted.get(name)})
        data = select_samples(tokenize(texts, tokenizer, data_args, size), data_args, args)
    trainer = PipeTransformerTrainer(
        model=model,
        args=args,
        train_dataset=require_split(data, "train", "do_train") if args.do_train else None,
        eval_dataset=require_split(data, "validation", "do_eval") if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if args.do_train:
        train(trainer)
    if args.do_eval:
        evaluate(trainer)
    finish(trainer, data_args, tasks="text-generation", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
