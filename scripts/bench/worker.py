"""One of the processes that `launch` starts: it calls the function and writes what it returns."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState


def main() -> None:
    """Call the function that the file named on the command line describes."""
    path = Path(sys.argv[1])
    call = json.loads(path.read_text())
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        PartialState(cpu=True)  # The process group, before a trainer makes it.
    found = getattr(import_module(call["module"]), call["function"])(*call["args"])
    path.with_name(f"result_{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        # Threads of plain Trainer's gloo groups still let go of their last tensors, for which they need the
        # interpreter's lock; destroying the groups meanwhile may wait for ever.
        time.sleep(1)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
