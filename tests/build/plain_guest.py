"""A guest as a user starts it: QEMU by hand, a Debian kernel, a stub, and nothing of ours."""

import os
import subprocess
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from kprobes.formats import cpio
from kprobes.transport.debian import busybox, kernel_image
from kprobes.transport.qemu_command import MACHINE_TYPES, Accel
from tests.build.waiting import PATIENCE_S, becomes_true

_INIT = b"""#!/bin/busybox sh
while :; do
    echo tick
    /bin/busybox usleep 20000
done
"""
_BOOT_S = 90


class PlainGuest(Struct, frozen=True):
    """A running guest.

    Attributes:
        directory: of its own; QEMU stands there.
        pid: of QEMU.
    """

    directory: Path
    pid: int

    def ticks(self) -> int:
        """Return how often the guest's init has come round."""
        return (self.directory / "console").read_bytes().count(b"tick")

    @property
    def console(self) -> str:
        """What the guest has said."""
        return (self.directory / "console").read_text("utf-8", "replace")

    @property
    def threads(self) -> str:
        """What QEMU's threads do: name, state, ticks of CPU, where in this machine's kernel."""
        found: list[str] = []
        for task in sorted(Path(f"/proc/{self.pid}/task").glob("*")):
            with suppress(OSError):
                name, rest = (task / "stat").read_text().split("(")[1].rsplit(")", 1)
                state, *numbers = rest.split()
                place = (task / "wchan").read_text()
                found.append(f"{name} {state} {numbers[10]}+{numbers[11]} {place}")
        return "; ".join(found)

    def is_ticking(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether the guest comes round within a time."""
        return self.wait_for_ticks(self.ticks() + 2, timeout_s)

    def wait_for_ticks(self, count: int, timeout_s: float) -> bool:
        """Whether the guest has come round so often within a time."""
        return becomes_true(lambda: self.ticks() >= count, timeout_s)


def kernel(arch: str = "amd64", suite: str | None = None) -> Path:
    """Return the kernel to try: a suite's, else for amd64 KPROBES_TEST_KERNEL, else Debian's."""
    if suite is not None:
        return kernel_image(suite=suite, arch=arch)
    named = os.environ.get("KPROBES_TEST_KERNEL") if arch == "amd64" else None
    return Path(named) if named else kernel_image(arch=arch)


@contextmanager
def plain_guest(
    directory: Path,
    *options: str,
    arch: str = "amd64",
    suite: str | None = None,
    image: Path | None = None,
    init: bytes = _INIT,
    words: str = "",
) -> Generator[PlainGuest]:
    """Boot a guest until its init runs, and kill it afterwards.

    Args:
        directory: of its own.
        options: of QEMU; what is given again counts.
        arch: in Debian's words.
        suite: whose kernel it has, as for ``kernel``.
        image: the kernel instead.
        init: what runs there: it says ``tick`` each time that it comes round.
        words: of the kernel's command line, beside those that every such guest has.
    """
    (directory / "initramfs").write_bytes(initramfs(arch, init))
    command = qemu_command(image or kernel(arch, suite), arch, options, words)
    with ExitStack() as running:
        guest = running.enter_context(_started(directory, command))
        # Once in some thousand boots QEMU's guest does nothing at all: there is nothing of ours in
        # it yet, and a second one is as good.
        if not guest.wait_for_ticks(1, _BOOT_S) and not guest.console:
            words = f"a guest said nothing, and was booted again: {guest.threads}"
            warnings.warn(words, stacklevel=2)
            running.close()
            guest = running.enter_context(_started(directory, command))
        assert guest.wait_for_ticks(1, _BOOT_S), f"{guest.threads}\n{guest.console}"
        yield guest


@contextmanager
def _started(directory: Path, command: Sequence[str]) -> Generator[PlainGuest]:
    (directory / "console").write_bytes(b"")
    with (directory / "qemu.log").open("wb") as log:
        qemu = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield PlainGuest(directory, qemu.pid)
    finally:
        qemu.kill()
        qemu.wait()


def qemu_command(image: Path, arch: str, options: Sequence[str], words: str = "") -> list[str]:
    """Return what boots a kernel with the ``initramfs`` of the working directory."""
    machine_type = MACHINE_TYPES[arch]
    return [
        *(machine_type.program, "-kernel", str(image), "-initrd", "initramfs"),
        *(
            "-machine",
            machine_type.machine,
            "-cpu",
            machine_type.cpu[Accel.TCG],
            "-smp",
            "2",
            "-m",
            "256M",
        ),
        *("-append", f"console={machine_type.console} quiet {machine_type.words} {words}"),
        *("-display", "none", "-no-reboot", "-serial", "file:console"),
        *options,
    ]


def initramfs(arch: str, init: bytes = _INIT) -> bytes:
    """Return a file system with a busybox and that init."""
    return cpio.archive(
        [
            cpio.directory("dev"),
            cpio.directory("bin"),
            cpio.character_device("dev/console", 5, 1),
            cpio.file("bin/busybox", busybox(arch=arch).read_bytes(), mode=0o755),
            cpio.file("init", init, mode=0o755),
        ]
    )
