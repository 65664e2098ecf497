"""Log lines for the user who started the run."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from tqdm.auto import tqdm


logger = logging.getLogger("hf_pipetransformer")


class _AboveProgressBar(logging.Handler):
    """Log handler that writes above a tqdm progress bar instead of breaking it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = getattr(record, "style", "yellow" if record.levelno >= logging.WARNING else "")
            tqdm.write(styled(self.format(record), style, sys.stderr), file=sys.stderr)
        # As logging's own handlers: a line that cannot be shown must not end a training.
        except Exception:
            self.handleError(record)


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return a text in a style of rich where `stream` is a terminal and rich is installed; else as it is."""
    if not style or not stream.isatty():
        return text
    try:
        from rich.console import Console  # Only a terminal needs it.
        from rich.text import Text
    except ImportError:
        return text
    console = Console(file=stream)
    with console.capture() as captured:
        # As `Text`, in which brackets are no markup; unwrapped, because lines are the same without a terminal.
        console.print(Text(text, style), soft_wrap=True, end="")
    return captured.get()


def announce(text: str, is_decision: bool = False) -> None:
    """Log one line for the user, unless this logger's level was set above INFO.

    A decision, on what freezes or on the layout, stands out on a terminal.
    """
    # A level that the user set decides; the root's WARNING would hide every decision.
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    # Where the program has configured logging, its format and its files apply.
    if not logger.hasHandlers():
        handler = _AboveProgressBar()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.info(text, extra={"style": "bold cyan"} if is_decision else None)


def progress_bar(what: str, total: int, is_shown: bool) -> tqdm:
    """Make a progress bar that appears once its work has taken 3 s, unless this logger's level was set above INFO.

    `update(0)` shows that the time passes.
    """
    return tqdm(
        desc=what,
        total=total,
        delay=3,
        miniters=0,
        leave=False,
        disable=not (is_shown and logger.isEnabledFor(logging.INFO)),
    )


def _counted(amount: float, unit: str) -> str:
    return f"{amount:,.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"


def in_bytes(size: float) -> str:
    """Format bytes with two or three digits, such as "390 GB" or "4.2 MB" (powers of 1000)."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return _counted(size / factor, unit)
    return _counted(size / 1e3, "kB")


_JOINERS = "\u200c\u200d"
"""Invisible characters that words and emoji are made of."""


def printable(text: str) -> str:
    """Return a name with signs in place of what no page can show or no script can hold: controls, line separators."""
    return "".join(each if each.isprintable() or each in _JOINERS else "\N{REPLACEMENT CHARACTER}" for each in text)


_BLOCKS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


def duration(seconds: float) -> str:
    """Format seconds in the largest block that gives 2 or more, such as "272 days" or "3.5 minutes"; or "14 ms"."""
    for block, size in _BLOCKS:
        if seconds >= 2 * size:
            return _counted(seconds / size, block)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
