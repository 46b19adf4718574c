"""Trigger emitter: what a hit does before and after its event, and whether that is recorded.

Triggers see every hit, whatever the event's own filter. The words that they read and write are
drawn in ``model.trigger``; they are all CPUs', and change for the next hit that looks at them.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from kprobes.codegen import hist, per_cpu
from kprobes.codegen.filters import Emitter
from kprobes.codegen.ir import Value, const
from kprobes.model.abi import CPU_SHIFT, PERCPU_WORD
from kprobes.model.trigger import (
    PAUSED_CPU_SHIFT,
    WORD_GONE_ON,
    WORD_PAUSED,
    WORD_PAUSES,
    WORD_SNAPSHOTS,
    WORD_STOPPED,
    WORD_TRACING_ON,
    Command,
    CompiledTrigger,
    Trigger,
    is_there_offset,
    left_offset,
    soft_enable_offset,
)
from kprobes.units import U64

_WAIT_NS = 2_000_000_000
"""How long a CPU waits for the guest to be stopped."""
_MOST_LOOKS = 1 << 23
"""How often it looks, where it has no counter: as long in an emulated guest."""
_ON = frozenset({Command.TRACEON, Command.ENABLE_EVENT, Command.ENABLE_HIST})


# As trace_trigger_soft_disabled() and trace_event_buffer_commit() in kernel/trace:
#
#     tracing_on ── triggers ── soft enable ── filter ── record ── post triggers
#              └───────────────────┴─────────────┴─────────────────┘
#
# Where no trigger looks at the event the kernel runs them first, and ``traceon`` counts at once.
@contextmanager
def around(emitter: Emitter) -> Generator[str]:
    """Add what triggers do before and after the event, whose code is added inside.

    Args:
        emitter: of the probe's filter.

    Yields:
        The label where a hit goes that is not recorded.
    """
    context, probe = emitter.context, emitter.probe
    f, unrecorded = context.out, context.out.label("unrecorded")
    is_conditional = any(each.trigger.is_conditional for each in probe.triggers)
    tracing = _tracing(emitter) if is_conditional else None
    _fire(emitter, [each for each in probe.triggers if not each.trigger.is_post])
    tracing = tracing or _tracing(emitter)
    soft_enable = (
        _word(emitter, soft_enable_offset(probe.soft_enable)) if probe.soft_enable else None
    )
    for word in (tracing, None if soft_enable is None else f.load(soft_enable)):
        if word is not None:
            on = f.label("on")
            f.branch(f.compare("ne", word, 0), on, unrecorded)
            f.place(on)
    yield unrecorded
    f.jump(unrecorded)
    f.place(unrecorded)
    # Not on every way to here.
    context.early.clear()
    after = [each for each in probe.triggers if each.trigger.is_post]
    # But for those that have come with the record.
    _fire(emitter, [each for each in after if each.trigger.command is not Command.STACKTRACE])


def ask_stack(emitter: Emitter) -> None:
    """Add what decides whether an event has its stack, where that is for a trigger to say."""
    context, probe = emitter.context, emitter.probe
    if context.asked_stack is None:
        return
    is_triggered = probe.definition.synthetic_fields.is_stack_triggered
    context.out.assign(context.asked_stack, const(int(not is_triggered)))
    _fire(emitter, [e for e in probe.triggers if e.trigger.command is Command.STACKTRACE])


def _tracing(emitter: Emitter) -> Value | None:
    if not emitter.context.abi.checks_tracing_on:
        return None
    return emitter.context.out.load(_word(emitter, WORD_TRACING_ON))


def _word(emitter: Emitter, offset: int) -> Value:
    words = emitter.context.abi.words
    if words is None:
        raise ValueError("there are no words for triggers")
    return const(words + offset)


def _fire(emitter: Emitter, triggers: Sequence[CompiledTrigger]) -> None:
    context, f = emitter.context, emitter.context.out
    for each in triggers:
        before, skip = dict(context.early), f.label("skip")
        probe = replace(emitter.probe, filter=each.filter, triggers=())
        own = replace(emitter, probe=probe)
        own.emit_quick(skip)
        own.emit_rest(skip)
        is_there, there = f.load(_word(emitter, is_there_offset(each.trigger))), f.label("there")
        f.branch(f.compare("eq", is_there, 0), skip, there)
        f.place(there)
        if each.hist is None:
            _act(emitter, each, skip)
        else:
            hist.emit(own, each.hist)
        f.jump(skip)
        f.place(skip)
        # What its filter has fetched is not there where that was not asked, or not so far.
        context.early.clear()
        context.early.update(before)


def _act(emitter: Emitter, each: CompiledTrigger, skip: str) -> None:
    trigger, is_on = each.trigger, each.trigger.command in _ON
    match trigger.command:
        case Command.TRACEON | Command.TRACEOFF:
            _change(emitter, each, (WORD_TRACING_ON, is_on), skip)
        case Command.ENABLE_EVENT | Command.DISABLE_EVENT:
            _change(emitter, each, (soft_enable_offset(trigger.soft_enable), is_on), skip)
        case _:
            _count(emitter, each, skip)
            _do(emitter, each)


def _do(emitter: Emitter, each: CompiledTrigger) -> None:
    f, trigger = emitter.context.out, each.trigger
    match trigger.command:
        case Command.STOP:
            f.put(_word(emitter, WORD_TRACING_ON), const(0))
            f.put(_word(emitter, WORD_STOPPED), const(1))
        case Command.SNAPSHOT:
            f.increase(_word(emitter, WORD_SNAPSHOTS), const(1))
        case Command.PAUSE:
            _wait(emitter, trigger)
        case Command.STACKTRACE:
            if emitter.context.asked_stack is not None:
                f.assign(emitter.context.asked_stack, const(1))
        case Command.ENABLE_HIST | Command.DISABLE_HIST:
            # Also what changes nothing has counted: hist_enable_count_trigger().
            for word in trigger.hists:
                f.put(_word(emitter, soft_enable_offset(word)), const(int(trigger.command in _ON)))
        case _:
            raise TypeError(f"{trigger.command} does something else")


def _wait(emitter: Emitter, trigger: Trigger) -> None:
    # On this CPU, until the guest has been stopped and goes on. Without interrupts: else it might
    # be stopped in one.
    context, f, code = emitter.context, emitter.context.out, emitter.context.code
    flags, flag = f.value("i64", code.flags), code.irqs_flag
    masked = f.op("and", flags, ~flag) if code.irqs_set else f.op("or", flags, flag)
    f.emit(code.set_flags.format(masked))
    word = per_cpu.load(context, context.abi.percpu + PERCPU_WORD)
    cpu = f.op("shl", f.op("lshr", word, CPU_SHIFT), PAUSED_CPU_SHIFT)
    f.put(_word(emitter, WORD_PAUSED), f.op("or", cpu, trigger.number))
    before, place = f.take(_word(emitter, WORD_PAUSES)), _word(emitter, WORD_GONE_ON)
    waits, again, late, done = (f.label(hint) for hint in ("waits", "again", "late", "done"))
    has_counter = context.abi.clock is None
    start = f.value("i64", code.counter) if has_counter else const(0)
    most = (_WAIT_NS << 32) // context.abi.ns_per_count if has_counter else _MOST_LOOKS
    with f.count_up(const(0)) as looks:
        f.emit(code.pause)
        f.branch(f.compare("ugt", f.load(place), before), done, waits)
        f.place(waits)
        now = f.value("i64", code.counter) if has_counter else looks
        f.branch(f.compare("ugt", f.op("sub", now, start), most), late, again)
        f.place(again)
    f.place(late)
    f.put(place, const(U64))
    f.jump(done)
    f.place(done)
    f.emit(code.set_flags.format(flags))


def _change(emitter: Emitter, each: CompiledTrigger, wanted: tuple[int, bool], skip: str) -> None:
    # Only what changes something counts: traceon_count_trigger(), event_enable_count_trigger().
    f, (offset, is_on) = emitter.context.out, wanted
    place, other = _word(emitter, offset), f.label("other")
    f.branch(f.compare("eq", f.load(place), int(is_on)), skip, other)
    f.place(other)
    _count(emitter, each, skip)
    f.put(place, const(int(is_on)))


def _count(emitter: Emitter, each: CompiledTrigger, skip: str) -> None:
    # Take one of what is left, or go on where nothing is.
    if each.trigger.count is None:
        return
    f = emitter.context.out
    place = _word(emitter, left_offset(each.trigger.number))
    again, some, done = f.label("again"), f.label("some"), f.label("done")
    f.jump(again)
    f.place(again)
    left = f.load(place)
    f.branch(f.compare("eq", left, 0), skip, some)
    f.place(some)
    before = f.exchange(place, left, f.op("sub", left, 1))
    f.branch(f.compare("eq", before, left), done, again, is_likely=True)
    f.place(done)
