"""The layout of a run: the immutable value that all ranks must agree on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.schedules import placement as units
from hf_pipetransformer.schedules.json_values import entries, items, number, text, whole_number
from hf_pipetransformer.schedules.placement import PLACEMENTS, Placement, Plans


MOST_MICROBATCHES = 2**20
"""More micro-batches, layers, stages or replicas no layout of a file has."""

_COUNTS = frozenset(
    {"num_layers", "num_frozen_layers", "num_stages", "num_replicas", "num_microbatches", "num_chunks", "cache_level"}
)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, such as "1 stage" or "2 stages"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model lies on the ranks between two transitions.

    The model is a chain of units: the embeddings (unit 0), two sublayers for every encoder layer (attention, MLP) and
    the head (the last unit). A stage owns a contiguous run of units, a rank of the pipeline holds `num_chunks` stages.

    Args:
        num_layers: encoder layers of the model, L.
        num_frozen_layers: F, the embeddings and `layers[0:F]` are frozen.
        num_stages: stages of a pipeline, K * V.
        num_replicas: data-parallel width R; `pipeline_size * num_replicas` is the world size.
        boundaries: `num_stages + 1` increasing unit indices; stage `k` owns `range(boundaries[k], boundaries[k + 1])`.
        num_microbatches: M, micro-batches per mini-batch of one pipeline.
        schedule: name of the schedule, one of `pipeline.schedules.SCHEDULE_NAMES`.
        cache_level: the activations after this many layers are stored and read back; at most F, 0 without a cache.
        num_chunks: V, stages of a rank; 1 if the pipeline is one rank.
        placement: which rank holds which stage, one of `placement.PLACEMENTS`.
        token_slices: how sequences are cut, see `token_slices.Plans`; nothing where they stay whole.
        fresh_share: share of the samples that each pass draws anew in place of stored views of them, see
            `autodp.views`; 0 where samples are not random.

    Raises:
        ValueError: the boundaries do not cover every unit exactly once, a stage would own nothing, the ranks would not
            hold V stages each, more layers are frozen than there are, or more are cached than frozen.
    """

    num_layers: int
    num_frozen_layers: int
    num_stages: int
    num_replicas: int
    boundaries: tuple[int, ...]
    num_microbatches: int
    schedule: str
    cache_level: int = 0
    num_chunks: int = 1
    placement: str = "loop"
    token_slices: Plans = ()
    fresh_share: float = 0.0

    def __post_init__(self) -> None:
        expected_ends = (0, self.num_units)
        found_ends = self.boundaries[:1] + self.boundaries[-1:]
        increasing = all(low < high for low, high in zip(self.boundaries, self.boundaries[1:], strict=False))
        if len(self.boundaries) != self.num_stages + 1 or found_ends != expected_ends or not increasing:
            raise ValueError(
                f"Stage boundaries {self.boundaries} do not cut {self.num_units} units into {self.num_stages} "
                f"non-empty stages: expected {self.num_stages + 1} increasing indices from 0 to {self.num_units}."
            )
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
        if not 0 <= self.fresh_share <= 1:
            raise ValueError(f"fresh_share must be from 0 to 1, found {self.fresh_share}.")

    @property
    def pipeline_size(self) -> int:
        """K, the ranks of a pipeline."""
        return self.num_stages // self.num_chunks

    @property
    def shape(self) -> tuple[int, int]:
        """K and V."""
        return self.pipeline_size, self.num_chunks

    @property
    def places(self) -> Placement:
        """How the stages lie on the ranks of a pipeline."""
        return Placement(self.pipeline_size, self.num_chunks, self.placement)

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages update themselves without waiting for the others; one stage has nobody to wait for."""
        return self.pipeline_size > 1 and find_schedule(self.schedule).is_asynchronous

    @property
    def num_units(self) -> int:
        """Embeddings, two sublayers a layer, head."""
        return units.num_units(self.num_layers)

    @property
    def first_active_unit(self) -> int:
        """The first unit that is trained: units below it are frozen."""
        return units.first_above(self.num_frozen_layers)

    @property
    def entry_unit(self) -> int:
        """The unit that a stored activation enters: those below it do not run for a stored sample. 0: no cache."""
        return units.first_above(self.cache_level)

    @property
    def first_active_stage(self) -> int:
        """The first stage with something to train: stages below it hold frozen units only."""
        return self.stage_of(self.first_active_unit)

    def units_of(self, stage: int) -> range:
        """The units that `stage` owns."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def stage_of(self, unit: int) -> int:
        """The stage that owns `unit`."""
        return next(stage for stage in range(self.num_stages) if unit in self.units_of(stage))

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`, as its position in the pipeline, 0 to K - 1."""
        return self.places.rank_of(stage)

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages `stage` is, 0 to V - 1."""
        return self.places.chunk_of(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of the rank at a position in the pipeline, by chunk."""
        return self.places.stages_of(rank)

    def units_of_rank(self, rank: int) -> tuple[range, ...]:
        """The units of the rank at a position in the pipeline, by chunk."""
        return tuple(self.units_of(stage) for stage in self.stages_of(rank))

    def ranks_of(self, used_by: Iterable[int]) -> tuple[int, ...]:
        """The ranks that hold any of some units, as positions in the pipeline, first user first."""
        return tuple(dict.fromkeys(self.rank_of(self.stage_of(unit)) for unit in used_by))

    def as_event(self) -> dict[str, Any]:
        """The layout as plain JSON values, for the events file and for the agreement check."""
        plans = [list(plan) for plan in self.token_slices]
        return {**asdict(self), "boundaries": list(self.boundaries), "token_slices": plans}

    @classmethod
    def from_event(cls, fields: dict[str, Any]) -> Layout:
        """The inverse of `as_event`, also after the way through JSON.

        Raises:
            ValueError: these are not the values of a layout.
        """
        found = dict(entries(fields, "layout"))
        for own in dataclass_fields(cls):
            if own.name not in found and own.default is MISSING:
                raise ValueError(f"found no {own.name!r} of a layout")
        strangers = set(found) - {own.name for own in dataclass_fields(cls)}
        if strangers:
            raise ValueError(f"found {min(strangers)!r} in a layout, which has no such entry")
        least = {"num_frozen_layers": 0, "cache_level": 0}
        for name in _COUNTS & found.keys():
            whole_number(found[name], name, least.get(name, 1), MOST_MICROBATCHES)
        found["boundaries"] = tuple(
            whole_number(unit, "boundaries", most=4 * MOST_MICROBATCHES)
            for unit in items(found["boundaries"], "boundaries")
        )
        found["token_slices"] = tuple(
            tuple(whole_number(length, "token_slices", 1) for length in items(plan, "token_slices"))
            for plan in items(found.get("token_slices", []), "token_slices")
        )
        number(found.get("fresh_share", 0.0), "fresh_share", 0, 1)
        find_schedule(text(found["schedule"], "schedule"))
        text(found.get("placement", ""), "placement")
        return cls(**found)

    def as_scalars(self) -> dict[str, float]:
        """What trackers show of the layout; nothing while it is one that Trainer has too."""
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
        return (
            f"{self.shape_in_words}, {counted(self.num_microbatches, 'micro-batch', 'micro-batches')}"
            f"{self._sliced()}, "
            f"{self.num_frozen_layers} of {self.num_layers} layers frozen{cached}"
        )

    @property
    def shape_in_words(self) -> str:
        """Stages and replicas, as log lines name them."""
        stages = counted(self.pipeline_size, "stage")
        if self.num_chunks > 1:
            stages = f"{counted(self.pipeline_size, 'rank')} of {counted(self.num_chunks, 'stage')}"
        return f"{stages} x {counted(self.num_replicas, 'replica')}"

    def _sliced(self) -> str:
        if not self.token_slices:
            return ""
        longest = self.token_slices[-1]
        if set(longest) == {1}:
            return f" of S={len(longest)} equal token slices"  # Their number is given, which no length follows from.
        return f" of S={len(longest)} token slices ({', '.join(map(str, longest))})"
