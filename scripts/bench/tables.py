"""Write the tables of README.md and docs/ that come from the files in benchmarks/.

    python -m scripts.bench.tables          # rewrites all of them
    python -m scripts.bench.tables --check  # names those that are not current, and fails

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. `benchmarks/tables.toml` says how each is
made, and has the sentences with figures that a page must have. A name begins with that of the table's file. A table
has a `header`, and a `row` for every value on the path `rows`, whose keys may have wildcards; or `lines`, if each is
different. `names` are of the row's keys, for the format `name`; only these have a row then. A first cell like that
above it stays empty.

`{PATH:FORMAT}` is a value. A path is keys of JSON with `>` between them; it begins at the row, with `>` at the file,
with the name of a file there. `.` is the row itself, `@` its key, `@0` the first that a wildcard matched, `*` all of a
list, and `a=1&b=2` the one of a list that has these values. A format is one of Python's, after any of `FORMATS`.
"""

from __future__ import annotations

import json
import re
import string
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.front.report import TITLES, as_markdown, points
from scripts.bench.peers import markdown


REPOSITORY = Path(__file__).resolve().parents[2]
END = "<!-- end of table -->\n"
BLOCK = re.compile(rf"<!-- table: (.+?) -->\n(.*?){END}", re.DOTALL)
OTHERS = ("options", "families", "families.json", "records")
"""Tables of what the package has, which `scripts/options_table.py`, `tests/families_table.py` and a test make."""


class Cells(string.Formatter):
    """Fill a template in with values of the files.

    Args:
        file: where paths begin that begin with `>`.
        keys: of the row, as wildcards matched them.
        value: of the row.
    """

    def __init__(self, file: str, keys: Sequence[str] = (), value: Any = None, names: Mapping[str, str] = {}) -> None:
        self.file, self.keys, self.value, self.names = file, keys, value, names

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        first, *rest = field_name.split(">")
        if first in ("@", "@0") and not rest:
            return self.keys[-1 if first == "@" else 0], field_name
        if first.endswith(".json"):
            value, path = content(first), rest
        else:
            value, path = (content(self.file), rest) if not first else (self.value, [first, *rest])
        for number, key in enumerate(path):
            if key == "*":
                return [reduce(step, path[number + 1 :], each) for each in value], field_name
            value = step(value, {"@": self.keys[-1:], "@0": self.keys[:1]}.get(key, [key])[0])
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        word, _, rest = format_spec.partition(" ")
        if word == "name":
            return self.names[value]
        if word in JOINED:
            values = value if isinstance(value, list) else [value]
            return JOINED[word].join(self.format_field(each, rest) for each in values)
        if re.fullmatch(r"x[\d.e-]+", word):
            return self.format_field(value * float(word[1:]), rest)
        return FORMATS[word](value, rest) if word in FORMATS else format(value, format_spec)


@cache
def content(file: str) -> Any:
    """Read a file of benchmarks/, and add what is derived from it."""
    found = json.loads((REPOSITORY / "benchmarks" / file).read_text(encoding="utf-8"))
    if file in DERIVED:
        DERIVED[file](found)
    return found


def step(value: Any, key: str) -> Any:
    """Go one key down a path."""
    if key == ".":
        return value
    if not isinstance(value, list):
        return value[key]
    if re.fullmatch(r"-?\d+", key):
        return value[int(key)]
    wanted = [condition.split("=", 1) for condition in key.split("&")]
    [found] = [each for each in value if all(fnmatchcase(str(each.get(name)), text) for name, text in wanted)]
    return found


def matches(value: Any, path: Sequence[str], names: Mapping[str, str]) -> Iterator[tuple[list[str], Any]]:
    """Find all values on a path with wildcards, each with the keys that these matched."""
    if not path:
        yield [], value
        return
    key, *rest = path
    if not re.search(r"[*\[]", key):
        found = [((), step(value, key))]
    elif isinstance(value, list):
        found = [((str(number),), each) for number, each in enumerate(value)]
    else:
        named = [each for each in names if each in value]
        found = [((each,), value[each]) for each in named or value if each != "machine" and fnmatchcase(each, key)]
    for own, each in found:
        for further, last in matches(each, rest, names):
            yield [*own, *further], last


# ---- formats


ENDS = ("min", "max", "quantile_10", "quantile_90")


def spread(found: Any, form: str) -> str:
    """Format a median with the smallest and the largest value, or with quantiles."""
    ends = found.get("range") or [found[name] for name in found if name in ENDS]
    middle, low, high = (format(each, form or ".2f") for each in (found["median"], *ends))
    return f"{middle} [{low}, {high}]"


def difference(found: Any, form: str) -> str:
    """Format a mean difference in points with its 95 % interval, empty where there is none."""
    mean = found.get("mean_difference_points", found.get("mean"))
    interval = found.get("interval_95_points", found.get("interval_95"))
    shown = format(mean, f"+{form or '.2f'}") if mean or interval else ""
    low, high = (format(end, form or ".2f") for end in interval or (0.0, 0.0))
    return f"{shown} [{low}, {high}]" if interval else shown


def suite(counts: Mapping[str, int], form: str) -> str:
    """Write the cells of a suite of tests."""
    total = {**counts, "not applicable": counts["not applicable"] + counts.get("skipped by the suite", 0)}
    return " | ".join(
        str(total[key]) for key in ("passed", "failed", "differs by design", "needs CUDA", "not applicable")
    )


JOINED = {"each": ", ", "and": " and ", "to": " to "}
"""Formats of a list: that of its values follows."""
MODELS = {
    "bert-6x384": "BERT 6 x 384", "vit-12x192": "ViT 12 x 192", "120M": "134 M", "1B": "1 B", "bert": "BERT",
    "vit": "ViT",
}  # fmt: skip
SETTINGS = {
    "sst2 adamw": "SST-2, AdamW, 1e-4", "sst2 momentum": "SST-2, momentum, 5e-3",
    "cifar10 adamw": "CIFAR-10, AdamW, 3e-4", "cifar10 momentum": "CIFAR-10, momentum, 2e-3",
}  # fmt: skip
"""Tasks, optimizers and learning rates of the study of asynchronous schedules."""
FORMATS = {
    "spread": spread, "difference": difference, "suite": suite,
    "points": lambda found, form: points(found),
    "count": lambda values, form: str(len(values)),
    "setting": lambda key, form: SETTINGS[key],
    # The model that a key begins with; "model all" leaves its sizes.
    "model": lambda key, form: ", ".join(MODELS.get(part, part) for part in key.split(", ")[: None if form else 1]),
    # Figures in words: 1.7 points [1.4, 2.1].
    "gain": lambda found, form: difference(found, form or ".1f").replace("+", "").replace(" [", " points ["),
    "percent": lambda value, form: f"{100 * value:{form or '.1f'}} %",
    # A relative difference: 1.1e-7.
    "small": lambda value, form: f"{value:{form or '.1e'}}".replace("e-0", "e-") if value else "0",
    # The number of a key such as F=4.
    "number": lambda key, form: key.partition("=")[2],
    # The part of a text before a word.
    "before": lambda text, form: text.partition(f" {form}")[0],
}  # fmt: skip


# ---- what is derived


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _derive_cache(found: Any) -> None:
    runs = found["runs"]["contenders"]
    for run in runs.values():
        run["as fast as DDP"] = runs["Trainer with DDP"]["seconds"]["median"] / run["seconds"]["median"]
    some = found["runs_of_some"]
    for run in some["contenders"].values():
        run["share of the steps"] = len(run["seconds a step by epoch"]) / some["epochs"]
    row = found["throughput"]["bert-6x384, 32 tokens, batch 32"]["F=5"]
    row["share of reading"] = row["seconds a step, reading rows"]["median"] / row["seconds a step"]["median"]
    profiler = found["profiler"]
    profiler["worst of the others"] = max(cell["on over off"] for cell in profiler["table"] if not cell["right"])


def _derive_causal(found: Any) -> None:
    whole = found["Trainer, QLoRA"]
    for run in (run for name, run in found.items() if name != "machine"):
        run["of losses"] = _relative(run["losses"], whole["losses"])
        norms = list(zip(run["gradient norms"], whole["gradient norms"], strict=True))
        run["of norms"] = [_relative([a], [b]) for a, b in norms]
        run["of three norms"] = max(run["of norms"][:3])
        run.setdefault("perplexity", [])


def _derive_study(found: Any) -> None:
    """Add rows by number of stages and task, and what prediction leaves of the distance between weights."""
    table = found["table"] = {}
    for row in found["rows"]:
        setting = f"{row['task']} {row['optimizer']}"
        if row["against"] == "synchronous" and not row["variant"]:
            # Synchronous runs have one stage, and stand beside the others of both numbers.
            for stages in (2, 4) if row["num_stages"] == 1 else (row["num_stages"],):
                table.setdefault(str(stages), {}).setdefault(setting, {})[row["kind"]] = row
        elif row["against"] == "pipeoptim":
            table.setdefault("parts", {}).setdefault(setting, {})[row["variant"]] = row
        if row["kind"] == "pipeoptim" and row.get("errors") and not row["variant"]:
            stages = [stage for part in row["errors"] if part["until_step"] > 20 for stage in part["stages"] if stage]
            ratios = [stage["error"] / stage["error_unpredicted"] for stage in stages]
            of_setting = table.setdefault("errors", {}).setdefault(setting, {})
            of_setting[f"K={row['num_stages']}"] = [min(ratios), max(ratios)]


def _derive_front(found: Any) -> None:
    """Add the rows of the table: contenders with as many seeds as the curve, task by task."""
    rows = found["table"] = {}
    for name, task in found["tasks"].items():
        full = {row["settings"]["num_epochs"]: row for row in task["rows"] if "against_full_at_equal_time" not in row}
        for row in task["rows"]:
            row |= {"task": TITLES[name], "points": points(row.get("against_full_at_equal_time"))}
            faster = row.get("times_as_fast_at_equal_score")
            row["as fast"] = f"{faster:.2f}" if faster else "beyond" if row.get("score_is_beyond_full") else "below"
            if same := full.get(row["settings"]["num_epochs"]):
                pairs = zip(row["seconds"], same["seconds"], strict=False)
                row["time of as many epochs"] = median(own / other for own, other in pairs)
            if row["points"] and len(row["seeds"]) >= min(len(each["seeds"]) for each in full.values()):
                rows[f"{name}, {row['contender']}"] = row


def _derive_core(found: Any) -> None:
    for model in found["schedules"].values():
        for key in [key for key in model if key.startswith("M=")]:
            shares = model[key]["share of the ideal"]
            model[key]["best share"] = {side: shares[best]["median"] for side, best in model[key]["best"].items()}


def _derive_async(found: Any) -> None:
    """Add the seconds of the best synchronous schedule, and the range of gains where real models computed."""
    gains = []
    for key in [key for key in found if "mini-batch" in key]:
        run = found[key]
        run["seconds of the best"] = run["seconds a step"][run["best synchronous"]]["median"]
        if "emulated" not in key:
            gains.append(run["faster than the best synchronous"]["pipeoptim"]["median"])
    found["gains of pipeoptim"] = [min(gains), max(gains)]


DERIVED = {
    "cache.json": _derive_cache, "causal.json": _derive_causal, "async_study.json": _derive_study,
    "front.json": _derive_front, "pipeline_core.json": _derive_core,
    "async.json": _derive_async,
}  # fmt: skip


# ---- pages


@cache
def recipes() -> dict[str, Any]:
    """Read how tables are made, and the sentences."""
    return tomllib.loads((REPOSITORY / "benchmarks" / "tables.toml").read_text(encoding="utf-8"))


def table(name: str) -> str:
    """Make a table by its recipe, or `FILE KEY > KEY`, which is a list of rows in that file."""
    if name == "peers.json":
        return markdown(content(name))
    if name not in recipes()["tables"] and " " in name:
        file, _, path = name.partition(" ")
        return rows_as_table(reduce(lambda found, key: found[key], path.split(" > "), content(file)))
    recipe, file = recipes()["tables"][name], name.partition(",")[0]
    lines = [Cells(file, (), content(file)).format(line) for line in recipe.get("lines", ())]
    if "rows" in recipe:
        names = recipe.get("names", {})
        for keys, value in matches(content(file), recipe["rows"].split(">"), names):
            lines.append(Cells(file, keys, value, names).format(recipe["row"]))
    text, above = f"| {recipe['header']} |\n{'|---' * (recipe['header'].count(' | ') + 1)}|\n", ""
    for line in lines:
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


def pages() -> list[Path]:
    """List the pages that may have tables."""
    return [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]


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
    texts = {str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8") for page in pages()}
    found = []
    for page, text in texts.items():
        blocks = [(name, body) for name, body in BLOCK.findall(text) if name not in OTHERS]
        found += [f"{page}: {name}" for name, body in blocks if body != table(name)]
    standing = {name for text in texts.values() for name, _ in BLOCK.findall(text)}
    found += [f"on no page: {name}" for name in recipes()["tables"] if name not in standing]
    for each in recipes()["sentences"]:
        words = Cells(each["file"], (), content(each["file"])).format(each["words"])
        if words not in " ".join(texts[each["page"]].split()):
            found.append(f"{each['page']}: it should say {words!r}")
    if texts["docs/front.md"] != as_markdown(content("front.json")):
        found.append("docs/front.md")
    return found


def main() -> None:
    if "--check" not in sys.argv:
        for page in pages():
            text = page.read_text(encoding="utf-8")
            for name, _ in BLOCK.findall(text):
                if name not in OTHERS:
                    text = with_table(text, name, table(name))
            page.write_text(text, encoding="utf-8")
        (REPOSITORY / "docs" / "front.md").write_text(as_markdown(content("front.json")), encoding="utf-8")
    if found := faults():
        sys.exit("\n".join(["Not what benchmarks/ says:", *found]))


if __name__ == "__main__":
    main()
