"""``kprobe vng``, with a virtme-ng of our own: it boots a kernel, runs a few lines, and ends."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kprobes.cli.vng import EPILOG
from tests.build.command import WAIT_S, Command, events_of, wait_for_event
from tests.build.json_lines import objects
from tests.build.plain_guest import initramfs, kernel, qemu_command
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest]

STATUS = 7
_VNG = """#!{python}
import shlex, subprocess, sys
print("virtme-ng begins", flush=True)
(words,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--qemu-opts=")]
command = [*{command}, *shlex.split(words)]
done = subprocess.run(command, cwd={directory!r}, stdin=subprocess.DEVNULL)
sys.exit(done.returncode or {status})
"""
_ENDS = b"""#!/bin/busybox sh
for n in 1 2 3 4 5 6 7 8 9 10; do /bin/busybox cat /init > /dev/null; echo $n > /dev/null; done
/bin/busybox poweroff -f
"""
_STAYS = b"""#!/bin/busybox sh
while :; do /bin/busybox cat /init > /dev/null; /bin/busybox usleep 20000; done
"""
_EXAMPLES = [line.strip() for line in EPILOG.splitlines()[1:4]]
READS = "p:opened do_sys_openat2 path=+0($arg2):ustring"


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own; no guest outlives the test."""
    with Command(tmp_path / "state") as command:
        yield command
    for pid in processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def install(directory: Path, init: bytes) -> str:
    """Make a ``vng`` whose guest has an init; return the search path that it is first in."""
    (directory / "initramfs").write_bytes(initramfs("amd64", init))
    command = qemu_command(kernel(), "amd64", ())
    text = _VNG.format(
        python=sys.executable, command=command, directory=str(directory), status=STATUS
    )
    (directory / "bin").mkdir()
    (directory / "bin" / "vng").write_text(text)
    (directory / "bin" / "vng").chmod(0o755)
    return f"{directory / 'bin'}:/usr/bin:/bin"


def processes(directory: Path) -> list[int]:
    """Return the processes that stand in a directory: QEMU's."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (each / "cwd").readlink() == directory:
                found.append(int(each.name))
    return found


def test_a_run_is_traced_from_its_initcalls_to_its_last_event(
    kprobe: Command, tmp_path: Path
) -> None:
    path = install(tmp_path, _ENDS)
    words = ["p:call do_one_initcall", READS, "p:off kernel_power_off"]

    done = kprobe("vng", *words, "--summary", f"json:{tmp_path / 'summary'}", path=path)

    said = done.stderr.decode()
    assert done.returncode == STATUS, said
    assert said.startswith("virtme-ng begins\n")
    assert "waiting for" not in said
    events = events_of(done.stdout)
    names = [line.split(b": ")[1] for line in events]
    assert names.count(b"call") > 100
    assert names[-1] == b"off"
    assert sum(b'path="/init"' in line for line in events) >= 10
    (summary,) = objects("summary", (tmp_path / "summary").read_bytes())
    assert (summary["written"], summary["lost"]) == (len(events), 0)
    assert b"no journal" in kprobe("status").stdout


def test_events_go_to_a_file_and_the_run_s_own_words_to_standard_output(
    kprobe: Command, tmp_path: Path
) -> None:
    path = install(tmp_path, _ENDS)

    done = kprobe("vng", READS, "-o", str(tmp_path / "out"), "--exit-status=ignore", path=path)

    assert (done.returncode, done.stdout) == (0, b"virtme-ng begins\n")
    assert len(events_of((tmp_path / "out").read_bytes())) >= 10


def test_a_trace_that_is_over_earlier_lets_the_run_go_on(kprobe: Command, tmp_path: Path) -> None:
    path = install(tmp_path, _ENDS)

    done = kprobe("vng", READS, "--max-events", "3", "-q", "--", "--run", "kernel", path=path)

    assert done.returncode == STATUS, done.stderr.decode()
    assert len(events_of(done.stdout)) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trace_and_the_run(
    kprobe: Command, tmp_path: Path, number: signal.Signals
) -> None:
    path = install(tmp_path, _STAYS)
    tracing = kprobe.start("vng", READS, path=path)
    wait_for_event(tracing)
    assert processes(tmp_path)

    tracing.send_signal(number)
    _, said = tracing.communicate(timeout=WAIT_S)

    assert tracing.returncode == 0, said.decode()
    assert b"events, 0 missed, 0 lost" in said
    assert not processes(tmp_path)


def test_a_killed_tracer_leaves_the_run_and_its_text_is_put_back(
    kprobe: Command, tmp_path: Path
) -> None:
    path = install(tmp_path, _STAYS)
    tracing = kprobe.start("vng", READS, path=path)
    wait_for_event(tracing)

    tracing.kill()

    assert becomes_true(lambda: b"no journal" in kprobe("status").stdout)
    assert processes(tmp_path)
    (pid,) = processes(tmp_path)
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    shutil.rmtree(Path(words[-2].decode().removeprefix("unix:").partition(",")[0]).parent)


def test_a_definition_that_the_kernel_has_not_ends_the_run(kprobe: Command, tmp_path: Path) -> None:
    path = install(tmp_path, _STAYS)

    done = kprobe("vng", "p vfs_raed", path=path)

    assert done.returncode == 4, done.stderr.decode()
    assert "Invalid probed address or symbol" in done.stderr.decode()
    assert not processes(tmp_path)


@pytest.mark.parametrize("example", _EXAMPLES)
def test_an_example_of_its_help_does_what_it_says(
    kprobe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    path = install(tmp_path, _ENDS)
    monkeypatch.chdir(tmp_path / "bin")
    words = shlex.split(example)[1:]

    done = kprobe(*words, path=path)

    assert done.returncode == STATUS, done.stderr.decode()
    text = Path(words[words.index("-o") + 1]).read_bytes() if "-o" in words else done.stdout
    name = words[1].split()[0].partition(":")[2].encode()
    assert {line.split(b": ")[1] for line in events_of(text)} == {name}
