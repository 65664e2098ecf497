"""What the activation cache costs and gains, piece by piece, on this machine.

    python scripts/benchmark_cache.py --output benchmarks/cache.json [--only PIECE ...]

Three pieces; each takes medians over alternating rounds, and is merged into the file with its date and machine:

1. `read`: random batches of 64 rows of 197 x 192 float32 out of the store, hashes compared, beside fancy indexing
   of a `numpy.memmap` of the same rows and beside copying 64 rows within memory; then two processes at once, and the
   share of its rate alone that each keeps. All files are in the page cache.
2. `write`: two processes, ViT: the share of step time that storing takes in the first epoch after F layers froze, and
   the share that reading takes in the next one.
3. `throughput`: two processes, K=1, R=2, F layers frozen, every sample stored: steps beside the bound. A frozen layer
   costs nothing, an active one 3, the first active one 2. The block is the layers' share of the step at F=0 in the
   same round. Head, optimizer and reduction count as measured at that F; reading rows and all else counts against the
   share (`rest as measured` grants it, as the piece of that name in benchmark_freezing.py does).

Whole runs, real data and the decisions of `auto`: benchmark_cache_runs.py, which adds to the same file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from benchmark_freezing import MODELS, NUM_MEASURED, NUM_WARM, Watching
from benchmark_pipeline import machine, summary
from transformers import PrinterCallback

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.report.events import EVENTS_FILE, read_events


PIECES = ("read", "write", "throughput")
LAUNCHED = ("write", "throughput")
"""Pieces that torchrun starts in two processes."""

NUM_TOKENS, HIDDEN_SIZE, NUM_ROWS_READ = 197, 192, 64
VIT, BERT = MODELS
FROZEN_OF_MODEL = {VIT: (4, 6, 8, 10), BERT: (2, 4, 5)}

Samples = list[dict[str, torch.Tensor]]
Events = list[dict[str, Any]]


def merge(output: Path, name: str, section: dict[str, Any], num_processes: int) -> None:
    """Write one piece into the result file; the others stay."""
    results = json.loads(output.read_text()) if output.exists() else {}
    results[name] = {**section, "machine": machine(num_processes)}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")


# ---- 1. reading ----


def _read_process(options: argparse.Namespace, folder: Path, number: int, barrier: Any, answers: Any) -> None:
    """One of two processes that read the same files, first the contenders one by one, then both at once."""
    torch.set_num_threads(1)
    store = ActivationStore.open(folder / "store", number)
    shape = (options.rows, NUM_TOKENS, HIDDEN_SIZE)
    mapped = np.memmap(folder / "rows.bin", np.float32, "r", shape=shape)
    source, target = (np.ones((NUM_ROWS_READ, *shape[1:]), np.float32) for _ in range(2))
    contenders: dict[str, Callable[[Any], Any]] = {
        "store": lambda batch: store.read(batch, NUM_TOKENS),
        "memmap": lambda batch: mapped[batch],
        "memcpy": lambda batch: np.copyto(target, source),
    }
    generator = np.random.default_rng(number)

    def rate(name: str) -> float:
        batches = generator.integers(0, options.rows, (options.batches, NUM_ROWS_READ))
        start = time.perf_counter()
        for batch in batches:
            contenders[name](batch)
        return batches.size * source[0].nbytes / 1e6 / (time.perf_counter() - start)

    for first in range(0, options.rows, NUM_ROWS_READ):  # Everything into the page cache and into the page table.
        batch = np.arange(first, min(first + NUM_ROWS_READ, options.rows))
        assert bool(np.array_equal(store.read(batch, NUM_TOKENS).activation.numpy(), mapped[batch]))
    rates: dict[str, list[float]] = {name: [] for name in [*contenders, "store, both processes at once"]}
    for index in range(3 * options.rounds):
        barrier.wait()
        if number == 0:
            for name in contenders if index % 2 else reversed(contenders):
                rates[name].append(rate(name))
        barrier.wait()
        if number == 1:
            rates["store"].append(rate("store"))
        barrier.wait()
        rates["store, both processes at once"].append(rate("store"))
    answers.put((number, rates))


def benchmark_read(options: argparse.Namespace) -> dict[str, Any]:
    """MB/s of random reads, alone and in two processes at once."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="benchmark-cache-") as name:
        folder = Path(name)
        written = _write_rows(folder, options.rows)
        barrier, answers = context.Barrier(2), context.Queue()
        processes = [
            context.Process(target=_read_process, args=(options, folder, number, barrier, answers))
            for number in range(2)
        ]
        for process in processes:
            process.start()
        found = dict(answers.get(timeout=3600) for _ in processes)
        for process in processes:
            process.join()
    alone, together = found[0], "store, both processes at once"
    ratios = {
        f"store over {other}": summary([a / b for a, b in zip(alone["store"], alone[other], strict=True)])
        for other in ("memmap", "memcpy")
    }
    shares = [
        both / single for rates in found.values() for both, single in zip(rates[together], rates["store"], strict=True)
    ]
    return {
        "rows": options.rows,
        "MB/s written, first time": round(written),
        "MB/s": {name: summary(values) for name, values in alone.items() if values},
        "ratio": ratios,
        "share of its rate alone that each of two processes keeps": summary(shares),
    }


def _write_rows(folder: Path, num_rows: int) -> float:
    """The same random rows in a store and in one flat file; MB/s of writing the store."""
    record_format = RecordFormat(HIDDEN_SIZE, torch.float32, {}, {"labels": (torch.int64, ())})
    store = ActivationStore.create(folder / "store", num_rows, record_format, 2**45)
    weights_id, seconds = store.weights_id("benchmark"), 0.0
    with open(folder / "rows.bin", "wb") as file:
        for first in range(0, num_rows, NUM_ROWS_READ):
            samples = np.arange(first, min(first + NUM_ROWS_READ, num_rows))
            activation = torch.randn(len(samples), NUM_TOKENS, HIDDEN_SIZE)
            file.write(activation.numpy().tobytes())
            labels, digests = torch.from_numpy(samples), samples.astype(np.uint64)
            lengths, start = np.full(len(samples), NUM_TOKENS), time.perf_counter()
            store.write(samples, weights_id, activation, lengths, {"labels": labels}, digests)
            seconds += time.perf_counter() - start
    store.close()
    os.sync()
    return num_rows * NUM_TOKENS * HIDDEN_SIZE * 4 / 1e6 / seconds


# ---- trainings for the other pieces ----


class Stepwise(Watching):
    """Keeps the seconds of every step, from fetching its batch on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_seconds: list[float] = []

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.pipeline_run.pipeline.settings.meter._is_running:  # Trainer also comes by at the end of an epoch.
            self.step_seconds.append(0.0)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.step_seconds[-1] = self.pipeline_run.pipeline.settings.meter.last_seconds


def train(model: Any, samples: Samples, batch: int, num_steps: int, **options: Any) -> tuple[Stepwise, Events]:
    """One training run in the processes that there are; the trainer, and the events of the run on rank 0."""
    is_alone = not dist.is_initialized()
    names: list[Any] = [tempfile.mkdtemp(prefix="benchmark-cache-") if is_alone or dist.get_rank() == 0 else None]
    if not is_alone:
        dist.broadcast_object_list(names)
    folder = Path(names[0])
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=batch // (1 if is_alone else dist.get_world_size()),
        max_steps=num_steps, learning_rate=1e-5, logging_steps=10_000, save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, pipeline_timeout=120,
        pipeline_parallel_size="1", activation_cache_dir=str(folder), **options,
    )  # fmt: skip
    trainer = Stepwise(model=model, args=args, train_dataset=samples)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if not trainer.is_world_process_zero():
        return trainer, []
    events = read_events(str(folder / EVENTS_FILE))
    shutil.rmtree(folder)
    return trainer, events


def samples_of(model_name: str, num_batches: int) -> tuple[Any, Samples, int]:
    """A model at random, a data set of some batches, and the global batch."""
    make, batch, _ = MODELS[model_name]
    model, inputs = make(batch * num_batches)
    return model, [{key: value[i] for key, value in inputs.items()} for i in range(batch * num_batches)], batch


def cache_epochs(events: Events) -> Events:
    """What the cache did, epoch by epoch."""
    return [event for event in events if event["event"] == "cache" and event["what"] == "epoch"]


# ---- 2. writing ----


def benchmark_write(options: argparse.Namespace) -> dict[str, Any]:
    """Shares of step time: storing in the epoch after the freeze, reading in the next one."""
    steps, world = options.write_batches, dist.get_world_size()
    shares: dict[str, dict[str, list[float]]] = {}
    for index in range(options.rounds):
        for frozen in (4, 8) if index % 2 else (8, 4):
            model, samples, batch = samples_of(VIT, steps)
            freeze = {"freeze_policy": "fixed", "freeze_at": f"{steps}:{frozen}", "activation_cache": "on"}
            trainer, events = train(model, samples, batch, 3 * steps, **freeze)
            if dist.get_rank() != 0:
                continue
            first, second = cache_epochs(events)[-2:]
            assert first["written"] == len(samples) and second["hits"] == len(samples), (first, second)
            seconds = [sum(trainer.step_seconds[epoch * steps : (epoch + 1) * steps]) for epoch in (1, 2)]
            entry = shares.setdefault(f"F={frozen}", {"writing": [], "reading": [], "seconds a step": []})
            entry["writing"].append(first["write_seconds"] / world / seconds[0])
            entry["reading"].append(second["read_seconds"] / world / seconds[1])
            entry["seconds a step"].append(seconds[0] / steps)
    table: dict[str, Any] = {
        frozen: {
            "share of step time, writing, first epoch": summary(entry["writing"]),
            "share of step time, reading, second epoch": summary(entry["reading"]),
            "seconds a step, first epoch": summary(entry["seconds a step"]),
        }
        for frozen, entry in sorted(shares.items())
    }
    return {"model": VIT, "batches an epoch": steps, **table}


# ---- 3. throughput ----


def benchmark_throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Share of the bound at F frozen layers with every sample stored."""
    results: dict[str, Any] = {}
    for name, depths in FROZEN_OF_MODEL.items():
        lists: dict[int, dict[str, list[float]]] = {frozen: {} for frozen in depths}
        for index in range(options.rounds):
            runs = {}
            order = [0, *depths]
            for frozen in order if index % 2 else reversed(order):
                runs[frozen] = _throughput_run(name, frozen)
            for frozen in depths:
                for key, value in _beside_bound(MODELS[name][2], frozen, runs[0], runs[frozen]).items():
                    lists[frozen].setdefault(key, []).append(value)
        results[name] = {
            f"F={frozen}": {key: summary(values) for key, values in entry.items()} for frozen, entry in lists.items()
        }
    return results


def _throughput_run(name: str, frozen: int) -> dict[str, Any]:
    """Parts of a step, all samples stored, and what the profile says of the blocks."""
    num_batches = 4
    model, samples, batch = samples_of(name, num_batches)
    options: dict[str, Any] = {"freeze_policy": "none"}
    if frozen:
        options = {"freeze_policy": "fixed", "freeze_at": f"0:{frozen}", "activation_cache": "on"}
    # The first epoch stores. One step more than are measured: the parts are kept at the beginning of the next one.
    num_steps = (num_batches if frozen else NUM_WARM) + NUM_MEASURED + 1
    trainer, events = train(model, samples, batch, num_steps, **options)
    assert trainer.pipeline_run.starter.in_force is not None and len(trainer.parts) == 1, len(trainer.parts)
    found, parts = trainer.parts[0]
    assert (found.num_frozen_layers, found.cache_level) == (frozen, frozen), found
    costs = trainer.pipeline_run.pipeline.start_up.plans.inputs(found, 1, {}).blocks
    read = 0.0
    if frozen and dist.get_rank() == 0:
        later = cache_epochs(events)[1:]
        assert sum(epoch["misses"] for epoch in later) == 0, later
        read = sum(epoch["read_seconds"] for epoch in later) / dist.get_world_size() / (num_steps - num_batches)
    return {"parts": parts, "costs": costs, "read": read}


def _beside_bound(num_layers: int, frozen: int, full: dict[str, Any], run: dict[str, Any]) -> dict[str, float]:
    """Shares of the bound of a run at F, by the block of the run at F=0."""
    costs, parts, at_zero = full["costs"], run["parts"], full["parts"]
    # The layers' share of forward and backward at F=0; embeddings and head by their share in the block profile.
    outside = [costs.edge_backward[0] + costs.forward[0], costs.backward[-1] + costs.forward[-1]]
    computed = at_zero["forward"] + at_zero["backward"]
    scale = computed / (sum(costs.forward) + sum(costs.backward[1:]) + costs.edge_backward[0])
    block = (computed - sum(outside) * scale) / (3 * num_layers)
    # A stored sample passes neither embeddings nor frozen layers.
    layers = block * (3 * (num_layers - frozen) - (frozen < num_layers))
    bound = layers + scale * outside[1] + parts["optimizer"] + parts["reduction"]
    rest = parts["total"] - parts["forward"] - parts["backward"]
    return {
        "share of the bound": bound / parts["total"],
        "share of the bound, rest as measured": (layers + scale * outside[1] + rest) / parts["total"],
        "over F=0": at_zero["total"] / parts["total"],
        "seconds a step": parts["total"],
        "seconds a step, reading rows": run["read"],
    }


# ---- running ----


def launch(piece: str, options: argparse.Namespace) -> dict[str, Any]:
    """A piece in two processes."""
    with tempfile.TemporaryDirectory(prefix="benchmark-cache-") as name:
        path = Path(name) / "piece.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        command += ["--worker", piece, "--output", str(path), "--rounds", str(options.rounds)]
        command += ["--write_batches", str(options.write_batches)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": name}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{piece} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(path.read_text())


def work(options: argparse.Namespace) -> None:
    """In one of the processes that `launch` started."""
    torch.set_num_threads(1)
    accelerate.PartialState()
    section = benchmark_write(options) if options.worker == "write" else benchmark_throughput(options)
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(section))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; pieces measured before are kept")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=PIECES)
    parser.add_argument(
        "--rounds", type=int, default=5, help="alternating rounds; the read piece takes thrice as many"
    )
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the read piece; 0.3 MB of disk each")
    parser.add_argument("--batches", type=int, default=50, help="batches a contender reads in a round")
    parser.add_argument("--write_batches", type=int, default=16, help="steps an epoch of the write piece")
    parser.add_argument("--worker", choices=LAUNCHED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    for piece in options.only:
        section = launch(piece, options) if piece in LAUNCHED else benchmark_read(options)
        merge(options.output, piece, section, 2)
        print(f"{piece}: {json.dumps(section, indent=2)}", flush=True)


if __name__ == "__main__":
    main()
