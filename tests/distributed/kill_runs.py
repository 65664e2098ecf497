"""Kill a training at random moments, resume it, and compare how it ends with a run that was never killed.

    python -m tests.distributed.kill_runs --kills 200 --folder runs/faults --output benchmarks/faults.json

Chains of kills: a run is killed (one rank or all, around the moment of a checkpoint, sometimes while it starts), goes
on from `resume_from_checkpoint=True`, is killed again, and at last ends. Half of the chains stay on as many processes,
and must end with the same bits; the others go on with other numbers of processes and stages, and must end within 1e-5.

Ranks are forked from this process, which has imported everything. It goes on where it stopped: chains that are in
the folder are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.state.checkpoint import STATE_FOLDER, newest_verified
from tests.distributed.launcher import free_port
from tests.support.models import build_model, collate, has_zero_gradient, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
NUM_SAMPLES = 37
GLOBAL_BATCH = 8
NUM_STEPS = 12
KILLS_PER_CHAIN = 4
# Stages by number of processes.
STAGES = {1: 1, 2: 2, 4: 2}
PIPELINE_TIMEOUT = 60
RUN_SECONDS = 240
"""A run that takes longer is stuck."""
MOST_SECONDS_LATE = 0.15
"""A kill comes up to this long after the folder of a checkpoint appears: before, while and after it is written."""
SHARE_AT_START = 0.15
MOST_SECONDS_OF_START = 1.5
"""This share of the kills comes while a run starts or resumes, up to so long after its processes began."""
SECONDS_OF_LAUNCHER = 3
TOLERANCE = 1e-5
FINAL = "final.safetensors"


def train(output: Path, world_size: int, where: str | None) -> None:
    """What a rank does: the whole run, or the rest of it."""
    torch.set_num_threads(1)
    model = build_model(MODEL, seed=0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    args = our_arguments(
        output,
        STAGES[world_size],
        per_device_train_batch_size=GLOBAL_BATCH // world_size,
        learning_rate=1e-3,
        weight_decay=0.05,
        max_steps=NUM_STEPS,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        logging_steps=3,
        seed=7,
        freeze_policy="fixed",
        freeze_at="4:1,9:2",
        freeze_min_active_layers=1,
        elastic=False,
        activation_cache="off",
        pipeline_parallel_num_microbatches=2,
        pipeline_timeout=PIPELINE_TIMEOUT,
    )
    trainer = PipeTransformerTrainer(
        model=model, args=args, train_dataset=make_dataset(MODEL, NUM_SAMPLES), data_collator=collate
    )
    trainer.train(resume_from_checkpoint=None if where is None else True)
    if trainer.is_world_process_zero():
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        save_file(weights, output / f"{FINAL}.unfinished")
        os.replace(output / f"{FINAL}.unfinished", output / FINAL)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ---- processes ----


def fork_ranks(world_size: int, log: Path, act: Callable[[], None]) -> list[int]:
    """One process a rank that runs `act` and ends."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                stream = os.open(log.with_suffix(f".rank{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                if world_size > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
                    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
                act()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()
                os._exit(code)
        ranks.append(pid)
    return ranks


def wait(ranks: list[int], seconds: float, until: Callable[[], bool] = lambda: False) -> dict[int, int]:
    """Exit codes of the ranks that have ended when all have, `until` says so, or the time is over."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(ranks) and time.monotonic() < deadline and not until():
        for pid in ranks:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return codes


def end(ranks: list[int], codes: dict[int, int]) -> None:
    """Kill what is left of the ranks."""
    for pid in ranks:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---- a chain ----


@dataclass
class Kill:
    """What one kill met.

    Args:
        world_size: processes.
        target: a rank, or "all".
        at_start: whether it came while the run started.
        interrupted: whether the newest checkpoint was left incomplete.
        others_ended: whether the other ranks ended by themselves; None if all were killed, or while the run started.
        step: of the newest sound checkpoint then; None if there was none.
    """

    world_size: int
    target: str
    at_start: bool
    interrupted: bool
    others_ended: bool | None
    step: int | None


def step_of(folder: str | None) -> int | None:
    return None if folder is None else int(folder.rpartition("-")[2])


def stamp_of(path: Path) -> tuple[int, int] | None:
    """What tells a folder from one of the same name that was there before; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def run_once(output: Path, world_size: int, log: Path) -> bool:
    """The rest of the run, undisturbed."""
    where = newest_verified(str(output))[0]
    ranks = fork_ranks(world_size, log, lambda: train(output, world_size, where))
    codes = wait(ranks, RUN_SECONDS)
    end(ranks, codes)
    return list(codes.values()) == [0] * world_size


def run_and_kill(output: Path, world_size: int, log: Path, draw: random.Random) -> Kill | str | None:
    """Go on and be killed; None if the run came to its end before, a text if it failed by itself."""
    where = newest_verified(str(output))[0]
    begins_at = draw.randint(1, 3) if where is None else (step_of(where) or 0) + draw.randint(1, 2)
    if begins_at >= NUM_STEPS:
        return None
    # A kill may have left a folder there; begun anew, it is another one.
    awaited = output / f"checkpoint-{begins_at}" / STATE_FOLDER
    before, at_start = stamp_of(awaited), draw.random() < SHARE_AT_START
    ranks = fork_ranks(world_size, log, lambda: train(output, world_size, where))
    if at_start:
        codes = wait(ranks, draw.uniform(0, MOST_SECONDS_OF_START))
    else:
        codes = wait(ranks, RUN_SECONDS, lambda: stamp_of(awaited) not in (None, before))
        time.sleep(draw.uniform(0, MOST_SECONDS_LATE))
    if list(codes.values()) == [0] * world_size and (output / FINAL).exists():
        return None
    if codes:
        end(ranks, codes)
        return f"ended with {sorted(codes.values())} before step {begins_at}, from {where}"
    victim = draw.choice([*range(world_size), None])
    for pid in ranks if victim is None else [ranks[victim]]:
        os.kill(pid, signal.SIGKILL)
    # Before they have met, ranks wait for each other as long as torch lets them; a launcher ends them.
    codes |= wait(ranks, SECONDS_OF_LAUNCHER if at_start else PIPELINE_TIMEOUT + 30)
    others_ended = None if victim is None or world_size == 1 or at_start else len(codes) == world_size
    end(ranks, codes)
    if (output / FINAL).exists():
        return None
    sound, passed_over = newest_verified(str(output))
    if where is not None and (step_of(sound) or 0) < (step_of(where) or 0):
        return f"lost {where}: {passed_over}"
    target = "all" if victim is None else str(victim)
    return Kill(world_size, target, at_start, bool(passed_over), others_ended, step_of(sound))


def run_chain(folder: Path, index: int, seed: int, references: dict[int, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Kills and resumptions of one run, and how it ended."""
    draw = random.Random(f"{seed}-{index}")
    is_elsewhere, world_size = index % 2 == 1, (1, 2, 4)[index // 2 % 3]
    output, log = folder / f"chain-{index}", folder / f"chain-{index}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    worlds, kills, error = [world_size], [], None
    while len(kills) < KILLS_PER_CHAIN and error is None:
        found = run_and_kill(output, worlds[-1], log, draw)
        if found is None:
            break
        if isinstance(found, Kill):
            kills.append(vars(found))
            others = [size for size in STAGES if size != worlds[-1]]
            worlds.append(draw.choice(others) if is_elsewhere else world_size)
        else:
            error = found
    if error is None and not run_once(output, worlds[-1], log):
        error = "the last run did not end well"
    result = {"index": index, "worlds": worlds, "is_elsewhere": is_elsewhere, "kills": kills, "error": error}
    if error is None:
        result |= compare(load_file(output / FINAL), references[worlds[-1]])
        shutil.rmtree(output)
        for path in folder.glob(f"chain-{index}.rank*.txt"):
            path.unlink()
    return result


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Whether weights are equal, and by how much they differ, relative to the largest."""
    differences = [
        float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in expected.items()
        if not has_zero_gradient(MODEL, name)
    ]
    return {
        "bit_equal": all(torch.equal(found[name], value) for name, value in expected.items()),
        "difference": max(differences),
    }


def is_lost(chain: dict[str, Any]) -> bool:
    """Whether a chain did not end as it must."""
    if chain["error"] is not None:
        return True
    return chain["difference"] > TOLERANCE if chain["is_elsewhere"] else not chain["bit_equal"]


# ---- all of them ----


def make_references(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """How the run ends undisturbed, by number of processes."""
    references = {}
    for world_size in STAGES:
        output = folder / f"reference-{world_size}"
        if not (output / FINAL).exists():
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            if not run_once(output, world_size, folder / output.name):
                raise SystemExit(f"The undisturbed run on {world_size} processes failed: see {output}.rank*.txt")
        references[world_size] = load_file(output / FINAL)
    return references


def summary(chains: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all chains."""
    kills = [kill for chain in chains for kill in chain["kills"]]
    equal = [chain for chain in chains if not chain["is_elsewhere"]]
    elsewhere = [chain for chain in chains if chain["is_elsewhere"]]
    return {
        "kills": len(kills),
        "kills_by_world_size": {str(size): sum(kill["world_size"] == size for kill in kills) for size in STAGES},
        "kills_at_start": sum(kill["at_start"] for kill in kills),
        "checkpoints_left_incomplete": sum(kill["interrupted"] for kill in kills),
        "kills_of_one_rank_of_several": sum(kill["others_ended"] is not None for kill in kills),
        "of_which_the_others_ended": sum(kill["others_ended"] is True for kill in kills),
        "runs": len(chains),
        "lost": sum(map(is_lost, chains)),
        "runs_at_equal_layout": len(equal),
        "of_which_bit_equal": sum(chain.get("bit_equal", False) for chain in equal),
        "runs_elsewhere": len(elsewhere),
        "largest_difference_elsewhere": max((chain.get("difference", 1.0) for chain in elsewhere), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="where runs and chains are kept")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    references = make_references(options.folder)
    path = options.folder / f"chains-{options.seed}.jsonl"
    chains = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    start = time.monotonic()
    while sum(len(chain["kills"]) for chain in chains) < options.kills:
        chain = run_chain(options.folder, len(chains), options.seed, references)
        chains.append(chain)
        with path.open("a") as file:
            file.write(json.dumps(chain) + "\n")
        print(f"{sum(len(c['kills']) for c in chains)} kills, {time.monotonic() - start:.0f} s: {chain}", flush=True)
    found = summary(chains)
    print("\n".join(f"{key:36} {value}" for key, value in found.items()))
    if options.output is not None:
        machine = {
            "date": date.today().isoformat(), "cores": os.cpu_count(), "processor": platform.machine(),
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        result = {"machine": machine, "seed": options.seed, **found, "chains": chains}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if found["lost"]:
        raise SystemExit(f"{found['lost']} runs were lost: see {options.folder}")


if __name__ == "__main__":
    main()
