"""Join what enters the head, over the micro-batches and replicas of a batch, so that one loss sees all samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.transfers import all_gather_trees
from hf_pipetransformer.data.batches import (
    batch_size,
    detach_tags,
    for_model,
    has_samples,
    names_of,
    rows_per_sample,
    take_samples,
    with_rows,
)
from hf_pipetransformer.data.flattened import assign_sequences, sequences_of


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups
    from hf_pipetransformer.engine.program import MicroBatch


class BatchesDifferError(ValueError):
    """The batches of the replicas have other shapes, so that one loss cannot see them all."""


T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Axis:
    """Dimension along which parts of a batch are joined.

    `places` are the positions of the joined rows in the whole batch; None if the parts follow each other there.
    """

    dim: int = 0
    places: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Any], sizes: Sequence[int]) -> Axis:
        """Return how activations of parts of `sizes` samples lie in that of the whole batch."""
        flattened, rows = sequences_of(inputs), rows_per_sample(inputs)
        if flattened is not None:
            parts = assign_sequences(flattened.lengths, len(sizes))
            return cls(1, torch.cat([flattened.tokens(part) for part in parts]))
        if rows == 1:
            return cls()
        # Rows of a sample lie in blocks: first one of every sample, then the next one of each.
        ends, total = pairwise(accumulate(sizes, initial=0)), sum(sizes)
        return cls(0, torch.cat([torch.arange(*each) + total * row for each in ends for row in range(rows)]))

    def join(self, parts: Tensors) -> torch.Tensor:
        # `argsort` inverts the order in which the parts lie.
        whole, places = torch.cat(list(parts), self.dim), self.places
        return whole if places is None else whole.index_select(self.dim, places.argsort().to(whole.device))

    def cut(self, whole: torch.Tensor, parts: Tensors) -> list[torch.Tensor]:
        """Cut what belongs to the whole batch as `parts` lie in it."""
        if self.places is not None:
            whole = whole.index_select(self.dim, self.places.to(whole.device))
        return list(whole.split([part.shape[self.dim] for part in parts], self.dim))


@dataclass(frozen=True)
class Whole:
    """Samples of a batch, of one replica or of all.

    Args:
        entering: activation that enters the head, `(batch, seq, hidden)`.
        inputs: the batch, with its marks.
        own_rows: returns the rows of this replica from a tensor with those of `entering`.
        share: this replica's share of the loss, which all replicas compute.
    """

    entering: torch.Tensor
    inputs: dict[str, Any]
    own_rows: Callable[[torch.Tensor], torch.Tensor]
    share: float


@dataclass(frozen=True)
class Joined:
    """Whole batch at the entrance of the head.

    Args:
        micro_batch: the batch as one micro-batch; its weight is this replica's share of the loss.
        entering: activation that enters the head, `(batch, seq, hidden)`, joined.
        cut: cuts the gradient of `entering`, times that share, into those of the micro-batches of this replica.
    """

    micro_batch: MicroBatch
    entering: torch.Tensor
    cut: Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class BatchOfAll:
    """Batches of all replicas as one.

    Args:
        inputs: with its marks.
        sizes: samples of each replica that has any.
        number: place of this replica among these.
        first: the first replica that has any.
    """

    inputs: dict[str, Any]
    sizes: list[int]
    number: int
    first: int = 0

    def own(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return this replica's samples of a batch of all."""
        start = sum(self.sizes[: self.number])
        return take_samples(inputs, slice(start, start + self.sizes[self.number]))


@dataclass(frozen=True)
class HeadJoin:
    """Join of a batch at the entrance of the head.

    Args:
        inputs: the batch of this replica, with its marks.
        cut: its micro-batches, or their token slices.
        prepare: moves a batch to this stage's device.
        replicas: joins the batches of all replicas too; None to leave each its own loss.
        of_all: batch of all replicas, if they have exchanged theirs before.
    """

    inputs: Mapping[str, Any]
    cut: Sequence[MicroBatch]
    prepare: Callable[[dict[str, Any]], dict[str, Any]]
    replicas: ReplicaJoin | None = None
    of_all: BatchOfAll | None = None

    @classmethod
    def of_training(
        cls,
        batch: Mapping[str, Any],
        cut: Sequence[MicroBatch],
        prepare: Callable[[dict[str, Any]], dict[str, Any]],
        replicas: ReplicaJoin | None,
    ) -> HeadJoin:
        """Return the join of a batch of training that was cut into `cut`."""
        whole, _ = detach_tags(batch)
        # A frozen reference has given entries to the micro-batches, which the batch does not have.
        of_reference = sorted({*cut[0].inputs} - names_of(whole))
        inputs = whole | {name: torch.cat([part.inputs[name] for part in cut]) for name in of_reference}
        return cls(inputs, cut, prepare, replicas)

    def whole(self, entered: Tensors) -> Whole:
        """Join what entered the head in all micro-batches. Collective over the replicas, if they are joined."""
        rows, axis = self._rows_of(entered), self._axis()
        whole = rows[0] if len(rows) == 1 else axis.join(rows)
        found = Whole(whole, dict(self.inputs), lambda gradient: gradient, 1.0)
        return found if self.replicas is None else self.replicas.join(found, self.of_all)

    def __call__(self, entered: Tensors) -> Joined:
        """Join for a backward too. Collective over the replicas, if they are joined."""
        found = self.whole(entered)
        inputs = self.prepare(for_model(found.inputs))
        whole = replace(
            self.cut[0], index=0, inputs=inputs, weight=found.share, activation_shape=(), tags=None, place=None
        )
        return Joined(whole, found.entering, self.cutting(entered, found))

    def cutting(self, entered: Tensors, found: Whole) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """Return a function that cuts the gradient of what `whole` has joined, see `Joined.cut`."""
        slices, rows, axis = self._slices_of(entered), self._rows_of(entered), self._axis()

        def cut(gradient: torch.Tensor) -> list[torch.Tensor]:
            # Each replica computes the loss of all, and adds its share of the head's gradient. What enters the head
            # has only the rows of one of them, which gets the whole gradient.
            own = axis.cut(found.own_rows(gradient) / found.share, rows)
            of_slices = [row.split([each.shape[1] for each in of], 1) for row, of in zip(own, slices, strict=True)]
            return [part for parts in of_slices for part in parts] if len(slices) < len(entered) else own

        return cut

    def _rows_of(self, entered: Tensors) -> list[torch.Tensor]:
        slices = self._slices_of(entered)
        return [torch.cat(own, dim=1) if len(own) > 1 else own[0] for own in slices]

    def _axis(self) -> Axis:
        num_rows = rows_per_sample(self.inputs)
        sizes = [batch_size(with_rows(part.inputs, num_rows)) for part, *_ in self._slices_of(self.cut)]
        return Axis.of(self.inputs, sizes)

    def _slices_of(self, values: Sequence[T]) -> list[list[T]]:
        """Group what belongs to the token slices of a micro-batch; without slices each is alone."""
        places = [part.index if part.place is None else part.place.batch_slice for part in self.cut]
        pairs = groupby(zip(places, values, strict=True), key=lambda pair: pair[0])
        return [[value for _, value in own] for _, own in pairs]


@dataclass(frozen=True)
class ReplicaJoin:
    """Join over the replicas of the last stage; `placeholders` name the entries that the head does not read."""

    groups: PipelineGroups
    placeholders: frozenset[str]

    def exchange(self, inputs: Mapping[str, Any]) -> BatchOfAll:
        """Return the batches of all replicas as one. Collective: call on every replica's rank of a position.

        Raises:
            BatchesDifferError: they do not fit together.
        """
        return self._joined(self._exchange([], inputs)[1])

    def _joined(self, found: Sequence[Mapping[str, Any]]) -> BatchOfAll:
        # Replicas without samples are not in the join, so that they do not count.
        batches = [batch for batch in found if batch]
        sizes = [batch_size(batch) for batch in batches]
        number, first = sum(map(bool, found[: self.groups.replica])), [bool(batch) for batch in found].index(True)
        return BatchOfAll(_concatenated(batches, Axis.of(batches[0], sizes)), sizes, number, first)

    def join(self, own: Whole, of_all: BatchOfAll | None = None) -> Whole:
        """Join the batches of all replicas, unless `of_all` has them.

        Collective: call on every replica's last stage; `take_part` where a replica has no samples.

        Raises:
            BatchesDifferError: the batches of the replicas do not fit together.
        """
        shapes, found = self._exchange(list(own.entering.shape), own.inputs if of_all is None else {})
        gathered = self._gather(own.entering, [shape[0] if shape else 0 for shape in shapes])
        of_all = self._joined(found) if of_all is None else of_all
        parts = [each for each, shape in zip(gathered, shapes, strict=True) if shape]
        axis, number, share = Axis.of(of_all.inputs, of_all.sizes), of_all.number, 1.0 / len(parts)
        return Whole(axis.join(parts), of_all.inputs, lambda gradient: axis.cut(gradient, parts)[number], share)

    def take_part(self, like: torch.Tensor) -> None:
        """Take part in the exchanges of `join` without samples; `like` has the device and dtype of the activation."""
        shapes, _ = self._exchange([], {})
        shape = next(each for each in shapes if each)
        self._gather(like.new_zeros(0, *shape[1:]), [each[0] if each else 0 for each in shapes])

    def _exchange(self, shape: list[int], inputs: Mapping[str, Any]) -> tuple[list[list[int]], list[dict[str, Any]]]:
        control, number = self.groups.replica_control, self.groups.num_replicas
        sent = {
            name: self._as_sent(name, value) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        found = all_gather_trees({"shape": shape, "inputs": sent}, control, number)
        shapes = [each["shape"] for each in found]
        lengths = {tuple(each[1:]) for each in shapes if each}
        if len(lengths) > 1:
            raise BatchesDifferError(
                f"The activations that enter the head have shapes {sorted(lengths)} on the replicas: a loss of the "
                "whole batch needs one. Pad all samples to one length, or set pipeline_loss='replica'."
            )
        return shapes, [each["inputs"] for each in found]

    def _as_sent(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return an entry as others read it: the head does not see the values of a placeholder."""
        return value.new_zeros(1).expand(value.shape) if name in self.placeholders else value.contiguous()

    def _gather(self, entering: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        # A gather takes equal shapes, and replicas may have different numbers of rows.
        padded = entering.new_zeros(max(rows), *entering.shape[1:])
        padded[: len(entering)] = entering
        parts = [torch.empty_like(padded) for _ in rows]
        what = f"joining the batches of {self.groups.replicas}"
        guarded(lambda: dist.all_gather(parts, padded, group=self.groups.replica_group), what)
        return [part[:count] for part, count in zip(parts, rows, strict=True)]


def _concatenated(batches: Sequence[Mapping[str, Any]], axis: Axis) -> dict[str, Any]:
    """Concatenate the batches of the replicas that have samples; `axis` says how the rows of the samples lie."""
    sizes, rows = [batch_size(batch) for batch in batches], rows_per_sample(batches[0])

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

    return {name: joined(name, [batch[name] for batch in batches]) for name in batches[0]}
