"""A file of handlers: compiled early, run with its names, its errors told with their place."""

from pathlib import Path
from typing import cast

import pytest

from kprobes.cli.definitions import read_script
from kprobes.cli.main import main
from kprobes.errors import GuestGoneError, RefusedError, UsageError
from kprobes.open import GuestSession


class FakeSession:
    """Does what a file asks for."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def refuse(self) -> None:
        raise RefusedError("not here")

    def die(self) -> None:
        raise GuestGoneError("the guest is gone")


def run(path: Path, text: str) -> FakeSession:
    path.write_text(text)
    session = FakeSession()
    read_script(path).run(cast("GuestSession", session))
    return session


def test_a_file_has_the_kernel_and_what_it_needs(tmp_path: Path) -> None:
    session = run(
        tmp_path / "h.py",
        "kernel.seen += [Kprobe.__name__, kprobes.boot.__name__, __file__]\n",
    )

    assert session.seen == ["Kprobe", "boot", str(tmp_path / "h.py")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("\n1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("def f():\n    kernel.refuse()\nf()\n", ":2: not here"),
        ("import json\njson.loads('')\n", ":2: JSONDecodeError: Expecting value"),
        ("raise ValueError\n", ":1: ValueError"),
    ],
)
def test_what_goes_wrong_is_told_with_the_innermost_line_of_the_file(
    tmp_path: Path, text: str, what: str
) -> None:
    path = tmp_path / "h.py"

    with pytest.raises(UsageError) as caught:
        run(path, text)

    assert str(caught.value).startswith(f"{path}{what}")


def test_a_guest_that_is_gone_is_not_the_files_fault(tmp_path: Path) -> None:
    with pytest.raises(GuestGoneError) as caught:
        run(tmp_path / "h.py", "kernel.die()\n")

    assert caught.value.__notes__ == [f"{tmp_path / 'h.py'}:1"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"def f(:\n", "h.py:1: invalid syntax"),
        (b"\0", "h.py"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_python_is_refused_before_there_is_a_guest(
    tmp_path: Path, data: bytes | None, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h.py"
    if data is not None:
        path.write_bytes(data)

    assert main(["trace", "--python", str(path)]) == 2
    shown = capsys.readouterr().err
    assert what in shown
    assert shown.count("\n") == 1


def test_a_trace_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 2
    assert "give a definition, or --python FILE" in capsys.readouterr().err
