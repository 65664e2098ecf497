"""What asynchronous 1F1B costs in accuracy: six kinds of weights, two tasks, two optimizers, several seeds.

    python -m scripts.bench async-study
    python -m scripts.bench.async_study --seeds 5 6 7 --tasks sst2   # more seeds, or several processes side by side

Each cell fine-tunes a pretrained model for a short while in one process, which plays all stages of the pipeline
(`async_stages.py`), and is evaluated on sentences or images that no run trains on. Finished cells are lines of files
in `benchmarks/async_study`: either command goes on where it stopped, and the first one makes the table of all.

Settings: learning rate linear after a warm-up of a tenth of the steps, no clipping, no dropout, bf16 autocast; the
word embeddings of MiniLM are not trained (half of its weights, which a short run hardly moves). One drain, at the end.
`double_buffer` with four stages cuts each mini-batch into four micro-batches (it needs three), the others train with
one micro-batch a step. What SpecTrain and XPipe do with AdamW is this package's generalisation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES, ForwardPass, PipeOptim, find_weights

from .async_stages import Batch, MicroBatch, SimulatedRank, cut, run_window
from .measure import REPOSITORY, Settings, experiment, interval_95, launch
from .models import NO_DROPOUT, cifar10_images, minilm_folder


FOLDER = REPOSITORY / "benchmarks" / "async_study"
SEEDS = (0, 1, 2, 3, 4)
NUM_HELD_OUT = 1_000
SYNCHRONOUS = "synchronous"
DRAIN_INTERVAL, ERRORS_EVERY = 8, 20
GROUPED_BY = ("task", "optimizer", "num_stages", "kind", "variant")

# Of those tried on synchronous runs of another seed. SST-2 with momentum at 1e-2 gives synchronous runs two
# points more, and is the highest rate that they bear: every asynchronous kind fails there with four stages.
RATES = {
    ("sst2", "adamw"): 1e-4, ("sst2", "momentum"): 5e-3, ("cifar10", "adamw"): 3e-4, ("cifar10", "momentum"): 2e-3,
}  # fmt: skip
NUM_STEPS = {"sst2": 160, "cifar10": 160}
BATCHES = {"sst2": 16, "cifar10": 8}


# Eager attention is the faster one here: short sequences on a CPU.
MODEL_OPTIONS = {**NO_DROPOUT, "attn_implementation": "eager"}


class ConstantLag(PipeOptim):
    """PipeOptim as the paper has it: K - 1 - stage updates ahead, also where fewer will come."""

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.num_updates + forward.num_stages - 1 - forward.stage


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        kind: of weights, or `synchronous`.
        variant: of `pipeoptim`: empty, or what of it is changed.
    """

    task: str
    optimizer: str
    num_stages: int
    kind: str
    variant: str
    seed: int


VARIANTS = ("drained", "drained, constant s", "current learning rate")


def cells(seeds: Sequence[int], tasks: Sequence[str]) -> Iterator[Cell]:
    """All of the study, seed by seed."""
    for seed, (task, optimizer) in product(seeds, RATES):
        if task in tasks:
            yield Cell(task, optimizer, 1, SYNCHRONOUS, "", seed)
            yield from (Cell(task, optimizer, k, kind, "", seed) for k, kind in product((4, 2), WEIGHTS_NAMES))
            yield from (Cell(task, optimizer, 4, "pipeoptim", variant, seed) for variant in VARIANTS)


class Sst2:
    """MiniLM on SST-2."""

    num_layers = 6

    def __init__(self, data: Path, models: Path) -> None:
        from datasets import load_dataset
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = minilm_folder()
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **MODEL_OPTIONS)
        self._model.bert.embeddings.word_embeddings.requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = load_dataset("parquet", data_files={n: str(data / f"sst2_{n}.parquet") for n in ("train", "dev")})
        order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = rows["train"].select([*order[: NUM_HELD_OUT - len(rows["dev"])], *order[2_000:10_000]])
        sentences = [*rows["dev"]["sentence"], *chosen["sentence"]]
        self.labels = torch.tensor([*rows["dev"]["label"], *chosen["label"]])
        self.tokens = [torch.tensor(ids) for ids in tokenizer(sentences, truncation=True, max_length=128)["input_ids"]]
        self.num_training = len(self.tokens) - NUM_HELD_OUT

    def model(self) -> Any:
        """With a head drawn anew."""
        model = deepcopy(self._model)
        torch.nn.init.normal_(model.classifier.weight, std=model.config.initializer_range)
        return model

    def batch(self, indices: list[int]) -> Batch:
        """Of any samples; those held out come first."""
        tokens = [self.tokens[index] for index in indices]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths = torch.tensor([len(ids) for ids in tokens])
        mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
        return {"input_ids": padded, "attention_mask": mask, "labels": self.labels[indices]}

    def length(self, index: int) -> int:
        return len(self.tokens[index])


class Cifar10:
    """The small ViT on CIFAR-10."""

    num_layers = 12

    def __init__(self, data: Path, models: Path) -> None:
        self.models = models
        _, training, test = cifar10_images(data, models, 4_000, NUM_HELD_OUT)
        rows = [*test, *training]
        self.pixels = torch.stack([row["pixel_values"] for row in rows])
        self.labels = torch.tensor([row["labels"] for row in rows])
        self.num_training = len(training)

    def model(self) -> Any:
        """With a head drawn anew."""
        from transformers import AutoModelForImageClassification

        return AutoModelForImageClassification.from_pretrained(
            self.models / "vit-12x192-patch4-32px", num_labels=10, ignore_mismatched_sizes=True,
            **MODEL_OPTIONS,
        )  # fmt: skip

    def batch(self, indices: list[int]) -> Batch:
        """Of any samples; those held out come first."""
        return {"pixel_values": self.pixels[indices], "labels": self.labels[indices]}

    def length(self, index: int) -> int:
        return 0


TASKS: dict[str, Callable[[Path, Path], Any]] = {"sst2": Sst2, "cifar10": Cifar10}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.01, fused=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9, fused=True),
}


def batches(task: Any, num_steps: int, size: int, seed: int) -> list[list[int]]:
    """Which samples each step trains on: similar lengths together, the same for every cell of a seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(task.num_training, generator=generator)[: num_steps * size]
    indices = (drawn + NUM_HELD_OUT).tolist()
    pools = [sorted(indices[i : i + 16 * size], key=task.length) for i in range(0, len(indices), 16 * size)]
    cut_up = [pool[i : i + size] for pool in pools for i in range(0, len(pool), size)]
    return [cut_up[i] for i in torch.randperm(len(cut_up), generator=generator).tolist()]


def micro_batches_of(task: Any, chosen: list[list[int]], num_micro_batches: int) -> list[MicroBatch]:
    """A window over these batches."""
    size = len(chosen[0]) // num_micro_batches
    return [
        MicroBatch(task.batch(batch[i : i + size]), 1 / num_micro_batches, step, i + size == len(batch))
        for step, batch in enumerate(chosen)
        for i in range(0, len(batch), size)
    ]


def linear(step: int, num_steps: int) -> float:
    """Trainer's linear schedule with a warm-up of a tenth of the steps."""
    warm_up = num_steps // 10
    return step / warm_up if step < warm_up else max(0.0, (num_steps - step) / (num_steps - warm_up))


def run(cell: Cell, task: Any) -> dict[str, Any]:
    """Train and evaluate once."""
    start_s = time.process_time()
    torch.manual_seed(cell.seed)
    model = task.model().train()
    num_steps, rate = NUM_STEPS[cell.task], RATES[cell.task, cell.optimizer]
    is_synchronous = cell.kind == SYNCHRONOUS
    num_micro_batches = 4 if cell.kind == "double_buffer" and cell.num_stages > 2 else 1
    kind = None if is_synchronous else ConstantLag() if "constant" in cell.variant else find_weights(cell.kind)
    make_optimizer = partial(OPTIMIZERS[cell.optimizer], lr=rate)
    ranks = [
        SimulatedRank(
            part, k, cell.num_stages, make_optimizer, partial(linear, num_steps=num_steps), kind, num_micro_batches,
            looks_ahead=cell.variant != "current learning rate",
        )
        for k, part in enumerate(cut(model, task.num_layers, cell.num_stages))
    ]  # fmt: skip
    chosen = batches(task, num_steps, BATCHES[cell.task], cell.seed)
    interval = 1 if is_synchronous else DRAIN_INTERVAL if "drained" in cell.variant else num_steps
    losses, errors = [], []

    def note(start: int, step: int) -> None:
        done = start + step + 1
        if done % ERRORS_EVERY == 0 and not is_synchronous:
            found = [rank.take_errors() for rank in ranks]
            errors.append({"step": done, "stages": [None if error is None else asdict(error) for error in found]})

    for start in range(0, num_steps, interval):
        window = micro_batches_of(task, chosen[start : start + interval], num_micro_batches)
        losses.append(run_window(ranks, window, partial(note, start)))
    return {
        **asdict(cell), "rate": rate, "num_steps": num_steps, "num_correct": count_correct(task, model),
        "num_evaluated": NUM_HELD_OUT, "training_loss": statistics.mean(losses), "errors": errors,
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }  # fmt: skip


def count_correct(task: Any, model: Any) -> int:
    """Of the samples that are held out."""
    model.eval()
    order = sorted(range(NUM_HELD_OUT), key=task.length)
    total = 0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, NUM_HELD_OUT, 50):
            batch = task.batch(order[start : start + 50])
            total += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return total


def finish(
    data: Path | str, models: Path | str, folder: Path | str, seeds: Sequence[int], tasks: Sequence[str]
) -> None:
    """Run every cell that has no line yet; a task has a file of its own."""
    for name in tasks:
        path, task = Path(folder, f"{name}.jsonl"), None
        path.parent.mkdir(parents=True, exist_ok=True)
        done = {cell_of(record) for record in read_cells(path) if is_of_study(record)}
        for cell in cells(seeds, [name]):
            if cell in done:
                continue
            task = task or TASKS[name](Path(data), Path(models))
            record = run(cell, task)
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            share = record["num_correct"] / record["num_evaluated"]
            print(*asdict(cell).values(), share, record["cpu_seconds"], flush=True)


def cell_of(record: dict[str, Any]) -> Cell:
    """Return the cell that a line is of."""
    return Cell(*(record[each.name] for each in fields(Cell)))


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The lines of finished cells."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def paired(found: dict[int, float], reference: dict[int, float]) -> dict[str, Any]:
    """Over the seeds of both."""
    seeds = sorted(set(found) & set(reference))
    differences = [found[seed] - reference[seed] for seed in seeds]
    row: dict[str, Any] = {
        "seeds": seeds, "accuracy_percent": [round(found[seed], 2) for seed in seeds],
        "mean_accuracy_percent": round(statistics.mean(found[seed] for seed in seeds), 2) if seeds else None,
        "mean_difference_points": round(statistics.mean(differences), 2) if seeds else None,
    }  # fmt: skip
    if len(seeds) > 1 and any(differences):
        row["interval_95_points"] = [round(end, 2) for end in interval_95(differences)]
    return row


def is_of_study(record: dict[str, Any]) -> bool:
    """Whether a run had the settings that the study has now."""
    settings = RATES[record["task"], record["optimizer"]], NUM_STEPS[record["task"]]
    return (record["rate"], record["num_steps"]) == settings


def report(folder: Path) -> dict[str, Any]:
    """Make the table of all finished cells."""
    found = [record for path in sorted(folder.glob("*.jsonl")) for record in read_cells(path)]
    records = [record for record in found if is_of_study(record)]
    if len(records) < len(found):
        print(f"Left out: {len(found) - len(records)} runs with other learning rates or numbers of steps.")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in GROUPED_BY), []).append(record)
    rows = []
    for key, group in sorted(groups.items()):
        row = dict(zip(GROUPED_BY, key, strict=True))
        references = {"synchronous": (row["task"], row["optimizer"], 1, SYNCHRONOUS, "")}
        if row["variant"]:
            drained = "drained" if row["variant"] == "drained, constant s" else ""
            references["pipeoptim"] = (row["task"], row["optimizer"], row["num_stages"], "pipeoptim", drained)
        for name, reference in references.items():
            rows.append({**row, "against": name, **paired(accuracies(group), accuracies(groups.get(reference, [])))})
        rows[-1]["errors"] = mean_errors(group)
        rows[-1]["cpu_seconds"] = round(statistics.mean(record["cpu_seconds"] for record in group), 1)
    rates = {" ".join(key): rate for key, rate in RATES.items()}
    return {
        "what": (
            f"Asynchronous 1F1B in one process: MiniLM on SST-2 (batch {BATCHES['sst2']}, word embeddings not "
            f"trained) and the small ViT on CIFAR-10 (batch {BATCHES['cifar10']}); steps {NUM_STEPS}, learning rates "
            f"{rates}, linear after a warm-up of a tenth, bf16 autocast, no dropout, no clipping; accuracy on "
            f"{NUM_HELD_OUT} held-out samples; differences paired by seed, 95 % intervals by Student's t; errors are "
            "means over runs, stage by stage"
        ),
        "num_runs": len(records), "rows": rows,
    }  # fmt: skip


def accuracies(group: list[dict[str, Any]]) -> dict[int, float]:
    """In percent, by seed."""
    return {record["seed"]: 100 * record["num_correct"] / record["num_evaluated"] for record in group}


def mean_errors(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each stage over the runs, by the part of the run."""
    names = ("s", "error", "error_unpredicted")
    parts = []
    for pieces in zip(*(record["errors"] for record in group), strict=True):
        stages = []
        for errors in zip(*(piece["stages"] for piece in pieces), strict=True):
            known = [error for error in errors if error is not None]
            stages.append({name: statistics.mean(e[name] for e in known) for name in names} if known else None)
        parts.append({"until_step": pieces[0]["step"], "stages": stages})
    return parts


@experiment("async_study.json", minutes=180, quick_minutes=3, processes=1)
def async_study(settings: Settings) -> dict[str, Any]:
    """Accuracy of asynchronous kinds of weights beside synchronous runs: SST-2 and CIFAR-10, paired by seed."""
    folder = settings.of(FOLDER, settings.folder)
    where = (settings.data, settings.models, folder)
    if settings.quick:
        launch(first_cells, 1, *where)
    else:
        launch(finish, 1, *where, SEEDS, list(TASKS), minutes=600)
    return report(folder)


def first_cells(data: str, models: str, folder: str) -> None:
    """Run a synchronous and an asynchronous cell of each task."""
    for name, kind in TASKS.items():
        task = kind(Path(data), Path(models))
        chosen = [cell for cell in cells([0], [name]) if cell.optimizer == "adamw"][:2]
        lines = [json.dumps(run(cell, task)) + "\n" for cell in chosen]
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.jsonl").write_text("".join(lines))


def main() -> None:
    """Run cells of any seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    parser.add_argument("--models", type=Path, default=REPOSITORY.parent / "shared" / "models")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="several may run side by side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    finish(options.data, options.models, FOLDER, options.seeds, options.tasks)


if __name__ == "__main__":
    main()
