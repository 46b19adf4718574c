"""A small guest with typed objects in its memory, and a task that waits in it for Python."""

from typing import cast

from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.arch.x86_64.machine import TASK_SIZE
from kprobes.arch.x86_64.paging import PageTables
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.handlers.arguments import HandlerPlace
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.memory import TaskMemory
from kprobes.model.upcall import WaitingVcpu
from kprobes.transport.stub import Stub
from kprobes.units import Addr
from tests.build import typed
from tests.build.kernel import TEXT, symbol
from tests.build.pages import NX, PAGE, USER, WRITE, FakeRam, Pages

DATA = 0xFFFF_8880_0000_0000
"""Two pages that the kernel may write."""
RODATA = DATA + 2 * PAGE
USER_DATA = 0x40_0000
"""Two pages of the task's; what is after them is not there."""
TASK = DATA + 0x1400
STACK = DATA + 0x1E00
FILE, DENTRY, NAME = DATA, DATA + 0x100, DATA + 0x200

_KERNEL_ROOT, USER_ROOT = 0x4_0000, 0x8_0000
_PAGES = {DATA: 0x1000, DATA + PAGE: 0x3000, RODATA: 0x4000, TEXT: 0x5000}
_USER_PAGES = {USER_DATA: 0x6000, USER_DATA + PAGE: 0x8000, USER_DATA + 4 * PAGE: 0x9000}
_RIGHTS = {RODATA: NX, TEXT: 0, USER_DATA + 4 * PAGE: USER | NX}


class Handled(Struct, frozen=True):
    """What a handler can see.

    Attributes:
        live: the kernel.
        ram: all memory.
        memory: of the task.
    """

    live: LiveKernel
    ram: FakeRam
    memory: TaskMemory

    def put(self, addr: int, value: int | bytes, size: int = 8) -> None:
        """Put something to an address, whoever may write there."""
        places = {**_PAGES, **_USER_PAGES}
        data = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        self.ram.write(places[addr & -PAGE] + addr % PAGE, data)

    def vcpu(self, **registers: int) -> WaitingVcpu:
        """Return a vCPU whose registers are their numbers in pt_regs, but for these."""
        names = [*self.live.guest.arch.upcall.saved, "sp", "ip"]
        usual = {name: 0x100 + n for n, name in enumerate(names)} | {"sp": STACK}
        return WaitingVcpu(
            upcall=1, cpu=1, task=Addr(TASK), page_table=USER_ROOT, registers=usual | registers
        )


def make_handled(*, is_typed: bool = True, arch: Arch = X86_64) -> Handled:
    """Make the guest of ``tests.build.typed``, with a file, its dentry and its name in memory."""
    ram = FakeRam(1 << 20)
    for root, places in ((_KERNEL_ROOT, _PAGES), (USER_ROOT, _USER_PAGES)):
        pages = Pages(ram, root)
        for virt, phys in places.items():
            pages.map(virt, phys, flags=_RIGHTS.get(virt, WRITE | USER | NX))
    tables = PageTables(ram, _KERNEL_ROOT)
    guest = Guest(
        address="fake",
        stub=cast("Stub", None),
        memory=GuestMemory(ram, tables),
        kernel=typed.KERNEL if is_typed else typed.UNTYPED,
        arch=arch,
        task_size=TASK_SIZE,
        tables=tables,
    )
    live = LiveKernel(lambda: guest)
    made = Handled(live, ram, live.memory_of(USER_ROOT))
    made.put(FILE, 0x1D, 4)
    made.put(FILE + 24, DENTRY)
    made.put(DENTRY + 36, 5, 4)
    made.put(DENTRY + 40, NAME)
    made.put(NAME, b"hosts\0")
    made.put(TASK + 8, 77, 4)
    return made


def make_place(name: str = "vfs_read", *, offset: int = 0, is_nop: bool = True) -> HandlerPlace:
    """Return a place in one of ``typed``'s functions."""
    addr = Addr(typed.KERNEL.symbols.named(name).addr + offset)
    return HandlerPlace(
        addr=addr,
        function=symbol(name, addr - offset),
        is_entry=offset == 0,
        following=Addr(addr + 5) if is_nop else None,
    )
