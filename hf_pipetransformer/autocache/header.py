"""What was decided when a store was made, kept beside its tables."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import StoreDamagedError


HEADER_FILE = "store.json"
DROPPED_FILE = "dropped"

_VERSION = 1


@dataclass(frozen=True)
class Header:
    """What was decided when a store was made."""

    store_id: str
    num_samples: int
    max_bytes: int
    num_writers: int
    row_format: RowFormat
    row_length: int = 0

    @classmethod
    def read(cls, folder: Path) -> Header:
        """The header of the store in `folder`.

        Raises:
            StoreDamagedError: there is none, or it is of another version.
        """
        path = folder / HEADER_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']}, expected {_VERSION}")
            return cls(
                store_id=str(values["store_id"]),
                num_samples=int(values["num_samples"]),
                max_bytes=int(values["max_bytes"]),
                num_writers=int(values["num_writers"]),
                row_format=RowFormat.from_json(values["row_format"]),
                row_length=int(values["row_length"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreDamagedError(
                f"{path} is not the header of an activation store ({type(error).__name__}: {error})."
            ) from error

    def write(self, folder: Path) -> None:
        values = {"version": _VERSION, **vars(self), "row_format": self.row_format.to_json()}
        unfinished = folder / (HEADER_FILE + ".tmp")
        unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.rename(unfinished, folder / HEADER_FILE)
