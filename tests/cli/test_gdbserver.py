"""``kprobe gdbserver`` as far as it needs no guest."""

from pathlib import Path

import pytest

from kprobes.cli.main import main


@pytest.mark.parametrize(
    "wrong",
    [
        (["--listen", "s", "-t", "host"], "this machine's own kernel cannot be stopped"),
        (["--listen", "10.0.0.1:99", "p vfs_read"], "ssh -L leads there from others"),
        (["--listen", "a:b", "p vfs_read"], "a:b: neither the path of a socket nor HOST:PORT"),
        (["--listen", "s", "--control", "fifo:c"], "nothing to trace"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_touched(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[list[str], str],
) -> None:
    words, told = wrong
    monkeypatch.chdir(tmp_path)

    assert main(["gdbserver", *words]) == 2

    assert told in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_where_to_listen_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["gdbserver", "p vfs_read"])

    assert caught.value.code == 2
    assert "--listen is required" in capsys.readouterr().err
