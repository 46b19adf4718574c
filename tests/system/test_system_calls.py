"""System calls by name: what a guest's own events of them say, of all of them and of each hit."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.inspect.status import system_calls
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import Command
from tests.system.conftest import SUITES
from tests.system.oracle import TRACING

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]

_FIELD = re.compile(r"field:(.+?) ?(\w+);\toffset:\d+;\tsize:\d+;")
_HIT = re.compile(r"sys_openat\(dfd: (-?\w+), filename: (\w+)(?:.*mode: (\w+))?")
"""The mode is not there where 7.x knows that it means nothing."""
_WORKLOAD = "dd if=/etc/passwd of=/tmp/copy 2>/dev/null; dd if=/nosuch 2>/dev/null; true"
_FILTER = 'comm == "dd"'


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    options = MachineOptions(suite=SUITES[request.param], arch=arch)
    with kprobes.boot(options) as session:
        yield session


def run(guest: GuestSession, script: str) -> str:
    """Run a script among the tracing files and return what it wrote."""
    found = guest.run(f"cd {TRACING}; {script}", timeout_s=300)
    return found.output.decode()


def number(text: str, guest: GuestSession) -> int:
    """Return what the kernel has printed: hexadecimal by 6.1, later as in C."""
    if guest.kernel.version < (7, 0):
        return int(text, 16)
    return int(text, 8) if text.startswith("0") and text.isdigit() else int(text, 0)


def has_names(guest: GuestSession) -> bool:
    """Whether the kernel tells of system calls: arm64's 6.1 has no names of data."""
    return guest.kernel.symbols.find("__syscall_meta__openat") is not None


def test_names_of_arguments_are_those_of_the_kernels_own_events(guest: GuestSession) -> None:
    own = guest.driver.guest
    ours = {
        each.name: each.parameters for each in system_calls(own.memory, own.kernel, pattern="*")
    }
    if not has_names(guest):
        assert set(ours.values()) == {None}
        return

    texts = run(guest, "grep -H field: events/syscalls/sys_enter_*/format").splitlines()
    theirs: dict[str, list[tuple[str, str]]] = {}
    for line in texts:
        name = line.partition("sys_enter_")[2].partition("/")[0]
        found = _FIELD.search(line)
        if " common_" not in line and found is not None and not found[2].startswith("__"):
            theirs.setdefault(name, []).append((found[2], found[1].strip()))
    assert len(theirs) > 300
    known = {name: parameters for name, parameters in ours.items() if parameters is not None}
    # Some are served by a function of another name.
    alike = theirs.keys() & known.keys()
    assert len(alike) > 0.95 * len(theirs)
    for name in alike:
        assert [n for n, _ in known[name]] == [n for n, _ in theirs[name]], name


def test_each_hit_has_what_the_kernels_own_event_has(guest: GuestSession) -> None:
    words = "dfd:x32 filename mode:x16"
    if not has_names(guest):
        words = "dfd=$arg1:x32 filename=$arg2 mode=$arg4:x16"
    event = "events/syscalls/sys_enter_openat"
    run(guest, f"echo '{_FILTER}' > {event}/filter; echo 1 > {event}/enable; : > trace")
    probe = guest.probe(f"p:open sys_openat {words}", filter=_FILTER)
    with guest.record(probe) as trace:
        assert guest.run(_WORKLOAD).status == 0
    theirs = _HIT.findall(
        run(guest, f"cat trace; echo 0 > {event}/enable; echo 0 > {event}/filter")
    )

    columns = [trace["open"][name] for name in ("dfd", "filename", "mode")]
    ours = list(zip(*(map(int, column) for column in columns), strict=True))
    masks = (0xFFFF_FFFF, (1 << 64) - 1, 0xFFFF)
    for mine, hit in zip(ours, theirs, strict=True):
        pairs = zip(mine, hit, masks, strict=True)
        assert [(n, number(text, guest) & mask) for n, text, mask in pairs if text] == [
            (n, n) for n, text in zip(mine, hit, strict=True) if text
        ]
    assert len(ours) == 3


def test_texts_and_returns_are_the_programs(guest: GuestSession) -> None:
    texts = "filename" if has_names(guest) else "$arg2"
    text = f"path=+u0({texts}):ustring"
    probe = guest.probe(
        f"p:in sys_openat {text}\nr:out sys_openat {text} got=$retval:s64", filter='comm == "cat"'
    )
    with guest.record(probe) as trace:
        assert guest.run("cat /etc/passwd >/dev/null; cat /nosuch 2>/dev/null; true").status == 0

    names = [*map(str, trace["in"]["path"])]
    assert {"/etc/passwd", "/nosuch"} <= {*names}
    assert sorted(names) == sorted(map(str, trace["out"]["path"]))
    got = dict(zip(map(str, trace["out"]["path"]), trace["out"]["got"], strict=True))
    assert got["/etc/passwd"] >= 3
    assert got["/nosuch"] == -2


def test_counts_by_name_are_those_of_the_kernels_own_histogram(guest: GuestSession) -> None:
    if not has_names(guest):
        return
    event = "events/raw_syscalls/sys_enter"
    run(guest, f"echo 'hist:keys=id.syscall if {_FILTER}' > {event}/trigger")
    probe = guest.probe("t:calls sys_enter id", filter=_FILTER)
    with guest.counting("keys=id.syscall", probe) as counted:
        assert guest.run(_WORKLOAD).status == 0
    theirs = run(guest, f"cat {event}/hist; echo '!hist:keys=id.syscall' > {event}/trigger")

    found = counted.clear()
    ours = sorted(line for line in found.text().decode().splitlines() if line.startswith("{"))
    assert ours == sorted(line for line in theirs.splitlines() if line.startswith("{"))
    assert any("{ id: sys_openat " in line for line in ours)
    assert {name.partition("[")[0] for name in found.columns()["id.syscall"]} >= {"sys_openat"}


def test_they_are_listed(tmp_path: Path, arch: str) -> None:
    with Command(tmp_path) as kprobe:
        found = kprobe("syscalls", "-q", "--target", "guest", "--arch", arch, "opena*")

    assert (found.returncode, found.stderr) == (0, b"")
    lines = found.stdout.decode().splitlines()
    args = "(int dfd, const char *filename, int flags, umode_t mode)" if arch == "amd64" else "(?)"
    assert [line.split()[-len(args.split()) - 1] for line in lines[:1]] == ["openat"]
    assert lines[0].endswith(args)
    assert len(lines) == 2
