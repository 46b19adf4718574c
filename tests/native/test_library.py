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

    def loaded(data: bytes) -> object:
        assert go_on.wait(60)
        return data

    monkeypatch.setattr(llvm, "load_native", loaded)

    assert library.function_for(1, "keys", "keys_code", 5) is None
    assert library.function_for(1, "keys", "keys_code", 5) is None
    (thread,) = (each for each in threading.enumerate() if each.name == "kprobes-keys")
    go_on.set()
    thread.join(60)

    assert [*parts] == ["keys"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an empty cache, and return where code is kept in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kprobes" / "code"


def _run() -> int:
    # By code that was not there before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kprobes.native.library._Parts.functions", known := {})
        library.load("keys")
        return known["keys"]("keys_code")


def _not_compiled(_source: str) -> bytes:
    raise AssertionError("compiled again")


def test_what_was_compiled_is_kept_for_the_next_process(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run() != 0
    (file,) = kept.iterdir()
    monkeypatch.setattr(llvm, "compile_native", _not_compiled)

    assert _run() != 0
    assert (file.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("what", ["damaged", "others'", "another CPU's", "a directory"])
def test_only_our_own_whole_code_for_this_machine_is_run(
    kept: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    _run()
    (file,) = kept.iterdir()
    match what:
        case "damaged":
            data = file.read_bytes()
            file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "others'":
            file.chmod(0o666)
        case "another CPU's":
            monkeypatch.setattr(llvm, "native_code", lambda: "another")
        case _:
            file.unlink()
            file.mkdir()
    monkeypatch.setattr(llvm, "compile_native", _not_compiled)

    with pytest.raises(AssertionError, match="compiled again"):
        _run()


def test_a_cache_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")

    assert _run() != 0


def test_old_code_is_forgotten(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_KEPT", 2)
    for cpu in "abc":
        monkeypatch.setattr(llvm, "native_code", lambda cpu=cpu: cpu)
        _run()

    assert len([*kept.iterdir()]) == 2


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
