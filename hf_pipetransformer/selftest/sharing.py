"""Several processes on one GPU over NCCL."""

from __future__ import annotations

import os


OVER_SOCKETS = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
SAID_OF_SOCKETS = "NCCL over sockets, {} for {} processes: order and numbers, not speed and not NVLink"


def share_gpus(num_gpus: int) -> bool:
    """Let the processes of this machine share its GPUs over NCCL if there are too few; return True if they do.

    NCCL refuses two ranks on one GPU, but only if both name one host. With a name of its own for each, all communicate
    over sockets. Call before NCCL makes its first communicator.
    """
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < num_gpus < num_here:
        return False
    os.environ.update(OVER_SOCKETS)
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    if num_here == int(os.environ["WORLD_SIZE"]):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return True
