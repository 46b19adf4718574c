"""Fetching: every kind of operand into its field of the record."""

from collections.abc import Callable
from typing import assert_never

from kprobes.codegen import operands, strings
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const
from kprobes.model.abi import MAX_DYNAMIC, MAX_STRING
from kprobes.model.layout import Field, RecordLayout, Storage
from kprobes.model.resolved import FieldFetch, Load, Resolved, can_fault


def store_fields(context: Context, probe: Resolved, address: Value) -> Value:
    """Write every field of the record at ``address``.

    Returns:
        Where the record's bytes end, counted from its start.
    """
    end = const(probe.layout.size)
    limit = probe.layout.size + room_for_strings(probe.layout)
    for item in probe.fetches:
        match item.field.storage:
            case Storage.NUMBER | Storage.DURATION:
                _store_number(context, probe.layout, item, address)
            case Storage.STRING:
                end = strings.store(context, item, address, (end, limit))
            case Storage.COMM | Storage.TEXT:
                pass
            case _:
                assert_never(item.field.storage)
    return end


def room_for_strings(layout: RecordLayout) -> int:
    """Return the bytes that all strings of a record may take together."""
    number = sum(field.count or 1 for field in layout.fields if field.storage is Storage.STRING)
    return min(number * MAX_STRING, MAX_DYNAMIC)


def _store_number(context: Context, layout: RecordLayout, item: FieldFetch, address: Value) -> None:
    f, field = context.out, item.field
    place = f.op("add", address, field.offset)
    if field.index in context.early:
        _store_early(context, layout, item, address)
        return
    fault = f.label("fault") if can_fault(item.operand) else ""
    if isinstance(item.operand, Load):
        source = operands.address(context, item.operand, fault)
        failed = operands.copy(context, item.operand, (place, source), field.room)
        good = f.label("good")
        f.branch(f.compare("ne", failed, 0), fault, good, is_likely=False)
        f.place(good)
        cut_in_place(context, item, place)
    else:
        value = operands.value(context, item.operand, fault)
        f.store(place, cut(context, item, f.resize(value, f"i{field.size * 8}")))
    if fault:
        _on_fault(context, layout, item, (address, fault))


def _store_early(context: Context, layout: RecordLayout, item: FieldFetch, address: Value) -> None:
    f, field = context.out, item.field
    early = context.early[field.index]
    f.store(f.op("add", address, field.offset), early.number)
    bit = f.op("shl", f.resize(early.is_fault, "i64"), field.index % 64)
    bits = _fault_bits(context, layout, field, address)
    f.store(bits, f.op("or", f.load(bits), bit))


def _on_fault(
    context: Context, layout: RecordLayout, item: FieldFetch, where: tuple[Value, str]
) -> None:
    f, field = context.out, item.field
    address, fault = where
    done = f.label("fetched")
    f.jump(done)
    f.place(fault)
    _each(context, field, address, lambda place: f.store(place, const(0, f"i{field.size * 8}")))
    bits = _fault_bits(context, layout, field, address)
    f.store(bits, f.op("or", f.load(bits), 1 << (field.index % 64)))
    f.jump(done)
    f.place(done)


def _fault_bits(context: Context, layout: RecordLayout, field: Field, address: Value) -> Value:
    word = field.index // 64 * 8
    return context.out.op("add", address, (layout.faults_offset or 0) + word)


def cut_in_place(context: Context, item: FieldFetch, place: Value) -> None:
    """Cut a bit-field of memory, or an array of them, out of the numbers at a place."""
    f, field = context.out, item.field
    if not item.bit_width:
        return

    def cut_one(element: Value) -> None:
        number = f.load(element, f"i{field.size * 8}")
        f.store(element, cut(context, item, number))

    address = f.op("sub", place, field.offset)
    _each(context, field, address, cut_one)


def cut(context: Context, item: FieldFetch, number: Value) -> Value:
    """Return the bits of a number that are the field."""
    if not item.bit_width:
        return number
    f = context.out
    return f.op("and", f.op("lshr", number, item.bit_offset), (1 << item.bit_width) - 1)


def _each(context: Context, field: Field, address: Value, act: Callable[[Value], None]) -> None:
    # Once for every element: a loop, for arrays may have 64.
    start = context.out.op("add", address, field.offset)
    if field.count is None:
        act(start)
        return
    with context.out.loop(field.count) as each:
        act(context.out.op("add", start, context.out.op("mul", each.index, field.size)))
