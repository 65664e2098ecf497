"""Speed, memory, gradient norms and the trace of a step, recorded for the report of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch

from hf_pipetransformer.engine.timing import StepTrace
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.report.console import NORM_OF
from hf_pipetransformer.report.files import create
from hf_pipetransformer.splitters.base import main_input_of


if TYPE_CHECKING:
    from hf_pipetransformer.elastic.controller import LayoutController
    from hf_pipetransformer.runtime.stage import Stage
    from hf_pipetransformer.training.context import TrainingContext


@dataclass
class Progress:
    """Speed, memory and gradient norms of the steps between two log entries, for the events file.

    Nothing is computed or read from the device before `report`.
    """

    context: TrainingContext
    controller: LayoutController
    _steps: list[tuple[float, float, float]] = field(default_factory=list, init=False)
    """Seconds, samples and tokens of each step."""
    _tokens_before: int = field(default=0, init=False)

    def begin_step(self) -> None:
        """Note what was counted before a step."""
        self._tokens_before = self.context.trainer.state.num_input_tokens_seen

    def add_step(self, stage: Stage, seconds: float) -> None:
        """Count the samples and tokens of a step that has ended."""
        # Every rank of a pipeline counts the samples of the whole pipeline.
        samples = stage.settings.meter.num_samples / stage.layout.pipeline_size
        self._steps.append((seconds, samples, self._tokens_of_step(stage)))

    def _tokens_of_step(self, stage: Stage) -> float:
        """Return this rank's share of the step's tokens, by Trainer's own rule where Trainer counts them."""
        trainer = self.context.trainer
        if main_input_of(trainer.model) != "input_ids":
            return 0.0
        if trainer.args.include_num_input_tokens_seen == "no":
            # Padding counts too. Later stages do not get the input itself.
            return float(stage.settings.meter.num_tokens) if stage.groups.is_first else 0.0
        # Already the sum over all ranks.
        seen: int = trainer.state.num_input_tokens_seen
        return (seen - self._tokens_before) / self.context.topology.world_size

    def report(self, stage: Stage) -> dict[str, float]:
        """Write a progress event of the steps since the last one, and return its scalars for the log.

        A layout that Trainer has too logs what Trainer logs. Collective: call on every rank between two steps.
        """
        if not self._steps:
            return {}
        layout, groups, num_steps = stage.layout, stage.groups, len(self._steps)
        own_seconds, own_samples, own_tokens = map(sum, zip(*self._steps, strict=True))
        self._steps = []
        parts = stage.settings.meter.medians()
        own = {
            "stage": groups.position,
            "replica": groups.replica,
            "samples": own_samples,
            "tokens": own_tokens,
            "seconds": own_seconds,
            "memory_bytes": _memory_in_use(stage.settings.device),
            "pipeline_s": parts.get("pipeline"),
            "busy_s": parts["forward"] + parts["backward"] if parts else None,
        }
        ranks = self.context.topology.gather(own)
        # Of all ranks' clocks, so that every rank logs the same.
        seconds = max(rank.pop("seconds") for rank in ranks)
        speed = sum(rank.pop("samples") for rank in ranks) / seconds
        tokens = sum(rank.pop("tokens") for rank in ranks) / seconds
        bubble = bubble_share(ranks, layout.pipeline_size)
        squares = self.controller.last_squares
        # Layers, head, embeddings.
        norms = None if squares is None else squares.sqrt().tolist()
        self.context.journal.write(
            "progress",
            num_steps=num_steps,
            step_s=seconds / num_steps,
            samples_per_second=speed,
            tokens_per_second=tokens or None,
            bubble_share=bubble,
            layout=layout.as_event(),
            ranks=ranks,
            memory="device" if stage.settings.device.type == "cuda" else "host",
            gradient_norms=norms,
        )
        if not layout.as_scalars():
            return {}
        scalars = {"samples_per_second": speed, "memory_gb": max(rank["memory_bytes"] for rank in ranks) / 1e9}
        if tokens:
            scalars["tokens_per_second"] = tokens
        if bubble is not None:
            scalars["bubble_share"] = bubble
        if norms is not None and self.controller.norms is not None:
            scalars |= named_norms(norms)
        return scalars


def named_norms(norms: Sequence[float]) -> dict[str, float]:
    """Name gradient norms for trackers, without parts that have none: frozen layers, or a head under adapters.

    Args:
        norms: of the layers, the head and the embeddings, `(num_layers + 2,)`.
    """
    *layers, head, embeddings = norms
    named = {"embeddings": embeddings, **{f"layer_{at}": norm for at, norm in enumerate(layers, 1)}, "head": head}
    return {f"{NORM_OF}{name}": norm for name, norm in named.items() if norm}


def bubble_share(ranks: Sequence[Mapping[str, Any]], pipeline_size: int) -> float | None:
    """Return the share of the pipelines' time that ranks wait in; None if it was not measured on every rank.

    A pipeline of one rank waits for no other.

    Args:
        ranks: `busy_s`, the seconds of a rank's computations, and `pipeline_s`, those that they last with all waits.
    """
    if pipeline_size == 1:
        return 0.0
    if not all(rank["pipeline_s"] for rank in ranks):
        return None
    longest = max(rank["pipeline_s"] for rank in ranks)
    return float(max(0.0, 1 - sum(rank["busy_s"] for rank in ranks) / (longest * len(ranks))))


def _memory_in_use(device: torch.device) -> int:
    """Return the bytes of the most memory used on a GPU so far, or of the host memory that the process uses now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


@dataclass
class Tracer:
    """Writer of the trace of step `pipeline_trace_step`, which counts from 0."""

    context: TrainingContext
    _is_written: bool = field(default=False, init=False)

    def begin_step(self, stage: Stage) -> None:
        """Begin the trace if this step is the one. Collective then: the ranks agree on when it began."""
        if self.context.args.pipeline_trace_step != self.context.trainer.state.global_step:
            return
        # Not `perf_counter`, whose zero differs from machine to machine.
        begun = time.time()
        earliest = min(self.context.topology.gather(begun))
        stages = tuple(stage.layout.places.stages_of(stage.groups.position))
        # The gather takes time too, so the clock is asked again.
        start_s = time.time() - earliest
        stage.settings.meter.trace = StepTrace(stage.settings.device, stages, start_s)

    def end_step(self, stage: Stage) -> None:
        """Write the trace of all ranks on rank 0, after the traced step. Collective then."""
        trace, stage.settings.meter.trace = stage.settings.meter.trace, None
        if trace is None:
            return
        topology, args = self.context.topology, self.context.args
        of_ranks = topology.gather(trace.events(topology.rank))
        self._is_written = True
        if topology.rank == 0:
            path = os.path.join(args.output_dir, f"trace_step_{args.pipeline_trace_step}.json")
            os.makedirs(args.output_dir, exist_ok=True)
            with create(path) as file:
                json.dump({"traceEvents": [event for each in of_ranks for event in each]}, file)
            announce(
                f"Step {args.pipeline_trace_step} is traced in {path}: open it in ui.perfetto.dev or chrome://tracing."
            )

    def end(self) -> None:
        """Warn if no step was traced although one was asked for."""
        step = self.context.args.pipeline_trace_step
        if step is not None and not self._is_written and self.context.topology.rank == 0:
            logger.warning(
                f"pipeline_trace_step={step}: this training did not come to that step, which counts from 0, so no "
                f"trace was written. It ended after {self.context.trainer.state.global_step} steps."
            )
