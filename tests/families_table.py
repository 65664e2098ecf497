"""The table of model families in docs/models.md, made from what the tests cover.

    python -m tests.families_table

rewrites it in place.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from hf_pipetransformer.splitters import find_splitter
from tests.models import MODELS, attention_implementations, build_model


PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN = "<!-- Made by `python -m tests.families_table`. -->\n"
END = "<!-- End of the table. -->\n"

_TASKS = {
    "sequence": "sequence classification",
    "question": "question answering",
    "token": "token classification",
    "masked": "masked words",
    "image": "image classification",
    "audio": "audio classification",
}


def families_table(release: str) -> str:
    """Rows of family, cuts, tasks and attention implementations; `release` is the version of transformers."""
    names: dict[str, list[str]] = {}
    for name, tiny in MODELS.items():
        names.setdefault(tiny.family, []).append(name)
    lines = [
        f"| family | a stage boundary may fall | tested tasks | tested attention (transformers {release}) |",
        "|---|---|---|---|",
    ]
    for family, members in names.items():
        model = build_model(members[0])
        cuts = "between attention and MLP" if find_splitter(model).cuts_inside_layers else "between layers"
        tasks = ", ".join(_TASKS[MODELS[name].task] for name in members)
        lines.append(f"| {family} | {cuts} | {tasks} | {', '.join(attention_implementations(model))} |")
    return "".join(f"{line}\n" for line in lines)


def written_table() -> str:
    """The table as it stands there."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    before, after = PAGE.read_text(encoding="utf-8").split(BEGIN + written_table() + END)
    PAGE.write_text(before + BEGIN + families_table(version("transformers")) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
