"""Strings into the bytes behind a record's fixed part."""

from kprobes.codegen import operands
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const
from kprobes.model.abi import MAX_STRING
from kprobes.model.resolved import FieldFetch, Load, can_fault

_WORD = 8
_LOCATION = 4
_NOWHERE = 1 << 63
"""An address that no CPU can have."""


def store(context: Context, item: FieldFetch, address: Value, room: tuple[Value, int]) -> Value:
    """Write one string, or an array of them, and where they are.

    Args:
        context: what is being written.
        item: a STRING field and what it fetches.
        address: of the record.
        room: where the record's bytes end so far, and where they must end, from its start.

    Returns:
        Where the record's bytes end now.
    """
    if not isinstance(item.operand, Load):
        raise TypeError("a string is fetched from memory")
    if item.field.count is None:
        place = context.out.op("add", address, item.field.offset)
        return _one(context, item.operand, (address, place), room)
    return _array(context, item, address, room)


def _one(
    context: Context, load: Load, where: tuple[Value, Value], room: tuple[Value, int]
) -> Value:
    fault = context.out.label("fault")
    source = operands.address(context, load, fault)
    size = _copy(context, load, (where[0], source, fault), room)
    return _locate(context, where[1], room[0], size)


def _array(context: Context, item: FieldFetch, address: Value, room: tuple[Value, int]) -> Value:
    # The operand is the first string; its base is the first of the pointers.
    f, load = context.out, item.operand
    if not isinstance(load, Load) or not isinstance(load.base, Load) or not item.field.count:
        raise TypeError("an array of strings is fetched through pointers in memory")
    pointers = _first_pointer(context, load.base)
    places = f.op("add", address, item.field.offset)
    with f.loop(item.field.count, room[0]) as each:
        fault, read = f.label("fault"), f.label("read")
        pointer = f.op("add", pointers, f.op("mul", each.index, _WORD))
        scratch = context.registers["scratch"]
        failed = operands.copy(context, load.base, (scratch, pointer), _WORD)
        f.branch(f.compare("ne", failed, 0), fault, read, is_likely=False)
        f.place(read)
        source = f.op("add", f.load(scratch), load.offset)
        size = _copy(context, load, (address, source, fault), (each.carried, room[1]))
        place = f.op("add", places, f.op("mul", each.index, _LOCATION))
        each.following = _locate(context, place, each.carried, size)
    return each.following


def _first_pointer(context: Context, load: Load) -> Value:
    # Where that cannot be known, somewhere that can never be read: every string is a fault.
    f = context.out
    if not can_fault(load.base):
        return operands.address(context, load, "")
    fault, found, join = f.label("fault"), f.label("found"), f.label("pointers")
    address = operands.address(context, load, fault)
    f.jump(found)
    f.place(found)
    f.jump(join)
    f.place(fault)
    f.jump(join)
    f.place(join)
    return f.phi({found: address, fault: const(_NOWHERE)})


def _copy(
    context: Context, load: Load, where: tuple[Value, Value, str], room: tuple[Value, int]
) -> Value:
    # Where the record is, where the string is, and the label of all that has gone wrong before.
    # Long strings before it may leave the last ones less than a string's most, or nothing: the
    # readers give 0 then, which is a fault.
    f = context.out
    address, source, fault = where
    end, limit = room
    left = f.op("sub", const(limit), end)
    size = f.select(f.compare("ult", left, MAX_STRING), left, const(MAX_STRING))
    length = operands.copy_string(context, load, (f.op("add", address, end), source, size))
    join, copied = f.label("join"), f.label("copied")
    is_bad = f.compare("ugt", f.op("sub", length, 1), MAX_STRING - 1)
    f.branch(is_bad, fault, copied, is_likely=False)
    f.place(copied)
    f.jump(join)
    f.place(fault)
    f.jump(join)
    f.place(join)
    return f.phi({copied: length, fault: const(0)})


def _locate(context: Context, place: Value, end: Value, size: Value) -> Value:
    f = context.out
    f.store(place, f.resize(f.op("or", f.op("shl", size, 16), end), "i32"))
    return f.op("add", end, size)
