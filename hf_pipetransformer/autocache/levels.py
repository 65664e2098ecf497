"""The level ids of a store: small numbers for the digests that say what a row was computed with."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from hf_pipetransformer.autocache.table import StoreDamagedError


LEVELS_FILE = "levels.jsonl"


class LevelTable:
    """Gives each key an id, 1, 2, ..., the same one in all processes, in the order in which keys were first asked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEVELS_FILE
        self._ids: dict[str, int] = {}

    def level_of(self, key: str) -> int:
        """The id of `key`; a new one is appended to the file.

        Raises:
            StoreDamagedError: the file is not one of this table.
        """
        if key not in self._ids:
            with open(self._path, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                content = file.read()
                whole = content.rfind(b"\n") + 1
                # A line that a killed process left half written was never given out.
                file.truncate(whole)
                self._ids = self._parse(content[:whole])
                if key not in self._ids:
                    level = len(self._ids) + 1
                    file.write(json.dumps({"level": level, "key": key}).encode() + b"\n")
                    file.flush()
                    self._ids[key] = level
        return self._ids[key]

    def _parse(self, content: bytes) -> dict[str, int]:
        try:
            lines = [json.loads(line) for line in content.splitlines()]
            ids = {str(line["key"]): int(line["level"]) for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamagedError(
                f"{self._path} is not a table of levels ({type(error).__name__}: {error})."
            ) from error
        if list(ids.values()) != list(range(1, len(lines) + 1)):
            raise StoreDamagedError(f"{self._path} names levels {list(ids.values())}: expected 1, 2, ... in order.")
        return ids
