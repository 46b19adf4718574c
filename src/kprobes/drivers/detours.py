"""Where changed text leads: code made at run time, followed to its end."""

from collections.abc import Callable, Iterator, Sequence

from kprobes.arch.listed import Listed, Syntax
from kprobes.drivers.anatomy import Author, Detour, Mark, Row, Side
from kprobes.drivers.loans import Kind, Loan
from kprobes.drivers.our_notes import OurNotes
from kprobes.drivers.specimen import Specimen
from kprobes.model.kernel import Kernel
from kprobes.model.symbol import name_of
from kprobes.units import Addr

_SLOT = 64
_NEAR = 1 << 12
"""Bytes that code of unknown size may have."""
_DATA = frozenset("aAbBdD")
_CALLBACK = "optimized_callback"
Note = Callable[[Listed], str]
"""A line to what is to be said of it, or ""."""


def _say_nothing(line: Listed) -> str:
    del line
    return ""


def read_detours(
    specimen: Specimen, marks: Sequence[Mark], syntax: Syntax = Syntax.ATT
) -> tuple[Detour, ...]:
    """Return the code that marks lead to, each once."""
    found: dict[Addr, Detour] = {}
    for mark in marks:
        if mark.leads_to is not None and mark.leads_to not in found:
            found[mark.leads_to] = _detour(specimen, mark, mark.leads_to, syntax)
    return tuple(found.values())


def row_of(kernel: Kernel, line: Listed, *, side: Side = Side.BOTH, note: str = "") -> Row:
    """Return a line with the name of what it leads to or names."""
    return Row(line=line, side=side, name=_named(kernel, line), note=note)


def _named(kernel: Kernel, line: Listed) -> str:
    addr = next((addr for addr in (line.target, line.place, line.value) if addr), None)
    if addr is not None:
        return name_of(kernel.symbols, addr) if kernel.symbols.at(addr) is not None else ""
    symbol = kernel.symbols.at(line.per_cpu) if line.per_cpu else None
    # What was allocated since boot has no name, and lies behind whatever has.
    is_static = symbol is not None and symbol.type in _DATA
    return name_of(kernel.symbols, line.per_cpu) if line.per_cpu and is_static else ""


def _detour(specimen: Specimen, mark: Mark, addr: Addr, syntax: Syntax) -> Detour:
    match mark.author:
        case Author.OURS:
            return _our_detour(specimen, mark, addr, syntax)
        case Author.FTRACE:
            return _trampoline(specimen, addr, syntax)
        case Author.KPROBE:
            return _kprobe_detour(specimen, mark, addr, syntax)
        case _:
            inside = range(addr, addr + _NEAR)
            return _followed(specimen, f"code at {addr:#x}", inside, syntax)


def _followed(
    specimen: Specimen,
    title: str,
    inside: range,
    syntax: Syntax,
    note: Note = _say_nothing,
) -> Detour:
    lines = _code(specimen, _pieces(specimen, inside.start, inside), syntax)
    rows = tuple(row_of(specimen.kernel, line, note=note(line)) for line in lines)
    return Detour(title=title, addr=Addr(inside.start), rows=rows)


def _pieces(specimen: Specimen, entry: int, inside: range) -> tuple[tuple[Addr, bytes], ...]:
    if specimen.memory is None:
        return ()
    return specimen.arch.listing.follow(specimen.memory.read, entry, inside)


def _code(
    specimen: Specimen, pieces: tuple[tuple[Addr, bytes], ...], syntax: Syntax
) -> Iterator[Listed]:
    for addr, code in pieces:
        yield from specimen.arch.listing.lines(code, addr, syntax)


def _trampoline(specimen: Specimen, addr: Addr, syntax: Syntax) -> Detour:
    tracer = specimen.tracers.with_trampoline(addr) if specimen.tracers else None
    handlers = {t.handler: t.handler_name for t in specimen.tracers.all} if specimen.tracers else {}

    def note(line: Listed) -> str:
        return "the handler" if line.target in handlers else ""

    if tracer is not None:
        title = f"trampoline of {tracer.name}, for {tracer.handler_name}"
        return _followed(specimen, title, range(addr, tracer.trampoline.stop), syntax, note)
    symbol = specimen.kernel.symbols.at(addr)
    if symbol is None or not symbol.is_text:
        return _followed(specimen, f"code at {addr:#x}", range(addr, addr + _NEAR), syntax, note)
    inside = range(addr, max(symbol.addr + symbol.size, addr + 1))
    return _followed(specimen, symbol.name, inside, syntax, note)


def _kprobe_detour(specimen: Specimen, mark: Mark, addr: Addr, syntax: Syntax) -> Detour:
    probe = next(p for p in specimen.probes if p.addr == mark.start)
    if probe.detour == addr:
        callback = specimen.kernel.symbols.find(_CALLBACK)

        def note(line: Listed) -> str:
            return "the handler" if callback and line.target == callback.addr else ""

        title = "detour of the guest's optimised kprobe"
        return _followed(specimen, title, range(addr, addr + _NEAR), syntax, note)
    title = "slot of the guest's kprobe"
    return _followed(specimen, title, range(addr, addr + _SLOT), syntax)


def _code_around(addr: Addr, loans: Sequence[Loan]) -> range:
    code = (range(each.addr, each.addr + each.size) for each in loans if each.kind is Kind.CODE)
    return next((each for each in code if addr in each), range(addr, addr + _NEAR))


def _our_detour(specimen: Specimen, mark: Mark, addr: Addr, syntax: Syntax) -> Detour:
    entry = next((e for e in specimen.entries if any(u.addr == mark.start for u in e.undos)), None)
    loans = {loan.kind: loan for loan in entry.ledger.loans} if entry else {}
    inside = _code_around(addr, entry.ledger.loans if entry else ())
    pieces = _pieces(specimen, addr, inside)
    notes = OurNotes(specimen, entry, mark, loans, pieces) if entry else None
    rows = tuple(
        row_of(specimen.kernel, line, note=notes.of(line) if notes else "")
        for line in _code(specimen, pieces, syntax)
    )
    return Detour(title=f"code of our probe {mark.probe}", addr=addr, rows=rows)
