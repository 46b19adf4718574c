"""Members of task_struct by their looks: where memory is damaged or hostile they are not found.

That those of real kernels are found is in tests/system/test_no_types.py.
"""

import struct
from collections.abc import Sequence

import pytest

from kprobes.arch.registry import machine
from kprobes.errors import TargetError
from kprobes.image.task_members import task_members
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import make_kernel, symbol

FIRST, STACKS, SIGNALS = (0xFFFF_8880_0000_0000 + (n << 28) for n in range(3))
SIZE, COUNT, STACK_SIZE = 12 << 10, 9, 16 << 10
MEMBERS = {
    "signal_struct.thread_head": 16,
    "task_struct.stack": 32,
    "task_struct.on_rq": 104,
    "task_struct.tasks": 688,
    "task_struct.pid": 912,
    "task_struct.tgid": 916,
    "task_struct.stack_canary": 920,
    "task_struct.thread_node": 1096,
    "task_struct.comm": 1400,
    "task_struct.signal": 1480,
    "task_struct.thread.sp": 2136,
    "task_struct.thread_info.flags": 0,
}
MAGIC = 0x57AC6E9D
KERNEL = make_kernel([symbol("init_task", FIRST, type="D")])


def place(member: str) -> int:
    return MEMBERS[f"task_struct.{member}"]


def task(number: int) -> int:
    return FIRST + number * SIZE


def write(memory: SparseMemory, number: int, at: int, form: str, *values: object) -> None:
    data = bytearray(memory.pieces[task(number)])
    struct.pack_into(form, data, at, *values)
    memory.pieces[task(number)] = bytes(data)


def tasks(order: Sequence[int] = range(COUNT)) -> SparseMemory:
    """Tasks in a list, each with a stack and a process of its own."""
    memory = SparseMemory()
    ring = dict(zip(order, [*order[1:], order[0]], strict=True))
    before = {after: number for number, after in ring.items()}
    for number in range(COUNT):
        stack, process = STACKS + number * STACK_SIZE, SIGNALS + number * 64
        node = task(number) + place("thread_node")
        memory.pieces[task(number)] = bytes(SIZE)
        memory.pieces[stack] = struct.pack("<Q", MAGIC)
        memory.pieces[process + 16] = struct.pack("<QQ", node, node)
        write(memory, number, place("stack"), "<Q", stack)
        write(memory, number, place("on_rq"), "<4i", number == 0, 120, 120, 120)
        links = (task(each[number]) + place("tasks") for each in (ring, before))
        write(memory, number, place("tasks"), "<QQ", *links)
        canary = 0x1234_5678_9ABC_0000 + (number << 8)
        write(memory, number, place("pid"), "<iiQ", number, number, canary)
        write(memory, number, place("thread_node"), "<QQ", process + 16, process + 16)
        write(memory, number, place("comm"), "16s", b"swapper/0" if number == 0 else b"sh")
        write(memory, number, place("signal"), "<Q", process)
        write(memory, number, place("thread.sp"), "<Q", stack + 8000 + number)
    return memory


def found(memory: SparseMemory) -> dict[str, int]:
    return dict(task_members(memory, KERNEL, machine("x86_64"), STACK_SIZE))


def test_members_are_found_by_what_only_they_have() -> None:
    assert found(tasks()) == MEMBERS


def test_who_has_ended_has_no_stack() -> None:
    memory = tasks()
    write(memory, 5, place("stack"), "<Q", 0)

    assert found(memory) == MEMBERS


def test_some_of_many_tasks_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kprobes.image.task_members._MOST", COUNT - 3)

    assert found(tasks()) == MEMBERS


@pytest.mark.timeout(60)
def test_a_list_of_nothing_but_ended_tasks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kprobes.image.task_members._MAX_TASKS", COUNT - 1)

    with pytest.raises(TargetError, match="have their tasks cannot be told"):
        found(tasks())


def test_what_need_not_be_there_is_left_out() -> None:
    memory = tasks()
    write(memory, 1, place("stack_canary"), "<Q", 0x1234)
    write(memory, 1, place("on_rq"), "<i", 7)

    optional = {"task_struct.stack_canary", "task_struct.on_rq"}
    assert found(memory) == {k: v for k, v in MEMBERS.items() if k not in optional}


@pytest.mark.parametrize("second", [place("stack") + 8, place("stack") + 100])
def test_what_two_members_could_be_is_none(second: int) -> None:
    memory = tasks()
    for number in range(COUNT):
        write(memory, number, second & ~7, "<Q", STACKS + number * STACK_SIZE)

    with pytest.raises(TargetError, match="have their stack cannot be told"):
        found(memory)


@pytest.mark.parametrize(
    ("member", "form", "value", "why"),
    [
        ("comm", "8s", b"another", "comm"),
        ("tasks", "<Q", 0xFFFF_8880_0000_0000 + SIZE, "tasks"),
        ("pid", "<i", 7, "pid"),
        ("stack", "<Q", 1 << 40, "stack"),
    ],
)
def test_a_damaged_first_task_is_told(member: str, form: str, value: object, why: str) -> None:
    memory = tasks()
    write(memory, 0, place(member), form, value)

    with pytest.raises(TargetError, match=f"have their {why} cannot be told"):
        found(memory)


def test_a_list_without_end_is_none() -> None:
    memory = tasks()
    # From the last one back to the second, for ever.
    write(memory, COUNT - 1, place("tasks"), "<Q", task(1) + place("tasks"))
    write(memory, 1, place("tasks") + 8, "<Q", task(COUNT - 1) + place("tasks"))

    with pytest.raises(TargetError, match="have their tasks cannot be told"):
        found(memory)


def test_kernels_whose_first_task_is_not_known_are_told() -> None:
    with pytest.raises(TargetError, match="first task"):
        task_members(tasks(), make_kernel([]), machine("x86_64"), STACK_SIZE)
    with pytest.raises(TargetError, match="not where they should be"):
        found(SparseMemory())
