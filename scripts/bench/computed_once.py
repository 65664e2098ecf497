"""What a script froze is computed once: later epochs beside plain Trainer, and beside the frozen part for nothing."""

from __future__ import annotations

import io
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_pipetransformer import PipeTransformerTrainer

from .measure import Settings, alternate, experiment, largest_difference, launch, ratios, report, summary
from .training import StepClock, losses_of, make_trainer, without_launch_variables


Rows = list[dict[str, Any]]
NUM_STEPS = 8
"""Of an epoch, where a task says nothing else."""
NUM_EPOCHS = 3
MANY_STEPS = 304
"""Of later epochs, where they are fast."""
SOME_STEPS = 64
"""Of later epochs, where much is computed in each."""
NUM_CROPS = 4
"""Of each photo."""
IMAGE_TOKEN = 1


def whisper_tiny() -> nn.Module:
    """As openai/whisper-tiny, with its own sizes."""
    sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 51865}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    model = WhisperForConditionalGeneration(
        WhisperConfig(encoder_ffn_dim=1536, decoder_ffn_dim=1536, **sizes, **heads)
    )
    model.freeze_encoder()
    return model


def sounds(count: int) -> Rows:
    return [{"input_features": torch.randn(80, 3000), "labels": torch.randint(0, 50000, (40,))} for _ in range(count)]


def vit_small() -> nn.Module:
    """As ViT-S/16; the head alone is trained."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    model = ViTForImageClassification(ViTConfig(num_labels=10, **sizes))
    model.vit.requires_grad_(False)
    return model


def images(count: int) -> Rows:
    return [{"pixel_values": torch.randn(3, 224, 224), "labels": i % 10} for i in range(count)]


def photos(count: int) -> datasets.Dataset:
    """JPEG files of 500 x 375 pixels."""
    files = []
    for _ in range(count):
        coarse = Image.fromarray(torch.randint(0, 256, (24, 32, 3), dtype=torch.uint8).numpy())
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG")
        files.append({"bytes": file.getvalue(), "path": None})
    rows = {"image": files, "label": [i % 10 for i in range(count)]}
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


def crop(image: Image.Image, number: int) -> Image.Image:
    draw = random.Random(number)
    share = draw.uniform(0.5, 1)
    width, height = (round(share * side) for side in image.size)
    left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
    part = image.crop((left, top, left + width, top + height))
    return ImageOps.mirror(part) if draw.random() < 0.5 else part


def crops(count: int) -> datasets.Dataset:
    """Rows of docs/recipes/imagenet.md: each photo comes `NUM_CROPS` times, in a crop of the row's own."""
    processor, images = ViTImageProcessorPil(), photos(count // NUM_CROPS)

    def to_pixels(rows: dict[str, Any]) -> dict[str, Any]:
        found = [crop(image, number) for image, number in zip(rows["image"], rows["number"], strict=True)]
        return {"pixel_values": processor(found, return_tensors="pt")["pixel_values"], "labels": rows["label"]}

    size = len(images)
    copies = [images.add_column("number", list(range(size * i, size * (i + 1)))) for i in range(NUM_CROPS)]
    return datasets.concatenate_datasets(copies).with_transform(to_pixels)


def smolvlm(num_layers: int = 8, narrower: int = 1) -> SmolVLMForConditionalGeneration:
    """Shapes of SmolVLM-256M: half of the tower at 256 pixels, some layers of language, `narrower` times as narrow."""
    vision = {
        "hidden_size": 768 // narrower, "num_hidden_layers": 6, "num_attention_heads": 12,
        "intermediate_size": 3072 // narrower,
    }  # fmt: skip
    text = {
        "model_type": "llama", "hidden_size": 576 // narrower, "num_hidden_layers": num_layers,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536 // narrower, "vocab_size": 8192,
        "pad_token_id": 2,
    }  # fmt: skip
    config = SmolVLMConfig(
        vision_config={**vision, "image_size": 256, "patch_size": 16}, text_config=text, image_token_id=IMAGE_TOKEN,
        scale_factor=4, pad_token_id=2,
    )  # fmt: skip
    return SmolVLMForConditionalGeneration(config)


def vision_language() -> nn.Module:
    """The same with LoRA on the language model."""
    targets = r".*text_model.*(q_proj|k_proj|v_proj|o_proj)"
    return get_peft_model(smolvlm(), LoraConfig(r=8, target_modules=targets))


def captions(count: int) -> Rows:
    rows = []
    for _ in range(count):
        ids = torch.cat([torch.full((16,), IMAGE_TOKEN), torch.randint(3, 8000, (48,))])
        mask = torch.ones(1, 256, 256, dtype=torch.long)
        one = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.where(ids != IMAGE_TOKEN, -100)}
        rows.append({"pixel_values": torch.randn(1, 3, 256, 256), "pixel_attention_mask": mask, **one})
    return rows


def wav2vec2_base() -> nn.Module:
    """The convolutions of wav2vec2-base below two of its layers, without dropout."""
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0}
    model = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(num_hidden_layers=2, num_labels=10, apply_spec_augment=False, **none)
    )
    model.freeze_feature_encoder()
    return model


def waves(count: int) -> Rows:
    return [{"input_values": torch.randn(48000), "labels": i % 10} for i in range(count)]


class Files(Dataset[dict[str, Any]]):
    """JPEG files of 500 x 375 pixels in a folder, each opened, decoded and brought to size when it is read."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.paths = [f"{self._folder.name}/{number}.jpg" for number in range(count)]
        for path, row in zip(
            self.paths, photos(count).cast_column("image", datasets.Image(decode=False)), strict=True
        ):
            Path(path).write_bytes(row["image"]["bytes"])
        self._processor = ViTImageProcessorPil()
        self._opened = torch.zeros(count, dtype=torch.int64).share_memory_()

    @property
    def num_opened(self) -> int:
        return int(self._opened.sum())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._opened[index] += 1
        with Image.open(self.paths[index]) as image:
            pixels = self._processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": index % 10}


@dataclass(frozen=True)
class Task:
    """A model with a frozen part, its samples, and samples of a batch.

    Args:
        steps: of an epoch.
        later: steps of later epochs.
        workers: that read samples.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[int], Rows | datasets.Dataset | Files]
    part: str
    batch: int
    steps: int = NUM_STEPS
    later: int = NUM_STEPS
    workers: int = 0

    def epochs(self, kind: str) -> int:
        """Epochs of a contender; plain Trainer's steps are all alike."""
        if kind == "Trainer":
            return -(-NUM_EPOCHS * NUM_STEPS // self.steps)
        return 2 + -(-self.later // self.steps)


PROBE = "linear probe on ViT-S/16"
CROPS = f"{PROBE}, four crops of each photo"
LONG, FILES = f"{PROBE}, 40 steps an epoch", f"{PROBE}, JPEG files, 2 workers"
TASKS = {
    PROBE: Task(vit_small, images, "vit", 8, later=MANY_STEPS),
    LONG: Task(vit_small, images, "vit", 8, steps=40, later=MANY_STEPS),
    FILES: Task(vit_small, Files, "vit", 8, later=MANY_STEPS, workers=2),
    CROPS: Task(vit_small, crops, "vit", 8, later=MANY_STEPS),
    "Whisper-tiny, encoder frozen": Task(whisper_tiny, sounds, "model.encoder", 2, later=SOME_STEPS),
    "SmolVLM shapes, LoRA on the language model": Task(
        vision_language, captions, "model.vision_model", 1, later=SOME_STEPS
    ),
    "wav2vec2-base, convolutions frozen": Task(
        wav2vec2_base, waves, "wav2vec2.feature_extractor", 1, later=SOME_STEPS
    ),
}


ROUNDS = {PROBE: 15, FILES: 3}


def for_nothing(model: nn.Module, part: str) -> nn.Module:
    """Let a part give again what it gave for inputs of the same shapes."""
    bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    module = bare.get_submodule(part)
    forward, kept = module.forward, dict[str, Any]()

    def first(*given: Any, **named: Any) -> Any:
        shapes = str([each.shape for each in (*given, *named.values()) if isinstance(each, torch.Tensor)])
        if shapes not in kept:
            kept[shapes] = forward(*given, **named)
        # Models of several modalities write into what they get.
        return type(kept[shapes])(**kept[shapes]) if hasattr(kept[shapes], "to_tuple") else kept[shapes]

    module.forward = first
    return model


def run(name: str, kind: str, folder: str) -> dict[str, Any]:
    """Return the seconds of steps in the first epoch, the second and later ones, losses, and files read.

    The second epoch stores the rows of the first batch, which is watched. Those of a later step are the mean over all
    later epochs, with what is done between them.

    `kept` reads from its first epoch on what `ours` has left in `folder`.
    """
    task = TASKS[name]
    steps = task.steps
    set_seed(0)
    samples = task.samples(steps * task.batch)
    model = task.build()
    given = {"model": for_nothing(model, task.part) if kind == "bound" else model, "train_dataset": samples}
    if kind == "ours":
        shutil.rmtree(folder, ignore_errors=True)
    base = Trainer if kind in ("Trainer", "bound") else PipeTransformerTrainer
    options = {
        "num_train_epochs": task.epochs(kind), "learning_rate": 1e-5, "lr_scheduler_type": "constant",
        "logging_strategy": "steps", "logging_steps": 1, "remove_unused_columns": False,
        "dataloader_num_workers": task.workers,
    }  # fmt: skip
    if base is PipeTransformerTrainer:
        options |= {"pipeline_parallel_size": "1", "activation_cache_dir": folder, "activation_cache_keep": True}
    trainer = make_trainer(given, task.batch, base, **options)
    clock, opened = StepClock(), Opened(samples)
    trainer.add_callback(clock)
    trainer.add_callback(opened)
    begin = time.perf_counter()
    trainer.train()
    later = clock.seconds[-NUM_STEPS:] if kind == "Trainer" else clock.seconds[2 * steps - 1 :]
    usual = statistics.median(later)
    seconds = {
        "start": clock.ends[0] - begin,
        "try": clock.seconds[0],
        "first": statistics.median(clock.seconds[: steps - 1]),
        "later": statistics.fmean(later),
    }
    if kind != "Trainer":
        seconds["second"] = statistics.fmean(clock.seconds[steps - 1 : 2 * steps - 1])
        # The first step of an epoch comes after what is done between two, such as the checks of a part.
        seconds["turn"] = clock.seconds[steps - 1] - usual
        seconds["turns"] = statistics.fmean(later[::steps]) - usual
    return {"seconds": seconds, "opened": opened.by_epoch, "losses": losses_of(trainer)}


class Opened(TrainerCallback):
    """How many files each epoch has opened."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self.by_epoch: list[int] = []

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if isinstance(self._samples, Files):
            self.by_epoch.append(self._samples.num_opened - sum(self.by_epoch))


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Let the contenders take turns."""
    without_launch_variables()
    # The first round goes backwards: `kept` reads what `ours` has left.
    kinds = ("Trainer", "kept", "ours", "bound")
    with tempfile.TemporaryDirectory() as folder:
        found = alternate({kind: partial(run, name, kind, f"{folder}/store") for kind in kinds}, rounds)
    seconds = {
        kind: {part: [each["seconds"][part] for each in runs] for part in runs[0]["seconds"]}
        for kind, runs in found.items()
    }
    trainers = seconds["Trainer"]["later"]
    bound, kept = seconds["bound"], seconds["kept"]
    task = TASKS[name]
    opened = found["ours"][0]["opened"]
    more = {"files opened by epochs 1 to 4": opened[:4]} if opened else {}
    return {
        "steps of an epoch": task.steps,
        "later steps": (task.epochs("ours") - 2) * task.steps,
        "later epochs, times as fast as Trainer": summary(ratios(trainers, seconds["ours"]["later"])),
        "the bound, times as fast as Trainer": summary(ratios(trainers, bound["later"])),
        "the second epoch, times as fast as Trainer": summary(ratios(trainers, seconds["ours"]["second"])),
        "the second epoch of the bound, times as fast as Trainer": summary(ratios(trainers, bound["second"])),
        "later epochs over the bound": summary(ratios(bound["later"], seconds["ours"]["later"])),
        "time of the first epoch over Trainer's": summary(
            ratios(seconds["ours"]["first"], seconds["Trainer"]["first"])
        ),
        "first step over Trainer's": summary(ratios(seconds["ours"]["start"], seconds["Trainer"]["start"])),
        "second step, in which parts are tried, over Trainer's": summary(
            ratios(seconds["ours"]["try"], seconds["Trainer"]["try"])
        ),
        "first epoch over a kept store, over a later one": summary(ratios(kept["first"], kept["later"])),
        "seconds of a step of Trainer": summary(trainers),
        "seconds between two epochs": summary(seconds["ours"]["turn"]),
        "seconds between two later epochs": summary(seconds["ours"]["turns"]),
        **more,
        "largest relative difference of the losses": max(
            largest_difference(ours["losses"][: len(plain["losses"])], plain["losses"])
            for ours, plain in zip(found["ours"], found["Trainer"], strict=True)
        ),
    }


def run_on_stages(kind: str) -> dict[str, Any]:
    """Return the seconds of a later step on two stages, and the losses: the tower `computed`, `stored`, or `free`."""
    set_seed(0)
    model, samples = vision_language(), captions(2 * NUM_STEPS)
    given = {"model": for_nothing(model, "model.vision_model") if kind == "free" else model, "train_dataset": samples}
    options = {
        "num_train_epochs": 2 + NUM_EPOCHS, "learning_rate": 1e-5, "lr_scheduler_type": "constant",
        "logging_strategy": "steps", "logging_steps": 1, "remove_unused_columns": False, "pipeline_parallel_size": 2,
        "pipeline_parallel_num_microbatches": 2, "activation_cache": "on" if kind == "stored" else "off",
    }  # fmt: skip
    trainer, clock = make_trainer(given, 2, **options), StepClock()
    trainer.add_callback(clock)
    trainer.train()
    later = clock.seconds[2 * NUM_STEPS - 1 :]
    return {"seconds": statistics.median(later), "losses": losses_of(trainer)}


def compare_on_stages(rounds: int) -> dict[str, Any]:
    """Let the contenders take turns."""
    found = alternate({kind: partial(run_on_stages, kind) for kind in ("computed", "stored", "free")}, rounds)
    seconds = {kind: [each["seconds"] for each in runs] for kind, runs in found.items()}
    pairs = zip(found["stored"], found["computed"], strict=True)
    return {
        "later epochs, times as fast as with the tower computed": summary(
            ratios(seconds["computed"], seconds["stored"])
        ),
        "the bound, times as fast": summary(ratios(seconds["computed"], seconds["free"])),
        "later epochs over the bound": summary(ratios(seconds["free"], seconds["stored"])),
        "seconds of a step with the tower computed": summary(seconds["computed"]),
        "largest relative difference of the losses": max(
            largest_difference(stored["losses"], computed["losses"]) for stored, computed in pairs
        ),
    }


@experiment("computed_on_stages.json", minutes=10, quick_minutes=3)
def computed_on_stages(settings: Settings) -> dict[str, Any]:
    """SmolVLM shapes on two stages: later epochs with the tower stored, beside the tower computed, and for nothing."""
    found = launch(compare_on_stages, 2, settings.of(5, 1))
    report("SmolVLM shapes on two stages", found)
    return found


def measured(settings: Settings, name: str) -> dict[str, Any]:
    found = launch(compare, 1, name, settings.of(ROUNDS.get(name, 5), 1))
    report(name, found)
    return {name: found}


for each_section, (each_name, each_minutes) in {
    "probe": (PROBE, 12),
    "long": (LONG, 7),
    "files": (FILES, 5),
    "crops": (CROPS, 5),
    "whisper": ("Whisper-tiny, encoder frozen", 10),
    "vision_language": ("SmolVLM shapes, LoRA on the language model", 10),
    "convolutions": ("wav2vec2-base, convolutions frozen", 6),
}.items():
    measure = partial(measured, name=each_name)
    measure.__name__ = f"computed_{each_section}"  # type: ignore[attr-defined]
    measure.__doc__ = f"{each_name}: later epochs beside plain Trainer, and beside the frozen part for nothing."
    register = experiment(
        "computed_once.json", section=each_section, minutes=each_minutes, quick_minutes=2, processes=1
    )
    register(measure)
