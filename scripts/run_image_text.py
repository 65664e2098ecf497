"""Fine-tune a vision-language model on images with questions and answers: adapters on its language model alone.

    python scripts/run_image_text.py \
        --model_name_or_path HuggingFaceTB/SmolVLM-256M-Instruct --dataset_name merve/vqav2-small \
        --answer_column_name multiple_choice_answer --do_train --bf16 true --output_dir outputs/vqa

On one process the frozen vision tower is computed once: from the second epoch on its outputs are read. A model that
does not fit on one device goes on several:

    accelerate launch --multi_gpu --num_processes 2 scripts/run_image_text.py \
        --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --dataset_name my_images --do_train --bf16 true \
        --pipeline_parallel_size 2 --output_dir outputs/vqa

`my_images` may be a folder with `train/metadata.jsonl`, whose lines have `file_name`, `question` and `answer`. A row
may have no image or a list of them. On a machine without GPUs add `--use_cpu true`. Images need Pillow; torchvision
only where the model's processor asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import script_utils
import torch
from datasets import DatasetDict, Image, Sequence
from peft import LoraConfig, get_peft_model
from script_utils import DataArguments, ModelArguments
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.hf_argparser import HfArg

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


IGNORED = -100
"""Label of a token that no loss counts."""
ATTENTION_OF_TEXT = r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj)"


@dataclass
class ImageTextModelArguments(ModelArguments):
    """Which model, and its adapters."""

    lora_r: int = HfArg(default=16, help="Rank of the adapters.")
    lora_alpha: int = HfArg(default=32, help="Scale of the adapters, over their rank.")
    lora_target_modules: str = HfArg(
        default=ATTENTION_OF_TEXT,
        help="Regular expression of the modules with an adapter. One that matches modules of the vision tower trains "
        "it, and nothing is stored.",
    )


@dataclass
class ImageTextDataArguments(DataArguments):
    """Which images, questions and answers."""

    image_column_name: str = HfArg(default="image", help="The column of images: one a row, a list, or none.")
    question_column_name: str = HfArg(default="question", help="The column of questions.")
    answer_column_name: str = HfArg(default="answer", help="The column of answers.")
    max_seq_length: int | None = HfArg(default=None, help="Longer samples, image tokens included, are refused.")

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the data by the option that names them."""
        return {name: getattr(self, name) for name in vars(self) if name.endswith("_column_name")}


@dataclass
class ImageTextCollator:
    """Images, questions and answers to the inputs of the model, by its processor and chat template."""

    processor: Any
    data_args: ImageTextDataArguments
    image_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        args = self.data_args
        images = [[image.convert("RGB") for image in _listed(row[args.image_column_name])] for row in rows]
        texts = [
            self._text(row[args.question_column_name], row[args.answer_column_name], len(own))
            for row, own in zip(rows, images, strict=True)
        ]
        # Processors refuse lists without any image.
        batch = self.processor(text=texts, images=images if any(images) else None, padding=True, return_tensors="pt")
        length = batch["input_ids"].shape[1]
        if args.max_seq_length is not None and length > args.max_seq_length:
            raise ValueError(f"A sample has {length} tokens; expected --max_seq_length {args.max_seq_length} at most.")
        labels, is_image = batch["input_ids"].clone(), batch["input_ids"] == self.image_token_id
        labels[(batch["attention_mask"] == 0) | is_image] = IGNORED
        return {**batch, "labels": labels}

    def _text(self, question: str, answer: str, num_images: int) -> str:
        if getattr(self.processor, "chat_template", None) is None:
            images = f"{self.processor.image_token}\n" * num_images
            return f"{images}{question}\n{answer}{self.processor.tokenizer.eos_token}"
        asked = [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": question}]
        said = [{"type": "text", "text": answer}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        text: str = self.processor.apply_chat_template(turns, tokenize=False)
        return text


def _listed(images: Any) -> list[Any]:
    return images if isinstance(images, list) else [image for image in (images,) if image is not None]


def load_data(data_args: ImageTextDataArguments, model_args: ModelArguments) -> DatasetDict:
    """Local files or the hub's data, reduced to the columns that are read; images are decoded when they are."""
    data = script_utils.load_data(data_args, model_args.cache_dir)
    for option, column in data_args.columns.items():
        script_utils.require_column(next(iter(data.values())), column, f"--{option}")
    columns, name = list(data_args.columns.values()), data_args.image_column_name
    is_list = hasattr(next(iter(data.values())).features[name], "feature")
    return data.select_columns(columns).cast_column(name, Sequence(Image()) if is_list else Image())


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        ImageTextModelArguments, ImageTextDataArguments, PipeTransformerArguments, argv=argv
    )
    args.remove_unused_columns = False  # The collator reads columns that no model takes.
    with args.main_process_first(desc="loading data"):
        data = script_utils.select_samples(load_data(data_args, model_args), data_args, args)
    processor = AutoProcessor.from_pretrained(model_args.model_name_or_path, **model_args.hub_options)
    model = script_utils.load_model(AutoModelForImageTextToText, model_args)
    image_token_id = model.config.image_token_id
    adapters = LoraConfig(
        r=model_args.lora_r, lora_alpha=model_args.lora_alpha, target_modules=model_args.lora_target_modules
    )
    trainer = PipeTransformerTrainer(
        model=get_peft_model(model, adapters),
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        processing_class=processor,
        data_collator=ImageTextCollator(processor, data_args, image_token_id),
    )
    script_utils.train(trainer)
    if args.do_eval:
        script_utils.report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(data["validation"])})
    script_utils.finish(trainer, data_args, tasks="image-text-to-text", tags=["hf-pipetransformer", "vision"])


if __name__ == "__main__":
    main()
