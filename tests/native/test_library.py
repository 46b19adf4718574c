"""The IR of our C, and the C that it was compiled from."""

import threading
from pathlib import Path

import pytest

from kprobes import llvm
from kprobes.native import library
from kprobes.native.library import text
from tests.build.native import PARTS
from tools.compile_runtime import digest


@pytest.mark.parametrize("source", PARTS, ids=[path.stem for path in PARTS])
def test_the_ir_of_a_part_was_compiled_from_its_c_as_it_is(source: Path) -> None:
    assert text(source.stem).splitlines()[1] == f"; {digest(source)}", "run `make runtime`"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Have nothing compiled, and all rows be many."""
    known: dict[str, object] = {}
    monkeypatch.setattr(library, "MANY", 0)
    monkeypatch.setattr("kprobes.native.library._Parts.functions", known)
    monkeypatch.setattr("kprobes.native.library._Parts.begun", set[str]())
    return known


def test_nobody_waits_while_a_part_is_compiled(
    parts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def compiled(source: str) -> object:
        assert go_on.wait(60)
        return source

    monkeypatch.setattr(llvm, "load", compiled)

    assert library.function_for(1, "keys", "keys_code", 5) is None
    assert library.function_for(1, "keys", "keys_code", 5) is None
    (thread,) = (each for each in threading.enumerate() if each.name == "kprobes-keys")
    go_on.set()
    thread.join(60)

    assert [*parts] == ["keys"]


def test_what_is_compiled_is_called() -> None:
    library.load("keys")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "MANY", 0)
        assert library.function_for(0, "keys", "keys_code", 5) is not None


def test_a_part_is_compiled_once_and_its_code_stays(parts: dict[str, object]) -> None:
    threads = [threading.Thread(target=library.load, args=("keys",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first = parts["keys"]

    library.load("keys")

    assert parts["keys"] is first
