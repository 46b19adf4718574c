"""What the kernel itself changes in its text: by its live lists, and by boot's in its file."""

from collections.abc import Iterator
from dataclasses import dataclass

from kprobes.arch.listed import Listed, Syntax
from kprobes.drivers.anatomy import Author, Mark, Subject
from kprobes.drivers.specimen import Specimen
from kprobes.errors import MemoryFault
from kprobes.image.boot_patches import BootPatch, Rewritten, read_boot_patches
from kprobes.model.symbol import name_of
from kprobes.units import Addr

_SITE = 5
_LONGEST = 15
_TRAMPOLINES = "__SCT__*"
_NEVER_SAID = frozenset({BootPatch.CALL, BootPatch.LOCK})
"""Too many of them are rewritten on no CPU of today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Some text as it is: in memory, and in the file as KASLR leaves it; None where it is not."""

    subject: Subject
    now: bytes | None
    was: bytes | None

    def differs(self, start: int, stop: int) -> bool:
        """Whether memory and file are both known and not the same in [start, stop)."""
        if self.now is None or self.was is None:
            return False
        low, high = (max(at - self.subject.start, 0) for at in (start, stop))
        return self.now[low:high] != self.was[low:high]


def jump_labels(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    """Tell which way each jump label is."""
    for number, target in specimen.tables.jump_labels.items():
        if not found.subject.start <= number < found.subject.stop:
            continue
        line = _line(specimen, number)
        name = name_of(specimen.kernel.symbols, target)
        state = (
            f"on, a jump to {name}" if line.target else f"off, a nop instead of a jump to {name}"
        )
        yield Mark(
            start=Addr(number),
            stop=line.next,
            author=Author.JUMP_LABEL,
            says=f"jump label: {state}",
            is_changed=found.differs(number, line.next),
        )


def static_calls(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    """Tell where each static call goes."""
    for number in specimen.tables.static_calls:
        if not found.subject.start <= number < found.subject.stop:
            continue
        line = _line(specimen, number)
        symbols = specimen.kernel.symbols
        goes = f"now it is a {line.mnemonic} to" if line.target else f"now {line.text}"
        name = f" {name_of(symbols, line.target)}" if line.target else ""
        stop = Addr(number + _SITE)
        yield Mark(
            start=Addr(number),
            stop=stop,
            author=Author.STATIC_CALL,
            says=f"static call, which the kernel points elsewhere while it runs: {goes}{name}",
            is_changed=found.differs(number, stop),
        )


def trampolines(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    """Tell where each static call's trampoline goes."""
    symbols, subject = specimen.kernel.symbols, found.subject
    area = [symbols.find(f"__static_call_text_{edge}") for edge in ("start", "end")]
    start, stop = (each.addr if each is not None else 0 for each in area)
    if subject.stop <= start or subject.start >= stop:
        return
    for each in symbols.glob(_TRAMPOLINES):
        if each.addr < subject.stop and each.addr + _SITE > subject.start:
            line = _line(specimen, each.addr)
            to = f" to {name_of(symbols, line.target)}" if line.target else ""
            end = Addr(each.addr + _SITE)
            yield Mark(
                start=each.addr,
                stop=end,
                author=Author.STATIC_CALL,
                says=f"static call's trampoline: now a {line.mnemonic}{to}",
                is_changed=found.differs(each.addr, end),
            )


def boot(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    """Tell what boot rewrote, or will."""
    if specimen.image is None or specimen.linked is None:
        return
    slide = specimen.kernel.slide
    within = range(max(found.subject.start - slide, 0), max(found.subject.stop - slide, 0))
    for each in read_boot_patches(specimen.image, specimen.linked, within):
        start, stop = Addr(each.start + slide), Addr(each.stop + slide)
        is_changed = found.differs(start, stop)
        if is_changed or (specimen.memory is None and each.why not in _NEVER_SAID):
            yield Mark(
                start=start,
                stop=stop,
                author=Author.BOOT,
                says=_boot_says(each, is_changed=is_changed),
                is_changed=is_changed,
            )


def _boot_says(each: Rewritten, *, is_changed: bool) -> str:
    what = f" {each.what}" if each.what else ""
    if is_changed:
        return f"{each.why}{what}: rewritten at boot for this machine"
    return f"{each.why}{what}: boot may rewrite it for its machine"


def _line(specimen: Specimen, addr: int) -> Listed:
    code = read_text(specimen, addr, _LONGEST) or b"\0"
    return specimen.arch.listing.lines(code, addr, Syntax.ATT)[0]


def holds(specimen: Specimen, addr: int, code: bytes) -> bool:
    """Whether memory has some bytes at an address."""
    return specimen.memory is not None and read_text(specimen, addr, len(code)) == code


def read_text(specimen: Specimen, addr: int, size: int) -> bytes:
    """Return bytes of text: what runs, else what would; b"" where nothing is."""
    try:
        found = specimen.now(addr, size)
    except MemoryFault:
        found = b""
    return specimen.was(addr, size) or b"" if found is None else found
