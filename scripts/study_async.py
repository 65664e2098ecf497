"""What asynchronous 1F1B costs in accuracy: six kinds of weights, two tasks, two optimizers, several seeds.

    python scripts/study_async.py --data ../shared/data --models ../shared/models --folder runs/async \
        --output benchmarks/async_study.json

Each cell fine-tunes a pretrained model for a short while in one process with one thread, which plays all stages of the
pipeline (`async_stages.py`), and is evaluated on sentences or images that no run trains on. Finished cells are lines of
files in `--folder`: start the script again and it goes on where it stopped. `--report` only writes the table.

Settings: learning rate linear after a warm-up of a tenth of the steps, no clipping, no dropout, bf16 autocast; the word
embeddings of MiniLM are not trained (half of its weights, which a short run hardly moves). One drain, at the end.
`double_buffer` with four stages needs three micro-batches a step or more: it cuts each mini-batch into four micro-batches, the
others train with one micro-batch a step. What SpecTrain and XPipe do with AdamW is this package's generalisation.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from async_stages import Batch, BertPart, MicroBatch, SimulatedRank, ViTPart, cut, run_window
from benchmark_real_input import cifar10_images, minilm_folder
from intervals import interval_95

from hf_pipetransformer.schedules.weight_kinds import ForwardPass, PipeOptim, find_weights


SEEDS = (0, 1, 2, 3, 4)
NUM_HELD_OUT = 1_000
SYNCHRONOUS = "synchronous"
DRAIN_INTERVAL, ERRORS_EVERY = 8, 20
GROUPED_BY = ("task", "optimizer", "num_stages", "kind", "variant")

# Of those tried on synchronous runs of another seed (--rates). SST-2 with momentum at 1e-2 gives synchronous runs two
# points more, and is the highest rate that they bear: every asynchronous kind fails there with four stages.
RATES = {
    ("sst2", "adamw"): 1e-4,
    ("sst2", "momentum"): 5e-3,
    ("cifar10", "adamw"): 3e-4,
    ("cifar10", "momentum"): 2e-3,
}
NUM_STEPS = {"sst2": 160, "cifar10": 160}
BATCHES = {"sst2": 16, "cifar10": 8}


# Eager attention is the faster one here: short sequences on a CPU.
MODEL_OPTIONS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}


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
        rate: the learning rate, if not that of the study.
    """

    task: str
    optimizer: str
    num_stages: int
    kind: str
    variant: str
    seed: int
    rate: float | None = None


VARIANTS = ("drained", "drained, constant s", "current learning rate")


def cells(seeds: tuple[int, ...] = SEEDS, tasks: tuple[str, ...] = ("sst2", "cifar10")) -> Iterator[Cell]:
    """All of the study, seed by seed; what takes longest last."""
    pairs = [(task, optimizer) for task, optimizer in RATES if task in tasks]
    for seed in seeds:
        for task, optimizer in pairs:
            yield Cell(task, optimizer, 1, SYNCHRONOUS, "", seed)
            for kind in ("pipeoptim", "vanilla", "stashing", "spectrain", "xpipe"):
                yield Cell(task, optimizer, 4, kind, "", seed)
            for kind in ("pipeoptim", "vanilla", "stashing"):
                yield Cell(task, optimizer, 2, kind, "", seed)
    for seed in seeds:
        for task, optimizer in pairs:
            yield Cell(task, optimizer, 4, "double_buffer", "", seed)
            for variant in VARIANTS:
                yield Cell(task, optimizer, 4, "pipeoptim", variant, seed)
            for kind in ("double_buffer", "spectrain", "xpipe"):
                yield Cell(task, optimizer, 2, kind, "", seed)


class Sst2:
    """MiniLM on SST-2."""

    part, num_layers = BertPart, 6

    def __init__(self, data: Path, models: Path) -> None:
        from datasets import load_dataset
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = minilm_folder()
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **MODEL_OPTIONS)
        self._model.bert.embeddings.word_embeddings.requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = load_dataset("parquet", data_files={n: str(data / f"sst2_{n}.parquet") for n in ("train", "dev")})
        order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(0)).tolist()
        self.num_dev = len(rows["dev"])
        wanted = [*order[: NUM_HELD_OUT - self.num_dev], *order[2_000:10_000]]
        sentences = list(rows["dev"]["sentence"]) + list(rows["train"].select(wanted)["sentence"])
        self.labels = torch.tensor(list(rows["dev"]["label"]) + list(rows["train"].select(wanted)["label"]))
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

    part, num_layers = ViTPart, 12

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
    num_steps, rate = NUM_STEPS[cell.task], cell.rate or RATES[cell.task, cell.optimizer]
    is_synchronous = cell.kind == SYNCHRONOUS
    num_micro_batches = 4 if cell.kind == "double_buffer" and cell.num_stages > 2 else 1
    kind = None if is_synchronous else ConstantLag() if "constant" in cell.variant else find_weights(cell.kind)
    make_optimizer = partial(OPTIMIZERS[cell.optimizer], lr=rate)
    ranks = [
        SimulatedRank(
            part, k, cell.num_stages, make_optimizer, partial(linear, num_steps=num_steps), kind, num_micro_batches,
            looks_ahead=cell.variant != "current learning rate",
        )
        for k, part in enumerate(cut(task.part, model, task.num_layers, cell.num_stages))
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


def finish(options: argparse.Namespace) -> None:
    """Every cell that has no line yet."""
    path = options.folder / f"{'_'.join(options.tasks)}.jsonl"
    fields = list(asdict(next(cells())))
    records = [record for record in read_cells(path) if is_of_study(record)]
    done = {Cell(**{**{name: record[name] for name in fields}, "rate": None}) for record in records}
    loaded: dict[str, Any] = {}
    for cell in cells(tuple(options.seeds), tuple(options.tasks)):
        is_wanted = options.kinds is None or cell.kind in options.kinds and not cell.variant
        if cell in done or not is_wanted:
            continue
        if cell.task not in loaded:
            loaded[cell.task] = TASKS[cell.task](options.data, options.models)
        record = run(cell, loaded[cell.task])
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            *asdict(cell).values(), record["num_correct"] / record["num_evaluated"], record["cpu_seconds"], flush=True
        )


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


def report(options: argparse.Namespace) -> None:
    """The table over all finished cells."""
    found = [record for path in sorted(options.folder.glob("*.jsonl")) for record in read_cells(path)]
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
            print(*rows[-1].values())
        rows[-1]["errors"] = mean_errors(group)
        rows[-1]["cpu_seconds"] = round(statistics.mean(record["cpu_seconds"] for record in group), 1)
    result = {
        "what": (
            f"Asynchronous 1F1B in one process: MiniLM on SST-2 (batch {BATCHES['sst2']}, word embeddings not "
            f"trained) and the small ViT on CIFAR-10 (batch {BATCHES['cifar10']}); steps {NUM_STEPS}, learning rates "
            f"{ {' '.join(key): rate for key, rate in RATES.items()} }, linear after a warm-up of a tenth, bf16 "
            f"autocast, no dropout, no clipping; accuracy on {NUM_HELD_OUT} held-out samples; differences paired by "
            "seed, 95 % intervals by Student's t; errors are means over runs, stage by stage"
        ),
        "date": str(date.today()), "machine": f"{platform.processor() or platform.machine()}, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "num_runs": len(records), "rows": rows,
    }  # fmt: skip
    options.output.write_text(json.dumps(result, indent=1) + "\n")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="several may run side by side")
    parser.add_argument("--kinds", nargs="+", help="of weights, or 'synchronous'; all, and variants, if not given")
    parser.add_argument("--report", action="store_true", help="write the table of what is there, run nothing")
    parser.add_argument(
        "--rates", nargs="+", help="TASK OPTIMIZER RATE...: synchronous runs of another seed, no table"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if options.rates:
        name, optimizer, *rates = options.rates
        task = TASKS[name](options.data, options.models)
        for rate in rates:
            print(*run(Cell(name, optimizer, 1, SYNCHRONOUS, "", 100, float(rate)), task).values(), flush=True)
        return
    if not options.report:
        finish(options)
    if options.output is not None:
        report(options)


if __name__ == "__main__":
    main()
