"""Changes of kernel text and their authors, by journals, the kernel's own lists and its file.

Each source is asked in turn, and bytes belong to the first that knows them. What the kernel itself
changes is in its live lists, and in boot's, which its file has. What differs from the file and no
source knows is said to be unknown.
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from kprobes.arch.insn import Disassembled, Syntax
from kprobes.errors import MemoryFault
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.journal import Entry
from kprobes.guest.tracers import GuestProbe, Tracer, missing_probes
from kprobes.image.init_tables import BootPatch, Rewritten, read_boot_patches
from kprobes.inspect.model import ChangeSource, Subject, TextChange
from kprobes.inspect.subject import TextSnapshot
from kprobes.model.kernel import name_of
from kprobes.units import Addr

_SITE = 5
_LONGEST = 15
_TRAMPOLINES = "__SCT__*"
_NEVER_SAID = frozenset({BootPatch.CALL, BootPatch.LOCK})
"""Too many of them are rewritten on no CPU of today."""


class Bytes(Struct, frozen=True, kw_only=True):
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


def jump_labels(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    """Yield the state of each jump label is."""
    for number, target in snapshot.tables.jump_labels.items():
        if not found.subject.start <= number < found.subject.stop:
            continue
        line = _line(snapshot, number)
        name = name_of(snapshot.kernel.symbols, target)
        state = (
            f"on, a jump to {name}" if line.target else f"off, a nop instead of a jump to {name}"
        )
        yield TextChange(
            start=Addr(number),
            stop=line.next,
            source=ChangeSource.JUMP_LABEL,
            description=f"jump label: {state}",
            is_changed=found.differs(number, line.next),
        )


def static_calls(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    """Yield the target of each static call."""
    for number in snapshot.tables.static_calls:
        if not found.subject.start <= number < found.subject.stop:
            continue
        line = _line(snapshot, number)
        symbols = snapshot.kernel.symbols
        goes = f"now it is a {line.mnemonic} to" if line.target else f"now {line.text}"
        name = f" {name_of(symbols, line.target)}" if line.target else ""
        stop = Addr(number + _SITE)
        yield TextChange(
            start=Addr(number),
            stop=stop,
            source=ChangeSource.STATIC_CALL,
            description="static call, which the kernel points elsewhere while it runs: "
            f"{goes}{name}",
            is_changed=found.differs(number, stop),
        )


def trampolines(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    """Yield the target of each static call's trampoline."""
    symbols, subject = snapshot.kernel.symbols, found.subject
    area = [symbols.find(f"__static_call_text_{edge}") for edge in ("start", "end")]
    start, stop = (each.addr if each is not None else 0 for each in area)
    if subject.stop <= start or subject.start >= stop:
        return
    for each in symbols.glob(_TRAMPOLINES):
        if each.addr < subject.stop and each.addr + _SITE > subject.start:
            line = _line(snapshot, each.addr)
            to = f" to {name_of(symbols, line.target)}" if line.target else ""
            end = Addr(each.addr + _SITE)
            yield TextChange(
                start=each.addr,
                stop=end,
                source=ChangeSource.STATIC_CALL,
                description=f"static call's trampoline: now a {line.mnemonic}{to}",
                is_changed=found.differs(each.addr, end),
            )


def boot(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    """Yield what boot rewrote, or will rewrite."""
    if snapshot.image is None or snapshot.linked is None:
        return
    slide = snapshot.kernel.slide
    within = range(max(found.subject.start - slide, 0), max(found.subject.stop - slide, 0))
    for each in read_boot_patches(snapshot.image, snapshot.linked, within):
        start, stop = Addr(each.start + slide), Addr(each.stop + slide)
        is_changed = found.differs(start, stop)
        if is_changed or (snapshot.memory is None and each.why not in _NEVER_SAID):
            yield TextChange(
                start=start,
                stop=stop,
                source=ChangeSource.BOOT,
                description=_boot_text(each, is_changed=is_changed),
                is_changed=is_changed,
            )


def _boot_text(each: Rewritten, *, is_changed: bool) -> str:
    what = f" {each.what}" if each.what else ""
    if is_changed:
        return f"{each.why}{what}: rewritten at boot for this machine"
    return f"{each.why}{what}: boot may rewrite it for its machine"


def _line(snapshot: TextSnapshot, addr: int) -> Disassembled:
    code = read_text(snapshot, addr, _LONGEST) or b"\0"
    return snapshot.arch.listing.lines(code, addr, Syntax.ATT)[0]


def holds(snapshot: TextSnapshot, addr: int, code: bytes) -> bool:
    """Return whether memory has some bytes at an address.

    Args:
        snapshot: of the kernel's text.
        addr: where they would be.
        code: the bytes.
    """
    return snapshot.memory is not None and read_text(snapshot, addr, len(code)) == code


def read_text(snapshot: TextSnapshot, addr: int, size: int) -> bytes:
    """Return bytes of text: what runs, else what would; b"" where nothing is.

    Args:
        snapshot: of the kernel's text.
        addr: where they begin.
        size: how many there are.
    """
    try:
        found = snapshot.now(addr, size)
    except MemoryFault:
        found = b""
    return snapshot.was(addr, size) or b"" if found is None else found


_MAX_NAMES = 6
_POINTER = 8
"""Bytes of a pointer to an ftrace_ops."""


def read_changes(snapshot: TextSnapshot, found: Bytes) -> tuple[TextChange, ...]:
    """Return who changed, or may change, which bytes of some text; by address."""
    changes: list[TextChange] = []
    for source in (
        _ours,
        _ftrace,
        _operations,
        _kprobes,
        jump_labels,
        static_calls,
        trampolines,
        boot,
    ):
        changes += [m for m in source(snapshot, found) if not _is_claimed(m, changes)]
    changes += _unknown(snapshot, found, changes)
    return tuple(
        sorted(changes, key=lambda change: (change.start, change.source is not ChangeSource.OURS))
    )


def _is_claimed(change: TextChange, changes: list[TextChange]) -> bool:
    return any(m.is_changed and m.start < change.stop and m.stop > change.start for m in changes)


def _ours(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    for entry in snapshot.entries:
        for patch in entry.patches:
            inside = patch.addr < found.subject.stop and patch.addr + len(patch.new) > (
                found.subject.start
            )
            if inside and patch.new != patch.old and holds(snapshot, patch.addr, patch.new):
                yield from _our_change(snapshot, patch, entry)


def _our_change(snapshot: TextSnapshot, patch: ArmedPatch, entry: Entry) -> Iterator[TextChange]:
    described = [probe for probe in entry.probes if probe.site == patch.addr]
    entries = {probe.entry for probe in described}
    leads_to = entries.pop() if entries else _branch(snapshot, patch.addr, patch.new)
    others = f" and {len(described) - 1} more" if len(described) > 1 else ""
    who = "which was killed: `kprobe restore`" if entry.is_abandoned else "which is at work"
    text = "; ".join(probe.definition for probe in described[:_MAX_NAMES])
    # What is displaced may end with int3, which stay.
    size = 1 + max(i for i in range(len(patch.new)) if patch.new[i] != patch.old[i])
    stop = Addr(patch.addr + size)
    yield TextChange(
        start=patch.addr,
        stop=stop,
        source=ChangeSource.OURS,
        description=f"our probe {patch.what}{others}, {_how(snapshot, patch)}, of process "
        f"{entry.pid}, {who}; before: {patch.old[:size].hex()}" + (f"; {text}" if text else ""),
        is_changed=True,
        leads_to=leads_to,
        probe=patch.what,
    )


def _how(snapshot: TextSnapshot, patch: ArmedPatch) -> str:
    code = patch.new[: snapshot.arch.site.size]
    if snapshot.arch.site.target(patch.addr, code) is not None:
        return "a call"
    is_jump = snapshot.arch.listing.jump_target(patch.addr, code) is not None
    return "a jump" if is_jump else "a breakpoint"


def _ftrace(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    if snapshot.sites is None:
        return
    subject, info = found.subject, snapshot.arch.site
    low, high = np.searchsorted(
        snapshot.sites.addrs,
        np.array([max(subject.start - info.size + 1, 0), subject.stop + len(info.preamble)]),
    ).tolist()
    ours = {
        patch.addr
        for entry in snapshot.entries
        for patch in entry.patches
        if holds(snapshot, patch.addr, patch.new)
    }
    for number in snapshot.sites.addrs[low:high].tolist():
        site = Addr(number)
        code = read_text(snapshot, site, info.size)
        if site in ours and info.target(site, code) is not None:
            # The call is told with ours, but not what boot put before it.
            yield from _preamble_change(snapshot, site)
            continue
        yield _ftrace_change(snapshot, site, code)


def _ftrace_change(snapshot: TextSnapshot, site: Addr, code: bytes) -> TextChange:
    info = snapshot.arch.site
    target = info.target(site, code)
    # Where the lead is something else, that is somebody else's.
    has_preamble = holds(snapshot, site - len(info.preamble), info.preamble)
    start = Addr(site - len(info.preamble)) if has_preamble else site
    now = info.preamble + code if has_preamble else code
    leads_to, is_changed = None, snapshot.was(start, len(now)) not in (None, now)
    if snapshot.memory is None:
        description = f"ftrace site: boot makes {info.idle} of {info.compiled}"
    elif code in info.nops:
        boot = f", which boot made of {info.compiled}" if is_changed else ""
        description = f"ftrace site, idle: {info.idle if has_preamble else 'a nop'}{boot}"
    elif target is not None:
        description = f"the guest's own ftrace: {_tracing(snapshot, site, target)}"
        leads_to, is_changed = target, True
    else:
        description, is_changed = "ftrace site that holds neither a nop nor a call", True
    return TextChange(
        start=start,
        stop=Addr(site + info.size),
        source=ChangeSource.FTRACE,
        description=description,
        is_changed=is_changed,
        leads_to=leads_to,
    )


def _preamble_change(snapshot: TextSnapshot, site: Addr) -> Iterator[TextChange]:
    info = snapshot.arch.site
    start = Addr(site - len(info.preamble))
    was = snapshot.was(start, len(info.preamble))
    if holds(snapshot, start, info.preamble) and was not in (None, info.preamble):
        yield TextChange(
            start=start,
            stop=site,
            source=ChangeSource.FTRACE,
            description=f"ftrace site: {info.idle}, which boot made of {info.compiled}",
            is_changed=True,
        )


def _operations(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    # A pointer in front of a function, which belongs to the one before it by its symbol's size.
    start = found.subject.start - found.subject.start % _POINTER
    for place in range(start, found.subject.stop, _POINTER):
        stop = Addr(place + _POINTER)
        if place in snapshot.tables.pointers and found.differs(Addr(place), stop):
            operations = int.from_bytes(read_text(snapshot, place, _POINTER), "little")
            yield TextChange(
                start=Addr(place),
                stop=stop,
                source=ChangeSource.FTRACE,
                description="the ftrace_ops of the ftrace site after it, which boot put in place "
                f"of two nops: {name_of(snapshot.kernel.symbols, operations)}",
                is_changed=True,
            )


def _tracing(snapshot: TextSnapshot, site: Addr, target: Addr) -> str:
    tracers = snapshot.tracers
    if tracers is None:
        return f"it calls {target:#x}"
    own = tracers.with_trampoline(target)
    probes = [n for p in snapshot.probes if p.addr == site and p.is_ftrace for n in p.handlers]
    for_whom = f"; kprobe there: {', '.join(probes[:_MAX_NAMES])}" if probes else ""
    if own is not None:
        return f"it calls the trampoline of {_named(own)} at {target:#x}{for_whom}"
    symbol = snapshot.kernel.symbols.at(target)
    if symbol is not None and symbol.addr == target:
        users = [_named(tracer) for tracer in tracers.of(site)]
        several = f", for {', '.join(users[:_MAX_NAMES])}" if users else ""
        return f"it calls {symbol.name}{several}{for_whom}"
    return f"it calls {target:#x} directly (a BPF trampoline, or another tracer's code){for_whom}"


def _named(tracer: Tracer) -> str:
    if tracer.name == tracer.handler_name:
        return tracer.handler_name
    return f"{tracer.name} ({tracer.handler_name})"


def _kprobes(snapshot: TextSnapshot, found: Bytes) -> Iterator[TextChange]:
    for probe in snapshot.probes:
        is_inside = found.subject.start - _SITE < probe.addr < found.subject.stop
        if is_inside and not probe.is_ftrace and not probe.is_disabled:
            change = _kprobe_change(snapshot, probe)
            if change is not None:
                yield change


def _kprobe_change(snapshot: TextSnapshot, probe: GuestProbe) -> TextChange | None:
    patch, listing = snapshot.arch.patch, snapshot.arch.listing
    who = ", ".join(probe.handlers[:_MAX_NAMES])
    target = listing.jump_target(probe.addr, read_text(snapshot, probe.addr, _SITE))
    if probe.detour is not None and target == probe.detour:
        old = (probe.opcode + probe.copied).hex()
        description = (
            f"the guest's own kprobe, optimised: a jump to its detour; {who}; before: {old}"
        )
        size, leads_to = _SITE, probe.detour
    elif holds(snapshot, probe.addr, patch.breakpoint):
        description = f"the guest's own kprobe: a breakpoint; {who}; before: {probe.opcode.hex()}"
        size, leads_to = len(patch.breakpoint), probe.slot
    else:
        return None
    return TextChange(
        start=probe.addr,
        stop=Addr(probe.addr + size),
        source=ChangeSource.KPROBE,
        description=description,
        is_changed=True,
        leads_to=leads_to,
    )


def _unknown(
    snapshot: TextSnapshot, found: Bytes, changes: list[TextChange]
) -> Iterator[TextChange]:
    if found.now is None or found.was is None:
        return
    start = found.subject.start
    old, new = (np.frombuffer(code, np.uint8) for code in (found.was, found.now))
    is_unknown = old != new
    for change in changes:
        if change.is_changed:
            is_unknown[max(change.start - start, 0) : max(change.stop - start, 0)] = False
    places = np.flatnonzero(is_unknown)
    if not len(places):
        return
    for run in np.split(places, np.flatnonzero(np.diff(places) > _SITE) + 1):
        low, high = Addr(start + int(run[0])), Addr(start + int(run[-1]) + 1)
        yield _unknown_change(snapshot, low, high)


def _unknown_change(snapshot: TextSnapshot, start: Addr, stop: Addr) -> TextChange:
    target = None
    if holds(snapshot, start, snapshot.arch.patch.breakpoint):
        why = missing_probes(snapshot.kernel)
        description = (
            "a breakpoint of somebody whom nothing here names: a debugger, or a kprobe"
            + (f" (the kernel's own are not known: {why})" if why else "")
        )
    else:
        target = _branch(snapshot, start, read_text(snapshot, start, _SITE))
        leads = f": a branch to {target:#x}" if target else ""
        description = f"changed by somebody whom nothing here names{leads}"
    return TextChange(
        start=start,
        stop=stop,
        source=ChangeSource.UNKNOWN,
        description=description,
        is_changed=True,
        leads_to=target,
    )


def _branch(snapshot: TextSnapshot, place: Addr, code: bytes) -> Addr | None:
    code = code[: snapshot.arch.site.size]
    target = snapshot.arch.site.target(place, code)
    return target if target is not None else snapshot.arch.listing.jump_target(place, code)
