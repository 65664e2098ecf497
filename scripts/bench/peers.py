"""Beside what a user would pick instead: step time and memory of ways to train one model on two devices.

    DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps --target /tmp/peers deepspeed torchgpipe \
        hjson py-cpuinfo msgpack einops ninja
    PEERS_PACKAGES=/tmp/peers python -m scripts.bench 'peers-*'

Three models are trained at equal batch by this package, by Trainer with DDP, by FSDP2, by the schedules of
`torch.distributed.pipelining`, by DeepSpeed's `PipelineModule` and by a naive split; `torchgpipe` and our `GPipe` cut
the model in one process. All begin with the same weights and see the same rows, with AdamW, clipping and a constant
learning rate; losses of all that claim the same updates are compared. DeepSpeed and torchgpipe are no dependencies:
without the folder above their rows say that they are missing.

Contenders take turns, each in new processes. A step is the mean of those after the first, of the slower process.
Memory is the peak of a process's anonymous memory after the first step, beyond what it had before it loaded the model.
The others' pipelines are cut by hand into stages of equal work. Rows have one length, because
`torch.distributed.pipelining` can have no other.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, Trainer

from hf_pipetransformer import PipeTransformerTrainer

from .measure import (
    KEEPS_FREED,
    RETURNS_FREED,
    PeakMemory,
    Settings,
    alternate,
    experiment,
    largest_difference,
    launch_all,
    ratios,
    report,
    summary,
)
from .models import cifar10_images, passages, smollm2, sst2
from .training import StepClock, losses_of, make_trainer


NUM_STEPS, LEARNING_RATE = 3, 5e-5
NAIVE = "naive split"
CHUNKS = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip
"""Stages of a process, by schedule of `torch.distributed.pipelining`."""
EXACT = 1e-5
"""Largest relative difference of losses between contenders with the same updates."""
MEMORY = "peak MiB of each process"
PRELOADED = ("hf_pipetransformer.trainer.mixin", "torch._dynamo", "torch.distributed.fsdp", "peft")
"""Modules that a process would import while it trains."""


# ---- models ----


def sentences(settings: Settings) -> tuple[Any, Tensor, Tensor]:
    """MiniLM, and beginnings of sentences that have 32 tokens or more."""
    model, training = sst2(settings.data, 8000)
    rows = [row for row in training if len(row["input_ids"]) >= 32]
    labels = torch.tensor([row["label"] for row in rows])
    return model, torch.tensor([row["input_ids"][:32] for row in rows]), labels


def images(settings: Settings) -> tuple[Any, Tensor, Tensor]:
    """The small ViT, and images."""
    model, training, _ = cifar10_images(settings.data, settings.models, 256, 1)
    rows = training[:]
    return model, torch.stack(rows["pixel_values"]), torch.tensor(rows["labels"])


def blocks(settings: Settings) -> tuple[Any, Tensor, Tensor]:
    """SmolLM2, and blocks of 24 tokens of passages."""
    model, tokenizer = smollm2()
    words = tokenizer("\n".join(passages(settings.data / "squad_v1_train_partial.parquet", 50)["text"]))["input_ids"]
    rows = torch.tensor(words[: len(words) // 24 * 24]).view(-1, 24)
    return model, rows, rows.clone()


@dataclass(frozen=True)
class Subject:
    """A model, how it and its inputs and labels are made, and how it is trained."""

    title: str
    make: Callable[[Settings], tuple[Any, Tensor, Tensor]]
    batch: int
    num_microbatches: int


SUBJECTS = {
    "minilm": Subject("MiniLM (BERT 6 x 384), 32 sentences of 32 tokens", sentences, 32, 8),
    "vit": Subject("ViT 12 x 192, 24 images of 65 tokens", images, 24, 8),
    "smollm2": Subject("SmolLM2-135M with LoRA, 8 blocks of 24 tokens", blocks, 8, 4),
}


def chain_of(model: Any) -> list[nn.Module]:
    """Embeddings, layers and head, each a function of one tensor."""
    if hasattr(model, "peft_config"):
        causal = model.get_base_model()
        base, rotary = causal.model, causal.model.rotary_emb

        def add_positions(_layer: nn.Module, given: tuple[Tensor], _named: Any) -> Any:
            return given, {"position_embeddings": rotary(given[0], torch.arange(given[0].shape[1])[None])}

        for layer in base.layers:
            layer.register_forward_pre_hook(add_positions, with_kwargs=True)
        return [base.embed_tokens, *base.layers, nn.Sequential(base.norm, causal.lm_head)]
    base = model.base_model
    if hasattr(base, "layernorm"):
        base.layernorm.register_forward_hook(lambda _norm, _given, hidden: hidden[:, 0])
        return [base.embeddings, *base.layers, nn.Sequential(base.layernorm, model.classifier)]
    return [base.embeddings, *base.encoder.layer, nn.Sequential(base.pooler, model.classifier)]


def stages_of(model: Any, num_stages: int) -> list[nn.Sequential]:
    """The model in stages of about the same work: weights that are multiplied, not those that are looked up."""
    chain = chain_of(model)
    works = [0, *(sum(p.numel() for p in block.parameters()) for block in chain[1:])]
    shares = [sum(works) * stage / num_stages for stage in range(1, num_stages)]
    ends = [min(range(1, len(works)), key=lambda end: abs(sum(works[:end]) - share)) for share in shares]
    return [nn.Sequential(*chain[start:end]) for start, end in pairwise([0, *ends, len(chain)])]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of classes, or of the next tokens."""
    if logits.ndim == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels)


# ---- one process of a contender ----


class Run(StepClock):
    """A contender in one process: what it trains, from a folder, when its steps end, and its memory from then on."""

    def __init__(self, contender: Contender, subject: Subject, folder: str, memory: PeakMemory | None) -> None:
        super().__init__(memory)
        self.contender, self.subject, self.folder = contender, subject, folder
        self.rows = load_file(f"{folder}/rows.safetensors")

    def load(self) -> Any:
        """Load the model into memory of this process's own, as onto a device."""
        [kind] = AutoConfig.from_pretrained(f"{self.folder}/model").architectures
        model = getattr(transformers, kind).from_pretrained(f"{self.folder}/model")
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        if not kind.endswith("CausalLM"):
            return model
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def each_step(self, step: Callable[[Tensor, Tensor], Tensor | float], is_shared: bool = False) -> list[float]:
        """Call a step with its inputs and labels, and return the losses, or the sums of what the processes have."""
        batches = (self.rows[name].split(self.subject.batch)[:NUM_STEPS] for name in ("inputs", "labels"))
        found = []
        for inputs, labels in zip(*batches, strict=True):
            found.append(torch.as_tensor(step(inputs, labels)).detach().reshape(()))
            self.on_step_end()
        losses = torch.stack(found)
        if is_shared:
            dist.all_reduce(losses)
        return losses.tolist()  # type: ignore[no-any-return]


class Update:
    """Trainer's optimizer and clipping for a plain loop, whose gradients may lie on several processes."""

    def __init__(self, modules: list[nn.Module], is_split: bool = False) -> None:
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.is_split = is_split

    def step(self) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.is_split:
            dist.all_reduce(square := norm**2)
            norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters, 1.0, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def with_trainer(run: Run) -> list[float]:
    """Plain Trainer, or with options this package."""
    subject, contender, options = run.subject, run.contender, dict(run.contender.options)
    number = options.pop("num_batches", contender.num_steps) * subject.batch
    model = run.load()
    rows = [{model.main_input_name: run.rows["inputs"][i], "labels": run.rows["labels"][i]} for i in range(number)]
    given = {"model": model, "train_dataset": rows, "callbacks": [run]}
    del model
    if options.get("pipeline_parallel_size") == 2:
        options["pipeline_parallel_num_microbatches"] = subject.num_microbatches
    if run.memory is not None and contender.updates == "exact":
        options |= {"logging_strategy": "steps", "logging_steps": 1}
    trainer = make_trainer(
        given, subject.batch, PipeTransformerTrainer if contender.options else Trainer, max_steps=contender.num_steps,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", train_sampling_strategy="sequential",
        log_level="error", **options,
    )  # fmt: skip
    trainer.train()
    return losses_of(trainer)


def with_fsdp(run: Run) -> list[float]:
    """FSDP2, each layer sharded over both processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh, rank = run.load(), init_device_mesh("cpu", (2,)), dist.get_rank()
    layers, name = next(each for each in model.modules() if isinstance(each, nn.ModuleList)), model.main_input_name
    # The model last: what its layers have not taken is sharded with it.
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    update = Update([model])

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(**{name: inputs.chunk(2)[rank], "labels": labels.chunk(2)[rank]}).loss
        loss.backward()
        update.step()
        return loss / 2

    return run.each_step(step, is_shared=True)


def with_torch(run: Run) -> list[float]:
    """A schedule of `torch.distributed.pipelining`."""
    from torch.distributed.pipelining import PipelineStage, schedules

    name, rank = run.contender.name.rpartition(" ")[2], dist.get_rank()
    count, last = 2 * CHUNKS[name], 2 * CHUNKS[name] - 1
    numbers = [rank, last - rank if name in ("ZBVZeroBubble", "DualPipeV") else rank + 2][: CHUNKS[name]]
    whole = stages_of(run.load(), count)
    stages = [PipelineStage(whole[number], number, count, torch.device("cpu")) for number in numbers]
    # Memory is measured, in which the other process's stages must not count.
    del whole
    gc.collect()
    schedule = getattr(schedules, f"Schedule{name}")(
        stages if CHUNKS[name] > 1 else stages[0], run.subject.num_microbatches, loss_fn=loss_of
    )
    update = Update([stage.submod for stage in stages], is_split=True)

    def step(inputs: Tensor, labels: Tensor) -> Tensor | float:
        losses: list[Tensor] = []
        given = {"target": labels, "losses": losses} if last in numbers else {}
        schedule.step(*([inputs] if 0 in numbers else []), **given)
        update.step()
        return torch.stack(losses).mean() if losses else 0.0

    return run.each_step(step, is_shared=True)


class OwnStage(nn.Module):
    """A stage that DeepSpeed makes only where it belongs."""

    def __init__(self, run: Run, number: int) -> None:
        super().__init__()
        self.stage = stages_of(run.load(), 2)[number]

    def forward(self, given: Tensor) -> Tensor:
        return self.stage(given)  # type: ignore[no-any-return]


def with_deepspeed(run: Run) -> list[float]:
    """DeepSpeed's 1F1B."""
    deepspeed, pipe = (importlib.import_module(name) for name in ("deepspeed", "deepspeed.pipe"))
    # It would compile collectives over shared memory, which a pipeline does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    count = run.subject.num_microbatches
    config = {
        "train_micro_batch_size_per_gpu": run.subject.batch // count, "gradient_accumulation_steps": count,
        "gradient_clipping": 1.0, "steps_per_print": 10**9,
    }  # fmt: skip
    stages = [pipe.LayerSpec(OwnStage, run, number) for number in range(2)]
    module = pipe.PipelineModule(stages, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, optimizer=Update([module]).optimizer, config=config)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        return engine.train_batch(iter(zip(inputs.chunk(count), labels.chunk(count), strict=True)))

    return run.each_step(step)


def with_gpipe(run: Run) -> list[float]:
    """`GPipe` of torchgpipe or of this package; both devices are this process."""
    stages = nn.Sequential(*stages_of(run.load(), 2))
    model = importlib.import_module(run.contender.library).GPipe(
        stages, [1, 1], devices=["cpu", "cpu"], chunks=run.subject.num_microbatches, checkpoint="never"
    )
    update = Update([stages])

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model(inputs), labels)
        loss.backward()
        update.step()
        return loss

    return run.each_step(step)


@dataclass(frozen=True)
class Contender:
    """A way to train: a function that trains in this process, one of several, and returns the losses.

    Args:
        options: this package's arguments; plain Trainer takes none.
        updates: `exact`, or how they differ from plain Trainer's.
        num_skipped: steps at the beginning that are not timed.
        library: imported before memory is measured; it may lie in `PEERS_PACKAGES`.
    """

    name: str
    train: Callable[[Run], list[float]]
    processes: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    updates: str = "exact"
    num_steps: int = NUM_STEPS
    num_skipped: int = 1
    library: str = ""


def contenders() -> dict[str, Contender]:
    """All; the naive split is plain Trainer in one process, which computes what two devices in turns would."""
    one, two = (
        {"pipeline_parallel_size": size, "pipeline_gather_at_end": "never", "activation_cache_dir": "cache"}
        for size in (1, 2)
    )
    stored = one | {"freeze_policy": "fixed", "freeze_at": "0:1/2", "activation_cache": "on", "num_batches": 2}
    found = [
        Contender(NAIVE, with_trainer, 1),
        *(
            Contender(f"ours, K=2, {name}", with_trainer, 2, two | {"pipeline_schedule": name})
            for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
        ),
        Contender("ours, K=1 x R=2", with_trainer, 2, one),
        Contender(
            "ours, K=2, async_1f1b", with_trainer, 2, two | {"pipeline_schedule": "async_1f1b"}, "later weights", 8, 2
        ),
        # Two batches, four times: all rows are stored when the time is taken.
        Contender("ours, half frozen and stored", with_trainer, 2, stored, "of the upper half", 8, 4),
        Contender("Trainer, DDP", with_trainer),
        Contender("FSDP2", with_fsdp),
        *(Contender(f"torch.distributed.pipelining, {name}", with_torch) for name in CHUNKS),
        Contender("DeepSpeed, PipelineModule", with_deepspeed, library="deepspeed.pipe"),
        Contender("torchgpipe", with_gpipe, 1, library="torchgpipe"),
        Contender("ours, GPipe", with_gpipe, 1, library="hf_pipetransformer.pipe"),
    ]
    return {each.name: each for each in found}


# ---- launches ----


def work(name: str, model: str, folder: str, is_memory: bool) -> dict[str, Any]:
    """One process of a contender."""
    contender = contenders()[name]
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.append(os.environ.get("PEERS_PACKAGES", ""))
    for module in (*PRELOADED, contender.library or "torch.distributed.pipelining"):
        importlib.import_module(module)
    memory = PeakMemory("start") if is_memory else None
    run = Run(contender, SUBJECTS[model], folder, memory)
    found: dict[str, Any] = {"losses": contender.train(run)}
    ends = run.ends[contender.num_skipped - 1 :]
    found["seconds"] = (ends[-1] - ends[0]) / (len(ends) - 1)
    if memory is not None:
        memory.end()
        found["bytes"] = memory.peaks["training"]
    return found


def turn(name: str, model: str, folder: str, is_memory: bool) -> list[dict[str, Any]]:
    """Run a contender once; what its processes found, or the first error."""
    environment = RETURNS_FREED if is_memory else KEEPS_FREED
    try:
        number = contenders()[name].processes
        found = launch_all(work, number, name, model, folder, is_memory, minutes=3, environment=environment)
    except Exception as error:
        found = [{"error": str(error).strip().splitlines()[-1]}]
    report(f"{model}, {name}", found)
    return found


def row_of(contender: Contender, ranks: list[dict[str, Any]], losses: list[float]) -> dict[str, Any]:
    """Memory of a contender, and how its losses differ; or why it does not run.

    Raises:
        RuntimeError: Trainer or this package fails, or computes other losses.
    """
    row: dict[str, Any] = {"processes": contender.processes, "updates": contender.updates}
    reason = ranks[0].get("error", "")
    if not reason:
        row[MEMORY] = [round(each["bytes"] / 2**20) for each in ranks]
        if contender.updates == "exact":
            difference = row["largest relative difference of losses"] = largest_difference(ranks[0]["losses"], losses)
            reason = "" if difference <= EXACT else f"other losses, by {difference:.1e}"
    if reason and contender.name.startswith(("ours", "Trainer", NAIVE)):
        raise RuntimeError(f"{contender.name}: {reason}")
    return {**row, "does not run": reason} if reason else row


def winners(rows: dict[str, Any]) -> dict[str, str]:
    """The exact contenders that are the fastest, have the smallest largest process, or the least product of both."""
    exact = [name for name, row in rows.items() if row["updates"] == "exact" and "does not run" not in row]
    seconds = {name: rows[name]["seconds of a step"]["median"] for name in exact}
    # A process that stands for two devices holds what both do.
    memory = {name: max(rows[name][MEMORY]) for name in exact if rows[name]["processes"] == 2}
    product = {name: size * seconds[name] for name, size in memory.items()}
    kinds = {"fastest": seconds, "least memory": memory, "least product": product}
    return {kind: min(values, key=values.__getitem__) for kind, values in kinds.items()}


def beside(model: str, settings: Settings) -> dict[str, Any]:
    """Memory and losses of every contender once, then the time of those that run; quick of six."""
    subject, known = SUBJECTS[model], contenders()
    known = settings.of(known, {name: known[name] for name in list(known)[:: len(known) // 5]})
    whole, inputs, labels = subject.make(settings)
    number = subject.batch * max(each.num_steps for each in known.values())
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        whole.float().save_pretrained(f"{folder}/model")
        save_file({"inputs": inputs[:number], "labels": labels[:number]}, f"{folder}/rows.safetensors")
        first = {name: turn(name, model, folder, True) for name in known}
        losses = first[NAIVE][0].get("losses", [])
        rows = {name: row_of(known[name], found, losses) for name, found in first.items()}
        running = [name for name, row in rows.items() if "does not run" not in row]
        timed = alternate({name: partial(turn, name, model, folder, False) for name in running}, settings.of(5, 1))
    for name, found in timed.items():
        if errors := [ranks[0]["error"] for ranks in found if "error" in ranks[0]]:
            raise RuntimeError(f"{name} ran once, then not: {errors[0]}")
    seconds = {name: [max(rank["seconds"] for rank in ranks) for ranks in found] for name, found in timed.items()}
    for name in running:
        rows[name]["seconds of a step"] = summary(seconds[name])
        rows[name]["of the naive split's"] = summary(ratios(seconds[name], seconds[NAIVE]))
    others = distributions(path=[os.environ.get("PEERS_PACKAGES", "")])
    return {
        "model": subject.title, "steps": NUM_STEPS - 1, "winners": winners(rows), "contenders": rows,
        "packages": {each.name: each.version for each in others if each.name in ("deepspeed", "torchgpipe")},
    }  # fmt: skip


for each_model, each_subject in SUBJECTS.items():
    measure = partial(beside, each_model)
    measure.__name__ = f"peers_{each_model}"  # type: ignore[attr-defined]
    measure.__doc__ = f"Step time and memory beside what a user would pick instead: {each_subject.title}."
    experiment("peers.json", section=each_model, minutes=25, quick_minutes=4)(measure)
