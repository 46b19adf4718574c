"""The source's structure: every exception is on tools/structure.toml's list, with a reason."""

import re
from pathlib import Path

import pytest

from tools.structure import TOP, Structure, read_reasons, read_words, stale, unexplained

_FOUND = Structure(TOP, read_words()).findings()
_REASONS = read_reasons()
_LONG = "\n" * 601
_WORDS = "from numpy.typing import NDArray\nWords = NDArray[int]\n"
_ARRAYS = '''"""Arrays."""
from kprobes.b.three import Words
def copied(one: Words, two: Words) -> Words:
    """Return a copy, shape (n,)."""
def shaped(one: int, two: int, *three: int) -> Words:
    """Return shape (n,)."""
class Named:
    def add(self, one: Words, two: int, *, three: int) -> None:
        """Add.

        Args:
            one: uint64 (n,).
        """
    def undescribed(self, one: int, two: int, three: Words) -> None: ...
    def _own(self, one: int, two: int, three: Words) -> None: ...
class _Own:
    def undescribed(self, one: int, two: int, three: Words) -> None: ...
'''
_FILES = {
    "a/one.py": '"""What one is."""\nclass Same:\n    is_behind = 1\n',
    "a/two.py": f'"""Two."""\nfrom kprobes.b import three\nclass Same:\n    pass{_LONG}',
    "b/arrays.py": _ARRAYS,
    "b/three.py": '"""Three."""\nfrom kprobes.a.two import Same\n'
    f"{_WORDS}class Undo:\n    pass{_LONG}",
}


@pytest.mark.parametrize("rule", _FOUND)
def test_every_exception_has_a_reason(rule: str) -> None:
    assert unexplained(_FOUND[rule], _REASONS.get(rule, ())) == []


@pytest.mark.parametrize("rule", _REASONS)
def test_every_reason_is_of_something(rule: str) -> None:
    assert stale(_FOUND[rule], _REASONS[rule]) == []


def test_every_rule_finds_what_breaks_it(tmp_path: Path) -> None:
    for name, text in _FILES.items():
        file = tmp_path / "src" / "kprobes" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "tests" / "b").mkdir(parents=True)
    (tmp_path / "tests" / "b" / "test_three_more.py").write_text("")

    assert Structure(tmp_path, ["behind", "Undo", "undo_all"]).findings() == {
        "short": ["a/one.py", "b/arrays.py"],
        "long": ["a/two.py", "b/three.py"],
        "one_importer": ["a/one.py", "b/arrays.py"],
        "same_name": ["Same a/one.py a/two.py"],
        "question": ["a/one.py"],
        "private_word": ["behind", "Undo"],
        "untested": ["a/one.py", "a/two.py", "b/arrays.py"],
        "mutual_folders": ["a b"],
        "args": ["b/arrays.py shaped", "b/arrays.py Named.undescribed"],
        "arrays": ["b/arrays.py shaped", "b/arrays.py Named.undescribed"],
    }


def test_a_pattern_stands_for_one_path_of_each_word() -> None:
    found = ["Same a/one.py a/two.py", "Same a/one.py b/x.py a/two.py"]

    assert unexplained(found, ["* a/*.py a/*.py"]) == [found[1]]
    assert stale(found, ["Same a/*", "Same a/* a/*"]) == ["Same a/*"]


def test_tests_with_guests_are_where_make_test_looks() -> None:
    found = re.search(r"^GUEST_TESTS := (.*)$", (TOP / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    places = [TOP / place for place in found[1].split()]
    mark = ".".join(("pytest", "mark", "guest"))
    marked = [p for p in (TOP / "tests").rglob("*.py") if mark in p.read_text()]

    assert [p for p in marked if not any(map(p.is_relative_to, places))] == []
    assert {place for p in marked for place in places if p.is_relative_to(place)} == {*places}
