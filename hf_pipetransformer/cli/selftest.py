"""The self-test of a run's machines, on all of its processes: groups, speeds, exactness, a transition, a verdict.

Every step has a time limit. The first cause of a failure ends all processes, and rank 0 says it last, with what to do.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PrinterCallback

import hf_pipetransformer
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import cache_base, measure_storage
from hf_pipetransformer.comm.errors import guarded, is_second_hand
from hf_pipetransformer.comm.fault_board import FaultBoard
from hf_pipetransformer.comm.groups import SAID_OF_SOCKETS, share_gpus, why_not_reached
from hf_pipetransformer.comm.topology import Topology, get_topology
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.options.refusals import check_arguments, check_launch
from hf_pipetransformer.schedules.abilities import SCHEDULE_NAMES, abilities_of
from hf_pipetransformer.schedules.layout import Layout, counted
from hf_pipetransformer.schedules.placement import Placement


SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
"""Messages and reduced tensors whose speed is measured."""
RECORD = RecordFormat(768, torch.float32)
RECORD_TOKENS = 512
"""A record of 1.5 MiB: one sequence of a model of BERT's width."""
ROWS_PER_RANK, NUM_STEPS, FREEZE_STEP, LEARNING_RATE = 2, 4, 2, 1e-3

REMEDIES = {
    "start": "Start the same command on every node, with the same number of processes in all; each node must reach "
    "the address and port of the first (--main_process_ip, --main_process_port), and no other run may use that port.",
    "groups": "If the nodes have several networks, name the one between them: GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME. NCCL_DEBUG=INFO says what NCCL tries. A firewall must let all ports between the nodes pass.",
    "cache folder": "Give --activation_cache_dir a folder of your own on a disk of each node, and the same option to "
    "the run; activation_cache=off needs none.",
    "exactness": "Do not train on these machines with this setting: run again with --use_cpu. If that passes, the "
    "devices or their driver are at fault; NCCL_P2P_DISABLE=1 or another build of torch may help. If not, report it "
    "with these lines.",
}
REMEDIES["start"] += f" {REMEDIES['groups']}"
REMEDIES |= {"bandwidth": REMEDIES["groups"], "transition": REMEDIES["exactness"]}
OTHER_REMEDY = "Change what the cause names; if it names nothing, report it with these lines and the traceback."
"""For a training that failed before its numbers could be compared, and for the end."""
TOO_SLOW = "has not ended within"
MORE_TIME = "If the machine is busy with other work, give each step more time: --timeout 300."


def run_selftest(use_cpu: bool, activation_cache_dir: str | None, step_seconds: float, output: Path | None) -> None:
    """Test the machines of this launch, print lines and a verdict on rank 0; on a failure end with status 1.

    Call it on every process. Nothing else may have made process groups in this one.

    Args:
        step_seconds: time limit of each step.
        output: JSON file for all figures; None for none.
    """
    start = time.monotonic()
    # What each tiny run says of itself would hide the ten lines of the test.
    logging.getLogger("hf_pipetransformer").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    guard = Guard(step_seconds)
    figures: dict[str, Any] = {}
    with guard.step("start"):
        if (why := why_not_reached()) is not None:
            raise ValueError(why)
        num_gpus = 0 if use_cpu else torch.cuda.device_count()
        shares = share_gpus(num_gpus)
        args = PipeTransformerArguments(
            output_dir=tempfile.gettempdir(),
            use_cpu=use_cpu,
            activation_cache_dir=activation_cache_dir,
            report_to="none",
        )
        check_launch(args)
        check_arguments(args)
        # The timeout of the runs below, which so share the groups.
        topology = get_topology(guard.wait)
        guard.share(topology)
        guard.say(_describe(args, topology))
        if shares:
            guard.say(SAID_OF_SOCKETS.format(counted(num_gpus, "GPU"), topology.num_ranks_here))
    with guard.step("groups"):
        guard.say(_check_groups(topology))
    with guard.step("bandwidth"):
        figures["bandwidth"] = _measure_bandwidth(topology)
        for what, speeds in figures["bandwidth"].items():
            guard.say(f"{what}: {_in_words(speeds)}")
    with guard.step("cache folder"):
        figures["cache folder"] = found = _measure_cache(args, topology)
        slowest = {way: min(node[way] for node in found) for way in ("write", "read")}
        where = f"cache folder {cache_base(args)}" + (", slowest node" if len(found) > 1 else "")
        guard.say(f"{where}: writes {slowest['write']:.0f} MB/s, reads {slowest['read']:.0f} MB/s")
        folder = guard.scratch = _make_scratch(topology)
    runs = Runs(args, topology, folder, guard)
    figures["exactness"] = runs.check_exactness()
    figures["transition"] = runs.check_transition()
    seconds = time.monotonic() - start
    with guard.step("end"):
        if output is not None and topology.rank == 0:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps({**figures, "seconds": round(seconds, 1)}, indent=2) + "\n")
        # All ranks of a node are through with the folder before one of them deletes it.
        topology.barrier()
        guard.clear()
        runs.last.end()
    verdict = "These machines train as one process does."
    if topology.world_size == 1:
        verdict = (
            "No pipeline was tested, as one process was started; for two: accelerate launch --multi_gpu "
            "--num_processes 2 -m hf_pipetransformer selftest"
        )
    guard.say(f"selftest: ok in {seconds:.0f} s. {verdict}")


class Guard:
    """Time limits of the steps, the first cause of a failure, and what rank 0 says of both."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.wait = 2 * seconds
        """Timeout of each wait for another rank: longer than a step's limit, which knows who waits for whom."""
        self._rank = int(os.environ.get("RANK", "0"))
        self._board: FaultBoard | None = None
        self._step = "start"
        self._is_said = threading.Lock()
        self.scratch: Path | None = None
        signal.signal(signal.SIGTERM, self._end_from_outside)

    def say(self, line: str) -> None:
        if self._rank == 0:
            print(line, flush=True)

    def share(self, topology: Topology) -> None:
        """Tell all ranks of a failure from now on. Collective: call on every rank."""
        abort = partial(os._exit, 1)
        self._board = FaultBoard(topology.rank, topology.world_size, lambda cause, _: self._say_verdict(cause), abort)
        self._board.begin(together=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run a step under its time limit; on an error, or at the limit, say the verdict and end this process.

        `name` is a key of `REMEDIES`, or one with more behind a comma.
        """
        self._step = name
        timer = threading.Timer(self.seconds, self._end_late)
        # A timer that still runs must not keep a process alive that has ended.
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            first_line = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
            self._fail(first_line, is_first_hand=not is_second_hand(error))
        finally:
            timer.cancel()

    def _end_late(self) -> None:
        faulthandler.dump_traceback()  # All of what the verdict shortens to one function.
        where, is_waiting = _place(threading.main_thread())
        self._fail(f"the step {TOO_SLOW} {self.seconds:g} s, in {where}", is_first_hand=not is_waiting)

    def _fail(self, cause: str, is_first_hand: bool) -> None:
        """Tell all ranks, say the verdict and end this process: groups of a failed run cannot be left in order."""
        told = f"rank {self._rank}: {cause}" if self._board is None else self._board.report(cause, is_first_hand)
        self._say_verdict(told)
        self._remove_scratch()
        os._exit(1)

    def clear(self) -> None:
        """Leave nothing behind after the last step in which ranks wait for each other."""
        self._remove_scratch()
        if self._board is not None:
            self._board.end()

    def _remove_scratch(self) -> None:
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _end_from_outside(self, *_: Any) -> None:
        self._fail("the launcher has ended this process, as it does when another one has ended", is_first_hand=False)

    def _say_verdict(self, cause: str) -> None:
        # Before the ranks have met, nobody knows of rank 0: the first process of each node speaks.
        speaks = self._rank == 0 or (self._board is None and os.environ.get("LOCAL_RANK") == "0")
        # Never released: the timer, the board's thread and the main thread may all come here, for one verdict.
        if speaks and self._is_said.acquire(blocking=False):
            remedy = REMEDIES.get(self._step.partition(",")[0], OTHER_REMEDY)
            # Only numbers that differ speak against the devices; other errors of a training do not.
            if remedy == REMEDIES["exactness"] and AssertionError.__name__ not in cause:
                remedy = OTHER_REMEDY
            if TOO_SLOW in cause:
                remedy += f" {MORE_TIME}"
            print(f"selftest: FAILED at {self._step}. First cause: {cause}\nWhat to do: {remedy}", flush=True)


def _place(thread: threading.Thread) -> tuple[str, bool]:
    """Return the function of the package in which a thread is, and True if it waits for another rank there."""
    assert thread.ident is not None
    package = os.path.dirname(hf_pipetransformer.__file__)
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_stack(sys._current_frames()[thread.ident])
        if frame.f_code.co_filename.startswith(package)
    ]
    code, line = next((code, line) for code, line in frames if code is not guarded.__code__)
    is_waiting = any(code is guarded.__code__ for code, _ in frames)
    return f"{code.co_name} ({os.path.relpath(code.co_filename, package)}, line {line})", is_waiting


def _describe(args: PipeTransformerArguments, topology: Topology) -> str:
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else args.device.type
    backend = torch.distributed.get_backend() if topology.is_distributed else "no backend"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    processes, nodes = counted(topology.world_size, "process", "processes"), counted(len(topology.nodes), "node")
    return f"selftest: {processes} on {nodes}, {device}, {backend}; {versions}"


def _check_groups(topology: Topology) -> str:
    start = time.perf_counter()
    for size in topology.pipeline_sizes:
        topology.groups(Placement(size))
    shapes = ", ".join(f"K={size} x R={topology.world_size // size}" for size in topology.pipeline_sizes)
    return f"groups: {shapes} in {time.perf_counter() - start:.1f} s"


def _measure_bandwidth(topology: Topology) -> dict[str, dict[str, float]]:
    """Measure GB/s by size: messages inside a node and across nodes, bytes that a rank sends in an all-reduce."""
    if topology.world_size == 1:
        return {}
    pairs = {}
    inside = next((node.start for node in topology.nodes if len(node) > 1), None)
    if inside is not None:
        pairs[f"messages inside a node (ranks {inside}, {inside + 1})"] = (inside, inside + 1)
    if len(topology.nodes) > 1:
        one, other = topology.nodes[0].start, topology.nodes[1].start
        pairs[f"messages across nodes (ranks {one}, {other})"] = (one, other)
    found: dict[str, dict[str, float]] = {}
    for size, num_bytes in SIZES.items():
        for what, pair in pairs.items():
            hops, reductions = topology.time_transfers(num_bytes, num_bytes, pair)
            found.setdefault(what, {})[size] = num_bytes / statistics.median(hops) / 1e9
        over_all = found.setdefault(f"all-reduce over {topology.world_size} ranks", {})
        over_all[size] = topology.ring_bytes(num_bytes) / statistics.median(reductions) / 1e9
    return found


def _in_words(speeds: dict[str, float]) -> str:
    return ", ".join(f"{size} at {speed:.2g} GB/s" for size, speed in speeds.items()) + " (medians)"


def _measure_cache(args: PipeTransformerArguments, topology: Topology) -> list[dict[str, float]]:
    """Write and read records in the store of each machine; return MB/s by machine."""
    own = None
    if topology.is_first_here:
        speed = measure_storage(cache_base(args), RECORD, RECORD_TOKENS)
        megabytes = RECORD.record_bytes(RECORD_TOKENS) / 1e6
        own = {"write": megabytes / speed.write, "read": megabytes / speed.read}
    return [speeds for speeds in topology.gather(own) if speeds is not None]


def _make_scratch(topology: Topology) -> Path:
    """Make a folder of one name on every machine, as ranks compare their options."""
    folder = Path(topology.broadcast(tempfile.mkdtemp(prefix="selftest-") if topology.rank == 0 else ""))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Runs:
    """Short trainings of a tiny causal language model, each beside the same in plain PyTorch on this process alone.

    A step takes all samples, so their order makes no difference.
    """

    def __init__(self, args: PipeTransformerArguments, topology: Topology, folder: Path, guard: Guard) -> None:
        self.topology = topology
        self.last: Any = None
        """The trainer of the last run."""
        self._use_cpu, self._device = args.use_cpu, args.device
        self._folder = folder
        self._guard = guard
        self._sizes = topology.pipeline_sizes
        # A layer for each stage of the longest pipeline, and enough of them to freeze half.
        self._num_layers = max(4, self._sizes[-1])
        self._tolerance = 1e-5 if args.device.type == "cpu" else 1e-4  # A GPU sums float32 in another order.

    def check_exactness(self) -> dict[str, float]:
        """Train for every K, and with stages under every schedule; return the largest relative differences."""
        with self._guard.step("exactness, one process"):
            expected = self._plain()
        found = {}
        for size in self._sizes:
            # One stage waits for nobody: all schedules are the same there.
            for schedule in SCHEDULE_NAMES if size > 1 else ("1f1b",):
                name = f"K={size}, {schedule}"
                with self._guard.step(f"exactness, {name}"):
                    found[name] = self._compare(self._ours(size, schedule), expected)
        schedules = f" with {', '.join(SCHEDULE_NAMES)}" if len(self._sizes) > 1 else ""
        sizes = ", ".join(f"K={size}" for size in self._sizes)
        self._guard.say(f"exact: {sizes}{schedules}: {self._words(max(found.values()))}")
        return found

    def check_transition(self) -> dict[str, Any]:
        """Go from the longest pipeline to one stage while half of the layers freeze."""
        before, after = self._layout(self._sizes[-1], 0), self._layout(1, self._num_layers // 2)
        change = f"K={before.pipeline_size} x R={before.num_replicas} to K=1 x R={after.num_replicas}"
        with self._guard.step(f"transition, {change}"):
            plan = self._folder / "plan.jsonl"
            events = [
                {"event": "run", "step": 0, "layout": before.as_event()},
                {"event": "transition", "step": FREEZE_STEP, "to": after.as_event()},
            ]
            if self.topology.is_first_here:
                plan.write_text("".join(json.dumps(event) + "\n" for event in events))
            # No rank reads the plan before it is there.
            self.topology.barrier()
            expected = self._plain(after.num_frozen_layers)
            difference = self._compare(self._ours(before.pipeline_size, "1f1b", layout_plan=str(plan)), expected)
            assert self.last.layout == after, f"the layout is {self.last.layout}, expected {after}"
        frozen = f"{after.num_frozen_layers} of {self._num_layers} layers frozen"
        self._guard.say(f"transition: {change}, {frozen}: {self._words(difference)}")
        return {"change": change, "difference": difference}

    def _words(self, difference: float) -> str:
        return f"losses and gradient norms differ by {difference:.1g} from one process ({self._tolerance:.0e} allowed)"

    def _layout(self, size: int, num_frozen: int) -> Layout:
        blocks = 2 * self._num_layers + 2
        cuts = tuple(blocks * stage // size for stage in range(size + 1))
        return Layout(self._num_layers, num_frozen, size, self.topology.world_size // size, cuts, size, "1f1b")

    def _model(self) -> tuple[Any, list[dict[str, Any]]]:
        num_rows = ROWS_PER_RANK * self.topology.world_size
        # Every process builds the same model and rows, so that each can compute what is expected.
        transformers.set_seed(0)
        # Stages that update themselves share no weights.
        config = transformers.LlamaConfig(
            vocab_size=500, hidden_size=64, num_hidden_layers=self._num_layers, num_attention_heads=4,
            intermediate_size=128, tie_word_embeddings=False,
        )  # fmt: skip
        words = torch.randint(5, 500, (num_rows, 24))
        return transformers.LlamaForCausalLM(config), [{"input_ids": row, "labels": row} for row in words]

    def _plain(self, num_frozen: int = 0) -> list[float]:
        """Train in plain PyTorch on this process alone; return the losses, then the gradient norms."""
        model, rows = self._model()
        model = model.to(self._device).train()
        batch = {name: torch.stack([row[name] for row in rows]).to(self._device) for name in rows[0]}
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
        losses, norms = [], []
        for step in range(NUM_STEPS):
            if step == FREEZE_STEP and num_frozen:
                for part in (model.model.embed_tokens, *model.model.layers[:num_frozen]):
                    part.requires_grad_(False)
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            optimizer.step()
        return [*losses, *norms]

    def _ours(self, size: int, schedule: str, **options: Any) -> list[float]:
        """Train in a pipeline of `size` ranks and its replicas; return the losses, then the gradient norms."""
        reads = abilities_of(schedule).reads
        if "pipeline_token_slices" in reads:
            options["pipeline_token_slices"] = "2"
        if "pipeline_drain_interval" in reads:
            options["pipeline_drain_interval"] = 1  # Otherwise stages use weights of other steps, as they should.
        model, rows = self._model()
        # `max_grad_norm` clips nothing here, but without one Trainer computes no gradient norm.
        values: dict[str, Any] = {
            "output_dir": str(self._folder), "num_train_epochs": NUM_STEPS, "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant", "per_device_train_batch_size": ROWS_PER_RANK, "max_grad_norm": 1e9,
            "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "use_cpu": self._use_cpu, "dataloader_pin_memory": self._device.type == "cuda",
            "pipeline_timeout": self._guard.wait, "ddp_timeout": self._guard.wait,
            "pipeline_parallel_size": str(size), "pipeline_parallel_num_microbatches": str(size),
            "pipeline_schedule": schedule, "freeze_policy": "none", "activation_cache": "off", **options,
        }  # fmt: skip
        self.last = hf_pipetransformer.PipeTransformerTrainer(
            model, PipeTransformerArguments(**values), train_dataset=rows
        )
        # Without a bar Trainer prints each log entry.
        self.last.remove_callback(PrinterCallback)
        self.last.train()
        log = [entry for entry in self.last.state.log_history if "loss" in entry]
        return [float(entry[name]) for name in ("loss", "grad_norm") for entry in log]

    def _compare(self, found: Sequence[float], expected: Sequence[float]) -> float:
        assert len(found) == len(expected), f"{len(found)} losses and gradient norms, expected {len(expected)}"
        differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
        too_large = [difference for difference in differences if not difference <= self._tolerance]  # NaN too.
        assert not too_large, (
            f"losses or gradient norms differ by {too_large[0]:.3g} (relative) from those of one process, expected at "
            f"most {self._tolerance:.0e}"
        )
        return max(differences)
