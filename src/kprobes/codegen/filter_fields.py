"""Fields that a filter tests, fetched before there is a record to put them into."""

from kprobes.codegen import fetch, guard, operands, per_cpu
from kprobes.codegen.context import Context, Early
from kprobes.codegen.filter_texts import Text
from kprobes.codegen.ir import Value, const
from kprobes.model.abi import CPU_SHIFT, MAX_STRING, PERCPU_WORD, TEXT_SLOTS
from kprobes.model.filter import Header, Matches
from kprobes.model.layout import COMM_SIZE
from kprobes.model.resolved import FieldFetch, Load, Resolved, can_fault


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


def text(context: Context, probe: Resolved, test: Matches, fault: str) -> Text:
    """Return the text that a test is about: the task's name, or a string that is read here.

    One that cannot be read leads to the label ``fault``.
    """
    if test.source is Header.COMM:
        address = context.out.op("add", per_cpu.task(context), context.abi.task.comm)
        return Text(address=address, most=COMM_SIZE - 1)
    operand = None if isinstance(test.source, Header) else probe.fetches[test.source].operand
    if not isinstance(operand, Load):
        raise TypeError("a string is fetched from memory")
    return _copied(context, operand, _room(test), fault)


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
        value = operands.value(context, item.operand, fault)
        return fetch.cut(context, item, f.resize(value, f"i{field.size * 8}"))
    source = operands.address(context, item.operand, fault)
    failed = operands.copy(context, item.operand, (scratch, source), field.room)
    read = f.label("read")
    f.branch(f.compare("ne", failed, 0), fault, read, is_likely=False)
    f.place(read)
    fetch.cut_in_place(context, item, scratch)
    return f.load(scratch, f"i{field.room * 8}")


def _room(test: Matches) -> int:
    # No more is read than what tells: a character behind a text that is one piece.
    first, *others = test.pattern.pieces
    if not others:
        return len(first) + 2
    return len(first) + 1 if others == [()] else MAX_STRING


def _copied(context: Context, load: Load, room: int, fault: str) -> Text:
    f, slot = context.out, _slot(context)
    copied = f.label("copied")
    source = operands.address(context, load, fault)
    size = operands.copy_string(context, load, (slot, source, const(room)))
    is_bad = f.compare("ugt", f.op("sub", size, 1), room - 1)
    f.branch(is_bad, fault, copied, is_likely=False)
    f.place(copied)
    return Text(address=slot, most=MAX_STRING - 1, length=f.op("sub", size, 1))


def _slot(context: Context) -> Value:
    # Each CPU has one for every context: the guard lets one hit in at a time, and holds it there.
    f, abi = context.out, context.abi
    word = per_cpu.load(context, abi.percpu + PERCPU_WORD)
    cpu = f.op("lshr", word, CPU_SHIFT)
    level = f.resize(guard.context_number(context), "i64")
    index = f.op("add", f.op("mul", cpu, TEXT_SLOTS), level)
    return f.op("add", f.op("mul", index, MAX_STRING), abi.texts)
