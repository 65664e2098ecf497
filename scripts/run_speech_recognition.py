"""Fine-tune Whisper or another encoder-decoder on recorded speech; its encoder is frozen, and computed once.

    python scripts/run_speech_recognition.py \
        --model_name_or_path openai/whisper-small --dataset_name mozilla-foundation/common_voice_17_0 \
        --dataset_config_name hi --text_column_name sentence --language hindi --task transcribe \
        --do_train --do_eval --predict_with_generate true --output_dir outputs/whisper

`--train_file` takes files with a path and a text in each row, `--dataset_name audiofolder --data_dir FOLDER` a folder.
On a machine without GPUs add `--use_cpu true`. Options are named as in transformers'
`run_speech_recognition_seq2seq.py`. Recordings are read by soundfile.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jiwer
import numpy as np
import script_utils
import soundfile
import torch
from datasets import Audio, DatasetDict, load_dataset
from scipy.signal import resample_poly
from script_utils import DataArguments, ModelArguments
from transformers import (
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    EvalPrediction,
)
from transformers.hf_argparser import HfArg

from hf_pipetransformer import Seq2SeqPipelineArguments, Seq2SeqPipelineTrainer


IGNORED = -100
"""Label of a token that no loss counts."""


@dataclass
class SpeechModelArguments(ModelArguments):
    """Which model, and what of it is trained."""

    freeze_encoder: bool = HfArg(
        default=True, help="Train the decoder alone; what the encoder gives is computed once."
    )
    language: str | None = HfArg(default=None, help="Language of the texts, for a multilingual Whisper.")
    task: str | None = HfArg(default=None, help="`transcribe` or `translate`, for a multilingual Whisper.")


@dataclass
class SpeechDataArguments(DataArguments):
    """Which recordings, and their texts."""

    data_dir: str | None = HfArg(default=None, help="Folder of recordings, for --dataset_name audiofolder.")
    audio_column_name: str = HfArg(default="audio", help="The column of recordings, or of their paths.")
    text_column_name: str = HfArg(default="text", help="The column of texts.")
    max_duration_in_seconds: float = HfArg(default=30.0, help="Longer recordings are left out.")
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that compute spectrograms.")


@dataclass
class SpeechCollator:
    """Stack spectrograms, and pad texts with labels that no loss counts.

    The decoder begins with `start_id` by itself: labels that begin with it lose it.
    """

    tokenizer: Any
    start_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        padded = self.tokenizer.pad([{"input_ids": row["labels"]} for row in rows], return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, IGNORED)
        if (labels[:, 0] == self.start_id).all():
            labels = labels[:, 1:]
        features = torch.stack([torch.as_tensor(row["input_features"]) for row in rows])
        return {"input_features": features, "labels": labels}


def waveform(sound: dict[str, Any], rate: int) -> np.ndarray:
    """Return the samples `(time,)` of a recording, of one channel and at `rate` samples a second."""
    source = sound["path"] if sound["bytes"] is None else io.BytesIO(sound["bytes"])
    samples, own_rate = soundfile.read(source, dtype="float32", always_2d=True)
    divisor = math.gcd(rate, own_rate)
    return resample_poly(samples.mean(axis=1), rate // divisor, own_rate // divisor).astype(np.float32)


def load_data(data_args: SpeechDataArguments, model_args: ModelArguments) -> DatasetDict:
    """A folder of recordings, local files, or the hub's data; recordings are not decoded yet."""
    if data_args.data_dir is not None:
        data = load_dataset(data_args.dataset_name, data_dir=data_args.data_dir, cache_dir=model_args.cache_dir)
    else:
        data = script_utils.load_data(data_args, model_args.cache_dir)
    first = next(iter(data.values()))
    script_utils.require_column(first, data_args.audio_column_name, "--audio_column_name")
    script_utils.require_column(first, data_args.text_column_name, "--text_column_name")
    return data.cast_column(data_args.audio_column_name, Audio(decode=False))


def prepare(data: DatasetDict, data_args: SpeechDataArguments, processor: Any) -> DatasetDict:
    """Recordings to spectrograms and texts to labels, once and kept by `datasets`."""
    rate = processor.feature_extractor.sampling_rate

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        sound = waveform(row[data_args.audio_column_name], rate)
        features = processor.feature_extractor(sound, sampling_rate=rate, return_tensors="np")["input_features"][0]
        labels = processor.tokenizer(row[data_args.text_column_name])["input_ids"]
        return {"input_features": features, "labels": labels, "seconds": len(sound) / rate}

    options = {"num_proc": data_args.preprocessing_num_workers, "desc": "Computing spectrograms"}
    encoded = DatasetDict(
        {name: split.map(encode, remove_columns=split.column_names, **options) for name, split in data.items()}
    )
    longest = data_args.max_duration_in_seconds
    short = encoded.filter(lambda seconds: seconds <= longest, input_columns=["seconds"])
    return short.remove_columns("seconds").with_format("torch")


def word_errors(tokenizer: Any) -> Callable[[EvalPrediction], dict[str, float]]:
    """A `compute_metrics` of generated tokens: wrong words over words of the texts."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        found, expected = (
            tokenizer.batch_decode(np.where(ids == IGNORED, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        )
        # Word errors are a share of the words of the text, of which an empty one has none.
        pairs = [(one, other) for one, other in zip(expected, found, strict=True) if one.strip()]
        return {"wer": jiwer.wer(*map(list, zip(*pairs, strict=True))) if pairs else 0.0}

    return compute_metrics


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        SpeechModelArguments, SpeechDataArguments, Seq2SeqPipelineArguments, argv=argv
    )
    if args.do_eval and not args.predict_with_generate:
        raise ValueError("--do_eval counts wrong words of generated texts: add --predict_with_generate true.")
    processor = AutoProcessor.from_pretrained(model_args.model_name_or_path, **model_args.hub_options)
    named = {name: getattr(model_args, name) for name in ("language", "task") if getattr(model_args, name)}
    if named:
        processor.tokenizer.set_prefix_tokens(**named)
    with args.main_process_first(desc="reading recordings"):
        data = load_data(data_args, model_args)
        data = prepare(script_utils.select_samples(data, data_args, args), data_args, processor)

    model = script_utils.load_model(AutoModelForSpeechSeq2Seq, model_args)
    model.generation_config.update(**named)
    if model_args.freeze_encoder:
        model.get_encoder().requires_grad_(False)
    trainer = Seq2SeqPipelineTrainer(
        model=model,
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        processing_class=processor,
        data_collator=SpeechCollator(processor.tokenizer, model.config.decoder_start_token_id),
        compute_metrics=word_errors(processor.tokenizer) if args.predict_with_generate else None,
    )
    script_utils.train(trainer)
    if args.do_eval:
        script_utils.report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(data["validation"])})
    script_utils.finish(trainer, data_args, tasks="automatic-speech-recognition", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
