"""The entry of a function: what compilers put there for tracers and checks, and what kernels make.

    x86-64                          arm64
    __pfx_f: nops                   kCFI: .word hash                         before it
             mov $hash, %eax        ftrace_ops pointer, two nops before
    f:       endbr64                bti c, or paciasp                        landing pad
             call __fentry__        nop; nop   (mov x9, x30; bl tracer)      site
             push %rbp              stp x29, x30, [sp, #-16]!                prologue
             mov %rsp, %rbp         mov x29, sp
             call mcount            bl _mcount                               gcc -pg

Sources: GCC's manual, "Instrumentation Options"; scripts/recordmcount.c; clang's
docs/ControlFlowIntegrity.rst, "-fsanitize=kcfi"; Documentation/trace/ftrace-design.rst.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.insn import Disassembled
from kprobes.units import Addr

MCOUNT_LOC, PATCHABLE = "__mcount_loc", "__patchable_function_entries"
"""Tables of places: sections of an object, and of a kernel what lies between two symbols."""
_PROFILERS = frozenset({"mcount", "_mcount", "__fentry__", "__gnu_mcount_nc"})


class EntryKind(StrEnum):
    """What some bytes at an entry are."""

    PADDING = "padding"
    """``__pfx_``: nops that the kernel keeps for itself."""
    KCFI = "kcfi"
    """The hash of the function's type, which callers through pointers compare."""
    FINEIBT = "fineibt"
    """Code that compares it, in the place of the padding: calls through pointers go there."""
    CALL_OPS = "call_ops"
    """A pointer to the site's struct ftrace_ops."""
    PATCHABLE_BEFORE = "patchable_before"
    """Nops of -fpatchable-function-entry=N,M before the function: M of them."""
    LANDING_PAD = "landing_pad"
    SEALED = "sealed"
    """A landing pad that no pointer leads to: the kernel has made a nop of it."""
    SIGNING = "signing"
    """Of the return address: pointer authentication."""
    PATCHABLE = "patchable"
    """Nops of -fpatchable-function-entry at the function's beginning."""
    SAVED_LINK = "saved_link"
    """arm64: where a call's return address is kept while the site calls."""
    NOP = "nop"
    """Where a call of a profiler was, or may be."""
    CALL = "call"
    JUMP = "jump"
    BREAKPOINT = "breakpoint"
    PROLOGUE = "prologue"
    """What makes the frame."""


SITES = frozenset({EntryKind.NOP, EntryKind.CALL, EntryKind.JUMP, EntryKind.BREAKPOINT})


class EntryPart(Struct, frozen=True, kw_only=True):
    """Some bytes at an entry.

    Attributes:
        kind: what they are.
        offset: of the first one, from the function's.
        code: they.
        text: their instructions; "" where they are data.
        callee: the name of what is called, or "".
        tables: that have the place.
    """

    kind: EntryKind
    offset: int
    code: bytes
    text: str = ""
    callee: str = ""
    tables: tuple[str, ...] = ()


class EntryInfo(Struct, frozen=True, kw_only=True):
    """How entries look on an architecture, as its listing has them.

    Attributes:
        words: of single instructions to what they are.
        sealed: the bytes that kernels write over a landing pad, or b"".
        nop, call, jump, breakpoint: regular expressions for these.
        site: bytes of a nop that can become a call.
        prologue: a regular expression for what makes a frame: two instructions, of which the first
            is meant, with "; " between.
        checks: (bytes before a function) to what of them callers through pointers look at: an
            offset from the function, so many bytes, and the kind.
    """

    words: Mapping[str, EntryKind]
    sealed: bytes
    nop: str
    call: str
    jump: str
    breakpoint: str
    site: int
    prologue: str
    checks: Callable[[bytes], tuple[int, int, EntryKind] | None]


class EntryText(Struct, frozen=True, kw_only=True):
    """A function's entry, to be read.

    Attributes:
        addr: of the function.
        before: bytes that end where it begins.
        code: its own, from the first.
        listed: the names of the tables that have a place, by its offset.
        are_listed: whether a table has all places of nops for calls.
        padding: bytes before it that have a symbol of their own, ``__pfx_``.
        pointer: offset of its site's pointer to an ftrace_ops, or None.
        has_checks: whether callers through pointers compare the type: clang's kCFI.
    """

    addr: Addr
    before: bytes
    code: bytes
    listed: Mapping[int, tuple[str, ...]]
    are_listed: bool = False
    padding: int = 0
    pointer: int | None = None
    has_checks: bool = False


CalleeOf = Callable[[Disassembled], str]


def read_entry(
    info: EntryInfo, text: EntryText, listing: Sequence[Disassembled], callee_of: CalleeOf
) -> list[EntryPart]:
    """Return the parts of an entry, by their offsets.

    Args:
        info: how entries look.
        text: the entry's bytes.
        listing: of its code.
        callee_of: a call to the name of what it calls, or "".
    """
    return [*_before(info, text), *_after(info, text, listing, callee_of)]


def _before(info: EntryInfo, text: EntryText) -> Iterator[EntryPart]:
    found: list[EntryPart] = []
    check = info.checks(text.before) if text.has_checks else None
    if check is not None:
        offset, size, kind = check
        found.append(_data(text, kind, offset, size))
    if text.pointer is not None:
        found.append(_data(text, EntryKind.CALL_OPS, text.pointer, 8))
    first = min(text.listed, default=0)
    if first < 0 and PATCHABLE in text.listed[first] and text.pointer is None:
        part = _data(text, EntryKind.PATCHABLE_BEFORE, first, -first)
        found.append(replace(part, tables=text.listed[first]))
    elif text.padding and not any(part.kind is EntryKind.FINEIBT for part in found):
        stop = min((part.offset for part in found), default=0)
        if stop + text.padding > 0:
            found.append(_data(text, EntryKind.PADDING, -text.padding, text.padding + stop))
    yield from sorted(found, key=lambda part: part.offset)


def _data(text: EntryText, kind: EntryKind, offset: int, size: int) -> EntryPart:
    start = len(text.before) + offset
    return EntryPart(kind=kind, offset=offset, code=text.before[start : start + size])


def _after(
    info: EntryInfo, text: EntryText, listing: Sequence[Disassembled], callee_of: CalleeOf
) -> Iterator[EntryPart]:
    # ``is_first``: all before has been prepared, too. A profiler's call may come after what the
    # frame keeps.
    at, is_first = 0, True
    while at < len(listing):
        line, *following = listing[at : at + 2]
        if is_first and re.match(info.nop, line.text) and line.code != info.sealed:
            nops, count = _nops(info, text, listing[at:])
            if nops is None:
                return
            yield nops
            at, is_first = at + count, False
            continue
        part = _part(info, text, (line, *following), callee_of, is_first=is_first)
        if part is not None:
            yield part
        elif line.target is not None:
            return
        at += 1
        is_first = is_first and part is not None and part.kind is not EntryKind.PROLOGUE


def _part(
    info: EntryInfo,
    text: EntryText,
    lines: Sequence[Disassembled],
    callee_of: CalleeOf,
    *,
    is_first: bool,
) -> EntryPart | None:
    line, callee = lines[0], ""
    tables = _tables(text, [line])
    kind = info.words.get(line.text)
    if kind is EntryKind.LANDING_PAD and not is_first:
        return None
    if kind is None and is_first and line.code == info.sealed:
        kind = EntryKind.SEALED
    elif kind is None and re.match(info.call, line.text):
        callee = callee_of(line)
        kind = EntryKind.CALL if tables or callee in _PROFILERS else None
    elif kind is None:
        forms = {EntryKind.PROLOGUE: info.prologue}
        if tables:
            forms = {EntryKind.JUMP: info.jump, EntryKind.BREAKPOINT: info.breakpoint}
        both = "; ".join(each.text for each in lines)
        kind = next((each for each, form in forms.items() if re.match(form, both)), None)
    if kind is None:
        return None
    return EntryPart(
        kind=kind,
        offset=line.addr - text.addr,
        code=line.code,
        text=line.text,
        callee=callee,
        tables=tables,
    )


def _tables(text: EntryText, lines: Sequence[Disassembled]) -> tuple[str, ...]:
    places = (line.addr - text.addr for line in lines)
    return tuple(name for place in places for name in text.listed.get(place, ()))


def _nops(
    info: EntryInfo, text: EntryText, listing: Sequence[Disassembled]
) -> tuple[EntryPart | None, int]:
    # And how many instructions they are. After a site there may be others, of an alternative.
    run = list(takewhile(lambda each: re.match(info.nop, each.text), listing))
    is_patchable = PATCHABLE in _tables(text, run) or any(
        PATCHABLE in names for place, names in text.listed.items() if place < 0
    )
    if not is_patchable:
        sites = [n for n, line in enumerate(run, 1) if _tables(text, [line])]
        # Without a table it may be what gcc has written for a call: -mnop-mcount.
        is_alone = len(run) == 1 and len(run[0].code) == info.site > 4
        run = run[: max(sites, default=int(is_alone and not text.are_listed))]
    if not run:
        return None, 0
    part = EntryPart(
        kind=EntryKind.PATCHABLE if is_patchable else EntryKind.NOP,
        offset=run[0].addr - text.addr,
        code=b"".join(line.code for line in run),
        text="; ".join(line.text for line in run),
        tables=_tables(text, run),
    )
    return part, len(run)
