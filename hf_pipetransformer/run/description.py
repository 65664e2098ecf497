"""What a run says of itself in its checkpoints, and compares before it goes on from one."""

from __future__ import annotations

import os
import socket
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hf_pipetransformer import checkpoint
from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.draws import generators_kept
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.fingerprint import describe_data
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.refusals import TOLD_ARGUMENTS, comparable


class RunDescription:
    """What must be equal for a run to go on, see `check_same_run`; told by rank 0, before the start."""

    def __init__(self, trainer: Trainer, topology: Topology, policy: FreezePolicy) -> None:
        self.trainer = trainer
        self.fields: dict[str, Any] = topology.decide(lambda: _described(trainer, topology, policy))
        self._data: dict[str, Any] | None = None

    def data(self) -> dict[str, Any]:
        """By what the training data are known. Some are read, when it is first needed and by rank 0 alone.

        It leaves no trace in the random numbers of the run.
        """
        if self._data is None:
            with generators_kept(self.trainer.train_dataset):
                self._data = describe_data(self.trainer.train_dataset)
        return self._data


def _described(trainer: Trainer, topology: Topology, policy: FreezePolicy) -> dict[str, Any]:
    model, arguments = trainer.model, trainer.args.to_dict()
    return {
        "world_size": topology.world_size,
        "arguments": comparable({name: arguments[name] for name in TOLD_ARGUMENTS}),
        "has_plan": trainer.args.layout_plan is not None,
        "policy": policy.describe(),
        "policy_class": type(policy).__name__,
        "decaying": list(trainer.get_decay_parameter_names(model)),
        "model": type(model).__name__,
        "parameters": {
            name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in model.named_parameters()
        },
    }


def saves_state(args: PipeTransformerArguments) -> bool:
    """Whether the checkpoints of a run hold more than its model."""
    saves = args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
    return saves and not args.save_only_model


def check_shared_folder(args: PipeTransformerArguments, topology: Topology) -> None:
    """Whether all nodes see one output folder: each rank writes a part of a checkpoint. A collective call.

    Raises:
        ValueError: on every rank, names the first that sees another folder.
    """
    if not saves_state(args) or topology.local_world_size >= topology.world_size:
        return
    token = topology.decide(lambda: checkpoint.leave_token(args.output_dir))
    own = {"sees": checkpoint.sees_token(args.output_dir, token), "host": socket.gethostname()}
    answers = topology.gather({**own, "output_dir": os.path.abspath(args.output_dir)})
    if topology.rank == 0:
        checkpoint.remove_token(args.output_dir, token)
    for rank, answer in enumerate(answers):
        if not answer["sees"]:
            raise ValueError(
                f"output_dir is {answers[0]['output_dir']} on rank 0 ({answers[0]['host']}) and another folder, "
                f"{answer['output_dir']}, on rank {rank} ({answer['host']}): every node would hold a part of each "
                "checkpoint, and no resume could find the whole. Set output_dir to a folder that all nodes share, "
                "or save_only_model=True or save_strategy='no'."
            )
