"""``kprobe vng`` without a guest: a program in virtme-ng's place that boots none."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

KPROBE = Path(sys.executable).with_name("kprobe")


def kprobe(directory: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``kprobe vng`` with a shell script as ``vng``."""
    if script:
        (directory / "vng").write_text(f"#!/bin/sh\n{script}\n")
        (directory / "vng").chmod(0o755)
    environment = {**os.environ, "PATH": str(directory), "XDG_STATE_HOME": str(directory)}
    return subprocess.run(
        [KPROBE, "vng", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("status", [0, 2])
def test_a_run_that_boots_nothing_is_told(tmp_path: Path, status: int) -> None:
    done = kprobe(tmp_path, f'echo "$@"; exit {status}', "p vfs_read", "--", "--run", "none")

    assert done.returncode == 1
    assert done.stdout == ""
    first, last = done.stderr.splitlines()
    assert last == "kprobe: virtme-ng ended before its kernel could be probed"
    assert first.startswith("--qemu-opts=-gdb unix:/tmp/kprobes-vng-")
    assert first.endswith("/gdb.sock,server=on,wait=off --run none")


def test_its_own_words_go_to_standard_output_where_events_do_not(tmp_path: Path) -> None:
    done = kprobe(tmp_path, "echo here", "p vfs_read", "-o", str(tmp_path / "out"))

    assert (done.returncode, done.stdout) == (1, "here\n")


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["p vfs_read a=$foo"], 4, "Invalid $-variable specified"),
        ([], 2, "nothing to trace"),
        (["p vfs_read", "-t", "guest"], 2, "unrecognized arguments: -t"),
        (["p vfs_read", "--hang-timeout", "3s"], 2, "--hang-timeout is for --until-panic"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    tmp_path: Path, words: list[str], status: int, told: str
) -> None:
    done = kprobe(tmp_path, f": > {tmp_path}/ran", *words)

    assert done.returncode == status
    assert told in done.stderr
    assert not (tmp_path / "ran").exists()


def test_on_a_terminal_the_run_reads_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "vng").write_text('#!/bin/sh\nread word; echo "it reads $word"\n')
    (tmp_path / "vng").chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"PATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
        os.execv(KPROBE, [str(KPROBE), "vng", "p vfs_read"])

    said = b""
    try:
        os.write(terminal, b"hello\n")
        # The other end is closed with an error.
        with suppress(OSError):
            while data := os.read(terminal, 4096):
                said += data
    finally:
        # Nothing is left where it waits for ever; else it has ended.
        os.close(terminal)
        _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 1
    assert b"it reads hello\r\n" in said
    assert said.endswith(b"kprobe: virtme-ng ended before its kernel could be probed\r\n")


def test_without_virtme_ng_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    done = kprobe(tmp_path, "", "p vfs_read")

    assert done.returncode == 3
    assert "there is no vng here: pip install virtme-ng" in done.stderr
