"""Split a mini-batch into micro-batches and join their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch


@dataclass(frozen=True)
class NoChunk:
    """Tensor that every micro-batch gets whole."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise TypeError(f"NoChunk only supported for tensors, found {type(self.tensor).__name__}.")


@dataclass(frozen=True)
class MicroBatch:
    """Values of one micro-batch that pass between two stages: one (`is_single`) or a tuple, even a tuple of one."""

    values: tuple[Any, ...]
    is_single: bool

    @classmethod
    def of(cls, value: Any) -> MicroBatch:
        """Wrap the output of a module."""
        is_tuple = isinstance(value, (tuple, list))
        return cls(tuple(value) if is_tuple else (value,), not is_tuple)

    @property
    def value(self) -> Any:
        """Output as the module returned it, with a list turned into a tuple."""
        return self.values[0] if self.is_single else self.values


def check_values(values: Sequence[Any], where: str, only_tensors: bool = False) -> None:
    """Raise a TypeError if no value between stages is a tensor, or with `only_tensors`, not every value is one.

    `where` is the subject of the error message.
    """
    found = [type(value).__name__ for value in values if not isinstance(value, torch.Tensor)]
    if len(found) == len(values):
        raise TypeError(f"{where} must have at least one tensor, found {', '.join(found) or 'nothing'}.")
    if only_tensors and found:
        raise TypeError(f"{where} must be a tensor or a tuple of tensors, found {', '.join(found)} among them.")


def replaced(
    values: Sequence[Any],
    is_concerned: Callable[[torch.Tensor], bool],
    step: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> tuple[Any, ...]:
    """Apply `step` to all concerned tensors of `values` in one call, and put the results in their place."""
    # By id: a tensor that occurs twice must stay one object, because a module may change it in place.
    found = {id(each): each for each in values if isinstance(each, torch.Tensor) and is_concerned(each)}
    if not found:
        return tuple(values)
    results = dict(zip(found, step(list(found.values())), strict=True))
    return tuple(results.get(id(value), value) for value in values)


def scatter(values: Sequence[Any], chunks: int) -> list[tuple[Any, ...]]:
    """Cut tensors along their first dimension like `torch.chunk`; other values go to every micro-batch unchanged.

    A batch with fewer samples than `chunks` gives one micro-batch per sample.
    """
    columns: list[Any] = []
    counts: dict[int, int] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if chunks > 1 and not value.dim():
                raise ValueError(
                    f"Input {i} is a tensor without dimensions, which no batch can be cut from. Wrap it in NoChunk if "
                    "every micro-batch gets it."
                )
            # A single micro-batch takes the tensors as they are, also those without dimensions, which chunk() refuses.
            columns.append(value.chunk(chunks) if chunks > 1 else (value,))
            counts[i] = len(columns[-1])
        else:
            columns.append(value.tensor if isinstance(value, NoChunk) else value)
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"input {i} of size {values[i].shape[0]} in {count}" for i, count in counts.items())
        raise RuntimeError(
            f"Found different number of chunks produced for inputs: {sizes}. Their first dimensions must be the "
            "batch's; wrap in NoChunk what has none."
        )
    _check_shares([columns[i] for i in counts])
    # There is a count: `check_values` has seen a tensor, and a NoChunk is none.
    num_micro_batches = next(iter(counts.values()))
    return [
        tuple(column[k] if i in counts else column for i, column in enumerate(columns))
        for k in range(num_micro_batches)
    ]


def _check_shares(columns: Sequence[tuple[torch.Tensor, ...]]) -> None:
    if len(columns[0]) == 1:
        return
    # Compare shares, not row counts: a tensor may have several rows per sample.
    shares = [tuple(Fraction(len(piece), max(1, sum(map(len, column)))) for piece in column) for column in columns]
    if len(set(shares)) > 1:
        sizes = ", ".join("+".join(str(len(piece)) for piece in column) for column in columns)
        raise RuntimeError(
            f"The inputs do not fall into micro-batches of the same shares of the batch: {sizes} rows. Their first "
            "dimensions must be the batch's; wrap in NoChunk what has none."
        )


def gather(micro_batches: Sequence[MicroBatch]) -> Any:
    """Join the outputs of the last stage: concatenate tensors, list other values by micro-batch."""
    lengths = sorted({len(each.values) for each in micro_batches})
    if len(lengths) > 1:
        raise ValueError(
            f"The last stage returned {lengths} values for different micro-batches: expected as many for each, "
            "whatever the number of its samples."
        )
    joined = tuple(_join(column) for column in zip(*(each.values for each in micro_batches), strict=True))
    return joined[0] if micro_batches[0].is_single else joined


def _join(column: tuple[Any, ...]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in column):
        return list(column)
    # A single output is handed on as it is: it may be a loss without dimensions.
    if len(column) == 1:
        return column[0]
    if not all(value.dim() for value in column):
        raise ValueError(
            "The last stage returned a tensor without dimensions: those of several micro-batches cannot be joined. "
            "Return one value a sample."
        )
    return torch.cat(column)
