"""``kprobe repl``: what is refused before anything starts; on guests in tests/system."""

from pathlib import Path

import pytest

from kprobes.cli.main import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-e", "1", "script.py"], "-e and a script are both given"),
        (["nosuch.py"], "nosuch.py: there is no such script"),
        (["--", "argument"], "arguments are for a script"),
        (["-t", "host", "-e", "1"], "run drgn"),
        (["-t", "nosuch:", "-e", "1"], "nosuch"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    Path("script.py").touch()

    assert main(["repl", *words]) == 2

    assert why in capsys.readouterr().err
