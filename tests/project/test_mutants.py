"""The changes of the engine that `make mutants` makes: what they name is there."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tools.mutants import FOLDER, SOURCE, TOP, Mutant, read_mutants

_MUTANTS = read_mutants()
_LEAST = 60
_each = pytest.mark.parametrize("mutant", _MUTANTS, ids=[each.name for each in _MUTANTS])


@cache
def _functions(file: str) -> frozenset[str]:
    body = ast.parse((TOP / file).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


@_each
def test_a_change_is_of_what_stands_there_once(mutant: Mutant) -> None:
    text = (TOP / SOURCE / mutant.file).read_text()

    changed = mutant.applied(text)

    assert changed != text
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")


@_each
def test_tests_that_a_change_names_are_there(mutant: Mutant) -> None:
    assert mutant.tests
    assert mutant.why.endswith(".")
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert function.partition("[")[0] in _functions(file)


def test_names_are_unique_and_changes_are_many() -> None:
    names = Counter(each.name for each in _MUTANTS)

    assert {name for name, count in names.items() if count > 1} == set()
    assert len(names) >= _LEAST


def test_every_package_is_changed_and_each_in_its_own_file() -> None:
    packages = {path.parent.name for path in (TOP / SOURCE).glob("*/__init__.py")}

    files = {path.stem for path in FOLDER.glob("*.toml")}
    changed = {Path(each.file).parts[0].removesuffix(".py") for each in _MUTANTS}

    assert packages | {"drain", "session"} <= files
    assert changed == files


def test_a_change_whose_text_is_not_there_is_no_change() -> None:
    mutant = Mutant(name="none", file="drain.py", old="a", new="b", tests=(), why="")

    for text in ("", "a a"):
        with pytest.raises(ValueError, match="its old text is in"):
            mutant.applied(text)
