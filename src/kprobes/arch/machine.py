"""What an architecture is to whoever reaches a guest: its memory, its tasks and its clock.

These facts need no kernel's symbols to be chosen: a stub names the architecture that it serves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kprobes.arch.borrowing import BorrowFacts
from kprobes.arch.listed import Read
from kprobes.arch.paging import Run
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.ports import Ram, Tables
from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class PagingFacts:
    """How a vCPU's registers lead to the kernel's memory.

    Attributes:
        registers: that are needed beyond those which a stub shows all at once.
        rare: others of which a guest's CPUs may have none.
        pc: the stub's name of the instruction pointer.
        check: raises TargetError for a vCPU that cannot run a 64-bit kernel yet.
        tables: (RAM, a vCPU's registers) to the page tables that may be the kernel's.
        again: (tables) to registers that lead to them.
        noted: (RAM, a kernel's note of itself) to the page tables that it tells of.
        image: (tables) to what they map of a kernel's image.
        window: (tables) to [start, stop) of where a kernel's image can be.
        link: (tables, major and minor) to where that kernel's text is without KASLR.
        link_step: KASLR moves by multiples of it.
        master: symbol of the page table that no process owns.
        task_size: (tables) to the end of user space.
        signature: (tables) to the bits of a return address that may hold its signature: where it
            is none, they are all ones.
    """

    registers: tuple[str, ...]
    rare: tuple[str, ...]
    pc: str
    check: Callable[[Mapping[str, int]], None]
    tables: Callable[[Ram, Mapping[str, int]], Sequence[Tables]]
    again: Callable[[Tables], Mapping[str, int]]
    noted: Callable[[Ram, VmcoreInfo], Sequence[Tables]]
    image: Callable[[Tables], tuple[Run, ...]]
    window: Callable[[Tables], tuple[int, int]]
    link: Callable[[Tables, tuple[int, int]], Addr]
    link_step: int
    master: str
    task_size: Callable[[Tables], int]
    signature: Callable[[Tables], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """Names in a kernel's text that mean something to whoever reads its code.

    Attributes:
        returns: what a return may be instead.
        indirect: patterns of names of what an indirect branch may be instead.
        no_return: functions that never return.
        unprobed: areas, named like ``__entry_text``, that the kernel puts on its probe blacklist
            while it boots.
        without_jump_tables: a kernel that has this symbol was compiled without jump tables.
        has_landings: (memory, the function tracer's sites) to whether calls through pointers land
            only where functions begin with an instruction for that.
        exception_words: (major and minor) to the s32 words of an exception table's entry.
        pointer: (site of the function tracer) to where its pointer to an ftrace_ops is; None where
            none has one.
        with_pointers: a kernel that has this symbol has them.
        listed_sites: (memory, what a file's list of the tracer's sites has) to the sites.
        references: (code, address) to the addresses of data that it names, or may name.
    """

    returns: tuple[str, ...]
    indirect: str
    no_return: tuple[str, ...]
    unprobed: tuple[str, ...]
    without_jump_tables: str
    has_landings: Callable[[Read, Iterable[int]], bool]
    exception_words: Callable[[tuple[int, int]], int]
    pointer: Callable[[int], Addr] | None
    with_pointers: str
    listed_sites: Callable[[Read, Sequence[int]], Sequence[int]]
    references: Callable[[bytes, int], Iterable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Where tasks are: what runs, what was interrupted, and what sleeps.

    Attributes:
        register: the stub's name of the register that has the running task while its CPU is in the
            kernel; None where a per-CPU word has it, and another the preempt count.
        preempt_count: where a register has it, the preempt count's path in it; else "".
        resched_mask: (kernel's version) to the bits of a task's flags that ask for rescheduling,
            the lazy one included.
        pc, sp: the stub's names of the instruction pointer and the stack pointer.
        returns: of registers that may have the address that a function will return to.
        excepted: the register that has what an exception interrupted, before its code has kept it,
            and the symbols between which that code is; or None.
        saved_sp: path in task_struct of a sleeping task's stack pointer.
        interrupted: bits of what follows an interrupted instruction pointer in pt_regs, and what
            they may be where it was the kernel's.
    """

    register: str | None
    preempt_count: str
    resched_mask: Callable[[tuple[int, int]], int]
    pc: str
    sp: str
    returns: tuple[str, ...]
    excepted: tuple[str, str, str] | None
    saved_sp: str
    interrupted: tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One architecture, as far as it must be known to reach a guest.

    Attributes:
        name: in ``Kernel.arch``.
        gdb: what a gdb stub calls it.
        elf: ELF's number for it.
        paging: how its memory is found.
        text: names in its kernels' text.
        borrowing: how its tasks are borrowed.
        task: where tasks are.
        counters: kernel functions that return what probes record as the time, where one line
            scales it for all CPUs; none where each has a line of its own.
        rate: the kernel's u32 of what its counter counts in a millisecond, or the stub's name of
            the register that has what it counts in a second; the other is "".
    """

    name: str
    gdb: str
    elf: int
    paging: PagingFacts
    text: TextFacts
    borrowing: BorrowFacts
    task: TaskFacts
    counters: tuple[str, ...]
    rate: tuple[str, str]
