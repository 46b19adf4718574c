"""X-rays of kernel text: bytes in the file and in memory, who changed them, and what that leads to.

Whole functions are shown with their parts, and every way out of them. Nothing is written anywhere,
and the guest runs on.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from kprobes.arch.insn import Analysis, Disassembled, InsnVerdict, Syntax
from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.guest.text import Classified, Prover, Text
from kprobes.image.tables import read_function
from kprobes.inspect.annotations import read_detours, row_of
from kprobes.inspect.changes import Bytes, read_changes
from kprobes.inspect.model import Detour, FunctionText, Row, Side, Subject
from kprobes.inspect.subject import TextSnapshot
from kprobes.plan.ftrace import site_of
from kprobes.units import Addr

_AROUND = 4
"""Instructions that are shown of a site."""
_SITE = 16
"""Bytes that are shown where no instructions are known."""


def xray(snapshot: TextSnapshot, subject: Subject, *, syntax: Syntax = Syntax.ATT) -> FunctionText:
    """Look at some text.

    Args:
        snapshot: of the kernel's text.
        subject: a function, or other text.
        syntax: how operands are written.

    Raises:
        TargetError: nothing is there, neither in memory nor in the file.
    """
    now, was = _read(snapshot, subject)
    analysis = _analyse(snapshot, subject.start)
    moved = _moved(snapshot, subject.start, now, was)
    changes = read_changes(snapshot, Bytes(subject=subject, now=now, was=moved))
    detours = read_detours(snapshot, changes, syntax)
    rows = _labelled(_rows(snapshot, subject, (now, was), syntax), detours)
    site = subject.site
    return FunctionText(
        kernel=snapshot.kernel,
        subject=subject,
        image=snapshot.image.path if snapshot.image is not None else None,
        why_no_image=snapshot.why_no_image,
        is_running=snapshot.memory is not None,
        is_compared=now is not None and was is not None,
        rows=tuple(_with_verdicts(snapshot, rows, analysis)),
        changes=changes,
        detours=tuple(replace(d, rows=tuple(_labelled(d.rows, detours))) for d in detours),
        verdict=None if site is None else _verdict(snapshot, analysis, site),
    )


def around(snapshot: TextSnapshot, site: Addr) -> Subject:
    """Return a site and the instructions after it."""
    analysis = _analyse(snapshot, site)
    start = analysis.start_of(site) if analysis is not None else None
    if analysis is None or start is None:
        return Subject(start=site, stop=Addr(site + _SITE), site=site)
    stop = start
    for _ in range(_AROUND):
        stop = Addr(stop + analysis.sizes.get(stop, 0))
    return Subject(start=start, stop=max(stop, Addr(site + 1)), site=site)


def function_at(snapshot: TextSnapshot, addr: Addr) -> Subject:
    """Return the whole function that an address lies in, without its cold part.

    Raises:
        TargetError: it lies in none.
    """
    symbol = snapshot.kernel.symbols.at(addr)
    if symbol is None or not symbol.is_text:
        raise TargetError(f"{addr:#x} is in no function of {snapshot.kernel.release}")
    return Subject(start=symbol.addr, stop=Addr(symbol.addr + symbol.size))


def _read(snapshot: TextSnapshot, subject: Subject) -> tuple[bytes | None, bytes | None]:
    size = subject.stop - subject.start
    was = snapshot.was(subject.start, size)
    try:
        now = snapshot.now(subject.start, size)
    except MemoryFault as error:
        init = "; text that only boot needs is freed after it" if was is not None else ""
        raise TargetError(f"nothing is mapped at {subject.start:#x}{init}") from error
    if now is None and was is None:
        raise TargetError(f"{subject.start:#x} is not in the kernel's file")
    return now, was


def _analyse(snapshot: TextSnapshot, addr: int) -> Analysis | None:
    try:
        name, parts = read_function(snapshot.compiled(), snapshot.kernel, addr)
    except (RefusedError, MemoryFault):
        return None
    return snapshot.arch.listing.analyse(name, parts, snapshot.tables)


def _moved(
    snapshot: TextSnapshot, start: Addr, now: bytes | None, was: bytes | None
) -> bytes | None:
    """Return the file's bytes as KASLR leaves them: addresses in them are moved."""
    slide = snapshot.kernel.slide
    if now is None or was is None or not slide or now == was:
        return was
    code = bytearray(was)
    for line in snapshot.arch.listing.lines(was, start, Syntax.ATT):
        for offset, size in line.fields:
            at = line.addr - start + offset
            old, new = (int.from_bytes(side[at : at + size], "little") for side in (was, now))
            if (new - old) % (1 << 8 * size) in _shifts(slide, size):
                code[at : at + size] = now[at : at + size]
    return bytes(code)


def _shifts(slide: int, size: int) -> tuple[int, int]:
    # Per-CPU symbols stay at zero: what counts from the text to them moves the other way.
    return slide % (1 << 8 * size), -slide % (1 << 8 * size)


def _rows(
    snapshot: TextSnapshot,
    subject: Subject,
    codes: tuple[bytes | None, bytes | None],
    syntax: Syntax,
) -> Iterator[Row]:
    now, was = codes
    list_code, kernel = snapshot.arch.listing.lines, snapshot.kernel
    if now is None or was is None:
        # There is nothing to compare.
        for line in list_code(now or was or b"", subject.start, syntax):
            yield row_of(kernel, line)
        return
    moved = _moved(snapshot, subject.start, now, was) or was
    before, after = (list_code(code, subject.start, syntax) for code in (moved, now))
    for line, side in _merged(before, after):
        at = line.addr - subject.start
        is_moved = moved[at : line.next - subject.start] != was[at : line.next - subject.start]
        yield row_of(kernel, line, side=side, note="moved by KASLR" if is_moved else "")


def _merged(
    before: Sequence[Disassembled], after: Sequence[Disassembled]
) -> Iterator[tuple[Disassembled, Side]]:
    """Yield lines that both have once; where they differ, the first's before the second's."""
    left, right = deque(before), deque(after)
    while left and right:
        if (left[0].addr, left[0].code) == (right[0].addr, right[0].code):
            left.popleft()
            yield right.popleft(), Side.BOTH
            continue
        # Up to where an instruction begins on both sides again.
        old, new = [left.popleft()], [right.popleft()]
        while old[-1].next != new[-1].next:
            lines, rest = (old, left) if old[-1].next < new[-1].next else (new, right)
            lines.append(rest.popleft())
        yield from ((line, Side.IMAGE) for line in old)
        yield from ((line, Side.MEMORY) for line in new)


def _labelled(rows: Iterable[Row], detours: Sequence[Detour]) -> Iterator[Row]:
    labels = {detour.addr: detour.title for detour in detours}
    for row in rows:
        label = labels.get(row.line.target) if row.line.target is not None else None
        yield row if label is None else replace(row, name=label)


def _with_verdicts(
    snapshot: TextSnapshot, rows: Iterator[Row], analysis: Analysis | None
) -> Iterator[Row]:
    for row in rows:
        addr = row.line.addr
        # A range may end inside an instruction: a piece of one is none.
        is_known = analysis is not None and addr in analysis.sizes and row.line.mnemonic != "(bad)"
        yield replace(row, verdict=_verdict(snapshot, analysis, addr)) if is_known else row


def _verdict(snapshot: TextSnapshot, analysis: Analysis | None, addr: Addr) -> InsnVerdict | None:
    if (site := _site(snapshot, addr)) is not None:
        if snapshot.tracers is None or not snapshot.tracers.of(site):
            return InsnVerdict(verdict="ftrace", why="a call in its ftrace site")
        following = Addr(site + snapshot.arch.site.size)
        found = (
            analysis.insn_verdict(following)
            if analysis is not None and following in analysis.sizes
            else None
        )
        used = "after its ftrace site, which the guest's own ftrace uses"
        return replace(found, why=f"{used}: {found.why}") if found is not None else None
    return analysis.insn_verdict(addr) if analysis is not None else None


def _site(snapshot: TextSnapshot, addr: Addr) -> Addr | None:
    # The ftrace site that a probe at an address takes, or None.
    sites, info = snapshot.sites, snapshot.arch.site
    if sites is None:
        return None
    if sites.find(addr) is not None:
        return addr
    symbol = snapshot.kernel.symbols.at(addr)
    is_entry = info.reports_entry and symbol is not None and symbol.addr == addr
    return site_of(addr, sites, info) if is_entry else None


def parts_at(snapshot: TextSnapshot, addr: Addr) -> tuple[Subject, ...]:
    """Return the function that an address lies in, then its ``.cold`` parts.

    Raises:
        TargetError: it lies in none.
    """
    alone = function_at(snapshot, addr)
    try:
        _, parts = read_function(snapshot.compiled(), snapshot.kernel, addr)
    except (RefusedError, MemoryFault):
        return (alone,)
    return tuple(Subject(start=part.addr, stop=Addr(part.addr + len(part.code))) for part in parts)


def exits_at(snapshot: TextSnapshot, addr: Addr) -> Classified:
    """Return every way out of the function that begins at an address, without anybody's probes.

    Raises:
        TargetError: it lies in none.
    """
    symbol = snapshot.kernel.symbols.at(function_at(snapshot, addr).start)
    assert symbol is not None
    text = Text(
        kernel=snapshot.kernel,
        open_memory=snapshot.compiled,
        read_tables=lambda: snapshot.tables,
    )
    return Prover(text, snapshot.arch.patch).classify(symbol)
