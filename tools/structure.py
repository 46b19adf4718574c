"""Figures of the source's structure, and what is not on the list of reasons beside this file.

    python tools/structure.py

Paths are from src/kprobes, and from the top where they lie elsewhere. An importer is another module
of src/kprobes, also where it imports within a function. Private words are those of structure.toml;
they are looked for in the identifiers of src/kprobes.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec import Struct

TOP = Path(__file__).parent.parent
SHORT, LONG = 60, 600
OWN_LINES = 150
"""A file with one importer and fewer lines belongs to its importer."""
_QUESTION = re.compile(r"(What|How|Where|Who|Whoever|When|Whether|Why)\b")
_ARRAYS = frozenset({"NDArray", "ndarray"})
_SHAPE = re.compile(r"\bshape\b|\([a-z],( [\w ]+)?\)", re.IGNORECASE)
_COPY_OR_VIEW = re.compile(r"\b(cop(y|ies|ied)|new|views?)\b", re.IGNORECASE)
_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_ARGS = 3
"""Parameters from which a docstring explains them."""
_COMMENTED = ("codegen/*", "guest/link.py", "arch/*/stack.py")
"""The hardest code: what it does cannot be read from it alone."""


class File(Struct, frozen=True, kw_only=True):
    """One Python file, read once."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Lines of text, empty ones and comments too."""
        return self.text.count("\n")

    @property
    def module(self) -> str:
        """The name that other files import, below kprobes."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def tokens(self, kind: int) -> Iterator[str]:
        """Yield identifiers and keywords (NAME), or comments (COMMENT)."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == kind:
                yield token.string

    def functions(self) -> Iterator[int]:
        """Yield the lines of each function, without its decorators and its docstring."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) is not None else None
                yield _lines(node) - (0 if docstring is None else _lines(docstring))

    def documented(self) -> Iterator[tuple[str, ast.FunctionDef]]:
        """Yield the public functions and methods of public classes: name and definition."""
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        for owner, body in (("", self.tree.body), *((f"{c.name}.", c.body) for c in classes)):
            for node in body if not owner.startswith("_") else ():
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield f"{owner}{node.name}", node

    def arrays(self) -> Iterator[str]:
        """Yield the names that the file gives to types of arrays."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and _names(node.value) & _ARRAYS:
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))

    def imported(self, modules: Collection[str]) -> Iterator[str]:
        """Yield those of ``modules`` that this file imports, by ``from ... import`` as all here."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kprobes"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}".removeprefix("kprobes.")
                    yield name if name in modules else name.rpartition(".")[0]


class Structure:
    """The tree's Python files, and what each rule finds in them."""

    def __init__(self, top: Path, words: Iterable[str]) -> None:
        """Read the files below ``top``; ``words`` are private ones."""
        package = top / "src" / "kprobes"
        self.source = [_read(path, package) for path in sorted(package.rglob("*.py"))]
        # A package's docstring alone is not a module.
        self._modules = [file for file in self.source if len(file.tree.body) > 1]
        self._others = [
            _read(path, top)
            for folder in ("tests", "bench", "tools")
            for path in sorted((top / folder).rglob("*.py"))
        ]
        self._words = {word: re.compile(_pattern(word)) for word in words}

    def findings(self) -> Mapping[str, Sequence[str]]:
        """Return what needs a reason, by rule."""
        return {
            "short": [file.name for file in self._modules if file.lines < SHORT],
            "long": [file.name for file in self.source if file.lines > LONG],
            "one_importer": [
                file.name
                for file in self._modules
                if file.lines < OWN_LINES and len(self.importers[file.module]) <= 1
            ],
            "same_name": [
                f"{name} {' '.join(files)}"
                for name, files in self._classes().items()
                if len(files) > 1
            ],
            "question": [
                file.name
                for file in (*self.source, *self._others)
                if _QUESTION.match(ast.get_docstring(file.tree) or "")
            ],
            "private_word": [word for word, n in self.private_words.items() if n],
            "untested": [file.name for file in self._modules if not self._has_test(file.name)],
            "mutual_folders": [f"{a} {b}" for a, b in self._mutual_folders()],
            "args": [
                f"{file.name} {name}"
                for file in self.source
                for name, node in file.documented()
                if _lacks_args(node)
            ],
            "arrays": [*self._without_shapes()],
        }

    def _without_shapes(self) -> Iterator[str]:
        known = {f"{each.module}.{name}" for each in self.source for name in each.arrays()}
        for file in self.source:
            # What it calls types of arrays, also where another file has named them.
            imported = known.intersection(file.imported(known))
            arrays = _ARRAYS.union(file.arrays(), (n.rpartition(".")[2] for n in imported))
            for name, node in file.documented():
                if _lacks_shapes(node, arrays):
                    yield f"{file.name} {name}"

    @cached_property
    def importers(self) -> Mapping[str, set[str]]:
        """The modules that import each module."""
        modules = {file.module for file in self.source}
        found: defaultdict[str, set[str]] = defaultdict(set)
        for file in self.source:
            for name in file.imported(modules):
                found[name].add(file.module)
        return found

    @cached_property
    def private_words(self) -> Mapping[str, int]:
        """How often each private word is in an identifier."""
        names = Counter(name for file in self.source for name in file.tokens(tokenize.NAME))
        return {
            word: sum(n for name, n in names.items() if pattern.search(_spread(name)))
            for word, pattern in self._words.items()
        }

    def _classes(self) -> Mapping[str, Sequence[str]]:
        # A private class is its file's own.
        found: defaultdict[str, list[str]] = defaultdict(list)
        for file in self.source:
            for node in file.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(file.name)
        return found

    def _has_test(self, name: str) -> bool:
        folder, _, file = f"tests/{name}".rpartition("/")
        stem = file.removesuffix(".py")
        wanted = (f"{folder}/test_{stem}.py", f"{folder}/test_{stem}_*.py")
        return any(fnmatchcase(file.name, each) for file in self._others for each in wanted)

    def _mutual_folders(self) -> Iterator[tuple[str, str]]:
        needs: defaultdict[str, set[str]] = defaultdict(set)
        for name, importers in self.importers.items():
            for importer in importers:
                needs[importer.partition(".")[0]].add(name.partition(".")[0])
        for a, b in combinations(sorted(needs), 2):
            if b in needs[a] and a in needs[b]:
                yield a, b

    def figures(self) -> Iterator[tuple[str, object]]:
        """Yield what ``python tools/structure.py`` prints."""
        lines = [file.lines for file in self.source]
        functions = [size for file in self.source for size in file.functions()]
        importers = [len(self.importers[file.module]) for file in self.source]
        commented = [f for f in self.source if any(fnmatchcase(f.name, p) for p in _COMMENTED)]
        comments = sum(sum(1 for _ in file.tokens(tokenize.COMMENT)) for file in commented)
        found = self.findings()
        yield "files", len(lines)
        yield "lines", sum(lines)
        yield "median lines of a file", statistics.median(lines)
        yield f"files under {SHORT} lines", len(found["short"])
        yield f"files over {LONG} lines", len(found["long"])
        yield "files with one importer", importers.count(1)
        yield f"of these and unimported ones under {OWN_LINES} lines", len(found["one_importer"])
        yield "functions", len(functions)
        yield "median lines of a function", statistics.median(functions)
        yield "p90 lines of a function", statistics.quantiles(functions, n=10)[-1]
        yield "longest function", max(functions)
        yield "class names used twice", len(found["same_name"])
        yield "private words", len(found["private_word"])
        yield "identifiers with private words", sum(self.private_words.values())
        yield "docstrings that begin with a question word", len(found["question"])
        yield "modules without a test of their name", len(found["untested"])
        yield f"public functions of {_ARGS} parameters without Args", len(found["args"])
        yield (
            "public functions of arrays without their shape, or copy or view",
            len(found["arrays"]),
        )
        yield "folders that need each other", len(found["mutual_folders"])
        percent = 100 * comments / sum(file.lines for file in commented)
        yield f"% of comments in {', '.join(_COMMENTED)}", round(percent, 1)


def read_words() -> Mapping[str, str]:
    """Return the private words, and what to write instead."""
    return _table()["words"]


def read_reasons() -> Mapping[str, Sequence[str]]:
    """Return, by rule, the patterns of what is meant."""
    return {
        rule: [pattern for patterns in reasons.values() for pattern in patterns]
        for rule, reasons in _table()["reasons"].items()
    }


def _table() -> Any:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def unexplained(found: Iterable[str], reasons: Iterable[str]) -> list[str]:
    """Return what no pattern of ``reasons`` matches."""
    patterns = [*reasons]
    return [name for name in found if not any(_matches(name, each) for each in patterns)]


def stale(found: Iterable[str], reasons: Iterable[str]) -> list[str]:
    """Return the patterns of ``reasons`` that match nothing."""
    names = [*found]
    return [each for each in reasons if not any(_matches(name, each) for name in names)]


def _matches(name: str, pattern: str) -> bool:
    # Word by word, as a * may stand for a path, never for a second one.
    words, patterns = name.split(), pattern.split()
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))


def _read(path: Path, folder: Path) -> File:
    text = path.read_text()
    return File(name=path.relative_to(folder).as_posix(), text=text, tree=ast.parse(text))


def _lacks_args(node: ast.FunctionDef) -> bool:
    return len(_parameters(node)) >= _ARGS and "Args:\n" not in (ast.get_docstring(node) or "")


def _lacks_shapes(node: ast.FunctionDef, arrays: Collection[str]) -> bool:
    # Their shape; of those that are returned, whether they are copies.
    text = ast.get_docstring(node) or ""
    is_returned = not _names(node.returns).isdisjoint(arrays)
    is_taken = any(not _names(p.annotation).isdisjoint(arrays) for p in _parameters(node))
    if not (is_returned or is_taken):
        return False
    return not _SHAPE.search(text) or (is_returned and not _COPY_OR_VIEW.search(text))


def _parameters(node: ast.FunctionDef) -> list[ast.arg]:
    found = node.args
    named = [*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg]
    return [each for each in named if each is not None and each.arg not in ("self", "cls")]


def _names(node: ast.expr | None) -> set[str]:
    # Of a name its own, of np.ndarray the last.
    parts = [] if node is None else [*ast.walk(node)]
    named = {part.id for part in parts if isinstance(part, ast.Name)}
    return named | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _pattern(word: str) -> str:
    # With a capital it is a whole identifier, else words in a row in one.
    return f"^{word}:" if word != word.lower() else f"_{word}_"


def _spread(name: str) -> str:
    # "RamMap:_ram_map_", which both kinds of patterns are looked up in.
    return f"{name}:_{'_'.join(part.lower() for part in _PART.findall(name))}_"


def main() -> int:
    """Print the figures, and what has no reason."""
    reasons = read_reasons()
    structure = Structure(TOP, read_words())
    for name, value in structure.figures():
        print(f"{value:>8}  {name}")
    for rule, found in structure.findings().items():
        for name in unexplained(found, reasons.get(rule, ())):
            print(f"{rule}: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
