"""Kernels for x-rays: one function in memory and in a file, and who may have changed it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.guest.journal import Entry
from kprobes.guest.tracers import GuestProbe, Tracers
from kprobes.image.build import Region
from kprobes.image.file import KernelImage
from kprobes.inspect.subject import TextSnapshot
from kprobes.model.kernel import Kernel, Symbol, TextTables
from kprobes.plan.ftrace import Sites
from kprobes.units import Addr
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import SITE, TEXT, make_kernel, symbol

NOP = "0f1f440000"
REST = "4157 4156 4155 4889f3 c3"
"""After the site: push r15, r14, r13; mov rsi, rbx; ret."""
SLIDE = 0x1000_0000
FENTRY = TEXT + 0x100


def call(target: int, *, place: int = SITE, opcode: str = "e8") -> str:
    """Return a call or jump from a place, as hexadecimal."""
    return opcode + (target - place - 5).to_bytes(4, "little", signed=True).hex()


def make_snapshot(
    now: str | None = NOP + REST,
    was: str | None = call(FENTRY) + REST,
    *,
    pieces: Mapping[int, str] | None = None,
    symbols: Sequence[Symbol] = (),
    tables: TextTables | None = None,
    probes: Sequence[GuestProbe] = (),
    entries: Sequence[Entry] = (),
    slide: int = 0,
) -> TextSnapshot:
    """Return a kernel with a function ``f`` at SITE.

    Args:
        now: its bytes in memory as hexadecimal, or None for no memory.
        was: in the file, which is linked ``slide`` lower, or None for no file.
        pieces: what else is in memory.
        symbols: what else has a name.
        tables: of the text; the site is known without.
        probes: the guest's own kprobes.
        entries: journals.
        slide: KASLR's.
    """
    size = len(bytes.fromhex(now or was or ""))
    given = [symbol("f", SITE, size=size), symbol("__fentry__", FENTRY, size=0x10), *symbols]
    kernel = replace(make_kernel(given), slide=slide)
    memory = SparseMemory({SITE: bytes.fromhex(now) + bytes(16)} if now is not None else {})
    memory.pieces |= {at: bytes.fromhex(code) for at, code in (pieces or {}).items()}
    return TextSnapshot(
        kernel=kernel,
        arch=X86_64,
        memory=memory if now is not None else None,
        image=_image(was, slide) if was is not None else None,
        linked=_linked(kernel) if was is not None else None,
        why_no_image="" if was is not None else "no file",
        sites=Sites(addrs=np.array([SITE], np.uint64), records=np.array([0], np.uint64)),
        tables=tables or TextTables(ftrace=frozenset({SITE})),
        probes=tuple(probes),
        tracers=Tracers(memory, kernel) if now is not None else None,
        entries=tuple(entries),
    )


def _image(code: str, slide: int) -> KernelImage:
    region = Region(addr=Addr(SITE - slide), data=bytes.fromhex(code) + bytes(16))
    return KernelImage(path=Path("vmlinux"), arch="x86_64", build_id=b"", regions=(region,))


def _linked(kernel: Kernel) -> Kernel:
    start, stop = kernel.text
    moved = [
        replace(each, addr=Addr(each.addr - kernel.slide)) for each in kernel.symbols.glob("*")
    ]
    text = (Addr(start - kernel.slide), Addr(stop - kernel.slide))
    return replace(make_kernel(moved), text=text)
