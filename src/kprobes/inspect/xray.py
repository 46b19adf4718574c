"""X-rays of kernel text: bytes in the file and in memory, who changed them, and what that leads to.

Nothing is written anywhere, and the guest runs on.

X-rays of whole functions: their parts, and every way out of them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kprobes.arch.insn import Listed, Opinion, Study, Syntax
from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.guest.text import Classified, Prover, Text
from kprobes.image.tables import read_function
from kprobes.inspect.annotations import read_detours, row_of
from kprobes.inspect.changes import Bytes, read_marks
from kprobes.inspect.model import Anatomy, Detour, Row, Side, Subject
from kprobes.inspect.subject import Specimen
from kprobes.plan.ftrace import site_of
from kprobes.units import Addr

_AROUND = 4
"""Instructions that are shown of a site."""
_SITE = 16
"""Bytes that are shown where no instructions are known."""


def xray(specimen: Specimen, subject: Subject, *, syntax: Syntax = Syntax.ATT) -> Anatomy:
    """Look at some text.

    Raises:
        TargetError: nothing is there, neither in memory nor in the file.
    """
    now, was = _read(specimen, subject)
    study = _study(specimen, subject.start)
    moved = _moved(specimen, subject.start, now, was)
    marks = read_marks(specimen, Bytes(subject=subject, now=now, was=moved))
    detours = read_detours(specimen, marks, syntax)
    rows = _labelled(_rows(specimen, subject, (now, was), syntax), detours)
    site = subject.site
    return Anatomy(
        kernel=specimen.kernel,
        subject=subject,
        image=specimen.image.path if specimen.image is not None else None,
        why_no_image=specimen.why_no_image,
        is_running=specimen.memory is not None,
        is_compared=now is not None and was is not None,
        rows=tuple(_with_opinions(specimen, rows, study)),
        marks=marks,
        detours=tuple(replace(d, rows=tuple(_labelled(d.rows, detours))) for d in detours),
        opinion=None if site is None else _opinion(specimen, study, site),
    )


def around(specimen: Specimen, site: Addr) -> Subject:
    """Return a site and the instructions behind it."""
    study = _study(specimen, site)
    start = study.start_of(site) if study is not None else None
    if study is None or start is None:
        return Subject(start=site, stop=Addr(site + _SITE), site=site)
    stop = start
    for _ in range(_AROUND):
        stop = Addr(stop + study.sizes.get(stop, 0))
    return Subject(start=start, stop=max(stop, Addr(site + 1)), site=site)


def function_at(specimen: Specimen, addr: Addr) -> Subject:
    """Return the whole function that an address lies in, without its cold part.

    Raises:
        TargetError: it lies in none.
    """
    symbol = specimen.kernel.symbols.at(addr)
    if symbol is None or not symbol.is_text:
        raise TargetError(f"{addr:#x} is in no function of {specimen.kernel.release}")
    return Subject(start=symbol.addr, stop=Addr(symbol.addr + symbol.size))


def _read(specimen: Specimen, subject: Subject) -> tuple[bytes | None, bytes | None]:
    size = subject.stop - subject.start
    was = specimen.was(subject.start, size)
    try:
        now = specimen.now(subject.start, size)
    except MemoryFault as error:
        init = "; text that only boot needs is freed after it" if was is not None else ""
        raise TargetError(f"nothing is mapped at {subject.start:#x}{init}") from error
    if now is None and was is None:
        raise TargetError(f"{subject.start:#x} is not in the kernel's file")
    return now, was


def _study(specimen: Specimen, addr: int) -> Study | None:
    try:
        name, parts = read_function(specimen.compiled(), specimen.kernel, addr)
    except (RefusedError, MemoryFault):
        return None
    return specimen.arch.listing.study(name, parts, specimen.tables)


def _moved(specimen: Specimen, start: Addr, now: bytes | None, was: bytes | None) -> bytes | None:
    """Return the file's bytes as KASLR leaves them: addresses in them are moved."""
    slide = specimen.kernel.slide
    if now is None or was is None or not slide or now == was:
        return was
    code = bytearray(was)
    for line in specimen.arch.listing.lines(was, start, Syntax.ATT):
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
    specimen: Specimen,
    subject: Subject,
    codes: tuple[bytes | None, bytes | None],
    syntax: Syntax,
) -> Iterator[Row]:
    now, was = codes
    list_code, kernel = specimen.arch.listing.lines, specimen.kernel
    if now is None or was is None:
        # There is nothing to compare.
        for line in list_code(now or was or b"", subject.start, syntax):
            yield row_of(kernel, line)
        return
    moved = _moved(specimen, subject.start, now, was) or was
    before, after = (list_code(code, subject.start, syntax) for code in (moved, now))
    for line, side in _merged(before, after):
        at = line.addr - subject.start
        is_moved = moved[at : line.next - subject.start] != was[at : line.next - subject.start]
        yield row_of(kernel, line, side=side, note="moved by KASLR" if is_moved else "")


def _merged(before: Sequence[Listed], after: Sequence[Listed]) -> Iterator[tuple[Listed, Side]]:
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


def _with_opinions(specimen: Specimen, rows: Iterator[Row], study: Study | None) -> Iterator[Row]:
    for row in rows:
        addr = row.line.addr
        # A range may end inside an instruction: a piece of one is none.
        is_known = study is not None and addr in study.sizes and row.line.mnemonic != "(bad)"
        yield replace(row, opinion=_opinion(specimen, study, addr)) if is_known else row


def _opinion(specimen: Specimen, study: Study | None, addr: Addr) -> Opinion | None:
    if (site := _site(specimen, addr)) is not None:
        if specimen.tracers is None or not specimen.tracers.of(site):
            return Opinion(verdict="ftrace", why="a call in its ftrace site")
        behind = Addr(site + specimen.arch.site.size)
        found = study.judge(behind) if study is not None and behind in study.sizes else None
        used = "behind its ftrace site, which the guest's own ftrace uses"
        return replace(found, why=f"{used}: {found.why}") if found is not None else None
    return study.judge(addr) if study is not None else None


def _site(specimen: Specimen, addr: Addr) -> Addr | None:
    # The ftrace site that a probe at an address takes, or None.
    sites, facts = specimen.sites, specimen.arch.site
    if sites is None:
        return None
    if sites.find(addr) is not None:
        return addr
    symbol = specimen.kernel.symbols.at(addr)
    is_entry = facts.is_behind and symbol is not None and symbol.addr == addr
    return site_of(addr, sites, facts) if is_entry else None


def parts_at(specimen: Specimen, addr: Addr) -> tuple[Subject, ...]:
    """Return the function that an address lies in, then its ``.cold`` parts.

    Raises:
        TargetError: it lies in none.
    """
    alone = function_at(specimen, addr)
    try:
        _, parts = read_function(specimen.compiled(), specimen.kernel, addr)
    except (RefusedError, MemoryFault):
        return (alone,)
    return tuple(Subject(start=part.addr, stop=Addr(part.addr + len(part.code))) for part in parts)


def exits_at(specimen: Specimen, addr: Addr) -> Classified:
    """Return every way out of the function that begins at an address, without anybody's probes.

    Raises:
        TargetError: it lies in none.
    """
    symbol = specimen.kernel.symbols.at(function_at(specimen, addr).start)
    assert symbol is not None
    text = Text(
        kernel=specimen.kernel,
        open_memory=specimen.compiled,
        read_tables=lambda: specimen.tables,
    )
    return Prover(text, specimen.arch.patch).classify(symbol)
