"""Write the tables of README.md and docs/ that come from the files in benchmarks/.

    python -m scripts.bench.tables          # rewrites all of them
    python -m scripts.bench.tables --check  # names those that are not current, and fails

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. `benchmarks/tables.toml` has a header and a
Jinja template of the rows of each (without a header one of all of it), and the sentences with figures that a page must
have. A name begins with that of the table's file, which a template sees as `file`; it has `FILTERS` beside those of
Jinja. A first cell like that above it stays empty.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined


REPOSITORY = Path(__file__).resolve().parents[2]
END = "<!-- end of table -->\n"
BLOCK = re.compile(rf"<!-- table: (.+?) -->\n(.*?){END}", re.DOTALL)
OTHERS = ("options", "families", "families.json", "frozen_families.json", "records")
"""Tables of what the package has, which `scripts/options_table.py`, `tests/families_table.py` and a test make."""


@cache
def content(file: str) -> Any:
    """Read a file of benchmarks/, and add what is derived from it."""
    found = json.loads((REPOSITORY / "benchmarks" / file).read_text(encoding="utf-8"))
    if file in DERIVED:
        DERIVED[file](found)
    return found


# ---- formats


def spread(found: Any, form: str = ".2f") -> str:
    """Format a median with the smallest and the largest value, or with quantiles."""
    ends = found.get("range") or [value for name, value in found.items() if name != "median"]
    middle, low, high = (format(each, form) for each in (found["median"], *ends))
    return f"{middle} [{low}, {high}]"


def difference(found: Any, form: str = ".2f") -> str:
    """Format a mean difference in points with its 95 % interval, empty where there is none."""
    mean = found.get("mean_difference_points", found.get("mean"))
    interval = found.get("interval_95_points", found.get("interval_95"))
    shown = format(mean, f"+{form}") if mean or interval else ""
    low, high = (format(end, form) for end in interval or (0.0, 0.0))
    return f"{shown} [{low}, {high}]" if interval else shown


def points(found: Mapping[str, Any] | None) -> str:
    """Format a mean difference with its sign and its interval, of two values both instead; empty for none."""
    if found is None or found["mean"] is None:
        return ""
    if len(found["points"]) == 2:
        return ", ".join(f"{value:+.2f}" for value in found["points"])
    low, high = found.get("interval_95", (None, None))
    return f"{found['mean']:+.2f}" + ("" if low is None else f" [{low:+.2f}, {high:+.2f}]")


MODELS = {
    "bert-6x384": "BERT 6 x 384", "vit-12x192": "ViT 12 x 192", "120M": "134 M", "1B": "1 B", "bert": "BERT",
    "vit": "ViT",
}  # fmt: skip
SETTINGS = {
    "sst2 adamw": "SST-2, AdamW, 1e-4", "sst2 momentum": "SST-2, momentum, 5e-3",
    "cifar10 adamw": "CIFAR-10, AdamW, 3e-4", "cifar10 momentum": "CIFAR-10, momentum, 2e-3",
}  # fmt: skip
"""Tasks, optimizers and learning rates of the study of asynchronous schedules."""


TITLES = {
    "sst2": "SST-2, accuracy",
    "sst2_no_dropout": "SST-2 without dropout, accuracy",
    "squad": "SQuAD, F1",
    "squad_no_dropout": "SQuAD without dropout, F1",
    "answers": "tags of SQuAD's answers, F1",
    "answers_no_dropout": "tags of SQuAD's answers without dropout, F1",
    "cifar10": "CIFAR-10, accuracy",
    "cifar10_augmented": "CIFAR-10 with random crop and flip, accuracy",
    "entailment": "does a sentence answer a question of SQuAD, accuracy",
    "digits": "handwritten digits, accuracy",
    "sst2_middle": "6,400 phrases of SST-2, accuracy",
    "squad_middle": "3,200 questions of SQuAD, F1",
    "sst2_long": "20,000 phrases of SST-2, accuracy",
}
"""Tasks of accuracy against time."""


def matching(found: Mapping[str, Any], pattern: str = "*") -> list[tuple[str, Any]]:
    """List the items whose keys match, without a file's header."""
    return [(key, value) for key, value in found.items() if key != "machine" and fnmatchcase(key, pattern)]


def model(key: str, parts: str = "") -> str:
    """Name the model that a key begins with; "all" leaves its sizes."""
    return ", ".join(MODELS.get(part, part) for part in key.split(", ")[: None if parts else 1])


FILTERS: dict[str, Callable[..., Any]] = {
    "spread": spread, "difference": difference, "matching": matching, "model": model, "points": points,
    "setting": SETTINGS.__getitem__,
    "f": lambda value, form, factor=1: format(value * factor, form),
    # Figures in words: 1.7 points [1.4, 2.1].
    "gain": lambda found, form=".1f": difference(found, form).replace("+", "").replace(" [", " points ["),
    "percent": lambda value, form=".1f": f"{100 * value:{form}} %",
    # The largest relative difference, and as text: 1.1e-7.
    "off": lambda found, expected: max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)),
    "small": lambda value: f"{value:.1e}".replace("e-0", "e-") if value else "0",
}  # fmt: skip


# ---- what is derived


def _derive_front(found: Any) -> None:
    """Add titles, figures in words, and the rows of the short table: contenders with as many seeds as the curve."""
    rows = found["table"] = {}
    for name, task in found["tasks"].items():
        full = {row["settings"]["num_epochs"]: row for row in task["rows"] if "against_full_at_equal_time" not in row}
        task["title"] = TITLES[name]
        for row in task["rows"]:
            row |= {"task": TITLES[name], "points": points(row.get("against_full_at_equal_time"))}
            faster = row.get("times_as_fast_at_equal_score")
            row["as fast"] = f"{faster:.2f}" if faster else "beyond" if row.get("score_is_beyond_full") else "below"
            if same := full.get(row["settings"]["num_epochs"]):
                pairs = zip(row["seconds"], same["seconds"], strict=False)
                row["time of as many epochs"] = median(own / other for own, other in pairs)
            if row["points"] and len(row["seeds"]) >= min(len(each["seeds"]) for each in full.values()):
                rows[f"{name}, {row['contender']}"] = row


DERIVED = {"front.json": _derive_front}


# ---- pages


@cache
def recipes() -> dict[str, Any]:
    """Read how tables are made, and the sentences."""
    return tomllib.loads((REPOSITORY / "benchmarks" / "tables.toml").read_text(encoding="utf-8"))


def rendered(template: str, file: str) -> str:
    """Fill a template in with the values of a file."""
    jinja = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    jinja.filters |= FILTERS
    return jinja.from_string(template).render(file=content(file), content=content)


def table(name: str) -> str:
    """Make a table by its recipe, or `FILE KEY > KEY`, which is a list of rows in that file."""
    if name not in recipes()["tables"] and " " in name:
        file, _, path = name.partition(" ")
        return rows_as_table(reduce(lambda found, key: found[key], path.split(" > "), content(file)))
    recipe, file = recipes()["tables"][name], name.partition(",")[0]
    if not (REPOSITORY / "benchmarks" / file).exists():
        return ""  # Its place is on the page before anything has been measured.
    rows = rendered(recipe["rows"], file)
    if "header" not in recipe:
        return rows
    text, above = f"| {recipe['header']} |\n{'|---' * (recipe['header'].count(' | ') + 1)}|\n", ""
    for line in filter(None, rows.splitlines()):
        first = line.partition(" | ")[0]
        text += f"| {line.removeprefix(first) if first == above else line} |\n".replace("|  |", "| |")
        above = first
    return text


def rows_as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Make a table of rows with the same keys; None is an empty cell."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(each) for each in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def texts() -> dict[Path, str]:
    """Read the pages that may have tables."""
    found = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    return {page: page.read_text(encoding="utf-8") for page in found}


def with_table(text: str, name: str, body: str) -> str:
    """Put a table into its place on a page."""
    begin = f"<!-- table: {name} -->\n"
    before, after = text.split(begin)
    return f"{before}{begin}{body}{END}{after.split(END, 1)[1]}"


def written_table(text: str, name: str) -> str:
    """Find a table as it stands on a page."""
    return dict(BLOCK.findall(text))[name]


def faults() -> list[str]:
    """Say which tables and sentences of which pages are not current, and which stand on none."""
    written = {str(page.relative_to(REPOSITORY)): text for page, text in texts().items()}
    blocks = [(page, *block) for page, text in written.items() for block in BLOCK.findall(text)]
    found = [f"{page}: {name}" for page, name, body in blocks if name not in OTHERS and body != table(name)]
    standing = {name for _, name, _ in blocks}
    found += [f"on no page: {name}" for name in recipes()["tables"] if name not in standing]
    for each in recipes()["sentences"]:
        words = rendered(each["words"], each["file"])
        if words not in " ".join(written[each["page"]].split()):
            found.append(f"{each['page']}: it should say {words!r}")
    return found


def main() -> None:
    if "--check" not in sys.argv:
        for page, text in texts().items():
            for name in {name for name, _ in BLOCK.findall(text)}.difference(OTHERS):
                text = with_table(text, name, table(name))
            page.write_text(text, encoding="utf-8")
    if found := faults():
        sys.exit("\n".join(["Not what benchmarks/ says:", *found]))


if __name__ == "__main__":
    main()
