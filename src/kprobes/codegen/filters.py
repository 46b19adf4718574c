"""Filter emitter: a probe's filter as branches; a hit that it rejects reserves and writes nothing.

Steps that need nothing of the guest's functions come before the guard, so that most hits that
are not wanted cost a load and a comparison. Fields that a filter tests are fetched before there is
a record to put them into. Patterns are constants in the instructions, words where bytes are given.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from msgspec import Struct

from kprobes.codegen import fetch, guard, per_cpu
from kprobes.codegen.context import Context, Early
from kprobes.codegen.ir import Function, Value, const
from kprobes.model import resolved
from kprobes.model.abi import CPU_SHIFT, MAX_STRING, PERCPU_WORD, TEXT_SLOTS
from kprobes.model.filter import (
    ACCEPT,
    REJECT,
    Always,
    Compare,
    Filter,
    Header,
    Matches,
    Pattern,
    Piece,
    Relation,
    Source,
    Test,
    Within,
)
from kprobes.model.resolved import COMM_SIZE, FieldFetch, Load, Resolved, can_fault

_WORDS = (8, 4, 2, 1)


class Text(Struct, frozen=True, kw_only=True):
    """A text in memory, with a NUL after it.

    Attributes:
        address: where.
        most: characters that it has at most.
        length: characters that it has, or None where nobody has counted yet.
    """

    address: Value
    most: int
    length: Value | None = None


def emit_match(f: Function, pattern: Pattern, text: Text, targets: tuple[str, str]) -> None:
    """Branch by whether a text looks like a pattern.

    Args:
        f: what is being written.
        pattern: with its pieces in order.
        text: in memory.
        targets: the labels for yes and no.
    """
    yes, no = targets
    first, *others = pattern.pieces
    if pattern.length > text.most:
        f.jump(no)
        return
    is_first = _is_at(f, first, text.address)
    if not others:
        end = f.load(f.op("add", text.address, len(first)), "i8")
        f.branch(f.op("and", is_first, f.compare("eq", end, 0)), yes, no)
    elif others == [()]:
        f.branch(is_first, yes, no)
    else:
        begins = f.label("begins")
        f.branch(is_first, begins, no)
        f.place(begins)
        _emit_rest(f, pattern, text, targets)


def is_within(f: Function, number: Value, ranges: Sequence[tuple[int, int]]) -> Value:
    """Return whether a number without sign is in one of some ranges.

    Args:
        f: what is being written.
        number: of any width.
        ranges: first and last number of each.
    """
    # number - low <= high - low, without sign: one comparison for both ends.
    found = const(0, "i1")
    for low, high in ranges:
        found = f.op("or", found, f.compare("ule", f.op("sub", number, low), high - low))
    return found


def _emit_rest(f: Function, pattern: Pattern, text: Text, targets: tuple[str, str]) -> None:
    # first*middle*...*last: the first piece is at the start, as was tested, the last at the end; of
    # those between each is looked for after the one before. `at` is where the next may begin:
    #
    #     [first] ... [middle] ... [last] NUL
    #            ^at           ^at
    yes, no = targets
    first, *middle, last = pattern.pieces
    length = text.length or _length(f, text)
    at = const(len(first))
    for piece in filter(None, middle):
        at = _find(f, piece, (text.address, at, length), no)
    tail = f.label("tail")
    f.branch(f.compare("ule", f.op("add", at, len(last)), length), tail, no)
    f.place(tail)
    end = f.op("sub", length, len(last))
    f.branch(_is_at(f, last, f.op("add", text.address, end)), yes, no)


def _find(f: Function, piece: Piece, where: tuple[Value, Value, Value], no: str) -> Value:
    # The leftmost place leaves most to what follows, so no other need be tried.
    address, start, length = where
    fits, found, go_on = f.label("fits"), f.label("found"), f.label("next")
    with f.count_up(start) as at:
        end = f.op("add", at, len(piece))
        f.branch(f.compare("ule", end, length), fits, no)
        f.place(fits)
        f.branch(_is_at(f, piece, f.op("add", address, at)), found, go_on)
        f.place(go_on)
    f.place(found)
    return end


def _length(f: Function, text: Text) -> Value:
    # Not past `most`: a task's name may be changed while it is read.
    found, go_on = f.label("end"), f.label("next")
    with f.count_up(const(0)) as at:
        is_end = f.compare("eq", f.load(f.op("add", text.address, at), "i8"), 0)
        f.branch(f.op("or", is_end, f.compare("uge", at, text.most)), found, go_on)
        f.place(go_on)
    f.place(found)
    return at


def _is_at(f: Function, piece: Piece, address: Value) -> Value:
    holds = const(1, "i1")
    for at, size, allowed in _parts(piece):
        number = f.load(f.op("add", address, at), f"i{8 * size}")
        if isinstance(allowed, bytes):
            is_it = f.compare("eq", number, int.from_bytes(allowed, "little"))
        else:
            is_it = is_within(f, number, allowed)
        holds = f.op("and", holds, is_it)
    return holds


def _parts(piece: Piece) -> Iterator[tuple[int, int, bytes | Sequence[tuple[int, int]]]]:
    # Bytes that are given come in words, the others one by one.
    at = 0
    while at < len(piece):
        given = _given(piece[at:])
        size = next((size for size in _WORDS if size <= len(given)), 0)
        yield at, size or 1, given[:size] if size else _ranges(piece[at])
        at += size or 1


def _given(piece: Piece) -> bytes:
    found = bytearray()
    for allowed in piece[: _WORDS[0]]:
        if allowed.bit_count() != 1:
            break
        found.append(allowed.bit_length() - 1)
    return bytes(found)


def _ranges(allowed: int) -> Sequence[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for byte in range(256):
        if not allowed >> byte & 1:
            continue
        if found and found[-1][1] == byte - 1:
            found[-1] = (found[-1][0], byte)
        else:
            found.append((byte, byte))
    return found


def number(context: Context, probe: Resolved, index: int, *, is_kept: bool) -> Value:
    """Return a field's number, all elements of an array as one; 0 when it cannot be read.

    Args:
        context: what is being written.
        probe: whose field.
        index: of the field.
        is_kept: whether every accepted hit comes this way, so that the record can have the same
            number without another look at memory.
    """
    if index in context.early:
        return context.early[index].number
    item = probe.fetches[index]
    if not can_fault(item.operand):
        return _plain(context, item, "")
    found = _fetched(context, item)
    if is_kept:
        context.early[index] = found
    return found.number


def text_of(context: Context, probe: Resolved, test: Matches, fault: str) -> Text:
    """Return the text that a test is about: the task's name, or a string that is read here.

    Args:
        context: what is being written.
        probe: whose filter.
        test: what is looked for, so that no more is read than tells.
        fault: where to go when the string cannot be read.
    """
    if test.source is Header.COMM:
        address = context.out.op("add", per_cpu.task(context), context.abi.task.comm)
        return Text(address=address, most=COMM_SIZE - 1)
    operand = None if isinstance(test.source, Header) else probe.fetches[test.source].operand
    if not isinstance(operand, Load):
        raise TypeError("a string is fetched from memory")
    address, length = copied(context, operand, _room(test), fault)
    return Text(address=address, most=MAX_STRING - 1, length=length)


def _fetched(context: Context, item: FieldFetch) -> Early:
    f = context.out
    fault, good, join = f.label("fault"), f.label("good"), f.label("fetched")
    found = _plain(context, item, fault)
    f.jump(good)
    f.place(good)
    f.jump(join)
    f.place(fault)
    f.jump(join)
    f.place(join)
    value = f.phi({good: found, fault: const(0, found.type)})
    return Early(number=value, is_fault=f.phi({good: const(0, "i1"), fault: const(1, "i1")}))


def _plain(context: Context, item: FieldFetch, fault: str) -> Value:
    f, field, scratch = context.out, item.field, context.registers["scratch"]
    if not isinstance(item.operand, Load):
        value = fetch.value_of(context, item.operand, fault)
        return fetch.cut(context, item, f.resize(value, f"i{field.size * 8}"))
    source = fetch.address_of(context, item.operand, fault)
    failed = fetch.copy_bytes(context, item.operand, (scratch, source), field.room)
    read = f.label("read")
    f.branch(f.compare("ne", failed, 0), fault, read, is_likely=False)
    f.place(read)
    fetch.cut_in_place(context, item, scratch)
    return f.load(scratch, f"i{field.room * 8}")


def _room(test: Matches) -> int:
    # No more is read than what tells: a character after a text that is one piece.
    first, *others = test.pattern.pieces
    if not others:
        return len(first) + 2
    return len(first) + 1 if others == [()] else MAX_STRING


def copied(context: Context, load: Load, room: int, fault: str) -> tuple[Value, Value]:
    """Copy a string, so many bytes at most, its NUL among them; return where, and its length.

    Args:
        context: what is being written.
        load: whose memory it is.
        room: up to ``MAX_STRING``.
        fault: where to go when it cannot be read; its place is known there, too.
    """
    f, slot = context.out, text_slot(context)
    good = f.label("copied")
    source = fetch.address_of(context, load, fault)
    size = fetch.copy_string(context, load, (slot, source, const(room)))
    is_bad = f.compare("ugt", f.op("sub", size, 1), room - 1)
    f.branch(is_bad, fault, good, is_likely=False)
    f.place(good)
    return slot, f.op("sub", size, 1)


def text_slot(context: Context) -> Value:
    """Return the ``MAX_STRING`` bytes that this hit has for texts."""
    # Each CPU has one for every context: the guard lets one hit in at a time, and holds it there.
    f, abi = context.out, context.abi
    word = per_cpu.load(context, abi.percpu + PERCPU_WORD)
    cpu = f.op("lshr", word, CPU_SHIFT)
    level = f.resize(guard.context_number(context), "i64")
    index = f.op("add", f.op("mul", cpu, TEXT_SLOTS), level)
    return f.op("add", f.op("mul", index, MAX_STRING), abi.texts)


_UNSIGNED = {
    Relation.EQ: "eq",
    Relation.NE: "ne",
    Relation.LT: "ult",
    Relation.LE: "ule",
    Relation.GT: "ugt",
    Relation.GE: "uge",
}
_SIGNED = {**_UNSIGNED, **{r: f"s{how[1:]}" for r, how in _UNSIGNED.items() if how[0] == "u"}}
_DEPTH = 15
"""The kernel keeps four bits of each of its depths."""

# include/linux/trace_events.h, enum trace_flag_type; True where the bit means the opposite.
_FLAGS = (
    (resolved.CONTEXT_IRQS_ON, True, 0x01),
    (resolved.CONTEXT_NEED_RESCHED_LAZY, False, 0x02),
    (resolved.CONTEXT_NEED_RESCHED, False, 0x04),
    (resolved.CONTEXT_HARDIRQ, False, 0x08),
    (0x100, False, 0x10),
    (resolved.CONTEXT_NO_PREEMPT_RESCHED, True, 0x20),
    (resolved.CONTEXT_NMI, False, 0x40),
    (resolved.CONTEXT_SOFTIRQ & ~0x100, False, 0x80),
)


def quick_steps(probe: Resolved) -> int:
    """Return how many of a filter's first steps can come before the guard.

    Nothing after them leads back, and a hit comes out of them rejected or at the next step.
    No step can where triggers come before the filter.
    """
    if probe.filter is None or probe.triggers:
        return 0
    steps = probe.filter.steps
    plain = next((n for n, s in enumerate(steps) if _needs_guard(probe, s.test)), len(steps))
    for count in range(plain, 0, -1):
        targets = {t for step in steps[:count] for t in (step.yes, step.no)}
        ends = {REJECT, ACCEPT} if count == len(steps) else {REJECT}
        if targets <= ends | set(range(count + 1)):
            return count
    return 0


class Emitter(Struct, frozen=True, kw_only=True):
    """Writes the filter of one probe.

    Attributes:
        context: what is being written.
        probe: whose filter.
        event: the symbol of its event's number.
        context_bits: writes what the record's header says of the context.
    """

    context: Context
    probe: Resolved
    event: str
    context_bits: Callable[[], Value]

    def emit_quick(self, reject: str) -> None:
        """Write the steps before the guard; a rejected hit goes to the label, others go on."""
        if self.probe.filter is not None:
            self._emit(self.probe.filter, range(quick_steps(self.probe)), reject)

    def emit_rest(self, reject: str) -> None:
        """Write the steps after the guard; else as ``emit_quick``."""
        chosen = self.probe.filter
        if chosen is not None:
            self._emit(chosen, range(quick_steps(self.probe), len(chosen.steps)), reject)

    def _emit(self, chosen: Filter, steps: range, reject: str) -> None:
        f = self.context.out
        # A step leads to a later one, to REJECT, or to ACCEPT, which is after the last step here:
        # what this part of the filter accepts goes on to the next part, or to the record.
        labels = {at: f.label("step") for at in range(steps.start, steps.stop + 1)}
        labels |= {REJECT: reject, ACCEPT: labels[steps.stop]}
        f.jump(labels[steps.start])
        for at in steps:
            f.place(labels[at])
            step = chosen.steps[at]
            is_kept = at < chosen.certain
            self._emit_test(step.test, (labels[step.yes], labels[step.no]), is_kept=is_kept)
        f.place(labels[steps.stop])

    def _emit_test(self, test: Test, targets: tuple[str, str], *, is_kept: bool) -> None:
        f, (yes, no) = self.context.out, targets
        match test:
            case Always(holds=holds):
                f.jump(yes if holds else no)
            case Compare():
                f.branch(self._compare(test, is_kept=is_kept), yes, no)
            case Within():
                number = self._number(test.source, test.size, is_kept=is_kept)
                f.branch(is_within(f, number, test.ranges), yes, no)
            case Matches():
                text = text_of(self.context, self.probe, test, no)
                emit_match(f, test.pattern, text, targets)
            case _:
                assert_never(test)

    def _compare(self, test: Compare, *, is_kept: bool) -> Value:
        f = self.context.out
        number = self._number(test.source, test.size, is_kept=is_kept)
        if test.relation is Relation.AND:
            return f.compare("ne", f.op("and", number, test.value), 0)
        how = _SIGNED if test.is_signed else _UNSIGNED
        return f.compare(how[test.relation], number, test.value)

    def _number(self, source: Source, size: int, *, is_kept: bool) -> Value:
        if not isinstance(source, Header):
            return number(self.context, self.probe, source, is_kept=is_kept)
        return self.context.out.resize(self.header(source), f"i{8 * size}")

    def header(self, source: Header) -> Value:
        """Return the number that every event has under a name."""
        context, f = self.context, self.context.out
        match source:
            case Header.PID | Header.TGID | Header.EXEC_ID:
                return _of_task(context, source)
            case Header.TYPE:
                return f.address_of(self.event)
            case Header.IP:
                return f.address_of("site")
            case Header.CPU:
                return f.op("lshr", _word(context), CPU_SHIFT)
            case Header.FLAGS:
                return _flags(context, self.context_bits())
            case Header.PREEMPT_COUNT:
                return _depths(context, self.context_bits())
            case Header.COMM:
                raise TypeError("a name is not a number")
            case _:
                assert_never(source)


def _needs_guard(probe: Resolved, test: Test) -> bool:
    match test:
        case Always():
            return False
        case Compare(source=source) | Within(source=source) | Matches(source=source):
            # A task that may be moved could be recorded on another CPU than it was asked on.
            if isinstance(source, Header):
                return source is Header.CPU
            return probe.fetches[source].calls_guest
        case _:
            assert_never(test)


def _of_task(context: Context, source: Header) -> Value:
    f, task = context.out, context.abi.task
    offset, type_ = {
        Header.PID: (task.pid, "i32"),
        Header.TGID: (task.tgid, "i32"),
        Header.EXEC_ID: (task.exec_id, "i64"),
    }[source]
    return f.load(f.op("add", per_cpu.task(context), offset), type_)


def _word(context: Context) -> Value:
    return per_cpu.load(context, context.abi.percpu + PERCPU_WORD)


def _flags(context: Context, bits: Value) -> Value:
    f, flags = context.out, const(0, "i32")
    for mask, is_inverted, flag in _FLAGS:
        how = "eq" if is_inverted else "ne"
        is_set = f.compare(how, f.op("and", bits, mask), 0)
        flags = f.op("or", flags, f.select(is_set, const(flag, "i32"), const(0, "i32")))
    return flags


def _depths(context: Context, bits: Value) -> Value:
    f = context.out
    depth = f.op("and", bits, resolved.CONTEXT_PREEMPT)
    if context.abi.task.migration_disabled is None:
        return depth
    depth = f.select(f.compare("ult", depth, _DEPTH), depth, const(_DEPTH, "i32"))
    migrate = f.op("and", f.op("lshr", bits, resolved.CONTEXT_MIGRATE_SHIFT), _DEPTH)
    return f.op("or", depth, f.op("shl", migrate, 4))
