"""Frames of calls in progress: claimed, found by their slot, and given back; without locks.

They are drawn in ``model.plan``. Only who stands on a stack touches the frames of its slots, so
only the claim of a free one is a race. Calls that tail-call each other have one slot: their frames
lie in the order in which they are searched, the newest first.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from kprobes.codegen.context import Context, rarely
from kprobes.codegen.ir import Function, Value, const
from kprobes.model.plan import (
    FRAME_CALLER,
    FRAME_MULTIPLIER,
    FRAME_ORIGIN,
    FRAME_SLOT,
    TRAMPOLINE_HEADER,
)

_WORD = 8
_SLOT, _CALLER = Value("i64", "%slot"), Value("i64", "%caller")
"""What functions of their own are given."""


@dataclass(frozen=True, slots=True)
class Table:
    """All frames of one function: where they are, how many, and the bytes of each."""

    addr: Value
    count: Value
    stride: Value


def insert(context: Context, stride: int, slot: Value, full: str) -> Value:
    """Return a frame for the newest call of a slot, not taken over; or go to ``full``."""
    f = context.out
    free, claimed, other, inserted = (
        f.label(hint) for hint in ("free", "claimed", "other", "inserted")
    )
    first = _first(context, stride, slot)
    f.branch(
        f.compare("eq", f.load(f.op("add", first, FRAME_SLOT)), 0), free, other, is_likely=True
    )
    f.place(free)
    f.branch(f.exchange(first, const(0), slot), claimed, other, is_likely=True)
    f.place(claimed)
    f.jump(inserted)
    f.place(other)
    given = {"slot": slot, "caller": f.load(link(context, slot))}
    further = rarely(context, "insert_frame", given, lambda inner: _insert(inner, stride))
    elsewhere = _unless_none(f, further, full)
    f.jump(inserted)
    f.place(inserted)
    return f.phi({claimed: first, elsewhere: further})


def find(context: Context, stride: int, slot: Value, absent: str, *, is_taken: bool) -> Value:
    """Return the frame of the newest call of a slot; or go to ``absent``.

    Args:
        context: what is being written.
        stride: bytes of a frame.
        slot: of the call.
        absent: where to go when there is none.
        is_taken: whether it is the newest whose return was taken over; else the newest of all,
            which must not have been: if it was, the newest call has no frame.
    """
    f = context.out
    same, here, other, found = (f.label(hint) for hint in ("same", "here", "other", "found"))
    first = _first(context, stride, slot)
    word = f.load(f.op("add", first, FRAME_SLOT))
    f.branch(f.compare("eq", word, slot), same, other, is_likely=True)
    f.place(same)
    caller = f.load(f.op("add", first, FRAME_CALLER))
    is_it = f.compare("ne" if is_taken else "eq", caller, 0)
    f.branch(is_it, here, other if is_taken else absent, is_likely=True)
    f.place(here)
    f.jump(found)
    f.place(other)

    def search(inner: Context) -> Value:
        return _search(inner, _own_table(inner, stride), _SLOT, is_taken=is_taken)

    name = "find_taken" if is_taken else "find_newest"
    further = rarely(context, name, {"slot": slot}, search)
    elsewhere = _unless_none(f, further, absent)
    f.jump(found)
    f.place(found)
    return f.phi({here: first, elsewhere: further})


def free(context: Context, frame: Value) -> None:
    """Give a frame back; its words behind the slot may have other owners at once."""
    f = context.out
    f.store(f.op("add", frame, FRAME_CALLER), const(0))
    f.publish(f.op("add", frame, FRAME_SLOT), const(0))


def link(context: Context, slot: Value) -> Value:
    """Return where a call's return address is while our code runs."""
    return slot if context.link is None else context.link


def origin(context: Context, caller: Value, slot: Value) -> Value:
    """Return where a call came from, whose return address may be one of our trampolines."""
    f = context.out
    here, ours, join = (f.label(hint) for hint in ("here", "ours", "origin"))
    f.jump(here)
    f.place(here)
    f.branch(_is_in_code(context, caller), ours, join, is_likely=False)
    f.place(ours)
    known = rarely(context, "origin", {"caller": caller, "slot": slot}, _origin)
    f.jump(join)
    f.place(join)
    return f.phi({here: caller, ours: known})


def _first(context: Context, stride: int, slot: Value) -> Value:
    # Nearly always it is there: the others are for a function of its own, so that few registers
    # are saved here.
    f, table = context.out, _own_table(context, stride)
    return f.op("add", table.addr, f.op("mul", _home(f, table, slot), table.stride))


def _own_table(context: Context, stride: int) -> Table:
    # Of the function whose returns are probed here.
    f = context.out
    addr = f.value("i64", context.code.address.format("frames"))
    return Table(addr, f.address_of("frame_count"), const(stride))


def _unless_none(f: Function, frame: Value, none: str) -> str:
    # Returns the label of where there is one.
    some = f.label("some")
    f.branch(f.compare("eq", frame, 0), none, some, is_likely=False)
    f.place(some)
    return some


def _insert(context: Context, stride: int) -> Value:
    f, table, slot = context.out, _own_table(context, stride), _SLOT
    free, used, same, live, stale, claimed, full, done = (
        f.label(hint)
        for hint in ("free", "used", "same", "live", "stale", "claimed", "full", "done")
    )
    with _walk(f, table, slot, (const(0), full)) as (number, frame):
        following = f.label("following")
        word = f.load(f.op("add", frame, FRAME_SLOT))
        f.branch(f.compare("eq", word, 0), free, used, is_likely=True)
        f.place(free)
        f.branch(f.exchange(frame, const(0), slot), claimed, following, is_likely=True)
        f.place(used)
        f.branch(f.compare("eq", word, slot), same, following, is_likely=False)
        f.place(following)
    f.place(same)
    f.branch(_is_live(context, frame), live, stale)
    f.place(live)
    _move_on(context, table, slot, (number, full))
    f.jump(stale)
    f.place(stale)
    f.store(f.op("add", frame, FRAME_CALLER), const(0))
    f.jump(claimed)
    f.place(claimed)
    f.jump(done)
    f.place(full)
    f.jump(done)
    f.place(done)
    return f.phi({claimed: frame, full: const(0)})


def _search(context: Context, table: Table, slot: Value, *, is_taken: bool) -> Value:
    f = context.out
    same, found, absent, done = (f.label(hint) for hint in ("same", "found", "absent", "done"))
    with _walk(f, table, slot, (const(0), absent)) as (_, frame):
        following = f.label("following")
        word = f.load(f.op("add", frame, FRAME_SLOT))
        f.branch(f.compare("eq", word, slot), same, following, is_likely=True)
        f.place(same)
        caller = f.load(f.op("add", frame, FRAME_CALLER))
        return_method = (found, following) if is_taken else (absent, found)
        f.branch(f.compare("ne", caller, 0), *return_method)
        f.place(following)
    f.place(found)
    f.jump(done)
    f.place(absent)
    f.jump(done)
    f.place(done)
    return f.phi({found: frame, absent: const(0)})


def _origin(context: Context) -> Value:
    # Our own calls of the guest's functions return to our code, too.
    f = context.out
    mark = int.from_bytes(context.arch.returns.mark, "little")
    trampoline, known, other, done = (
        f.label(hint) for hint in ("trampoline", "known", "other", "done")
    )
    f.branch(f.compare("eq", f.load(_CALLER), const(mark)), trampoline, other)
    f.place(trampoline)
    frame = _search(context, _table_of(context, _CALLER), _SLOT, is_taken=True)
    f.branch(f.compare("eq", frame, 0), other, known)
    f.place(known)
    found = f.load(f.op("add", frame, FRAME_ORIGIN))
    f.jump(done)
    f.place(other)
    f.jump(done)
    f.place(done)
    return f.phi({known: found, other: _CALLER})


@contextmanager
def _walk(
    f: Function, table: Table, slot: Value, range_: tuple[Value, str]
) -> Generator[tuple[Value, Value]]:
    # The frames that a slot's may be, from a number on, and where to go behind the last. What is
    # written inside gets the number of each and its address, and goes on by running out.
    first, end = range_
    home = _home(f, table, slot)
    with f.count_up(first) as number:
        inside = f.label("inside")
        f.branch(f.compare("ult", number, table.count), inside, end, is_likely=True)
        f.place(inside)
        yield number, _at(f, table, f.op("add", home, number))


def _home(f: Function, table: Table, slot: Value) -> Value:
    product = f.op("lshr", f.op("mul", slot, const(FRAME_MULTIPLIER)), 32)
    return f.op("lshr", f.op("mul", product, table.count), 32)


def _at(f: Function, table: Table, place: Value) -> Value:
    # Around the end, once.
    is_inside = f.compare("ult", place, table.count)
    index = f.select(is_inside, place, f.op("sub", place, table.count))
    return f.op("add", table.addr, f.op("mul", index, table.stride))


def _is_live(context: Context, frame: Value) -> Value:
    # An outer call of the function was left by a jump, so that we stand where it will return.
    # Else its task has died, or has left it by another way.
    f = context.out
    is_taken = f.compare("ne", f.load(f.op("add", frame, FRAME_CALLER)), 0)
    return f.op("and", is_taken, _is_in_code(context, _CALLER))


def _is_in_code(context: Context, addr: Value) -> Value:
    start, stop = context.abi.code
    return context.out.compare("ult", context.out.op("sub", addr, start), stop - start)


def _move_on(context: Context, table: Table, slot: Value, where: tuple[Value, str]) -> None:
    # Every frame of the slot from this number on takes the place of the next one, the last one a
    # free frame's. The last one goes first: whoever looks meanwhile finds the newest one whole.
    f = context.out
    number, full = where
    done, claimed, same = (f.label(hint) for hint in ("moved", "claimed", "same"))
    with _walk(f, table, slot, (f.op("add", number, 1), full)) as (last, frame):
        following = f.label("following")
        f.branch(f.exchange(frame, const(0), slot), claimed, following)
        f.place(following)
    f.place(claimed)
    home = _home(f, table, slot)
    with f.repeat(last) as hole:
        with f.repeat(f.op("sub", hole.carried, 1)) as back:
            source = _at(f, table, f.op("add", home, back.carried))
            word = f.load(f.op("add", source, FRAME_SLOT))
            before = f.label("before")
            f.branch(f.compare("eq", word, slot), same, before)
            f.place(before)
            back.following = f.op("sub", back.carried, 1)
        f.place(same)
        _copy(f, table, source, _at(f, table, f.op("add", home, hole.carried)))
        following = f.label("following")
        f.branch(f.compare("eq", back.carried, number), done, following)
        f.place(following)
        hole.following = back.carried
    f.place(done)


def _copy(f: Function, table: Table, source: Value, target: Value) -> None:
    # All but the slot, which is the same. With its caller a frame is whole.
    more, whole = f.label("more"), f.label("whole")
    with f.repeat(const(FRAME_ORIGIN)) as offset:
        word = f.load(f.op("add", source, offset.carried))
        f.store(f.op("add", target, offset.carried), word)
        offset.following = f.op("add", offset.carried, _WORD)
        f.branch(f.compare("ult", offset.following, table.stride), more, whole)
        f.place(more)
    f.place(whole)
    f.publish(f.op("add", target, FRAME_CALLER), f.load(f.op("add", source, FRAME_CALLER)))


def _table_of(context: Context, trampoline: Value) -> Table:
    f = context.out
    addr = f.load(f.op("sub", trampoline, TRAMPOLINE_HEADER))
    sizes = f.load(f.op("sub", trampoline, TRAMPOLINE_HEADER - _WORD))
    return Table(addr, f.op("and", sizes, 0xFFFF_FFFF), f.op("lshr", sizes, 32))
