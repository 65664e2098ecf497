"""Run one scenario on this rank and write what it returns: `worker.py MODULE:FUNCTION FOLDER OPTIONS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.distributed.scenarios import find, note


def main() -> None:
    name, folder, options = sys.argv[1:]
    torch.set_num_threads(1)
    record = find(name)(Path(folder), **json.loads(options))
    if record is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        note(Path(folder), "record", record)
    # None is left where a scenario has ended them, as it does where the ranks can no longer meet.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
