"""Join what enters the head, over the micro-batches and replicas of a batch, so that one loss sees all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils import recursively_apply

from hf_pipetransformer.comm.transfers import all_gather_trees, gather_rows
from hf_pipetransformer.data.batches import Axis, SampleBatch, has_samples, take_samples


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups
    from hf_pipetransformer.engine.program import MicroBatch
    from hf_pipetransformer.runtime.stage import StageSettings


class BatchesDifferError(ValueError):
    """The batches of the replicas have other shapes, so that one loss cannot see them all."""


T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Joined:
    """Samples of a batch at the entrance of the head, of one replica or of all.

    Args:
        entering: activation that enters the head, `(batch, seq, hidden)`.
        inputs: the batch.
        share: this replica's share of the loss, which all replicas compute.
        own_rows: returns the rows of this replica from a tensor with those of `entering`.
        cut: cuts the gradient of `entering`, times that share, into those of the parts that were joined.
    """

    entering: torch.Tensor
    inputs: SampleBatch
    share: float = 1.0
    own_rows: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    cut: Callable[[torch.Tensor], list[torch.Tensor]] = lambda gradient: [gradient]

    def own_outputs(self, output: Any) -> Any:
        """Return this replica's rows of what the head made of `entering`.

        What has no row for each joined sample, such as the loss, is of all replicas, and stays as it is.
        """
        num_rows = len(self.entering)
        return recursively_apply(
            lambda each: self.own_rows(each) if each.dim() and len(each) == num_rows else each, output
        )


@dataclass(frozen=True)
class BatchOfAll:
    """Batches of all replicas as one.

    Args:
        sizes: samples of each replica that has any.
        number: place of this replica among these.
        first: the first replica that has any.
    """

    inputs: SampleBatch
    sizes: list[int]
    number: int
    first: int = 0

    def own(self, inputs: SampleBatch) -> SampleBatch:
        """Return this replica's samples of a batch of all."""
        start = sum(self.sizes[: self.number])
        return take_samples(inputs, slice(start, start + self.sizes[self.number]))


def join_parts(
    inputs: SampleBatch,
    parts: Sequence[MicroBatch],
    entered: Tensors,
    replicas: ReplicaJoin | None = None,
    of_all: BatchOfAll | None = None,
) -> Joined:
    """Join what entered the head in the parts of a batch. Collective over the replicas, if they are joined.

    Args:
        inputs: the batch of this replica.
        parts: its micro-batches, or their token slices.
        replicas: joins the batches of all replicas too; None to leave each its own loss.
        of_all: batch of all replicas, if they have exchanged theirs before.
    """
    slices = _slices_of(parts, entered)
    sizes = [SampleBatch(part.inputs, inputs.rows).size for part, *_ in _slices_of(parts, parts)]
    rows = [torch.cat(own, dim=1) if len(own) > 1 else own[0] for own in slices]
    axis = Axis.of(inputs, sizes)
    found = Joined(rows[0] if len(rows) == 1 else axis.join(rows), inputs)
    found = found if replicas is None else replicas.join(found, of_all)

    def cut(gradient: torch.Tensor) -> list[torch.Tensor]:
        # Each replica computes the loss of all, and adds its share of the head's gradient. What enters the head has
        # only the rows of one of them, which gets the whole gradient.
        own = axis.cut(found.own_rows(gradient) / found.share, rows)
        of_slices = [row.split([each.shape[1] for each in of], 1) for row, of in zip(own, slices, strict=True)]
        return [part for parts in of_slices for part in parts] if len(slices) < len(entered) else own

    return replace(found, cut=cut)


def _slices_of(parts: Sequence[MicroBatch], values: Sequence[T]) -> list[list[T]]:
    """Group what belongs to the token slices of a micro-batch; without slices each is alone."""
    places = [part.index if part.place is None else part.place.batch_slice for part in parts]
    pairs = groupby(zip(places, values, strict=True), key=lambda pair: pair[0])
    return [[value for _, value in own] for _, own in pairs]


@dataclass(frozen=True)
class ReplicaJoin:
    """Join over the replicas of the last stage; `placeholders` name the entries that the head does not read."""

    groups: PipelineGroups
    placeholders: frozenset[str]

    def exchange(self, inputs: SampleBatch) -> BatchOfAll:
        """Return the batches of all replicas as one. Collective: call on every replica's rank of a position.

        Raises:
            BatchesDifferError: they do not fit together.
        """
        return self._joined(self._exchange([], inputs)[1])

    def _joined(self, found: Sequence[SampleBatch]) -> BatchOfAll:
        # Replicas without samples are not in the join, so that they do not count.
        batches = [batch for batch in found if batch]
        sizes = [batch.size for batch in batches]
        number, first = sum(map(bool, found[: self.groups.replica])), [bool(batch) for batch in found].index(True)
        return BatchOfAll(_concatenated(batches, Axis.of(batches[0], sizes)), sizes, number, first)

    def join(self, own: Joined, of_all: BatchOfAll | None = None) -> Joined:
        """Join the batches of all replicas, unless `of_all` has them.

        Collective: call on every replica's last stage; `take_part` where a replica has no samples.

        Raises:
            BatchesDifferError: the batches of the replicas do not fit together.
        """
        shapes, found = self._exchange(list(own.entering.shape), own.inputs if of_all is None else SampleBatch())
        gathered = self._gather(own.entering, shapes)
        of_all = self._joined(found) if of_all is None else of_all
        parts = [each for each, shape in zip(gathered, shapes, strict=True) if shape]
        axis, number, share = Axis.of(of_all.inputs, of_all.sizes), of_all.number, 1.0 / len(parts)
        return Joined(axis.join(parts), of_all.inputs, share, lambda tensor: axis.cut(tensor, parts)[number])

    def take_part(self, settings: StageSettings) -> None:
        """Take part in the exchanges of `join` without samples, for which the other replicas wait."""
        shapes, _ = self._exchange([], SampleBatch())
        shape, dtype = next(each for each in shapes if each), settings.probe.boundary_dtypes[-1]
        self._gather(torch.empty(0, *shape[1:], dtype=dtype, device=settings.device), shapes)

    def _exchange(self, shape: list[int], inputs: SampleBatch) -> tuple[list[list[int]], list[SampleBatch]]:
        control, number = self.groups.replica_control, self.groups.num_replicas
        # The head does not see the values of a placeholder.
        sent = {"shape": shape, "inputs": inputs.with_placeholders(self.placeholders)}
        found = all_gather_trees(sent, control, number)
        shapes = [each["shape"] for each in found]
        lengths = {tuple(each[1:]) for each in shapes if each}
        if len(lengths) > 1:
            raise BatchesDifferError(
                f"The activations that enter the head have shapes {sorted(lengths)} on the replicas: a loss of the "
                "whole batch needs one. Pad all samples to one length, or set pipeline_loss='replica'."
            )
        return shapes, [each["inputs"] for each in found]

    def _gather(self, entering: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        rows, what = [shape[0] if shape else 0 for shape in shapes], f"joining the batches of {self.groups.replicas}"
        return gather_rows(entering, rows, self.groups.replica_group, what)


def _concatenated(batches: Sequence[SampleBatch], axis: Axis) -> SampleBatch:
    """Concatenate the batches of the replicas that have samples; `axis` says how the rows of the samples lie."""
    sizes, rows = [batch.size for batch in batches], batches[0].rows

    def joined(name: str, values: Sequence[Any]) -> Any:
        for count in {1, rows}:
            if not all(has_samples(value, size * count) for value, size in zip(values, sizes, strict=True)):
                continue
            if not isinstance(values[0], torch.Tensor):
                return [item for value in values for item in value]
            if len({value.shape[1:] for value in values}) > 1:
                shapes = ", ".join(str(tuple(value.shape)) for value in values)
                raise BatchesDifferError(
                    f"The entry {name!r} of the batch has shapes {shapes} on the replicas: a loss of the whole batch "
                    "needs equal ones behind the first dimension. Pad all samples to one length, or set "
                    "pipeline_loss='replica'."
                )
            return (axis if count == rows else Axis()).join(values)
        return values[0]

    return batches[0].like({name: joined(name, [batch[name] for batch in batches]) for name in batches[0]})
