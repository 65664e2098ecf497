"""`hf-pipetransformer`: plan a run, draw a schedule, export a checkpoint for Trainer, manage activation stores."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

import hf_pipetransformer
from hf_pipetransformer.planning.simulator import draw, equal_durations, simulate, steady_seconds
from hf_pipetransformer.schedules import SCHEDULE_NAMES, find_schedule, schedules_that
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.weight_kinds import find_weights


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="hf-pipetransformer", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {hf_pipetransformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("simulate", help="draw the timeline of a schedule with equal stages")
    drawing.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b")
    drawing.add_argument("--stages", type=int, required=True, help="ranks of the pipeline K, with equal stages")
    drawing.add_argument("--chunks", type=int, help="stages on each rank V; the schedule's own number by default")
    drawing.add_argument("--microbatches", type=int, required=True, help="micro-batches M")
    drawing.add_argument("--backward", type=float, default=2.0, help="time of a backward; a forward takes 1")
    drawing.add_argument("--hop", type=float, default=0.0, help="time of a message between neighboring ranks")
    drawing.add_argument("--frozen_stages", type=int, default=0, help="stages at the bottom that run forward only")
    drawing.add_argument("--weights", help="async_1f1b: weights that passes use, as in pipeline_weights")
    drawing.add_argument("--step_microbatches", type=int, help="async_1f1b: micro-batches of a step, 1 by default")
    drawing.add_argument("--update", type=float, help="async_1f1b: time of a stage's update, 0.5 by default")
    drawing.set_defaults(run=_simulate)
    exporting = commands.add_parser("export-checkpoint", help="write a checkpoint that plain Trainer resumes")
    exporting.add_argument("checkpoint", help="a checkpoint-N of a pipeline")
    exporting.add_argument("output", help="folder to write, such as outputs/checkpoint-N")
    exporting.set_defaults(run=_export_checkpoint)
    planning = commands.add_parser("plan", help="estimate memory and time of a run from the model's config alone")
    planning.add_argument("model", help="folder or name with the config.json of a model; weights are not loaded")
    planning.add_argument("--processes", type=int, required=True, help="devices of the run, one process each")
    planning.add_argument("--device_memory", type=float, required=True, help="memory of a device, in GB (1e9 bytes)")
    planning.add_argument("--processes_per_node", type=int, help="devices of a node; all by default")
    planning.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence, 512 by default")
    planning.add_argument("--dtype", help="dtype of the weights; the config's by default")
    planning.add_argument("--lora_rank", type=int, help="train LoRA adapters of this rank on all linear layers")
    planning.add_argument("--device_tflops", type=float, default=100.0, help="TFLOP/s that a device reaches")
    planning.add_argument("--bandwidth", type=float, default=25.0, help="GB/s between two devices")
    planning.add_argument("--json", action="store_true", help="print JSON instead of a table")
    planning.epilog = "Options of a run follow, such as --per_device_train_batch_size 4 --optim adafactor."
    planning.set_defaults(run=_plan)
    caching = commands.add_parser("cache", help="list, verify or delete the activation stores of earlier runs")
    caching.add_argument("action", choices=("list", "verify", "prune"))
    caching.add_argument("--activation_cache_dir", help="as in the runs; by default in the temporary folder")
    caching.add_argument("--kept", action="store_true", help="prune: also the stores that are meant to be kept")
    caching.set_defaults(run=_cache)
    options, others = parser.parse_known_args(argv)
    if options.command == "plan":
        options.of_run = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.run(options)


def _simulate(options: argparse.Namespace) -> None:
    schedule, size = find_schedule(options.schedule), options.stages
    num_chunks = schedule.abilities.on(size).default_chunks if options.chunks is None else options.chunks
    placement = Placement(size, num_chunks, schedule.placement)
    try:
        table = schedule.table(size, options.microbatches, num_chunks, options.frozen_stages)
        timeline = simulate(table, equal_durations(placement, options.backward, options.hop), placement)
        if schedule.abilities.overlaps_steps:
            _simulate_window(options)
            return
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name in ("weights", "step_microbatches", "update"):
        if getattr(options, name) is not None:
            needed = schedules_that(lambda abilities: abilities.overlaps_steps)
            raise SystemExit(f"--{name} is for {' or '.join(needed)}, found {schedule.name}.")
    print(draw(timeline))
    print(f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble")


def _simulate_window(options: argparse.Namespace) -> None:
    """Draw an asynchronous schedule from one drain to the next, and print what each rank stores."""
    kind = find_weights(options.weights or "pipeoptim")
    placement, frozen = Placement(options.stages), options.frozen_stages
    step_size = 1 if options.step_microbatches is None else options.step_microbatches
    if step_size < 1:
        raise ValueError(f"--step_microbatches must be 1 or more, found {step_size}.")
    kind.check(options.stages, step_size)
    whole, rest = divmod(options.microbatches, step_size)
    update = 0.5 if options.update is None else options.update
    updates = tuple(0.0 if stage < frozen else update for stage in range(options.stages))
    durations = replace(equal_durations(placement, options.backward, options.hop), update=updates)
    table = window_table(placement, frozen, (step_size,) * whole + ((rest,) if rest else ()))
    timeline = simulate(table, durations, placement)
    print(draw(timeline))
    print(f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble: the window fills and drains once")
    print(f"{steady_seconds(placement, frozen, step_size, durations):g} units of time a step in a long window")
    held = find_schedule(options.schedule).in_flight(options.stages, 1, first_active_stage=frozen)
    for stage, in_flight in enumerate(held):
        copies = kind.copies(stage, options.stages, step_size) if stage >= frozen else 1
        print(f"rank {stage}: micro-batches in flight {in_flight}, copies of its weights {copies} ({kind.name})")
    if kind.direction == "adam":
        print(f"{kind.name} keeps two moments a weight beside an optimizer that has none of Adam's")


def _plan(options: argparse.Namespace) -> None:
    """Print an estimate; exit with an error if the run fits on no number of stages."""
    import torch  # Imports of seconds.
    from transformers import HfArgumentParser

    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.startup.estimate import Machine, as_json, batch_on_meta, build_on_meta, estimate, in_words

    try:
        given = ["--output_dir", "planned", "--use_cpu", "--report_to", "none", *options.of_run]
        (args,) = HfArgumentParser([PipeTransformerArguments]).parse_args_into_dataclasses(given)
        local = options.processes_per_node or options.processes
        if options.processes < 1 or local < 1 or options.processes % local:
            raise ValueError(f"--processes {options.processes} is no multiple of --processes_per_node {local}.")
        dtype = getattr(torch, options.dtype or "", None)
        if options.dtype and not isinstance(dtype, torch.dtype):
            raise ValueError(f"--dtype {options.dtype}: expected a dtype of torch, such as bfloat16.")
        machine = Machine(
            options.processes,
            1e9 * options.device_memory,
            local,
            1e12 * options.device_tflops,
            1e9 * options.bandwidth,
        )
        model = build_on_meta(options.model, dtype, options.lora_rank)
        found = estimate(model, batch_on_meta(model, options.sequence_length), args, machine)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(as_json(found)) if options.json else in_words(found))
    if not found.chosen.fits:
        raise SystemExit(1)


def _export_checkpoint(options: argparse.Namespace) -> None:
    from hf_pipetransformer.state.plain_checkpoint import export_checkpoint  # Imports torch, which takes seconds.

    for text in export_checkpoint(options.checkpoint, options.output):
        print(text)
    print(f"{options.output} can be resumed by transformers.Trainer.")


def _cache(options: argparse.Namespace) -> None:
    """List, verify or delete activation stores; exit with an error for a damaged store or an untrusted folder."""
    from hf_pipetransformer.cache.folder import default_base, list_stores, prune_stores, verify_stores

    base, is_sound = options.activation_cache_dir or default_base(), True
    try:
        if options.action == "list":
            lines = list_stores(base)
        elif options.action == "verify":
            lines, is_sound = verify_stores(base)
        else:
            lines = prune_stores(base, options.kept)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    none = f"No activation store under {base}" + (" to delete." if options.action == "prune" else ".")
    print("\n".join(lines) or none)
    if not is_sound:
        raise SystemExit(1)
