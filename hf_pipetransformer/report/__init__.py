"""Lines for the person who started the run."""

from __future__ import annotations

import logging
import sys

from tqdm.auto import tqdm


logger = logging.getLogger("hf_pipetransformer")


class _AboveProgressBar(logging.Handler):
    """Writes a line without tearing the progress bar that may stand below it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def announce(text: str) -> None:
    """One readable line for the person who started the run, unless a level above INFO was set for this logger."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _AboveProgressBar()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.info(text)
