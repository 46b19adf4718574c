"""Hist emitter: a hit adds to an entry of its CPU's table.

The table is drawn in ``model.hist``. Preemption is held: the task stays on its CPU, and nobody
changes its table but this hit and interrupts on top of it, which end before it goes on. So an add
is one instruction that no interrupt divides, and needs no lock.
"""

from typing import assert_never

from msgspec import Struct

from kprobes.codegen import fetch, filters, per_cpu
from kprobes.codegen.context import Context
from kprobes.codegen.filters import Emitter
from kprobes.codegen.ir import Value, const
from kprobes.model.abi import CPU_SHIFT, PERCPU_WORD
from kprobes.model.filter import Header
from kprobes.model.hist import (
    DIVIDE_SHIFT,
    ENTRY_HITCOUNT,
    ENTRY_KEYS,
    ENTRY_MARK,
    EXTREMES,
    MARK_BUSY,
    MARK_FREE,
    MARK_LEAST,
    MAX_TEXT,
    PARTS_BITS,
    PROGRAM_SHIFT,
    PROGRAM_SIZE,
    TABLE_DROPPED,
    TABLE_HEADER,
    TABLE_UNMEASURED,
    TABLE_USED,
    TRACKED_NUMBER,
    TRACKED_SAVED,
    Expression,
    HistField,
    HistKind,
    HistTable,
    Modifier,
    NumericLiteral,
    Operator,
    Special,
    multiplier_of,
)
from kprobes.model.resolved import Load, StackTraceValue, Storage
from kprobes.units import U64

_WORD = 8
_SPREAD = 0x9E37_79B9_7F4A_7C15
"""2**64 by the golden ratio: Knuth, The Art of Computer Programming, 6.4."""
_NS_PER_US = 1000
_BITS = 64
_LEAST_SIGNED = 1 << 63


class _Hit(Struct, kw_only=True):
    # One probe's hit while its code is written.
    emitter: Emitter
    table: HistTable
    place: Value
    leave: str
    duration: Value | None = None

    @property
    def context(self) -> Context:
        return self.emitter.context


def emit(emitter: Emitter, table: HistTable) -> None:
    """Add the code that counts a hit of a probe with a hist trigger.

    Args:
        emitter: of the trigger's filter, which has let the hit pass.
        table: that it is counted in.
    """
    context = emitter.context
    f, is_held = context.out, context.holds_preemption
    done = f.label("counted")
    if not is_held:
        per_cpu.add_preempt(context, 1)
    cpu = f.op("lshr", per_cpu.load(context, context.abi.percpu + PERCPU_WORD), CPU_SHIFT)
    tables = _address(context, f"table{table.number}_{emitter.event}")
    place = f.op("add", tables, f.op("mul", cpu, table.size))
    _count(_Hit(emitter=emitter, table=table, place=place, leave=done))
    f.jump(done)
    f.place(done)
    if not is_held:
        per_cpu.add_preempt(context, -1)


def _count(hit: _Hit) -> None:
    f, trigger = hit.context.out, hit.table.trigger
    words = [word for key in trigger.keys for word in _words(hit, key)]
    words += [_bucket(hit.context, _number(hit, each), each) for each in trigger.percentiles]
    numbers = [_taken(hit.context, _number(hit, each), each) for each in trigger.columns]
    tracked = [_taken(hit.context, _number(hit, each), each) for each in trigger.tracked]
    entry = _entry(hit, words)
    if tracked:
        _track(hit, entry, tracked)
    for at, (column, number) in enumerate(zip(trigger.columns, numbers, strict=True)):
        _sum_up(hit.context, column, f.op("add", entry, hit.table.columns + _WORD * at), number)
    # An entry without hits is not looked at: its columns come first.
    _add(hit.context, f.op("add", entry, ENTRY_HITCOUNT), const(1))


def _track(hit: _Hit, entry: Value, tracked: list[Value]) -> None:
    # The words are written by one hit at a time. Who interrupts it with a greater number of the
    # same entry is dropped: else nobody would know which words are whose.
    f = hit.context.out
    version = f.op("add", entry, hit.table.version)
    places = (f.op("add", version, _WORD * at) for at in range(TRACKED_NUMBER, TRACKED_SAVED))
    number, when = places
    labels = (f.label(hint) for hint in ("again", "greater", "free", "busy", "own", "tracked"))
    again, greater, free, busy, own, done = labels
    f.jump(again)
    f.place(again)
    before = f.load(version)
    f.branch(f.compare("ugt", tracked[0], f.load(number)), greater, done, is_likely=False)
    f.place(greater)
    is_odd = f.compare("ne", f.op("and", before, 1), 0)
    f.branch(is_odd, busy, free, is_likely=False)
    f.place(busy)
    _drop(hit)
    f.place(free)
    seen = f.exchange(version, before, f.op("add", before, 1))
    f.branch(f.compare("eq", seen, before), own, again, is_likely=True)
    f.place(own)
    f.put(number, tracked[0])
    f.put(when, hit.context.time())
    for at, word in enumerate(tracked[1:], TRACKED_SAVED):
        f.put(f.op("add", version, _WORD * at), word)
    f.publish(version, f.op("add", before, 2))
    f.jump(done)
    f.place(done)


def _address(context: Context, symbol: str) -> Value:
    # Anywhere, which an instruction's operand does not reach.
    return context.out.value("i64", context.code.address.format(symbol))


def _words(hit: _Hit, key: HistField) -> list[Value]:
    if key.kind is HistKind.TEXT and key.source is Header.COMM:
        return _comm(hit.context)
    if key.is_kept:
        return [_kept(hit, key)]
    return [_taken(hit.context, _number(hit, key), key)]


def _kept(hit: _Hit, key: HistField) -> Value:
    # Where the key's bytes are in the area after the entries. Without room the hit is dropped.
    f, context, table = hit.context.out, hit.context, hit.table
    address, size = _bytes(hit, key)
    area = f.pointer(f.op("add", hit.place, table.area))
    operands = (area, const(table.slots), const(table.area_size), f.pointer(address), size)
    context.parts["keys"] = ""
    word = f.call("key_kept", operands)
    full, kept = f.label("full"), f.label("kept")
    f.branch(f.compare("eq", word, 0), full, kept, is_likely=False)
    f.place(full)
    _drop(hit)
    f.place(kept)
    return word


def _bytes(hit: _Hit, key: HistField) -> tuple[Value, Value]:
    # Where they are, in whole words, and how many; what cannot be read has none.
    f, context = hit.context.out, hit.context
    if not isinstance(key.source, int):
        raise TypeError("only arguments are kept")
    operand = hit.emitter.probe.fetches[key.source].operand
    if isinstance(operand, StackTraceValue):
        slot = filters.text_slot(context)
        before = PROGRAM_SIZE if key.has_program else 0
        count = fetch.walk(context, operand, f.op("add", slot, before))
        if before:
            # All tasks that have no stack have the same.
            f.store(slot, f.select(f.compare("eq", count, 0), const(0), _program(hit)))
        if key.width:
            count = f.select(f.compare("ult", count, key.width), count, const(key.width))
        return slot, f.op("add", f.op("shl", count, 3), before)
    if not isinstance(operand, Load):
        raise TypeError("a string is fetched from memory")
    fault, read, join = f.label("fault"), f.label("read"), f.label("text")
    slot, length = filters.copied(context, operand, MAX_TEXT + 1, fault)
    f.jump(read)
    f.place(read)
    f.jump(join)
    f.place(fault)
    f.jump(join)
    f.place(join)
    return slot, f.phi({read: length, fault: const(0)})


def _program(hit: _Hit) -> Value:
    f, header = hit.context.out, hit.emitter.header
    executed = f.op("shl", header(Header.EXEC_ID), PROGRAM_SHIFT)
    return f.op("or", executed, f.resize(header(Header.TGID), "i64"))


def _drop(hit: _Hit) -> None:
    _add(hit.context, hit.context.out.op("add", hit.place, TABLE_DROPPED), const(1))
    hit.context.out.jump(hit.leave)


def _comm(context: Context) -> list[Value]:
    f = context.out
    comm = f.op("add", per_cpu.task(context), context.abi.task.comm)
    return [f.load(f.op("add", comm, at)) for at in (0, _WORD)]


def _number(hit: _Hit, field: HistField) -> Value:
    # 64 bits of it; what cannot be read is 0, as it is in the kernel's records.
    context, source = hit.context, field.source
    if isinstance(source, NumericLiteral):
        return const(source.value)
    if isinstance(source, Expression):
        return _computed(hit, source)
    if isinstance(source, Special):
        return _special(hit, source)
    if source is Header.IP:
        return _address(context, f"ip_{hit.emitter.event}")
    if isinstance(source, Header):
        return _extended(context, hit.emitter.header(source), field)
    probe = hit.emitter.probe
    if probe.fetches[source].field.storage is Storage.DURATION:
        return _duration(hit, source)
    return _extended(context, filters.number(context, probe, source, is_kept=True), field)


def _computed(hit: _Hit, expression: Expression) -> Value:
    f = hit.context.out
    first, *others = (_taken(hit.context, _number(hit, each), each) for each in expression.operands)
    match expression.operator:
        case Operator.NEGATED:
            return f.op("sub", const(0), first)
        case Operator.PLUS:
            return f.op("add", first, *others)
        case Operator.MINUS:
            return f.op("sub", first, *others)
        case Operator.TIMES:
            return f.op("mul", first, *others)
        case Operator.OVER:
            divisor = expression.operands[1].source
            if isinstance(divisor, NumericLiteral):
                return _divided(hit.context, first, divisor.value)
            (other,) = others
            is_none = f.compare("eq", other, 0)
            quotient = f.op("udiv", first, f.select(is_none, const(1), other))
            return f.select(is_none, const(U64), quotient)
        case _:
            assert_never(expression.operator)


def _divided(context: Context, number: Value, constant: int) -> Value:
    # As kernels do it, with what they get wrong by one.
    f, multiplier = context.out, multiplier_of(constant)
    exact = f.op("udiv", number, constant)
    if multiplier is None:
        return exact
    product = f.op("add", f.op("mul", number, multiplier), (1 << DIVIDE_SHIFT) - 1)
    is_small = f.compare("ult", number, 1 << DIVIDE_SHIFT)
    return f.select(is_small, f.op("lshr", product, DIVIDE_SHIFT), exact)


def _special(hit: _Hit, source: Special) -> Value:
    context = hit.context
    match source:
        case Special.HITCOUNT:
            return const(1)
        case Special.FUNCTION:
            return _address(context, f"ip_{hit.emitter.event}")
        case Special.CALLER if context.returned is not None:
            return context.returned.caller
        case Special.CALLER | Special.TIMESTAMP:
            raise TypeError(f"{source} cannot be counted here")
        case _:
            assert_never(source)


def _extended(context: Context, number: Value, field: HistField) -> Value:
    if field.is_signed and number.type != "i64":
        return context.out.value("i64", f"sext {number} to i64")
    return context.out.resize(number, "i64")


def _duration(hit: _Hit, index: int) -> Value:
    # Once, whoever asks for it. One that cannot be measured is counted apart.
    if hit.duration is not None:
        return hit.duration
    f, context = hit.context.out, hit.context
    now = context.time()
    entered = fetch.value_of(context, hit.emitter.probe.fetches[index].operand, "")
    took = f.op("sub", now, entered)
    none, some = f.label("unmeasured"), f.label("measured")
    f.branch(f.compare("sgt", took, 0), some, none, is_likely=True)
    f.place(none)
    _add(context, f.op("add", hit.place, TABLE_UNMEASURED), const(1))
    f.jump(hit.leave)
    f.place(some)
    if context.abi.clock is None:
        product = f.op("mul", f.resize(took, "i128"), context.abi.ns_per_count)
        took = f.resize(f.op("lshr", product, 32), "i64")
    hit.duration = took
    return took


def _taken(context: Context, number: Value, field: HistField) -> Value:
    f = context.out
    match field.modifier:
        case Modifier.LOG2:
            # ilog2(roundup_pow_of_two(n)), and 0 of 0.
            less = f.op("sub", number, 1)
            zeros = f.value("i64", f"call i64 @llvm.ctlz.i64({less}, i1 false)")
            length = f.op("sub", const(_BITS), zeros)
            return f.select(f.compare("eq", number, 0), const(0), length)
        case Modifier.BUCKETS:
            return f.op("sub", number, f.op("urem", number, field.width))
        case Modifier.USECS if field.kind is HistKind.DURATION:
            return f.op("udiv", f.op("add", number, _NS_PER_US // 2), _NS_PER_US)
        case _:
            return number


def _bucket(context: Context, number: Value, field: HistField) -> Value:
    # 0 of 0, 1 of 1: 64 of each power of two, by the bits after the topmost one.
    f = context.out
    is_negative = f.compare("slt", number, 0) if field.is_signed else None
    if is_negative is not None:
        number = f.select(is_negative, f.op("sub", const(0), number), number)
    # The count of zeros of 0, which is none.
    zeros = f.value("i64", f"call i64 @llvm.ctlz.i64({f.op('or', number, 1)}, i1 false)")
    parts = f.op("lshr", f.op("shl", number, zeros), _BITS - 1 - PARTS_BITS)
    power = f.op("shl", f.op("sub", const(_BITS - 1), zeros), PARTS_BITS)
    bucket = f.op("add", f.op("add", power, parts), const(1 - (1 << PARTS_BITS)))
    bucket = f.select(f.compare("eq", number, 0), const(0), bucket)
    if is_negative is None:
        return bucket
    return f.select(is_negative, f.op("sub", const(0), bucket), bucket)


def _entry(hit: _Hit, words: list[Value]) -> Value:
    # Return where the entry of a key is; a new one where there is none. Without room the hit is
    # counted as dropped.
    context, table, f = hit.context, hit.table, hit.context.out
    mark = _hash(context, words)
    found, following = f.label("found"), f.label("following")
    # All bits of a key tell in the topmost ones of a product.
    home = f.op("lshr", mark, _BITS + 1 - table.slots.bit_length())
    with f.count_up(home) as number:
        slot = f.op("mul", f.op("and", number, table.slots - 1), table.entry_size)
        entry = f.op("add", f.op("add", hit.place, TABLE_HEADER), slot)
        here = f.load(entry)
        same, other, free = (f.label(hint) for hint in ("same", "other", "free"))
        f.branch(f.compare("eq", here, mark), same, other, is_likely=True)
        f.place(same)
        is_equal = const(1, "i1")
        for at, word in enumerate(words):
            held = f.load(f.op("add", entry, ENTRY_KEYS + _WORD * at))
            is_equal = f.op("and", is_equal, f.compare("eq", held, word))
        f.branch(is_equal, found, following, is_likely=True)
        f.place(other)
        f.branch(f.compare("eq", here, MARK_FREE), free, following, is_likely=False)
        f.place(free)
        _claim(hit, entry, following)
        for at, word in enumerate(words):
            f.put(f.op("add", entry, ENTRY_KEYS + _WORD * at), word)
        for at, column in enumerate(table.trigger.columns):
            if column.modifier in EXTREMES:
                f.put(f.op("add", entry, table.columns + _WORD * at), const(_identity(column)))
        for at, word in enumerate(_comm(context) if table.has_comm else ()):
            f.put(f.op("add", entry, table.comm + _WORD * at), word)
        f.publish(f.op("add", entry, ENTRY_MARK), mark)
        f.jump(found)
        f.place(following)
    f.place(found)
    return entry


def _hash(context: Context, words: list[Value]) -> Value:
    f = context.out
    first, *others = words
    mixed = f.op("mul", first, _SPREAD)
    for word in others:
        mixed = f.op("xor", f.op("add", mixed, f.op("lshr", mixed, 32)), word)
        mixed = f.op("mul", mixed, _SPREAD)
    # Never the mark of a free entry, or of one that is written.
    return f.op("or", mixed, MARK_LEAST)


def _claim(hit: _Hit, entry: Value, following: str) -> None:
    # Goes on with an entry that is this hit's own, to be written; to ``following`` where an
    # interrupt was faster.
    f = hit.context.out
    room, full, own, late = (f.label(hint) for hint in ("room", "full", "own", "late"))
    used, most = f.op("add", hit.place, TABLE_USED), hit.table.trigger.room
    f.branch(f.compare("ult", f.take(used), most), room, full, is_likely=True)
    f.place(full)
    f.increase(used, const(-1))
    _drop(hit)
    f.place(room)
    before = f.exchange(entry, const(MARK_FREE), const(MARK_BUSY))
    f.branch(f.compare("eq", before, MARK_FREE), own, late, is_likely=True)
    f.place(late)
    f.increase(used, const(-1))
    f.jump(following)
    f.place(own)


def _identity(column: HistField) -> int:
    # What every number is less than, or greater than.
    if column.modifier is Modifier.MIN:
        return _LEAST_SIGNED - 1 if column.is_signed else U64
    return _LEAST_SIGNED if column.is_signed else 0


def _sum_up(context: Context, column: HistField, place: Value, number: Value) -> None:
    if column.modifier not in EXTREMES:
        _add(context, place, number)
        return
    f = context.out
    again, better, done = (f.label(hint) for hint in ("again", "better", "done"))
    how = ("s" if column.is_signed else "u") + ("lt" if column.modifier is Modifier.MIN else "gt")
    f.jump(again)
    f.place(again)
    held = f.load(place)
    f.branch(f.compare(how, number, held), better, done, is_likely=False)
    f.place(better)
    before = f.exchange(place, held, number)
    f.branch(f.compare("eq", before, held), done, again, is_likely=True)
    f.place(done)


def _add(context: Context, place: Value, number: Value) -> None:
    if context.code.add_own is None:
        context.out.increase(place, number)
    else:
        context.out.asm(*context.code.add_own, (place, number))
