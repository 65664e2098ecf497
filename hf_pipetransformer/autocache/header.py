"""What was decided when a store was made, kept beside its tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import xxhash

from hf_pipetransformer.autocache.files import PrivateFolder
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import StoreDamagedError


HEADER_FILE = "store.json"
DROPPED_FILE = "dropped"

# Where the columns of a table begin follows from what Arrow writes before them now.
_VERSION = f"5, Arrow {pa.__version__}"


@dataclass(frozen=True)
class Header:
    """What was decided when a store was made: see `ActivationStore.create`."""

    store_id: str
    key: str
    num_samples: int
    max_bytes: int
    num_writers: int
    row_format: RowFormat
    row_length: int
    run_id: str
    """Of the run that has the store now; the one before may have read other inputs."""

    @classmethod
    def read(cls, folder: PrivateFolder, key: str | None = None) -> Header:
        """The header of the store in `folder`, which must be that of `key` if one is given.

        Raises:
            StoreDamagedError: there is none, it is not what was written, or it is of another version or another key.
        """
        try:
            values = json.loads(folder.read(HEADER_FILE))
            if values.pop("hash") != _hash(values):
                raise ValueError("its hash does not hold")
            if (version := values.pop("version")) != _VERSION:
                raise ValueError(f"version {version}, expected {_VERSION}")
            header = cls(**{**values, "row_format": RowFormat.from_json(values["row_format"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreDamagedError(
                f"{folder.path / HEADER_FILE} is not the header of an activation store "
                f"({type(error).__name__}: {error})."
            ) from error
        if key is not None and header.key != key:
            # The name of a folder is no proof: folders are copied and renamed.
            raise StoreDamagedError(
                f"{folder.path} has the store of {header.key!r}: expected {key!r}. The folder was copied or renamed; "
                "delete it, or give it its own name back."
            )
        return header

    def write(self, folder: PrivateFolder) -> None:
        values = {"version": _VERSION, **vars(self), "row_format": self.row_format.to_json()}
        folder.write(HEADER_FILE, json.dumps({**values, "hash": _hash(values)}, indent=2).encode() + b"\n")


def _hash(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
