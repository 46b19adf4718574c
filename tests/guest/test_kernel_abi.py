"""Layouts that move between kernel releases."""

import pytest
from msgspec.structs import replace

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.x86_64.arch import X86_64
from kprobes.guest import kernel_abi
from kprobes.guest.guest import GuestMemory
from tests.build.a64_pages import Built
from tests.build.guest import make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

TASK_STRUCT = {
    f"task_struct.{name}": place
    for name, place in {
        "pid": (1352, 4),
        "tgid": (1356, 4),
        "self_exec_id": (1368, 8),
        "comm": (1912, 16),
        "thread_info.flags": (0, 8),
        "thread_info.preempt.count": (8, 4),
    }.items()
}


@pytest.mark.parametrize(
    ("version", "mask"),
    [
        ((5, 10), 0b001000),
        ((6, 12), 0b001000),
        ((6, 13), 0b011000),
        ((6, 17), 0b011000),
        ((6, 18), 0b110000),
        ((7, 2), 0b110000),
    ],
)
def test_the_need_resched_flags_move(version: tuple[int, int], mask: int) -> None:
    assert X86_64.machine.task.resched_mask(version) == mask


@pytest.mark.parametrize(
    ("name", "is_told_apart"),
    [
        ("kretprobe_trampoline", False),
        ("__kretprobe_trampoline", True),
        ("arch_rethook_trampoline", True),
    ],
)
def test_newer_kernels_tell_their_trampoline_apart(name: str, is_told_apart: bool) -> None:
    kernel = make_kernel([symbol(name, 0x40)])

    assert kernel_abi.kretprobe_trampoline(kernel) == (0x40 if is_told_apart else None)


def test_where_a_register_has_the_task_it_has_the_preempt_count() -> None:
    kernel = replace(make_kernel([], types=TASK_STRUCT), arch="aarch64")

    found = kernel_abi.task_abi(kernel)

    assert (found.current, found.preempt_count, found.resched_mask) == (0, 8, 2)


def test_where_no_register_has_the_task_symbols_or_members_of_one_have_it() -> None:
    types = TASK_STRUCT | {
        "pcpu_hot.current_task": (0x10, 8),
        "pcpu_hot.preempt_count": (0x18, 4),
    }
    symbols = [symbol("current_task", 0x2000), symbol("__preempt_count", 0x2008)]

    found = [
        kernel_abi.task_abi(make_kernel(named, types=types))
        for named in (symbols, [symbol("pcpu_hot", 0x3000)])
    ]

    places = [(each.current, each.preempt_count) for each in found]
    assert places == [(0x2000, 0x2008), (0x3010, 0x3018)]


@pytest.mark.parametrize(
    ("names", "size"),
    [
        ((), 16 << 10),
        (("__asan_load8_noabort",), 32 << 10),
        (("__hwasan_load8_noabort",), 32 << 10),
        (("kasan_report",), 16 << 10),
    ],
)
def test_stacks_are_twice_as_large_where_each_access_is_checked(
    names: tuple[str, ...], size: int
) -> None:
    kernel = make_kernel([symbol(name, TEXT) for name in names])

    assert kernel_abi.thread_size(make_memory(), kernel, X86_64.thread_size) == size


@pytest.mark.parametrize(("shift", "size"), [(12, 16 << 10), (14, 16 << 10), (16, 64 << 10)])
def test_a_stack_has_a_page_at_least(shift: int, size: int) -> None:
    built = Built(shift, 48)
    kernel = replace(make_kernel([]), arch="aarch64")

    found = kernel_abi.thread_size(
        GuestMemory(built.ram, built.tables), kernel, AARCH64.thread_size
    )

    assert found == size
