"""The scripts for speech and for images with text: data as people have it, and a frozen part that is computed once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_image_text
import run_speech_recognition
import soundfile
from datasets import Dataset
from peft import PeftModel
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hf_pipetransformer.cache.frozen_parts import watching
from hf_pipetransformer.training import part_stores
from tests.distributed.launcher import accelerate_launch
from tests.support.comparison import far_tensors


SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

OPTIONS = (
    "--do_train",
    "--use_cpu",
    "true",
    "--report_to",
    "none",
    "--num_train_epochs",
    "3",
    "--save_strategy",
    "no",
)


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WORTH", 0.0)
    monkeypatch.setattr(part_stores, "WORTH_SECONDS", -1e9)


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "all_results.json").read_text())


# ---- speech ----


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Rows with the path of a sound at another rate than the model's, and a text."""
    rows: dict[str, list[str]] = {"audio": [], "text": []}
    for number in range(6):
        path, tone = tmp_path / f"{number}.wav", np.sin(np.arange(8000) * (0.05 + 0.02 * number))
        soundfile.write(path, np.stack([tone, tone], axis=1), 8000)
        rows["audio"].append(str(path))
        rows["text"].append("a" * (number + 1))
    Dataset.from_dict(rows).to_json(tmp_path / "sounds.jsonl")
    return tmp_path / "sounds.jsonl"


@pytest.fixture
def whisper(tmp_path: Path) -> Path:
    folder = tmp_path / "whisper"
    names = ("endoftext", "startoftranscript", "en", "transcribe", "translate", "notimestamps")
    special = [f"<|{name}|>" for name in names]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    sounds = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    WhisperProcessor(sounds, tokenizer).save_pretrained(folder)
    start, end = vocabulary["<|startoftranscript|>"], vocabulary["<|endoftext|>"]
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer), num_mel_bins=20, encoder_attention_heads=2, decoder_attention_heads=2,
            max_source_positions=50, max_target_positions=20, pad_token_id=end, bos_token_id=end, eos_token_id=end,
            decoder_start_token_id=start, **sizes,
        )
    )  # fmt: skip
    model.generation_config.max_length = 8
    model.save_pretrained(folder)
    return folder


def test_speech_is_read_resampled_and_its_encoder_computed_once(
    recordings: Path, whisper: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "output"
    files = ("--train_file", str(recordings), "--validation_file", str(recordings))
    model = ("--model_name_or_path", str(whisper), "--do_eval", "--predict_with_generate", "true")
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        # Whether an encoder of so few operations pays is decided by measured times.
        stored = ("--activation_cache", "on")
        run_speech_recognition.main([*model, *files, *OPTIONS, *stored, "--output_dir", str(output)])
    assert results(output)["train_samples"] == 6
    assert results(output)["eval_wer"] >= 0
    assert "model.encoder" in caplog.text
    assert "outputs were read instead of computed" in caplog.text


def test_a_recording_is_of_the_models_rate_and_one_channel(recordings: Path) -> None:
    sound = {"path": str(recordings.parent / "0.wav"), "bytes": None}
    samples = run_speech_recognition.waveform(sound, 16000)
    assert samples.shape == (16000,)
    of_bytes = {"path": None, "bytes": Path(sound["path"]).read_bytes()}
    np.testing.assert_array_equal(run_speech_recognition.waveform(of_bytes, 16000), samples)


def test_evaluation_without_generated_texts_is_refused(recordings: Path, whisper: Path, tmp_path: Path) -> None:
    files = ("--train_file", str(recordings), "--validation_file", str(recordings), "--do_eval")
    with pytest.raises(ValueError, match="add --predict_with_generate true"):
        run_speech_recognition.main(["--model_name_or_path", str(whisper), *files, "--output_dir", str(tmp_path)])


# ---- images with text ----


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rows: dict[str, list[str]] = {"image": [], "question": [], "answer": []}
    for number in range(6):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (40, 30), (40 * number, 10, 200)).save(path)
        rows["image"].append(str(path))
        rows["question"].append("what colour")
        rows["answer"].append("blue" if number < 3 else "red")
    Dataset.from_dict(rows).to_json(tmp_path / "pictures.jsonl")
    return tmp_path / "pictures.jsonl"


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    folder = tmp_path / "llava"
    words = ["<pad>", "<unk>", "</s>", "<image>", "what", "colour", "blue", "red"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    LlavaProcessor(
        CLIPImageProcessorPil(**size), tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    layers = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
    LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **layers),
            text_config=LlamaConfig(vocab_size=len(words), num_key_value_heads=4, pad_token_id=0, **layers),
            image_token_id=3,
        )
    ).save_pretrained(folder)
    return folder


def test_adapters_of_the_language_model_leave_the_tower_to_be_computed_once(
    pictures: Path, llava: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "output"
    files = ("--train_file", str(pictures), "--validation_file", str(pictures), "--do_eval", "--lora_r", "4")
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        run_image_text.main(
            [
                "--model_name_or_path",
                str(llava),
                *files,
                *OPTIONS,
                "--output_dir",
                str(output),
                "--max_seq_length",
                "40",
            ]
        )
    assert results(output)["eval_loss"] > 0
    assert "vision_tower" in caplog.text
    assert "outputs were read instead of computed" in caplog.text


def test_a_row_has_any_number_of_images(pictures: Path, llava: Path, tmp_path: Path) -> None:
    paths = Dataset.from_json(str(pictures))["image"]
    rows = {"image": [[], [*paths[:2]], [paths[2]]], "question": ["what colour"] * 3, "answer": ["red"] * 3}
    Dataset.from_dict(rows).to_json(tmp_path / "lists.jsonl")
    args = run_image_text.ImageTextDataArguments(train_file=str(tmp_path / "lists.jsonl"))
    data = run_image_text.load_data(args, run_image_text.ImageTextModelArguments(str(llava)))["train"]
    collate = run_image_text.ImageTextCollator(LlavaProcessor.from_pretrained(llava), args, image_token_id=3)
    batch = collate(list(data))
    assert len(batch["pixel_values"]) == 3
    assert (batch["input_ids"] == 3).sum(dim=1).tolist() == [0, 32, 16]
    assert "pixel_values" not in collate([data[0]])
    assert run_image_text._listed(None) == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_folder_of_images_trains_on_two_stages_as_on_one_process(llava: Path, tmp_path: Path) -> None:
    for split, number in (("train", 6), ("validation", 3)):
        folder = tmp_path / "images" / split
        folder.mkdir(parents=True)
        lines = []
        for index in range(number):
            Image.new("RGB", (40 + index, 30), (40 * index, 10, 200)).save(folder / f"{index}.png")
            lines.append(
                {"file_name": f"{index}.png", "question": "what colour", "answer": ["blue", "red"][index % 2]}
            )
        (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = ("--dataset_name", str(tmp_path / "images"), "--cache_dir", str(tmp_path / "cache"), "--do_eval")
    rates = ("--learning_rate", "1e-2", "--adam_epsilon", "1e-6")
    common = ["--model_name_or_path", str(llava), *data, *OPTIONS, "--lora_r", "4", *rates]
    script, one, two = SCRIPTS / "run_image_text.py", tmp_path / "one", tmp_path / "two"
    run_image_text.main([*common, "--per_device_train_batch_size", "2", "--output_dir", str(one)])
    launched = ["--per_device_train_batch_size", "1", "--pipeline_parallel_size", "2", "--output_dir", str(two)]
    result = accelerate_launch(script, [*common, *launched], timeout=200)
    assert "2 stages x 1 replica" in result.output
    assert results(two)["eval_loss"] == pytest.approx(results(one)["eval_loss"], rel=1e-5)
    base = [LlavaForConditionalGeneration.from_pretrained(llava) for _ in range(2)]
    loaded = [PeftModel.from_pretrained(*each).state_dict() for each in zip(base, (one, two), strict=True)]
    adapters = [name for name in loaded[0] if "lora_B" in name]
    assert adapters
    for name in adapters:
        assert loaded[0][name].any()
    # Adam takes the rounding of gradients that are nearly zero for a step: by tensors, as everywhere.
    assert far_tensors(*({name: each[name] for name in adapters} for each in reversed(loaded)), 1e-4) == {}


def test_a_longer_sample_is_refused(pictures: Path, llava: Path, tmp_path: Path) -> None:
    files = ("--train_file", str(pictures), "--lora_r", "4", "--max_seq_length", "10")
    with pytest.raises(ValueError, match="expected --max_seq_length 10 at most"):
        run_image_text.main(
            ["--model_name_or_path", str(llava), *files, *OPTIONS, "--output_dir", str(tmp_path / "o")]
        )
