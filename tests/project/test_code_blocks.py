"""Every code block of README and the pages runs: Python on tiny made-up data, commands by their own parsers.

Comments before a block say how, and are seen by no reader of the site:

    <!-- test: setup ... -->            Python that runs before the block; the lines after `setup`
    <!-- test: OLD => NEW -->           replaces a part of the block, such as the name of a model on the hub
    <!-- test: prints TEXT -->          what the block has to print
    <!-- test: exits STATUS -->         what its last command returns
    <!-- test: elsewhere, FILE::NAME -->  the test that runs it
    <!-- test: not run, REASON -->

Blocks of a page share a folder and their names, as those of a notebook do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from hf_pipetransformer import cli


REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted(REPOSITORY.glob("docs/**/*.md"))]
DIRECTIVE = re.compile(r"<!-- test: (.*?)\s*-->", re.DOTALL)
FENCE = re.compile(r"```(\w*)(?: title=\"([^\"]+)\")?")
INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
SHOWN = {"text", "bibtex"}
"""Languages of blocks in which nothing can be run: drawings, what a run prints, a citation."""

RUN = ("plan", "config")
"""Commands of `hf-pipetransformer` that take a moment; of the others only the options are read."""


@dataclass
class Block:
    """One fenced block of a page, and what is said of it."""

    where: str
    language: str
    text: str
    title: str | None = None
    directives: list[str] = field(default_factory=list)

    def said(self, word: str) -> list[str]:
        """Return what follows `word` in the directives that begin with it."""
        start = re.compile(rf"{word}\b,?\s*")
        return [each[match.end() :] for each in self.directives if (match := start.match(each))]

    @property
    def replaced(self) -> str:
        """The text as it is run."""
        text = self.text
        for old, arrow, new in (each.partition(" => ") for each in self.directives):
            if arrow and not old.startswith("setup"):
                assert old in text, f"{self.where}: {old!r} is to be replaced and is not there"
                text = text.replace(old, new)
        return text


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    comments = {match.start(): match for match in DIRECTIVE.finditer(text)}
    found, waiting, position = [], [], 0
    while position < len(text):
        end = text.find("\n", position) + 1 or len(text)
        line = text[position:end].strip()
        if match := comments.get(position):
            waiting.append(match[1])
            end = text.find("\n", match.end()) + 1 or len(text)
        elif line.startswith("```"):
            fence = FENCE.fullmatch(line)
            where = f"{page.relative_to(REPOSITORY)}:{text.count(chr(10), 0, position) + 1}"
            assert fence, f"{where}: found {line}, expected a language and perhaps a title"
            close = text.index("\n```\n", position)
            content = INCLUDED.sub(lambda match: (REPOSITORY / match[1]).read_text("utf-8"), text[end : close + 1])
            found.append(Block(where, fence[1] or _language(page, content), content, fence[2], waiting))
            waiting, end = [], close + len("\n```\n")
        else:
            assert not (line and waiting), f"{page.name}: {waiting} is said of no block, but of {line!r}"
        position = end
    return found


def _language(page: Path, content: str) -> str:
    if content.split(maxsplit=1)[0] in Commands.of:
        return "bash"
    assert page == README, f"{page.name}: a block without a language: {content}"
    return "text"


class Parsed(Exception):
    """Ends a script after its options were read."""


class Commands:
    """Commands of a page: they run where that takes a moment, and go through their real parsers otherwise."""

    of: dict[str, Callable[[Commands, list[str]], None]] = {}

    def __init__(self, written: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.written, self.monkeypatch = written, monkeypatch

    def run(self, text: str) -> None:
        """Run the commands of a block, one a line unless a backslash continues it."""
        lines = text.replace("\\\n", " ").splitlines()
        for words in (shlex.split(line, comments=True) for line in lines):
            if words:
                assert words[0] in self.of, f"no way to try `{words[0]}`: say in a comment why it is not run"
                self.of[words[0]](self, words[1:])

    def make(self, words: list[str]) -> None:
        known = re.findall(r"^([\w-]+)(?::| \?=)", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert {word.partition("=")[0] for word in words} <= set(known)

    def pip(self, words: list[str]) -> None:
        assert words[0] == "install"
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
        for extras in re.findall(r"\[(.+)\]", " ".join(words)):
            assert set(extras.split(",")) <= set(project["optional-dependencies"])

    def pipetransformer(self, words: list[str]) -> None:
        if words[0] not in RUN:
            read = argparse.ArgumentParser.parse_known_args

            def stop(parser: argparse.ArgumentParser, *given: Any) -> Any:
                found = read(parser, *given)
                if parser.prog == "hf-pipetransformer" and not found[1]:
                    raise Parsed
                return found

            with self.monkeypatch.context() as patch:
                patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
                with pytest.raises(Parsed):
                    cli.main(words)
        else:
            cli.main(words)

    def accelerate(self, words: list[str]) -> None:
        assert words[0] == "launch"
        options = launch_command_parser().parse_args(words[1:])
        assert options.config_file is None or Path(options.config_file).is_file()
        self.launched(options)

    def torchrun(self, words: list[str]) -> None:
        self.launched(get_args_parser().parse_args(words))

    def launched(self, options: argparse.Namespace) -> None:
        if options.module:
            assert options.training_script == "hf_pipetransformer"
            self.pipetransformer(options.training_script_args)
        else:
            self.script(options.training_script, options.training_script_args)

    def python(self, words: list[str]) -> None:
        self.script(words[0], words[1:])

    def sbatch(self, words: list[str]) -> None:
        assert Path(words[0]).is_file()

    def script(self, path: str, words: list[str]) -> None:
        """Check that a script is one of the repository or of the page, and that it takes these options."""
        if path in self.written:
            assert not words
            return
        if "parse_arguments" not in Path(path).read_text("utf-8"):
            assert not words, f"{path} takes no options"
            return
        module, shared = (importlib.import_module(name) for name in (Path(path).stem, "script_utils"))
        read = shared.parse_arguments

        def stop(*classes: type, argv: list[str] | None = None) -> None:
            read(*classes, argv=argv)
            raise Parsed

        with self.monkeypatch.context() as patch:
            patch.setattr(shared, "parse_arguments", stop)
            with pytest.raises(Parsed):  # bf16 is refused on a machine without GPUs unless it is the CPU's
                module.main([*words, "--use_cpu", "true"])

    of |= {"make": make, "pip": pip, "hf-pipetransformer": pipetransformer, "accelerate": accelerate}
    of |= {"torchrun": torchrun, "python": python, "sbatch": sbatch}


class Page:
    """Runs the blocks of a page in a folder of its own."""

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = blocks_of(path)
        self.commands = Commands({block.title for block in self.blocks if block.title}, monkeypatch)
        self.module = ModuleType("code_blocks_of_a_page")
        self.module.__dict__["folder"] = folder
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)  # dataclasses look for their module
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "data_cache")
        monkeypatch.chdir(folder)
        (folder / "scripts").symlink_to(REPOSITORY / "scripts")

    def run(self) -> Counter[str]:
        return Counter(self._run(block) for block in self.blocks)

    def _run(self, block: Block) -> str:
        if reasons := block.said("not"):
            assert len(reasons[0].removeprefix("run,").split()) > 2, f"{block.where}: why is it not run?"
            return "not run"
        if tests := block.said("elsewhere"):
            file, _, name = tests[0].partition("::")
            assert re.search(rf"^def {name}\(", (REPOSITORY / file).read_text("utf-8"), re.MULTILINE), tests[0]
            return "elsewhere"
        if block.language in SHOWN:
            return "shown"
        for code in block.said("setup"):
            self._execute(code, block.where)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self._start(block)
        for text in block.said("prints"):
            assert text in printed.getvalue(), f"{block.where} printed {printed.getvalue()}"
        return block.language

    def _start(self, block: Block) -> None:
        if block.language == "python":
            self._execute(block.replaced, block.where)
        elif block.language == "bash":
            expected, status = (block.said("exits") or ["0"])[0], "0"
            try:
                self.commands.run(block.replaced)
            except SystemExit as end:
                status = str(end.code)
            assert status == expected, f"{block.where} ended with {status}, expected {expected}"
        else:
            assert block.language == "diff", f"{block.where}: no way to try {block.language}"
            added = [line[1:] for line in block.text.splitlines() if re.match(r"\+(from|import) ", line)]
            self._execute("\n".join(added), block.where)

    def _execute(self, code: str, where: str) -> None:
        exec(compile(code, where, "exec"), self.module.__dict__)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_block_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Page(path, tmp_path, monkeypatch).run()
    fences = sum(line.startswith("```") for line in path.read_text(encoding="utf-8").splitlines())
    assert 2 * counts.total() == fences


def page_with(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", folder)
    path = folder / "page.md"
    path.write_text(text)
    (folder / "scripts").mkdir()
    monkeypatch.setattr(Path, "symlink_to", lambda *_: None)
    return Page(path, folder, monkeypatch)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert False\n```\n", ""),
        ("```bash\nrm -r everything\n```\n", "no way to try `rm`"),
        ("```bash\npython scripts/none.py\n```\n", "none.py"),
        ("```bash\nhf-pipetransformer cache burn\n```\n", "ended with 2"),
        ("```ruby\n1\n```\n", "no way to try ruby"),
        ("<!-- test: not run, no -->\n```bash\nls\n```\n", "why is it not run"),
        ("<!-- test: x => b -->\n```python\npass\n```\n", "'x' is to be replaced"),
        ("<!-- test: prints 2 -->\n```python\nprint(1)\n```\n", "printed 1"),
        ("<!-- test: exits 1 -->\n```bash\nhf-pipetransformer cache list\n```\n", "expected 1"),
        ("<!-- test: exits 1 -->\nThere is no block.\n", "said of no block"),
        ("```\nls\n```\n", "without a language"),
        ("```\naccelerate launch -m hf_pipetransformer cache burn\n```\n", "ended with 2"),
    ],
)
def test_a_block_that_does_not_run_is_found(
    text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((AssertionError, OSError), match=complaint):
        page_with(text, tmp_path, monkeypatch).run()


STUBS = {
    "scontrol": 'printf "first\\nsecond\\n"',
    "srun": 'for node in 0 1; do SLURM_NODEID=$node "$@"; done',
    "accelerate": 'echo "$@"',
}
"""Commands of a cluster: srun starts its command on each of two nodes."""


def test_the_batch_script_starts_one_launcher_per_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "first,second"}
    script = REPOSITORY / "scripts" / "configs" / "two_nodes.sbatch"
    started = subprocess.run(
        ["bash", str(script)], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert len(started) == 2
    monkeypatch.chdir(REPOSITORY)
    for node, line in enumerate(started):
        words = shlex.split(line)
        options = launch_command_parser().parse_args(words[1:])
        assert (options.machine_rank, options.main_process_ip) == (node, "first")
        Commands(set(), monkeypatch).accelerate(words)
