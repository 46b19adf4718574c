"""Memory for code that a guest has not."""

from types import SimpleNamespace
from typing import cast

import pytest

from kprobes.arch.aarch64.inject import INJECT_OPS as AARCH64
from kprobes.arch.x86_64.inject import INJECT_OPS as X86_64
from kprobes.errors import TargetError
from kprobes.guest.allocations import Allocation, Kind
from kprobes.guest.inject import Task
from kprobes.guest.release import allocate_code, allocate_module_code
from kprobes.units import Addr
from tests.build.kernel import TEXT, make_kernel, symbol

KERNEL = make_kernel([symbol("module_alloc", TEXT)])


class FullGuest:
    """A task of a guest that has nothing left to lend."""

    def __init__(self, info: object) -> None:
        self.trap = SimpleNamespace(info=info, place=Addr(TEXT + 0x100))
        self.memory: object = None
        self.allocated: list[Allocation] = []

    def call(self, function: Addr, *args: int, allocates: Allocation) -> int:
        assert (function, args) == (TEXT, (8192,))
        self.allocated.append(allocates)
        return 0


def test_without_room_near_modules_the_rest_can_still_be_probed() -> None:
    guest = FullGuest(AARCH64)

    assert allocate_module_code(cast("Task", guest), KERNEL, 8192) is None
    assert guest.allocated == [Allocation(kind=Kind.CODE, addr=0, size=8192)]


def test_where_all_is_in_reach_of_the_text_modules_have_no_memory_of_their_own() -> None:
    guest = FullGuest(X86_64)

    assert allocate_module_code(cast("Task", guest), KERNEL, 8192) is None
    assert guest.allocated == []


def test_a_kernel_that_cannot_have_memory_for_code_yet_is_not_asked_for_it() -> None:
    info = symbol("execmem_info", TEXT + 0x1000, type="d")
    guest = FullGuest(X86_64)
    guest.memory = SimpleNamespace(u64={info.addr: 0}.__getitem__)
    kernel = make_kernel([symbol("module_alloc", TEXT), info])

    with pytest.raises(TargetError, match="cannot have memory for code yet"):
        allocate_code(cast("Task", guest), kernel, 8192, like=Addr(0))

    assert guest.allocated == []


def test_without_room_near_the_text_nothing_can_be_probed() -> None:
    with pytest.raises(TargetError, match="no memory left for the probes' code"):
        allocate_code(cast("Task", FullGuest(X86_64)), KERNEL, 8192, like=Addr(TEXT))
