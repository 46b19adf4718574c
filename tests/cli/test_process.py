"""The process as a whole: early signals, and standard output that is full, closed or left."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

KPROBE = (sys.executable, "-m", "kprobes")
SAYING = [
    ["--version"],
    ["trace", "--help"],
    ["status"],
    ["restore"],
    ["doctor"],
]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("KPROBES_TARGET", raising=False)


def run(
    words: Sequence[str], stdout: int | None, *, closed: str = ""
) -> "subprocess.CompletedProcess[bytes]":
    # A shell closes what must not be open.
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *KPROBE, *words]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize("words", SAYING, ids=" ".join)
def test_a_full_disk_is_one_line_and_an_error(words: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(words, full.fileno())

    assert done.returncode == 1
    assert done.stderr == b"kprobe: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("words", SAYING, ids=" ".join)
def test_a_closed_standard_output_is_one_line_and_an_error(words: list[str]) -> None:
    done = run(words, None, closed=">&-")

    assert done.returncode == 1
    assert done.stderr == b"kprobe: cannot write to standard output: Bad file descriptor\n"


@pytest.mark.parametrize("words", SAYING, ids=" ".join)
def test_a_reader_that_has_left_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    done = run(words, writer)

    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_standard_error_and_input_do_no_harm() -> None:
    done = run(["--version"], subprocess.PIPE, closed="<&- 2>&-")

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"kprobe ")


_SIGNAL_AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
sys.argv = ["kprobe", "list", "vfs_*", "--target", "qemu:/no/such.sock"]
from kprobes.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["kprobes.cli.main", "argparse", "numpy"])
def test_an_early_signal_is_one_line(module: str, number: signal.Signals) -> None:
    code = _SIGNAL_AT_IMPORT.format(module=module, number=int(number))

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=100
    )

    word = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (done.returncode, done.stderr.decode()) == (128 + number, f"kprobe: {word}\n")


_SAYS_MUCH = """
import sys
from kprobes.cli.files import own_streams
out = own_streams()
out.write(b"x" * 300_000 + b"\\n")
print("y" * 300_000)
print("z" * 300_000, file=sys.stderr)
"""


@pytest.mark.parametrize("is_blocking", [True, False])
def test_without_pythons_buffers_every_byte_is_written(is_blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, is_blocking)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", _SAYS_MUCH], stdout=writer, stderr=writer
    ) as process:
        os.close(writer)
        with os.fdopen(reader, "rb") as taken:
            found = taken.read()

    assert process.returncode == 0
    assert found == b"".join(letter * 300_000 + b"\n" for letter in (b"x", b"y", b"z"))
