"""Machine: an architecture's memory, tasks, clock and calls, as needed to reach a guest.

Nothing here needs a kernel's symbols to be chosen: a stub names the architecture that it serves.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from kprobes.arch.insn import Read
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.model.kernel import Kernel
from kprobes.ports import MappedRun, Ram, Tables, Translator
from kprobes.units import Addr, Phys

_EXECMEM_MODULE_TEXT = 0
_ALIGNMENT = 4096
_GFP_KERNEL = 0xCC0
_ANY_NODE = -1


class MappedMemory(Protocol):
    """A guest's memory and what maps it."""

    @property
    def tables(self) -> Translator:
        """Its kernel's page tables."""
        ...

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        ...


class ReturnPath(Struct, frozen=True, kw_only=True):
    """The kernel's own code that a task returns through when an injected call is done.

    Attributes:
        trap: where it can be stopped; nobody else comes there.
        then: what follows, one after the other; the last gives the task its registers back.
        register: by its stub's name, that leads from the trap to what follows, or "".
        size: bytes that the last takes off the stack, or 0 when it sets the stack pointer.
        spare: words that the trap takes off the stack before what follows: room for arguments.
    """

    trap: Addr
    then: tuple[Addr, ...]
    register: str = ""
    size: int = 0
    spare: int = 0


class CallSetup(Struct, frozen=True, kw_only=True):
    """The state in which a function begins that returns to a trap.

    Attributes:
        registers: by their stub's names.
        words: from the frame on, in memory.
    """

    registers: Mapping[str, int]
    words: tuple[int, ...] = ()


class FunctionCall(Struct, frozen=True, kw_only=True):
    """A function of the guest and its numbers."""

    function: Addr
    args: tuple[int, ...]


class CodeRequest(Struct, frozen=True, kw_only=True):
    """Executable memory that is to be allocated.

    Attributes:
        size: bytes.
        like: memory that was allocated before, writable and not executable.
        caller: whom the guest shall think that it is for.
    """

    size: int
    like: Addr
    caller: Addr


class InjectOps(Struct, frozen=True, kw_only=True):
    """How calls are injected into tasks, and memory for code is allocated.

    A frame is an address on the task's stack, below all that it uses.

    Attributes:
        pc, result: what a stub calls the instruction pointer and a function's result.
        number: what it calls a register that functions leave as it was, and no way needs: it has
            the call's number.
        switch: function that all system calls go through, entered with no lock held.
        system_call: what the names of their functions begin with.
        idle: functions that a CPU sleeps in.
        can_leave_idle: (registers) to whether an interrupt would wake it there.
        takes_interrupts: (registers) to whether a CPU has interrupts on.
        return_path: how a task comes back; raises TargetError where there is none.
        save_frame: (way, a task's registers) to its frame, and what is written there.
        set_up_call: (way, frame, function with its numbers) to how that begins.
        at_trap: (way, frame, registers of a stopped task) to those of it at the return trap, as
            after a call.
        returned_frame: (registers at a trap) to the frame of the call that returned.
        skip_trap: (memory, registers at a trap) to those after its first instruction.
        timer_message: (memory, kernel, handlers of timer interrupts) to a write to the machine's
            physical addresses that gives a CPU one at once; None where no such is known.
        code: what allocates memory within reach of the kernel's text.
        module_code: what allocates memory within reach of its modules, or None where the other is.
        page_size: (memory) to bytes of the smallest page that can be mapped.
        free_code: names of what takes it back.
    """

    pc: str
    result: str
    number: str
    switch: str
    system_call: str
    idle: tuple[str, ...]
    can_leave_idle: Callable[[Mapping[str, int]], bool]
    takes_interrupts: Callable[[Mapping[str, int]], bool]
    return_path: Callable[[MappedMemory, Kernel], ReturnPath]
    save_frame: Callable[[ReturnPath, Mapping[str, int]], tuple[int, bytes]]
    set_up_call: Callable[[ReturnPath, int, FunctionCall], CallSetup]
    at_trap: Callable[[ReturnPath, int, Mapping[str, int]], Mapping[str, int]]
    returned_frame: Callable[[Mapping[str, int]], int]
    skip_trap: Callable[[Read, Mapping[str, int]], Mapping[str, int]]
    timer_message: Callable[[MappedMemory, Kernel, Collection[int]], tuple[Phys, bytes] | None]
    code: Callable[[MappedMemory, Kernel, CodeRequest], FunctionCall]
    module_code: Callable[[Kernel, int], FunctionCall | None] | None
    page_size: Callable[[MappedMemory], int]
    free_code: tuple[str, ...]


def alloc_like_module(kernel: Kernel, size: int) -> FunctionCall | None:
    """Return what allocates so many bytes where a module would be, None without modules."""
    execmem = address_of(kernel, "execmem_alloc")
    if execmem is not None:
        return FunctionCall(function=execmem, args=(_EXECMEM_MODULE_TEXT, size))
    function = address_of(kernel, "module_alloc")
    return None if function is None else FunctionCall(function=function, args=(size,))


def alloc_between(
    kernel: Kernel, request: CodeRequest, *, start: int, stop: int, protection: int
) -> FunctionCall | None:
    """Return what allocates memory between two addresses, as module_alloc does; None without it.

    In 6.1: void *__vmalloc_node_range(unsigned long size, unsigned long align, unsigned long start,
    unsigned long end, gfp_t gfp_mask, pgprot_t prot, unsigned long vm_flags, int node, const void
    *caller).

    Args:
        kernel: that allocates it.
        request: what is asked for.
        start: the first address that it may have.
        stop: the first one that it may not.
        protection: a ``pgprot_t``.
    """
    function = address_of(kernel, "__vmalloc_node_range_noprof", "__vmalloc_node_range")
    if function is None:
        return None
    place = (request.size, _ALIGNMENT, start, stop)
    args = (*place, _GFP_KERNEL, protection, 0, _ANY_NODE, request.caller)
    return FunctionCall(function=function, args=args)


def is_idle(info: InjectOps, kernel: Kernel, registers: Mapping[str, int]) -> bool:
    """Whether a CPU sleeps where an interrupt would wake it.

    Args:
        info: of its architecture.
        kernel: that it runs.
        registers: its own, by their stub's names.
    """
    symbol = kernel.symbols.at(registers[info.pc])
    return symbol is not None and symbol.name in info.idle and info.can_leave_idle(registers)


def address_of(kernel: Kernel, *names: str) -> Addr | None:
    """Return the address of the first symbol that a kernel has, or None."""
    found = (kernel.symbols.find(name) for name in names)
    return next((symbol.addr for symbol in found if symbol is not None), None)


class PagingInfo(Struct, frozen=True, kw_only=True):
    """How a vCPU's registers lead to the kernel's memory.

    Attributes:
        registers: that are needed beyond those which a stub shows all at once.
        rare: others of which a guest's CPUs may have none.
        pc: the stub's name of the instruction pointer.
        check: raises TargetError for a vCPU that cannot run a 64-bit kernel yet.
        tables: (RAM, a vCPU's registers) to the page tables that may be the kernel's.
        again: (tables) to registers that lead to them.
        noted: (RAM, a kernel's note of itself) to the page tables that it tells of.
        images: (tables) to what they map of each piece that may be a kernel's image.
        window: (tables) to [start, stop) of where a kernel's image can be.
        link: (tables, major and minor) to where that kernel's text is without KASLR.
        link_step: KASLR moves by multiples of it.
        master: symbol of the page table that no process owns.
        master_user: a function that reads where that is, for kernels without names of data; ""
            where the registers have that table.
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
    images: Callable[[Tables], Sequence[tuple[MappedRun, ...]]]
    window: Callable[[Tables], tuple[int, int]]
    link: Callable[[Tables, tuple[int, int]], Addr]
    link_step: int
    master: str
    master_user: str
    task_size: Callable[[Tables], int]
    signature: Callable[[Tables], int]


class TextOps(Struct, frozen=True, kw_only=True):
    """Names in a kernel's text that mean something to whoever reads its code.

    Attributes:
        returns: what a return may be instead.
        indirect: patterns of names of what an indirect branch may be instead.
        no_return: functions that never return.
        unprobed: areas, named like ``__entry_text``, that the kernel puts on its probe blacklist
            while it boots.
        starting: functions that run while a CPU starts, before it has the kernel's memory; the
            kernel's own blacklist lacks them.
        without_jump_tables: a kernel that has this symbol was compiled without jump tables.
        has_landing_pads: (memory, the function tracer's sites) to whether calls through pointers
            land only where functions begin with an instruction for that.
        exception_words: (major and minor) to the s32 words of an exception table's entry.
        pointer: (site of the function tracer) to where its pointer to an ftrace_ops is; None where
            none has one.
        with_pointers: a kernel that has this symbol has them.
        listed_sites: (memory, what a file's list of the tracer's sites has) to the sites.
        references: (code, address) to the addresses of data that it names, or may name.
        counted: (code) to the places, in structs, of numbers of 8 bytes that it adds 1 to.
    """

    returns: tuple[str, ...]
    indirect: str
    no_return: tuple[str, ...]
    unprobed: tuple[str, ...]
    starting: tuple[str, ...]
    without_jump_tables: str
    has_landing_pads: Callable[[Read, Iterable[int]], bool]
    exception_words: Callable[[tuple[int, int]], int]
    pointer: Callable[[int], Addr] | None
    with_pointers: str
    listed_sites: Callable[[Read, Sequence[int]], Sequence[int]]
    references: Callable[[bytes, int], Iterable[int]]
    counted: Callable[[bytes], Iterable[int]]


class TaskInfo(Struct, frozen=True, kw_only=True):
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


class Machine(Struct, frozen=True, kw_only=True):
    """One architecture, as far as it must be known to reach a guest.

    Attributes:
        name: in ``Kernel.arch``.
        gdb: what a gdb stub calls it.
        elf: ELF's number for it.
        paging: how its memory is found.
        text: names in its kernels' text.
        inject_ops: how calls are injected into its tasks.
        task: where tasks are.
        counters: kernel functions that return what probes record as the time, where one line
            scales it for all CPUs; none where each has a line of its own.
        rate: the kernel's u32 of what its counter counts in a millisecond, or the stub's name of
            the register that has what it counts in a second; the other is "".
    """

    name: str
    gdb: str
    elf: int
    paging: PagingInfo
    text: TextOps
    inject_ops: InjectOps
    task: TaskInfo
    counters: tuple[str, ...]
    rate: tuple[str, str]
