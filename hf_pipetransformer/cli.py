"""`hf-pipetransformer`: look at a schedule before paying for devices, hand a checkpoint over to plain Trainer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_pipetransformer.pipeline.schedules import SCHEDULES, build_table
from hf_pipetransformer.plain_checkpoint import export_checkpoint
from hf_pipetransformer.simulator import Durations, draw, simulate


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command line."""
    parser = argparse.ArgumentParser(prog="hf-pipetransformer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("simulate", help="draw the timeline of a schedule with equal stages")
    drawing.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    drawing.add_argument("--stages", type=int, required=True, help="pipeline length K")
    drawing.add_argument("--microbatches", type=int, required=True, help="micro-batches M")
    drawing.add_argument("--backward", type=float, default=2.0, help="time of a backward; a forward takes 1")
    drawing.add_argument("--hop", type=float, default=0.0, help="time of a message between neighbours")
    drawing.add_argument("--frozen_stages", type=int, default=0, help="stages at the bottom that run forward only")
    exporting = commands.add_parser("export-checkpoint", help="write a checkpoint that plain Trainer resumes")
    exporting.add_argument("checkpoint", help="a checkpoint-N of a pipeline")
    exporting.add_argument("output", help="folder to write, such as outputs/checkpoint-N")
    options = parser.parse_args(argv)
    if options.command == "export-checkpoint":
        for text in export_checkpoint(options.checkpoint, options.output):
            print(text)
        print(f"{options.output} can be resumed by transformers.Trainer.")
        return
    stages = options.stages
    table = build_table(options.schedule, stages, options.microbatches, options.frozen_stages)
    timeline = simulate(table, Durations((1.0,) * stages, (options.backward,) * stages, options.hop))
    print(draw(timeline))
    print(f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble")
