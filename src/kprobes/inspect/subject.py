"""The subject of an x-ray: a kernel's memory, the file it was booted from, and our journals."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import Arch
from kprobes.arch.registry import arch
from kprobes.errors import KprobesError, MemoryFault, RefusedError
from kprobes.guest.journal import Entry
from kprobes.guest.text import CleanText
from kprobes.guest.tracers import GuestProbe, Tracers, patches_of, read_guest_probes, taken
from kprobes.image.file import KernelImage, check_same_build, kernel_from_image, read_image
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import read_tables
from kprobes.model.kernel import Kernel, TextTables
from kprobes.model.plan import Patch
from kprobes.plan.ftrace import Sites, read_sites, sites_in_image
from kprobes.ports import Memory
from kprobes.transport.debian import cached

_PLACES = ("boot/vmlinuz-{0}", "usr/lib/modules/{0}/vmlinuz", "lib/modules/{0}/vmlinuz")


class TextSnapshot(Struct, frozen=True, kw_only=True, eq=False):
    """A kernel, as far as it can be looked at.

    Attributes:
        kernel: at its running addresses; at link addresses when there is only a file.
        memory: of the running kernel, or None.
        image: its file, or None.
        linked: what the file holds, at link addresses; None without one.
        why_no_image: why there is none.
        sites: of its function tracer, or None when it has none.
        tables: what is known of its text.
        probes, tracers: its own users of kprobes and ftrace.
        entries: journals of this kernel.
    """

    kernel: Kernel
    arch: Arch
    memory: Memory | None
    image: KernelImage | None
    linked: Kernel | None
    why_no_image: str
    sites: Sites | None
    tables: TextTables
    probes: tuple[GuestProbe, ...]
    tracers: Tracers | None
    entries: tuple[Entry, ...]

    def now(self, start: int, size: int) -> bytes | None:
        """Return bytes of memory, or None when no kernel runs.

        Raises:
            MemoryFault: nothing is mapped there.
        """
        return None if self.memory is None else self.memory.read(start, size)

    def was(self, start: int, size: int) -> bytes | None:
        """Return bytes of the file for a running address, or None when it has none there."""
        if self.image is None:
            return None
        with suppress(MemoryFault):
            return self.image.read(start - self.kernel.slide, size)
        return None

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes of what runs, else of what would, or raise MemoryFault."""
        found = self.now(addr, size)
        if found is None:
            found = self.was(addr, size)
        if found is None:
            raise MemoryFault(addr, size)
        return found

    def compiled(self) -> CleanText:
        """Return the text as it was compiled: without the kernel's own probes, and ours."""
        info = self.arch.patch
        theirs = (p for each in self.probes if not each.is_ftrace for p in patches_of(each, info))
        armed = (patch for entry in self.entries for patch in entry.patches)
        ours = (Patch(addr=patch.addr, old=patch.old, new=patch.new) for patch in armed)
        patches = (*theirs, *ours)
        return CleanText(self, lambda: patches)


def snapshot_of_guest(
    memory: Memory, kernel: Kernel, *, images: Iterable[Path], entries: Iterable[Entry]
) -> TextSnapshot:
    """Return a running guest, for x-rays.

    Args:
        memory: of the guest, which may run.
        kernel: that runs there.
        images: files that may be its kernel's, the likeliest first; the first of its build is.
        entries: journals of this guest.

    Raises:
        TargetError: its tables of text are broken.
    """
    image, why = _first_of(images, kernel)
    sites: Sites | None = None
    with suppress(RefusedError):
        sites = read_sites(memory, kernel)
    addrs = sites.addrs.tolist() if sites is not None else ()
    known, probes = arch(kernel.arch), read_guest_probes(memory, kernel)
    probed = taken(probes, kernel.symbols, memory, known.patch)
    return TextSnapshot(
        kernel=kernel,
        arch=known,
        memory=memory,
        image=image,
        linked=kernel_from_image(image) if image is not None else None,
        why_no_image=why,
        sites=sites,
        tables=replace(read_tables(memory, kernel, ftrace=addrs), probed=probed),
        probes=probes,
        tracers=Tracers(memory, kernel),
        entries=tuple(entries),
    )


def snapshot_of_image(path: Path) -> TextSnapshot:
    """Return a vmlinux or boot image, for x-rays without a guest.

    Raises:
        TargetError: the file cannot be read.
        FormatError: it is not a kernel, or damaged.
    """
    image = read_image(path)
    kernel = kernel_from_image(image)
    sites: Sites | None = None
    with suppress(RefusedError):
        sites = sites_in_image(image, kernel)
    return TextSnapshot(
        kernel=kernel,
        arch=arch(kernel.arch),
        memory=None,
        image=image,
        linked=kernel,
        why_no_image="",
        sites=sites,
        tables=read_image_tables(image, kernel),
        probes=(),
        tracers=None,
        entries=(),
    )


def candidates(kernel: Kernel, entries: Sequence[Entry], *, given: Path | None) -> Iterator[Path]:
    """Yield files that may be a running kernel's.

    Args:
        kernel: that runs.
        entries: journals of its guest, which may name one.
        given: by the user, or what the guest was booted from; then no other is tried.
    """
    if given is not None:
        yield given
        return
    yield from (Path(entry.image) for entry in entries if entry.image)
    # Nothing but a plain name may come out of a guest's memory into a path.
    if os.sep in kernel.release or not kernel.release:
        return
    roots = [Path("/"), *cached()]
    for root in roots:
        yield from (root / place.format(kernel.release) for place in _PLACES)


def _first_of(paths: Iterable[Path], kernel: Kernel) -> tuple[KernelImage | None, str]:
    why = "no file of this kernel is on this machine: name it with --vmlinux"
    for path in paths:
        if not path.is_file():
            continue
        try:
            image = read_image(path)
            check_same_build(kernel, image)
        except KprobesError as error:
            why = str(error)
            continue
        return image, ""
    return None, why
