"""Token slices: the micro-batches of 1F1B cut along the sequence (TeraPipe)."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.actions import Op
from hf_pipetransformer.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule


def in_token_slices(rows: Computations, num_token_slices: int) -> Computations:
    """Each micro-batch as slices of its tokens: `S` numbers from `S i` on, forwards rising and backwards falling.

    A slice reads keys and values of earlier ones, whose gradients are whole once all later slices had their backward.
    """
    forwards = range(num_token_slices)
    return [
        [
            action._replace(micro_batch=action.micro_batch * num_token_slices + number)
            for action in row
            for number in (forwards if action.op is Op.FORWARD else reversed(forwards))
        ]
        for row in rows
    ]


TOKEN = Schedule("token", ONE_F_ONE_B.lay, in_token_slices=in_token_slices)
"""1F1B over slices of the batch, each a run of slices of its tokens (Li et al., ICML 2021; the paper keeps the whole
batch). K=2, one batch slice, S=3, computation only; and two batch slices, S=2:

    rank 0   F0 F1 F2 .  .  .  B2 B1 B0         rank 0   F0 F1 F2 F3 .  B1 B0 .  B3 B2
    rank 1   .  F0 F1 F2 B2 B1 B0 .  .          rank 1   .  F0 F1 B1 B0 F2 F3 B3 B2 .
"""
