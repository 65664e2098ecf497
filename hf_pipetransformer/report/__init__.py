"""Log lines for the user who started the run."""

from __future__ import annotations

import logging
import sys

from tqdm.auto import tqdm


logger = logging.getLogger("hf_pipetransformer")


class _AboveProgressBar(logging.Handler):
    """Log handler that writes above a tqdm progress bar instead of breaking it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def announce(text: str) -> None:
    """Log one line for the user, unless this logger's level was set above INFO."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _AboveProgressBar()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.info(text)
