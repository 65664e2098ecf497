"""The table of model families in docs/models.md, made from what the tests cover.

    python -m tests.families_table

rewrites it in place.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_pipetransformer.splitters.families import find_splitter
from tests.decoders import DECODERS, make_decoder
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

_DECODERS = {
    "gpt2": "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)", "phi3": "Phi-3", "olmo2": "OLMo 2", "smollm3": "SmolLM3", "gpt_neox": "GPT-NeoX",
    "opt": "OPT", "mixtral": "Mixtral", "qwen2_moe": "Qwen2-MoE", "qwen3_moe": "Qwen3-MoE",
}  # fmt: skip
_CLASSIFIERS = {
    "gpt2": "sequence classification, token classification",
    "llama": "sequence classification",
    "qwen2": "sequence classification, token classification",
    "qwen3": "sequence classification",
    "mixtral": "sequence classification",
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
        lines.append(_row(family, [_TASKS[MODELS[name].task] for name in members], build_model(members[0])))
    for name in DECODERS:
        tasks = ["next words", *([_CLASSIFIERS[name]] if name in _CLASSIFIERS else [])]
        lines.append(_row(_DECODERS[name], tasks, make_decoder(name)))
    return "".join(f"{line}\n" for line in lines)


def _row(family: str, tasks: list[str], model: Any) -> str:
    cuts = "between attention and MLP" if find_splitter(model).cuts_inside_layers else "between layers"
    return f"| {family} | {cuts} | {', '.join(tasks)} | {', '.join(attention_implementations(model))} |"


def written_table() -> str:
    """The table as it stands there."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def main() -> None:
    before, after = PAGE.read_text(encoding="utf-8").split(BEGIN + written_table() + END)
    PAGE.write_text(before + BEGIN + families_table(version("transformers")) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
