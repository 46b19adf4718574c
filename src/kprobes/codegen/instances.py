"""Instances of return probes: calls in progress, claimed, found by their slot, and given back.

The code is C, runtime/instances.c, where the table and the states of an instance are drawn; here
are its calls. ``model.plan`` has the layout of an instance.
"""

from kprobes.codegen import runtime
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Function, Value


def add(context: Context, stride: int) -> None:
    """Add the part that the other functions call, for instances of so many bytes."""
    start, stop = context.abi.text
    values = {
        "instance_size": stride,
        "text_start": start,
        "text_size": stop - start,
        "trampoline_mark": int.from_bytes(context.arch.returns.mark, "little"),
    }
    functions = {"instance_table()": _table}
    context.parts["instances"] = runtime.definitions(context, values, functions)


def insert(context: Context, slot: Value, full: str) -> Value:
    """Return an instance for the newest call of a slot, not taken over; or go to ``full``.

    Args:
        context: what is being written.
        slot: of the call.
        full: where to go when there is no room.
    """
    operands = (slot, context.out.pointer(link(context, slot)))
    return _unless_none(context.out, "instance_insert", operands, full)


def find(context: Context, slot: Value, absent: str, *, is_taken: bool) -> Value:
    """Return the instance of the newest call of a slot; or go to ``absent``.

    Args:
        context: what is being written.
        slot: of the call.
        absent: where to go when there is none.
        is_taken: whether it is the newest whose return was taken over; else the newest of all,
            which must not have been: if it was, the newest call has no instance.
    """
    name = "instance_find_taken" if is_taken else "instance_find_newest"
    return _unless_none(context.out, name, (slot,), absent)


def take_over(context: Context, instance: Value, slot: Value) -> None:
    """Have a call return to the trampoline.

    Args:
        context: what is being written.
        instance: of the call.
        slot: of the call.
    """
    f = context.out
    f.run("instance_take_over", (f.pointer(instance), slot, f.pointer(link(context, slot))))


def release(context: Context, instance: Value) -> None:
    """Give an instance back; its words after the slot may have other owners at once."""
    context.out.run("instance_release", (context.out.pointer(instance),))


def link(context: Context, slot: Value) -> Value:
    """Return where a call's return address is while our code runs."""
    return slot if context.link is None else context.link


def origin(context: Context, caller: Value, slot: Value) -> Value:
    """Return where a call came from, whose return address may be one of our trampolines.

    Args:
        context: what is being written.
        caller: the return address.
        slot: of the call.
    """
    return context.out.call("instance_origin", (caller, slot))


# Linking gives the address, 64 bits in an instruction: a table may be anywhere, not only where the
# code model has all symbols. Asked for at each use, it is not kept in a register over a call.
def _table(context: Context) -> Value:
    f = context.out
    return f.pointer(f.value("i64", context.code.address.format("instances")))


def _unless_none(f: Function, name: str, operands: tuple[Value, ...], none: str) -> Value:
    found, some = f.call(name, operands, type_="ptr"), f.label("some")
    f.branch(f.value("i1", f"icmp eq {found}, null"), none, some, is_likely=False)
    f.place(some)
    return f.value("i64", f"ptrtoint {found} to i64")
