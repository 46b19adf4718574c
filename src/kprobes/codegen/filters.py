"""A probe's filter as branches: a hit that it rejects reserves nothing and writes nothing.

Steps that need nothing of the guest's functions come before the guard, so that most hits that
are not wanted cost a load and a comparison.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from kprobes.codegen import filter_fields, filter_texts, per_cpu
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const
from kprobes.model import layout as record
from kprobes.model.abi import CPU_SHIFT, PERCPU_WORD
from kprobes.model.filter import (
    ACCEPT,
    REJECT,
    Always,
    Compare,
    Filter,
    Header,
    Matches,
    Relation,
    Source,
    Test,
    Within,
)
from kprobes.model.resolved import Resolved

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
    (record.CONTEXT_IRQS_ON, True, 0x01),
    (record.CONTEXT_NEED_RESCHED_LAZY, False, 0x02),
    (record.CONTEXT_NEED_RESCHED, False, 0x04),
    (record.CONTEXT_HARDIRQ, False, 0x08),
    (0x100, False, 0x10),
    (record.CONTEXT_NO_PREEMPT_RESCHED, True, 0x20),
    (record.CONTEXT_NMI, False, 0x40),
    (record.CONTEXT_SOFTIRQ & ~0x100, False, 0x80),
)


def quick_steps(probe: Resolved) -> int:
    """Return how many of a filter's first steps can come before the guard.

    Nothing after them leads back, and a hit comes out of them rejected or at the next step.
    """
    if probe.filter is None:
        return 0
    steps = probe.filter.steps
    plain = next((n for n, s in enumerate(steps) if _needs_guard(probe, s.test)), len(steps))
    for count in range(plain, 0, -1):
        targets = {t for step in steps[:count] for t in (step.yes, step.no)}
        ends = {REJECT, ACCEPT} if count == len(steps) else {REJECT}
        if targets <= ends | set(range(count + 1)):
            return count
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
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
        """Write the steps behind the guard; else as ``emit_quick``."""
        chosen = self.probe.filter
        if chosen is not None:
            self._emit(chosen, range(quick_steps(self.probe), len(chosen.steps)), reject)

    def _emit(self, chosen: Filter, steps: range, reject: str) -> None:
        f = self.context.out
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
                f.branch(filter_texts.is_within(f, number, test.ranges), yes, no)
            case Matches():
                text = filter_fields.text(self.context, self.probe, test, no)
                filter_texts.emit_match(f, test.pattern, text, targets)
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
            return filter_fields.number(self.context, self.probe, source, is_kept=is_kept)
        return self.context.out.resize(self._header(source), f"i{8 * size}")

    def _header(self, source: Header) -> Value:
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
                raise TypeError("a name is no number")
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
    depth = f.op("and", bits, record.CONTEXT_PREEMPT)
    if context.abi.task.migration_disabled is None:
        return depth
    depth = f.select(f.compare("ult", depth, _DEPTH), depth, const(_DEPTH, "i32"))
    migrate = f.op("and", f.op("lshr", bits, record.CONTEXT_MIGRATE_SHIFT), _DEPTH)
    return f.op("or", depth, f.op("shl", migrate, 4))
