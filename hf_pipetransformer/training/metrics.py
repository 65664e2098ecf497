"""Metrics that `compute_loss` records, combined over batch parts and ranks, and the summary of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer
from transformers.trainer_utils import denumpify_detensorize

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.transfers import pack
from hf_pipetransformer.compat import trl_compat
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.engine.wrappers import runs_again
from hf_pipetransformer.report import duration
from hf_pipetransformer.schedules.layout import Layout, counted


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups, Topology
    from hf_pipetransformer.training.context import TrainingContext


Part = tuple[int, dict[str, tuple[float, int]]]
"""Batch index of a part of a batch, and the part's metrics by name, each with the number of items it averages over."""

_OF_EXTREMES: dict[str, Callable[[list[float]], float]] = {"min_": min, "max_": max}
"""Beginnings of the names of metrics that are no averages."""


def averages(parts: list[Part]) -> dict[str, float]:
    """Average each metric over batches, and within a batch over its items, as if no batch had been split."""
    found: dict[str, dict[int, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for batch, values in parts:
        for name, value in values.items():
            found[name][batch].append(value)
    return {
        name: sum(_of_batch(name, values) for values in batches.values()) / len(batches)
        for name, batches in found.items()
    }


def _of_batch(name: str, parts: list[tuple[float, int]]) -> float:
    choose = _OF_EXTREMES.get(name[:4])
    # The least of a batch's parts is that of the batch, where a mean of them would be neither.
    if choose is not None:
        return choose([value for value, _ in parts])
    # No part has a weight if the batch has no label token.
    return sum(value * weight for value, weight in parts) / max(sum(weight for _, weight in parts), 1)


@contextmanager
def loss_apart(trainer: Trainer) -> Iterator[trl_compat.Metrics]:
    """Wrap a loss of some samples as if there were no other process; its tokens are not counted.

    Yields what it records as metrics, none of which reaches the trainer's: empty if the trainer has none.
    """
    recorded = trl_compat.metrics(trainer) or {}
    kept = dict(recorded)
    apart: trl_compat.Metrics = {mode: defaultdict(list) for mode in recorded}
    recorded.update(apart)
    try:
        # A loss that gathers would wait for the other stages. Of replicas with losses of their own it may want it.
        gathers = not recorded and trainer.args.pipeline_loss == "replica"
        with trainer.accelerator.as_one_process(gathers), trl_compat.kept_token_count(trainer):
            yield apart
    finally:
        recorded.update(kept)


@dataclass
class MetricAccumulator:
    """Metrics that batch parts recorded, on the ranks that compute losses."""

    context: TrainingContext
    _batch: int = field(default=0, init=False)
    _rows_per_sample: int = field(default=1, init=False)
    _parts: dict[str, list[Part]] = field(default_factory=lambda: {"train": [], "eval": []}, init=False)

    def begin_batch(self, inputs: SampleBatch, counts_tokens: bool = False) -> None:
        """Start the next batch, and count its tokens if asked to: its parts overlap, so they cannot be counted."""
        self._batch += 1
        self._rows_per_sample = inputs.rows
        if counts_tokens and inputs and trl_compat.metrics(self.context.trainer) is not None:
            mask, tokens = inputs.get("attention_mask"), inputs.get("input_ids")
            num_tokens = int(mask.sum()) if mask is not None else 0 if tokens is None else tokens.numel()
            trl_compat.count_tokens_read(self.context.trainer, num_tokens)

    def mark(self) -> Any:
        """Return what `rewind` goes back to."""
        # Copies, since the lists grow on.
        return self._batch, {mode: list(parts) for mode, parts in self._parts.items()}

    def rewind(self, mark: Any) -> None:
        """Drop what was recorded since `mark`."""
        self._batch, self._parts = mark

    @contextmanager
    def record_part(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Wrap the loss of one batch part; a stage without a loss leaves with an exception and records nothing."""
        with loss_apart(self.context.trainer) as apart:
            yield
        # None of a trainer that records no metrics, as TRL's do. Of a recomputation the first run recorded them.
        if not apart or runs_again():
            return
        weight = trl_compat.metric_weights(SampleBatch(inputs, self._rows_per_sample))
        for mode, recorded in apart.items():
            values = {
                name: (values[-1], weight(name))
                for name, values in recorded.items()
                # The tokens of the whole batch are counted by `begin_batch`.
                if values and name != "num_tokens"
            }
            if values:
                self._parts[mode].append((self._batch, values))

    def publish(self, mode: str, groups: PipelineGroups) -> None:
        """Write the averages over all ranks to the trainer's metrics. Collective: call on every rank."""
        self.context.gains.share(groups)
        recorded = trl_compat.metrics(self.context.trainer)
        if recorded is None:
            return
        found = self.context.topology.gather(
            {"parts": self._parts[mode], "tokens": trl_compat.num_tokens_read(self.context.trainer)}
        )
        self._parts[mode] = []
        together = averages([part for each in found for part in each["parts"]])
        # Lists of one value: TRL logs the mean of what it has recorded since the last entry.
        recorded[mode].update({name: [value] for name, value in together.items()})
        if together and trl_compat.num_tokens_read(self.context.trainer) is not None:
            recorded[mode]["num_tokens"] = [sum(each["tokens"] for each in found)]


def on_first_rank(compute_metrics: Any, topology: Topology) -> Callable[..., Any]:
    """Return a function that calls `compute_metrics` on rank 0 alone and gives its result to every rank.

    Collective: call it on every rank. An error of `compute_metrics` is raised on rank 0, and an error that names it
    elsewhere. On rank 0 the function raises ValueError if `compute_metrics` communicates with other ranks, or returns
    what cannot be sent to them.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        refusal: Exception | None = None
        answer: dict[str, Any] = {}
        if topology.rank == 0:
            try:
                with _NoCollectives():  # type: ignore[no-untyped-call]
                    # As Trainer does with the result: numbers of numpy could not be sent.
                    metrics = denumpify_detensorize(compute_metrics(*args, **kwargs))
                answer["metrics"] = _sendable(metrics)
            except Exception as error:
                refusal, answer = error, {"error": f"{type(error).__name__}: {error}"}
        # Also after an error, which is sent as the answer: the other ranks wait here.
        answer = topology.broadcast(answer)
        if refusal is not None:
            raise refusal
        if "error" in answer:
            raise PipelineError(f"compute_metrics failed on rank 0: {answer['error']}")
        return answer["metrics"]

    return compute


class _NoCollectives(TorchDispatchMode):
    """Refusal of communication between ranks, which the other ranks would not take part in."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise ValueError(
                f"compute_metrics runs on rank 0 only and called {function} of torch.distributed, for which it would "
                "wait forever. Compute metrics from what it is given, which is all samples (torchmetrics: "
                "sync_on_compute=False), or set pipeline_compute_metrics='every_rank'."
            )
        return function(*args, **(kwargs or {}))


def _sendable(metrics: Any) -> Any:
    """Return metrics if they can be sent, else raise an error that names the first that cannot."""
    for name, value in metrics.items() if isinstance(metrics, dict) else [("result", metrics)]:
        try:
            pack(value)
        except TypeError:
            raise ValueError(
                f"compute_metrics returned {type(value).__name__} as {name!r}, which cannot be sent from rank 0 to "
                "the other ranks: expected numbers, strings, None, tensors, or dicts and lists of these. Return one "
                "of them, or set pipeline_compute_metrics='every_rank'."
            ) from None
    return metrics


@dataclass
class Segment:
    """Consecutive steps under one layout; only the number of micro-batches M may change.

    `predicted` is the planned seconds per step, None without a plan; `seconds` has the measured ones.
    """

    layout: Layout
    predicted: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds per step."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 2]


@dataclass
class Summary:
    """Time per step and layout, without evaluations and checkpoints between steps.

    `predicted` is the plan's seconds for a step of the layout that begins.
    """

    predicted: float | None = None
    stretches: list[Segment] = field(default_factory=list, init=False)
    num_hits: int = field(default=0, init=False)
    num_misses: int = field(default=0, init=False)
    bytes_stored: int = field(default=0, init=False)

    def add_reads(self, num_hits: int, num_misses: int, bytes_stored: int) -> None:
        """Add an epoch's cache hits and misses; `bytes_stored` are those in the cache at its end."""
        self.num_hits += num_hits
        self.num_misses += num_misses
        self.bytes_stored = bytes_stored

    def add_step(self, layout: Layout, seconds: float) -> None:
        """Add a step that has ended."""
        # A trial of micro-batches changes the layout from step to step; such steps count as one stretch.
        last = self.stretches[-1] if self.stretches else None
        if last is None or _kind(last.layout) != _kind(layout):
            last = Segment(layout, self.predicted)
            self.stretches.append(last)
        last.seconds.append(seconds)

    @property
    def num_steps(self) -> int:
        return sum(len(stretch.seconds) for stretch in self.stretches)

    @property
    def seconds(self) -> float:
        return sum(sum(stretch.seconds) for stretch in self.stretches)

    @property
    def hit_rate(self) -> float | None:
        """Share of all reads that the cache served; None if nothing was read from it."""
        reads = self.num_hits + self.num_misses
        return self.num_hits / reads if reads else None

    def as_results(self, last_step: int, num_frozen: int) -> dict[str, Any]:
        """Return JSON values for `train_results.json`.

        Args:
            last_step: optimizer steps of the run at its end, with those before it was resumed.
            num_frozen: frozen layers at the end.
        """
        step, layouts = last_step - self.num_steps, []
        for stretch in self.stretches:
            layout, num_steps = stretch.layout, len(stretch.seconds)
            layouts.append(
                {
                    "step": step,
                    "num_steps": num_steps,
                    "seconds": sum(stretch.seconds),
                    "pipeline_stages": layout.pipeline_size,
                    "pipeline_replicas": layout.num_replicas,
                    "frozen_layers": layout.num_frozen_layers,
                    "cached_layers": layout.cache_level,
                }
            )
            step += num_steps
        return {
            "step_seconds": self.seconds,
            "saved_seconds": self.saved_seconds(),
            "layouts": layouts,
            "frozen_layers": num_frozen,
            "cache_hit_rate": self.hit_rate,
            "cache_bytes": self.bytes_stored,
        }

    def saved_seconds(self) -> float | None:
        """Return the seconds saved against the first layout's step time; None if the layout never changed."""
        if len(self.stretches) < 2:
            return None
        first, *later = self.stretches
        return sum(first.median * len(stretch.seconds) - sum(stretch.seconds) for stretch in later)

    def in_words(self) -> str:
        """Describe the time per layout, the hit rate, and the time that freezing saved."""
        if not self.stretches:
            return ""
        lines = [f"{counted(self.num_steps, 'step')} in {self.seconds:.1f} s:"]
        for stretch in self.stretches:
            layout = stretch.layout
            stored = f", {layout.cache_level} of them cached" if layout.cache_level else ""
            predicted = "" if stretch.predicted is None else f" (predicted: {duration(stretch.predicted)})"
            lines.append(
                f"  {counted(len(stretch.seconds), 'step')} of {duration(stretch.median)}{predicted} with "
                f"{layout.num_frozen_layers} of {layout.num_layers} layers frozen{stored}, "
                f"{layout.shape_in_words}"
            )
        if self.num_hits:
            reads = self.num_hits + self.num_misses
            lines.append(f"  Cache: {self.num_hits:,} of {reads:,} reads were hits ({self.hit_rate:.0%}).")
        saved = self.saved_seconds()
        if saved is not None:
            first, word = self.stretches[0], "less" if saved >= 0 else "more"
            lines.append(
                f"  {abs(saved):.1f} s {word} than {counted(self.num_steps, 'step')} of {duration(first.median)}, "
                "as before the first change."
            )
        return "\n".join(lines)


def _kind(layout: Layout) -> tuple[int, ...]:
    return (layout.pipeline_size, layout.num_replicas, layout.num_frozen_layers, layout.cache_level)
