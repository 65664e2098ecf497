"""`hf-pipetransformer`: draw a schedule, hand a checkpoint over to plain Trainer, look after activation stores."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import hf_pipetransformer
from hf_pipetransformer.pipeline.schedules import SCHEDULE_NAMES, find_schedule
from hf_pipetransformer.placement import Placement
from hf_pipetransformer.simulator import draw, simulate_equal


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command line."""
    parser = argparse.ArgumentParser(prog="hf-pipetransformer", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {hf_pipetransformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("simulate", help="draw the timeline of a schedule with equal stages")
    drawing.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b")
    drawing.add_argument("--stages", type=int, required=True, help="ranks of the pipeline K, with equal stages")
    drawing.add_argument("--chunks", type=int, help="stages on each rank V; the schedule's own number by default")
    drawing.add_argument("--microbatches", type=int, required=True, help="micro-batches M")
    drawing.add_argument("--backward", type=float, default=2.0, help="time of a backward; a forward takes 1")
    drawing.add_argument("--hop", type=float, default=0.0, help="time of a message between neighbours")
    drawing.add_argument("--frozen_stages", type=int, default=0, help="stages at the bottom that run forward only")
    drawing.set_defaults(run=_simulate)
    exporting = commands.add_parser("export-checkpoint", help="write a checkpoint that plain Trainer resumes")
    exporting.add_argument("checkpoint", help="a checkpoint-N of a pipeline")
    exporting.add_argument("output", help="folder to write, such as outputs/checkpoint-N")
    exporting.set_defaults(run=_export_checkpoint)
    caching = commands.add_parser("cache", help="list, verify or delete the activation stores of earlier runs")
    caching.add_argument("action", choices=("list", "verify", "prune"))
    caching.add_argument("--activation_cache_dir", help="as in the runs; by default in the temporary folder")
    caching.add_argument("--kept", action="store_true", help="prune: also the stores that are meant to be kept")
    caching.set_defaults(run=_cache)
    options = parser.parse_args(argv)
    options.run(options)


def _simulate(options: argparse.Namespace) -> None:
    schedule, size = find_schedule(options.schedule), options.stages
    default = schedule.default_chunks if size > 1 else 1
    num_chunks = default if options.chunks is None else options.chunks
    shape = options.microbatches, options.frozen_stages, options.backward, options.hop
    try:
        timeline = simulate_equal(schedule, Placement(size, num_chunks, schedule.placement), *shape)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(draw(timeline))
    print(f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble")


def _export_checkpoint(options: argparse.Namespace) -> None:
    from hf_pipetransformer.plain_checkpoint import export_checkpoint  # Takes torch, and seconds.

    for text in export_checkpoint(options.checkpoint, options.output):
        print(text)
    print(f"{options.output} can be resumed by transformers.Trainer.")


def _cache(options: argparse.Namespace) -> None:
    """What is damaged, or a folder that cannot be trusted, ends the command with an error."""
    from hf_pipetransformer.autocache.folder import default_base
    from hf_pipetransformer.autocache.inspection import list_stores, prune_stores, verify_stores

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
