"""Record emitter: one probe's work at a hit, from the reservation to the commit.

The record is written down in ``model.resolved``, the reservation in docs/reference/formats/ring.md.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from kprobes.codegen import fetch, filters, guard, hist, per_cpu, trigger
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Function, Value, const
from kprobes.model import resolved
from kprobes.model.abi import (
    CPU_SHIFT,
    LOAD_SIZE,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_WORD,
    SLACK,
)
from kprobes.model.resolved import RecordLayout, Resolved

_BUSY = 8
"""Where the time of an event's hits is counted, after their number."""


def emit_probes(context: Context, probes: Sequence[Resolved], first: int) -> None:
    """Add the code of all probes of a hit.

    Args:
        context: what is being written.
        probes: in the order in which they record.
        first: the number of the first one's event among the site's.
    """
    f = context.out
    is_held = context.abi.loads is not None and context.abi.clock is not None
    for index, probe in enumerate(probes, first):
        following, missed = f.label("following"), f.label("missed")
        if is_held:
            guard.enter(context, f"event{index}", missed)
        with _measured(context, f"event{index}"):
            emit_choice(context, probe, index, following)
            emit_probe(context, probe, index)
            f.jump(following)
            f.place(following)
        if is_held:
            guard.leave(context)
            f.jump(missed)
            f.place(missed)


def emit_choice(context: Context, probe: Resolved, index: int, reject: str) -> None:
    """Add what of a probe's filter comes before everything else; see ``emit_probe``.

    Args:
        context: what is being written.
        probe: whose filter.
        index: tells its event id from its neighbours'.
        reject: where a hit goes that is not wanted.
    """
    filter_emitter(context, probe, f"event{index}").emit_quick(reject)


def emit_probe(context: Context, probe: Resolved, index: int) -> None:
    """Add one probe's code, after what ``emit_choice`` adds.

    Args:
        context: what is being written.
        probe: what it records.
        index: tells its event id from its neighbours'.
    """
    out = context.out.label("out")
    is_held = context.holds_preemption
    guarded = not is_held and (probe.calls_guest or context.abi.clock is not None)
    if guarded:
        guard.enter(context, f"event{index}", out)
    elif context.abi.is_guarded and not is_held:
        guard.check(context, f"event{index}", out)
    emitter = filter_emitter(context, probe, f"event{index}")
    with trigger.around(emitter) as unrecorded:
        emitter.emit_rest(unrecorded)
        if probe.hist is None:
            trigger.ask_stack(emitter)
            _emit_record(context, probe, index, unrecorded)
        else:
            hist.emit(emitter, probe.hist)
    if guarded:
        guard.leave(context)
    context.out.jump(out)
    context.out.place(out)
    context.early.clear()


@contextmanager
def _measured(context: Context, event: str) -> Generator[None]:
    # Limits want to know how often an event is hit, and for how long: count and time what is added
    # inside.
    f, loads = context.out, context.abi.loads
    if loads is None:
        yield
        return
    place = f.op("add", f.op("mul", f.address_of(event), LOAD_SIZE), loads)
    guard.count_at(context, place)
    begun = context.time()
    yield
    f.increase(f.op("add", place, _BUSY), f.op("sub", context.time(), begun))


def stamp(context: Context) -> Value:
    """Return the time of the hit's last record, or the time where nothing has been recorded."""
    f, stamped = context.out, context.stamped
    if stamped is None:
        return context.time()
    before, asked, known = (f.label(hint) for hint in ("before", "asked", "known"))
    f.jump(before)
    f.place(before)
    found = f.read(stamped)
    f.branch(f.compare("eq", found, 0), asked, known, is_likely=False)
    f.place(asked)
    now = context.time()
    f.jump(known)
    f.place(known)
    return f.phi({before: found, asked: now})


def filter_emitter(context: Context, probe: Resolved, event: str) -> filters.Emitter:
    """Return what writes a probe's filter.

    Args:
        context: what is being written.
        probe: whose filter.
        event: the symbol of its event's number.
    """
    return filters.Emitter(
        context=context,
        probe=probe,
        event=event,
        context_bits=lambda: _context_bits(context, per_cpu.task(context)),
    )


def _emit_record(context: Context, probe: Resolved, index: int, leave: str) -> None:
    f, layout = context.out, probe.layout
    size = layout.size + fetch.room_after(layout)
    word, address = _reserve(context, size, leave)
    now = context.time()
    f.store(f.op("add", address, resolved.COUNTER), now)
    if context.stamped is not None:
        f.assign(context.stamped, now)
    if layout.faults_offset is not None:
        _clear_faults(f, layout, address)
    # Fields before the header: registers that are stored are free for its work.
    end = fetch.store_fields(context, probe, address)
    _header(context, address)
    if layout.caller_offset is not None and context.returned is not None:
        f.store(f.op("add", address, layout.caller_offset), context.returned.caller)
    if layout.is_dynamic:
        _trim(context, layout, (word, address), (size, end))
    commit = f.op("or", f.op("shl", word, resolved.EVENT_BITS), f.address_of(f"event{index}"))
    f.publish(address, commit)


def _reserve(context: Context, size: int, full: str) -> tuple[Value, Value]:
    # Per CPU (docs/reference/formats/ring.md):
    #
    #     word    [cpu:16] [position:48]     bytes ever reserved
    #     limit   [cpu:16] [position:48]     what has been read, and a ring's size
    #
    #     rings   |<- ring_size ->| SLACK |<- ring_size ->| SLACK | ...
    #              CPU 0                   CPU 1
    #
    # The word names its CPU: after a migration between load and exchange either the word found is
    # another CPU's and the exchange fails, or the exchange is atomic and the room is that CPU's.
    # So neither a lock nor a preemption guard is needed.
    # The limit names it, too: between loads of another CPU's, the distance is out of all bounds.
    f, abi = context.out, context.abi
    retry, attempt, far, done = (f.label(hint) for hint in ("retry", "try", "far", "reserved"))
    f.jump(retry)
    f.place(retry)
    base = per_cpu.base(context)
    word = per_cpu.load(context, abi.percpu + PERCPU_WORD, at=base)
    after = f.op("add", word, size)
    limit = per_cpu.load(context, abi.percpu + PERCPU_LIMIT, at=base)
    distance = f.settled(f.op("sub", limit, after))
    f.branch(f.compare("ule", distance, abi.ring_size), attempt, far, is_likely=True)
    f.place(far)
    _drop(context, f.op("xor", word, f.op("add", distance, after)), retry, full)
    f.place(attempt)
    found = per_cpu.exchange(context, abi.percpu + PERCPU_WORD, (word, after), at=base)
    f.branch(f.compare("eq", found, word), done, retry, is_likely=True)
    f.place(done)
    # Computed, not loaded: a page less that a hit touches.
    ring = f.op("mul", f.op("lshr", word, CPU_SHIFT), abi.ring_size + SLACK)
    place = f.settled(f.op("add", ring, f.op("and", word, abi.ring_size - 1)))
    return word, f.settled(f.op("add", place, abi.rings))


def _drop(context: Context, difference: Value, retry: str, full: str) -> None:
    # Word and limit of one CPU: its ring is full. Of two: look again.
    f, lost = context.out, context.out.label("lost")
    is_one = f.compare("ult", difference, 1 << CPU_SHIFT)
    f.branch(is_one, lost, retry)
    f.place(lost)
    per_cpu.count(context, context.abi.percpu + PERCPU_LOST)
    f.jump(full)


def _header(context: Context, address: Value) -> None:
    f, task = context.out, context.abi.task
    current = per_cpu.task(context)
    bits = f.resize(_context_bits(context, current), "i64")
    #      8               16     20       24                40
    #     [counter        ] [pid ] [context] [comm           ] fields ...
    #
    # Both in one store: in an emulated guest a store costs more than a shift.
    above = f.op("shl", bits, 8 * (resolved.CONTEXT - resolved.PID))
    pid = f.load(f.op("add", current, task.pid), "i32")
    both = f.op("or", above, f.resize(pid, "i64"))
    f.store(f.op("add", address, resolved.PID), both)
    for half in (0, 8):
        f.store(
            f.op("add", address, resolved.COMM + half),
            f.load(f.op("add", current, task.comm + half)),
        )


def _context_bits(context: Context, current: Value) -> Value:
    f, task, code = context.out, context.abi.task, context.code
    # The frame has the probed code's own, where there is one.
    saved = context.registers.get(code.call.flags) if code.call.flags else None
    flags = f.resize(saved or f.value("i64", code.flags), "i32")
    if not code.irqs_set:
        flags = f.op("xor", flags, code.irqs_flag)
    shift = (resolved.CONTEXT_IRQS_ON // code.irqs_flag).bit_length() - 1
    bits = f.op("and", f.op("shl", flags, shift), resolved.CONTEXT_IRQS_ON)
    count = per_cpu.preempt_count(context, of=current)
    if context.holds_preemption:
        count = f.op("sub", count, 1)
    if code.is_resched_apart:
        shift = resolved.CONTEXT_NO_PREEMPT_RESCHED.bit_length() - 1
        count = f.op("or", count, f.op("shl", per_cpu.no_resched(context, of=current), shift))
    bits = f.op("or", bits, count)
    thread_flags = f.load(f.op("add", current, task.flags), "i32")
    lowest = (task.resched_mask & -task.resched_mask).bit_length()
    shift = resolved.CONTEXT_NEED_RESCHED.bit_length() - lowest
    resched = f.op("shl", f.op("and", thread_flags, task.resched_mask), shift)
    bits = f.op("or", bits, resched)
    if task.migration_disabled is None:
        return bits
    offset, size = task.migration_disabled
    depth = f.resize(f.load(f.op("add", current, offset), f"i{size * 8}"), "i32")
    depth = f.op("and", depth, 15)
    return f.op("or", bits, f.op("shl", depth, resolved.CONTEXT_MIGRATE_SHIFT))


def _clear_faults(f: Function, layout: RecordLayout, address: Value) -> None:
    words = (len(layout.fields) + 63) // 64
    for word in range(words):
        f.store(f.op("add", address, (layout.faults_offset or 0) + 8 * word), const(0))


def _trim(
    context: Context,
    layout: RecordLayout,
    reserved: tuple[Value, Value],
    sizes: tuple[int, Value],
) -> None:
    #     word            used               room
    #     |  fixed part   | strings          |  <- reserved: the most that strings may need
    #
    # Give back what the strings did not need, unless a hit on top of this one (of an interrupt) has
    # reserved after it: then the record keeps its size, and the decoder skips the rest.
    f = context.out
    word, address = reserved
    room, end = sizes
    used = f.op("and", f.op("add", end, resolved.ALIGN - 1), -resolved.ALIGN)
    whole = f.op("add", word, room)
    trimmed = f.op("add", word, used)
    found = per_cpu.exchange(context, context.abi.percpu + PERCPU_WORD, (whole, trimmed))
    size = f.select(f.compare("eq", found, whole), used, const(room))
    f.store(f.op("add", address, layout.size_offset), f.resize(size, "i32"))
