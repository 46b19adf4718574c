"""Kernels and ways to start them that `make matrix` tries, and the page that says what works."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import Struct

from kprobes.transport.debian import kernel_image
from tests.build.own_kernels import KERNELS, build

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "kernels.md"
COLUMNS = (
    *("list", "check", "entry", "middle", "breakpoint", "return", "handler"),
    *("own kprobe", "detach"),
)
WORKS = "yes"
NOT_THERE = "-"
STUB = ("-gdb", "unix:gdb.sock,server=on,wait=off")
QMP = ("-qmp", "unix:qmp.sock,server=on,wait=off")
PORT = "qemu:127.0.0.1:{port}"

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
