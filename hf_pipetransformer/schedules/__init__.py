"""Pipeline schedules as tables of what each rank does, in order. Pure; nothing here touches a device."""

from __future__ import annotations

from collections.abc import Callable

from hf_pipetransformer.schedules.actions import (
    BEGINS_BACKWARD,
    COMPUTATIONS,
    GIVES,
    GRADIENTS_ARE_WHOLE,
    NEEDS,
    SENDS,
    Action,
    ActionList,
    Op,
    ScheduleError,
    Table,
    source_of,
)
from hf_pipetransformer.schedules.asynchronous import ASYNC_1F1B
from hf_pipetransformer.schedules.schedule import (
    FORWARD_ONLY,
    GPIPE,
    INTERLEAVED_1F1B,
    ONE_F_ONE_B,
    TOKEN,
    Abilities,
    Schedule,
    forwards_first,
)
from hf_pipetransformer.schedules.zero_bubble import ZB_H1, ZB_V


__all__ = [
    "BEGINS_BACKWARD",
    "COMPUTATIONS",
    "FORWARD_ONLY",
    "GIVES",
    "GPIPE",
    "GRADIENTS_ARE_WHOLE",
    "NEEDS",
    "SCHEDULE_NAMES",
    "SENDS",
    "Abilities",
    "Action",
    "ActionList",
    "Op",
    "Schedule",
    "ScheduleError",
    "Table",
    "find_schedule",
    "forwards_first",
    "schedules_that",
    "source_of",
]

_SCHEDULES = {
    schedule.name: schedule for schedule in (GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1, ZB_V, TOKEN, ASYNC_1F1B)
}

SCHEDULE_NAMES = tuple(_SCHEDULES)
"""Values of the option `pipeline_schedule`."""


def find_schedule(name: str) -> Schedule:
    """Return the training schedule with this name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _SCHEDULES:
        raise ValueError(f"Unknown schedule {name!r}: expected one of {sorted(_SCHEDULES)}.")
    return _SCHEDULES[name]


def schedules_that(can: Callable[[Abilities], bool]) -> list[str]:
    """Return the names of the schedules with an ability."""
    return [schedule.name for schedule in _SCHEDULES.values() if can(schedule.abilities)]
