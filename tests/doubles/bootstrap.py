"""Run a script under the doubles that the environment asks for: `bootstrap.py SCRIPT ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.doubles import nccl


NOTES = "STRICT_NCCL_NOTES"
"""Environment variable: the folder for the notes of all ranks."""

if __name__ == "__main__":
    nccl.install(Path(os.environ[NOTES]))
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
