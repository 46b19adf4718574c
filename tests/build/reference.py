"""Record that a hit must leave, computed in plain Python from registers and memory."""

import struct
from collections.abc import Mapping, Sequence
from random import Random

from msgspec.structs import replace

from kprobes.model.abi import MAX_STRING
from kprobes.model.resolved import (
    ComputedValue,
    Constant,
    FieldFetch,
    Load,
    Operand,
    PerCpuAddress,
    RegisterValue,
    Resolved,
    StackValue,
    Storage,
    TaskAddress,
)
from kprobes.units import U64
from tests.build.machine import COMM, DATA_SIZE, FLAGS, KERNEL, MIGRATION, PID, TASK, USER, Machine
from tests.build.operations import operate
from tests.build.records import Value

State = Mapping[str, int]


def fill(machine: Machine, random: Random) -> None:
    """Put a task, strings and pointers into the guest's memory."""
    machine.cpu.write(TASK, random.randbytes(0x1000))
    for region in (KERNEL, USER):
        words = [_word(random).to_bytes(8, "little") for _ in range(DATA_SIZE // 8)]
        machine.cpu.write(region, b"".join(words))


def address(random: Random) -> int:
    """Return an address to fetch from: a good one, or one of the many bad ones."""
    start = random.choice([KERNEL, USER])
    inside = start + random.randrange(DATA_SIZE)
    bad = [0, 8, start - 4, 1 << 62, 1 << 47, U64 - 3, 0x7FFF_FFFF_F000, 0xFFFF_8000_0000_0000]
    return random.choice([*[inside] * 12, start + DATA_SIZE - random.randrange(10), *bad])


def values(machine: Machine, probe: Resolved, state: State) -> tuple[Value, ...]:
    """Return the fields of the record of a hit, as ``records.Record`` has them."""
    return tuple(_field(machine, fetch, (probe, state)) for fetch in probe.fetches)


def _field(machine: Machine, fetch: FieldFetch, at: tuple[Resolved, State]) -> Value:
    field = fetch.field
    match field.storage:
        case Storage.COMM:
            return machine.cpu.read(TASK + COMM, 16)
        case Storage.TEXT:
            return field.text
        case Storage.STACK:
            return packed([at[0].layout.ip, *machine.readers.stack])
        case Storage.STRING if field.count is None:
            return _string(machine, fetch.operand, at)
        case Storage.STRING:
            return _strings(machine, fetch.operand, field.count or 0, at)
        case Storage.NUMBER | Storage.DURATION:
            return _numbers(machine, fetch, at)


def packed(addresses: Sequence[int]) -> bytes:
    """Return a stack as a record has it."""
    return struct.pack(f"<{len(addresses)}Q", *addresses)


def header(machine: Machine, state: State, *, preempt_count: int) -> tuple[int, int, bytes]:
    """Return pid, context and comm of the record of a hit."""
    task = machine.abi.task
    flags = machine.cpu.number(TASK + FLAGS, 4)
    now = task.resched_mask & -task.resched_mask
    context = preempt_count | (state["flags"] >> 9 & 1) << 24
    context |= bool(flags & now) << 25 | bool(flags & task.resched_mask & ~now) << 26
    if task.migration_disabled is not None:
        context |= (machine.cpu.number(TASK + MIGRATION, 2) & 15) << 27
    pid, comm = machine.cpu.number(TASK + PID, 4), machine.cpu.read(TASK + COMM, 16)
    return pid, context, comm


def _word(random: Random) -> int:
    if random.random() < 0.4:
        return address(random)
    text = bytes(random.choice(b"abc\0" if random.random() < 0.3 else b"abc") for _ in range(8))
    return int.from_bytes(text, "little")


def _numbers(machine: Machine, fetch: FieldFetch, at: tuple[Resolved, State]) -> Value:
    field = fetch.field
    if isinstance(fetch.operand, Load):
        data = _fetched(machine, fetch.operand, field.room, at)
    else:
        plain = _plain(machine, fetch.operand, at)
        data = None if plain is None else (plain & U64).to_bytes(8, "little")[: field.size]
    if data is None:
        return None
    parts = [data[start : start + field.size] for start in range(0, len(data), field.size)]
    found = tuple(_cut(int.from_bytes(part, "little"), fetch) for part in parts)
    return found if field.count is not None else found[0]


def _cut(number: int, fetch: FieldFetch) -> int:
    return number >> fetch.bit_offset & (1 << fetch.bit_width) - 1 if fetch.bit_width else number


def _string(machine: Machine, operand: Operand, at: tuple[Resolved, State]) -> bytes | None:
    assert isinstance(operand, Load)
    place = _place(machine, operand, at)
    if place is None:
        return None
    data = _memory(machine, place, is_user=operand.is_user)
    end = data.find(b"\0") + 1
    if end:
        return data[:end]
    # The last byte that has room is read too: it may fault.
    return data[:-1] + b"\0" if len(data) == MAX_STRING else None


def _strings(
    machine: Machine, operand: Operand, count: int, at: tuple[Resolved, State]
) -> tuple[bytes | None, ...]:
    assert isinstance(operand, Load)
    pointers = operand.base
    assert isinstance(pointers, Load)
    each = (replace(pointers, offset=pointers.offset + 8 * n) for n in range(count))
    return tuple(_string(machine, replace(operand, base=pointer), at) for pointer in each)


def _plain(machine: Machine, operand: Operand, at: tuple[Resolved, State]) -> int | None:
    probe, state = at
    known = {"ip": probe.layout.ip + 1, "cs": 0x10, "ss": 0x18, "orig_ax": 0}
    match operand:
        case Constant(value=value):
            return value
        case RegisterValue(name=name):
            return known.get(name, state.get(name, -1))
        case StackValue(slot=slot):
            place, size = state["sp"] + 8 * slot, machine.abi.thread_size
            is_inside = place & -size == state["sp"] & -size
            return machine.cpu.number(place) if is_inside else 0
        case TaskAddress():
            return TASK
        case PerCpuAddress(base=base, cpu_offset=cpu_offset):
            assert cpu_offset is not None
            inner = _plain(machine, base, at)
            return None if inner is None else inner + machine.cpu.number(machine.percpu(cpu_offset))
        case ComputedValue(operation=operation):
            left, right = (_plain(machine, each, at) for each in (operand.left, operand.right))
            return None if left is None or right is None else operate(operation, left, right)
        case Load():
            data = _fetched(machine, operand, 8, at)
            return None if data is None else int.from_bytes(data, "little")
        case _:
            raise AssertionError(operand)


def _place(machine: Machine, load: Load, at: tuple[Resolved, State]) -> int | None:
    base = _plain(machine, load.base, at)
    return None if base is None else base + load.offset & U64


def _fetched(machine: Machine, load: Load, size: int, at: tuple[Resolved, State]) -> bytes | None:
    place = _place(machine, load, at)
    if place is None:
        return None
    data = _memory(machine, place, size, is_user=load.is_user)
    return data if len(data) == size else None


def _memory(machine: Machine, place: int, size: int = MAX_STRING, *, is_user: bool) -> bytes:
    """Return what can be read before the first byte that cannot."""
    if is_user and place >= machine.abi.task_size:
        return b""
    return machine.cpu.read(place, machine.cpu.extent(place, size))
