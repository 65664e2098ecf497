"""One run of the study: train, time and score.

Time is processor time of everything that a user waits for in training: the model is loaded, the trainer starts,
measures what it decides by, trains, stores and reads. Evaluation is apart, and so is reading and tokenizing the data,
which is the same for all.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import PrinterCallback, TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events

from ..study import Record
from .contenders import STORED, Contender, TaskSettings
from .tasks import Task, draw


WARM_UP, WARM_UP_SEED = Contender(1, {**STORED, "freeze_at": "0:1"}), 100
"""A short run that does not count; its seed is none of the study's."""
LOGGED_STEPS = 10
"""Each of a run's losses is a mean over so many optimizer steps."""
GAUGE_SECONDS = 0.018
"""Of the fixed piece of work: what times are given for, near that of one idle core where the figures were taken."""
STEPS_APART = 3
LAYER = re.compile(r"(?:.*\.)?layers?\.(\d+)\..*")
"""Name of a module or parameter of a transformer layer."""


def run(task: Task, settings: TaskSettings, contender: Contender, seed: int, **changes: Any) -> Record:
    """Train and evaluate once; `changes` are options of the trainer."""
    training = draw(task.pool, seed, settings.num_training)
    with tempfile.TemporaryDirectory(prefix="front-") as folder:
        clock = SteadyClock()
        set_seed(seed)
        model = prepare_model(task.model(), contender, settings.num_layers)
        trainer = PipeTransformerTrainer(
            model=model, args=arguments(settings, contender, seed, folder, **task.arguments, **changes),
            train_dataset=training, **task.given,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        output = trainer.train()
        clock.lap()
        path = Path(folder) / EVENTS_FILE
        # One process that freezes nothing is Trainer itself: it writes no events.
        events = read_events(str(path)) if path.exists() else []
        start = time.process_time()
        trainer.model.eval()
        with torch.inference_mode():
            scores = task.score(trainer.model)
        gauged = min(clock.gauged), statistics.median(clock.gauged), max(clock.gauged)
        return {
            "seconds": round(clock.seconds, 2), "processor_seconds": round(clock.processor_seconds, 2),
            "gauge_seconds": [round(value, 4) for value in gauged],
            "scores": {name: round(score, 4) for name, score in scores.items()},
            "training_loss": round(output.training_loss, 5), "num_steps": output.global_step,
            "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
            "evaluation_seconds": round(time.process_time() - start, 2), **course(events),
        }  # fmt: skip


def arguments(
    settings: TaskSettings, contender: Contender, seed: int, folder: str, **changes: Any
) -> PipeTransformerArguments:
    """Options of the run."""
    options: dict[str, Any] = {
        "output_dir": folder, "activation_cache_dir": folder, "seed": seed, "pipeline_parallel_size": "1",
        "per_device_train_batch_size": settings.batch, "num_train_epochs": contender.num_epochs,
        "learning_rate": contender.rate(settings), "lr_scheduler_type": "linear", "warmup_steps": 0.1,
        "weight_decay": 0.01, "logging_steps": LOGGED_STEPS, "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none",
    }  # fmt: skip
    return PipeTransformerArguments(**options | contender.options | changes)


def prepare_model(model: Any, contender: Contender, num_layers: int) -> Any:
    """Freeze what the contender does not train, or add its LoRA."""
    if contender.num_top_layers is not None:
        lowest = num_layers - contender.num_top_layers
        for name, parameter in model.named_parameters():
            layer = LAYER.fullmatch(name)
            is_below = int(layer[1]) < lowest if layer else "embeddings." in name
            parameter.requires_grad_(not is_below)
    if contender.lora is None:
        return model
    modules = model.named_modules()
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and LAYER.fullmatch(f"{name}.")]
    parts = [(name, part) for name, part in model.named_children() if name != model.base_model_prefix]
    heads = [name for name, part in parts if any(True for _ in part.parameters())]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=linear, modules_to_save=heads, **contender.lora))


def course(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return which step froze how many layers, how often the cache was read, and why it was not."""
    frozen = [(e["step"], e["to"]["num_frozen_layers"]) for e in events if e["event"] == "transition"]
    started = [(e["step"], e["layout"]["num_frozen_layers"]) for e in events if e["event"] == "run"]
    cache = [e for e in events if e["event"] == "cache"]
    return {
        "frozen": sorted(started + frozen), "hits": sum(e["hits"] for e in cache if e["what"] == "epoch"),
        "cache_off": [e["reason"] for e in cache if e["what"] == "off"],
    }  # fmt: skip


class SteadyClock(TrainerCallback):
    """Adds up processor seconds from its making on, at the pace of a machine that does nothing else.

    What else runs slows each core, by half or more where cores share caches and memory: processor time then says as
    much about the neighbours as about the work. So a fixed piece of work is done every few steps, and each stretch of
    time counts by how long that piece took around it.
    """

    def __init__(self) -> None:
        self.processor_seconds = 0.0
        """As the system counts them, the fixed pieces of work apart."""
        self.seconds = 0.0
        """As they would be if the fixed piece of work took `GAUGE_SECONDS` all the time."""
        self.gauged: list[float] = [gauge()]
        self._last = time.process_time()

    def lap(self) -> None:
        """Take what has passed into account, and gauge again."""
        passed = time.process_time() - self._last
        self.gauged.append(gauge())
        self.processor_seconds += passed
        self.seconds += passed * GAUGE_SECONDS * 2 / (self.gauged[-2] + self.gauged[-1])
        self._last = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See `TrainerCallback`."""
        if state.global_step % STEPS_APART == 0:
            self.lap()


def gauge() -> float:
    """Processor seconds of a fixed piece of work, as a transformer has it: products, and passes over memory."""
    one, other, weights = torch.ones(1024, 384), torch.ones(384, 1536), torch.ones(4_000_000)
    start = time.thread_time()  # What other threads of this process do meanwhile is not part of it.
    for _ in range(2):
        torch.nn.functional.gelu(one @ other)
        weights.mul_(0.5).add_(weights, alpha=0.5)
    return time.thread_time() - start
