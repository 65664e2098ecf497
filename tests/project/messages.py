"""Messages of the package, read from its code: their page, and the tests that produce them.

`python -m tests.project.messages --write` brings docs/troubleshooting.md up to date: it adds messages that are new,
removes those that the code no longer has, and keeps what was written about the others. Each section of the page names,
in a comment, the files whose messages stand in it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path


REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "hf_pipetransformer"
PAGE = REPOSITORY / "docs" / "troubleshooting.md"
TESTS = REPOSITORY / "tests"

WRITE = "python -m tests.project.messages --write"
GAP = "..."
"""Stands for what differs from run to run."""

NO_WORDS_OF_OURS = ("OSError", "AttributeError", "AssertionError", "NotImplementedError")
"""Classes whose texts are the system's or Python's own protocol."""

CALLS = ("warning", "warn", "error", "add_note")
"""Methods that show the text that they are given."""

FROM_FUNCTIONS = {
    "cache/opening.py": ("why_not_on_nodes", "_reason_before_reading", "_examined"),
    "comm/errors.py": ("report",),
    "comm/groups.py": ("why_not_reached",),
    "engine/losses.py": ("find_loss_rule", "_refused_split", "_refused_count"),
    "splitters/adapters.py": ("why_unsplittable",),
    "splitters/quantized.py": ("why_not_moved",),
    "startup/check.py": ("why_unsliceable",),
    "startup/rows.py": ("why_mixed",),
}
"""Functions that return messages, which others raise: their sentences, and all texts that they return."""

WARNED_FROM_FUNCTIONS = {
    "freeze/policies.py": ("check",),
    "freeze/policy.py": ("check_policy",),
    "options/combinations.py": ("unused_freeze_options",),
    "state/description.py": ("_describe_changes",),
    "state/plain_checkpoint.py": ("_differences",),
    "state/resumption.py": ("_find",),
    "training/start.py": ("_steps_per_epoch",),
}
"""The same of messages that others log."""

RELAYS = (
    "cache/opening.py:CacheInputs._reason_before_reading",
    "cache/training.py:TrainingCache._say",
    "cli.py",
    "comm/topology.py:Topology.decide",
    "comm/topology.py:Topology.together",
    "options/arguments.py:PipeTransformerArguments.__post_init__",
    "options/combinations.py:raise_first",
    "report/failure.py:_add_notes",
    "report/files.py:open_regular",
    "runtime/context.py:CollectiveTimeouts._report",
    "selftest/machines.py:run_selftest",
    "startup/start.py:Inspection",
    "startup/start.py:_find_loss_rule",
    "training/expectation.py:_plan",
    "training/session.py:PipelineSession.__init__",
    "training/start.py:TrainingSetup._steps_per_epoch",
    "training/needs.py:check_constructor_arguments",
)
"""Places that raise or log a text that they were given: the message is where the text is written."""

_SECTION = re.compile(r"(<!-- messages: ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_ENTRY = re.compile(r"^- (?:Warning: )?(`+) ?(.*?) ?\1\n((?:\n|  .*\n)*)", re.MULTILINE)
_WILD = re.compile(r"\\d\+?|\[[^\]]*\][*+]?|\.[*+]\??|\(\?\w*\)|\.\.\.|\$|\^")
_WORD = re.compile(r"[\w'-]+")
_VOLATILE = (re.compile("$^"), re.compile(r"'[^']*'|\b\S*\d\S*"), re.compile(r"'[^']*'|\b\S*\d\S*|\S*\w[_.]\w\S*"))
"""What may stand for a gap in a text that a test looks for: nothing; quoted words and numbers; names and files too."""
_GAP_WORD = "/"
_LOOKING = (
    *("parametrize", "search", "count", "startswith"),
    *("refused", "warnings_of", "assert_ended_once", "assert_cause"),
)
"""Calls with the words that a test looks for among their arguments."""
_FEWEST_WORDS = 4
"""Words that make a text in a helper a message rather than a part of one."""
_RUN = 3
"""Words in a row by which a text that a test looks for names a message, if no other message has them."""


@dataclass(frozen=True, order=True)
class Message:
    """One message: its fixed words with `...` between them, the place in the package as `file:function`, its kind."""

    words: str
    place: str
    is_warning: bool

    def entry(self, note: str) -> str:
        """Return the message as an entry of the page."""
        quote = "``" if "`" in self.words else "`"
        pad = " " if quote == "``" else ""
        text = f"- {'Warning: ' if self.is_warning else ''}{quote}{pad}{self.words}{pad}{quote}\n"
        return text + (f"\n{note}\n\n" if note else "")


@dataclass(frozen=True)
class Found:
    """Messages of the package, and calls that raise or log a text which the code does not show."""

    messages: list[Message]
    unknown: list[str]


@cache
def messages_of_the_package() -> Found:
    """Return every message of the package, in the order of their words."""
    return messages_in(
        {
            path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(PACKAGE.rglob("*.py"))
        }
    )


def messages_in(sources: Mapping[str, str]) -> Found:
    """Return the messages of files, given the code of each, in the order of their words."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    shared, templates = _module_constants(trees.values()), _templates(trees.values())
    messages: set[Message] = set()
    unknown: list[str] = []
    for file, tree in trees.items():
        reader = _Reader(file, {**shared, **_module_constants([tree])}, templates)
        reader.visit(tree)
        messages |= reader.messages
        unknown += reader.unknown
    return Found(sorted(messages), unknown)


class _Reader(ast.NodeVisitor):
    """Collector of one file's messages."""

    def __init__(self, file: str, constants: dict[str, str], templates: dict[str, ast.FunctionDef]) -> None:
        self._file, self._templates = file, templates
        self._known = [{name: [text] for name, text in constants.items()}]
        self._scopes: list[str] = []
        self.messages: set[Message] = set()
        self.unknown: list[str] = []

    @property
    def _place(self) -> str:
        return f"{self._file}:{'.'.join(self._scopes)}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append(node.name)
        self._known.append({**self._known[-1], **self._assigned(node)})
        for functions, is_warning in ((FROM_FUNCTIONS, False), (WARNED_FROM_FUNCTIONS, True)):
            if node.name in functions.get(self._file, ()):
                self._take_sentences(node, is_warning)
        self.generic_visit(node)
        self._known.pop()
        self._scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        name = _last_name(node.func)
        is_exception = isinstance(node.func, ast.Name) and name.endswith(("Error", "SystemExit"))
        if is_exception and name not in NO_WORDS_OF_OURS and node.args:
            self._take(self._instantiated(name, node), node)
        elif isinstance(node.func, ast.Attribute) and name in CALLS and node.args:
            self._take(self._texts(node.args[0]), node, is_warning=name.startswith("warn"))
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        """Take the text of a (condition, text), the form of checks of options."""
        if self._file.startswith("options/") and len(node.elts) == 2 and not isinstance(node.elts[0], ast.Constant):
            for text in self._texts(node.elts[1]):
                if len(text.split()) >= _FEWEST_WORDS:
                    self._add(text, is_warning=self._scopes[-1].startswith("warn"))
        self.generic_visit(node)

    def _take(self, texts: list[str], node: ast.AST, is_warning: bool = False) -> None:
        told = [text for text in texts if _words(text.replace(GAP, ""))]
        for text in told:
            self._add(text, is_warning)
        if not told and not isinstance(node.args[0], ast.Constant) and not self._place.startswith(RELAYS):  # type: ignore[attr-defined]
            self.unknown.append(f"{self._place}: {ast.unparse(node)}")

    def _take_sentences(self, function: ast.FunctionDef, is_warning: bool) -> None:
        returned = {id(each) for part in ast.walk(function) if isinstance(part, ast.Return) for each in ast.walk(part)}
        skipped = {id(each.value) for each in ast.walk(function) if isinstance(each, ast.Expr)}
        for part in ast.walk(function):
            if isinstance(part, ast.Call) and _last_name(part.func).endswith("Error"):
                skipped |= {id(each) for each in ast.walk(part)}
        for node in ast.walk(function):
            is_text = isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in skipped
            texts = self._texts(node) if is_text else []
            if texts:
                skipped |= {id(each) for each in ast.walk(node)}
            for text in texts:
                if len(text.split()) >= _FEWEST_WORDS and (id(node) in returned or text.endswith(".")):
                    self._add(text, is_warning)
        # A text that is put into another one is no message of its own.
        own = {message for message in self.messages if message.place == self._place}
        self.messages -= {part for part in own for whole in own if part is not whole and part.words in whole.words}

    def _add(self, text: str, is_warning: bool) -> None:
        self.messages.add(Message(_tidy(text), self._place, is_warning))

    def _instantiated(self, name: str, node: ast.Call) -> list[str]:
        """Return the texts of an exception; a constructor of its own may put its arguments into a longer one."""
        init = self._templates.get(name)
        if init is None:
            return self._texts(node.args[0])
        call = next(each for each in ast.walk(init) if isinstance(each, ast.Call) and each.args)
        names = [argument.arg for argument in init.args.args[1:]]
        given = {name: self._texts(value) or [GAP] for name, value in zip(names, node.args, strict=False)}
        self._known.append({**self._known[-1], **given})
        texts = self._texts(call.args[0])
        self._known.pop()
        return texts

    def _assigned(self, function: ast.FunctionDef) -> dict[str, list[str]]:
        """Return the texts that a function's names may have, those of a loop over written rows too."""
        found: dict[str, list[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Tuple):
                for row in node.iter.elts:
                    for name, value in zip(node.target.elts, getattr(row, "elts", ()), strict=False):
                        texts = self._long(value)
                        found.setdefault(ast.unparse(name), []).extend(texts)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts = [text for text in self._texts(node.value) if len(_words(text)) >= _FEWEST_WORDS]
                found.setdefault(node.targets[0].id, []).extend(texts)
        return {name: sorted(set(texts)) for name, texts in found.items() if texts}

    def _texts(self, node: ast.AST) -> list[str]:
        """Return what a text may be, with gaps for what is not fixed; nothing if the node is no text."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return self._joined(node.values)
        if isinstance(node, ast.FormattedValue):
            return self._long(node.value) or [GAP]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([node.left, node.right]) if self._texts(node.left) + self._texts(node.right) else []
        if isinstance(node, ast.IfExp):
            body, orelse = self._texts(node.body), self._texts(node.orelse)
            return [*body, *orelse] if body and orelse else []
        if isinstance(node, ast.Name):
            return self._known[-1].get(node.id, [])
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("format", "strip")
        ):
            return [re.sub(r"\{[^}]*\}", GAP, text) for text in self._texts(node.func.value)]
        return []

    def _joined(self, parts: Sequence[ast.AST]) -> list[str]:
        return ["".join(each) for each in product(*(self._texts(part) or [GAP] for part in parts))]

    def _long(self, node: ast.AST) -> list[str]:
        texts = self._texts(node)
        return texts if any(len(text.split()) >= _FEWEST_WORDS for text in texts) else []


def sections(page: str) -> list[str]:
    """Return what the comment of each section of the page names."""
    return [match[2] for match in _SECTION.finditer(page)]


def section_of(place: str, heads: Iterable[str]) -> str | None:
    """Return what the comment of a place's section names: the one with the longest part of the place."""
    named = [(len(start), head) for head in heads for start in head.split() if place.startswith(start)]
    return max(named)[1] if named else None


def notes(page: str) -> dict[str, str]:
    """Return what the page says under each of its messages."""
    return {
        match[2]: match[3].strip("\n") for section in _SECTION.finditer(page) for match in _ENTRY.finditer(section[3])
    }


def written(page: str) -> str:
    """Return the page with the messages of the package: those with a note first, then by their words."""
    kept = notes(page)
    now = {message.words for message in messages_of_the_package().messages}
    for lost in [words for words, note in kept.items() if note and words not in now]:
        # A message that was reworded keeps its note.
        similar = difflib.get_close_matches(lost, sorted(now - set(kept)), n=1)
        if similar:
            kept[similar[0]] = kept[lost]

    heads = sections(page)

    def section(match: re.Match[str]) -> str:
        own = {m.words: m for m in messages_of_the_package().messages if section_of(m.place, heads) == match[2]}
        order = sorted(own, key=lambda words: (not kept.get(words), words.strip("'\"`. ").lower(), words))
        return match[1] + "".join(own[words].entry(kept.get(words, "")) for words in order) + match[4]

    return _SECTION.sub(section, page)


def without_test() -> list[Message]:
    """Return the messages that no test names by words that no other message has."""
    found = messages_of_the_package().messages
    words = {message.words: f" {_GAP_WORD} ".join(map(" ".join, _parts(message.words))) for message in found}
    runs: dict[str, set[str]] = {}
    for message in words:
        for run in _runs(_parts(message)):
            runs.setdefault(run, set()).add(message)
    named: set[str] = set()
    for text in _texts_of_tests():
        for run in _runs(_parts(text)):
            meant = runs.get(run, set())
            named |= meant if len(meant) == 1 else set()
        for volatile in _VOLATILE:
            parts = _parts(volatile.sub(GAP, text))
            if sum(map(len, parts)) < _RUN - 1:
                continue
            meant = {message for message, own in words.items() if _has_in_order(f" {own} ", parts)}
            named |= meant if len(meant) == 1 else set()
    return [message for message in found if message.words not in named]


def _parts(text: str) -> list[list[str]]:
    """Return the words between the gaps of a text."""
    return [words for part in text.split(GAP) if (words := _words(part))]


def _runs(parts: list[list[str]]) -> set[str]:
    """Return all runs of three words, and the parts of two."""
    whole = {" ".join(words) for words in parts if len(words) == _RUN - 1}
    return whole | {" ".join(words[at : at + _RUN]) for words in parts for at in range(len(words) - _RUN + 1)}


def _has_in_order(text: str, parts: list[list[str]]) -> bool:
    at = 0
    for words in parts:
        at = text.find(f" {' '.join(words)} ", at)
        if at < 0:
            return False
        at += 1
    return bool(parts)


@cache
def _texts_of_tests() -> set[str]:
    """Return the texts that tests look for in others; a regular expression becomes its words, with gaps."""
    found: set[str] = set()
    for path in TESTS.rglob("*.py"):
        if path.parent == Path(__file__).parent and path.stem in ("messages", "test_messages"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tables = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        sought = {id(each) for node in ast.walk(tree) for part in _sought(node, tables) for each in ast.walk(part)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) in sought:
                found |= {_WILD.sub(GAP, text).replace("\\", "") for text in _written(node).split("|")}
    return found


def _written(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_written(part) if isinstance(part, ast.Constant) else GAP for part in node.values)


def _sought(node: ast.AST, tables: Mapping[str, ast.expr]) -> list[ast.expr]:
    """Return the parts of a node that are looked for in other texts, or are cases of a test that does so."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Eq):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.keyword) and node.arg == "match":
        parts = [node.value]
    elif isinstance(node, ast.Call) and _last_name(node.func) in _LOOKING:
        parts = node.args
    else:
        return []
    named = [each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)]
    return [*parts, *(tables[name] for name in named if name in tables)]


def _module_constants(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return the sentences that modules give a name, by that name."""
    return {
        node.targets[0].id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if len(node.value.value.split()) >= _FEWEST_WORDS
    }


def _templates(trees: Iterable[ast.Module]) -> dict[str, ast.FunctionDef]:
    """Return the constructors of exceptions that have their own, or that of a class above."""
    found: dict[str, ast.FunctionDef] = {}
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in classes:
        own = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        above = [found[_last_name(base)] for base in node.bases if _last_name(base) in found]
        if node.name.endswith("Error") and own + above:
            found[node.name] = (own + above)[0]
    return found


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _tidy(text: str) -> str:
    """Return a text with single spaces and gaps, and without the full stop behind a gap at its end."""
    single = re.sub(r"(\.\.\. ?){2,}", f"{GAP} ", " ".join(text.split())).strip()
    return re.sub(r"\.\.\. ?\.$", GAP, single)


def _words(text: str) -> list[str]:
    return [word.strip("'") for word in _WORD.findall(text.lower()) if word.strip("'")]


def main() -> None:
    """Write the page, or show which messages no test names."""
    parser = argparse.ArgumentParser(description="Messages of the package.")
    parser.add_argument("--write", action="store_true", help="bring docs/troubleshooting.md up to date")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for message in without_test():
        print(f"{message.place}: {message.words}")


if __name__ == "__main__":
    main()
