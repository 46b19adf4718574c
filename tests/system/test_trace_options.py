"""The kernel's trace options: its own recording, read with each, beside ours of the same hits."""

import io
import re
import struct
from collections.abc import Generator, Mapping, Sequence

import pytest
from msgspec import Struct
from msgspec.structs import replace

import kprobes
from kprobes.model.text_options import text_options
from kprobes.open import GuestSession
from kprobes.sinks.text import TextSink
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from tests.system.conftest import SUITES
from tests.system.oracle import TRACING, Tracefs

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]

_OPENED = (
    "p:opened do_sys_openat2 path=+0($arg2):ustring how=+0($arg3):u8[4] fd=$arg1:s32 byte=$arg1:u8"
    ' wide=$arg3:u64 low=$arg1:u16 place=$stack0:symbol bits=$arg1:b4@2/32 task=$comm said=\\"abc"'
    " odd=+0($arg3):u16[3] lost=+0(\\0):string"
)
_DEFINITIONS = (
    _OPENED,
    "p:read vfs_read",
    "p:wrote vfs_write count=$arg3:x64",
)
_RETURN = "r:back vfs_write got=$retval:s64"
_FILTER = 'comm == "dd"'
_WORKLOAD = "dd if=/dev/zero of=/dev/null bs=77 count=20"
_STACK = 4
"""Its number among the types of entries."""
_OPTIONS = (
    (),
    ("sym-offset",),
    ("sym-addr",),
    ("sym-offset", "sym-addr"),
    ("nocontext-info",),
    ("noirq-info",),
    ("verbose",),
    ("noprint-parent",),
    ("record-tgid",),
    ("record-tgid", "noirq-info"),
    ("raw",),
    ("raw", "nocontext-info"),
    ("hex",),
    ("bin",),
)
_FIELDS = ("fields",)
_HEAD = re.compile(rb"(.{16}-\d+ +(?:\([\d -]{7}\) )?\[)\d+(\] )(\S*)( +)\d+\.\d{6}: ")
_RAW = re.compile(rb"(\d+) \d+ \d+ type: (\d+)")
_HEX = re.compile(rb"([0-9a-f]{8}) [0-9a-f]{8} [0-9a-f]{16} type: (\d+)")
_TYPE = re.compile(rb"type: (\d+)")
_FIRST = re.compile(rb"(<stack trace>\n) => .*\n")
_SECOND = re.compile(rb"(<stack trace>\n => .*\n) => .*\n")
_TGID = re.compile(rb" common_tgid=(?:\d+|0x[0-9a-f]+ \(\d+\))$", re.MULTILINE)
_STACK_OF_FIELDS = re.compile(rb".*(?:UNKNOWN TYPE 4|<stack trace>)\n(?: => .*\n)*")

Options = tuple[str, ...]
Texts = Mapping[Options, bytes]


class Recorded(Struct, frozen=True, kw_only=True):
    """The same hits twice, printed with each choice of options.

    Attributes:
        ids, their_ids: the events' names by their numbers.
    """

    ours: Texts
    theirs: Texts
    ids: Mapping[int, str]
    their_ids: Mapping[int, str]


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=SUITES[request.param], arch=arch)) as session:
        yield session


def read_with(guest: GuestSession, options: Options) -> bytes:
    """Return what the kernel's ``trace`` is with some options, which are then as before."""
    on = "".join(f"echo {word} > trace_options\n" for word in options)
    opposite = (word[2:] if word.startswith("no") else f"no{word}" for word in options)
    off = "".join(f"echo {word} > trace_options\n" for word in opposite)
    found = guest.run(f"cd {TRACING}; set -e\n{on}cat trace\n{off}", timeout_s=300)
    assert found.status == 0, found.output[-300:]
    return found.output


def text_with(guest: GuestSession, trace: Trace, options: Options) -> bytes:
    """Return what ours is."""
    out = io.BytesIO()
    sink = TextSink(out, replace(guest.source, entries=len(trace), options=text_options(options)))
    for events in trace.events:
        sink.write(events)
    sink.close()
    return out.getvalue()


def choices(guest: GuestSession) -> Sequence[Options]:
    """Return the options that the guest's kernel has, and as we have them."""
    return (*_OPTIONS, _FIELDS) if guest.kernel.version >= (7, 0) else _OPTIONS


@pytest.fixture(scope="module")
def recorded(guest: GuestSession) -> Recorded:
    tracefs = Tracefs(guest)
    guest.probe("\n".join(_DEFINITIONS), filter=_FILTER, stacktrace=True, tgid=True)
    tracefs.arm([each.replace(":", ":theirs/", 1) for each in _DEFINITIONS], buffer_kib=4096)
    filters = f"for f in events/theirs/*/filter; do echo '{_FILTER}' > $f; done\n"
    tracefs.run(f"{filters}echo 1 > options/stacktrace; echo 1 > options/record-tgid")
    tracefs.start()
    with guest.record() as trace:
        assert guest.run(_WORKLOAD).status == 0
    tracefs.stop()
    assert trace.counts.lost == 0
    assert sum(trace.counts.missed.values()) == 0
    tracefs.run("echo 0 > options/record-tgid")
    their_ids = {
        int(tracefs.run(f"cat events/theirs/{name}/id")): name
        for name in ("opened", "read", "wrote")
    }
    theirs = {options: read_with(guest, options) for options in choices(guest)}
    tracefs.disarm()
    return Recorded(
        ours={options: text_with(guest, trace, options) for options in theirs},
        theirs=theirs,
        ids={layout.event_id: layout.event for layout in guest.driver.layouts},
        their_ids=their_ids,
    )


def plain(text: bytes, ids: Mapping[int, str], *, is_ours: bool, arch: str) -> list[bytes]:
    """Return the lines of a text without what the two have to have differently, sorted.

    Of a stack its first address is; on arm64 ours has the caller that a register has.
    """

    def named(found: re.Match[bytes]) -> bytes:
        number = int(found[found.re.groups])
        where = found[1] if found.re.groups == 2 else b""
        return where + b" type: " + ("stack" if number == _STACK else ids[number]).encode()

    if arch == "arm64" and is_ours:
        text = _SECOND.sub(rb"\1", text)
    # Without the option it is a field as others.
    text = _TGID.sub(b"", text)
    text = _FIRST.sub(rb"\1", text)
    text = _HEAD.sub(lambda m: m[1] + b"C" + m[2] + b"." * len(m[3]) + m[4] + b"T: ", text)
    for pattern in (_RAW, _HEX):
        text = pattern.sub(named, text)
    if text.count(b"type: ") and not text.count(b" type: "):
        text = _TYPE.sub(named, text)
    counts = b"# entries-in-buffer"
    return sorted(line for line in text.split(b"\n") if not line.startswith(counts))


def entries(text: bytes, ids: Mapping[int, str]) -> list[tuple[int, str]]:
    """Return pid and event of each entry that is printed as its bytes."""
    found: list[tuple[int, str]] = []
    at = text.index(b"|\n") + 2
    while at < len(text):
        pid, cpu, _ = struct.unpack_from("<iiQ", text, at)
        assert cpu < 2
        end = text.index(b"\n", at + 16)
        number = int(text[at + 16 : end].removeprefix(b"type: "))
        found.append((pid, "stack" if number == _STACK else ids[number]))
        at = end + 1
    return found


@pytest.mark.parametrize("options", [each for each in _OPTIONS if each != ("bin",)], ids="-".join)
def test_the_text_is_the_kernels(recorded: Recorded, options: Options, arch: str) -> None:
    ours = plain(recorded.ours[options], recorded.ids, is_ours=True, arch=arch)
    theirs = plain(recorded.theirs[options], recorded.their_ids, is_ours=False, arch=arch)

    assert len(theirs) > 80
    assert ours == theirs


def test_bytes_are_the_kernels(recorded: Recorded) -> None:
    ours = entries(recorded.ours["bin",], recorded.ids)

    assert len(ours) > 80
    assert ours == entries(recorded.theirs["bin",], recorded.their_ids)


def test_fields_are_printed_as_by_the_newest_kernel(
    recorded: Recorded, guest: GuestSession, arch: str
) -> None:
    if _FIELDS not in recorded.theirs:
        assert guest.kernel.version < (6, 4)
        return
    ours, theirs = (
        _STACK_OF_FIELDS.sub(b"", texts[_FIELDS]) for texts in (recorded.ours, recorded.theirs)
    )
    # What is no number of C is shown by its bytes, and not <INVALID-SIZE>.
    ours = re.sub(rb"odd=[0-9a-f]{2}(?:,[0-9a-f]{2}){5}", b"odd=<INVALID-SIZE>", ours)

    found = plain(ours, recorded.ids, is_ours=True, arch=arch)
    assert found == plain(theirs, recorded.their_ids, is_ours=False, arch=arch)
    assert sum(b"opened: __probe_ip=" in line for line in found) > 1


@pytest.mark.parametrize("options", [("sym-addr",), ("sym-offset", "sym-addr")], ids="-".join)
def test_a_returns_places_are_the_kernels(guest: GuestSession, options: Options, arch: str) -> None:
    # One after the other: the kernel's own takes the return address over.
    tracefs = Tracefs(guest)
    tracefs.arm([_RETURN.replace(":", ":theirs/", 1)], buffer_kib=1024)
    tracefs.run(f"echo '{_FILTER}' > events/theirs/back/filter; echo 0 > options/stacktrace")
    tracefs.start()
    assert guest.run(_WORKLOAD).status == 0
    tracefs.stop()
    theirs = read_with(guest, ("nocontext-info", *options))
    tracefs.disarm()
    probe = guest.probe(_RETURN.replace("back", f"back_{len(options)}"), filter=_FILTER)
    with guest.record(probe) as trace:
        assert guest.run(_WORKLOAD).status == 0

    ours = text_with(guest, trace, ("nocontext-info", *options)).replace(
        b"_%d:" % len(options), b":"
    )

    assert plain(ours, {}, is_ours=True, arch=arch) == plain(theirs, {}, is_ours=False, arch=arch)
    assert ours.count(b" <- vfs_write <ffff") > 10
