"""Probes with filters, and in plain Python which hits they choose."""

import re
from functools import cache

from msgspec.structs import replace

from kprobes.lang.filter import parse_filter
from kprobes.lang.filter_value import Known
from kprobes.model.filter import (
    ACCEPT,
    REJECT,
    Always,
    Compare,
    Header,
    Matches,
    Pattern,
    Relation,
    Source,
    Test,
    Within,
)
from kprobes.model.resolved import Resolved, Storage
from kprobes.resolve.resolve import filter_fields
from tests.build import reference
from tests.build.kernel import make_probe
from tests.build.machine import EXEC_ID, TASK, TGID, Machine
from tests.build.records import Value
from tests.build.reference import State

CPUS = 2
FUNCTION = (0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0100)


def known_of(probe: Resolved) -> Known:
    """Return what filters of a probe may name; its only function is ``g``."""

    def function(place: str | int) -> tuple[int, int] | None:
        return FUNCTION if place == "g" or place in range(*FUNCTION) else None

    return Known(fields=filter_fields(probe, of_guest=True), cpus=CPUS, function=function)


def make_filtered(text: str, filter_text: str, *, event_id: int = 1, **places: int) -> Resolved:
    """Resolve a definition on ``f`` with a filter."""
    probe = make_probe(text, event_id=event_id, **places)
    return replace(probe, filter=parse_filter(filter_text, known_of(probe)))


def is_accepted(machine: Machine, probe: Resolved, state: State) -> bool:
    """Whether a hit passes the probe's filter."""
    assert probe.filter is not None
    at = 0
    while at not in (ACCEPT, REJECT):
        step = probe.filter.steps[at]
        at = step.yes if _holds(machine, step.test, (probe, state)) else step.no
    return at == ACCEPT


def _holds(machine: Machine, test: Test, at: tuple[Resolved, State]) -> bool:
    match test:
        case Always(holds=holds):
            return holds
        case Matches(source=source, pattern=pattern):
            text = _text(machine, source, at)
            return text is not None and _regex(pattern).fullmatch(text) is not None
        case Within(source=source, size=size, ranges=ranges):
            number = _number(machine, source, at) & (1 << 8 * size) - 1
            return any(number in range(low, high + 1) for low, high in ranges)
        case Compare():
            return _compare(test, _number(machine, test.source, at))


def _compare(test: Compare, number: int) -> bool:
    left, right = (_as_size(n, test.size, is_signed=test.is_signed) for n in (number, test.value))
    match test.relation:
        case Relation.EQ:
            return left == right
        case Relation.NE:
            return left != right
        case Relation.LT:
            return left < right
        case Relation.LE:
            return left <= right
        case Relation.GT:
            return left > right
        case Relation.GE:
            return left >= right
        case Relation.AND:
            return left & right != 0


def _as_size(number: int, size: int, *, is_signed: bool) -> int:
    data = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
    return int.from_bytes(data, "little", signed=is_signed)


def _number(machine: Machine, source: Source, at: tuple[Resolved, State]) -> int:
    probe, state = at
    if not isinstance(source, Header):
        return _joined(probe, source, reference.values(machine, probe, state)[source])
    count = machine.preempt_count
    pid, context, _ = reference.header(machine, state, preempt_count=count)
    numbers = {
        Header.PID: pid,
        Header.TGID: machine.cpu.number(TASK + TGID, 4),
        Header.EXEC_ID: machine.cpu.number(TASK + EXEC_ID, 8),
        Header.TYPE: probe.layout.event_id,
        Header.IP: probe.layout.ip,
        Header.CPU: machine.number,
        Header.PREEMPT_COUNT: min(count & 0xFF, 15) | (context >> 27 & 15) << 4,
        Header.FLAGS: _flags(context),
    }
    return numbers[source]


def _flags(context: int) -> int:
    bits = (not context >> 24 & 1, context >> 26 & 1, context >> 25 & 1, context >> 16 & 15)
    more = (context >> 8 & 1, not context >> 31, context >> 20 & 15, context >> 9 & 127)
    return sum(bool(bit) << n for n, bit in enumerate((*bits, *more)))


def _joined(probe: Resolved, index: int, value: Value) -> int:
    # An array is one number; what cannot be read is 0.
    size = probe.layout.fields[index].size
    numbers = value if isinstance(value, tuple) else (value,)
    found = 0
    for n, number in enumerate(numbers):
        assert not isinstance(number, bytes)
        found |= ((number or 0) & (1 << 8 * size) - 1) << 8 * size * n
    return found


def _text(machine: Machine, source: Source, at: tuple[Resolved, State]) -> bytes | None:
    probe, state = at
    if isinstance(source, Header):
        text = reference.header(machine, state, preempt_count=0)[2]
        return text[:15].split(b"\0")[0]
    value = reference.values(machine, probe, state)[source]
    first = value[0] if isinstance(value, tuple) else value
    assert probe.layout.fields[source].storage is Storage.STRING
    assert not isinstance(first, int)
    return None if first is None else first[:-1]


@cache
def _regex(pattern: Pattern) -> re.Pattern[bytes]:
    pieces = (b"".join(map(_class, piece)) for piece in pattern.pieces)
    return re.compile(b".*".join(pieces), re.DOTALL)


def _class(allowed: int) -> bytes:
    members = (re.escape(bytes([byte])) for byte in range(256) if allowed >> byte & 1)
    inside = b"".join(members)
    return b"[" + inside + b"]" if inside else b"(?!)"
