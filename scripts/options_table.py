"""The table of options in docs/options.md, made from the fields of `PipeTransformerArguments`.

    python -m scripts.options_table

rewrites it in place.
"""

from __future__ import annotations

import re
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from hf_pipetransformer.options.arguments import READERS, PipeTransformerArguments
from scripts.bench.tables import with_table


PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
REFERENCE = re.compile(r"See docs/([\w.]+), ([^.]+)\.")


def options_table() -> str:
    """Return a row of name, default and help for each option of the pipeline, in the order of their declaration."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in fields(PipeTransformerArguments):
        if option.name in READERS:
            meaning = REFERENCE.sub(_link, option.metadata["help"])
            lines.append(f"| `{option.name}` | {_shown(option.default)} | {meaning} |")
    return "".join(f"{line}\n" for line in lines)


def _link(reference: re.Match[str]) -> str:
    page, heading = reference.groups()
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    assert re.search(f"^#+ {re.escape(heading)}$", text, re.MULTILINE), f"docs/{page} has no heading {heading!r}"
    return f"See [{heading}]({page}#{heading.lower().replace(' ', '-')})."


def _shown(default: Any) -> str:
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float) and float(f"{default:g}") != default:
        return str(Fraction(default).limit_denominator(100))
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "options", options_table()), encoding="utf-8")


if __name__ == "__main__":
    main()
