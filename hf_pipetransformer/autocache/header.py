"""What was decided when a store was made, kept beside its tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import xxhash

from hf_pipetransformer.autocache.files import Folder
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import StoreDamagedError


HEADER_FILE = "store.json"
DROPPED_FILE = "dropped"

# The heads of tables are compared with what Arrow writes now.
_VERSION = f"3, Arrow {pa.__version__}"


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
    def read(cls, folder: Folder) -> Header:
        """The header of the store in `folder`.

        Raises:
            StoreDamagedError: there is none, it is not what was written, or it is of another version.
        """
        try:
            values = json.loads(folder.read(HEADER_FILE))
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']}, expected {_VERSION}")
            if values.pop("hash") != _hash(values):
                raise ValueError("its hash does not hold")
            return cls(
                store_id=str(values["store_id"]),
                num_samples=int(values["num_samples"]),
                max_bytes=int(values["max_bytes"]),
                num_writers=int(values["num_writers"]),
                row_format=RowFormat.from_json(values["row_format"]),
                row_length=int(values["row_length"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreDamagedError(
                f"{folder.path / HEADER_FILE} is not the header of an activation store "
                f"({type(error).__name__}: {error})."
            ) from error

    def write(self, folder: Folder) -> None:
        values = {"version": _VERSION, **vars(self), "row_format": self.row_format.to_json()}
        folder.write(HEADER_FILE, json.dumps({**values, "hash": _hash(values)}, indent=2).encode() + b"\n")


def _hash(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
