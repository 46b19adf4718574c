"""``kprobe record`` as far as it needs no guest."""

from pathlib import Path

import pytest

from kprobes.cli.main import main


@pytest.mark.parametrize(
    "wrong",
    [
        ([], 2, "nothing to trace"),
        (["p vfs_read a=$foo"], 4, "Invalid $-variable specified"),
        (["p vfs_read", "-o", "."], 2, ". is a directory"),
        (["p vfs_read", "-o", "no/such/x.rec"], 2, "cannot write no/such/x.rec"),
        (["p vfs_read", "--max-rate", "5", "-t", "host", "--rearm"], 2, "--rearm is for guests"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_touched(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[list[str], int, str],
) -> None:
    words, status, told = wrong
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kprobe.rec").write_bytes(b"older")

    assert main(["record", *words]) == status

    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kprobe.rec"]


@pytest.mark.parametrize(
    "option", ["--format=json", "--max-events=3", "--until-panic=1M", "--enum"]
)
def test_what_only_prints_is_no_option(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["record", "p vfs_read", option])

    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
