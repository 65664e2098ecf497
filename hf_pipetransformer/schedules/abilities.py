"""Facts of each schedule, without its table: what it can do, which options it reads, and what it refuses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


MAX_CHUNKS = 8


@dataclass(frozen=True)
class Abilities:
    """What planner, options, memory estimate, runtime and tools ask of a schedule; none of them asks for its name.

    Args:
        default_chunks: default number of stages per rank V, between `min_chunks` and `max_chunks`.
        placement: see `placement.Placement`.
        splits_backward: True if gradients of inputs and of weights are computed separately.
        cuts_tokens: True if micro-batches may be cut into token slices.
        overlaps_steps: True for an asynchronous schedule: optimizer steps follow each other without a flush, so each
            stage updates its weights by itself, and a pass may see another version of them.
        is_exact: True if results are those of one process wherever the model is cut.
        reads: options that do nothing under schedules which do not list them.
        refuses: what cannot be had under it, options by their names, with the reason: what the schedule does instead.
    """

    default_chunks: int = 1
    min_chunks: int = 1
    max_chunks: int = 1
    placement: str = "loop"
    splits_backward: bool = False
    cuts_tokens: bool = False
    overlaps_steps: bool = False
    is_exact: bool = True
    reads: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs_steps_whole(self) -> bool:
        """True if sequences stay whole and no step overlaps another."""
        return not (self.cuts_tokens or self.overlaps_steps)

    def on(self, pipeline_size: int) -> Abilities:
        """Return the abilities on this many ranks: one rank has one stage, which waits for no other."""
        return self if pipeline_size > 1 or self.cuts_tokens else Abilities()


WEIGHTS_NAMES = ("pipeoptim", "vanilla", "stashing", "double_buffer", "spectrain", "xpipe")
"""Values of the option `pipeline_weights`; `weight_kinds` says what they do."""

# Neither has outputs of whole samples, or a head that sees them at once.
_IN_PIECES = {
    "torch_compile": "has not been verified with compiled layers",
    "pipeline_head_slices": "runs its head in other ways",
}

ABILITIES: Mapping[str, Abilities] = {
    "gpipe": Abilities(),
    "1f1b": Abilities(),
    "interleaved_1f1b": Abilities(default_chunks=2, min_chunks=2, max_chunks=MAX_CHUNKS),
    "zb_h1": Abilities(splits_backward=True),
    "zb_v": Abilities(default_chunks=2, min_chunks=2, max_chunks=2, placement="v", splits_backward=True),
    "token": Abilities(
        cuts_tokens=True,
        reads=("pipeline_token_slices",),
        refuses={**_IN_PIECES, "activation_cache": "runs slices of sequences"},
    ),
    "async_1f1b": Abilities(
        overlaps_steps=True,
        is_exact=False,
        reads=("pipeline_weights", "pipeline_clip", "pipeline_drain_interval"),
        refuses={
            **_IN_PIECES,
            "activation_cache": "reads ahead of what is stored",
            "pipeline_checkpoint": "has no last micro-batch, but knows 'layers', 'always' and 'never'",
            "pipeline_loss": "overlaps passes, so that no loss sees a whole batch",
            "fp16": "would have its stages agree in every step whether it is skipped, which bf16 does not need",
            "reference": "has no pause between two steps, in which a reference could run",
        },
    ),
}

OPTIONS_OF_SCHEDULES = {
    option: [name for name, other in ABILITIES.items() if option in other.reads]
    for abilities in ABILITIES.values()
    for option in abilities.reads
}
"""Options that do nothing but under some schedules, with their names."""
SCHEDULE_NAMES = tuple(ABILITIES)
"""Values of the option `pipeline_schedule`."""
FORWARDS_FIRST = "gpipe"
"""Schedule for a loss of the whole batch: all forwards end before the first backward begins."""


def abilities_of(schedule: str) -> Abilities:
    """Return the abilities of the training schedule with this name.

    Raises:
        ValueError: the name is unknown.
    """
    if schedule not in ABILITIES:
        raise ValueError(f"Unknown schedule {schedule!r}: expected one of {sorted(ABILITIES)}.")
    return ABILITIES[schedule]
