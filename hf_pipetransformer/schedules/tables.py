"""All training schedules by their names."""

from __future__ import annotations

from hf_pipetransformer.schedules.abilities import abilities_of
from hf_pipetransformer.schedules.asynchronous import ASYNC_1F1B
from hf_pipetransformer.schedules.schedule import GPIPE, INTERLEAVED_1F1B, ONE_F_ONE_B, TOKEN, Schedule
from hf_pipetransformer.schedules.zero_bubble import ZB_H1, ZB_V


_SCHEDULES = {
    schedule.name: schedule for schedule in (GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1, ZB_V, TOKEN, ASYNC_1F1B)
}


def find_schedule(name: str) -> Schedule:
    """Return the training schedule with this name; raises ValueError as `abilities_of`."""
    abilities_of(name)
    return _SCHEDULES[name]
