"""Kernels, however they are started, and all that works with them: docs/reference/kernels.md.

Each guest is one that somebody else has started. Its own work, whose sums it compares, goes on all
the while, and where its kernel can, a probe of its own is there beside ours.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from msgspec import Struct

import kprobes
from kprobes.errors import DefinitionError, KprobesError, RefusedError
from kprobes.open import GuestSession
from kprobes.transport.debian import kernel_image
from kprobes.transport.qemu_command import MACHINE_TYPES
from tests.build.command import Command
from tests.build.json_lines import parsed
from tests.build.own_kernels import KERNELS, build
from tests.build.plain_guest import PlainGuest, plain_guest
from tests.build.victim import is_complaint
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.matrix, pytest.mark.timeout(4000)]

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "kernels.md"
COLUMNS = (
    *("list", "check", "entry", "middle", "breakpoint", "return", "handler"),
    *("own kprobe", "detach"),
)
WORKS = "yes"
NOT_THERE = "-"
STUB = ("-gdb", "unix:gdb.sock,server=on,wait=off")
QMP = ("-qmp", "unix:qmp.sock,server=on,wait=off")

_ROW = re.compile(r"^\| `?(.+?)`? \| (.+) \|$", re.MULTILINE)


class Tried(Struct, frozen=True, kw_only=True):
    """A guest to try.

    Attributes:
        name: in the page: the kernel, or how it is started.
        image: makes the kernel.
        arch: in Debian's words.
        options: of QEMU, beside those of ``qemu_command``.
        words: added to the kernel's command line.
        target: what a user would type, with the guest's directory for ``{directory}``.
    """

    name: str
    image: Callable[[], Path]
    arch: str = "amd64"
    options: tuple[str, ...] = STUB
    words: str = ""
    target: str = "qemu:{directory}/gdb.sock"


def _debian(name: str, suite: str, arch: str = "amd64", flavour: str = "cloud") -> Tried:
    image = partial(kernel_image, suite=suite, arch=arch, flavour=flavour)
    return Tried(name=f"{name} {arch} {flavour}", image=image, arch=arch)


def _own(name: str) -> Tried:
    return Tried(name=f"own: {name}", image=partial(build, name), arch=KERNELS[name].arch)


OF_KERNELS = (
    _debian("5.10", "bullseye"),
    _debian("6.1", "bookworm"),
    _debian("6.1", "bookworm", flavour="ordinary"),
    _debian("6.1", "bookworm", flavour="rt"),
    _debian("6.12", "trixie"),
    _debian("6.12", "trixie", flavour="rt"),
    _debian("7.x", "sid"),
    _debian("7.x", "sid", flavour="ordinary"),
    _debian("6.1", "bookworm", "arm64"),
    _debian("6.1", "bookworm", "arm64", "ordinary"),
    _debian("6.12", "trixie", "arm64"),
    _debian("6.12", "trixie", "arm64", "16k"),
    _debian("7.x", "sid", "arm64"),
    *map(_own, KERNELS),
)


def _started(name: str, *options: str, words: str = "", arch: str = "amd64") -> Tried:
    image = partial(kernel_image, arch=arch)
    return Tried(name=name, image=image, options=(*STUB, *options), words=words, arch=arch)


def _backed(kind: str, more: str = "") -> tuple[str, ...]:
    backend = f"memory-backend-{kind},id=ram,size=256M{more}"
    return "-object", backend, "-machine", "memory-backend=ram"


OF_STARTS = (
    _started("-machine pc"),
    _started("-machine q35", "-machine", "q35"),
    _started("-machine microvm", "-machine", "microvm,acpi=off"),
    _started("-accel tcg,thread=single", "-accel", "tcg,thread=single"),
    _started("-icount shift=auto", "-icount", "shift=auto"),
    _started("-smp 1", "-smp", "1"),
    _started("-smp 8", "-smp", "8"),
    _started("-m 6G", "-m", "6G"),
    _started("memory-backend-memfd", *_backed("memfd", ",share=on")),
    _started("memory-backend-file", *_backed("file", ",share=on,mem-path=ram")),
    _started("memory-backend-ram", *_backed("ram")),
    _started("-cpu max,la57=on", "-cpu", "max,la57=on"),
    _started("-cpu qemu64", "-cpu", "qemu64"),
    _started("nokaslr", words="nokaslr"),
    _started("highres=off nohz=off", words="highres=off nohz=off"),
    _started("notsc clocksource=acpi_pm", words="notsc clocksource=acpi_pm"),
    _started("pti=on mitigations=auto", words="pti=on mitigations=auto"),
    Tried(
        name="a monitor and no stub",
        image=kernel_image,
        options=QMP,
        target="qemu:{directory}/qmp.sock",
    ),
    _started("arm64: -smp 1", "-smp", "1", arch="arm64"),
    _started("arm64: gic-version=2", "-machine", "virt,gic-version=2", arch="arm64"),
    _started("arm64: virtualization=on", "-machine", "virt,virtualization=on", arch="arm64"),
    _started("arm64: -cpu cortex-a57", "-cpu", "cortex-a57", arch="arm64"),
    _started("arm64: nokaslr", words="nokaslr", arch="arm64"),
)


def row(name: str, cells: dict[str, str]) -> str:
    """Return a line of the page."""
    return f"| {name} | {' | '.join(cells[column] for column in COLUMNS)} |"


def rows() -> dict[str, tuple[str, ...]]:
    """Return what the page says, by name."""
    found = {name: tuple(text.split(" | ")) for name, text in _ROW.findall(PAGE.read_text())}
    return {name: cells for name, cells in found.items() if len(cells) == len(COLUMNS)}


INIT = b"""#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /tracing
$b mount -t proc proc /proc
if $b mount -t tracefs tracefs /tracing && echo 'p:own do_sys_openat2' > /tracing/kprobe_events
then
    echo 1 > /tracing/events/kprobes/own/enable
    $b cat /tracing/trace_pipe &
fi 2> /dev/null
sum=$($b md5sum $b)
while :; do
    [ "$($b md5sum $b)" = "$sum" ] && echo tick || echo broken
    $b usleep 20000
done
"""
FUNCTION = "vfs_open"
_OWN = re.compile(rb"^ *\S.*-(\d+) +\[\d+\] .*: own: \(", re.MULTILINE)
_OURS = re.compile("armed by|holding bytes")
_SITE, _FARTHEST = 16, 96
"""Where no function tracer's site is any more, and how far is looked."""
_EVENTS, _ROUNDS = 3, 10
_WAIT_S = 60


class Scene:
    """A guest that is tried."""

    def __init__(self, guest: PlainGuest, kprobe: Command, tried: Tried) -> None:
        self.guest, self.kprobe, self.arch = guest, kprobe, tried.arch
        self.target = tried.target.format(directory=guest.directory)

    def run(self, *words: str) -> str:
        """Return what a command prints, or raise KprobesError with its message."""
        command, *others = words
        done = self.kprobe(command, "--target", self.target, *others)
        if done.returncode:
            said = (done.stderr or done.stdout).decode().splitlines()
            why = next(line for line in said if not line.startswith(("p ", "r ")))
            raise KprobesError(why.removeprefix("kprobe: "))
        return done.stdout.decode()

    @property
    def console(self) -> bytes:
        """What the guest has printed."""
        return (self.guest.directory / "console").read_bytes()


@pytest.fixture
def kprobe(tmp_path: Path) -> Generator[Command]:
    with Command(tmp_path / "state") as command:
        yield command


def list_(scene: Scene) -> None:
    assert FUNCTION in scene.run("list", FUNCTION).split()


def check(scene: Scene) -> None:
    assert scene.run("check", f"p {FUNCTION}", f"r {FUNCTION}")


def own_kprobe(scene: Scene) -> str:
    """Hold the guest's own probe against ours, by task: all that it saw we saw."""
    if not _OWN.search(scene.console):
        return NOT_THERE
    printed = scene.run(
        *("trace", "--format", "json", "--quiet", "--max-events", "300", "p:ours do_sys_openat2")
    )
    ours = [event["pid"] for event in parsed(printed) if event["event"] == "ours"]
    counted = Counter(ours)
    within = set(list(dict.fromkeys(ours))[1:-1])
    assert len(within) > _EVENTS

    # What it printed of these tasks is there when it has come round so often again.
    assert scene.guest.wait_for_ticks(scene.guest.ticks() + _ROUNDS, _WAIT_S)
    own = Counter(map(int, _OWN.findall(scene.console)))
    assert {pid: own[pid] for pid in within} == {pid: counted[pid] for pid in within}
    return WORKS


def _probed(session: GuestSession, text: str) -> None:
    session.probe(text)
    found = list(islice(session.events(timeout_s=_WAIT_S), _EVENTS))
    session.select().delete()
    assert len(found) == _EVENTS


def entry(session: GuestSession) -> None:
    _probed(session, f"p:in {FUNCTION}")


def middle(session: GuestSession) -> None:
    _probed(session, f"p:mid {FUNCTION}+{_inner(session)}")


def _inner(session: GuestSession) -> int:
    """Return the offset of an instruction in the middle that may be probed."""
    for offset in range(_SITE, _FARTHEST):
        with suppress(DefinitionError, RefusedError):
            session.probe(f"p {FUNCTION}+{offset}")
            session.select().delete()
            return offset
    pytest.fail("no instruction in the middle may be probed")


def return_(session: GuestSession) -> None:
    _probed(session, f"r:out {FUNCTION} got=$retval:s32")


def handler(session: GuestSession) -> None:
    seen: list[int] = []

    def opened(probe: kprobes.Kprobe, regs: kprobes.Registers) -> None:
        del probe
        seen.append(regs.cpu)

    probe = kprobes.Kprobe(symbol_name=FUNCTION, pre_handler=opened)
    session.register_kprobe(probe)
    assert becomes_true(lambda: len(seen) >= _EVENTS, _WAIT_S)
    probe.unregister()


def breakpoint_(scene: Scene, offset: int) -> str | None:
    if scene.arch == "arm64":
        return NOT_THERE
    options = "--strategy", "breakpoint", "--max-events", str(_EVENTS), "--quiet"
    assert scene.run("trace", *options, f"p:bp {FUNCTION}+{offset}").count("bp: (") == _EVENTS
    return None


def is_well(scene: Scene) -> None:
    assert scene.guest.is_ticking()
    said = scene.console.decode(errors="replace").splitlines()
    assert not [line for line in said if line == "broken" or is_complaint(line)]
    assert not _OURS.search(scene.run("status"))


_ATTACHED = {"entry": entry, "middle": middle, "return": return_, "handler": handler}


def _cells(scene: Scene) -> Iterator[tuple[str, str]]:
    yield "list", _tried(partial(list_, scene))
    yield "check", _tried(partial(check, scene))
    with kprobes.attach(scene.target) as session:
        for name, ability in _ATTACHED.items():
            yield name, _tried(partial(ability, session))
        offset = _inner(session)
    yield "breakpoint", _tried(partial(breakpoint_, scene, offset))
    yield "own kprobe", _tried(partial(own_kprobe, scene))
    yield "detach", _tried(partial(is_well, scene))


def _tried(ability: Callable[[], str | None]) -> str:
    try:
        return ability() or WORKS
    except KprobesError as e:
        return str(e).splitlines()[0].replace("|", "/")


@pytest.mark.parametrize("tried", [*OF_KERNELS, *OF_STARTS], ids=lambda tried: tried.name)
def test_what_works_is_what_the_page_says(
    tried: Tried, tmp_path: Path, kprobe: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_type = MACHINE_TYPES[tried.arch]
    words = f"console={machine_type.console} ignore_loglevel {machine_type.words} {tried.words}"
    image = tried.image()
    with plain_guest(
        tmp_path, *tried.options, "-append", words, arch=tried.arch, image=image, init=INIT
    ) as guest:
        cells = dict(_cells(Scene(guest, kprobe, tried)))

    with capsys.disabled():
        sys.stdout.write(f"\n{row(tried.name, cells)}\n")
    assert rows().get(tried.name) == tuple(cells[column] for column in COLUMNS)
