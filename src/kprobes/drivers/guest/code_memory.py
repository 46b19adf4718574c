"""Memory of the guest for the probes' code: executable, and never writable at the same time.

What allocates it is the architecture's to know. Memory arrives writable and not executable; on x86
from a cache of large pages, 2e45474ab14f ("execmem: add support for cache of large ROX pages")
(v6.13), executable and read-only. Our code is written from outside, through physical memory.
"""

from dataclasses import dataclass

from kprobes.arch.borrowing import Called, Wanted
from kprobes.drivers.guest.borrow import Task
from kprobes.drivers.guest.layout import first_of
from kprobes.drivers.loans import Kind, Loan
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import Addr

_INT = 0xFFFF_FFFF
_SEAL = ("set_memory_ro", "set_memory_x")
_UNSEAL = ("set_memory_nx", "set_memory_rw")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeMemory:
    """Executable memory.

    Attributes:
        addr, size: where, in bytes.
    """

    addr: Addr
    size: int

    @property
    def stop(self) -> Addr:
        """The first address behind it."""
        return Addr(self.addr + self.size)


def allocate_code(task: Task, kernel: Kernel, size: int, *, like: Addr) -> CodeMemory:
    """Allocate executable memory within reach of the kernel's text.

    Args:
        task: that allocates it.
        kernel: that runs there.
        size: bytes.
        like: memory that it has allocated for data.

    Raises:
        TargetError: the guest has none left, or refuses; the ledger tells what it has lent.
    """
    wanted = Wanted(size=size, like=like, caller=task.landing.place)
    found = _allocate(task, kernel, size, task.landing.facts.code(task.memory, kernel, wanted))
    if found is None:
        raise TargetError("the guest has no memory left for the probes' code")
    return found


def allocate_module_code(task: Task, kernel: Kernel, size: int) -> CodeMemory | None:
    """Allocate executable memory within reach of modules.

    Returns:
        It, or None: where the other is in reach of them, without modules, and where none is left:
        most probes are not of modules.

    Raises:
        TargetError: the guest refuses to make it executable; the ledger tells what it has lent.
    """
    find = task.landing.facts.module_code
    called = find(kernel, size) if find is not None else None
    return None if called is None else _allocate(task, kernel, size, called)


def unseal(task: Task, kernel: Kernel, seal: Loan) -> None:
    """Make the pages of code writable again and nothing more, as they arrived.

    They have another mapping, which was made read-only too: whoever gets them next would fault.
    """
    pages = seal.size // _page_size(task)
    task.call(first_of(kernel, _UNSEAL[0]), seal.addr, pages)
    task.call(first_of(kernel, _UNSEAL[1]), seal.addr, pages, returns=seal)


def free_code(task: Task, kernel: Kernel, code: Loan) -> None:
    """Give unsealed code memory back. Nothing may run or return into it any more."""
    task.call(first_of(kernel, *task.landing.facts.free_code), code.addr, returns=code)


def _allocate(task: Task, kernel: Kernel, size: int, called: Called) -> CodeMemory | None:
    loan = Loan(kind=Kind.CODE, addr=0, size=size)
    addr = Addr(task.call(called.function, *called.args, lends=loan))
    if addr == 0:
        return None
    (first, *_) = task.memory.tables.mapped_runs(addr, addr + _page_size(task))
    if first.is_writable or not first.is_executable:
        _seal(task, kernel, Loan(kind=Kind.SEAL, addr=addr, size=size))
    return CodeMemory(addr=addr, size=size)


def _seal(task: Task, kernel: Kernel, seal: Loan) -> None:
    pages = seal.size // _page_size(task)
    # They return an int: the upper half of the register means nothing.
    read_only = task.call(first_of(kernel, _SEAL[0]), seal.addr, pages, lends=seal) & _INT
    if read_only or task.call(first_of(kernel, _SEAL[1]), seal.addr, pages) & _INT:
        raise TargetError("the guest refused to make the probes' code executable")


def _page_size(task: Task) -> int:
    return task.landing.facts.page_size(task.memory)
