"""Layout of a run: the immutable value that all ranks must agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any

from hf_pipetransformer.schedules import placement as blocks
from hf_pipetransformer.schedules.abilities import Abilities, abilities_of
from hf_pipetransformer.schedules.json_values import Positive, as_json, entries, fields_as
from hf_pipetransformer.schedules.placement import PLACEMENTS, Placement


MOST_MICROBATCHES = 2**20
"""Upper bound on micro-batches, layers, stages and replicas in a layout read from a file."""

_Positive = Annotated[int, 1, MOST_MICROBATCHES]
_Count = Annotated[int, 0, MOST_MICROBATCHES]

# What checkpoints, plans and events files of earlier releases also say of a layout.
_GONE = frozenset({"fresh_share", "refresh_fraction"})


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of the model on the ranks between two transitions.

    The model is a chain of blocks: the embeddings (block 0), two sublayers for every encoder layer (attention, MLP)
    and the head (the last block). A stage owns a contiguous range of blocks; a rank of the pipeline owns `num_chunks`
    stages.

    Args:
        num_frozen_layers: number of frozen layers F; if F > 0, the embeddings and `layers[0:F]` are frozen.
        num_stages: number of stages of a pipeline, K * V.
        num_replicas: data-parallel width R; `pipeline_size * num_replicas` is the world size.
        boundaries: increasing block indices; stage `k` owns `range(boundaries[k], boundaries[k + 1])`.
        num_microbatches: micro-batches M of a batch of one pipeline.
        cache_level: the activations after this many layers are stored and read back; at most F, 0 without a cache.
        num_chunks: stages per rank V; 1 if the pipeline is one rank.
        token_slices: lengths of token slices, see `placement.Plans`; empty if sequences stay whole.

    Raises:
        ValueError: blocks not covered exactly once, an empty stage, K * V stages that do not fit, or a value out of
            range.
    """

    num_layers: _Positive
    num_frozen_layers: _Count
    num_stages: _Positive
    num_replicas: _Positive
    # There are two blocks for each layer, and two more.
    boundaries: tuple[Annotated[int, 0, 4 * MOST_MICROBATCHES], ...]
    num_microbatches: _Positive
    schedule: str
    cache_level: _Count = 0
    num_chunks: _Positive = 1
    placement: str = "loop"
    token_slices: tuple[tuple[Positive, ...], ...] = ()

    def __post_init__(self) -> None:
        expected_ends = (0, self.num_blocks)
        # Slices, because boundaries read from a file may be empty.
        found_ends = self.boundaries[:1] + self.boundaries[-1:]
        # Unordered ends would give empty ranges, and so stages that run nothing, without an error.
        increasing = all(low < high for low, high in zip(self.boundaries, self.boundaries[1:], strict=False))
        if len(self.boundaries) != self.num_stages + 1 or found_ends != expected_ends or not increasing:
            raise ValueError(
                f"Stage boundaries {self.boundaries} do not cut {self.num_blocks} blocks into {self.num_stages} "
                f"non-empty stages: expected {self.num_stages + 1} increasing indices from 0 to {self.num_blocks}."
            )
        # Several stages on a single rank have no table, see `Abilities.on`.
        if self.num_chunks < 1 or self.num_stages % self.num_chunks or 1 < self.num_chunks == self.num_stages:
            raise ValueError(
                f"{self.num_stages} stages do not make a pipeline of ranks with {self.num_chunks} stages each: "
                "expected two ranks or more with as many stages each, or one rank with one stage."
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(f"Unknown placement {self.placement!r}: expected one of {PLACEMENTS}.")
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, found {self.num_microbatches}.")
        if not 0 <= self.num_frozen_layers <= self.num_layers:
            raise ValueError(
                f"num_frozen_layers must be from 0 to the number of layers, {self.num_layers}, "
                f"found {self.num_frozen_layers}."
            )
        if not 0 <= self.cache_level <= self.num_frozen_layers:
            raise ValueError(
                f"cache_level must be from 0 to the number of frozen layers, {self.num_frozen_layers}, "
                f"found {self.cache_level}."
            )

    @property
    def pipeline_size(self) -> int:
        """Number of ranks of a pipeline K."""
        return self.num_stages // self.num_chunks

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks of a pipeline K and stages per rank V."""
        return self.pipeline_size, self.num_chunks

    @property
    def places(self) -> Placement:
        return Placement(self.pipeline_size, self.num_chunks, self.placement)

    @property
    def abilities(self) -> Abilities:
        """Abilities of the schedule on a pipeline of this size."""
        return abilities_of(self.schedule).on(self.pipeline_size)

    @property
    def num_blocks(self) -> int:
        return blocks.num_blocks(self.num_layers)

    @property
    def first_active_block(self) -> int:
        """First block that is trained; blocks below it are frozen."""
        return blocks.first_above(self.num_frozen_layers)

    @property
    def entry_block(self) -> int:
        """Block that takes a stored activation as input; the blocks below are skipped then. 0 without a cache."""
        return blocks.first_above(self.cache_level)

    @property
    def first_active_stage(self) -> int:
        return self.stage_of(self.first_active_block)

    def blocks_of(self, stage: int) -> range:
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def stage_of(self, block: int) -> int:
        # A linear search: models have tens of stages at most, and the caller asks once a layout.
        return next(stage for stage in range(self.num_stages) if block in self.blocks_of(stage))

    def blocks_of_rank(self, rank: int) -> tuple[range, ...]:
        return tuple(self.blocks_of(stage) for stage in self.places.stages_of(rank))

    def ranks_of(self, used_by: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that own any of these blocks, as positions in the pipeline, in the order of the blocks."""
        # In order, which a set would lose: the first rank that uses a parameter keeps its optimizer state.
        return tuple(dict.fromkeys(self.places.rank_of(self.stage_of(block)) for block in used_by))

    def as_event(self) -> dict[str, Any]:
        """Return the layout as plain JSON values, for the events file and for the agreement check."""
        # Lists, as JSON has no tuples: what ranks compare and what a file gives back are the same values.
        values: dict[str, Any] = as_json(self)
        return values

    @classmethod
    def from_event(cls, fields: dict[str, Any]) -> Layout:
        """Build a layout from the values of `as_event`, also after a JSON round trip.

        Raises:
            ValueError: these are not the values of a layout.
        """
        layout: Layout = fields_as(cls, entries(fields, "layout"), " of a layout")
        strangers = set(fields) - _GONE - {own.name for own in dataclass_fields(cls)}
        if strangers:
            raise ValueError(f"found {min(strangers)!r} in a layout, which has no such entry")
        abilities_of(layout.schedule)
        return layout

    def as_scalars(self) -> dict[str, float]:
        """Return the metrics for trackers; empty for a layout that plain Trainer has too (K = 1, nothing frozen)."""
        # A run like plain Trainer's has the columns of plain Trainer's in a tracker, and no more.
        if self.pipeline_size == 1 and not self.num_frozen_layers:
            return {}
        return {
            "pipeline_stages": self.pipeline_size,
            **({"pipeline_chunks": self.num_chunks} if self.num_chunks > 1 else {}),
            "pipeline_replicas": self.num_replicas,
            "pipeline_microbatches": self.num_microbatches,
            "frozen_layers": self.num_frozen_layers,
            "cached_layers": self.cache_level,
        }

    def __str__(self) -> str:
        cached = f" ({self.cache_level} cached)" if self.cache_level else ""
        sliced, longest = "", self.token_slices[-1] if self.token_slices else ()
        if set(longest) == {1}:
            # Only the number of slices is known, not their lengths.
            sliced = f" of S={len(longest)} equal token slices"
        elif longest:
            sliced = f" of S={len(longest)} token slices ({', '.join(map(str, longest))})"
        return (
            f"{self.shape_in_words}, {counted(self.num_microbatches, 'micro-batch', 'micro-batches')}{sliced}, "
            f"{self.num_frozen_layers} of {self.num_layers} layers frozen{cached}"
        )

    @property
    def shape_in_words(self) -> str:
        stages = counted(self.pipeline_size, "stage")
        if self.num_chunks > 1:
            stages = f"{counted(self.pipeline_size, 'rank')} of {counted(self.num_chunks, 'stage')}"
        return f"{stages} x {counted(self.num_replicas, 'replica')}"
