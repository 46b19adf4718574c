"""Changes of kernel text and their authors, by journals, the kernel's own lists and its file.

Each voice is asked in turn, and bytes belong to the first that knows them. What differs from the
file and nobody knows is said to be unknown.

What the kernel itself changes in its text: by its live lists, and by boot's in its file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kprobes.arch.insn import Listed, Syntax
from kprobes.errors import MemoryFault
from kprobes.guest.journal import Entry, Undo
from kprobes.guest.tracers import GuestProbe, Tracer, missing_probes
from kprobes.image.init_tables import BootPatch, Rewritten, read_boot_patches
from kprobes.inspect.model import Author, Mark, Subject
from kprobes.inspect.subject import Specimen
from kprobes.model.kernel import name_of
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


_MAX_NAMES = 6
_POINTER = 8
"""Bytes of a pointer to an ftrace_ops."""


def read_marks(specimen: Specimen, found: Bytes) -> tuple[Mark, ...]:
    """Return who changed, or may change, which bytes of some text; by address."""
    marks: list[Mark] = []
    for voice in (
        _ours,
        _ftrace,
        _operations,
        _kprobes,
        jump_labels,
        static_calls,
        trampolines,
        boot,
    ):
        marks += [m for m in voice(specimen, found) if not _is_claimed(m, marks)]
    marks += _unknown(specimen, found, marks)
    return tuple(sorted(marks, key=lambda mark: (mark.start, mark.author is not Author.OURS)))


def _is_claimed(mark: Mark, marks: list[Mark]) -> bool:
    return any(m.is_changed and m.start < mark.stop and m.stop > mark.start for m in marks)


def _ours(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    for entry in specimen.entries:
        for undo in entry.undos:
            inside = undo.addr < found.subject.stop and undo.addr + len(undo.new) > (
                found.subject.start
            )
            if inside and undo.new != undo.old and holds(specimen, undo.addr, undo.new):
                yield from _our_mark(specimen, undo, entry)


def _our_mark(specimen: Specimen, undo: Undo, entry: Entry) -> Iterator[Mark]:
    described = [probe for probe in entry.probes if probe.site == undo.addr]
    entries = {probe.entry for probe in described}
    leads_to = entries.pop() if entries else _branch(specimen, undo.addr, undo.new)
    others = f" and {len(described) - 1} more" if len(described) > 1 else ""
    who = "which was killed: `kprobe restore`" if entry.is_abandoned else "which is at work"
    text = "; ".join(probe.definition for probe in described[:_MAX_NAMES])
    # What planning compared may be more than what it wrote.
    size = 1 + max(i for i in range(len(undo.new)) if undo.new[i] != undo.old[i])
    stop = Addr(undo.addr + size)
    yield Mark(
        start=undo.addr,
        stop=stop,
        author=Author.OURS,
        says=f"our probe {undo.what}{others}, {_how(specimen, undo)}, of process {entry.pid}, "
        f"{who}; before: {undo.old[:size].hex()}" + (f"; {text}" if text else ""),
        is_changed=True,
        leads_to=leads_to,
        probe=undo.what,
    )


def _how(specimen: Specimen, undo: Undo) -> str:
    code = undo.new[: specimen.arch.site.size]
    if specimen.arch.site.target(undo.addr, code) is not None:
        return "a call"
    is_jump = specimen.arch.listing.jump_target(undo.addr, code) is not None
    return "a jump" if is_jump else "a breakpoint"


def _ftrace(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    if specimen.sites is None:
        return
    subject, facts = found.subject, specimen.arch.site
    low, high = np.searchsorted(
        specimen.sites.addrs,
        np.array([max(subject.start - facts.size + 1, 0), subject.stop + len(facts.lead)]),
    ).tolist()
    ours = {
        undo.addr
        for entry in specimen.entries
        for undo in entry.undos
        if holds(specimen, undo.addr, undo.new)
    }
    for number in specimen.sites.addrs[low:high].tolist():
        site = Addr(number)
        code = read_text(specimen, site, facts.size)
        if site in ours and facts.target(site, code) is not None:
            # The call is told with ours, but not what boot put before it.
            yield from _lead_mark(specimen, site)
            continue
        yield _ftrace_mark(specimen, site, code)


def _ftrace_mark(specimen: Specimen, site: Addr, code: bytes) -> Mark:
    facts = specimen.arch.site
    target = facts.target(site, code)
    # Where the lead is something else, that is somebody else's.
    has_lead = holds(specimen, site - len(facts.lead), facts.lead)
    start = Addr(site - len(facts.lead)) if has_lead else site
    now = facts.lead + code if has_lead else code
    leads_to, is_changed = None, specimen.was(start, len(now)) not in (None, now)
    if specimen.memory is None:
        says = f"ftrace site: boot makes {facts.idle} of {facts.compiled}"
    elif code in facts.nops:
        boot = f", which boot made of {facts.compiled}" if is_changed else ""
        says = f"ftrace site, idle: {facts.idle if has_lead else 'a nop'}{boot}"
    elif target is not None:
        says = f"the guest's own ftrace: {_tracing(specimen, site, target)}"
        leads_to, is_changed = target, True
    else:
        says, is_changed = "ftrace site that holds neither a nop nor a call", True
    return Mark(
        start=start,
        stop=Addr(site + facts.size),
        author=Author.FTRACE,
        says=says,
        is_changed=is_changed,
        leads_to=leads_to,
    )


def _lead_mark(specimen: Specimen, site: Addr) -> Iterator[Mark]:
    facts = specimen.arch.site
    start = Addr(site - len(facts.lead))
    was = specimen.was(start, len(facts.lead))
    if holds(specimen, start, facts.lead) and was not in (None, facts.lead):
        yield Mark(
            start=start,
            stop=site,
            author=Author.FTRACE,
            says=f"ftrace site: {facts.idle}, which boot made of {facts.compiled}",
            is_changed=True,
        )


def _operations(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    # A pointer in front of a function, which belongs to the one before it by its symbol's size.
    start = found.subject.start - found.subject.start % _POINTER
    for place in range(start, found.subject.stop, _POINTER):
        stop = Addr(place + _POINTER)
        if place in specimen.tables.pointers and found.differs(Addr(place), stop):
            operations = int.from_bytes(read_text(specimen, place, _POINTER), "little")
            yield Mark(
                start=Addr(place),
                stop=stop,
                author=Author.FTRACE,
                says="whom the ftrace site behind it is for, which boot put in place of two nops: "
                f"{name_of(specimen.kernel.symbols, operations)}",
                is_changed=True,
            )


def _tracing(specimen: Specimen, site: Addr, target: Addr) -> str:
    tracers = specimen.tracers
    if tracers is None:
        return f"it calls {target:#x}"
    own = tracers.with_trampoline(target)
    probes = [n for p in specimen.probes if p.addr == site and p.is_ftrace for n in p.handlers]
    for_whom = f"; kprobe there: {', '.join(probes[:_MAX_NAMES])}" if probes else ""
    if own is not None:
        return f"it calls the trampoline of {_named(own)} at {target:#x}{for_whom}"
    symbol = specimen.kernel.symbols.at(target)
    if symbol is not None and symbol.addr == target:
        users = [_named(tracer) for tracer in tracers.of(site)]
        several = f", for {', '.join(users[:_MAX_NAMES])}" if users else ""
        return f"it calls {symbol.name}{several}{for_whom}"
    return f"it calls {target:#x} directly (a BPF trampoline, or another tracer's code){for_whom}"


def _named(tracer: Tracer) -> str:
    if tracer.name == tracer.handler_name:
        return tracer.handler_name
    return f"{tracer.name} ({tracer.handler_name})"


def _kprobes(specimen: Specimen, found: Bytes) -> Iterator[Mark]:
    for probe in specimen.probes:
        is_inside = found.subject.start - _SITE < probe.addr < found.subject.stop
        if is_inside and not probe.is_ftrace and not probe.is_disabled:
            mark = _kprobe_mark(specimen, probe)
            if mark is not None:
                yield mark


def _kprobe_mark(specimen: Specimen, probe: GuestProbe) -> Mark | None:
    patch, listing = specimen.arch.patch, specimen.arch.listing
    who = ", ".join(probe.handlers[:_MAX_NAMES])
    target = listing.jump_target(probe.addr, read_text(specimen, probe.addr, _SITE))
    if probe.detour is not None and target == probe.detour:
        old = (probe.opcode + probe.copied).hex()
        says = f"the guest's own kprobe, optimised: a jump to its detour; {who}; before: {old}"
        size, leads_to = _SITE, probe.detour
    elif holds(specimen, probe.addr, patch.breakpoint):
        says = f"the guest's own kprobe: a breakpoint; {who}; before: {probe.opcode.hex()}"
        size, leads_to = len(patch.breakpoint), probe.slot
    else:
        return None
    return Mark(
        start=probe.addr,
        stop=Addr(probe.addr + size),
        author=Author.KPROBE,
        says=says,
        is_changed=True,
        leads_to=leads_to,
    )


def _unknown(specimen: Specimen, found: Bytes, marks: list[Mark]) -> Iterator[Mark]:
    if found.now is None or found.was is None:
        return
    start = found.subject.start
    old, new = (np.frombuffer(code, np.uint8) for code in (found.was, found.now))
    is_unknown = old != new
    for mark in marks:
        if mark.is_changed:
            is_unknown[max(mark.start - start, 0) : max(mark.stop - start, 0)] = False
    places = np.flatnonzero(is_unknown)
    if not len(places):
        return
    for run in np.split(places, np.flatnonzero(np.diff(places) > _SITE) + 1):
        low, high = Addr(start + int(run[0])), Addr(start + int(run[-1]) + 1)
        yield _unknown_mark(specimen, low, high)


def _unknown_mark(specimen: Specimen, start: Addr, stop: Addr) -> Mark:
    target = None
    if holds(specimen, start, specimen.arch.patch.breakpoint):
        why = missing_probes(specimen.kernel)
        says = "a breakpoint of somebody whom nothing here names: a debugger, or a kprobe" + (
            f" (the kernel's own are not known: {why})" if why else ""
        )
    else:
        target = _branch(specimen, start, read_text(specimen, start, _SITE))
        leads = f": a branch to {target:#x}" if target else ""
        says = f"changed by somebody whom nothing here names{leads}"
    return Mark(
        start=start, stop=stop, author=Author.UNKNOWN, says=says, is_changed=True, leads_to=target
    )


def _branch(specimen: Specimen, place: Addr, code: bytes) -> Addr | None:
    code = code[: specimen.arch.site.size]
    target = specimen.arch.site.target(place, code)
    return target if target is not None else specimen.arch.listing.jump_target(place, code)
